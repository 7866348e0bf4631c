# SPDX-License-Identifier: Apache-2.0
"""Clients whose updates are unlike the others': they are named, and what is not finite does not reach the server."""

import warnings

import numpy as np
import pytest
import torch

import perada
from perada.algorithms import FedAvg
from perada.core.rounds import RoundPlan
from perada.federation.outliers import find_outliers
from perada.server import Updates

ORDER: list[int] = []
"""The clients of the last round, in the order of the rows."""


class Hostile(FedAvg):
    """Multiplies the change that a client sends, after all training."""

    def __init__(self, factor=1.0, client=1):
        super().__init__()
        self.factor = factor
        self.client = client

    def broadcast(self, given):
        ORDER[:] = given.clients
        return super().broadcast(given)

    def end_round(self, trained, kept, received, tensor_names):
        kept, update = super().end_round(trained, kept, received, tensor_names)
        update = {key: value.clone() for key, value in update.items()}
        place = ORDER.index(self.client)
        for key in tensor_names.parameters:
            start = received[key][place]
            update[key][place] = start + self.factor * (update[key][place] - start)
        return kept, update


def finetune(tiny, algorithm, **options):
    arguments = {"algorithm": algorithm, "rounds": 2, "clients_per_round": None}
    return tiny.finetune(**arguments | options)


def test_a_client_whose_update_the_algorithm_broke_is_left_out_and_named(tiny):
    with pytest.warns(UserWarning, match=r"round 1: .*client 1\b"):
        run = finetune(tiny, Hostile(float("nan")), rounds=1)
    assert all(value.isfinite().all() for value in run.state("global").values())
    honest = finetune(tiny, "fedavg", rounds=1, server_rule="mean")
    initial = finetune(tiny, "fedavg", rounds=0)
    moved = [key for key, value in run.state("global").items() if not torch.equal(value, initial.state("global")[key])]
    assert moved  # the round went on without it
    assert any(not torch.equal(run.state("global")[key], honest.state("global")[key]) for key in moved)


@pytest.mark.every(2)
@pytest.mark.parametrize("factor", [1e3, -1e6])
def test_the_client_that_sends_a_long_change_is_named(tiny, factor):
    with pytest.warns(UserWarning, match=r"round 1: client 1 .*[\d,]+ times"):
        finetune(tiny, Hostile(factor), rounds=1, lr_local=1e-3)


def test_nobody_is_named_among_honest_clients(tiny):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*times the round's median.*")
        finetune(tiny, "fedavg")


def test_norms_and_cosines_are_logged(tiny):
    """Against the states that a rule of the test's own is given."""
    seen = []

    class Looking(perada.server.Mean):
        def __call__(self, aggregation):
            names = sorted(aggregation.parameters)
            clients = len(aggregation.weights)
            rows = [aggregation.updates.gathered(key).double().reshape(clients, -1).numpy() for key in names]
            start = [aggregation.previous[key].double().reshape(1, -1).numpy() for key in names]
            seen.append(np.concatenate(rows, 1) - np.concatenate(start, 1))
            return super().__call__(aggregation)

    run = finetune(tiny, Hostile(-3.0), server_rule=Looking(), diagnostics=["update_norms"])
    assert len(run.metrics["rounds"]) == 2
    for record, changes in zip(run.metrics["rounds"], seen[-2:], strict=True):
        norms = np.linalg.norm(changes, axis=1)
        mean = changes.mean(0)
        cosines = changes @ mean / (norms * np.linalg.norm(mean))
        middle = np.sort(norms)[(len(norms) - 1) // 2]
        expected = [middle, norms.max(), ORDER[norms.argmax()], cosines.min(), ORDER[cosines.argmin()]]
        names = ["norm_median", "norm_max", "norm_max_client", "cosine_min", "cosine_min_client"]
        np.testing.assert_allclose([record[f"updates/{name}"] for name in names], expected, rtol=1e-6)
        assert record["updates/cosine_min_client"] == 1


@pytest.mark.every(4)
@pytest.mark.parametrize("rule", ["median", "krum", "geometric_median", "norm_clipping"])
def test_robust_rules_keep_the_model_near_the_honest_one(tiny, rule):
    """One of five sends its change a thousand times over: a robust rule ends near the honest mean, the mean far off."""
    honest = finetune(tiny, "fedavg")
    initial = finetune(tiny, "fedavg", rounds=0)

    def distance(run, other):
        pairs = zip(run.state("global").values(), other.state("global").values(), strict=True)
        return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs if a.is_floating_point()) ** 0.5

    moved = distance(honest, initial)
    with pytest.warns(UserWarning, match="times the round's median"):
        attacked = finetune(tiny, Hostile(1e3), server_rule=rule)
    assert distance(attacked, honest) < 2 * moved
    with pytest.warns(UserWarning, match="times the round's median"):
        assert distance(finetune(tiny, Hostile(1e3)), honest) > 20 * moved


def far_clients(norms, steps=(2, 2, 2, 2)):
    """Of four clients called 4, 6, 7 and 9, who moved from 0 to ``norms``, those that are named, and by how much."""
    plan = RoundPlan(0, (4, 6, 7, 9), (steps,))
    updates = Updates({"w": torch.tensor(norms).view(4, 1)})
    received = {"w": torch.zeros(4, 1)}
    far, metrics = find_outliers(["w"], updates, received, plan, range(4), with_metrics=False)
    assert metrics == {}
    return far


def test_an_update_is_far_beyond_fifty_times_the_median():
    """The median of an even number of norms is the lower one of the two in the middle: here 2."""
    assert far_clients([2.0, 1.0, 99.0, 2.5]) == {}
    assert far_clients([2.0, 1.0, 101.0, 2.5]) == {7: 50.5}


def test_a_client_that_took_more_steps_may_go_as_many_times_as_far():
    """Thirty times the usual two steps: 1,500 times the median, where others may go 50 times as far."""
    steps = (60, 3, 2, 2)
    assert far_clients([1490.0, 1.0, 1.5, 0.5], steps) == {}
    assert far_clients([1510.0, 1.0, 1.5, 0.5], steps) == {4: 1510.0}
    assert far_clients([0.5, 1.0, 1.5, 1490.0], steps) == {9: 1490.0}


def test_a_client_that_took_fewer_steps_may_go_as_far_as_others():
    assert far_clients([1.0, 49.0, 1.5, 0.5], (40, 2, 40, 40)) == {}
