# SPDX-License-Identifier: Apache-2.0
"""Rules on the products of LoRA's factors against dense products and their singular value decomposition, in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from perada.core.states import Factors
from perada.server import SVD, Aggregation, FedAvgM, LoRAFair, Median, NormClipping, Updates, client_weights, mean
from perada.server.low_rank import (
    FactorPair,
    client_pairs,
    correct_up,
    lora_residual,
    product_norm,
    residual,
    truncate,
    weighted_sum,
)
from tests.rejections import rejects

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def draw_pairs(ranks, out=7, into=9, seed=0):
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return [FactorPair(matrix(out, rank), matrix(rank, into)) for rank in ranks]


def shares(clients):
    return client_weights("samples", range(1, clients + 1)).tolist()


def dense(pairs, weights):
    return sum(weight * up @ down for weight, (up, down) in zip(weights, pairs, strict=True))


def best(matrix, rank):
    """The closest matrix of that rank (Eckart and Young)."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] @ torch.diag(s[:rank]) @ vt[:rank]


@pytest.mark.parametrize(
    ("ranks", "rank"), [([1, 1], 2), ([2, 2], 5), ([1, 3, 2], 6), ([2, 2], 2), ([2, 1, 3, 2], 3), ([5, 5, 5], 5)]
)
@pytest.mark.parametrize(("out", "into"), [(7, 9), (12, 4), (3, 30)])
def test_products_are_averaged_and_cut_off_as_the_dense_mean_is(ranks, rank, out, into):
    """Without a cut where the ranks sum to at most r; the stack may be wider than the layer."""
    pairs = draw_pairs(ranks, out, into)
    weights = shares(len(ranks))
    ((_, before),) = draw_pairs([rank], out, into, seed=1)
    product, (up, down) = dense(pairs, weights), truncate(weighted_sum(pairs, weights), rank, before)
    assert up.shape == (out, rank)
    assert down.shape == (rank, into)
    torch.testing.assert_close(up @ down, product if sum(ranks) <= rank else best(product, rank), **EXACT)
    kept = min(rank, out, into, sum(ranks))
    torch.testing.assert_close((down @ down.T)[:kept, :kept], torch.eye(kept, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(up.norm(dim=0)[:kept], torch.linalg.svdvals(product)[:kept], **EXACT)
    assert (down.gather(1, down.abs().argmax(1, keepdim=True)) >= 0).all()
    for fewer in range(1, rank):
        torch.testing.assert_close(up[:, :fewer] @ down[:fewer], best(product, fewer), **EXACT)
    assert product_norm(weighted_sum(pairs, weights)) == pytest.approx(float(product.norm()), rel=1e-12)


def test_two_clients_by_hand():
    """B = (1, 0)ᵀ and (0, 1)ᵀ, A = (2, 0) and (0, 4): the mean is diag(1, 2), of which rank 1 keeps the 2."""
    pairs = [FactorPair(torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[2.0, 0.0]]).double())]
    pairs.append(FactorPair(torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0, 4.0]]).double()))
    up, down = truncate(weighted_sum(pairs, [0.5, 0.5]), 1, torch.ones(1, 2).double())
    torch.testing.assert_close(up, torch.tensor([[0.0], [2.0]]).double(), **EXACT)
    torch.testing.assert_close(down, torch.tensor([[0.0, 1.0]]).double(), **EXACT)
    # By name: B = (1/2, 1/2)ᵀ, A = (1, 2), whose product is (1/2, 1; 1/2, 1); the difference is (1/2, -1; -1/2, 1).
    torch.testing.assert_close(
        torch.matmul(*residual(pairs, [0.5, 0.5])), torch.tensor([[0.5, -1.0], [-0.5, 1.0]]).double(), **EXACT
    )
    # B' = (D·Aᵀ + λB) / (A·Aᵀ + λ) with D·Aᵀ = (1, 4)ᵀ, A·Aᵀ = 5, λ = 1: (1.5, 4.5)ᵀ / 6.
    up, down = correct_up(pairs, [0.5, 0.5], 1.0)
    torch.testing.assert_close(up, torch.tensor([[0.25], [0.75]]).double(), **EXACT)
    torch.testing.assert_close(down, torch.tensor([[1.0, 2.0]]).double(), **EXACT)


