# SPDX-License-Identifier: Apache-2.0
"""How many clients train together on a processor."""

import pytest
import torch
from torch import nn

from perada.core.states import Merged
from perada.engine.chunks import clients_in_cache, is_mostly_trained
from perada.lightning import setup

from ..algorithms.problems import finetune
from ..methods import make_method


def network(frozen, trained):
    """Two layers with so many weights."""
    model = nn.Sequential(nn.Linear(frozen, 1, bias=False), nn.Linear(trained, 1, bias=False))
    model[0].requires_grad_(False)
    return model


def test_as_many_as_fit_train_together():
    # 48 MB hold the weight, gradient and momentum of 2^20 numbers of 4 bytes 4 times, and those of 3 · 2^20 once.
    for numbers, clients in ((2**20, 4), (2**18, 16), (3 * 2**20, 1), (2**24, 1)):
        assert clients_in_cache(4 * numbers, 4 * numbers) == clients
    # Two models trained in the same steps take twice the room, one after the other less.
    assert clients_in_cache(8 * 2**19, 8 * 2**19) == 4
    assert clients_in_cache(8 * 2**19, 4 * 2**19) == 6


def test_few_train_together_only_where_most_is_trained():
    assert is_mostly_trained(network(1, 2**18))
    assert not is_mostly_trained(network(2**20, 2**18))


def test_weights_that_the_server_merges_into_are_frozen():
    model = network(2**20, 2**18)
    model[0].weight = Merged(torch.zeros(1, 2**20))
    assert not is_mostly_trained(model)


@pytest.mark.parametrize(
    ("algorithm", "models", "trained"),
    [
        ("fedavg", 1, 1.0),
        ("ditto", 2, 2.0),
        ("perada", 2, 2.0),
        ("fedsim_output", 1, 1.0),  # two roles that have different parts of one model
        ("fedrep", 1, None),  # the same, one after the other: the body is larger than the head
    ],
)
def test_a_run_counts_what_its_clients_have_and_what_they_train_at_a_time(algorithm, models, trained, monkeypatch):
    counted = []
    monkeypatch.setattr(setup, "clients_in_cache", lambda *sizes: counted.append(sizes) or 1)
    run = finetune(make_method(algorithm), rounds=1)
    state = run.state("global") if algorithm in ("fedavg", "ditto", "perada") else run.state("personal", 0)
    model_bytes = sum(value.nbytes for value in state.values())
    parameters = [name for name in state if "running" not in name and "num_batches" not in name]
    ((state_bytes, trained_bytes),) = counted
    assert state_bytes == models * model_bytes
    if trained:
        assert trained_bytes == trained * sum(state[name].nbytes for name in parameters)
    else:
        assert model_bytes / 2 < trained_bytes < model_bytes
