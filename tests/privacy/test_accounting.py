# SPDX-License-Identifier: Apache-2.0
"""Ledgers against Opacus fed by hand, published numbers and closed forms."""

import io
import json
import logging
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis import rdp
from scipy.optimize import brentq
from scipy.stats import norm

from perada.privacy import Ledger, Ledgers, history_epsilon
from perada.privacy.accounting import import_opacus
from tests.rejections import rejects

DELTA = 1e-5


def gaussian_delta(epsilon, mu):
    """Exact delta of one Gaussian query with sensitivity mu and unit noise (Balle and Wang 2018, theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


# Two runs that alternate, as the two adapters of a client do: (σ, q, steps).
ALTERNATING = [(1.1, 0.02, 40), (1.5, 0.05, 20)] * 5


def test_rdp_epsilon_equals_opacus_step_by_step():
    ledger = Ledger()
    opacus = RDPAccountant()
    for sigma, rate, steps in ALTERNATING:
        ledger.add(7, sigma, rate, steps)
        for _ in range(steps):
            opacus.step(noise_multiplier=sigma, sample_rate=rate)
    expected, _ = opacus.get_privacy_spent(delta=DELTA)
    assert ledger.epsilon(7, DELTA) == pytest.approx(expected, rel=1e-12)
    assert ledger.history(7) == {(1.1, 0.02): 200, (1.5, 0.05): 100}


@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
@pytest.mark.slow
def test_rdp_epsilon_is_the_least_of_all_of_opacus_orders(monkeypatch):
    """To the last bit, whichever order has it, though few are computed."""
    computed = []
    monkeypatch.setattr(
        "opacus.accountants.analysis.rdp._compute_rdp",
        lambda q, sigma, alpha, compute=rdp._compute_rdp: computed.append(alpha) or compute(q, sigma, alpha),
    )
    random = np.random.default_rng(0)
    ours = 0
    best = set()
    for _ in range(25):
        opacus = RDPAccountant()
        opacus.history = sorted(
            (10 ** random.uniform(-0.6, 1.3), min(1.0, 10 ** random.uniform(-3, 0.2)), int(10 ** random.uniform(0, 4)))
            for _ in range(random.integers(1, 4))
        )
        delta = 10 ** random.uniform(-8, -1.5)
        computed.clear()
        epsilon = history_epsilon({(sigma, rate): steps for sigma, rate, steps in opacus.history}, delta)
        ours += len(computed)
        expected, order = opacus.get_privacy_spent(delta=delta)
        assert epsilon == expected
        best.add(order)
    assert len(best) > 10
    assert ours < 0.2 * 25 * len(RDPAccountant.DEFAULT_ALPHAS)


@pytest.mark.parametrize(("sigma", "steps", "is_low"), [(0.6, 200, True), (2.0, 20, False)])
def test_rdp_epsilon_has_opacus_order_whether_that_is_low_or_high(sigma, steps, is_low):
    opacus = RDPAccountant()
    opacus.history = [(sigma, 0.1, steps)]
    expected, order = opacus.get_privacy_spent(delta=DELTA)
    assert (order < 8) == is_low
    assert history_epsilon({(sigma, 0.1): steps}, DELTA) == expected


def test_prv_epsilon_equals_opacus():
    ledger = Ledger()
    opacus = PRVAccountant()
    for sigma, rate, steps in ALTERNATING[:2]:
        ledger.add(7, sigma, rate, steps)
        for _ in range(steps):
            opacus.step(noise_multiplier=sigma, sample_rate=rate)
    assert ledger.epsilon(7, DELTA, "prv") == pytest.approx(opacus.get_epsilon(DELTA), rel=1e-9)


@pytest.mark.parametrize(
    ("images", "batch", "sigma", "epochs", "delta", "published"),
    [(60000, 150, 1.3, 15, 1e-5, 0.7242234026109595), (100000, 100, 1.0, 30, 1e-7, 1.4154988495444845)],
)
def test_rdp_epsilon_is_the_published_one(images, batch, sigma, epochs, delta, published):
    """Values of TensorFlow Privacy, another implementation: its compute_dp_sgd_privacy_test.py, Test0 and Test1."""
    history = {(sigma, batch / images): epochs * images // batch}
    assert history_epsilon(history, delta) == pytest.approx(published, abs=1e-7)


@pytest.mark.parametrize(("sigma", "passes"), [(1.0, 1), (4.0, 10)])
def test_shuffled_passes_cost_what_the_gaussian_mechanism_costs(sigma, passes):
    """At rate 1 the T-fold composition is one Gaussian query of sensitivity √T / σ, whose epsilon is known exactly."""
    history = {(sigma, 1.0): passes}
    mu = math.sqrt(passes) / sigma
    exact = brentq(lambda epsilon: gaussian_delta(epsilon, mu) - DELTA, 0, 100)
    assert exact <= history_epsilon(history, DELTA, "prv") <= exact + 0.021  # two errors of 0.01 each, and the mesh
    alpha = np.linspace(1.001, 64, 400_000)
    bound = alpha * passes / (2 * sigma**2) - (math.log(DELTA) + np.log(alpha)) / (alpha - 1) + np.log1p(-1 / alpha)
    assert bound.min() <= history_epsilon(history, DELTA, "rdp") == pytest.approx(bound.min(), rel=2e-3)


def test_one_poisson_step_is_amplified_exactly():
    """One step with rate q: delta(ε) = q · delta_Gauss(log(1 + (e^ε − 1) / q)), from the mixture's density."""
    rate = 0.1
    sigma = 0.5
    exact = brentq(
        lambda epsilon: rate * gaussian_delta(math.log1p(math.expm1(epsilon) / rate), 1 / sigma) - DELTA, 0, 50
    )
    without = history_epsilon({(sigma, 1.0): 1}, DELTA, "prv")
    assert exact <= history_epsilon({(sigma, rate): 1}, DELTA, "prv") <= exact + 0.021
    assert without > exact + 1


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("delta", [0.5, 0.9, 0.999])
def test_epsilon_is_never_negative(accountant, delta):
    """For a large δ, the conversion from Rényi divergences falls below 0, and the grid of prv ends before it."""
    history = {(2.0, 0.1): 20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = RDPAccountant()
        opacus.history = [(2.0, 0.1, 20)]
        assert opacus.get_epsilon(delta) < 0
    assert history_epsilon(history, delta, accountant) == 0.0
    ledger = Ledger()
    ledger.add(0, 2.0, 0.1, 20)
    assert ledger.summary(delta, accountant)["max"] == 0.0


def test_order_does_not_matter():
    forward = Ledger()
    backward = Ledger()
    for row in ALTERNATING:
        forward.add(0, *row)
    for row in reversed(ALTERNATING):
        backward.add(0, *row)
    assert forward.epsilon(0, DELTA) == backward.epsilon(0, DELTA)
    assert forward.state_dict() == backward.state_dict()


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_nothing_costs_nothing_and_no_noise_costs_everything(accountant):
    ledger = Ledger()
    assert ledger.epsilon(0, DELTA, accountant) == 0.0
    ledger.add(0, 1.0, 0.1, 0)
    assert ledger.history(0) == {}
    ledger.add(0, 0.0, 0.1, 1)
    assert ledger.epsilon(0, DELTA, accountant) == math.inf
    ledger.add(0, 1.0, 0.1, 50)  # noise afterwards does not undo it
    assert ledger.epsilon(0, DELTA, accountant) == math.inf


def test_summary_is_over_the_clients_named():
    ledger = Ledger()
    for client, steps in [(4, 100), (2, 300), (9, 100)]:
        ledger.add(client, 1.2, 0.05, steps)
    values = [ledger.epsilon(client, DELTA) for client in (2, 4, 9)]
    assert ledger.epsilons(DELTA) == dict(zip((2, 4, 9), values, strict=True))
    expected = {"mean": np.mean(values), "std": np.std(values), "max": max(values)}
    assert ledger.summary(DELTA) == pytest.approx(expected, rel=1e-12)
    with_absent = [0.0, *values]
    summary = ledger.summary(DELTA, clients=[1, 2, 4, 9])
    assert summary["mean"] == pytest.approx(np.mean(with_absent), rel=1e-12)
    assert summary["std"] == pytest.approx(np.std(with_absent), rel=1e-12)
    assert Ledger().summary(DELTA) == {"mean": 0.0, "std": 0.0, "max": 0.0}
    ledger.add(2, 0.0, 0.05, 1)
    summary = ledger.summary(DELTA)
    assert (summary["mean"], summary["max"]) == (math.inf, math.inf)
    assert math.isnan(summary["std"])


def test_state_survives_a_safe_checkpoint_and_is_not_shared():
    ledgers = Ledgers()
    ledgers.add(3, 1.1, 0.02, 40, sent=True)
    ledgers.add(3, 1.5, 0.05, 20, sent=False)
    state = ledgers.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copy in (torch.load(file, weights_only=True), json.loads(json.dumps(state))):
        again = Ledgers()
        again.add(8, 1.0, 1.0, 1, sent=True)
        again.server.load_state_dict({"rows": []})  # replaces, and does not add
        assert again.server.history(8) == {}
        again.load_state_dict(copy)
        assert again.server.history(3) == {(1.1, 0.02): 40}
        assert again.release.history(3) == {(1.1, 0.02): 40, (1.5, 0.05): 20}
        again.add(3, 1.1, 0.02, 1, sent=True)
        assert copy == state
    ledgers.add(3, 1.1, 0.02, 60, sent=True)
    assert state["server"] == {"rows": [[3, 1.1, 0.02, 40]]}
    ledgers.release.history(3).clear()
    assert ledgers.release.history(3) == {(1.1, 0.02): 100, (1.5, 0.05): 20}


def test_a_foreign_state_is_rejected_and_changes_nothing():
    ledgers = Ledgers()
    ledgers.add(3, 1.1, 0.02, 40, sent=True)
    with pytest.raises(ValueError, match="'rows' only"):
        ledgers.load_state_dict({"server": {"rows": []}, "release": {"history": []}})
    with pytest.raises(ValueError, match=r"server and release, .*'server'"):
        ledgers.load_state_dict({"server": {"rows": []}})
    with pytest.raises(
        ValueError, match=r"server and release, .*'other', 'release', 'server'"
    ):  # what it says is spent
        ledgers.load_state_dict(ledgers.state_dict() | {"other": {"rows": [[3, 1.0, 1.0, 1]]}})
    with rejects("sample_rate", 2):
        ledgers.server.load_state_dict({"rows": [[1, 1.0, 2, 3]]})
    assert ledgers.server.history(3) == {(1.1, 0.02): 40}


def test_a_release_composes_both_adapters():
    """Rényi orders add up: two equal runs cost as much as one of twice the steps, and less than twice the epsilon."""
    ledgers = Ledgers()
    ledgers.add(0, 1.3, 0.05, 100, sent=True)
    ledgers.add(0, 1.3, 0.05, 100, sent=False)
    one = ledgers.server.epsilon(0, DELTA)
    both = ledgers.release.epsilon(0, DELTA)
    opacus = RDPAccountant()
    opacus.history = [(1.3, 0.05, 200)]
    assert both == opacus.get_epsilon(DELTA)
    assert one < both < 2 * one


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((-1.0, 0.1, 1), r"noise_multiplier .*got -1.0"),
        ((math.nan, 0.1, 1), r"noise_multiplier .*got nan"),
        ((math.inf, 0.1, 1), r"noise_multiplier .*got inf"),
        ((1.0, 0.0, 1), r"sample_rate .*got 0.0"),
        ((1.0, 1.5, 1), r"sample_rate .*got 1.5"),
        ((1.0, 0.1, -1), r"steps .*got -1"),
        ((1.0, 0.1, 1.5), r"steps .*got 1.5"),
    ],
)
def test_impossible_steps_are_rejected(row, message):
    with pytest.raises(ValueError, match=message):
        Ledger().add(0, *row)


