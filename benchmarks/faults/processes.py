# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own: started, sent signals, waited for; and what they leave."""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import perada
from benchmarks.faults.job import Job, network_of, run
from perada.core.states import State
from perada.studies.report.records import rounds_of_csv

PATIENCE = 150
"""Seconds after which a job hangs."""
GRACE = 30
"""Seconds that the others are given after one process of a job has failed."""
MEMORY = Path("/dev/shm")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.faults.job"])
Content = tuple[list[State], dict[str, list[float]], list[dict[str, str]]]


class Hang(Exception):
    """A job did not end."""


@dataclass(frozen=True)
class Ended:
    """How a job's processes ended: their statuses, below 0 where a signal ended them, and what each said."""

    statuses: list[int]
    said: list[str]

    @property
    def done(self) -> bool:
        """Whether all that was asked for has been written."""
        return self.said[0] == "done"

    @property
    def error(self) -> str:
        """What was said first."""
        return next((said for said in self.said if said not in ("", "done")), f"status {self.statuses}")


@dataclass(frozen=True)
class Fault:
    """What happens to a job: at the ``count``-th operation on a file, or a signal after some seconds.

    Of two processes the one of the ``rank`` is hit; signals that ask for an end reach all, as from a terminal. After so
    many seconds ``deleted`` removes the job's folder instead.
    """

    kind: str = "none"
    count: int = 0
    signal: int = signal.SIGKILL
    seconds: float | None = None
    rank: int = 0


def start(job: Job, folder: Path, temporary: Path, fault: Fault = Fault()) -> Ended:  # frozen
    """Run a job in ``folder``, with its temporary files below ``temporary``, until all its processes have ended.

    Raises:
        Hang: If they do not.
    """
    for path in (folder, temporary):
        path.mkdir(parents=True, exist_ok=True)
    errors = [folder.with_name(f"{folder.name}.{rank}.txt") for rank in range(job.processes)]
    for path in errors:
        path.unlink(missing_ok=True)
    port, begun = _free_port(), time.monotonic()
    started = []
    for rank, path in enumerate(errors):
        kind = fault.kind if rank == fault.rank else "none"
        args = (job, str(folder), str(temporary), kind, fault.count, rank, port, str(path))
        started.append(PROCESSES.Process(target=run, args=args))
        started[-1].start()
    if fault.seconds is not None:
        started[0].join(fault.seconds)
        if fault.kind == "deleted":
            shutil.rmtree(folder, ignore_errors=True)  # what is written while this lasts may stay
        for rank, process in enumerate(started):
            if fault.kind == "deleted":
                break
            if process.is_alive() and process.pid and (fault.signal != signal.SIGKILL or rank == fault.rank):
                os.kill(process.pid, fault.signal)
    while any(process.is_alive() for process in started) and time.monotonic() < begun + PATIENCE:
        time.sleep(0.05)
        if any(process.exitcode for process in started):
            _end(started)
    late = [process for process in started if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    if late:
        raise Hang(f"{len(late)} of {len(started)} processes did not end within {PATIENCE} s")
    said = [path.read_text() if path.exists() else "" for path in errors]
    return Ended([process.exitcode or 0 for process in started], said)


@dataclass
class Wholes:
    """Jobs that were left alone: what each ends with, how long it takes, and on how many files it operates."""

    folder: Path
    found: dict[Job, tuple[Content, float, int, int] | str] = field(default_factory=dict)
    locks: dict[Job, threading.Lock] = field(default_factory=dict)

    def of(self, job: Job) -> tuple[Content, float, int, int] | str:
        """Content, seconds, files opened for writing and operations on files; or why the job is refused."""
        with self.locks.setdefault(job, threading.Lock()):
            if job not in self.found:
                self.found[job] = self._run(job)
            return self.found[job]

    def _run(self, job: Job) -> tuple[Content, float, int, int] | str:
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        begun = time.monotonic()
        ended = start(job, folder, folder.with_name("tmp"), Fault("count"))
        seconds = time.monotonic() - begun
        if not ended.done:
            return ended.error
        opened, operations = map(int, folder.with_name(f"{folder.name}.0.txt.count").read_text().split())
        whole = content(folder, job)
        shutil.rmtree(folder.parent)
        return whole, seconds, opened, operations


def content(folder: Path, job: Job) -> Content:
    """States and scores of what was saved, and the rounds that the newest ``metrics.csv`` has."""
    saved = perada.Run.load(folder / "saved", backbone=network_of(job))
    tables = sorted(folder.glob("lightning_logs/*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    # A resumed run writes a round's training and its scores into one row, and in more digits. A round that was begun
    # twice is accounted twice.
    rows = [
        {name: f"{value:.6g}" for name, value in row.items() if not name.startswith("privacy/")}
        for row in rounds_of_csv(tables[-1])
    ]
    states = list(saved.states("global"))
    if (folder / "saved" / "client_0").is_dir():
        states += saved.states("personal")
    return states, saved.metrics["clients"], rows


def equal(found: Content, expected: Content) -> bool:
    """Whether states and scores are equal bit by bit, and the tables of rounds to six digits."""
    states = len(found[0]) == len(expected[0]) and all(
        torch.equal(value, other[key])
        for state, other in zip(found[0], expected[0], strict=True)
        for key, value in state.items()
    )
    return states and found[1] == expected[1] and found[2] == expected[2]


def left_behind(folder: Path, temporary: Path) -> list[str]:
    """Files that nobody needs after a run that was interrupted and resumed."""
    partial = [path for ending in ("*.partial", "*.part", ".perada-*") for path in folder.rglob(ending)]
    return [path.name for path in (*partial, *temporary.iterdir())]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End what is left after one of the processes failed, as torchrun does; most notice it by themselves."""
    for wait, signal_ in ((GRACE, signal.SIGTERM), (GRACE, signal.SIGKILL)):
        until = time.monotonic() + wait
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal_)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
