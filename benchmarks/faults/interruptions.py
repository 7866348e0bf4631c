# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, at random moments and at operations on files, and runs whose disk is full.

Each is resumed by its own command. Its states and scores must then equal, bit by bit, those of a run that was not
interrupted, and its temporary directory must be empty.
"""

import random
import shutil
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faults.job import PRIVATE, Job
from benchmarks.faults.labels import LABELS
from benchmarks.faults.outcomes import REPORTED, SURVIVED, Campaign, Verdict
from benchmarks.faults.processes import (
    MEMORY,
    Fault,
    Hang,
    JobFailed,
    References,
    content,
    equal,
    left_behind,
    start,
)
from perada.algorithms.registry import methods

STORES = ("device", "host", "disk")
PARALLEL = 2
"""Jobs at a time."""
FULL_FILE = "no room in a file"
DISKS = {"full disk": "full", "read-only disk": "read-only"}
"""Faults by the kinds of interruptions."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
MESSAGES = {"full": "No space left", "read-only": "Read-only file system", "no room": "File too large", "deleted": ""}
"""Words in the one line with which a job ends if it cannot write what it needs, by fault."""
EXHAUSTIVE = Job("ditto", "disk", "images")
"""The job that is killed before each of its operations on files."""


def interruptions(campaign: Campaign, folder: Path, seed: int, draws: int, quick: bool) -> None:
    """Interrupt random runs.

    Algorithm, labels, store, privacy, processes, fault and the disk of temporary files are drawn.

    Args:
        campaign: Where the verdicts are recorded.
        folder: Folder for the runs.
        seed: Seed of all draws.
        draws: Runs that are killed at random moments, and runs that are killed at random operations on files. Half as
            many find a full or a read-only disk, or no room for more of a file, lose their folder, or are asked to end
            by SIGTERM or SIGINT; a tenth have two processes. Then one run is killed at each of its operations.
        quick: Whether to leave out the last two.
    """
    references = References(folder / "whole")
    references.folder.mkdir(parents=True, exist_ok=True)
    counts = {
        "SIGKILL at a random moment": draws,
        "SIGKILL at an operation on a file": draws,
        "full disk": draws // 2,
        "read-only disk": draws // 2,
        FULL_FILE: draws // 2,
        "folder deleted": draws // 2,
        "SIGTERM": draws // 2,
        "SIGINT": draws // 2,
        "SIGKILL of one of two processes": 0 if quick else draws // 10,
        "SIGTERM to two processes": 0 if quick else draws // 20,
    }
    for kind, count in counts.items():

        def judge(number: int, kind: str = kind) -> Verdict:
            return _interrupt_random_job(kind, number, seed, references, folder)

        campaign.try_all(kind, count, judge, parallel=1 if "two" in kind else PARALLEL)
    if quick:
        return

    def kill_at(number: int) -> Verdict:
        trial = Trial(EXHAUSTIVE, Fault("kill", number), f"operation {number}", temporary_root=MEMORY)
        return _try(trial, references, folder)

    num_operations = references.of(EXHAUSTIVE).num_operations
    campaign.try_all("SIGKILL at every operation on a file of a run", num_operations, kill_at, PARALLEL)


@dataclass(frozen=True)
class Trial:
    """A job and what happens to it.

    Attributes:
        job: The job.
        fault: The fault.
        moment: When it happens, in words.
        temporary_root: A disk for temporary files, if it exists; else they are on the job's own.
    """

    job: Job
    fault: Fault
    moment: str
    temporary_root: Path | None


