# SPDX-License-Identifier: Apache-2.0
"""The gradients of one local step: private with all clients folded, by client after client, and not private."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.timing import growth, in_new_process, ratio, take_turns
from perada.core.seeding import Streams, generator
from perada.core.states import State, expand, get_state, parameter_keys
from perada.engine import Engine
from perada.engine.engine import client_losses
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy, noisy_mean
from perada.privacy.gradients import Query, SampleGradients
from perada.tasks import Classification


@dataclass(frozen=True)
class Case:
    """A local step on images of 32×32 pixels.

    Attributes:
        backbone: Name of the backbone, whose weights are random.
        adapter: Name of the adapter.
        clients: Number of clients.
        batch: Images of each client.
        adapter_options: Options of the adapter.
    """

    backbone: str
    adapter: str
    clients: int
    batch: int
    adapter_options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "test_vit, LoRA, 20 clients × 32": Case("test_vit", "lora", clients=20, batch=32),
    "test_vit, full, 20 clients × 32": Case("test_vit", "full", clients=20, batch=32),
    "ResNet-18, residual with GroupNorm, 8 clients × 16": Case(
        "resnet18", "residual", clients=8, batch=16, adapter_options={"norm": "group", "train_norms": False}
    ),
}


@dataclass(frozen=True)
class Ways:
    """The ways to compute a gradient by name, and the number of trained parameters of a client."""

    by_name: dict[str, Callable[[], object]]
    trained_parameters: int


def private_step(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure each case; the ways take turns."""
    names = list(CASES)
    if quick:
        names = names[:1]
    for name in names:
        case = CASES[name]
        if quick:
            case = replace(case, clients=2, batch=4)
        ways = _make_ways(case, device)
        seconds = take_turns(ways.by_name, device, repeats, warm_up=2)
        yield {
            "case": name,
            "trained parameters": ways.trained_parameters,
            "opacus / folded": ratio(seconds["opacus"], seconds["folded"]),
            "folded / not private": ratio(seconds["folded"], seconds["not private"]),
            "secure noise / from a seed": ratio(seconds["folded"], seconds["from a seed"]),
            "secure noise / drawn on the device": ratio(seconds["folded"], seconds["drawn on the device"]),
            "secure noise / no noise": ratio(seconds["folded"], seconds["no noise"]),
            "seconds": {way: round(min(times), 4) for way, times in seconds.items()},
        }


def private_memory(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the peak memory of one private step on the CPU by logical and physical batch size."""
    batches = [32] if quick else [32, 128, 512]
    for batch in batches:
        for physical_batch in (None, 16):
            # In its own process, since memory that an earlier step has freed may stay with the process.
            peak = in_new_process(_peak, batch, physical_batch)
            yield {
                "case": "test_vit, full, 4 clients",
                "batch": batch,
                "physical_batch_size": physical_batch,
                "peak MB beyond model and images": round(peak),
            }


def _peak(batch: int, physical_batch: int | None) -> float:
    """Return the growth of the resident set by one step in MB."""
    cpu = torch.device("cpu")
    case = Case("test_vit", "full", clients=4, batch=batch)
    # Imports and first calls need memory, too.
    for way in _make_ways(replace(case, batch=1), cpu).by_name.values():
        way()
    ways = _make_ways(case, cpu, physical_batch)
    return growth(ways.by_name["folded"], cpu)


def _make_ways(case: Case, device: torch.device, physical_batch: int | None = None) -> Ways:
    """Build model and images, and return the ways to compute the gradients of one step."""
    torch.manual_seed(0)
    image_size = 32 if "vit" in case.backbone else None
    backbone = build_backbone(case.backbone, 10, pretrained=False, image_size=image_size)
    model = insert_adapter(backbone, case.adapter, **case.adapter_options).model.to(device)
    has_convolutions = "resnet" in case.backbone
    if has_convolutions:
        model = model.to(memory_format=torch.channels_last)
    engine = Engine(model, "folded", channels_last=has_convolutions)

    clients = case.clients
    trained_keys = set(parameter_keys(model))
    state: State = {}
    for key, value in expand(get_state(model), clients).items():
        state[key] = value.clone().requires_grad_(key in trained_keys)
    x = torch.randn(clients, case.batch, 3, 32, 32, device=device)
    y = torch.randint(10, (clients, case.batch), device=device)
    dropout = Streams.derived(0, "dropout", clients=range(clients), device=device)
    query = Query(state, x, y, (case.batch,) * clients, dropout)

    privacy = Privacy(1.0, physical_batch_size=physical_batch)
    folded = SampleGradients(replace(privacy, engine="folded"), engine, Classification())
    opacus = SampleGradients(replace(privacy, engine="opacus"), engine, Classification())
    seeded_generators = [generator(0, "noise", client) for client in range(clients)]
    batch_sizes = [float(case.batch)] * clients

    def not_private() -> None:
        logits = engine.logits(state, x, training=True, streams=query.dropout)
        client_losses(logits, y, [case.batch] * clients, Classification()).sum().backward()
        for value in state.values():
            value.grad = None

    def noisy(gradients: SampleGradients, generators: list[torch.Generator] | None = None) -> State:
        return noisy_mean(gradients.sums(query), privacy.max_norm, batch_sizes, generators)

    def drawn_on_the_device() -> None:
        """Add noise of the device's own generator, which is not a cryptographic one: the least that noise can cost."""
        for value in folded.sums(query).values():
            (value + torch.randn_like(value)) / case.batch

    by_name: dict[str, Callable[[], object]] = {
        "folded": lambda: noisy(folded),
        "drawn on the device": drawn_on_the_device,
        "no noise": lambda: folded.sums(query),
        "from a seed": lambda: noisy(folded, seeded_generators),
        "opacus": lambda: noisy(opacus),
        "not private": not_private,
    }
    trained_parameters = sum(value[0].numel() for value in state.values() if value.requires_grad)
    return Ways(by_name, trained_parameters)
