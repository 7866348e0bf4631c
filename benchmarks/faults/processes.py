# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own: their start, the faults that hit them, and what they leave."""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import perada
from benchmarks.faults.job import UNEXPECTED, Job, run
from benchmarks.faults.labels import DEFAULT_LABELS
from perada.core.states import State
from perada.studies.report.records import rounds_of_csv

TIMEOUT = 150
"""Seconds after which a job hangs."""
GRACE = 30
"""Seconds that the others are given after one process of a job has failed."""
NO_MESSAGE = "no message, but the statuses "
"""Begins the error of a job whose processes wrote nothing at their ends."""
MEMORY = Path("/dev/shm")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.faults.job"])


class Hang(Exception):
    """A job did not end."""


@dataclass(frozen=True)
class Ended:
    """How a job's processes ended.

    Attributes:
        statuses: Exit status of each process, below 0 if a signal ended it.
        messages: What each process wrote at its end: ``done``, or an error.
    """

    statuses: list[int]
    messages: list[str]

    @property
    def done(self) -> bool:
        """Whether all results have been written."""
        return self.messages[0] == "done"

    @property
    def error(self) -> str:
        """The first error, or the statuses if there is none."""
        errors = [message for message in self.messages if message not in ("", "done")]
        return errors[0] if errors else f"{NO_MESSAGE}{self.statuses}"


@dataclass(frozen=True)
class Fault:
    """What happens to a job: at an operation on a file, or after some seconds.

    Attributes:
        kind: What happens at an operation on a file, for :func:`benchmarks.faults.job.run`; or ``deleted``, which
            removes the job's folder after ``seconds``.
        count: Number of the operation.
        signal: What is sent after ``seconds``. A SIGKILL is for one process; signals that ask for an end are sent to
            all, as by a terminal.
        seconds: When it happens; None for operations on files.
        rank: The process that is hit, of several.
    """

    kind: str = "none"
    count: int = 0
    signal: int = signal.SIGKILL
    seconds: float | None = None
    rank: int = 0


def start(job: Job, folder: Path, temporary: Path, fault: Fault = Fault()) -> Ended:  # frozen
    """Run a job until all its processes have ended.

    Args:
        job: The job.
        folder: Its folder; its messages are written beside it.
        temporary: Folder for its temporary files.
        fault: What happens to it.

    Raises:
        Hang: If the processes do not end.
    """
    for path in (folder, temporary):
        path.mkdir(parents=True, exist_ok=True)
    message_files = [folder.with_name(f"{folder.name}.{rank}.txt") for rank in range(job.processes)]
    for path in message_files:
        path.unlink(missing_ok=True)
    port = _free_port()
    deadline = time.monotonic() + TIMEOUT
    processes = []
    for rank, path in enumerate(message_files):
        kind = fault.kind if rank == fault.rank else "none"
        process = PROCESSES.Process(
            target=run, args=(job, str(folder), str(temporary), kind, fault.count, rank, port, str(path))
        )
        process.start()
        processes.append(process)
    if fault.seconds is not None:
        processes[0].join(fault.seconds)
        _hit(processes, fault, folder)
    _wait(processes, deadline)
    messages = [path.read_text() if path.exists() else "" for path in message_files]
    return Ended([process.exitcode or 0 for process in processes], messages)


def _hit(processes: Sequence[BaseProcess], fault: Fault, folder: Path) -> None:
    """Delete a job's folder, or send its processes a signal."""
    if fault.kind == "deleted":
        shutil.rmtree(folder, ignore_errors=True)  # files that are written meanwhile may remain
        return
    for rank, process in enumerate(processes):
        is_target = rank == fault.rank or fault.signal != signal.SIGKILL
        if is_target and process.is_alive() and process.pid:
            os.kill(process.pid, fault.signal)


def _wait(processes: Sequence[BaseProcess], deadline: float) -> None:
    """Wait for the end of all processes; after one has failed the others are ended.

    Raises:
        Hang: If some are alive at the deadline; they are killed.
    """
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(process.exitcode for process in processes):
            _end(processes)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    if hanging:
        raise Hang(f"{len(hanging)} of {len(processes)} processes did not end within {TIMEOUT} s")


