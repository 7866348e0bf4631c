# SPDX-License-Identifier: Apache-2.0
"""Memory and time of gradient checkpointing: rounds of clients that train together, with and without it."""

import itertools
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

import perada
from benchmarks.timing import in_new_process, processor_clock, status
from benchmarks.workload import Workload

CASES = {
    "ViT-S/16, LoRA, 8 clients × 8 images of 224×224": Workload(
        "vit_small_patch16_224", "lora", side=224, clients=8, sampled=8, batch=8, steps=1, public=1
    ),
    "ResNet-18, residual adapters, 20 clients × 64 images of 32×32": Workload(sampled=20, steps=2, public=1),
    "ResNet-18, all weights, 8 clients × 64 images of 32×32": Workload(
        adapter="full", clients=8, sampled=8, steps=2, public=1
    ),
}
"""Rounds to measure; all clients of a round share each pass."""
QUICK_CASES = {
    "test_vit, LoRA, 2 clients × 8 images of 32×32": Workload(
        "test_vit", "lora", clients=2, sampled=2, batch=8, steps=1, public=1
    )
}


def checkpointing(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure peak memory, less that before the first round, and the processor time of a round."""
    for name, workload in (QUICK_CASES if quick else CASES).items():
        plain: Cost | None = None
        for recomputes in (False, True):
            cost = in_new_process(_run, workload, recomputes, 1 + repeats, str(device))
            if plain is None:
                plain = cost
            yield {
                "round": name,
                "checkpointing": recomputes,
                "MB of a step": round(cost.step_mb),
                "MB / without": round(cost.step_mb / plain.step_mb, 2),
                "peak MB": round(cost.peak_mb),
                "processor seconds": round(cost.round_seconds, 2),
                "seconds / without": round(cost.round_seconds / plain.round_seconds, 2),
            }


@dataclass(frozen=True)
class Cost:
    """What a run took.

    Attributes:
        step_mb: Peak memory during the rounds, less that before the first one.
        peak_mb: Peak memory of the process during the rounds, or of the GPU if it trains there.
        round_seconds: Processor time of a round; on a GPU seconds on the clock.
    """

    step_mb: float
    peak_mb: float
    round_seconds: float


class _RoundRecorder(pl.Callback):
    """Records when rounds begin, and the memory before the first one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []
        self.mb_before = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.times:
            self.mb_before = _restart_peak(self.device)
        self.times.append(processor_clock(self.device))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.times.append(processor_clock(self.device))


def _restart_peak(device: torch.device) -> float:
    """Measure peak memory from now on, since set-up may have taken more, and return the megabytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    # Of this process: see proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def _run(workload: Workload, recomputes: bool, rounds: int, device: str) -> Cost:
    """Train, and return the cost."""
    warnings.simplefilter("ignore")
    recorder = _RoundRecorder(torch.device(device))
    perada.finetune(
        workload.backbone,
        workload.data(),
        pretrained=False,
        adapter=workload.adapter,
        algorithm="fedavg",
        rounds=rounds,
        clients_per_round=workload.sampled,
        batch_size=workload.batch,
        training={"checkpointing": recomputes, "clients_per_chunk": workload.sampled, "cache_features": False},
        accelerator="gpu" if device == "cuda" else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[recorder],
    )
    # The first round is to warm up.
    seconds = [after - before for before, after in itertools.pairwise(recorder.times[1:])]
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else status("VmHWM")
    return Cost(step_mb=peak - recorder.mb_before, peak_mb=peak, round_seconds=statistics.median(seconds))
