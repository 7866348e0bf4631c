# SPDX-License-Identifier: Apache-2.0
"""What would save operations in bfloat16 and is left out, since no step got faster: to be tried on other machines."""

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.round import LITE0, RESNET, SMALL, VIT
from benchmarks.timing import ratio, take_turns
from benchmarks.workload import Workload
from perada.core.seeding import Streams
from perada.core.states import State, expand, get_state
from perada.engine import Engine


def not_taken(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Frozen weights cast once instead of at each call, and other ways to a maximum over 3×3 pixels."""
    for work in (SMALL,) if quick else (replace(RESNET, batch=32), replace(LITE0, sampled=2, batch=16), VIT):
        yield _row(f"weights cast once, {work.backbone}", _steps(work, device), device, repeats)
    x = torch.randn(8 if quick else 512, 64, 16, 16, device=device, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    pools: dict[str, Callable[[Tensor], Tensor]] = {
        "by rows and columns": lambda x: F.max_pool2d(F.max_pool2d(x, (1, 3), (1, 2), (0, 1)), (3, 1), (2, 1), (1, 0)),
        "in single precision": lambda x: F.max_pool2d(x.float(), 3, 2, 1).bfloat16(),
    }
    for name, pool in pools.items():
        ways = {"as it is": partial(F.max_pool2d, x, 3, 2, 1), "instead": partial(pool, x)}
        yield _row(f"max pooling {name}", ways, device, repeats)


def _row(what: str, ways: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, Any]:
    seconds = take_turns(ways, device, repeats, warm_up=2)
    milliseconds = {f"{name}, ms": round(1e3 * statistics.median(times), 1) for name, times in seconds.items()}
    return {"what": what, **milliseconds, "gain": ratio(seconds["as it is"], seconds["instead"])}


def _steps(work: Workload, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the ways to run a local step of a round's clients, forward and backward."""
    model = work.module().model.to(device)
    clients = work.sampled
    cast = copy.deepcopy(model)
    for layer in cast.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        for value in layer.parameters(recurse=False):
            if not value.requires_grad:
                value.data = value.data.bfloat16()
    x = torch.randn(clients, work.batch, 3, work.side, work.side, device=device)
    states: State = {}
    for key, value in expand(get_state(model), clients).items():
        is_trained = value.is_floating_point() and "running" not in key
        states[key] = value.clone().requires_grad_(is_trained)

    def step(engine: Engine) -> None:
        streams = Streams.derived(0, "benchmark", clients=tuple(range(clients)))
        with torch.autocast(device.type, torch.bfloat16):
            logits = engine.logits(states, x, training=True, streams=streams)
        torch.autograd.grad(logits.sum(), [value for value in states.values() if value.requires_grad])

    channels_last = work.backbone != VIT.backbone
    return {
        "as it is": partial(step, Engine(model, channels_last=channels_last)),
        "instead": partial(step, Engine(cast, channels_last=channels_last)),
    }
