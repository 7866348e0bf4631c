# SPDX-License-Identifier: Apache-2.0
"""Seconds of ways that take turns, so that a machine whose speed drifts slows them alike, their ratios, and memory."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def clock(device: torch.device) -> float:
    """The time in seconds when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def take_turns(
    ways: dict[str, Callable[[], object]], device: torch.device, repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each way in each turn; the first ``warm_up`` turns are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + repeats):
        for name, way in ways.items():
            began = clock(device)
            way()
            if turn >= warm_up:
                seconds[name].append(clock(device) - began)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of two ways that took turns."""
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def alone(function: Callable[..., T], *arguments: object) -> T:
    """What ``function`` returns in a process of its own, where nothing ran before it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def growth(way: Callable[[], object], device: torch.device) -> float:
    """Growth of the memory in use at its peak during ``way``, in MB: of the GPU, or of this process (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        way()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident = status("VmRSS")
    way()
    return status("VmHWM") - resident


def status(name: str) -> float:
    """A figure of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6
