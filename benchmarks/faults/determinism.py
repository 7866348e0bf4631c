# SPDX-License-Identifier: Apache-2.0
"""Runs of the same seed in another way: hash seed, store, threads, chunks of clients, engine, two processes.

Runs that differ in their hash seed, or in where states are kept, must be equal bit by bit. Where sums are made in
another order, runs are in double precision and must agree to 1e-9, so that rounding cannot hide a difference.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.faults.interruptions import PARALLEL
from benchmarks.faults.job import PRIVATE, Job
from benchmarks.faults.labels import LABELS
from benchmarks.faults.outcomes import SURVIVED, Campaign, Verdict
from benchmarks.faults.processes import Hang, JobFailed, References, content, equal, start
from perada.algorithms.registry import methods
from perada.core.states import State

TOLERANCE = 1e-9
OTHER_HASH_SEED = "another hash seed"
WAYS: dict[str, dict[str, Any]] = {
    OTHER_HASH_SEED: {},
    "states in host memory": {"store": "host"},
    "states on disk": {"store": "disk"},
    "two threads": {"threads": 2, "double": True},
    "clients one at a time": {"options": (("training", {"clients_per_chunk": 1}),), "double": True},
    "the loop engine": {"options": (("training", {"engine": "loop"}),), "double": True},
    "two processes": {"processes": 2, "double": True},
}
"""What differs from a run with one thread and one process, whose states are on its device."""
PROGRAM = """
import json, sys
from benchmarks.faults.job import Job, run
run(Job(**json.loads(sys.argv[1])), *sys.argv[2:4], "none", 0, 0, 0, sys.argv[4])
"""
"""Runs a job; its words are the job, its folder, that for temporary files, and the file of its message."""


def determinism(campaign: Campaign, folder: Path, seed: int, count: int) -> None:
    """Run ``count`` jobs in each way; algorithm, privacy and labels are drawn."""
    references = References(folder / "whole")
    references.folder.mkdir(parents=True, exist_ok=True)
    for way in WAYS:

        def judge(number: int, way: str = way) -> Verdict:
            return _compare(way, number, seed, references, folder)

        campaign.try_all(f"same seed: {way}", count, judge, parallel=1 if "two" in way else PARALLEL)


def _compare(way: str, number: int, seed: int, references: References, root: Path) -> Verdict:
    """Run a job in another way, and compare it with the reference."""
    random_source = random.Random(f"{way}/{seed}/{number}")
    names = sorted(methods())
    random.Random(seed).shuffle(names)
    is_double = "double" in WAYS[way]
    private = random_source.choice(list(PRIVATE))
    labels = random_source.choice(list(LABELS))
    job = Job(names[number % len(names)], private=private, double=is_double, labels=labels)
    try:
        job = references.possible(job)
        expected = references.of(job).content
    except JobFailed as error:
        return Verdict(f"a run failed: {error}", str(job))
    description = f"{job.algorithm}, {job.labels}, privacy of {job.private}"
    other_job = replace(job, **WAYS[way])
    folder = Path(tempfile.mkdtemp(dir=root)) / "run"
    try:
        if way == OTHER_HASH_SEED:
            message = _run_in_new_interpreter(other_job, folder, hash_seed=1 + number)
        else:
            ended = start(other_job, folder, folder.with_name("tmp"))
            message = "done" if ended.done else ended.error
        if message != "done":
            return Verdict(f"failed: {message[-300:]}", description)
        result = content(folder, other_job)
    except Hang as error:
        return Verdict(str(error), description)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    if not is_double:
        return Verdict(SURVIVED if equal(result, expected) else "ended otherwise", description)
    distance = _largest_distance(result.states, expected.states)
    if distance <= TOLERANCE and result.scores == expected.scores:
        return Verdict(SURVIVED, description)
    return Verdict(f"states are {distance:.1g} apart", description)


def _largest_distance(states: list[State], expected_states: list[State]) -> float:
    """Return the largest difference between numbers of the states."""
    distances = []
    for state, expected in zip(states, expected_states, strict=True):
        for key, value in state.items():
            if value.numel():
                distances.append(float((value - expected[key]).abs().max()))
    return max(distances)


def _run_in_new_interpreter(job: Job, folder: Path, hash_seed: int) -> str:
    """Run a job in another interpreter with its own hash seed, and return its message."""
    message_file = folder.with_name("run.0.txt")
    temporary = folder.with_name("tmp")
    folder.mkdir()
    temporary.mkdir()
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    words = [json.dumps(asdict(job)), str(folder), str(temporary), str(message_file)]
    subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True)
    return message_file.read_text() if message_file.exists() else "nothing was said"
