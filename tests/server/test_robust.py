# SPDX-License-Identifier: Apache-2.0
"""Robust server rules against the definitions of their papers, as plain loops, and against scipy's minimiser."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from perada.core.checks import floor_share
from perada.server import (
    Aggregation,
    FLTrust,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormClipping,
    Updates,
    client_weights,
)

FLOATING = ("w", "running_var")


def uploads(seed, clients):
    random = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(clients, 3, 2, generator=random, dtype=torch.float64),
        "running_var": torch.rand(clients, 4, generator=random, dtype=torch.float64),
        "seen": torch.randint(0, 99, (clients,), generator=random),
    }


PREVIOUS = {key: value[0] + 1 for key, value in uploads(99, 1).items()}


def aggregation(updates, weights=None):
    clients = len(updates["w"])
    weights = client_weights("samples", range(1, clients + 1)) if weights is None else weights
    return Aggregation(updates, weights, PREVIOUS, frozenset({"w"}), 0)


def points(updates):
    """What each client sent, as one vector (C, n)."""
    return np.concatenate([updates[key].numpy().reshape(len(updates[key]), -1) for key in FLOATING], 1)


def vector(state):
    return np.concatenate([state[key].numpy().ravel() for key in FLOATING])


@pytest.mark.parametrize(("clients", "suspected", "keep"), [(7, 0.2, None), (7, 0.29, 1), (9, 0.34, 3), (12, 0.1, 5)])
def test_krum_is_its_definition(clients, suspected, keep):
    updates = uploads(clients, clients)
    rows = points(updates)
    suspects = int(suspected * clients)
    scores = []
    for client in range(clients):
        squares = sorted(
            float(((rows[client] - rows[other]) ** 2).sum()) for other in range(clients) if other != client
        )
        scores.append(sum(squares[: clients - suspects - 2]))
    chosen = sorted(range(clients), key=scores.__getitem__)[: keep or clients - suspects]
    out = Krum(suspected, keep)(aggregation(updates))
    np.testing.assert_allclose(vector(out), rows[chosen].mean(0), rtol=1e-12)
    assert int(out["seen"]) == int(updates["seen"][chosen].max())


def test_krum_says_how_many_clients_it_needs():
    Krum(0.2).check(5)
    assert floor_share(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    Krum(0.4).check(15)
    for suspected, clients, text in (
        (0.2, 4, "suspects 0 of 4 clients per round, but Krum must suspect at least one and requires .*, here 5"),
        (0.4, 10, "suspects 4 of 10 clients per round, .*, here 11"),
        (0.1, 5, "suspects 0 of 5 clients per round, .*, here 10"),
        (0.29, 3, "suspects 0 of 3 clients per round, .*, here 5"),
    ):
        with pytest.raises(ValueError, match=text):
            Krum(suspected).check(clients)
    for options in ({"suspected": 0.5}, {"suspected": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match=r"(suspected|keep) must be .*, got 0"):
            Krum(**options)


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
def test_geometric_median_minimises_the_distances(clients):
    updates = uploads(clients, clients)
    rows = points(updates)
    weights = np.arange(1, clients + 1) / sum(range(1, clients + 1))

    def total(x):
        return float(weights @ np.sqrt(((rows - x) ** 2).sum(1)))

    result = vector(GeometricMedian()(aggregation(updates)))
    best = minimize(total, rows.mean(0), method="Nelder-Mead", options={"maxiter": 40_000, "maxfev": 40_000})
    assert total(result) <= min(best.fun, *map(total, rows)) * (1 + 1e-6)


def test_geometric_median_of_numbers_is_their_median():
    numbers = {"w": torch.tensor([[5.0], [1.0], [7.0], [2.0], [100.0]], dtype=torch.float64)}
    state = Aggregation(numbers, client_weights("uniform", [1] * 5), {"w": torch.zeros(1)}, frozenset({"w"}), 0)
    np.testing.assert_allclose(GeometricMedian()(state)["w"].numpy(), [5.0], rtol=1e-4)


def test_geometric_median_is_where_most_are():
    updates = uploads(0, 5)
    for key in FLOATING:
        updates[key][:3] = updates[key][0]
    uniform = client_weights("uniform", [1] * 5)
    np.testing.assert_allclose(vector(GeometricMedian()(aggregation(updates, uniform))), points(updates)[0], rtol=1e-5)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("aggregate", [None, Median()])
def test_norm_clipping_shortens_each_change(max_norm, aggregate):
    updates = uploads(3, 5)
    start = vector(PREVIOUS)
    parts = []
    for key, limit in (("w", max_norm), ("running_var", None)):
        previous = PREVIOUS[key].numpy().ravel()
        changes = updates[key].numpy().reshape(5, -1) - previous
        norms = np.linalg.norm(changes, axis=1)
        most = np.median(norms) if limit is None else limit
        parts.append(previous + changes * np.minimum(1, most / norms)[:, None])
    shortened = np.concatenate(parts, 1)
    if aggregate is None:
        expected = np.average(shortened, axis=0, weights=range(1, 6))
    else:
        expected = np.median(shortened, axis=0)
    np.testing.assert_allclose(vector(NormClipping(max_norm, aggregate)(aggregation(updates))), expected, rtol=1e-12)
    same = {key: value.clone() for key, value in updates.items()}
    for key in FLOATING:
        same[key][:] = PREVIOUS[key]  # nobody moved
    np.testing.assert_allclose(vector(NormClipping(max_norm, aggregate)(aggregation(same))), start, rtol=1e-15)


LABELS = torch.tensor([[0, 1], [1, 0], [1, 0]] * 20)


def predictions(models, images, labelled):
    """Probabilities (C, N, 2) of logistic models on images of six pixels, and labels."""
    x = torch.randn(images, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    rows = models.gathered("w") if isinstance(models, Updates) else models["w"]
    chances = (rows.flatten(1) @ x.T).sigmoid()
    return torch.stack([chances, 1 - chances], -1), LABELS[:images] if labelled else None


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("clients", [1, 4, 7])
def test_fltrust_is_the_cosine_of_what_predictions_moved(clients, labels):
    updates = uploads(clients, clients)
    result = predictions(updates, 9, False)[0].numpy().reshape(clients, -1)
    before = predictions({"w": PREVIOUS["w"][None]}, 9, False)[0].numpy().ravel()
    towards = (LABELS[:9].numpy().ravel() if labels else np.median(result, 0)) - before
    trust = []
    for own in result:
        cosine = (own - before) @ towards / np.linalg.norm(own - before) / np.linalg.norm(towards)
        trust.append(max(0.0, cosine))
    asked = replace(aggregation(updates), predict=predictions)
    rule = FLTrust(labels, 9)
    np.testing.assert_allclose(rule.trust(asked).numpy(), trust, rtol=1e-10, atol=1e-15)
    assert sum(trust) > 0
    weights = torch.tensor(trust, dtype=torch.float64) / sum(trust)
    np.testing.assert_allclose(vector(rule(asked)), vector(NormClipping()(aggregation(updates, weights))), rtol=1e-12)


@pytest.mark.parametrize("labels", [True, False])
def test_fltrust_leaves_the_state_where_nobody_is_trusted(labels):
    updates = uploads(0, 3)
    updates["w"][:] = math.nan
    out = FLTrust(labels, 60)(replace(aggregation(updates), predict=predictions))
    np.testing.assert_array_equal(vector(out), vector(PREVIOUS))
    with pytest.raises(ValueError, match=r"Aggregation\.predict"):
        FLTrust()(aggregation(updates))


@pytest.mark.parametrize("labels", [True, False])
def test_fltrust_gives_no_weight_to_those_who_go_back(labels):
    """Some send the reverse of what the others learned, a hundred times as long, and one nonsense."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    step = ((LABELS[:, 0] - 0.5).double() @ x / 20).view(3, 2)  # towards the labels
    clients, hostile = (8, 6) if labels else (8, 3)
    own = 0.02 * uploads(2, clients)["w"] + step
    own[:hostile] *= -100
    own[hostile - 1] = math.inf
    start = {"w": torch.zeros(3, 2, dtype=torch.float64)}
    weights = client_weights("uniform", [1] * clients)
    asked = Aggregation({"w": own}, weights, start, frozenset({"w"}), 0, predict=predictions)
    trust = FLTrust(labels, 60).trust(asked)
    assert (trust[:hostile] == 0).all() and (trust[hostile:] > 0.2).all()
    moved = FLTrust(labels, 60)(asked)["w"]
    assert torch.cosine_similarity(moved.flatten(), own[hostile:].mean(0).flatten(), 0) > 0.98


