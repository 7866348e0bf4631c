# SPDX-License-Identifier: Apache-2.0
"""Worker processes of data loaders: their signals, and the sample that a worker was reading when it died."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from perada.system.interruption import Terminated, begin_worker, received_signal, workers_start

T = TypeVar("T")
_PIDS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_IDLE = -1


class LostWorkerError(ConnectionError):
    """Raised if a worker process died, for example because the machine ran out of memory."""


class WorkerProgress:
    """The sample that each worker is reading, in memory that all processes share.

    Args:
        num_workers: Number of workers.
        describe: Names a sample for a message, given its owner and its index.
    """

    def __init__(self, num_workers: int, describe: Callable[[int, int], str]) -> None:
        self.describe = describe
        self.samples = torch.full((num_workers, 2), _IDLE, dtype=torch.int64).share_memory_()

    def begin(self, owner: int, index: int) -> None:
        """Record, in a worker, the sample that it is about to read. Does nothing in other processes."""
        worker = get_worker_info()
        if worker is not None and worker.id < len(self.samples):
            self.samples[worker.id, 0] = owner
            self.samples[worker.id, 1] = index

    def end(self) -> None:
        """Record, in a worker, that it is idle."""
        self.begin(_IDLE, _IDLE)

    def current(self, worker: int) -> str | None:
        """Name the sample that a worker is reading; None if it is idle."""
        owner, index = self.samples[worker].tolist()
        return None if owner == _IDLE else self.describe(owner, index)


_running: "WeakKeyDictionary[Any, WorkerProgress | None]" = WeakKeyDictionary()
"""The iterators of all loaders with workers, and the progress of these workers."""


class WorkerLoader(DataLoader[T]):
    """A DataLoader whose workers leave Ctrl-C and SIGTERM to the process that started them."""

    progress: WorkerProgress | None = None

    def __iter__(self) -> Any:  # noqa: ANN401  # torch's private iterator class
        if self.num_workers == 0:
            return super().__iter__()
        with workers_start():
            iterator = super().__iter__()
        _running[iterator] = self.progress
        return iterator


def worker_loader(
    dataset: Dataset[Any] | Sequence[Any],
    num_workers: int,
    progress: WorkerProgress | None,
    **options: Any,
) -> WorkerLoader[Any]:
    """Make a loader that yields single items in order, read by workers if there are any."""
    # torch reads anything that has items, whatever its annotation says.
    items = cast(Dataset[Any], dataset)
    loader = WorkerLoader[Any](items, batch_size=None, num_workers=num_workers, worker_init_fn=begin_worker, **options)
    loader.progress = progress
    return loader


class Requests(Protocol):
    """Requests to workers, of a number that is known before they are made."""

    def __len__(self) -> int:
        """Return the number of requests."""

    def __iter__(self) -> Iterator[Any]:
        """Make the requests one by one, in order."""


class _CurrentRequests(Sampler[Any]):
    """The requests that workers serve; they are exchanged between two passes."""

    def __init__(self) -> None:
        self.requests: Requests = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class WorkerPool:
    """Workers that stay alive from pass to pass, since starting them takes longer than reading a few batches.

    They read from the dataset as it was at the first pass.

    Args:
        dataset: Returns the answer to a request by ``dataset[request]``.
        num_workers: Number of workers.
        progress: The samples that they are reading.
        **options: Options of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_workers: int,
        progress: WorkerProgress | None,
        **options: Any,
    ) -> None:
        self._make_loader = partial(worker_loader, dataset, num_workers, progress, **options)
        self._sampler = _CurrentRequests()
        self._loader: WorkerLoader[Any] | None = None
        self._current_pass: object = None

    def answers(self, requests: Requests) -> Iterator[Any]:
        """Yield the answer to each request, in order. A pass within another pass has workers of its own."""
        if self._current_pass is not None:
            sampler = _CurrentRequests()
            sampler.requests = requests
            yield from self._make_loader(sampler=sampler)
            return
        this_pass = object()
        self._current_pass = this_pass
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = self._make_loader(sampler=self._sampler, persistent_workers=True)
        try:
            for number, answer in enumerate(self._loader, 1):
                if number == len(requests):
                    # Whoever counts the batches does not ask for the end.
                    self._current_pass = None
                yield answer
        except GeneratorExit:
            raise
        except BaseException:
            # A worker may have died.
            self._loader = None
            raise
        finally:
            if self._current_pass is this_pass:
                self._current_pass = None


def lost_worker(error: BaseException) -> LostWorkerError | None:
    """Return a more helpful error in place of torch's for a worker that died; None for other errors.

    torch raises its error from a signal handler, wherever the process is at that moment, and names only process ids.
    """
    match = _PIDS.search(str(error))
    if match is None or not isinstance(error, RuntimeError):
        return None
    pids = [int(pid) for pid in match[1].split(",")]
    return LostWorkerError(
        f"a process reading images (pid {match[1]}) {_end_of(pids)}. If memory ran out, lower num_workers or "
        "batch_size; otherwise check that sample, or read without workers (num_workers=0) to see the error where it "
        "occurs"
    )


def _end_of(pids: list[int]) -> str:
    """Describe how the first of the workers ended, and what it was reading."""
    for iterator, progress in list(_running.items()):
        for number, worker in enumerate(getattr(iterator, "_workers", ())):
            if worker.pid not in pids or progress is None:
                continue
            end = "ended unexpectedly"
            exit_code = worker.exitcode or 0
            if exit_code < 0:  # minus the number of a signal
                end = f"was terminated by {signal.Signals(-exit_code).name}"
            sample = progress.current(number)
            activity = "was idle" if sample is None else f"was reading {sample}"
            return f"{end} while it {activity}"
    return "ended unexpectedly"


@contextmanager
def explain_worker_deaths() -> Iterator[None]:
    """Replace torch's error for a dead worker with a helpful one, or with that of a signal to all processes.

    Raises:
        LostWorkerError: If a worker died.
        KeyboardInterrupt: If Ctrl-C ended it.
        Terminated: If SIGTERM ended it.
    """
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
