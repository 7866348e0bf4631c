# SPDX-License-Identifier: Apache-2.0
"""Sums in whole numbers against Python's."""

import math
from fractions import Fraction

import pytest
import torch

from perada.server import Updates
from perada.server.sums import SecureSums
from tests.rejections import rejects


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threshold", 0.66),
        ("threshold", 1.0),
        ("min_sites", 2),
        ("fraction_bits", 41),
    ],
)
def test_options_by_which_nothing_is_hidden_are_rejected(option, value):
    with rejects(f"secure_sums: {option}", value):
        SecureSums(**{option: value})


@pytest.mark.parametrize("bits", [8, 24, 32])
@pytest.mark.parametrize("shares", [[1.0] * 4, [3.0, 1.0, 20.0, 7.0]])
def test_means_are_those_of_pythons_whole_numbers(bits, shares):
    updates = {"w": torch.randn(4, 2, 3), "norm.count": torch.tensor([3, 4, 4, 9])}
    result = SecureSums(fraction_bits=bits).mean(Updates(updates), shares)
    for i in range(2):
        for j in range(3):
            terms = [round(float(updates["w"][c, i, j]) * shares[c] * 2**bits) for c in range(4)]  # halves to even too
            assert result["w"][i, j] == torch.tensor(sum(terms) / 2**bits / sum(shares), dtype=torch.float64).float()
    assert result["norm.count"] == round(sum(n * p for n, p in zip([3, 4, 4, 9], shares, strict=True)) / sum(shares))
    exact = (updates["w"].double() * torch.tensor(shares).view(-1, 1, 1)).sum(0) / sum(shares)
    assert (result["w"].double() - exact).abs().max() <= 2.0 ** -(bits + 1) * 4 / sum(shares) + 1e-7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**38, -(2.0**38)])
def test_what_does_not_fit_is_rejected(value):
    with pytest.raises(ValueError, match=r"3 sites.* 9\.1626e\+10"):
        SecureSums().to_integers(torch.tensor([0.0, value]), 3)
    state = {"w": torch.tensor([[1.0, 2.0], [0.0, 2 * value]]), "none": torch.zeros(2, 0)}
    assert SecureSums().summable(Updates(state), [1.0, 1.0], [0, 1]) == [0]


def test_the_largest_numbers_do_not_wrap_around():
    sums = SecureSums()
    near = math.nextafter(sums.limit(5), 0)
    total = sum(sums.to_integers(torch.tensor([near, -near], dtype=torch.float64), 5) for _ in range(5))
    assert sums.real(total).tolist() == pytest.approx([5 * near, -5 * near], rel=1e-12)


@pytest.mark.parametrize("min_sites", range(3, 12))
def test_up_to_half_of_min_sites_may_work_with_the_server(min_sites):
    """Counted over all ways in which a server can divide the honest sites of a round, of whatever size."""
    secure = SecureSums(min_sites)
    reads = set()
    for sites in range(min_sites, 60):
        least = secure.least(sites)
        for helpers in range(sites):
            honest = sites - helpers
            two_lists = any(helpers + part >= least and helpers + honest - part >= least for part in range(honest + 1))
            alone = helpers + 1 >= least  # all others in a sum
            if two_lists or alone:
                reads.add(helpers)
    assert min(reads) == min_sites // 2 + 1


@pytest.mark.parametrize("threshold", [2 / 3, 0.7, 0.75, 0.8, 0.9, 0.95])
def test_more_than_the_share_of_the_sites_must_stay(threshold):
    """By fractions, which have no rounding: 0.7 * 90 is 62.99999999999999 in floating point."""
    share = Fraction(threshold).limit_denominator(100)
    for sites in range(3, 400):
        least = SecureSums(threshold=threshold).least(sites)
        assert least > share * sites
        assert least == 3 or least - 1 <= share * sites
