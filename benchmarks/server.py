# SPDX-License-Identifier: Apache-2.0
"""Distillation with the teachers' logits computed once or in every step, evaluation, and how many images at once."""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.naive import Naive
from benchmarks.round import LITE0, RESNET, SMALL, VIT
from benchmarks.timing import alone, growth, ratio, take_turns
from benchmarks.workload import Workload
from perada.core.rounds import batch_indices
from perada.core.states import State, clone, expand, get_state, parameter_keys, unstack
from perada.engine import Engine
from perada.server import Distiller
from perada.server.aggregate import double
from perada.server.distill import PUBLIC_BATCH

KINDS = ("fp32", "bf16")


def distillation(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """8 teachers, 256 public images of 32×32 in batches of 64, ResNet-18 with residual adapters.

    The naive way is in fp32 and runs the teachers one after another in every step. perada runs them folded, by default
    each image once. The student alone, with logits that are given, is what no way of running the teachers can undercut.
    """
    for passes in (3,) if quick else (1, 3, 10):
        work = _workload(quick, passes)
        x = torch.randn(work.public, 3, work.side, work.side, device=device)
        indices = batch_indices(work.public, work.public_batch, work.distillation.steps, 0, "public").to(device)
        engine, states = _models(work, device, work.sampled)
        naive = Naive(work, copy.deepcopy(engine.model), work.data(), device)
        naive.global_state = unstack(states)[0]
        ways: dict[str, Callable[[], object]] = {"naive": partial(naive.distil, unstack(states), indices.cpu())}
        for kind in KINDS:
            for way in ("once", "every step", "student"):
                own = partial(_distil, work, engine, states, x, indices, way, kind == "bf16")
                ways[f"{way}, {kind}"] = own
        seconds = take_turns(ways, device, repeats)
        yield {
            "images seen": passes,
            **{f"naive fp32 / perada {kind}": ratio(seconds["naive"], seconds[f"once, {kind}"]) for kind in KINDS},
            **{
                f"every step / once, {kind}": ratio(seconds[f"every step, {kind}"], seconds[f"once, {kind}"])
                for kind in KINDS
            },
            **{
                f"once / student, {kind}": ratio(seconds[f"once, {kind}"], seconds[f"student, {kind}"])
                for kind in KINDS
            },
            "seconds": {way: round(statistics.median(times), 4) for way, times in seconds.items()},
        }


def _distil(
    work: Workload, engine: Engine, states: State, x: Tensor, indices: Tensor, teachers: str, bf16: bool
) -> None:
    """Distil as perada does, with the teachers' logits computed ``once``, in ``every step``, or given (``student``)."""

    def ensemble_logits(part: Tensor) -> Tensor:
        logits = engine.shared_logits(states, part)
        return double(logits).mean(0).to(logits)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        if teachers == "once":
            logits = torch.cat([ensemble_logits(part) for part in x.split(PUBLIC_BATCH)])
        for rows in indices:
            if teachers == "once":
                yield x[rows], logits[rows]
            elif teachers == "every step":
                yield x[rows], ensemble_logits(x[rows])
            else:
                yield x[rows], torch.zeros(len(rows), work.classes, device=x.device)

    student = {key: value[0] for key, value in states.items()}
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        distiller = Distiller(engine, work.distillation, parameter_keys(engine.model), None)  # the images are given
        distiller.train(student, batches())


def evaluation(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Personal models of ResNet-18 with residual adapters on the same 128 images: folded, or one after another."""
    x = torch.randn(8 if quick else 128, 3, 32, 32, device=device)
    for models in (2,) if quick else (8, 32):
        engine, states = _models(_workload(quick), device, models)
        ways: dict[str, Callable[[], object]] = {
            "folded": partial(engine.shared_logits, states, x),
            "2,048 rows": partial(engine.shared_logits, states, x, 2048),
            "loop": partial(_one_by_one, engine, states, x),
        }
        seconds = take_turns(ways, device, repeats)
        yield {
            "models": models,
            "loop / folded": ratio(seconds["loop"], seconds["folded"]),
            "loop / folded by 2,048 rows": ratio(seconds["loop"], seconds["2,048 rows"]),
            "images per second": round(models * len(x) / statistics.median(seconds["folded"])),
        }


def groups(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Two models on many images: a group of images and one model at a time, as perada does, against two other ways.

    They are all images of one model at once, and half a group of them for both models at once.
    """
    works = ((SMALL, 64),) if quick else ((RESNET, 1024), (LITE0, 256), (VIT, 64))
    for (work, count), bf16 in itertools.product(works, (False, True)):
        engine, states = _models(work, device, 2)
        x = torch.randn(count, 3, work.side, work.side, device=device)
        group = 16 if quick else max(16, 512 * 32**2 // work.side**2)
        ways = {
            "groups": partial(_pass, engine, states, x.split(count), group, bf16),
            "all images": partial(_pass, engine, states, x.split(count), count, bf16),
            "two models": partial(_pass, engine, states, x.split(group // 2), group, bf16),
        }
        seconds = take_turns(ways, device, repeats)
        yield {
            "model": f"{work.backbone}, {work.side}×{work.side}",
            "precision": KINDS[bf16],
            "images": count,
            "group": group,
            "all images / groups": ratio(seconds["all images"], seconds["groups"]),
            "two models / groups": ratio(seconds["two models"], seconds["groups"]),
            "fp32: groups, MB": round(alone(_memory, work, device, count, group)),
            "all images, MB": round(alone(_memory, work, device, count, count)),
        }


def _memory(work: Workload, device: torch.device, count: int, rows: int) -> float:
    """How much the memory in use grows at its peak by one model's pass, in MB."""
    engine, states = _models(work, device, 1)
    x = torch.randn(count, 3, work.side, work.side, device=device)
    return growth(lambda: engine.shared_logits(states, x, rows), device)


def _pass(engine: Engine, states: State, batches: Sequence[Tensor], rows: int, bf16: bool) -> None:
    with torch.autocast(batches[0].device.type, torch.bfloat16, enabled=bf16):
        for x in batches:
            engine.shared_logits(states, x, rows)


def _one_by_one(engine: Engine, states: State, x: Tensor) -> Tensor:
    clients = len(next(iter(states.values())))
    rows = [{key: value[index : index + 1] for key, value in states.items()} for index in range(clients)]
    return torch.cat([engine.shared_logits(row, x) for row in rows])


def _workload(quick: bool, passes: int = 3) -> Workload:
    work = Workload(passes=passes)
    return replace(work, backbone="test_resnet", public=32, public_batch=16, clients=2, sampled=2) if quick else work


def _models(work: Workload, device: torch.device, count: int) -> tuple[Engine, State]:
    """The engine, and a stack of equal states."""
    module = work.module()
    model = module.model.to(device)
    return Engine(model, "folded", channels_last="vit" not in str(work.backbone)), clone(
        expand(get_state(model), count)
    )