def orthogonal(rows):
    """By Gram and Schmidt, with the largest number of each row positive."""
    results = []
    for row in rows:
        for other in results * 2:
            row = row - (other @ row) * other
        results.append(row / row.norm() * row[row.abs().argmax()].sign())
    return torch.stack(results)


@pytest.mark.parametrize("nudge", [0.0, 1e-15, -3e-15])
def test_rounding_does_not_choose_the_rows_that_the_mean_leaves_free(nudge):
    """Clients of ranks 1 and 2 in factors of rank 5: two rows of A are those before, made orthogonal."""
    random = torch.Generator().manual_seed(7)
    ((_, before),) = draw_pairs([5], seed=1)
    pairs = [FactorPair(nn.functional.pad(up, (0, 5 - up.shape[1])), down) for up, down in draw_pairs([1, 2])]
    pairs = [FactorPair(up, nn.functional.pad(down, (0, 0, 0, 5 - len(down)))) for up, down in pairs]
    moved = [
        FactorPair(*(x * (1 + nudge * torch.rand(x.shape, generator=random).double()) for x in pair)) for pair in pairs
    ]
    up, down = truncate(weighted_sum(moved, [0.3, 0.7]), 5, before)
    _, _, vt = torch.linalg.svd(dense(pairs, [0.3, 0.7]))
    torch.testing.assert_close(down, orthogonal([*vt[:3], *before[3:]]), rtol=1e-9, atol=1e-12)
    assert not up[:, 3:].any()
    torch.testing.assert_close(up @ down, dense(pairs, [0.3, 0.7]), **EXACT)
    nothing = [FactorPair(0 * up, down) for up, down in pairs]
    up, down = truncate(weighted_sum(nothing, [0.3, 0.7]), 5, before)
    torch.testing.assert_close(down, orthogonal(before), **EXACT)
    assert not up.any()


@pytest.mark.parametrize("strength", [1e-3, 0.01, 2.0])
def test_the_corrected_factor_is_the_minimum(strength):
    pairs = draw_pairs([3] * 4)
    weights = shares(4)
    up, down = (sum(w * pair[side] for w, pair in zip(weights, pairs, strict=True)) for side in (0, 1))
    result, same = correct_up(pairs, weights, strength)
    torch.testing.assert_close(same, down, **EXACT)
    leaf = result.clone().requires_grad_()
    product = dense(pairs, weights)
    loss = (product - leaf @ down).square().sum() + strength * (leaf - up).square().sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    assert slope.abs().max() < 1e-11
    torch.testing.assert_close(correct_up(pairs, weights, 1e14)[0], up, rtol=1e-10, atol=1e-10)
    least = torch.linalg.lstsq(down.T, product.T).solution.T
    torch.testing.assert_close(correct_up(pairs, weights, 1e-13)[0], least, rtol=1e-9, atol=1e-9)


FACTORS = (Factors("fc.A", "fc.B", 0.5), Factors("conv.A", "conv.B", 3.0), Factors("many.A", "many.B", 2.0))
CLIENTS = 3
RANK = 2


