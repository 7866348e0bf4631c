# SPDX-License-Identifier: Apache-2.0
"""Time of predictions with both models of a client against one model."""

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

import perada
from benchmarks.timing import processor_clock, ratio, take_turns
from perada.data import FederatedData
from perada.federation.typical_images import MAX_EXAMPLES
from perada.results.models import both_predictor
from perada.results.predictors import BothModelsPredictor, Predictor

CLIENTS = 2
IMAGES_PER_CLIENT = MAX_EXAMPLES
"""Training images, with whose statistics those of an image are compared: as many as there can be."""
CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network whose last two blocks have adapters, as in the recipe `quickstart`.

    Attributes:
        backbone: Name in timm.
        adapter: What is trained.
        side: Height and width of images in pixels.
        batch_sizes: Numbers of images that are predicted at once.
        passes: Number of predictions in a turn, since one of a small network takes less time than a clock's tick.
    """

    backbone: str
    adapter: str
    side: int
    batch_sizes: tuple[int, ...]
    passes: int = 1


NETWORKS = (
    Network("test_resnet", "residual", 32, (1, 16, 64), passes=20),
    Network("resnet18", "residual", 224, (1, 16)),
    Network("vit_small_patch16_224", "bottleneck", 224, (1, 16)),
)


@dataclass(frozen=True)
class Case:
    """Which models the images of a batch need.

    Attributes:
        needs: Title.
        personal_share: Weight of the personal model for images that look like the client's own.
        own: Whether the images look like these.
    """

    needs: str
    personal_share: float
    own: bool


CASES = (
    Case("both models", personal_share=0.5, own=True),
    Case("the personal one", personal_share=1.0, own=True),
    Case("the global one", personal_share=0.5, own=False),
)
QUICK_NETWORKS = (Network("test_resnet", "residual", 32, (1,)),)


def prediction_cost(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Time predictions of a client by its personal model, and by both, in processor time on a CPU."""
    for network in QUICK_NETWORKS if quick else NETWORKS:
        predictors = _predictors(network, device)
        for batch_size in network.batch_sizes:
            for case in CASES:
                images = predictors.own_images[:batch_size]
                if not case.own:
                    # Far brighter than any image of the client.
                    images = images + 100
                both = predictors.both[case.personal_share]
                with torch.inference_mode():
                    is_typical = both(images).typical
                    assert is_typical is not None
                    if not bool((is_typical == case.own).all()):
                        raise ValueError(f"{case.needs}: an image was taken for one of the other kind")
                    ways = {
                        "one": partial(_predict, predictors.one_model, images, network.passes),
                        "rule": partial(_predict, both, images, network.passes),
                    }
                    seconds = take_turns(ways, device, repeats, warm_up=2, clock=processor_clock)
                row: dict[str, Any] = {"network": network.backbone, "images at once": batch_size, "needs": case.needs}
                for name, title in (("one", "one model"), ("rule", "the rule")):
                    seconds_per_pass = statistics.median(seconds[name]) / network.passes
                    row[f"{title}, ms per image"] = round(1e3 * seconds_per_pass / batch_size, 2)
                yield row | {"rule / one model": ratio(seconds["rule"], seconds["one"]), "frozen": _frozen_share(both)}


def _predict(predictor: Predictor, images: torch.Tensor, passes: int) -> None:
    """Predict the same images several times."""
    for _ in range(passes):
        predictor(images)


@dataclass(frozen=True)
class Predictors:
    """What predicts for a client after one step of training.

    Attributes:
        one_model: Predicts with its personal model.
        both: Predicts with both models, by the weight of the personal one.
        own_images: Its training images, prepared.
    """

    one_model: Predictor
    both: dict[float, BothModelsPredictor]
    own_images: torch.Tensor


def _predictors(network: Network, device: torch.device) -> Predictors:
    """Train a network for one step, and return what predicts for the first client."""
    random = torch.Generator().manual_seed(0)
    shape = (IMAGES_PER_CLIENT, 3, network.side, network.side)
    clients = []
    for _ in range(CLIENTS):
        images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        labels = torch.arange(IMAGES_PER_CLIENT) % CLASSES
        clients.append(TensorDataset(images, labels))
    test = [TensorDataset(client.tensors[0][:2], client.tensors[1][:2]) for client in clients]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = perada.finetune(
            network.backbone,
            FederatedData(clients, test),
            algorithm="ditto",
            adapter=network.adapter,
            adapter_options={"last_blocks": 2},
            pretrained=False,
            rounds=1,
            local_steps=1,
            batch_size=2,
            evaluation={"prediction": "both"},
            accelerator=device.type,
            logger=False,
            enable_progress_bar=False,
        )
    state_of_both = run.state_of_both(0)
    assert state_of_both is not None
    both = {}
    for case in CASES:
        share = torch.tensor(case.personal_share, dtype=torch.double)
        both[case.personal_share] = both_predictor(run, 0, state_of_both | {"personal_share": share}, device)
    own_images = run.preprocessing.batch(list(clients[0].tensors[0][: max(network.batch_sizes)]))
    return Predictors(run._make_predictor(0, "personal", device), both, own_images)


def _frozen_share(both: BothModelsPredictor) -> str:
    """Return the share of a pass that the frozen layers before the first adapter take, which run once."""
    trunk = both._trunk
    return "0 %" if trunk is None else f"{100 * trunk.share:.0f} %"