@pytest.mark.parametrize("nonsense", [math.inf, -math.inf, math.nan, 1e30, -1e6])
@pytest.mark.parametrize("rule", [Krum(0.2), Krum(0.2, keep=1), GeometricMedian(), NormClipping()])
def test_one_client_that_sends_nonsense_moves_the_result_little(rule, nonsense):
    updates = uploads(0, 6)
    honest = points(updates)[[0, 1, 3, 4, 5]]
    updates["w"][2] = nonsense
    out = vector(rule(aggregation(updates, client_weights("uniform", [1] * 6))))
    centre = honest.mean(0)
    farthest = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(out - centre) <= farthest
    plain = vector(Mean()(aggregation(updates)))
    assert not np.linalg.norm(plain - centre) <= 1e3


@pytest.mark.parametrize("rule", [Krum(0.2), GeometricMedian(), NormClipping()])
def test_far_from_zero_small_changes_are_still_told_apart(rule):
    """All states are near 1e6: the rules look at what changed."""
    updates = uploads(1, 6)
    far = {key: value + 1e6 if key in FLOATING else value for key, value in updates.items()}
    before = {key: value + 1e6 if key in FLOATING else value for key, value in PREVIOUS.items()}
    near = rule(aggregation(updates))
    moved = rule(Aggregation(far, aggregation(updates).weights, before, frozenset({"w"}), 0))
    np.testing.assert_allclose(vector(moved) - 1e6, vector(near), atol=1e-7)


@pytest.mark.parametrize("broken", [0, 3])
def test_of_a_client_that_sends_nonsense_neither_update_nor_weight_is_in_the_geometric_median(broken):
    updates = uploads(1, 7)
    others = [client for client in range(7) if client != broken]
    updates["w"][broken] = torch.nan
    weights = client_weights("samples", [50, 1, 1, 20, 1, 2, 90])
    actual = vector(GeometricMedian()(aggregation(updates, weights)))
    rows = points(updates)[others]
    own = weights[others].numpy()

    def distance(point):
        return float((own * np.linalg.norm(rows - point, axis=1)).sum())

    expected = minimize(distance, rows.mean(0), method="Nelder-Mead", options={"xatol": 1e-9, "maxiter": 20000})
    assert distance(actual) <= expected.fun * (1 + 1e-5)
