# SPDX-License-Identifier: Apache-2.0
"""Poisson batches: the counts are binomial, the images independent, the draw repeatable."""

import numpy as np
import pytest
import torch
from scipy import stats

from perada.privacy import expected_batch_size, poisson_batches


def draw(images=30, sample_rate=0.1, steps=4000, *, seed=0, role="local", round=0, client=0):
    return poisson_batches(images, sample_rate, steps, seed=seed, role=role, round=round, client=client)


def chosen(batches, images):
    """Matrix (steps, images) of who was in which batch."""
    rows = np.zeros((len(batches), images), dtype=bool)
    for row, batch in zip(rows, batches, strict=True):
        row[batch.numpy()] = True
    return rows


def test_batch_sizes_are_binomial():
    images, rate, steps = 30, 0.1, 4000
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
    rows = chosen(draw(), 30)
    counts = rows.sum(axis=0)
    variance = 4000 * 0.1 * 0.9
    assert stats.chi2(30).sf(((counts - 400) ** 2 / variance).sum()) > 0.01


def test_steps_and_images_are_independent():
    """No correlation of an image with itself in the next batch, nor with its neighbour in the same one."""
    rows = chosen(draw(), 30) - 0.1
    for products in (rows[1:] * rows[:-1], rows[:, 1:] * rows[:, :-1]):
        z = products.sum() / (0.09 * np.sqrt(products.size))  # each product has mean 0 and standard deviation q (1 − q)
        assert abs(z) < 2.6


def test_indices_are_ascending_and_of_the_index_type():
    for batch in draw(images=5, sample_rate=0.5, steps=20):
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


def test_expected_batch_size_is_the_mean():
    assert expected_batch_size(10, 1 / 3) == pytest.approx(stats.binom(10, 1 / 3).mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": 0}, "images=0: a client without images"),
        ({"sample_rate": 0.0}, "sample_rate=0.0 is not a probability"),
        ({"sample_rate": 1.01}, "sample_rate=1.01 is not a probability"),
        ({"steps": -1}, "steps=-1 is negative"),
    ],
)
def test_impossible_draws_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(**arguments)
