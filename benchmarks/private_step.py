# SPDX-License-Identifier: Apache-2.0
"""The gradients of one local step: private with all clients folded, by client after client, and not private."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.timing import alone, growth, ratio, take_turns
from perada.core.seeding import Streams, generator
from perada.core.states import State, expand, get_state, parameter_keys
from perada.engine import Engine
from perada.engine.engine import client_losses
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy, noisy_mean
from perada.privacy.gradients import Query, SampleGradients

CASES: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "test_vit, LoRA, 20 clients × 32": ("test_vit", "lora", {}, 20, 32),
    "test_vit, full, 20 clients × 32": ("test_vit", "full", {}, 20, 32),
    "ResNet-18, residual with GroupNorm, 8 clients × 16": (
        "resnet18",
        "residual",
        {"norm": "group", "train_norms": False},
        8,
        16,
    ),
}
"""Backbone, adapter, its options, clients, images a client; images are 32×32."""


def private_step(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure each case; the ways take turns."""
    for name, (*model, clients, rows) in list(CASES.items())[: 1 if quick else None]:
        ways, trained = _ways(*model, *((2, 4) if quick else (clients, rows)), device)
        seconds = take_turns(ways, device, repeats, warm_up=2)
        yield {
            "case": name,
            "trained parameters": trained,
            "opacus / folded": ratio(seconds["opacus"], seconds["folded"]),
            "folded / not private": ratio(seconds["folded"], seconds["not private"]),
            "secure noise / from a seed": ratio(seconds["folded"], seconds["from a seed"]),
            "secure noise / drawn on the device": ratio(seconds["folded"], seconds["drawn on the device"]),
            "secure noise / no noise": ratio(seconds["folded"], seconds["no noise"]),
            "seconds": {way: round(min(times), 4) for way, times in seconds.items()},
        }


def private_memory(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Peak memory of one private step by logical and physical batch size, each in a process of its own, on the CPU."""
    for logical in (32,) if quick else (32, 128, 512):
        for physical in (None, 16):
            yield {
                "case": "test_vit, full, 4 clients",
                "batch": logical,
                "physical_batch_size": physical,
                "peak MB beyond model and images": round(alone(_peak, logical, physical)),
            }


def _peak(logical: int, physical: int | None) -> float:
    """Growth of the resident set by one step in MB."""
    ways, _ = _ways("test_vit", "full", {}, 4, 1, torch.device("cpu"))  # imports and first calls
    for way in ways.values():
        way()
    ways, _ = _ways("test_vit", "full", {}, 4, logical, torch.device("cpu"), physical)
    return growth(ways["folded"], torch.device("cpu"))


def _ways(
    backbone: str,
    adapter: str,
    options: dict[str, Any],
    clients: int,
    rows: int,
    device: torch.device,
    physical: int | None = None,
) -> tuple[dict[str, Callable[[], object]], int]:
    """The ways to a gradient, and the number of trained parameters of a client."""
    torch.manual_seed(0)
    built = build_backbone(backbone, 10, pretrained=False, image_size=32 if "vit" in backbone else None)
    model = insert_adapter(built, adapter, **options).model.to(device)
    convolutional = "resnet" in backbone
    if convolutional:
        model = model.to(memory_format=torch.channels_last)
    engine = Engine(model, "folded", channels_last=convolutional)
    keys = set(parameter_keys(model))
    state: State = {
        key: value.clone().requires_grad_(key in keys) for key, value in expand(get_state(model), clients).items()
    }
    x = torch.randn(clients, rows, 3, 32, 32, device=device)
    y = torch.randint(10, (clients, rows), device=device)
    dropout = Streams.derived(0, "dropout", clients=range(clients), device=device)
    query = Query(state, x, y, (rows,) * clients, dropout)
    seeded = [generator(0, "noise", client) for client in range(clients)]
    privacy = Privacy(1.0, physical_batch_size=physical)
    folded, opacus = (SampleGradients(replace(privacy, engine=kind), engine, False) for kind in ("folded", "opacus"))

    def not_private() -> None:
        logits = engine.logits(state, x, training=True, streams=query.dropout)
        client_losses(logits, y, [rows] * clients, multilabel=False).sum().backward()
        for value in state.values():
            value.grad = None

    def noisy(gradients: SampleGradients, generators: list[torch.Generator] | None = None) -> State:
        return noisy_mean(gradients.sums(query), privacy.max_norm, [float(rows)] * clients, generators)

    def drawn_on_the_device() -> None:
        """Add noise of the device's own generator, which is not a cryptographic one: the least that noise can cost."""
        for value in folded.sums(query).values():
            (value + torch.randn_like(value)) / rows

    ways: dict[str, Callable[[], object]] = {
        "folded": lambda: noisy(folded),
        "drawn on the device": drawn_on_the_device,
        "no noise": lambda: folded.sums(query),
        "from a seed": lambda: noisy(folded, seeded),
        "opacus": lambda: noisy(opacus),
        "not private": not_private,
    }
    return ways, sum(value[0].numel() for value in state.values() if value.requires_grad)
