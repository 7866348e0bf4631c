# SPDX-License-Identifier: Apache-2.0
"""Local-GD on the classification head of a frozen pretrained backbone (panels (h) and (i)).

The backbone is run once over all images. What :func:`perada.finetune` then trains is the head, on the vectors that the
backbone feeds it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from perada.api import finetune
from perada.core.seeding import derive_seed, generator
from perada.core.states import State
from perada.data import Digits, DominantClass, FashionMNIST, FederatedData
from perada.data.batches.transforms import prepare_images
from perada.data.partitions import Split
from perada.models.backbones import build_backbone
from perada.server import Aggregation, Mean, ModifiedLocalGD, ServerRule
from perada.studies.compare.running import quiet
from perada.studies.local_gd_curves import Advance, Counts, Curves
from perada.studies.local_gd_linear import direction_distance

WEIGHTS = {"fashion_mnist": "perada:digits_test_resnet", "digits": "perada:fashion_test_resnet"}
"""Shipped weights of a backbone that has not seen the images: those of the other set."""


@dataclass(frozen=True)
class HeadSettings(Counts):
    """The head of a pretrained backbone, panels (h) and (i).

    Args:
        dataset: Images: ``fashion_mnist``, or ``digits``, which needs no files.
        root: Folder of Fashion-MNIST.
        download: Fetch Fashion-MNIST if it is missing.
        backbone: A timm name, or ``hf:`` and a transformers name or folder.
        pretrained: Its weights: a file, a folder or a shipped name; by default those shipped for the other set.
        image_size: Height and width in pixels of the backbone's input.
        nodes: Nodes M; half of the images of each are of one class.
        rounds: Communication rounds R.
        local_steps: L; the centralized head is trained R · L steps.
        batch_size: Images in a step.
        lr: Learning rate.
    """

    dataset: Literal["fashion_mnist", "digits"] = "fashion_mnist"
    root: str | None = None
    download: bool = False
    backbone: str = "test_resnet"
    pretrained: str | None = None
    image_size: int = 32
    nodes: int = 10
    rounds: int = 60
    local_steps: int = 60
    batch_size: int = 128
    lr: float = 0.01


@dataclass(frozen=True)
class Vectors:
    """What the backbone makes of a set of images: (N, F) of the training split, (N', F) of the test split."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class Recorded(ServerRule):
    """Another rule whose results are kept in ``states``, so that every round can be looked at."""

    def __init__(self, rule: ServerRule) -> None:
        self.rule, self.weighted = rule, rule.weighted
        self.states: list[State] = []

    def __call__(self, given: Aggregation) -> State:
        """Aggregate, and keep what comes out."""
        self.states.append(self.rule(given))
        return self.states[-1]


def load_images(settings: HeadSettings) -> list[tuple[Tensor, Tensor]]:
    """Images (N, 1, H, W) uint8 and labels (N,), of the training split and of the test split.

    Raises:
        FileNotFoundError: If Fashion-MNIST is missing.
    """
    data = Digits() if settings.dataset == "digits" else FashionMNIST(settings.root, settings.download)
    loaded = []
    try:
        data.download()
        for split in (data.with_split(True), data.with_split(False)):
            assert split.images is not None and split.labels is not None  # both sets are read whole
            loaded.append((split.images, split.labels))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; or choose --head.dataset=digits, which needs no files") from error
    return loaded


def vectors(settings: HeadSettings) -> Vectors:
    """Run the frozen backbone over both splits.

    Raises:
        FileNotFoundError: If images or weights are missing.
    """
    backbone = build_backbone(
        settings.backbone,
        pretrained=WEIGHTS[settings.dataset] if settings.pretrained is None else settings.pretrained,
        image_size=settings.image_size,
    )
    fed: list[Tensor] = []
    head = backbone.model.get_submodule(backbone.head)
    head.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].flatten(1)))
    parts = []
    for images, labels in load_images(settings):
        fed.clear()
        with torch.no_grad():
            for chunk in torch.split(images, 512):
                backbone.model(prepare_images(chunk, backbone.image, settings.image_size))
        parts += [torch.cat(fed), labels]
    return Vectors(*parts)


def head_curves(settings: HeadSettings, seed: int, advance: Advance) -> Curves:
    """Train heads with Local-GD, Modified Local-GD and centralized, from the same start.

    Returns:
        For each of ``plain`` and ``modified``, by round: ``…_central``, the distance in direction to the trained
        centralized head (weight and bias as one vector), and ``…_accuracy`` on the test images. With the same steps
        behind it: ``central_accuracy``. ``images`` of each node.
    """
    data = vectors(settings)
    advance("features")
    labels, index = data.train_labels.numpy(), np.arange(len(data.train_labels))
    none = Split(labels[:0], index[:0])
    seeded = derive_seed(seed, "local-gd/nodes")
    shares, _ = DominantClass(settings.nodes).split(Split(labels, index), none, seeded)
    federated = [torch.as_tensor(rows) for rows in shares]
    everything = [torch.cat(federated).sort()[0]]
    network = _network(data, seed)
    paths = {}
    runs = (("plain", Mean(), federated), ("modified", ModifiedLocalGD(), federated), ("central", Mean(), everything))
    for name, rule, rows in runs:
        paths[name] = _train(network, data, rows, rule, settings, seed)
        advance(f"head, {name}")
    last = _flat(paths["central"][-1])
    curves: Curves = {"images": [float(len(rows)) for rows in federated]}
    for name, path in paths.items():
        curves[f"{name}_accuracy"] = [_accuracy(state, data) for state in path]
        if name != "central":
            curves[f"{name}_central"] = [direction_distance(_flat(state), last).item() for state in path]
    return curves


def _network(data: Vectors, seed: int) -> nn.Module:
    """A linear layer on vectors, drawn as torch draws them, but from a stream of its own."""
    width, classes = data.train.shape[1], int(data.train_labels.max()) + 1
    layer = nn.Linear(width, classes)
    draw = generator(seed, "local-gd/head")
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.uniform_(-(width**-0.5), width**-0.5, generator=draw)
    return nn.Sequential(nn.Flatten(), layer)


def _train(
    network: nn.Module, data: Vectors, rows: list[Tensor], rule: ServerRule, settings: HeadSettings, seed: int
) -> list[State]:
    """The head's state after each round, with one node for each entry of ``rows``."""
    images = data.train[..., None, None]
    recorded = Recorded(rule)
    with quiet():
        finetune(
            network,
            FederatedData([TensorDataset(images[own], data.train_labels[own]) for own in rows]),
            adapter="head",
            algorithm="fedavg",
            server_rule=recorded,
            num_classes=int(data.train_labels.max()) + 1,
            rounds=settings.rounds,
            local_steps=settings.local_steps,
            batch_size=settings.batch_size,
            lr_local=settings.lr,
            seed=seed,
            logger=False,
            enable_progress_bar=False,
        )
    return recorded.states


def _flat(state: State) -> Tensor:
    return parameters_to_vector(state.values()).double()


def _accuracy(state: State, data: Vectors) -> float:
    weight, bias = state.values()
    predicted = (data.test.to(weight.device) @ weight.T + bias).argmax(1).cpu()
    return (predicted == data.test_labels).double().mean().item()
