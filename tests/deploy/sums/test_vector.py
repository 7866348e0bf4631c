# SPDX-License-Identifier: Apache-2.0
"""The numbers of a secure sum and their bytes, against numpy."""

import numpy as np
import pytest
import torch

from perada.deploy.protocol import RejectionError, pack, spec_of, unpack
from perada.deploy.sums.vector import _CHUNK, Contents
from perada.server.sums import SecureSums

SIZE = 2 * _CHUNK + 3  # more than is rounded at a time
OPTIONS = SecureSums()


def state(seed):
    random = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(SIZE, generator=random),
        "c": torch.randn(2, 3, 4, 5, generator=random).to(memory_format=torch.channels_last),
        "n": torch.tensor(7 * seed),
        "none": torch.empty(0),
        "d": torch.randn(6, generator=random, dtype=torch.float64)[::2],
    }


def rounded(values, factor):
    return np.rint(values.numpy().astype(np.float64).ravel() * factor * 2.0**24).astype(np.int64)


def test_vectors_and_their_sum_are_numpys():
    """Three sites with weights of their own, logits, and a loss that two of them say."""
    contents = Contents(OPTIONS, state(0), (2, 3), ("loss", "other"), equal=False)
    weights = (3.0, 1.0, 7.0)
    total = np.zeros(contents.size, np.uint64)
    expected = []
    for site, weight in enumerate(weights):
        logits = torch.full((2, 3), site + 0.3, dtype=torch.float64)
        losses = {"loss": site + 0.5} if site else {}
        actual = contents.vector(state(site), weight, logits, losses, 3)
        parts = [rounded(value, weight) for value in state(site).values()] + [rounded(logits, 1.0)]
        rest = [weight, losses.get("loss", 0.0), 0.0, float(bool(losses)), 0.0]
        expected.append(np.concatenate([*parts, np.rint(np.array(rest) * 2.0**24).astype(np.int64)]))
        assert np.array_equal(actual.view(np.int64), expected[-1])
        total += actual
    summed = contents.decode(total, 3)
    whole = sum(expected)
    mean = whole[: -6 - 5] / 2.0**24 / (whole[-5] / 2.0**24)
    assert {key: (value.dtype, value.shape) for key, value in summed.mean.items()} == {
        key: (value.dtype, value.shape) for key, value in state(0).items()
    }
    for (key, value), part in zip(
        summed.mean.items(), np.split(mean, [SIZE, SIZE + 120, SIZE + 121, SIZE + 121]), strict=True
    ):
        kind = value.numpy().dtype
        assert np.array_equal(value.numpy().ravel(), (np.rint(part) if kind == np.int64 else part).astype(kind)), key
    assert np.array_equal(summed.logits.numpy().ravel(), whole[-11:-5])
    assert summed.metrics == {"loss": 2.0}


@pytest.mark.parametrize("place", [0, _CHUNK, SIZE - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**38 / 3, -(2.0**38) / 3])
def test_a_number_that_does_not_fit_is_seen_wherever_it_stands(place, value):
    wrong = state(1)
    wrong["w"][place] = value
    with pytest.raises(ValueError, match=r"3 sites.*fraction_bits=24"):
        Contents(OPTIONS, state(0)).vector(wrong, 1.0, None, {}, 3)


@pytest.mark.parametrize("place", [0, _CHUNK, SIZE - 1])
@pytest.mark.parametrize("value", [1.1e6, -1.1e6])
def test_a_sum_out_of_all_range_is_rejected_wherever_it_is(place, value):
    contents = Contents(OPTIONS, {"w": torch.zeros(SIZE)})
    total = np.zeros(contents.size, np.int64)
    total[place], total[-1] = int(3 * value) << 24, 3 << 24
    with pytest.raises(RejectionError, match="one site: 'w'"):
        contents.decode(total.view(np.uint64), 3)


@pytest.mark.parametrize("key", ["w", "c", "n", "d"])
def test_a_message_of_one_tensor_has_it_whatever_its_strides(key):
    one = {key: state(2)[key]}
    header, result = unpack(pack({"code": "ok"}, one), spec_of(one))
    assert header == {"code": "ok"} and torch.equal(result[key], one[key])
