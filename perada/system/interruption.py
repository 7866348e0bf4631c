# SPDX-License-Identifier: Apache-2.0
"""Handlers that do not lose Ctrl-C and SIGTERM, and loader workers that leave both to their parent process.

Python drops an exception that is raised while an object is deleted, such as the iterator of a data loader that shuts
down its workers. Without :func:`watch_signals`, the run would then continue. A terminal sends Ctrl-C, and a supervisor
SIGTERM, to all processes of a run at the same time. A worker that ended because of it would make the run fail with an
error of the data loader.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_SECONDS = 0.05
"""Seconds after which a signal is raised again if its exception was dropped."""
WORKER_GRACE_SECONDS = 30.0
"""Seconds for which a worker continues after SIGTERM, so that the local step that uses its images can be completed."""
LATE_SIGNAL_SECONDS = 1.0
"""Seconds after the end of a worker during which a signal may still arrive at the process that started it."""


class Terminated(SystemExit):
    """Raised to end the program after SIGTERM, with the exit status that shells use for it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class _Watch:
    """The signal that this process has received, and the hook that was replaced.

    Attributes:
        received: The signal; None if there was none.
        process: Id of the process that watches signals, which a forked process does not.
        former_hook: Python's hook for dropped exceptions before :func:`watch_signals`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.process: int | None = None
        self.former_hook: Callable[[UnraisableHookArgs], object] | None = None


_watch = _Watch()


def watch_signals(terminate: bool = False) -> None:
    """Record Ctrl-C, and raise it again if its exception is dropped. Earlier signals are forgotten.

    Handlers that a caller has set are not replaced. This has no effect outside of the main thread.

    Args:
        terminate: Whether SIGTERM raises :class:`Terminated`. It does not if another handler calls this one, such as
            that of a Trainer, which ends the run after the current step.
    """
    _watch.received = None
    if threading.current_thread() is not threading.main_thread():
        return
    _watch.process = os.getpid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)
    if terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_terminate)
    if sys.unraisablehook is not _on_dropped:
        _watch.former_hook = sys.unraisablehook
        sys.unraisablehook = _on_dropped


def received_signal(error: BaseException | None = None) -> signal.Signals | None:
    """Return the signal that this process has received since :func:`watch_signals`; None if there was none.

    Args:
        error: The error that ended the program. If a worker of a loader died, a signal to all processes of the run may
            have reached the worker first, so this function waits for it.
    """
    if _watch.received is None and "DataLoader worker" in str(error):
        deadline = time.monotonic() + LATE_SIGNAL_SECONDS
        while _watch.received is None and time.monotonic() < deadline:
            try:
                time.sleep(0.05)
            except (KeyboardInterrupt, Terminated):
                break
    return _watch.received


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt again after a Ctrl-C whose exception other code has caught."""
    if _watch.received == signal.SIGINT:
        raise KeyboardInterrupt


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle SIGINT (Ctrl-C): record it and raise KeyboardInterrupt."""
    # A forked process inherits this handler, but records nothing.
    if os.getpid() == _watch.process:
        _watch.received = signal.SIGINT
    raise KeyboardInterrupt


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: record it and raise Terminated."""
    if os.getpid() != _watch.process:
        # A forked process ends as it would without a handler.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _watch.received = signal.SIGTERM
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        raise Terminated


def _on_dropped(dropped: "UnraisableHookArgs") -> None:
    """Handle an exception that Python cannot raise where it occurs (``sys.unraisablehook``)."""
    if isinstance(dropped.exc_value, KeyboardInterrupt | Terminated) and os.getpid() == _watch.process:
        signum = signal.SIGINT if isinstance(dropped.exc_value, KeyboardInterrupt) else signal.SIGTERM
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # An exception that is raised in this hook would be dropped again.
        retry = threading.Timer(RETRY_SECONDS, signal.pthread_kill, [main_thread, signum])
        retry.daemon = True
        retry.start()
        return
    if "DataLoader worker" in str(dropped.exc_value):
        # A loader that is shutting down does not need its workers any more.
        return
    (_watch.former_hook or sys.__unraisablehook__)(dropped)


@contextmanager
def workers_start() -> Iterator[None]:
    """Block signals while workers are started, so that no worker receives one before it calls :func:`begin_worker`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    blocked = {signal.SIGINT, signal.SIGTERM}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def begin_worker(worker: int = 0) -> None:
    """Set up the signals of a loader's worker, which leaves them to the process that started it.

    Ctrl-C is ignored. SIGTERM from the process that started the worker ends it immediately, and from elsewhere after
    :data:`WORKER_GRACE_SECONDS`.

    Args:
        worker: Number of the worker, as loaders pass it to ``worker_init_fn``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # macOS lacks sigwaitinfo, which identifies the sender of a signal, so any SIGTERM ends a worker there.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_worker, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _end_worker() -> None:
    """Wait for SIGTERM and end this process, with a delay unless its parent sent the signal. Runs in a thread."""
    sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
    if sender != os.getppid():
        # A request of the loader ends the wait.
        ended_by = signal.sigtimedwait({signal.SIGTERM}, WORKER_GRACE_SECONDS)
        while ended_by is not None and ended_by.si_pid != os.getppid():
            ended_by = signal.sigtimedwait({signal.SIGTERM}, WORKER_GRACE_SECONDS)
    os._exit(0)
