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

SETTINGS_OF_LEVEL: tuple[tuple[float, float | None], ...] = ((1.0, None), (0.3, 1.0), (3.0, 0.3), (0.1, 3.0))
"""Factor of the recipe's rates and λ of the settings of each adapter; None for the recipe's λ."""


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

    @property
    def title(self) -> str:
        """The adapter in words."""
        if self.last_blocks is None:
            return self.adapter
        return f"{self.adapter} in the last {f'{self.last_blocks} blocks' if self.last_blocks > 1 else 'block'}"

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
CHEAPEST_FIRST = (
    AdapterOption("head"),
    AdapterOption("residual", 1),
    AdapterOption("bottleneck", 1),
    AdapterOption("residual", 2),
    AdapterOption("residual", 3),
    AdapterOption("bottleneck", 3),
    AdapterOption("lora"),
)
"""The adapters, that whose rounds take least time first: the fewer layers train, the more are computed only once."""


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


def cheapest_first(adapters: Sequence[AdapterOption]) -> list[AdapterOption]:
    """Return adapters sorted by the time of a round, the shortest first."""
    return sorted(adapters, key=CHEAPEST_FIRST.index)


def adapter_of_recipe(cli: ConfiguredRun) -> AdapterOption | None:
    """Return the adapter of a run if it is one of those that are tried; else None."""
    options: dict[str, Any] = dict(cli.model.adapter_options or {})
    last_blocks = options.pop("last_blocks", None)
    option = AdapterOption(str(cli.model.adapter), last_blocks)
    return None if options or option not in ADAPTERS else option


def check_adapter_of_recipe(cli: ConfiguredRun, data: FederatedDataModule) -> None:
    """Raise a ValueError, with the reason, if the method of a run cannot train the recipe's own adapter.

    Args:
        cli: The run.
        data: Its data, which are set up.
    """
    adapted = _insert_into_random_weights(cli, data, str(cli.model.adapter), dict(cli.model.adapter_options or {}))
    names = find_tensor_names(adapted.model, *adapted.backbone.head_modules)
    cli.loop.algorithm.check(names, data.num_clients)


def _build_with_adapter(cli: ConfiguredRun, data: FederatedDataModule, option: AdapterOption) -> AdaptedModel:
    """Build the network of a run with another adapter."""
    options: dict[str, Any] = {} if option.last_blocks is None else {"last_blocks": option.last_blocks}
    return _insert_into_random_weights(cli, data, option.adapter, options)


def _insert_into_random_weights(
    cli: ConfiguredRun, data: FederatedDataModule, adapter: str, options: dict[str, Any]
) -> AdaptedModel:
    """Build the network of a run with an adapter, from random weights, which are faster than those of files."""
    model = cli.model
    backbone = build_backbone(
        model.backbone,
        data.num_classes,
        pretrained=False,
        image_size=model.image_size,
        per_pixel=data.task.per_pixel,
        text_head=model.text_head,
    )
    return insert_adapter(backbone, adapter, **options)


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
        point |= _scale_rates(cli, factor)
        strength = PROX_STRENGTHS[next(strength_draws)]
        if method in PULLED:
            point[PROX_STRENGTH] = f"{strength:g}"
        if point not in seen:
            seen.append(point)
            candidates.append(Candidate(method, len(candidates), point))
    return candidates


def _scale_rates(cli: ConfiguredRun, factor: float) -> Point:
    """Return the options of the recipe's rates times a factor."""
    point: Point = {}
    for name in RATES:
        rate = getattr(cli.loop.training, name.removeprefix("training."))
        point[name] = f"{rate * factor:.4g}"
    return point


@dataclass(frozen=True)
class AdapterLevel:
    """The settings of a method that have one adapter.

    Attributes:
        adapter: The adapter; None for the recipe's, if it is not one of those that are tried.
        candidates: Its settings, one for each of :data:`SETTINGS_OF_LEVEL`, the recipe's rates first.
    """

    adapter: AdapterOption | None
    candidates: tuple[Candidate, ...]

    @property
    def title(self) -> str:
        """The adapter in words."""
        return "the recipe's adapter" if self.adapter is None else self.adapter.title


def make_levels(
    method: str, cli: ConfiguredRun, adapters: Sequence[AdapterOption], own_fits: bool, drawn: Sequence[Candidate]
) -> list[AdapterLevel]:
    """Return settings of a method by adapter, the cheapest adapter first; the recipe's own comes last if none of these.

    Args:
        method: Name of the method.
        cli: The recipe's run.
        adapters: Adapters that fit.
        own_fits: Whether the method can train the recipe's own adapter.
        drawn: The settings of :func:`make_candidates`. One that is among them already keeps its number.
    """
    own = adapter_of_recipe(cli)
    adapter_options: list[AdapterOption | None] = [*cheapest_first(adapters)]
    if own is None and own_fits:
        adapter_options.append(None)
    levels = []
    all_candidates = list(drawn)
    for option in adapter_options:
        candidates = []
        for factor, strength in SETTINGS_OF_LEVEL:
            point = {} if option is None or option == own else option.point()
            if factor != 1:
                point |= _scale_rates(cli, factor)
            if strength is not None and method in PULLED:
                point[PROX_STRENGTH] = f"{strength:g}"
            same_setting = next((candidate for candidate in all_candidates if candidate.point == point), None)
            if same_setting is None:
                same_setting = Candidate(method, len(all_candidates), point)
                all_candidates.append(same_setting)
            candidates.append(same_setting)
        levels.append(AdapterLevel(option, tuple(candidates)))
    return levels


def _draw_in_blocks(count: int, purpose: str) -> Iterator[int]:
    """Yield positions below ``count`` without end, each once in a block of that many."""
    generator = random.Random(derive_seed(0, f"choose {purpose}"))
    while True:
        block = list(range(count))
        generator.shuffle(block)
        yield from block
