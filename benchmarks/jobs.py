# SPDX-License-Identifier: Apache-2.0
"""How many runs one device carries at once: rounds of several processes, each of which trains a federation of its own.

The host starts the kernels of a small model one after another, and most of a large GPU waits meanwhile. Several runs
then share it, as those of ``perada compare --jobs N`` do.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.round import RESNET, SMALL
from benchmarks.timing import clock
from benchmarks.workload import Workload

JOBS = (1, 2, 4, 8)
PATIENCE = 120.0
"""Seconds to wait for the other processes to have done their first round; one of them may have failed."""
_barrier: Barrier | None = None


def jobs(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 with residual adapters, 32×32, 8 clients × 64: all of it, and adapters in the last stage."""
    last_stage = replace(RESNET, options={"last_blocks": 2})
    cases = {"small": SMALL} if quick else {"all stages": RESNET, "last stage": last_stage}
    numbers = (1, 2) if quick else [number for number in JOBS if number <= (os.cpu_count() or 1)]
    for name, work in cases.items():
        alone = 0.0
        for number in numbers:
            seconds, megabytes = _together(work, device, number, repeats)
            speed = number * repeats / seconds
            alone = alone or speed
            yield {
                "adapters": name,
                "processes": number,
                "rounds per second": round(speed, 3),
                "these / one process": round(speed / alone, 3),
                "GPU memory of a process, MB": round(megabytes),
            }


def _together(work: Workload, device: torch.device, number: int, repeats: int) -> tuple[float, float]:
    """Seconds until the last process has done its rounds after the first one, and the peak memory of one in MB."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(number)
    with ProcessPoolExecutor(number, context, initializer=_begin, initargs=(barrier,)) as pool:
        runs = [pool.submit(_run, work, device, repeats) for _ in range(number)]
        results = [run.result() for run in runs]
    return max(seconds for seconds, _ in results), max(megabytes for _, megabytes in results)


def _begin(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier
    torch.set_num_threads(1)


class AfterTheFirstRound(pl.Callback):
    """Waits for the other processes after the first round, which prepares much, and times those that follow."""

    began = ended = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, or note the end of a round."""
        self.ended = clock(self.device)
        if trainer.current_epoch == 0:
            assert _barrier is not None
            _barrier.wait(PATIENCE)
            self.began = time.perf_counter()


def _run(work: Workload, device: torch.device, repeats: int) -> tuple[float, float]:
    """Train in this process; return seconds and peak memory."""
    watch = AfterTheFirstRound(device)
    work.finetune(work.data(), device, rounds=1 + repeats, callbacks=[watch])
    megabytes = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    return watch.ended - watch.began, megabytes
