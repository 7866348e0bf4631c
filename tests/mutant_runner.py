# SPDX-License-Identifier: Apache-2.0
"""Runs tests of changed copies of the project, for ``test_mutants.py``.

Other packages take most of the time that a test of one function needs. They are imported here once, before this process
is copied for each request. perada is imported in the copies only.

Each line of the standard input is a request, a JSON object with the folder ``copy``, the list ``tests`` of pytest's
ids, and the file ``output`` to which they print. The answer is a line with pytest's exit status, or minus the number of
the signal that ended it.
"""

import importlib
import json
import os
import signal
import sys
import traceback

import pytest

# Without Flower, which starts threads, and what imports it: a process with threads must not be copied.
PRELOADED = ("torch", "torchvision", "pytorch_lightning", "timm", "peft", "transformers", "opacus", "jsonargparse")
PRELOADED += ("scipy.stats", "sklearn.datasets")
FAILED = 3
"""Status of an internal error, as of pytest."""
TIMEOUT = 1200
"""Seconds after which the tests of one request are ended."""


def run_tests(copy: str, tests: list[str], output: str) -> int:
    """Run tests in this process, whose working folder, imports and output are changed for them."""
    signal.alarm(TIMEOUT)
    os.chdir(copy)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, copy)
    options = ["-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    # Plugins of pytest that come with other packages were imported before.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests]))


def main() -> None:
    # Answers have a pipe of their own, since packages may print while they are imported.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for package in PRELOADED:
        importlib.import_module(package)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            status = FAILED
            try:
                status = run_tests(**request)
            except BaseException:  # this process must end here, whatever happens
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, state = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(state), file=answers, flush=True)


if __name__ == "__main__":
    main()
