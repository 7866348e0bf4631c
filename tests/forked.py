# SPDX-License-Identifier: Apache-2.0
"""A process of its own for a function of a test, without importing everything again."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

# Python 3.12 warns of a fork beside threads; these functions only write files, and take no lock that a thread holds.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def forked(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start the function in a process that knows all that this one has imported."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process
