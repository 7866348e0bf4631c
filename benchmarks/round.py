# SPDX-License-Identifier: Apache-2.0
"""A whole round of perada against the naive way and the limit, and where its time goes.

perada runs as a user runs it, by :func:`perada.finetune`. At the end of each of its rounds the other ways take their
turn, with the same clients and images.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arithmetic import BF16, FP32, Arithmetic, arithmetics
from benchmarks.naive import Limit, Naive
from benchmarks.timing import clock, ratio
from benchmarks.workload import Workload
from perada.federation.cohort import Cohort
from perada.lightning.federated_loop import FederatedLoop

Way = Callable[[pl.LightningDataModule, int], dict[str, float]]
RESNET = Workload()
VIT = Workload(
    "vit_small_patch16_224", "lora", {}, side=224, clients=8, sampled=4, batch=8, steps=1, public=8, public_batch=8
)
LITE0 = replace(RESNET, backbone="tf_efficientnet_lite0", side=64, sampled=4, batch=32, public=128, public_batch=32)
SMALL = replace(RESNET, backbone="test_resnet", clients=4, sampled=2, batch=16, steps=2, public=32, public_batch=16)
VIT_GPU = replace(VIT, sampled=8, batch=32, steps=4, public=128, public_batch=32)


class Turns(pl.Callback):
    """Times the rounds of perada, and runs a round of each other way after them.

    Args:
        others: The other ways by name.
        device: The device that is timed.
        read: Returns the time in seconds, or another figure that grows.

    Attributes:
        seconds: By way and part of a round, a number for each round after the first.
    """

    def __init__(
        self, others: dict[str, Way], device: torch.device, read: Callable[[torch.device], float] = clock
    ) -> None:
        self.others = others
        self.device = device
        self.read = read
        self.seconds: dict[str, dict[str, list[float]]] = {name: {} for name in ("perada", *others)}
        self._started_at = 0.0
        self._trained_at = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move before the loop, which closes the round at the end of its last batch."""
        callbacks: list[pl.Callback] = trainer.callbacks
        callbacks.sort(key=lambda callback: callback is not self)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the end of the last local step."""
        if trainer.is_last_batch:
            # Steps in other threads may not have ended.
            self._cohort_of(trainer).wait()
            self._trained_at = self.read(self.device)

    @staticmethod
    def _cohort_of(trainer: pl.Trainer) -> Cohort:
        """Return the clients of the round that is under way."""
        loop = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop))
        cohort = loop.context.federation.cohort
        assert cohort is not None
        return cohort

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the end of the round, and run those of the other ways."""
        ended_at = self.read(self.device)
        parts_of_way = {
            "perada": {
                "local": self._trained_at - self._started_at,
                "server": ended_at - self._trained_at,
                "round": ended_at - self._started_at,
            }
        }
        for name, way in self.others.items():
            parts_of_way[name] = way(trainer.datamodule, trainer.current_epoch)
        if trainer.current_epoch > 0:  # the first round is to warm up
            for name, parts in parts_of_way.items():
                for part, value in parts.items():
                    self.seconds[name].setdefault(part, []).append(value)
        self._started_at = self.read(self.device)


