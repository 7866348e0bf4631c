# SPDX-License-Identifier: Apache-2.0
"""The same seed in another way: hash seed, store, threads, chunks of clients, engine, two processes.

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

from benchmarks.faults.interruptions import TOGETHER
from benchmarks.faults.job import PRIVATE, Job
from benchmarks.faults.outcomes import Campaign
from benchmarks.faults.processes import Hang, Wholes, content, equal, start
from perada.algorithms import ALGORITHMS

TOLERANCE = 1e-9
WAYS: dict[str, dict[str, Any]] = {
    "another hash seed": {},
    "states in host memory": {"store": "host"},
    "states on disk": {"store": "disk"},
    "two threads": {"threads": 2, "double": True},
    "clients one at a time": {"options": (("training", {"clients_per_chunk": 1}),), "double": True},
    "the loop engine": {"options": (("training", {"engine": "loop"}),), "double": True},
    "two processes": {"processes": 2, "double": True},
}
"""What differs from a run on one thread and in one process, whose states are on its device."""
ALONE = """
import json, sys
from benchmarks.faults.job import Job, run
run(Job(**json.loads(sys.argv[1])), *sys.argv[2:4], "none", 0, 0, 0, sys.argv[4])
"""


def determinism(campaign: Campaign, folder: Path, seed: int, count: int) -> None:
    """Run ``count`` jobs in each way that are drawn: algorithm and privacy."""
    wholes = Wholes(folder / "whole")
    wholes.folder.mkdir(parents=True, exist_ok=True)
    for way in WAYS:

        def judge(number: int, way: str = way) -> tuple[str, str]:
            return _judged(way, number, seed, wholes, folder)

        campaign.each(f"same seed: {way}", count, judge, 1 if "two" in way else TOGETHER)


def _judged(way: str, number: int, seed: int, wholes: Wholes, root: Path) -> tuple[str, str]:
    draw = random.Random(f"{way}/{seed}/{number}")
    names = sorted(ALGORITHMS)
    random.Random(seed).shuffle(names)
    double = "double" in WAYS[way]
    job = Job(names[number % len(names)], private=draw.choice(list(PRIVATE)), double=double)
    expected = wholes.of(job)
    if isinstance(expected, str):  # the algorithm does not go with privacy
        job = replace(job, private="none")
        expected = wholes.of(job)
    what = f"{job.algorithm}, privacy of {job.private}"
    if isinstance(expected, str):
        return f"a run failed: {expected}", what
    other, folder = replace(job, **WAYS[way]), Path(tempfile.mkdtemp(dir=root)) / "run"
    try:
        said = _alone(other, folder, number) if way == "another hash seed" else _started(other, folder)
        if said != "done":
            return f"failed: {said[-300:]}", what
        found = content(folder, other)
    except Hang as error:
        return str(error), what
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    if not double:
        return "held" if equal(found, expected[0]) else "ended otherwise", what
    apart = max(
        float((value - other[key]).abs().max())
        for state, other in zip(found[0], expected[0][0], strict=True)
        for key, value in state.items()
        if value.numel()
    )
    return "held" if apart <= TOLERANCE and found[1] == expected[0][1] else f"states are {apart:.1g} apart", what


def _started(job: Job, folder: Path) -> str:
    ended = start(job, folder, folder.with_name("tmp"))
    return "done" if ended.done else ended.error


def _alone(job: Job, folder: Path, number: int) -> str:
    """Run a job in an interpreter of its own."""
    said, temporary = folder.with_name("run.0.txt"), folder.with_name("tmp")
    folder.mkdir()
    temporary.mkdir()
    environment = os.environ | {"PYTHONHASHSEED": str(1 + number)}
    words = [json.dumps(asdict(job)), str(folder), str(temporary), str(said)]
    subprocess.run([sys.executable, "-c", ALONE, *words], env=environment, capture_output=True)
    return said.read_text() if said.exists() else "nothing was said"
