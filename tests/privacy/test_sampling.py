# SPDX-License-Identifier: Apache-2.0
"""Poisson batches: the counts are binomial, the images independent, the draw repeatable. Shuffled passes."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from perada.privacy import passes, poisson_batches, shuffled_batches
from tests.rejections import rejects


def draw(num_images=30, sample_rate=0.1, steps=4000, *, seed=0, role="local", round=0, client=0):
    return poisson_batches(num_images, sample_rate, steps, seed=seed, role=role, round=round, client=client)


def batch_members(batches, images):
    """Matrix (steps, images) of who was in which batch."""
    rows = np.zeros((len(batches), images), dtype=bool)
    for row, batch in zip(rows, batches, strict=True):
        row[batch.numpy()] = True
    return rows


def test_batch_sizes_are_binomial():
    images = 30
    rate = 0.1
    steps = 4000
    sizes = np.array([len(batch) for batch in draw(images, rate, steps)])
    observed = np.bincount(np.minimum(sizes, 8), minlength=9)
    law = stats.binom(images, rate)
    expected = steps * np.append(law.pmf(np.arange(8)), law.sf(7))
    assert expected.min() > 5  # few enough classes for the test to hold
    assert stats.chisquare(observed, expected).pvalue > 0.01
    assert observed[0] > 0  # empty batches are steps too
    # The same test sees batches of one fixed size, and a rate that is a twentieth off.
    off = stats.binom(images, 1.05 * rate)
    assert stats.chisquare(observed, steps * np.append(off.pmf(np.arange(8)), off.sf(7))).pvalue < 0.001


def test_each_image_is_in_as_many_batches_as_any_other():
    rows = batch_members(draw(), 30)
    counts = rows.sum(axis=0)
    variance = 4000 * 0.1 * 0.9
    assert stats.chi2(30).sf(((counts - 400) ** 2 / variance).sum()) > 0.01


def test_steps_and_images_are_independent():
    """No correlation of an image with itself in the next batch, nor with its neighbour in the same one."""
    rows = batch_members(draw(), 30) - 0.1
    for products in (rows[1:] * rows[:-1], rows[:, 1:] * rows[:, :-1]):
        z = products.sum() / (0.09 * np.sqrt(products.size))  # each product has mean 0 and standard deviation q (1 − q)
        assert abs(z) < 2.6


def test_indices_are_ascending_and_of_the_index_type():
    for batch in draw(num_images=5, sample_rate=0.5, steps=20):
        assert batch.dtype == torch.int64
        assert batch.ndim == 1
        assert batch.tolist() == sorted(set(batch.tolist()) & set(range(5)))


def test_draws_depend_on_the_arguments_alone():
    torch.manual_seed(1)
    first = draw(steps=50)
    torch.manual_seed(2)
    torch.rand(3)
    again = draw(steps=50)
    assert all(map(torch.equal, first, again))
    for other in ({"seed": 1}, {"role": "personal"}, {"round": 1}, {"client": 1}):
        assert not all(map(torch.equal, first, draw(steps=50, **other)))


def test_a_longer_run_begins_like_a_shorter_one():
    assert all(map(torch.equal, draw(steps=5), draw(steps=9)[:5]))
    assert draw(steps=0) == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_images", 0),
        ("sample_rate", 0.0),
        ("sample_rate", 1.01),
        ("steps", -1),
    ],
)
def test_impossible_draws_are_rejected(argument, value):
    with rejects(argument, value):
        draw(**{argument: value})


def test_secure_batches_are_drawn_anew_and_binomial():
    """Not seeded: with the right law this fails about once in a million runs."""
    images = 30
    rate = 0.1
    steps = 2000
    arguments = {"seed": 0, "role": "local", "round": 0, "client": 0, "secure": True}
    first, second = (poisson_batches(images, rate, steps, **arguments) for _ in range(2))
    assert not all(map(torch.equal, first, second))
    for batches in (first, second):
        total = sum(map(len, batches))
        law = stats.binom(images * steps, rate)
        assert min(law.cdf(total), law.sf(total - 1)) > 2.5e-7
        sizes = np.bincount([min(len(batch), 7) for batch in batches], minlength=8)
        expected = steps * np.append(stats.binom(images, rate).pmf(np.arange(7)), stats.binom(images, rate).sf(6))
        assert stats.chisquare(sizes, expected).pvalue > 2.5e-7


def test_secure_batches_compare_the_systems_draws_with_the_rate(monkeypatch):
    draws = iter(torch.rand(6, 5, dtype=torch.float64))
    kept = []

    def uniform(shape):
        kept.append(next(draws))
        assert shape == (5,)
        return kept[-1]

    monkeypatch.setattr("perada.privacy.sampling.secure_uniform", uniform)
    batches = poisson_batches(5, 0.4, 6, seed=0, role="local", round=0, client=0, secure=True)
    assert [b.tolist() for b in batches] == [[i for i, u in enumerate(row.tolist()) if u < 0.4] for row in kept]
    assert any(len(batch) for batch in batches)


def shuffled(num_images=11, batch_size=4, steps=20, *, seed=0, role="local", round=0, client=0, secure=False):
    chosen = {"seed": seed, "role": role, "round": round, "client": client}
    return [batch.tolist() for batch in shuffled_batches(num_images, batch_size, steps, **chosen, secure=secure)]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("images", "batch_size"), [(11, 4), (12, 4), (3, 8), (5, 1), (1, 1)])
def test_a_pass_holds_every_image_once_and_no_batch_spans_two(images, batch_size, secure):
    batches = shuffled(images, batch_size, 23, secure=secure)
    used = set()
    pass_sizes = []
    for batch in batches:
        if len(used) == images:  # the pass is over
            used = set()
        if not used:
            pass_sizes.append(0)
        assert 1 <= len(batch) == min(batch_size, images - len(used))
        assert not used & set(batch)
        assert set(batch) <= set(range(images))
        used |= set(batch)
        pass_sizes[-1] += len(batch)
    assert len(batches) == 23
    assert pass_sizes[:-1] == [images] * (len(pass_sizes) - 1)
    assert len(pass_sizes) == passes(images, batch_size, 23)


def test_orders_are_as_likely_as_any_other():
    orders = dict.fromkeys(itertools.permutations(range(3)), 0)
    for batch in shuffled(3, 3, 1800):
        orders[tuple(batch)] += 1
    assert stats.chisquare(list(orders.values())).pvalue > 0.01


def test_shuffled_draws_depend_on_the_arguments_alone():
    torch.manual_seed(1)
    first = shuffled()
    torch.manual_seed(2)
    assert shuffled() == first
    for other in ({"seed": 1}, {"role": "personal"}, {"round": 1}, {"client": 1}):
        assert shuffled(**other) != first
    assert shuffled(steps=5) == first[:5]
    assert shuffled(steps=0) == []
    assert shuffled(secure=True) != shuffled(secure=True)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_images", 0),
        ("batch_size", 0),
        ("steps", -1),
    ],
)
def test_impossible_passes_are_rejected(argument, value):
    with rejects(argument, value):
        shuffled(**{argument: value})
    with rejects(argument, value):
        passes(**{"num_images": 11, "batch_size": 4, "steps": 20, argument: value})