def round_resnet(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 with residual adapters, 32×32, 8 clients × 64: little distillation, much, and large steps of it."""
    if quick:
        works = [SMALL]
    else:
        works = [RESNET, replace(RESNET, passes=10), replace(RESNET, clients=8, public=1024, public_batch=256)]
    for work in works:
        yield from _compare(work, device, repeats, quick)


def round_vit(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ViT-S/16 with LoRA at 224×224; on a CPU 4 clients a round with batches of 8, on a GPU 8 with batches of 32."""
    work = VIT if device.type == "cpu" else VIT_GPU
    if quick:
        work = replace(work, backbone="test_vit", side=160)
    yield from _compare(work, device, repeats, quick)


def round_lite0(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """EfficientNet-Lite0 with residual adapters, 64×64, 20 clients, 4 a round, batches of 32."""
    work = replace(SMALL, backbone="test_efficientnet") if quick else LITE0
    yield from _compare(work, device, repeats, quick)


def round_last_stage(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """As round_resnet, with adapters in the last stage only: perada keeps the outputs of what stands before it."""
    work = replace(SMALL if quick else RESNET, options={"last_blocks": 2})
    yield from _compare(work, device, repeats, quick)


class ProfileSecondRound(pl.Callback):
    """Profiles the second of two rounds."""

    def __init__(self, profiler: profile) -> None:
        self.profiler = profiler

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start after the first round, stop after the second."""
        if trainer.current_epoch == 0:
            self.profiler.start()
        else:
            self.profiler.stop()


def round_profile(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The operations that take the most time of perada's second round, without what they call."""
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_gpu:
        activities.append(ProfilerActivity.CUDA)
    works = [SMALL] if quick else [RESNET, LITE0]
    for work, precision in itertools.product(works, ("32-true", "bf16-mixed")):
        profiler = profile(activities=activities)
        work.finetune(work.data(), device, rounds=2, precision=precision, callbacks=[ProfileSecondRound(profiler)])
        microseconds = {}
        for event in profiler.key_averages():
            microseconds[event.key] = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        total = sum(microseconds.values())
        slowest = sorted(microseconds, key=lambda name: -microseconds[name])[:15]
        for name in slowest:
            yield {
                "model": work.backbone,
                "precision": precision,
                "operation": name,
                "share": round(microseconds[name] / total, 3),
                "milliseconds": round(microseconds[name] / 1e3, 1),
            }


def _compare(work: Workload, device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each arithmetic of perada, beside the naive way in fp32 and in this one, and the limit."""
    for arithmetic in arithmetics(device, quick):
        is_bf16 = arithmetic is BF16
        data = work.data()
        limit = Limit(work, work.module().model, device, is_bf16)
        others: dict[str, Way] = {
            "naive fp32": _in_arithmetic(FP32, Naive(work, work.module().model, data, device).round),
            "limit": lambda *_, limit=limit: {"local": limit.local()},
        }
        if arithmetic is not FP32:
            naive = Naive(work, work.module().model, data, device, is_bf16)
            others[f"naive {arithmetic.name}"] = naive.round
        turns = Turns(others, device)
        with arithmetic.active():
            work.finetune(data, device, rounds=1 + repeats, precision=arithmetic.precision, callbacks=[turns])
        yield _row(work, arithmetic.name, turns.seconds)


def _in_arithmetic(arithmetic: Arithmetic, way: Way) -> Way:
    """Return a way that computes in an arithmetic of its own."""

    def run(data: pl.LightningDataModule, round_number: int) -> dict[str, float]:
        with arithmetic.active():
            return way(data, round_number)

    return run


def _row(work: Workload, precision: str, seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return the ratios of the ways, and the medians of their seconds."""
    perada_seconds = seconds["perada"]
    images = 2 * work.sampled * work.batch * work.steps
    row: dict[str, Any] = {
        "model": f"{work.backbone}, {work.adapter}, {work.side}×{work.side}",
        "clients": f"{work.sampled} × {work.batch}",
        "public images seen": work.passes,
        "distillation": f"{work.distillation.steps} × {work.distillation.batch_size}",
        "precision": precision,
    }
    for name, parts in seconds.items():
        if name.startswith("naive"):
            for part, times in parts.items():
                row[f"{name} / perada, {part}"] = ratio(times, perada_seconds[part])
    row["perada / limit, local"] = ratio(perada_seconds["local"], seconds["limit"]["local"])
    row["local images per second"] = round(images / statistics.median(perada_seconds["local"]))
    row["seconds"] = {}
    for name, parts in seconds.items():
        row["seconds"][name] = {part: round(statistics.median(times), 4) for part, times in parts.items()}
    return row
