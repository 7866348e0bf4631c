# SPDX-License-Identifier: Apache-2.0
"""Derived randomness (the rest is tested where it is used)."""

import pytest
import torch

from perada.fold import fold
from perada.seeding import Streams

# The first outputs of the published generator from seed 1234567, as its implementations in other languages give them.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
GAMMA = 0x9E3779B97F4A7C15


def test_streams_are_splitmix64():
    words = [value - 2**64 if value >= 2**63 else value for value in PUBLISHED]
    first = 1234567 + GAMMA - 2**64  # the generator adds before it mixes
    bits = Streams(torch.tensor([first])).bits(4 * len(words))
    assert torch.equal(bits, torch.tensor([words]).view(torch.int16))


def test_streams_do_not_depend_on_the_other_clients_or_on_how_many_are_drawn():
    streams = Streams.derived(3, "dropout", 5, clients=[7, 2, 9])
    assert torch.equal(Streams.derived(3, "dropout", 5, clients=[2]).bits(10), streams.bits(1001)[1:2, :10])
    assert torch.equal(streams[1:].fork("step", 4).bits(6), streams.fork("step", 4).bits(6)[1:])


def test_forks_are_unlike_each_other_in_any_order():
    streams = Streams.derived(0, "dropout", clients=range(3))
    forks = [streams, *(streams.fork("step", i).fork("layer", j) for i in range(4) for j in range(4))]
    draws = torch.cat([fork.bits(4000) for fork in forks]).double()
    correlations = torch.corrcoef(draws) - torch.eye(len(draws))
    assert correlations.abs().max() < 5.5 / 4000**0.5
    assert (draws.mean(1).abs() < 5 * (2**32 / 12 / 4000) ** 0.5).all()  # uniform over 2**16 values around 0


def test_dropout_without_streams_is_refused():
    model = fold(torch.nn.Sequential(torch.nn.Dropout(0.5))).model.train()
    with pytest.raises(RuntimeError, match="no streams were given"):
        model(torch.ones(2, 3))
