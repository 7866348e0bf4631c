# SPDX-License-Identifier: Apache-2.0
"""Environment and end of processes that run in sessions of their own. Nothing here needs perada or torch."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = 10.0
"""Seconds that a process has to end after a signal."""


def offline_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports this tree and does not contact the Hub.

    Args:
        **variables: Further variables, which take precedence.
    """
    paths = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"} | variables


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a session, and wait for its leader, which may have ended already.

    They receive SIGTERM and, once the leader has ended or :data:`GRACE_SECONDS` are over, SIGKILL.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        # Not even SIGKILL ends a process in an uninterruptible call of a driver: the benchmark goes on without it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
