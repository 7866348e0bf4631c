# SPDX-License-Identifier: Apache-2.0
"""Memory and time of gradient checkpointing: a step of clients that train together, with and without it."""

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import in_new_process, processor_clock, status
from benchmarks.workload import Workload
from perada.core.seeding import Streams
from perada.core.states import clone, expand, get_state, parameter_keys
from perada.engine.engine import Engine
from perada.models.blocks import repeated_blocks

CASES = {
    "ViT-S/16, LoRA, 8 clients × 8 images of 224×224": Workload(
        "vit_small_patch16_224", "lora", side=224, sampled=8, batch=8
    ),
    "ResNet-18, residual adapters, 20 clients × 64 images of 32×32": Workload(sampled=20),
    "ResNet-18, all weights, 8 clients × 64 images of 32×32": Workload(adapter="full", sampled=8),
}
"""Steps to measure; all clients share the pass."""
QUICK_CASES = {"test_vit, LoRA, 2 clients × 8 images of 32×32": Workload("test_vit", "lora", sampled=2, batch=8)}


def checkpointing(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure what a forward and backward pass adds to the memory in use, gradients included, and its time."""
    for name, workload in (QUICK_CASES if quick else CASES).items():
        plain: Cost | None = None
        for recomputes in (False, True):
            cost = in_new_process(_measure_step, workload, recomputes, repeats, str(device))
            if plain is None:
                plain = cost
            yield {
                "step": name,
                "checkpointing": recomputes,
                "peak MB": round(cost.peak_mb),
                "MB / without": round(cost.peak_mb / plain.peak_mb, 2),
                "processor seconds": round(cost.seconds, 2),
                "seconds / without": round(cost.seconds / plain.seconds, 2),
            }


@dataclass(frozen=True)
class Cost:
    """What a step took.

    Attributes:
        peak_mb: Peak memory of the process, or of the GPU, less that before the first step.
        seconds: Processor time of a step; on a GPU seconds on the clock.
    """

    peak_mb: float
    seconds: float


def _measure_step(workload: Workload, recomputes: bool, repeats: int, device_name: str) -> Cost:
    """Take steps, and return the cost of one."""
    warnings.simplefilter("ignore")
    device = torch.device(device_name)
    module = workload.module()
    model = module.model.to(device)
    recomputed = repeated_blocks(model, str(workload.backbone)) if recomputes else ()
    engine = Engine(
        model, "folded", channels_last=module.engine.memory_format is torch.channels_last, recomputed=recomputed
    )
    states = clone(expand(get_state(model), workload.sampled))
    trained = parameter_keys(model)
    leaves = {key: value.requires_grad_(key in trained) for key, value in states.items()}
    random = torch.Generator().manual_seed(0)
    x = torch.randn(workload.sampled, workload.batch, 3, workload.side, workload.side, generator=random).to(device)
    streams = Streams.derived(0, "dropout", clients=range(workload.sampled), device=device)

    mb_before = _restart_peak(device)
    seconds = []
    for _ in range(1 + repeats):
        started_at = processor_clock(device)
        logits = engine.logits(leaves, x, training=True, streams=streams)
        logits.square().mean((1, 2)).sum().backward()
        seconds.append(processor_clock(device) - started_at)
        for leaf in leaves.values():
            leaf.grad = None
    peak = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else status("VmHWM")
    # The first step is to warm up.
    return Cost(peak_mb=peak - mb_before, seconds=statistics.median(seconds[1:]))


def _restart_peak(device: torch.device) -> float:
    """Measure peak memory from now on, since what came before may have taken more, and return the megabytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    # Of this process: see proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
