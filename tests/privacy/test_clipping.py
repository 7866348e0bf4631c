# SPDX-License-Identifier: Apache-2.0
"""Clipping and noise against plain loops, the definition of sensitivity, and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from perada.privacy import noisy_mean
from perada.privacy.clipping import at_least_float32, clipping_factors
from perada.privacy.gradients import PerSampleGrads
from tests.rejections import rejects

SHAPES = {"head.weight": (4, 3), "head.bias": (4,), "scale": ()}
CASES = [("flat", 0.7), ("per_layer", 0.7), ("automatic", 0.7)]


def make(seed=0, clients=3, rows=6, scale=1.0):
    """Gradients of very different sizes, and a mask with 6, 3 and 0 real rows; NaN stands where there is padding."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.arange(rows) < torch.tensor([rows, rows // 2, 0])[:clients, None]
    sizes = scale * 10 ** torch.linspace(-3, 2, rows, dtype=torch.float64)
    gradients = {}
    for name, shape in SHAPES.items():
        g = torch.randn(clients, rows, *shape, generator=source, dtype=torch.float64)
        g = g * sizes.reshape(rows, *[1] * len(shape))
        gradients[name] = torch.where(mask.reshape(clients, rows, *[1] * len(shape)), g, torch.nan)
    return gradients, mask


def row(gradients, client, index):
    return {name: g[client, index].numpy() for name, g in gradients.items()}


def factors(gradients, mask, *bound):
    """The factors of every row from its norms, which stand for padding too."""
    return clipping_factors(
        {name: g.reshape(*mask.shape, -1).norm(dim=-1) for name, g in gradients.items()}, mask, *bound
    )


def clipped_sums(gradients, mask, *bound):
    """The clipped sums."""
    result = factors(gradients, mask, *bound)
    return {
        name: PerSampleGrads(gradient.flatten(0, 1)).weighted_sums(result[name]) for name, gradient in gradients.items()
    }


def clip_one(gradient, max_norm, method, gamma=0.01):
    """One image's gradient, clipped by the papers' formulas in numpy."""
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    if method == "per_layer":
        bound = max_norm / np.sqrt(len(gradient))
        return {n: g / max(1, np.linalg.norm(g) / bound) for n, g in gradient.items()}
    factor = max_norm / (norm + gamma) if method == "automatic" else 1 / max(1, norm / max_norm)
    return {n: g * factor for n, g in gradient.items()}


@pytest.mark.parametrize(("method", "max_norm"), CASES)
def test_sums_equal_a_plain_loop(method, max_norm):
    gradients, mask = make()
    summed = clipped_sums(gradients, mask, max_norm, method)
    for name, shape in SHAPES.items():
        for client in range(3):
            expected = np.zeros(shape)
            for index in range(6):
                if mask[client, index]:
                    expected = expected + clip_one(row(gradients, client, index), max_norm, method)[name]
            # The 1e-6 beside the norm makes a clipped row shorter by a part in 1e5 at most for norms above 0.1.
            torch.testing.assert_close(summed[name][client], torch.as_tensor(expected), rtol=2e-5, atol=2e-6)
    assert all((value[2] == 0).all() for value in summed.values())  # the client whose batch is empty


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("method", "max_norm"), CASES)
def test_no_image_has_more_than_its_share(method, max_norm, dtype):
    gradients, mask = make()
    gradients = {name: g.to(dtype) for name, g in gradients.items()}
    result = factors(gradients, mask, max_norm, method)
    assert all((factor[~mask] == 0).all() for factor in result.values())
    largest = 0.0
    for client in range(3):
        for index in range(6):
            if mask[client, index]:
                parts = [(g[client, index] * result[name][client, index]).double() for name, g in gradients.items()]
                norm = math.sqrt(sum(part.square().sum().item() for part in parts))
                assert norm <= max_norm * (1 + 4 * torch.finfo(dtype).eps)
                largest = max(largest, norm)
    assert largest > 0.9 * max_norm  # the bound is used, not only kept


@pytest.mark.parametrize(("method", "max_norm"), CASES)
def test_one_image_more_or_less_changes_the_sum_by_the_bound_at_most(method, max_norm):
    gradients, mask = make(scale=100.0)
    sums = clipped_sums(gradients, mask, max_norm, method)
    changes = []
    for client, index in mask.nonzero().tolist():
        fewer = mask.clone()
        fewer[client, index] = False
        without = clipped_sums(gradients, fewer, max_norm, method)
        change = {name: sums[name] - without[name] for name in sums}
        assert all((d[:client] == 0).all() and (d[client + 1 :] == 0).all() for d in change.values())
        changes.append(math.sqrt(sum(d.square().sum().item() for d in change.values())))
    assert max(changes) <= max_norm * (1 + 1e-12)
    assert max(changes) > 0.9 * max_norm