def _interrupt_random_job(kind: str, number: int, seed: int, references: References, folder: Path) -> Verdict:
    """Interrupt a job. Both are drawn, and follow from kind, number and seed only."""
    random_source = random.Random(f"{kind}/{seed}/{number}")
    names = sorted(methods())
    random.Random(seed).shuffle(names)  # so that different seeds begin with different algorithms
    num_processes = 2 if "two" in kind else 1
    private = random_source.choice(list(PRIVATE))
    labels = random_source.choice(list(LABELS))
    job = Job(names[number % len(names)], "device", private, num_processes, labels=labels)
    try:
        job = references.possible(job)
        reference = references.of(job)
    except JobFailed as error:
        return Verdict(f"a run that nobody interrupts failed: {error}", str(job))

    place = random_source.random()  # within the run
    rank = random_source.randrange(num_processes)
    if kind in DISKS:
        fault = Fault(DISKS[kind], int(place * reference.num_opened))
        moment = f"operation {fault.count}"
    elif kind == FULL_FILE:
        fault = Fault("no room", int(20 * 1000**place))  # in bytes; a checkpoint has some 10,000
        moment = f"byte {fault.count}"
    elif "operation" in kind:
        fault = Fault("kill", int(place * reference.num_operations))
        moment = f"operation {fault.count}"
    else:
        seconds = (0.05 + 0.95 * place) * reference.seconds
        fault = Fault(
            "deleted" if kind == "folder deleted" else "none", signal=_signal_of(kind), seconds=seconds, rank=rank
        )
        moment = f"after {seconds:.2f} s"
    job = replace(job, store=random_source.choice(STORES))  # bits do not depend on it
    temporary_root = MEMORY if random_source.random() < 0.5 else None
    return _try(Trial(job, fault, f"number {number}: {moment}", temporary_root), references, folder)


def _signal_of(kind: str) -> int:
    """Return the signal that a kind names; kinds without a signal do not send any."""
    for name, number in SIGNALS.items():
        if name in kind:
            return number
    return signal.SIGKILL


def _try(trial: Trial, references: References, root: Path) -> Verdict:
    """Interrupt a job, resume it, and compare what it left with the reference."""
    job = trial.job
    description = ", ".join(
        [
            job.algorithm,
            job.labels,
            job.store,
            f"privacy of {job.private}",
            f"{job.processes} processes",
            trial.moment,
        ]
    )
    temporary_root = root
    if trial.temporary_root is not None and trial.temporary_root.is_dir():
        temporary_root = trial.temporary_root
        description += ", temporary files in memory"
    with tempfile.TemporaryDirectory(prefix="perada-faults-", dir=temporary_root) as temporary:
        folder = Path(tempfile.mkdtemp(dir=root)) / "run"
        try:
            outcome = _interrupt_and_resume(job, trial.fault, folder, Path(temporary), references)
        except Hang as error:
            outcome = str(error)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return Verdict(outcome, description)


def _interrupt_and_resume(job: Job, fault: Fault, folder: Path, temporary: Path, references: References) -> str:
    """Return the outcome of a fault."""
    is_drawn = job != EXHAUSTIVE
    expected = references.of(replace(job, store="device") if is_drawn else job).content
    interrupted = start(job, folder, temporary, fault)
    if not interrupted.done:
        if fault.kind in MESSAGES:
            error = interrupted.error
            names_folder = str(folder) in error or str(temporary) in error
            if not names_folder or MESSAGES[fault.kind] not in error or "\n" in error:
                return f"does not say in one line what cannot be written: {error[-300:]!r}"
        elif not any(interrupted.statuses):  # of two processes, one may have done its part before
            return f"was ended early, with the statuses {interrupted.statuses}"

    resumed = start(job, folder, temporary)
    if fault.kind == "deleted" and str(folder) in resumed.error and "\n" not in resumed.error:
        return REPORTED  # files were deleted while a checkpoint was written, and are missed
    if not resumed.done or any(resumed.statuses):
        return f"was not resumed: {resumed.statuses} {resumed.error[-300:]!r}"
    useless_files = left_behind(folder, temporary)
    if useless_files:
        return f"left {useless_files}"
    return SURVIVED if equal(content(folder, job), expected) else "ended otherwise"
