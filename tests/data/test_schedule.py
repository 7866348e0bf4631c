# SPDX-License-Identifier: Apache-2.0
"""Cohorts where some clients may no longer take part."""

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.core.rounds import sample_cohort
from perada.data import FederatedData, FederatedDataModule, Phase


def datamodule(eligible=None):
    clients = [TensorDataset(torch.zeros(size, 1), torch.arange(size) % 3) for size in (7, 20, 3, 11, 20)]
    module = FederatedDataModule(FederatedData(clients))
    module.configure_rounds(seed=5, clients_per_round=2, phases=[Phase()], eligible=eligible)
    return module


def test_places_of_clients_who_may_not_take_part_go_to_the_next():
    spent = {1, 3}
    for round in range(40):
        order = sample_cohort(7, round, 10, 10)
        assert sorted(order) == list(range(10))
        expected = [client for client in order if client not in spent][:4]
        assert sample_cohort(7, round, 10, 4, lambda clients: [c for c in clients if c not in spent]) == expected
        assert sample_cohort(7, round, 10, 4, lambda clients: clients) == order[:4] == sample_cohort(7, round, 10, 4)
        assert sample_cohort(7, round, 10, 4, lambda clients: {3} & set(clients)) == [3]
    assert sample_cohort(7, 0, 4, None, lambda clients: clients[1:3]) == [1, 2]


def test_the_cohort_is_of_eligible_clients_and_who_is_asked_again_each_round():
    spent = set()
    module = datamodule(eligible=lambda clients: [c for c in clients if c not in spent])
    assert module.plan(0) == datamodule().plan(0)
    spent |= {0, 1, 4}
    assert [module.plan(round).clients for round in range(5)] == [(3, 2)] * 5  # the largest first
    spent.add(3)
    assert module.plan(0).clients == (2,)
    spent.add(2)
    with pytest.raises(
        ValueError,
        match=r"round 10: .*5 clients",
    ):
        module.plan(9)
