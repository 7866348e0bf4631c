# SPDX-License-Identifier: Apache-2.0
"""Power that fails at any moment of a ``Run.save`` or of a checkpoint leaves what was there before, or the new."""

import pytest
import torch

import perada
from benchmarks.faults.job import Job
from benchmarks.faults.outcomes import SURVIVED, Campaign
from benchmarks.faults.power import crashes, power


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    campaign = Campaign()
    power(campaign, tmp_path_factory.mktemp("power"))
    return {outcome.kind.removeprefix("power failure: "): outcome for outcome in campaign.outcomes}


@pytest.mark.parametrize(
    "what", ["Run.save over a run", "rounds with checkpoints and client files", "checkpoints only"]
)
@pytest.mark.every(3)
def test_whatever_was_not_synced_is_not_needed(outcomes, what):
    assert outcomes[what].counts[SURVIVED] > 5
    assert outcomes[what].failures == []


def test_a_run_that_was_saved_is_on_the_disk_in_full(tmp_path):
    run = Job(rounds=1).train(tmp_path, logger=False)
    folder = tmp_path / "saved"
    folder.mkdir()
    *_, last = crashes(folder, lambda: run.save(folder), tmp_path / "copy")
    result = perada.Run.load(last, backbone=Job().network())
    for state, other in zip(result.states("personal"), run.states("personal"), strict=True):
        assert all(torch.equal(value, other[key]) for key, value in state.items())


def test_a_file_that_was_not_synced_is_found_empty(tmp_path):
    """The test itself: it tells a file that is synced from one that is not."""
    states = [
        {path.name: path.read_text() for path in state.iterdir()}
        for state in crashes(tmp_path, lambda: _write(tmp_path), tmp_path.with_name("copy"))
    ]
    assert {} in states
    assert {"new": ""} in states
    assert all(set(state.values()) <= {""} for state in states)


def _write(folder):
    (folder / "part").write_text("content")
    (folder / "part").rename(folder / "new")
