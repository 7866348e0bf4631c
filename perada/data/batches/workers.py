# SPDX-License-Identifier: Apache-2.0
"""Processes that read samples for a data loader: their signals, and what one of them read when it died."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info

from perada.core.interruption import Terminated, begin_worker, received_signal, workers_start

T = TypeVar("T")
_PIDS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_IDLE = -1


class LostWorkerError(ConnectionError):
    """A process that read samples died, for example because the machine ran out of memory."""


class Reading:
    """Which sample each worker reads at the moment, in memory that all processes share.

    Args:
        num_workers: Number of workers.
        describe: Names a sample by its owner's number and its place, for a message.
    """

    def __init__(self, num_workers: int, describe: Callable[[int, int], str]) -> None:
        self.describe = describe
        self.samples = torch.full((num_workers, 2), _IDLE, dtype=torch.int64).share_memory_()

    def begin(self, owner: int, index: int) -> None:
        """Note in a worker what it is about to read; nothing elsewhere."""
        worker = get_worker_info()
        if worker is not None and worker.id < len(self.samples):
            self.samples[worker.id, 0] = owner
            self.samples[worker.id, 1] = index

    def end(self) -> None:
        """Note in a worker that it has read what it was asked for."""
        self.begin(_IDLE, _IDLE)

    def last(self, worker: int) -> str | None:
        """Name what a worker is reading; None if it is not."""
        owner, index = self.samples[worker].tolist()
        return None if owner == _IDLE else self.describe(owner, index)


_running: "WeakKeyDictionary[Any, Reading | None]" = WeakKeyDictionary()
"""The iterators of all loaders that have workers."""


class WorkerLoader(DataLoader[T]):
    """A DataLoader whose workers leave Ctrl-C and SIGTERM to the process that started them."""

    reading: Reading | None = None

    def __iter__(self) -> Any:  # noqa: ANN401  # torch's own iterator
        if self.num_workers == 0:
            return super().__iter__()
        with workers_start():
            iterator = super().__iter__()
        _running[iterator] = self.reading
        return iterator


def worker_loader(
    dataset: Any,  # noqa: ANN401  # whatever has items
    num_workers: int,
    reading: Reading | None,
    **options: Any,
) -> WorkerLoader[Any]:
    """Make a loader that takes single items, in order, read by workers if there are any."""
    loader = WorkerLoader[Any](
        dataset, batch_size=None, num_workers=num_workers, worker_init_fn=begin_worker, **options
    )
    loader.reading = reading
    return loader


def lost_worker(error: BaseException) -> LostWorkerError | None:
    """What to raise in the place of torch's error of a worker that died; None for other errors.

    torch raises its error wherever the process is at that moment, and names a process only.
    """
    named = _PIDS.search(str(error))
    if named is None or not isinstance(error, RuntimeError):
        return None
    pids = [int(pid) for pid in named[1].split(",")]
    return LostWorkerError(
        f"a process that read images (pid {named[1]}) {_end_of(pids)}. If memory ran out, lower num_workers or "
        "batch_size; else check that sample, or read without workers (num_workers=0), which shows the error where it "
        "arises"
    )


def _end_of(pids: list[int]) -> str:
    """How the first of some workers ended, and what it read then."""
    for iterator, reading in list(_running.items()):
        for number, worker in enumerate(getattr(iterator, "_workers", ())):
            if worker.pid not in pids or reading is None:
                continue
            sample = reading.last(number)
            status = worker.exitcode or 0
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "ended unexpectedly"
            return f"{how} while it {'waited for work' if sample is None else f'read {sample}'}"
    return "ended unexpectedly"


@contextmanager
def worker_deaths_named() -> Iterator[None]:
    """Raise a :class:`LostWorkerError` where torch says that a worker died, or what a signal to all processes means."""
    try:
        yield
    except RuntimeError as error:
        lost = lost_worker(error)
        if lost is None:
            raise
        signum = received_signal(error)
        if signum == signal.SIGINT:
            raise KeyboardInterrupt from error
        if signum == signal.SIGTERM:
            raise Terminated from error
        raise lost from error