def test_impossible_questions_are_rejected():
    with rejects("delta", 1):
        history_epsilon({(1.0, 0.1): 1}, 1)
    with rejects("accountant", "moments"):
        history_epsilon({(1.0, 0.1): 1}, DELTA, "moments")


def test_no_warning_of_a_division_reaches_the_user():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        history_epsilon({(2.0, 1.0): 3}, DELTA, "prv")
    assert seen == []


def test_the_import_of_opacus_leaves_the_root_logger_as_it_was(tmp_path, monkeypatch):
    """By a package in its place, since Opacus itself is imported by now."""
    (tmp_path / "opacus.py").write_text("import logging\nlogging.basicConfig()\nlogging.root.setLevel(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "opacus")
    before = logging.root.handlers[:]
    level = logging.root.level
    logging.root.handlers[:] = []
    try:
        import_opacus()
        assert (logging.root.handlers, logging.root.level) == ([], level)
        assert sys.modules["opacus"].__file__ == str(tmp_path / "opacus.py")
    finally:
        logging.root.handlers[:] = before
        logging.root.setLevel(level)


@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
def test_the_page_says_what_a_person_with_several_images_has():
    """Gradients of k images, all in each step, move the sum k times as far: the noise is a k-th as large beside it."""

    def epsilon(noise_multiplier):
        accountant = RDPAccountant()
        accountant.history = [(noise_multiplier, 1.0, 40)]
        return accountant.get_epsilon(1e-5)

    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| ε of (?:one image|a person with (\d) images) \|(.*)\|$", page, re.MULTILINE)
    assert [count for count, _ in rows] == ["", "2", "5"]
    (_, of_one_image), *of_persons = [(count, [float(cell) for cell in cells.split("|")]) for count, cells in rows]
    for count, values in of_persons:
        for target, value in zip(of_one_image, values, strict=True):
            noise_multiplier = brentq(lambda noise, target=target: epsilon(noise) - target, 0.5, 200)
            assert value == pytest.approx(epsilon(noise_multiplier / int(count)), abs=0.051)
