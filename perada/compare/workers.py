# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own, several at once."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

from tqdm import tqdm

from perada.compare.plan import MakeCLI
from perada.compare.running import Result, attempt

Task = tuple[Sequence[str], bool]
"""Options of ``perada fit``, and whether to score the initial model too."""
Event = tuple[int, Result | None]
"""The number of a task, and its result; None when it starts."""
CarryOut = Callable[[Sequence[Task]], Generator[Event]]
"""Runs tasks, and yields starts and results as they come."""
SILENT = "--trainer.enable_progress_bar=false"
ENDS = 10.0
"""Seconds in which a process that has nothing to do must end."""


def in_process(make_cli: MakeCLI, threads: int, tasks: Sequence[Task]) -> Generator[Event]:
    """Run the tasks here, one after another."""
    for number, (args, start) in enumerate(tasks):
        yield number, None
        yield number, attempt(make_cli, args, start, threads)


class Workers:
    """Processes that run tasks, each the next one where it is free; the ``with`` statement around them ends them.

    A pool of the standard library loses all its runs with a process that dies, and does not end those under way.

    Args:
        make_cli: Makes a run; it is sent to the processes.
        threads: That each run computes with.
        jobs: How many processes there are; one is started when there is a task for it.
    """

    def __init__(self, make_cli: MakeCLI, threads: int, jobs: int) -> None:
        self.make_cli, self.threads = make_cli, threads
        self.feeders = ThreadPoolExecutor(jobs)
        self.own = threading.local()  # the process of each of these threads
        self.started: list[tuple[Connection, SpawnProcess]] = []
        self.lock, self.closed = threading.Lock(), False

    def __enter__(self) -> "Workers":
        self.before = dict(os.environ)
        # Processes inherit it: libraries read the first as they are imported, Python the other.
        os.environ.update({"OMP_NUM_THREADS": str(self.threads), "PYTHONSAFEPATH": "1"})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.feeders.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            self.closed = True
            for pipe, process in self.started:
                if kind is None:
                    pipe.close()  # by which it ends
                else:
                    process.kill()
        if kind is not None:
            self.feeders.shutdown()  # their threads wait for the processes too, and two must not at once
        for process in [process for _pipe, process in self.started]:
            process.join(ENDS)
            process.kill()
            process.join()
        os.environ.clear()
        os.environ.update(self.before)

    def run(self, tasks: Sequence[Task]) -> Generator[Event]:
        """Run tasks, started in this order; yield starts and results as they come."""
        events: SimpleQueue[Event] = SimpleQueue()

        def feed(number: int) -> None:
            events.put((number, None))
            events.put((number, self._carry_out(tasks[number])))

        for number in range(len(tasks)):
            self.feeders.submit(feed, number)
        left = len(tasks)
        while left:
            event = events.get()
            left -= event[1] is not None
            yield event

    def _carry_out(self, task: Task) -> Result:
        """Hand a task to the process of this thread, and wait for its answer; it is started again where it has died."""
        try:
            if getattr(self.own, "process", None) is None:
                self._start()
            self.own.pipe.send(task)
            result: Result = self.own.pipe.recv()
            return result
        except (EOFError, OSError):  # it has died, or was stopped
            process, self.own.process = getattr(self.own, "process", None), None
            if process is not None:
                process.join()
            code = None if process is None else process.exitcode
            return {"failed": f"its process ended with code {code} (below 0: killed by that signal)", "seconds": 0.0}

    def _start(self) -> None:
        with self.lock:
            if self.closed:
                raise OSError("the command was stopped")
            context = get_context("spawn")
            self.own.pipe, other = context.Pipe()
            self.own.process = context.Process(target=_serve, args=(other, self.make_cli, self.threads))
            self.own.process.start()
            self.started.append((self.own.pipe, self.own.process))
            other.close()  # or its death would not be seen here


def _serve(pipe: Connection, make_cli: MakeCLI, threads: int) -> None:
    """Run what comes in, and answer each; what runs print goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    os.dup2(2, 1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    with suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        while True:
            args, start = pipe.recv()
            pipe.send(attempt(make_cli, [*args, SILENT], start, threads))
