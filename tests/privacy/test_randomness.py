# SPDX-License-Identifier: Apache-2.0
"""Draws of a cryptographic generator. They cannot be seeded, so a right draw fails each statistical test here about
once in a million runs; wrong laws, such as a variance that is 5 % off, fail always."""

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from scipy import stats

from perada.privacy import sampling
from perada.privacy.sampling import secure_noise, secure_permutation, secure_uniform

LEVEL = 1e-6
N = 200_000


def secure_normal(shape, dtype=torch.float32):
    return secure_noise(torch.empty(shape, dtype=dtype))


class Counter:
    """In place of ssl.RAND_bytes: a stream of 64-bit words that is known, and how many bytes were taken."""

    def __init__(self, words=None):
        self.words = words or (index * 0x9E3779B97F4A7C15 % 2**64 for index in itertools.count(1))
        self.given = []

    def __call__(self, size):
        assert size % 8 == 0
        words = list(itertools.islice(self.words, size // 8))
        self.given += words
        return struct.pack(f"={len(words)}Q", *words)


@pytest.fixture
def counter(monkeypatch):
    stream = Counter()
    monkeypatch.setattr("ssl.RAND_bytes", stream)
    return stream


def test_uniform_law():
    draws = secure_uniform((N,)).numpy()
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > LEVEL
    bits = (draws * 2**53).astype(np.int64)[:, None] >> np.arange(53) & 1
    ones = bits.sum(0)  # each of the 53 bits is a fair coin
    assert stats.chi2(53).sf(((ones - N / 2) ** 2 / (N / 4)).sum()) > LEVEL


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_law(dtype):
    draws = secure_normal((N,), dtype).numpy()
    assert stats.kstest(draws, "norm").pvalue > LEVEL
    assert 2 * stats.norm.sf(abs(draws.mean()) * math.sqrt(N)) > LEVEL
    squares = stats.chi2(N)
    total = (draws**2).sum()
    assert min(squares.cdf(total), squares.sf(total)) > LEVEL / 2
    assert min(squares.cdf(1.05 * total), squares.sf(1.05 * total)) < LEVEL / 2
    # Kurtosis 3: half the sum of fewer draws of another law would show here.
    assert abs(stats.kurtosis(draws)) < stats.norm.isf(LEVEL / 2) * math.sqrt(24 / N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_and_neighbours_are_independent(dtype):
    """Also the two halves of a block, which share their lengths: nor are their squares correlated."""
    first, second = (secure_normal((2, N // 2), dtype) for _ in range(2))
    squares = [one.square() - 1 for one in first]
    z = float((squares[0] * squares[1]).sum()) / math.sqrt(4 * N / 2)  # a square's variance is 2
    assert 2 * stats.norm.sf(abs(z)) > LEVEL
    pairs = [(first, second), (first[0], first[1]), (first.flatten()[1:], first.flatten()[:-1])]
    for a, b in pairs:
        z = float((a * b).sum()) / math.sqrt(a.numel())
        assert 2 * stats.norm.sf(abs(z)) > LEVEL


def test_every_order_is_as_likely_as_any_other():
    orders = {order: 0 for order in itertools.permutations(range(4))}
    for _ in range(4800):
        orders[tuple(secure_permutation(4).tolist())] += 1
    assert stats.chisquare(list(orders.values())).pvalue > LEVEL


def test_uniform_is_53_bits_of_the_generators_bytes(counter):
    draws = secure_uniform((3, 4))
    assert draws.shape == (3, 4)
    assert draws.flatten().tolist() == [word % 2**53 / 2**53 for word in counter.given]
    assert len(counter.given) == 12


@pytest.mark.parametrize("block", [2, 5, 100])
@pytest.mark.parametrize(("dtype", "draws"), [(torch.float64, 4), (torch.float32, 1)])
def test_normal_is_a_sum_of_draws_of_box_and_muller(counter, monkeypatch, dtype, draws, block):
    """In float64 half the sum of four draws, in float32 one; both halves of a pair are used."""
    monkeypatch.setattr(sampling, "_BLOCK", block)
    actual = secure_normal((5, 1), dtype)
    assert actual.shape == (5, 1)
    words = iter(counter.given)
    expected = []
    for start in range(0, 5, block):
        count = min(block, 5 - start)
        width = math.ceil(count / 2)
        u, v = ([[next(words) % 2**53 / 2**53 for _ in range(width)] for _ in range(draws)] for _ in range(2))
        both = [
            sum(math.sqrt(-2 * math.log(1 - u[k][i])) * turn(2 * math.pi * v[k][i]) for k in range(draws))
            for turn in (math.cos, math.sin)
            for i in range(width)
        ]
        expected += [value / math.sqrt(draws) for value in both[:count]]
    assert next(words, None) is None
    # An absolute part, since the sine of 2πv is as exact as 2πv is.
    assert actual.flatten().tolist() == pytest.approx(expected, rel=torch.finfo(torch.float64).eps, abs=1e-14)


@pytest.mark.parametrize(("dtype", "draws"), [(torch.float64, 4), (torch.float32, 1)])
def test_noise_for_a_sum_is_not_rounded_and_has_as_many_draws(counter, dtype, draws):
    noise = secure_noise(torch.zeros(5, 1, dtype=dtype))
    assert noise.dtype == torch.float64
    assert noise.shape == (5, 1)
    assert len(counter.given) == 2 * draws * 3  # pairs


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_the_ends_of_the_range_are_finite(monkeypatch, word):
    """A zero must not come under the logarithm, nor anything above one."""
    monkeypatch.setattr("ssl.RAND_bytes", Counter(itertools.repeat(word)))
    assert secure_normal((3,), torch.float64).isfinite().all()


def test_permutation_sorts_the_keys_and_draws_again_on_a_tie(monkeypatch):
    stream = Counter(iter([5, 9, 5, 7, 2**63, 1]))  # as a signed number 2**63 is the smallest
    monkeypatch.setattr("ssl.RAND_bytes", stream)
    assert secure_permutation(3).tolist() == [1, 2, 0]
    assert len(stream.given) == 6


def test_torch_is_neither_used_nor_touched(counter):
    state = torch.get_rng_state()
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        counter.words = iter(range(1, 10**6))
        results.append([secure_uniform((4,)), secure_normal((4,)), secure_permutation(4)])
    assert all(map(torch.equal, *results))
    torch.set_rng_state(state)
    secure_normal((4,))
    secure_permutation(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_types_and_empty_shapes():
    assert secure_normal((2,), torch.bfloat16).dtype == torch.float64
    assert secure_uniform((0, 3)).shape == secure_normal((0, 3)).shape == (0, 3)
    assert secure_uniform(()).shape == secure_normal(()).shape == ()
    assert secure_permutation(0).tolist() == []
    assert secure_permutation(1).tolist() == [0]


@pytest.mark.parametrize("draw", [secure_uniform, lambda shape: secure_permutation(*shape)])
def test_negative_sizes_are_rejected(draw):
    with pytest.raises(ValueError, match="must be an integer >= 0, got -1"):
        draw((-1,))