@dataclass(frozen=True)
class Content:
    """What a job left.

    Attributes:
        states: Global states, and personal ones if there are any.
        scores: Scores of each client by name.
        rounds: Rows of ``metrics.csv``, with all digits; as text, in which NaN equals itself.
    """

    states: list[State]
    scores: dict[str, list[float]]
    rounds: list[dict[str, str]]


@dataclass(frozen=True)
class Reference:
    """A job that was not interrupted.

    Attributes:
        content: What it left.
        seconds: How long it took.
        num_opened: Files that it opened for writing.
        num_operations: Its operations on files.
    """

    content: Content
    seconds: float
    num_opened: int
    num_operations: int


class JobFailed(Exception):
    """A job that was not interrupted failed, mostly since its options do not go together."""

    @property
    def is_rejection(self) -> bool:
        """Whether the job rejected its options in an error that is meant for the user."""
        return not str(self).startswith((UNEXPECTED, NO_MESSAGE))


@dataclass
class References:
    """Jobs that are not interrupted, each run when it is first needed.

    Attributes:
        folder: Folder for the runs, which are deleted at their end.
        results: By job, the reference, or the error of a job that failed.
        locks: By job, a lock that lets one thread run it while others wait.
    """

    folder: Path
    results: dict[Job, Reference | JobFailed] = field(default_factory=dict)
    locks: dict[Job, threading.Lock] = field(default_factory=dict)

    def of(self, job: Job) -> Reference:
        """Return the reference of a job.

        Raises:
            JobFailed: If the job fails.
        """
        with self.locks.setdefault(job, threading.Lock()):
            if job not in self.results:
                self.results[job] = self._run(job)
        result = self.results[job]
        if isinstance(result, JobFailed):
            raise result
        return result

    def possible(self, job: Job) -> Job:
        """Return the first of these that does not reject its options: the job, one without privacy, one on classes.

        Raises:
            JobFailed: If a job fails in another way than by a rejection.
        """
        for possible_job in (job, replace(job, private="none")):
            try:
                self.of(possible_job)
            except JobFailed as error:
                if not error.is_rejection:
                    raise
            else:
                return possible_job
        if job.labels == DEFAULT_LABELS:
            return replace(job, private="none")
        return self.possible(replace(job, labels=DEFAULT_LABELS))

    def _run(self, job: Job) -> Reference | JobFailed:
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        started_at = time.monotonic()
        ended = start(job, folder, folder.with_name("tmp"), Fault("count"))
        seconds = time.monotonic() - started_at
        if not ended.done:
            return JobFailed(ended.error)
        num_opened, num_operations = folder.with_name(f"{folder.name}.0.txt.count").read_text().split()
        reference = Reference(content(folder, job), seconds, int(num_opened), int(num_operations))
        shutil.rmtree(folder.parent)
        return reference


def content(folder: Path, job: Job) -> Content:
    """Read the states and scores that a job saved, and the rounds of its newest ``metrics.csv``."""
    saved = perada.Run.load(folder / "saved", backbone=job.network())
    tables = sorted(folder.glob("lightning_logs/*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    rounds = []
    for row in rounds_of_csv(tables[-1]):
        # A round that was begun twice is accounted for twice.
        rounds.append({name: str(value) for name, value in row.items() if not name.startswith("privacy/")})
    states = list(saved.states("global"))
    if saved.personalized:
        states += saved.states("personal")
    return Content(states, saved.metrics["clients"], rounds)


def equal(result: Content, expected: Content) -> bool:
    """Return whether states, scores and the tables of rounds are equal bit by bit."""
    if len(result.states) != len(expected.states):
        return False
    for state, expected_state in zip(result.states, expected.states, strict=True):
        if not all(torch.equal(value, expected_state[key]) for key, value in state.items()):
            return False
    return result.scores == expected.scores and result.rounds == expected.rounds


def left_behind(folder: Path, temporary: Path) -> list[str]:
    """Return the names of files that are of no use after a run was interrupted and resumed."""
    files: list[Path] = []
    for pattern in ("*.partial", "*.part", ".perada-*"):
        files += folder.rglob(pattern)
    files += temporary.iterdir()
    return [path.name for path in files]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the other processes after one has failed, as torchrun does; most notice it by themselves."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal_number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
