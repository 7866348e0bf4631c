# SPDX-License-Identifier: Apache-2.0
"""One local step of 8 clients × 64 images, folded, against one step of a single model on the same 512 images.

The single model is the limit: the same network, adapter and images, one batch, nothing per client. The loop over
clients (one model, one client after another, batch 64) is what simulators do otherwise.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import torch.nn.functional as F

from perada.backbones import build_backbone, insert_adapter
from perada.engine import Engine, EngineName
from perada.losses import client_losses
from perada.seeding import generator
from perada.states import expand, get_state, parameter_keys, train_mode

CLIENTS, ROWS, CLASSES = 8, 64, 10


def cohort_step(device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure in fp32 and in bf16, both with channels_last; the three ways take turns."""
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        steps = {name: _step(name, precision == "bf16", device) for name in ("folded", "loop", "single")}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(repeats + 2):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - began)
        images = CLIENTS * ROWS
        yield {
            "precision": precision,
            "folded / single": ratio(seconds["folded"], seconds["single"]),
            "loop / folded": ratio(seconds["loop"], seconds["folded"]),
            "images per second": {name: round(images / statistics.median(times)) for name, times in seconds.items()},
        }


def ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios of two ways that took turns."""
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def _step(name: str, bf16: bool, device: torch.device) -> Callable[[], None]:
    """A function that takes one SGD step on all 512 images in the way ``name``."""
    torch.manual_seed(0)
    backbone = build_backbone(timm.create_model("resnet18", num_classes=CLASSES))
    model = insert_adapter(backbone, "residual").model.to(device)
    x = torch.randn(CLIENTS, ROWS, 3, 32, 32, device=device)
    y = torch.randint(0, CLASSES, (CLIENTS, ROWS), device=device)
    model = model.to(memory_format=torch.channels_last)
    if name == "single":
        return _single(model, x, y, bf16)
    return _stacked(model, x, y, bf16, name)  # type: ignore[arg-type]  # the names are the engine's


def _single(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, bf16: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    images, labels = x.flatten(0, 1).contiguous(memory_format=torch.channels_last), y.flatten()

    def step() -> None:
        train_mode(model)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _stacked(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, bf16: bool, kind: EngineName
) -> Callable[[], None]:
    """All clients in one pass, or for the loop one pass after another, as a cohort does it."""
    engine = Engine(model, kind, channels_last=True)
    trained = set(parameter_keys(model))
    size = CLIENTS if kind == "folded" else 1
    chunks = []
    for start in range(0, CLIENTS, size):
        state = {
            key: value.clone().requires_grad_(key in trained) for key, value in expand(get_state(model), size).items()
        }
        optimizer = torch.optim.SGD([value for value in state.values() if value.requires_grad], lr=0.01)
        generators = [generator(0, "dropout", client, device=x.device) for client in range(start, start + size)]
        chunks.append((slice(start, start + size), state, optimizer, generators))

    def step() -> None:
        for rows, state, optimizer, generators in chunks:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                logits = engine.logits(state, x[rows], training=True, generators=generators)
                loss = client_losses(logits, y[rows], [ROWS] * size, multilabel=False).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step
