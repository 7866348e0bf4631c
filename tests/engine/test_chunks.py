# SPDX-License-Identifier: Apache-2.0
"""How many clients train together on a processor."""

import torch
from torch import nn

from perada.core.states import Merged
from perada.engine.chunks import clients_in_cache


def network(frozen, trained):
    """Two layers with so many weights."""
    model = nn.Sequential(nn.Linear(frozen, 1, bias=False), nn.Linear(trained, 1, bias=False))
    model[0].requires_grad_(False)
    return model


def test_as_many_as_fit_train_together_where_most_is_trained():
    # 16 MB hold the weight, gradient and momentum of 2^20 numbers of 4 bytes once, and those of 2^18 five times.
    assert clients_in_cache(network(1, 2**20)) == 1
    assert clients_in_cache(network(1, 2**18)) == 5
    assert clients_in_cache(network(1, 2**24)) == 1


def test_all_train_together_behind_a_frozen_backbone():
    assert clients_in_cache(network(2**20, 2**18)) is None


def test_weights_that_the_server_merges_into_are_frozen():
    model = network(2**20, 2**18)
    model[0].weight = Merged(torch.zeros(1, 2**20))
    assert clients_in_cache(model) is None
