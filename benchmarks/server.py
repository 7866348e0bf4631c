# SPDX-License-Identifier: Apache-2.0
"""Distillation with the teachers' logits computed once or in every step, evaluation, and how many images at once."""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.naive import Naive
from benchmarks.round import LITE0, RESNET, SMALL, VIT
from benchmarks.timing import growth, in_new_process, ratio, take_turns
from benchmarks.workload import Workload
from perada.core.rounds import batch_indices
from perada.core.states import State, clone, double, expand, get_state, parameter_keys, unstack
from perada.engine import Engine
from perada.server import Distiller
from perada.server.distill import PUBLIC_BATCH

PRECISIONS = ("fp32", "bf16")


def distillation(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """8 teachers, 256 public images of 32×32 in batches of 64, ResNet-18 with residual adapters.

    The naive way is in fp32 and runs the teachers one after another in every step. perada runs them folded, by default
    each image once. The student alone, with logits that are given, is what no way of running the teachers can undercut.
    """
    for passes in (3,) if quick else (1, 3, 10):
        work = _workload(quick, passes)
        seconds = take_turns(_distillation_ways(work, device), device, repeats)
        row: dict[str, Any] = {"images seen": passes}
        for precision in PRECISIONS:
            row[f"naive fp32 / perada {precision}"] = ratio(seconds["naive"], seconds[f"once, {precision}"])
        for precision in PRECISIONS:
            once = seconds[f"once, {precision}"]
            row[f"every step / once, {precision}"] = ratio(seconds[f"every step, {precision}"], once)
        for precision in PRECISIONS:
            student = seconds[f"student, {precision}"]
            row[f"once / student, {precision}"] = ratio(seconds[f"once, {precision}"], student)
        row["seconds"] = {way: round(statistics.median(times), 4) for way, times in seconds.items()}
        yield row


def _distillation_ways(work: Workload, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the ways of distilling, by name."""
    x = torch.randn(work.public, 3, work.side, work.side, device=device)
    indices = batch_indices(work.public, work.public_batch, work.distillation.steps, 0, "public").to(device)
    cohort = _make_cohort(work, device, work.sampled)
    naive = Naive(work, copy.deepcopy(cohort.engine.model), work.data(), device)
    updates = unstack(cohort.states)
    naive.global_state = updates[0]
    ways: dict[str, Callable[[], object]] = {"naive": partial(naive.distil, updates, indices.cpu())}
    for precision in PRECISIONS:
        for teachers in ("once", "every step", "student"):
            is_bf16 = precision == "bf16"
            ways[f"{teachers}, {precision}"] = partial(_distil, work, cohort, x, indices, teachers, is_bf16)
    return ways


@dataclass(frozen=True)
class Cohort:
    """An engine, and the stacked states of some models."""

    engine: Engine
    states: State


def _distil(work: Workload, cohort: Cohort, x: Tensor, indices: Tensor, teachers: str, bf16: bool) -> None:
    """Distil as perada does.

    Args:
        work: The workload.
        cohort: The teachers; the first is the student too.
        x: Public images.
        indices: Images of each step.
        teachers: Whether the teachers' logits are computed ``once``, in ``every step``, or given (``student``).
        bf16: Whether to compute in bfloat16 where autocast does.
    """

    def ensemble_logits(images: Tensor) -> Tensor:
        logits = cohort.engine.shared_logits(cohort.states, images)
        return double(logits).mean(0).to(logits)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        if teachers == "once":
            logits = torch.cat([ensemble_logits(images) for images in x.split(PUBLIC_BATCH)])
        for rows in indices:
            if teachers == "once":
                yield x[rows], logits[rows]
            elif teachers == "every step":
                yield x[rows], ensemble_logits(x[rows])
            else:
                yield x[rows], torch.zeros(len(rows), work.classes, device=x.device)

    student = {key: value[0] for key, value in cohort.states.items()}
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        # Without an image loader: the batches have the images.
        distiller = Distiller(cohort.engine, work.distillation, parameter_keys(cohort.engine.model), None)
        distiller.train(student, batches())


def evaluation(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Personal models of ResNet-18 with residual adapters on the same 128 images: folded, or one after another."""
    x = torch.randn(8 if quick else 128, 3, 32, 32, device=device)
    for num_models in (2,) if quick else (8, 32):
        cohort = _make_cohort(_workload(quick), device, num_models)
        ways: dict[str, Callable[[], object]] = {
            "folded": partial(cohort.engine.shared_logits, cohort.states, x),
            "2,048 rows": partial(cohort.engine.shared_logits, cohort.states, x, 2048),
            "loop": partial(_one_by_one, cohort, x),
        }
        seconds = take_turns(ways, device, repeats)
        yield {
            "models": num_models,
            "loop / folded": ratio(seconds["loop"], seconds["folded"]),
            "loop / folded by 2,048 rows": ratio(seconds["loop"], seconds["2,048 rows"]),
            "images per second": round(num_models * len(x) / statistics.median(seconds["folded"])),
        }


def groups(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Two models on many images: a group of images and one model at a time, as perada does, against two other ways.

    They are all images of one model at once, and half a group of them for both models at once.
    """
    works = [(SMALL, 64)] if quick else [(RESNET, 1024), (LITE0, 256), (VIT, 64)]
    for (work, num_images), precision in itertools.product(works, PRECISIONS):
        is_bf16 = precision == "bf16"
        cohort = _make_cohort(work, device, 2)
        x = torch.randn(num_images, 3, work.side, work.side, device=device)
        group = 16 if quick else max(16, 512 * 32**2 // work.side**2)
        ways = {
            "groups": partial(_pass, cohort, x.split(num_images), group, is_bf16),
            "all images": partial(_pass, cohort, x.split(num_images), num_images, is_bf16),
            "two models": partial(_pass, cohort, x.split(group // 2), group, is_bf16),
        }
        seconds = take_turns(ways, device, repeats)
        yield {
            "model": f"{work.backbone}, {work.side}×{work.side}",
            "precision": precision,
            "images": num_images,
            "group": group,
            "all images / groups": ratio(seconds["all images"], seconds["groups"]),
            "two models / groups": ratio(seconds["two models"], seconds["groups"]),
            "fp32: groups, MB": round(in_new_process(_memory, work, device, num_images, group)),
            "all images, MB": round(in_new_process(_memory, work, device, num_images, num_images)),
        }


def _memory(work: Workload, device: torch.device, num_images: int, rows: int) -> float:
    """Return how much the memory in use grows at its peak by one model's pass, in MB."""
    cohort = _make_cohort(work, device, 1)
    x = torch.randn(num_images, 3, work.side, work.side, device=device)
    return growth(lambda: cohort.engine.shared_logits(cohort.states, x, rows), device)


def _pass(cohort: Cohort, batches: Sequence[Tensor], rows: int, bf16: bool) -> None:
    """Run all models on batches of images, so many rows at once."""
    with torch.autocast(batches[0].device.type, torch.bfloat16, enabled=bf16):
        for x in batches:
            cohort.engine.shared_logits(cohort.states, x, rows)


def _one_by_one(cohort: Cohort, x: Tensor) -> Tensor:
    """Return the logits of the models, which are run one after another."""
    num_models = len(next(iter(cohort.states.values())))
    logits = []
    for index in range(num_models):
        state = {key: value[index : index + 1] for key, value in cohort.states.items()}
        logits.append(cohort.engine.shared_logits(state, x))
    return torch.cat(logits)


def _workload(quick: bool, passes: int = 3) -> Workload:
    work = Workload(passes=passes)
    if quick:
        return replace(work, backbone="test_resnet", public=32, public_batch=16, clients=2, sampled=2)
    return work


def _make_cohort(work: Workload, device: torch.device, count: int) -> Cohort:
    """Return an engine and a stack of equal states."""
    model = work.module().model.to(device)
    is_vit = "vit" in str(work.backbone)
    return Cohort(Engine(model, "folded", channels_last=not is_vit), clone(expand(get_state(model), count)))
