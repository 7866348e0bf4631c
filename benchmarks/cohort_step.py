# SPDX-License-Identifier: Apache-2.0
"""One local step of many clients × 64 images, folded, against one step of a single model on the same images.

By number of clients, by adapter and its size. The single model is the limit: the same network, adapter and images, one
batch, nothing per client. The loop over clients (one model, one client after another, batch 64) is what simulators do
otherwise.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import timm
import torch
import torch.nn.functional as F

from benchmarks.timing import alone, growth, ratio, take_turns
from perada.core.seeding import Streams
from perada.core.states import expand, get_state, parameter_keys, train_mode
from perada.engine import Engine, EngineName
from perada.engine.engine import client_losses
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone

Way = Literal["folded", "loop", "single"]
ROWS, CLASSES = 64, 10
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "residual": ("residual", {}, (1, 4, 8, 16)),
    "lora, r=4": ("lora", {"r": 4}, (8,)),
    "lora, r=16": ("lora", {"r": 16}, (8,)),
    "head": ("head", {}, (8,)),
}
"""Adapter, its options, numbers of clients."""


def cohort_step(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 at 32×32 in fp32 and in bf16, both with channels_last; the three ways take turns."""
    for name, (adapter, options, numbers) in CASES.items():
        for clients in (2,) if quick else numbers:
            for bf16 in (False, True):
                case = (adapter, options, clients, "test_resnet" if quick else "resnet18", bf16, device)
                steps = {way: _step(way, *case) for way in get_args(Way)}
                seconds = take_turns(steps, device, repeats, warm_up=2)
                # A GPU's peak is counted anew at will, a process's only in one where nothing ran before.
                peak = _peak if device.type == "cuda" else partial(alone, _peak)
                memory = {} if quick else {way: round(peak(way, *case)) for way in ("folded", "loop")}
                yield {
                    "adapter": name,
                    "clients": clients,
                    "precision": "bf16" if bf16 else "fp32",
                    "folded / single": ratio(seconds["folded"], seconds["single"]),
                    "loop / folded": ratio(seconds["loop"], seconds["folded"]),
                    "images per second": round(clients * ROWS / statistics.median(seconds["folded"])),
                    **{f"peak MB, {way}": megabytes for way, megabytes in memory.items()},
                }


def _peak(way: Way, *case: Any) -> float:
    """Growth of memory by the second step in MB."""
    step = _step(way, *case)
    step()
    return growth(step, case[-1])


def _step(
    way: Way,
    adapter: str,
    options: dict[str, Any],
    clients: int,
    backbone: str,
    bf16: bool,
    device: torch.device,
) -> Callable[[], None]:
    """A function that takes one SGD step on all images in the way named."""
    torch.manual_seed(0)
    built = build_backbone(timm.create_model(backbone, num_classes=CLASSES))
    model = insert_adapter(built, adapter, **options).model.to(device)
    x = torch.randn(clients, ROWS, 3, 32, 32, device=device)
    y = torch.randint(0, CLASSES, (clients, ROWS), device=device)
    model = model.to(memory_format=torch.channels_last)
    if way == "single":
        return _single(model, x, y, bf16)
    return _stacked(model, x, y, bf16, way)


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
    trained, clients = set(parameter_keys(model)), len(x)
    size = clients if kind == "folded" else 1
    chunks = []
    for start in range(0, clients, size):
        state = {
            key: value.clone().requires_grad_(key in trained) for key, value in expand(get_state(model), size).items()
        }
        optimizer = torch.optim.SGD([value for value in state.values() if value.requires_grad], lr=0.01)
        streams = Streams.derived(0, "dropout", clients=range(start, start + size), device=x.device)
        chunks.append((slice(start, start + size), state, optimizer, streams))

    def step() -> None:
        for rows, state, optimizer, streams in chunks:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                logits = engine.logits(state, x[rows], training=True, streams=streams)
                loss = client_losses(logits, y[rows], [ROWS] * size, multilabel=False).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step
