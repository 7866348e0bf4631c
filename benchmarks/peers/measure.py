# SPDX-License-Identifier: Apache-2.0
"""Runs a framework in a process of its own, and takes its seconds and memory."""

import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peers.memory import process_tree, proportional_mb
from benchmarks.peers.tasks import RESULT_FILE, Training
from benchmarks.sessions import ROOT, end_session, offline_environment

MODULES = {"perada": ("perada",), "pfl": ("pfl", "torch"), "flower": ("flwr", "ray", "torch")}
"""What each framework's process imports."""
PACKAGES = {"perada": "perada", "pfl": "pfl[pytorch]", "flower": "flwr[simulation]"}
SAMPLING_SECONDS = 0.2
LIMIT_SECONDS = 1800
"""After which a process is ended."""


@dataclass(frozen=True)
class Measurement:
    """One process.

    Attributes:
        seconds_to_first_round: From the start of the process to the first local round.
        first_round_seconds: The first round, which warms up.
        round_seconds: Median of the rounds after it; the first one where there is no other.
        peak_mb: Peak memory of the process and its children; 0 if it was not sampled.
        training: What was trained.
    """

    seconds_to_first_round: float
    first_round_seconds: float
    round_seconds: float
    peak_mb: float
    training: Training


def missing_packages(python: str, framework: str) -> str:
    """Return what to install where an interpreter lacks a framework, or nothing."""
    code = "import json, sys\nfrom importlib.util import find_spec\n"
    code += "print(json.dumps([name for name in sys.argv[1:] if find_spec(name) is None]))"
    command = [python, "-c", code, *MODULES[framework]]
    try:
        ended = subprocess.run(command, cwd=ROOT, env=process_environment(1), capture_output=True, text=True)
    except OSError as error:
        return f"{python} cannot be started: {error}"
    if ended.returncode != 0:
        return f"{python} ended with status {ended.returncode}: {ended.stderr.strip()[-200:]}"
    missing = json.loads(ended.stdout)
    if not missing:
        return ""
    return (
        f"{python} has no {', '.join(missing)}; install it by {python} -m pip install '{PACKAGES[framework]}', or name "
        "another interpreter with --peer-python"
    )


def run_process(
    python: str, framework: str, folder: Path, rounds: int, threads: int, sample_memory: bool = False
) -> Measurement:
    """Train the task of a folder in a new process.

    Args:
        python: Interpreter.
        framework: Which one of :data:`benchmarks.peers.tasks.FRAMEWORKS`.
        folder: Where the task's file is, and the process writes.
        rounds: Rounds to train for.
        threads: Threads that it may use.
        sample_memory: Sample the memory, which slows the process down a little.

    Raises:
        RuntimeError: If the process failed or took too long. The message ends with the end of what it printed.
    """
    result_file = folder / RESULT_FILE
    result_file.unlink(missing_ok=True)
    log_file = folder / f"{framework}.log"
    command = [python, "-m", "benchmarks.peers.runner", framework, str(folder), str(rounds), str(threads)]
    # Flower's actors have a thread each, and there is one for each thread of the others.
    environment = process_environment(1 if framework == "flower" else threads)
    peak_mb = 0.0
    with log_file.open("wb") as log:
        started_at = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - started_at < LIMIT_SECONDS:
                if sample_memory:
                    peak_mb = max(peak_mb, proportional_mb(process_tree(process.pid)))
                time.sleep(SAMPLING_SECONDS)
        finally:
            end_session(process)
    if process.returncode != 0 or not result_file.is_file():
        printed = log_file.read_text(errors="replace").strip()
        raise RuntimeError(f"{framework} ended with status {process.returncode}: ...{printed[-1500:]}")
    training = Training(**torch.load(result_file))
    return measurement_of(training, started_at, peak_mb)


def measurement_of(training: Training, started_at: float, peak_mb: float) -> Measurement:
    """Return the figures of a process that started at a time of ``time.monotonic``."""
    times = [*training.round_starts, training.ended]
    seconds = [times[place + 1] - times[place] for place in range(len(times) - 1)]
    return Measurement(
        seconds_to_first_round=times[0] - started_at,
        first_round_seconds=seconds[0],
        round_seconds=statistics.median(seconds[1:] or seconds),
        peak_mb=peak_mb,
        training=training,
    )


def process_environment(threads: int) -> dict[str, str]:
    """Return the environment of a framework's process: a number of threads, and no package reports to anyone."""
    return offline_environment(
        PYTHONDONTWRITEBYTECODE="",  # compiled sources are kept, as they are by default
        OMP_NUM_THREADS=str(threads),
        FLWR_TELEMETRY_ENABLED="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_raylet_start_wait_time_s="600",  # instead of 30, which a busy machine exceeds
    )
