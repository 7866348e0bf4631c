# SPDX-License-Identifier: Apache-2.0
"""Losses and scores in secure sums: of no site alone."""

import pytest

from perada.deploy.protocol import read_header
from perada.deploy.state import read_state
from perada.deploy.transport import LocalTransport

from .test_deployed_sums import FOUR, Liar, parties


def test_losses_leave_in_the_sum_alone(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1)
    transport = Liar(deployment.workers(may_send=("losses",)))
    progress = deployment.coordinator(transport).run()
    for _, _, reply in transport.seen:
        assert not read_header(reply)["facts"].keys() - {"size", "tests", "labels"}
    losses = [
        read_state(deployment.folder / name / "state.safetensors").run_state.summing.losses["local"]
        for name in deployment.names
    ]
    assert progress.history[0]["train/local_loss"] == pytest.approx(sum(losses) / 3, abs=1e-6)


@pytest.mark.every(4)
@pytest.mark.parametrize(("silent", "shown"), [(0, True), (1, True), (2, False), (4, False)])
def test_losses_leave_in_the_sum_only_if_they_may_and_others_do(silent, shown, tiny, tmp_path):
    """Of five sites one may go: four must say their loss, or the sum could be of two sites, or of one."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=(*FOUR, 20))

    def allowed_facts(place):
        return () if place < silent else ("losses",)

    workers = {
        name: deployment.worker(place, may_send=allowed_facts(place)) for place, name in enumerate(deployment.names)
    }
    (row,) = deployment.coordinator(LocalTransport(workers)).run().history
    losses = [
        read_state(workers[name].store.folder / "state.safetensors").run_state.summing.losses
        for name in deployment.names
    ]
    assert [bool(one) for one in losses] == [False] * silent + [True] * (5 - silent)
    assert ("train/local_loss" in row) == shown
    if shown:
        expected = sum(one["local"] for one in losses[silent:]) / (5 - silent)
        assert row["train/local_loss"] == pytest.approx(expected, abs=1e-6)


def test_a_score_that_one_site_has_is_in_no_sum(tiny, tmp_path):
    """The others say counts alone: the sum of AUROCs would be that of the one."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=FOUR, module={"metric": ["accuracy", "auroc"]})

    def allowed_facts(place):
        return ("counts",) if place else ("counts", "scores")

    workers = {
        name: deployment.worker(place, may_send=allowed_facts(place)) for place, name in enumerate(deployment.names)
    }
    (row,) = deployment.coordinator(LocalTransport(workers)).run().history
    assert "own/auroc" in read_state(workers["site0"].store.folder / "state.safetensors").run_state.scoring.metrics
    assert "personal/local_test" in row and "personal/local_test_auroc" not in row
