# SPDX-License-Identifier: Apache-2.0
"""Rounds per second of several processes on one device, each of which trains its own federation.

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
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from benchmarks.round import RESNET, SMALL
from benchmarks.timing import clock
from benchmarks.workload import Workload

JOBS = (1, 2, 4, 8)
PATIENCE = 120.0
"""Seconds to wait for the other processes to finish their first round; one of them may have failed."""
_barrier: Barrier | None = None


def jobs(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Time ResNet-18 with residual adapters in all stages and in the last one; 8 clients, batches of 64, 32×32."""
    last_stage = replace(RESNET, options={"last_blocks": 2})
    cases = {"small": SMALL} if quick else {"all stages": RESNET, "last stage": last_stage}
    cores = os.cpu_count() or 1
    counts = [1, 2] if quick else [count for count in JOBS if count <= cores]
    for name, work in cases.items():
        speed_of_one = 0.0
        for count in counts:
            usage = _run_together(work, device, count, repeats)
            speed = count * repeats / usage.seconds
            if count == 1:
                speed_of_one = speed
            yield {
                "adapters": name,
                "processes": count,
                "rounds per second": round(speed, 3),
                "these / one process": round(speed / speed_of_one, 3),
                "GPU memory of a process, MB": round(usage.megabytes),
            }


class Usage(NamedTuple):
    """Seconds of the rounds after the first one, and the peak GPU memory in MB; 0 on a CPU."""

    seconds: float
    megabytes: float


def _run_together(work: Workload, device: torch.device, count: int, repeats: int) -> Usage:
    """Run several processes at once; return the largest time and the largest memory of one of them."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    with ProcessPoolExecutor(count, context, initializer=_set_barrier, initargs=(barrier,)) as pool:
        futures = [pool.submit(_run, work, device, repeats) for _ in range(count)]
        usages = [future.result() for future in futures]
    seconds = max(usage.seconds for usage in usages)
    return Usage(seconds, max(usage.megabytes for usage in usages))


def _set_barrier(barrier: Barrier) -> None:
    """Prepare a process: a barrier cannot be an argument of a task."""
    global _barrier
    _barrier = barrier
    torch.set_num_threads(1)


class AfterTheFirstRound(pl.Callback):
    """Times the rounds after the first one, at whose end it waits for the other processes.

    The first round also does what is done once in a run.
    """

    started_at = 0.0
    ended_at = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, or note the end of a round."""
        self.ended_at = clock(self.device)
        if trainer.current_epoch == 0:
            assert _barrier is not None
            _barrier.wait(PATIENCE)
            self.started_at = time.perf_counter()


def _run(work: Workload, device: torch.device, repeats: int) -> Usage:
    """Train in this process."""
    timer = AfterTheFirstRound(device)
    work.finetune(work.data(), device, rounds=1 + repeats, callbacks=[timer])
    megabytes = 0.0
    if device.type == "cuda":
        megabytes = torch.cuda.max_memory_allocated(device) / 1e6
    return Usage(timer.ended_at - timer.started_at, megabytes)