def test_small_gradients_are_left_alone_by_flat_and_not_by_automatic():
    gradients, mask = make(scale=1e-4)
    assert (factors(gradients, mask, 1.0)["scale"][mask] == 1).all()
    assert (factors(gradients, mask, 1.0, "automatic")["scale"][mask] > 10).all()


def test_half_precision_gradients_are_measured_in_single():
    rows = torch.full((1, 4096), 200.0, dtype=torch.float16)  # squares overflow half precision
    norms = PerSampleGrads(at_least_float32(rows)).squared_norms().sqrt()
    assert norms.dtype == torch.float32
    assert norms.item() == pytest.approx(200 * 64)


@pytest.mark.parametrize("method", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("broken", [1, 2], ids=["in one parameter", "in two"])
def test_an_image_whose_gradient_is_not_finite_is_left_out(method, bad, broken):
    gradients, mask = make()
    without = {name: gradient.clone() for name, gradient in gradients.items()}
    for place, name in enumerate(gradients):
        if place < broken:
            gradients[name][0, 1] = bad
        without[name][0, 1] = 0
    summed, expected = (clipped_sums(g, mask, 1.0, method) for g in (gradients, without))
    for name in gradients:
        assert torch.equal(summed[name], expected[name])


def sources(count, seed=0):
    return [torch.Generator().manual_seed(100 * seed + client) for client in range(count)]


def test_noise_is_gaussian_with_each_clients_deviation():
    stds = [0.5, 2.0]
    sizes = [4.0, 10.0]
    summed = {"a": torch.full((2, 4000), 3.0, dtype=torch.float64), "b": torch.zeros(2, 4000, dtype=torch.float64)}
    out = noisy_mean(summed, stds, sizes, sources(2))
    standard = {
        (name, client): ((out[name][client] * sizes[client] - summed[name][client]) / stds[client]).numpy()
        for name in summed
        for client in range(2)
    }
    for values in standard.values():
        assert stats.kstest(values, "norm").pvalue > 0.01
        low, high = stats.chi2(4000).ppf([0.005, 0.995])
        assert low < (values**2).sum() < high
        assert not low < ((1.1 * values) ** 2).sum() < high  # a deviation that is 10 % off is seen
    keys = list(standard)
    for i, first in enumerate(keys):
        for second in keys[:i]:
            assert abs(stats.pearsonr(standard[first], standard[second]).statistic) < 2.6 / math.sqrt(4000)


@pytest.mark.parametrize("std", [1e-12, 1e-3, 1e6])
def test_noise_of_any_size_is_added(std):
    noise = noisy_mean({"w": torch.zeros(1, 4000, dtype=torch.float64)}, std, [1.0], sources(1))["w"] / std
    low, high = stats.chi2(4000).ppf([0.005, 0.995])
    assert low < float(noise.square().sum()) < high


def test_without_noise_it_is_the_sum_over_the_expected_batch():
    summed = {"w": torch.arange(6.0).reshape(2, 3)}
    out = noisy_mean(summed, 0.0, [2.0, 0.5], sources(2))
    assert out["w"].tolist() == [[0.0, 0.5, 1.0], [6.0, 8.0, 10.0]]


def test_a_clients_noise_depends_on_its_generator_alone():
    summed = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 5)}
    both = noisy_mean(summed, 1.0, [1.0, 1.0], sources(2))
    alone = noisy_mean({"b": torch.zeros(1, 5), "a": torch.zeros(1, 3)}, 1.0, [1.0], sources(2)[1:])
    assert all(torch.equal(both[name][1], alone[name][0]) for name in summed)
    assert list(alone) == ["b", "a"]
    assert all((value == 0).all() for value in summed.values())  # the input is left as it was


def test_other_mistakes_are_rejected():
    gradients, mask = make()
    with rejects("method", "ghost"):
        factors(gradients, mask, 1.0, "ghost")
    for bad in (0.0, -1.0, math.inf, math.nan):
        with rejects("max_norm", bad):
            factors(gradients, mask, bad)


def test_noise_rejects_other_mistakes():
    summed = {"w": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match="clients, 1"):
        noisy_mean(summed, 1.0, [1.0], sources(2))
    with pytest.raises(ValueError, match="clients, 3"):
        noisy_mean(summed, 1.0, [1.0] * 3, sources(3))
    with pytest.raises(ValueError, match="two clients"):
        noisy_mean(summed, 1.0, [1.0] * 2, sources(1) * 2)
    for std, size in [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)]:
        with pytest.raises(ValueError, match=r"must be a finite number >=? 0, got"):
            noisy_mean(summed, std, [size] * 2, sources(2))
