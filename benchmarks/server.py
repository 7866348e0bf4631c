# SPDX-License-Identifier: Apache-2.0
"""What the server does: distillation with the teachers' logits computed once or in every step, and evaluation."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor

from benchmarks.cohort_step import ratio
from perada.backbones import build_backbone, insert_adapter
from perada.engine import Engine
from perada.rounds import batch_indices
from perada.server import Distillation, ensemble_logits
from perada.states import State, expand, get_state, parameter_keys

TEACHERS, PUBLIC, BATCH, CLASSES = 8, 256, 64, 10


def distillation(device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """ResNet-18 with residual adapters, 8 teachers, 256 public images of 32×32 in batches of 64."""
    engine, states, parameters = _models(device, TEACHERS)
    student = {key: value[0] for key, value in states.items()}
    x = torch.randn(PUBLIC, 3, 32, 32, device=device)
    for passes in (1, 3, 10):
        steps = passes * PUBLIC // BATCH
        indices = batch_indices(PUBLIC, BATCH, steps, 0, "public").to(device)
        options = Distillation(steps=steps, batch_size=BATCH)

        def run(batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], options: Distillation = options) -> None:
            options.run(engine, student, parameters, batches())

        def once(indices: Tensor = indices) -> Iterator[tuple[Tensor, Tensor]]:
            logits = torch.cat([ensemble_logits(engine, states, part) for part in x.split(BATCH)])
            for rows in indices:
                yield x[rows], logits[rows]

        def every_step(indices: Tensor = indices) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in indices:
                yield x[rows], ensemble_logits(engine, states, x[rows])

        def given(indices: Tensor = indices) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in indices:
                yield x[rows], torch.zeros(BATCH, CLASSES, device=device)

        seconds = _turns({"once": once, "every step": every_step, "student alone": given}, run, device, repeats)
        yield {
            "images seen": passes,
            "teachers every step / once": ratio(seconds["every step"], seconds["once"]),
            "once / student alone": ratio(seconds["once"], seconds["student alone"]),
        }


def evaluation(device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Personal models of ResNet-18 with residual adapters on the same 128 images: folded, or one after another."""
    x = torch.randn(128, 3, 32, 32, device=device)
    for models in (8, 32):
        engine, states, _ = _models(device, models)
        ways = {
            "folded": partial(engine.shared_logits, states, x),
            "512 rows": partial(engine.shared_logits, states, x, 512),
            "loop": partial(_one_by_one, engine, states, x),
        }
        seconds = _turns(ways, lambda way: way(), device, repeats)
        yield {
            "models": models,
            "loop / folded": ratio(seconds["loop"], seconds["folded"]),
            "loop / folded by 512 rows": ratio(seconds["loop"], seconds["512 rows"]),
            "images per second": round(models * len(x) / min(seconds["folded"])),
        }


def _one_by_one(engine: Engine, states: State, x: Tensor) -> Tensor:
    clients = len(next(iter(states.values())))
    rows = [{key: value[index : index + 1] for key, value in states.items()} for index in range(clients)]
    return torch.cat([engine.shared_logits(row, x) for row in rows])


def _models(device: torch.device, count: int) -> tuple[Engine, State, tuple[str, ...]]:
    torch.manual_seed(0)
    built = build_backbone(timm.create_model("resnet18", num_classes=CLASSES))
    model = insert_adapter(built, "residual").model.to(device).to(memory_format=torch.channels_last)
    states = {key: value.clone() for key, value in expand(get_state(model), count).items()}
    return Engine(model, "folded", channels_last=True), states, parameter_keys(model)


def _turns(
    ways: dict[str, Any], run: Callable[[Any], object], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each way; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            run(way)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds
