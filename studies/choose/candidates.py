# SPDX-License-Identifier: Apache-2.0
"""The methods that are tried, and the settings of each."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from perada.core.seeding import derive_seed
from perada.data import FederatedDataModule
from perada.models.adapted import AdaptedModel, find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.studies.compare.comparison import MODELS
from perada.studies.compare.configured import ConfiguredRun
from perada.studies.compare.entries import ADAPTER, ADAPTER_OPTIONS
from perada.studies.compare.grid import Point

PROX_STRENGTH = "federated.algorithm.prox_strength"
RATES = ("training.lr_local", "training.lr_personal")
RATE_FACTORS = (0.3, 1.0, 3.0, 0.1)
"""Factors of the recipe's rates: half a decade apart, as in the grids of docs/results.md. Right rates depend on the
optimiser, its momentum and the batches, so they are relative to those of the recipe."""
PROX_STRENGTHS = (1.0, 0.3, 3.0, 0.1)
"""λ around 1, the value of PerAda's and of Ditto's recipes; docs/results.md chose values from 0.1 to 5."""


@dataclass(frozen=True)
class MethodText:
    """A method in words for someone who does not know it.

    Attributes:
        title: A few words.
        sentence: What it does.
    """

    title: str
    sentence: str


METHODS = {
    "standalone": MethodText("every client alone", "Every client trains a model on its own images, and sends nothing."),
    "fedavg": MethodText(
        "one shared model (FedAvg)",
        "All clients train one shared model: each trains it on its own images, and a server averages what they send.",
    ),
    "feddf": MethodText(
        "one shared model, improved on public images (FedDF)",
        "All clients train one shared model, and the server improves it with public images without labels.",
    ),
    "fedavg_ft": MethodText(
        "one shared model, then fine-tuned by every client",
        "All clients train one shared model, and at the end each trains it further on its own images.",
    ),
    "fedbn": MethodText(
        "one shared model with normalisation of each client (FedBN)",
        "All clients train one shared model, but each keeps normalisation layers of its own, which helps where cameras "
        "or scanners differ.",
    ),
    "ditto": MethodText(
        "a model of each client, pulled towards a shared one (Ditto)",
        "Every client has a model of its own, which is kept close to a model that all clients share.",
    ),
    "perada": MethodText(
        "a model of each client, pulled towards a shared one that is improved on public images (PerAda)",
        "Every client has a model of its own, which is kept close to a model that all clients share and that the "
        "server improves with public images without labels.",
    ),
    "perada_no_kd": MethodText(
        "a model of each client, pulled towards a shared one (PerAda without public images)",
        "Every client has a model of its own, which is kept close to a model that all clients share.",
    ),
}
"""The methods, from the simplest; of equal ones the first is chosen."""
WITH_PUBLIC_IMAGES = ("feddf", "perada")
WITHOUT_PUBLIC_IMAGES = ("perada_no_kd",)
SHARED_ONLY = ("fedavg", "feddf")
"""Methods whose clients all have the same model."""
PULLED = ("ditto", "perada", "perada_no_kd")
"""Methods with a λ."""
ALWAYS_TRAINED = ("standalone", "fedavg")
"""Methods that are tried however small the budget is: what everybody has without perada, and what is known best."""
DROPPED_FIRST = ("feddf", "fedavg_ft", "fedbn", "ditto", "perada_no_kd", "perada")
"""Order in which methods are left out of a small budget: those close to another one first."""


def predicting_models(method: str, way: str) -> str:
    """Return what clients predict with, in words.

    Args:
        method: Name of the method.
        way: A key of :data:`~perada.studies.compare.comparison.MODELS`.
    """
    return "shared model" if method in SHARED_ONLY else MODELS[way]


@dataclass(frozen=True)
class Candidate:
    """A setting of a method.

    Attributes:
        method: Name of the method.
        number: Number of the setting among those of the method; 0 is the recipe's own.
        point: Options of ``perada fit`` in which it differs from the recipe.
    """

    method: str
    number: int
    point: Point

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.method} {self.number}"


@dataclass(frozen=True)
class AdapterOption:
    """An adapter that fits the network; see the options ``model.adapter`` and ``model.adapter_options``."""

    adapter: str
    last_blocks: int | None = None

    def point(self) -> Point:
        """Return the options of ``perada fit``."""
        options = "null" if self.last_blocks is None else json.dumps({"last_blocks": self.last_blocks})
        return {ADAPTER: self.adapter, ADAPTER_OPTIONS: options}


ADAPTERS = (
    AdapterOption("residual", 1),
    AdapterOption("residual", 2),
    AdapterOption("residual", 3),
    AdapterOption("lora"),
    AdapterOption("bottleneck", 1),
    AdapterOption("bottleneck", 3),
    AdapterOption("head"),
)
"""Adapters that are tried where they fit. Whole blocks, which send ten times as much, are not among them."""


def fitting_adapters(cli: ConfiguredRun, data: FederatedDataModule) -> list[AdapterOption]:
    """Return the adapters that fit the network of a run, and its method.

    LoRA is tried in linear and attention layers only, and bottlenecks only in networks without main convolutions, for
    which residual adapters are.

    Args:
        cli: The run.
        data: Its data, which are set up.
    """
    fitting: list[AdapterOption] = []
    for option in ADAPTERS:
        if option.adapter == "bottleneck" and any(other.adapter == "residual" for other in fitting):
            continue
        try:
            adapted = _build_with_adapter(cli, data, option)
            names = find_tensor_names(adapted.model, *adapted.backbone.head_modules)
            cli.loop.algorithm.check(names, data.num_clients)
        except ValueError:
            continue
        if option.adapter == "lora" and not _adapts_linear_layers(adapted):
            continue
        fitting.append(option)
    return fitting


def _build_with_adapter(cli: ConfiguredRun, data: FederatedDataModule, option: AdapterOption) -> AdaptedModel:
    """Build the network of a run with another adapter, from random weights, which are faster than those of files."""
    model = cli.model
    backbone = build_backbone(
        model.backbone,
        data.num_classes,
        pretrained=False,
        image_size=model.image_size,
        per_pixel=data.task.per_pixel,
    )
    options: dict[str, Any] = {} if option.last_blocks is None else {"last_blocks": option.last_blocks}
    return insert_adapter(backbone, option.adapter, **options)


def _adapts_linear_layers(adapted: AdaptedModel) -> bool:
    """Return whether LoRA's factors are in linear layers."""
    for name, module in adapted.model.named_modules():
        if name.endswith("lora_A") and any(isinstance(layer, nn.Linear) for layer in module.children()):
            return True
    return False


