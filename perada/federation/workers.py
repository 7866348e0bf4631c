# SPDX-License-Identifier: Apache-2.0
"""Threads that train chunks of clients side by side on the cores of a processor.

The products of a small network are too small to be divided among cores, so that a step on two cores takes as long as on
one. Several chunks, each on one core, keep all of them busy. Behind a frozen backbone, whose products are larger, they
still save the time that cores wait for each other. Results do not depend on the threads that train the chunks: a
client's training depends on no other client's, and no product is divided.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from perada.algorithms.dry_run import is_foreign
from perada.engine.engine import Engine
from perada.federation.settings import Settings

MAX_QUEUED = 4
"""Tasks that may wait for a thread, each with a batch of images: enough that no thread ever waits for a batch."""


class Worker(Protocol):
    """Runs tasks one after another, in the order in which they come.

    Attributes:
        engine: Runs networks for its tasks; no other worker uses it.
    """

    engine: Engine

    def submit(self, job: Callable[[], None]) -> None:
        """Run a task, now or later.

        Raises:
            Exception: That of the task, or of an earlier one.
        """

    def wait(self) -> None:
        """Wait for all tasks.

        Raises:
            Exception: The first one of the tasks that have not been waited for.
        """

    def finish(self) -> None:
        """Wait for all tasks, like :meth:`wait`; no others may follow."""


class SameThread:
    """Runs each task at once.

    Args:
        engine: Runs networks for the tasks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, job: Callable[[], None]) -> None:
        """Run a task."""
        job()

    def wait(self) -> None:
        """Do nothing: all tasks have run."""

    def finish(self) -> None:
        """Do nothing: all tasks have run."""


class WorkerThread:
    """Runs tasks in a thread, whose operations are not divided among cores.

    Args:
        engine: Runs networks for the tasks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="perada-chunk")
        self._pending: deque[Future[None]] = deque()
        self._has_failed = False
        threads = torch.get_num_threads()
        self._executor.submit(_use_one_core).result()
        # set_num_threads is per thread, but new threads, such as data loaders', inherit the last value: restore it.
        torch.set_num_threads(threads)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a task, and wait while too many are queued."""
        # Tasks that have ended are taken out too: result() raises their errors, in the order of the tasks.
        while self._pending and (len(self._pending) >= MAX_QUEUED or self._pending[0].done()):
            self._pending.popleft().result()
        # Autocast is a setting of each thread.
        precision = torch.autocast(
            "cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        )
        self._pending.append(self._executor.submit(self._run_task, job, precision))

    def _run_task(self, job: Callable[[], None], precision: torch.autocast) -> None:
        """Run a task in the thread, unless an earlier one has failed: it would continue what that one left behind."""
        if self._has_failed:
            return
        try:
            with precision:
                job()
        except BaseException:
            self._has_failed = True
            raise

    def wait(self) -> None:
        """Wait for all tasks."""
        while self._pending:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait for all tasks, and end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown(cancel_futures=True)


def _use_one_core() -> None:
    """Set the calling thread to divide no operation among cores."""
    # A new thread takes over the setting of the process when it first needs it, and would forget its own.
    torch.get_num_threads()
    torch.set_num_threads(1)


def trains_side_by_side(engine: Engine, settings: Settings) -> bool:
    """Return whether several chunks of clients can train at a time, each in its own thread.

    Args:
        engine: Runs networks for the chunks.
        settings: Options of the run.
    """
    # The loop over clients runs one model, as do features in place of images.
    runs_one_model = engine.kind == "loop" or engine.trunk is not None
    # Loss scales and private gradients are made for one chunk after another.
    is_sequential = settings.privacy is not None or settings.loss_scaling is not None
    # An algorithm or an engine from elsewhere may keep something between steps, which other threads would overwrite.
    is_from_elsewhere = is_foreign(settings.algorithm) or type(engine) is not Engine
    # torch's global random stream, which belongs to the process, is set back while a block runs again.
    sets_global_stream = engine.is_recomputing
    # Compiled networks are not meant for several threads.
    return not (runs_one_model or engine.is_compiled or is_sequential or is_from_elsewhere or sets_global_stream)


def workers_of(engine: Engine, count: int, device: torch.device) -> list[Worker]:
    """Return a worker for each chunk that is to train at a time.

    Args:
        engine: Runs networks for the chunks; threads get copies of it.
        count: Number of chunks that can train at a time.
        device: Device on which they train.
    """
    count = min(count, torch.get_num_threads())
    if count <= 1 or device.type != "cpu":
        return [SameThread(engine)]
    try:
        engines = [engine.copy() for _ in range(count)]
    except Exception:  # a network of the caller's own may hold anything, such as a lock, which cannot be copied
        return [SameThread(engine)]
    return [WorkerThread(copy) for copy in engines]
