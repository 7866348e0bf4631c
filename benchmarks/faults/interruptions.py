# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, at random moments and at operations on files, and runs whose disk is full.

Each is resumed by its own command. Its states and scores must then be those of a run that was left alone, bit by bit,
and its temporary directory empty.
"""

import random
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.job import PRIVATE, Job
from benchmarks.faults.outcomes import Campaign
from benchmarks.faults.processes import MEMORY, Fault, Hang, Wholes, content, equal, left_behind, start
from perada.algorithms import ALGORITHMS

STORES = ("device", "host", "disk")
TOGETHER = 2
"""Jobs at a time."""
DISKS = {"full disk": "full", "read-only disk": "read-only"}
ROOM = "no room in a file"
SAID = {"full": "No space left", "read-only": "Read-only file system", "no room": "File too large", "deleted": ""}
"""Words of the one line with which a job ends, if it cannot do without what it was to write."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
EVERY = Job("ditto", "disk", "images")
"""The job that is killed before each of its operations on files."""


def interruptions(campaign: Campaign, folder: Path, seed: int, draws: int, quick: bool) -> None:
    """Interrupt runs that are drawn: algorithm, store, privacy, processes, fault, and the temporary directory's disk.

    ``draws`` are killed at random moments, as many at random operations on files. Half as many find a full or a
    read-only disk, or no room for more of a file, lose their folder, or are asked to end by SIGTERM or SIGINT; a
    tenth of ``draws`` have two processes. Then one run is killed at each of its operations. ``quick`` leaves out these
    two.
    """
    wholes = Wholes(folder / "whole")
    wholes.folder.mkdir(parents=True, exist_ok=True)
    kinds = {
        "SIGKILL at a random moment": draws,
        "SIGKILL at an operation on a file": draws,
        "full disk": draws // 2,
        "read-only disk": draws // 2,
        ROOM: draws // 2,
        "folder deleted": draws // 2,
        "SIGTERM": draws // 2,
        "SIGINT": draws // 2,
        "SIGKILL of one of two processes": 0 if quick else draws // 10,
        "SIGTERM to two processes": 0 if quick else draws // 20,
    }
    for kind, count in kinds.items():

        def judge(number: int, kind: str = kind) -> tuple[str, str]:
            return _drawn(kind, number, seed, wholes, folder)

        campaign.each(kind, count, judge, 1 if "two" in kind else TOGETHER)
    if quick:
        return
    whole = wholes.of(EVERY)
    assert not isinstance(whole, str), whole
    campaign.each(
        "SIGKILL at every operation on a file of a run",
        whole[3],
        lambda number: _tried(EVERY, Fault("kill", number), f"operation {number}", MEMORY, wholes, folder),
        TOGETHER,
    )


def _drawn(kind: str, number: int, seed: int, wholes: Wholes, folder: Path) -> tuple[str, str]:
    """Draw a job and what happens to it, from seed, kind and number alone."""
    draw = random.Random(f"{kind}/{seed}/{number}")
    names = sorted(ALGORITHMS)
    random.Random(seed).shuffle(names)  # so that as many as possible are met
    processes = 2 if "two" in kind else 1
    job = Job(names[number % len(names)], "device", draw.choice(list(PRIVATE)), processes)
    whole = wholes.of(job)
    if isinstance(whole, str):  # the algorithm does not go with privacy
        job = replace(job, private="none")
        whole = wholes.of(job)
    if isinstance(whole, str):
        return f"a run that nobody interrupts failed: {whole}", str(job)
    _, seconds, opened, operations = whole
    place, rank = draw.random(), draw.randrange(processes)
    if kind in DISKS:
        fault = Fault(DISKS[kind], int(place * opened))
    elif kind == ROOM:
        fault = Fault("no room", int(20 * 1000**place))  # bytes; a checkpoint has some 10,000
    elif "operation" in kind:
        fault = Fault("kill", int(place * operations))
    else:
        sent = next((value for name, value in SIGNALS.items() if name in kind), signal.SIGKILL)
        what = "deleted" if kind == "folder deleted" else "none"
        fault = Fault(what, signal=sent, seconds=(0.05 + 0.95 * place) * seconds, rank=rank)
    job = replace(job, store=draw.choice(STORES))  # bits do not depend on it
    where = MEMORY if draw.random() < 0.5 else None
    when = (
        f"after {fault.seconds:.2f} s"
        if fault.seconds is not None
        else f"{'byte' if kind == ROOM else 'operation'} {fault.count}"
    )
    return _tried(job, fault, f"number {number}: {when}", where, wholes, folder)


def _tried(job: Job, fault: Fault, what: str, where: Path | None, wholes: Wholes, root: Path) -> tuple[str, str]:
    """Interrupt a job, resume it, and compare what came out; temporary files are ``where`` another disk is, or not."""
    elsewhere = where is not None and where.is_dir()
    what = f"{job.algorithm}, {job.store}, privacy of {job.private}, {job.processes} processes, {what}" + (
        ", temporary files in memory" if elsewhere else ""
    )
    with tempfile.TemporaryDirectory(prefix="perada-faults-", dir=where if elsewhere else root) as temporary:
        folder = Path(tempfile.mkdtemp(dir=root)) / "run"
        try:
            outcome = _interrupted(job, folder, Path(temporary), fault, wholes)
        except Hang as error:
            outcome = str(error)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return outcome, what


def _interrupted(job: Job, folder: Path, temporary: Path, fault: Fault, wholes: Wholes) -> str:
    expected = wholes.of(replace(job, store="device" if job.store in STORES and job != EVERY else job.store))
    assert not isinstance(expected, str)
    ended = start(job, folder, temporary, fault)
    said = ended.error
    if fault.kind in SAID and not ended.done:
        if not any(str(one) in said for one in (folder, temporary)) or SAID[fault.kind] not in said or "\n" in said:
            return f"does not say in one line what cannot be written: {said[-300:]!r}"
    elif not ended.done and not any(ended.statuses):  # of two processes, one may have done its part before
        return f"was ended early, with the statuses {ended.statuses}"
    ended = start(job, folder, temporary)
    if fault.kind == "deleted" and str(folder) in ended.error and "\n" not in ended.error:
        return "named"  # what went with the folder, while a checkpoint was written, is missed
    if not ended.done or any(ended.statuses):
        return f"was not resumed: {ended.statuses} {ended.error[-300:]!r}"
    if left := left_behind(folder, temporary):
        return f"left {left}"
    return "held" if equal(content(folder, job), expected[0]) else "ended otherwise"
