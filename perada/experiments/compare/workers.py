# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own: each worker takes one run after another, a line of JSON in, a line of JSON out."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress

from perada.experiments.compare.plan import MakeCLI
from perada.experiments.compare.running import Result, attempt

Task = tuple[Sequence[str], bool]
"""Options of ``perada fit``, and whether to score the initial model too."""
Event = tuple[int, Result | None]
"""The number of a task, and its result; None when it starts."""
CarryOut = Callable[[Sequence[Task]], Generator[Event]]
"""Runs tasks, and yields starts and results as they come."""
SILENT = "--trainer.enable_progress_bar=false"


def in_process(make_cli: MakeCLI, threads: int, tasks: Sequence[Task]) -> Generator[Event]:
    """Run the tasks here, one after another."""
    for number, (args, start) in enumerate(tasks):
        yield number, None
        yield number, attempt(make_cli, args, start, threads)


class Workers:
    """Processes that run tasks, each the next one where it is free; the ``with`` statement around them ends them.

    ``command`` starts one, which calls :func:`worker_main`; that is done when there are tasks for it.
    """

    def __init__(self, command: Sequence[str], threads: int, jobs: int) -> None:
        self.workers = [_Worker(command, threads) for _ in range(jobs)]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop(patience=0)

    def run(self, tasks: Sequence[Task]) -> Generator[Event]:
        """Run tasks, started in this order; yield starts and results as they come."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(tasks)):
            waiting.put(number)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def feed(worker: _Worker) -> None:
            with suppress(queue.Empty):
                while True:
                    number = waiting.get_nowait()
                    events.put((number, None))
                    events.put((number, worker.run(tasks[number])))

        for worker in self.workers[: len(tasks)]:
            threading.Thread(target=feed, args=(worker,), daemon=True).start()
        left = len(tasks)
        while left:
            event = events.get()
            left -= event[1] is not None
            yield event


class _Worker:
    """A process, started when it is needed, and again where it has died."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self.command, self.threads = command, threads
        self.process: subprocess.Popen[str] | None = None
        self.closed = False
        self.lock = threading.Lock()

    def run(self, task: Task) -> Result:
        """Hand a task to the process, and wait for its answer."""
        args, start = task
        line = json.dumps({"args": [*args], "start": start, "threads": self.threads})
        try:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            print(line, file=process.stdin, flush=True)
            result: Result = json.loads(process.stdout.readline())
            return result
        except (OSError, ValueError):  # it has died, or was stopped
            code = self.stop()
            return {"failed": f"its process ended with code {code} (below 0: killed by that signal)", "seconds": 0.0}

    def _started(self) -> subprocess.Popen[str]:
        with self.lock:
            if self.closed:
                raise OSError("the command was stopped")
            if self.process is None:
                environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
                self.process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
            return self.process

    def stop(self, patience: float = 5.0) -> int | None:
        """End the process after so many seconds, in which it may do so itself, and return its code.

        The next task starts another one; with no patience there is no next task.
        """
        with self.lock:
            process, self.process = self.process, None
            self.closed = self.closed or not patience
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        process.kill()
        with suppress(OSError, ValueError):
            process.communicate()  # closes its streams
        return process.returncode


def worker_main(make_cli: MakeCLI) -> None:
    """Run what comes in on standard input, a line of JSON for each run, and answer each with a line on standard output.

    What runs print goes to standard error instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    outlet = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            task = json.loads(line)
            result = attempt(make_cli, [*task["args"], SILENT], task["start"], task["threads"])
            print(json.dumps(result), file=outlet, flush=True)
    except BrokenPipeError:  # whoever asked is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), outlet.fileno())
