# SPDX-License-Identifier: Apache-2.0
"""Derived randomness (the rest is tested where it is used)."""

import hashlib
import json
import random

import numpy as np
import pytest
import torch

from perada.core.seeding import Streams, derive_seed, generator, seed_global, seeded
from perada.data.batches.datasets import isolated_randomness, seed_all
from perada.engine.fold import fold

# The first outputs of the published generator from seed 1234567, as its implementations in other languages give them.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
GAMMA = 0x9E3779B97F4A7C15


def test_streams_are_splitmix64():
    words = [value - 2**64 if value >= 2**63 else value for value in PUBLISHED]
    gamma = torch.tensor([GAMMA - 2**64])
    bits = Streams(1234567 + gamma, gamma).bits(4 * len(words))  # the generator adds before it mixes
    assert torch.equal(bits, torch.tensor([words]).view(torch.int16))


def hashed(*key):
    """The two integers of 64 bits in the first 16 bytes of SHAKE-256."""
    digest = hashlib.shake_256(json.dumps(list(key)).encode()).digest(16)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def mixed(z):
    """The output function of SplitMix64, in Python's integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = ((z ^ (z >> shift)) * factor) % 2**64
    return z


@pytest.mark.parametrize("step", [7, 8])  # the hash of the second is odd
def test_derived_streams_and_their_forks_are_splitmix64_of_hashed_keys(step):
    streams = Streams.derived(5, "dropout-local", 3, clients=[4, 9]).fork("step", step).fork("layer", 2)
    for row, client in enumerate((4, 9)):
        start, gamma = hashed(5, "dropout-local", 3, client)
        gamma |= 1
        for low, high in (hashed(step, "step"), hashed(2, "layer")):
            start = start + low
            gamma = gamma + high - high % 2
        words = [mixed((start + place * gamma) % 2**64) for place in range(50)]
        assert [word % 2**64 for word in streams.bits(200)[row].contiguous().view(torch.int64).tolist()] == words


def draws(count, *key):
    return torch.rand(count, generator=generator(*key), dtype=torch.float64)


def test_a_generator_is_the_mersenne_twister_of_hashed_words():
    """NumPy's own mt19937, started from the same 624 words. torch joins two outputs of 32 bits, and keeps 53."""
    key = 12345678901234567890, "noise-local", 3, 70000
    words = np.frombuffer(hashlib.shake_256(json.dumps(list(key)).encode()).digest(4 * 624), dtype="<u4")
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words.copy(), "pos": 624}}
    raw = twister.random_raw(2 * 1000).astype(np.uint64)
    joined = (raw[::2] << np.uint64(32) | raw[1::2]) & np.uint64(2**53 - 1)
    assert draws(1000, *key).tolist() == (joined.astype(np.float64) / 2**53).tolist()
    with seeded(*key):
        assert torch.equal(torch.rand(1000, dtype=torch.float64), draws(1000, *key))


def test_all_bits_of_a_seed_count():
    """torch's CPU generator by itself keeps 32 of them."""
    torch.manual_seed(7)
    short = torch.rand(3)
    torch.manual_seed(7 + 2**32)
    assert torch.equal(short, torch.rand(3))
    seeds = [7, 7 + 2**32, 7 + 2**63, 7 + 2**64, 7 + 2**128, -7]
    assert len({draws(1, seed, "noise").item() for seed in seeds}) == len(seeds)
    assert len({tuple(Streams.derived(seed, "noise", clients=[0]).bits(4)[0].tolist()) for seed in seeds}) == len(seeds)
    assert len({derive_seed(seed, "partition") for seed in seeds}) == len(seeds)
    result = set()
    with isolated_randomness():
        for seed in seeds:
            seed_all(seed)
            result |= {random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()}
    assert len(result) == 3 * len(seeds)


def test_purposes_and_indices_are_told_apart():
    keys = [("noise-a", 1, 2), ("noise-a", 12), ("noise-a/1", 2), ("noise-a", 2, 1), ("noise-a", 1, 2, 0), ("noise-a",)]
    assert len({draws(1, 0, *key).item() for key in keys}) == len(keys)
    assert len({derive_seed(0, *key) for key in keys}) == len(keys)


def test_no_draws_are_taken_from_the_global_stream():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    draws(5, 0, "noise")
    with seeded(0, "model"):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)
    seed_global(0, "torch")
    assert not torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(("rounds", "clients"), [(200, 200), pytest.param(200, 5000, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_no_two_streams_share_a_draw(rounds, clients):
    """Of 4·10⁴ streams, and of 10⁶. With 32 bits of seed 0.2, and 116, pairs of them would be one stream."""
    first = torch.cat([draws(2, 0, "noise-local", r, c) for r in range(rounds) for c in range(clients)])
    assert len(first.unique()) == 2 * rounds * clients
    words = [
        Streams.derived(0, "dropout-local", r, clients=range(clients)).fork("step", 0).bits(8).view(torch.int64)
        for r in range(rounds)
    ]
    assert len(torch.cat(words).unique()) == 2 * rounds * clients


@pytest.mark.slow
def test_streams_of_other_keys_do_not_run_into_one_another():
    """Some 300,000 words of each of 32 streams. With one increment for all, one stream may run into another."""
    gammas = torch.full((2,), GAMMA - 2**64)
    shifted = Streams(gammas * torch.tensor([0, 5]), gammas)
    assert torch.equal(shifted.bits(4000)[0, 20:], shifted.bits(4000)[1, :-20])
    words = Streams.derived(0, "dropout", clients=range(32)).bits(4 * 300_000).contiguous().view(torch.int64)
    assert len(words.flatten().unique()) == words.numel()


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


def test_dropout_without_streams_is_rejected():
    model = fold(torch.nn.Sequential(torch.nn.Dropout(0.5))).model.train()
    with pytest.raises(RuntimeError, match="random streams"):
        model(torch.ones(2, 3))
