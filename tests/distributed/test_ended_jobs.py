# SPDX-License-Identifier: Apache-2.0
"""Jobs of two processes that are asked to end, and such as have ended already, are resumed."""

import signal
import time

import pytest

from benchmarks.faults.job import Job
from benchmarks.faults.processes import Fault, content, equal, start

pytestmark = pytest.mark.slow
JOB = Job("ditto", "disk", processes=2, rounds=20)


def test_a_job_that_has_ended_is_resumed_and_saved(tmp_path):
    first = start(JOB, tmp_path / "run", tmp_path / "tmp")
    states = content(tmp_path / "run", JOB)
    again = start(JOB, tmp_path / "run", tmp_path / "tmp")
    assert (first.statuses, again.statuses, again.messages) == ([0, 0], [0, 0], ["done", "done"])
    assert equal(content(tmp_path / "run", JOB), states)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_sigterm_ends_both_processes_at_once(tmp_path, share):
    """At any moment, also while they exchange tensors."""
    began = time.monotonic()
    uninterrupted = start(JOB, tmp_path / "whole", tmp_path / "tmp")
    # A share of what the job takes on this machine: it may have ended after a fixed number of seconds.
    seconds = share * (time.monotonic() - began)
    for attempt in range(4):
        run = tmp_path / f"run {attempt}"
        began = time.monotonic()
        ended = start(JOB, run, tmp_path / "tmp", Fault(signal=signal.SIGTERM, seconds=seconds))
        assert time.monotonic() - began < seconds + 20
        if any(ended.statuses):
            break
        # Other work slowed the first job down, so that this one was done before the signal.
        seconds /= 2
    assert 128 + signal.SIGTERM in ended.statuses and all(ended.statuses)
    resumed = start(JOB, run, tmp_path / "tmp")
    assert uninterrupted.statuses == resumed.statuses == [0, 0]
    assert equal(content(run, JOB), content(tmp_path / "whole", JOB))