def make_candidates(method: str, cli: ConfiguredRun, adapters: Sequence[AdapterOption], number: int) -> list[Candidate]:
    """Return the settings of a method, of which a smaller number are always the first ones.

    The first is the recipe's own. The others are drawn at random, which finds good settings sooner than a grid
    (Bergstra and Bengio, JMLR 2012), in blocks that have every value of an option once. All methods draw the same
    values.

    Args:
        method: Name of the method.
        cli: The recipe's run.
        adapters: Adapters that fit; the recipe's own if there are none.
        number: Number of settings. There are fewer if there are no more combinations.
    """
    candidates = [Candidate(method, 0, {})]
    seen: list[Point] = [{}]
    adapter_points = [option.point() for option in adapters] or [{}]
    adapter_draws = _draw_in_blocks(len(adapter_points), "adapter")
    rate_draws = _draw_in_blocks(len(RATE_FACTORS), "rate")
    strength_draws = _draw_in_blocks(len(PROX_STRENGTHS), "strength")
    num_combinations = len(adapter_points) * len(RATE_FACTORS) * len(PROX_STRENGTHS)
    for _ in range(20 * num_combinations):
        if len(candidates) == number:
            break
        point = dict(adapter_points[next(adapter_draws)])
        factor = RATE_FACTORS[next(rate_draws)]
        for name in RATES:
            rate = getattr(cli.loop.training, name.removeprefix("training."))
            point[name] = f"{rate * factor:.4g}"
        strength = PROX_STRENGTHS[next(strength_draws)]
        if method in PULLED:
            point[PROX_STRENGTH] = f"{strength:g}"
        if point not in seen:
            seen.append(point)
            candidates.append(Candidate(method, len(candidates), point))
    return candidates


def _draw_in_blocks(count: int, purpose: str) -> Iterator[int]:
    """Yield positions below ``count`` without end, each once in a block of that many."""
    generator = random.Random(derive_seed(0, f"choose {purpose}"))
    while True:
        block = list(range(count))
        generator.shuffle(block)
        yield from block