def uploads(seed=0, dtype=torch.float64):
    """A linear layer, a convolution, one with two groups, a head, and a counter."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.A": (RANK, 6),
        "fc.B": (5, RANK),
        "head": (4, 3),
        "conv.A": (RANK, 2, 3, 3),
        "conv.B": (8, RANK, 1, 1),
        "many.A": (4, 4, 3, 3),
        "many.B": (6, 2, 1, 1),
    }
    drawn = {key: torch.randn(CLIENTS, *shape, generator=random, dtype=dtype) for key, shape in shapes.items()}
    return drawn | {"seen": torch.tensor([3, 9, 4])}


def products(state):
    """What each layer adds to its weight, by plain products; of the groups the blocks below one another."""
    added = {key: state[f"{key}.B"].flatten(1) @ state[f"{key}.A"].flatten(1) for key in ("fc", "conv")}
    blocks = [
        state["many.B"][3 * g : 3 * g + 3].flatten(1) @ state["many.A"][2 * g : 2 * g + 2].flatten(1) for g in (0, 1)
    ]
    added["many"] = torch.cat(blocks)
    return {key: added[key] * scale for key, scale in (("fc", 0.5), ("conv", 3.0), ("many", 2.0))}


def rows(updates):
    return [{key: value[row] for key, value in updates.items()} for row in range(CLIENTS)]


def means(updates):
    added = [products(row) for row in rows(updates)]
    return {key: sum(w * one[key] for w, one in zip(shares(CLIENTS), added, strict=True)) for key in added[0]}


def aggregation(updates, **options):
    options = {"weights": client_weights("samples", range(1, CLIENTS + 1))} | options
    previous = {key: torch.zeros_like(value[0]) for key, value in uploads().items()}
    names = frozenset(previous) - {"seen"}
    return Aggregation(updates, previous=previous, parameters=names, round=0, factors=FACTORS, **options)


def distance(one, other):
    return math.sqrt(sum(float((one[key] - other[key]).square().sum()) for key in one))


def test_groups_of_a_convolution_are_pairs_of_their_own():
    """Against the layers themselves, run one after the other."""
    one = rows(uploads())[0]
    down = nn.Conv2d(4, 4, 3, bias=False).double()
    up = nn.Conv2d(4, 6, 1, groups=2, bias=False).double()
    convolution = nn.Conv2d(4, 6, 3, bias=False).double()
    with torch.no_grad():
        down.weight.copy_(one["many.A"])
        up.weight.copy_(one["many.B"])
        b, a = client_pairs(one["many.B"][None], one["many.A"][None])[0]
        convolution.weight.copy_((b @ a).reshape(6, 4, 3, 3))
        x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
        torch.testing.assert_close(convolution(x), up(down(x)), **EXACT)


def test_svd_keeps_the_best_of_each_layer_and_averages_the_rest():
    updates = uploads()
    case = aggregation(uploads())
    out = SVD()(case)
    assert list(out) == list(updates)
    actual = products(out)
    expected = means(updates)
    for key, rank in (("fc", RANK), ("conv", RANK)):
        torch.testing.assert_close(actual[key], best(expected[key], rank), **EXACT)
    halves = torch.cat([best(half, 2) for half in expected["many"].split(3)])
    torch.testing.assert_close(actual["many"], halves, **EXACT)
    average = mean({key: updates[key] for key in ("head", "seen")}, case.weights)
    assert all(torch.equal(out[key], value) for key, value in average.items())
    size = distance(expected, {key: 0 * value for key, value in expected.items()})
    assert case.metrics == {"updates/lora_error": pytest.approx(distance(actual, expected) / size, rel=1e-10)}


def test_lora_fair_is_nearer_to_the_mean_than_the_means_are_and_leaves_a():
    updates = uploads()
    case = aggregation(uploads())
    out = LoRAFair()(case)
    expected = means(updates)
    average = mean(updates, case.weights)
    assert list(out) == list(updates)
    for key in ("fc.A", "conv.A", "many.A", "head", "seen"):
        torch.testing.assert_close(out[key], average[key], **EXACT)
    before = distance(products(average), expected)
    after = distance(products(out), expected)
    assert after < 0.9 * before
    size = distance(expected, {key: 0 * value for key, value in expected.items()})
    assert case.metrics == {"updates/lora_error": pytest.approx(after / size, rel=1e-10)}
    assert lora_residual(FACTORS, Updates(updates), case.weights) == pytest.approx(before / size, rel=1e-10)
    assert distance(products(SVD()(aggregation(updates))), expected) < after  # the best there is


def test_there_is_no_residual_where_one_factor_is_the_same():
    updates = uploads()
    weights = aggregation(uploads()).weights
    assert lora_residual(FACTORS, Updates(updates), weights) > 0.5
    for side in ("A", "B"):
        same = {key: value[:1].expand_as(value) if key.endswith(side) else value for key, value in updates.items()}
        assert lora_residual(FACTORS, Updates(same), weights) < 1e-15
    assert lora_residual(FACTORS, Updates({key: 0 * value for key, value in updates.items()}), weights) == 0
    assert lora_residual(FACTORS, Updates({"head": updates["head"]}), weights) == 0
    part = {key: value for key, value in updates.items() if not key.startswith("fc")}
    assert lora_residual(FACTORS, Updates(part), weights) == pytest.approx(
        lora_residual(FACTORS[1:], Updates(updates), weights)
    )


@pytest.mark.parametrize("rule", [SVD(), LoRAFair()])
def test_equal_clients_change_nothing(rule):
    same = {key: value[:1].expand_as(value) for key, value in uploads().items()}
    case = aggregation(same)
    out = rule(case)
    for key, value in products(out).items():
        torch.testing.assert_close(value, products(rows(same)[0])[key], **EXACT)
    assert case.metrics["updates/lora_error"] < 1e-12


@pytest.mark.parametrize("rule", [SVD(), LoRAFair()])
def test_they_are_no_functions_of_the_mean(rule):
    """So privacy of whole clients, which knows the mean alone, rejects them."""
    one = uploads()
    other = uploads(1)
    moved = {k: v - v.mean(0) + one[k].mean(0) for k, v in other.items() if v.is_floating_point()} | {
        "seen": one["seen"]
    }
    result = [rule(aggregation(updates, weights=client_weights("uniform", [1] * CLIENTS))) for updates in (one, moved)]
    torch.testing.assert_close(result[0]["head"], result[1]["head"], **EXACT)
    assert not torch.allclose(result[0]["fc.B"], result[1]["fc.B"], atol=0.01)
    assert not rule.function_of_mean


@pytest.mark.parametrize("rule", [SVD(), LoRAFair(), SVD(Median())])
def test_inputs_stay_and_half_precision_follows_double(rule):
    updates = uploads()
    before = copy.deepcopy(updates)
    out = rule(aggregation(updates))
    assert all(torch.equal(updates[key], value) for key, value in before.items())
    assert all(torch.equal(out[key], value) for key, value in rule(aggregation(Updates(updates))).items())
    narrow = {key: value.bfloat16() if value.is_floating_point() else value for key, value in updates.items()}
    wide = rule(aggregation({key: value.double() if key != "seen" else value for key, value in narrow.items()}))
    for key, value in rule(aggregation(narrow)).items():
        assert value.dtype == narrow[key].dtype
        torch.testing.assert_close(value.double(), wide[key].double(), rtol=0.02, atol=0.02)


def test_rules_compose():
    updates = uploads()
    out = SVD(Median())(aggregation(updates))
    torch.testing.assert_close(out["head"], updates["head"].median(0)[0])
    assert not SVD(Median()).weighted
    clipped = NormClipping(0.5, aggregate=SVD())
    assert clipped.needs_factors
    assert not clipped.function_of_mean
    case = aggregation(updates)
    assert products(clipped(case)).keys() == {"fc", "conv", "many"}
    assert "updates/lora_error" in case.metrics
    assert FedAvgM(aggregate=LoRAFair(), momentum=0.0)(aggregation(updates)).keys() == updates.keys()


def test_without_pairs_there_is_nothing_to_do():
    updates = {key: value for key, value in uploads().items() if not key.endswith("A")}
    with pytest.raises(ValueError, match=r"both factors.*server_rule='mean'"):
        SVD()(aggregation(updates))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_pull_is_positive(value):
    with rejects("strength", value):
        LoRAFair(value)
