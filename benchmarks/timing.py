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
    """Return the time in seconds after the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def processor_clock(device: torch.device) -> float:
    """Return the processor time of this process in seconds on a CPU, where other work takes none of it.

    On other devices it is :func:`clock`.
    """
    return time.process_time() if device.type == "cpu" else clock(device)


def take_turns(
    ways: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[torch.device], float] = clock,
) -> dict[str, list[float]]:
    """Run ways in turns, and return the seconds of each way in each turn.

    Args:
        ways: The ways by name.
        device: The device that they run on.
        repeats: Number of turns.
        warm_up: Number of turns before these, which are not timed.
        clock: Returns the time in seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn_number in range(warm_up + repeats):
        for name, way in ways.items():
            started_at = clock(device)
            way()
            elapsed = clock(device) - started_at
            if turn_number >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of two ways that took turns."""
    ratios = [numerator / denominator for numerator, denominator in zip(above, below, strict=True)]
    return round(statistics.median(ratios), 3)


def in_new_process(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function in a new process, where nothing ran before it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def growth(way: Callable[[], object], device: torch.device) -> float:
    """Return the growth of the peak memory in use by ``way`` in MB, of the GPU or of this process (Linux)."""
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
    """Return a figure of this process's memory in MB.

    Args:
        name: Name of a line in ``/proc/self/status``.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024 / 1e6
    raise KeyError(name)
