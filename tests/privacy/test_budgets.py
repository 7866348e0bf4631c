# SPDX-License-Identifier: Apache-2.0
"""Budgets of private training: calibrated noise, clients who leave, and going on from a checkpoint."""

import warnings
from collections import Counter

import pytest
import pytorch_lightning as pl
import torch
from opacus.accountants import RDPAccountant
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import APFL, FedAvgFT, PerAda, PFedMe
from perada.core.rounds import sample_cohort
from perada.core.seeding import generator
from perada.lightning import FederatedLoop

from ..algorithms.problems import BATCH, CLIENTS, CLIENTS_PER_ROUND, SIZES, assert_equal, task
from .private_loop import SEED, rate, steps_of, train

DELTA = 1e-3
WITHOUT_KD = PerAda(distill=False)


pytestmark = pytest.mark.usefixtures("quick_epsilon")


def saving(folder, *more):
    return {"callbacks": [ModelCheckpoint(folder, "saved"), *more], "enable_checkpointing": True}


def ledgers_of(folder):
    saved = torch.load(folder / "saved.ckpt", weights_only=True)["perada"]["federation"]["privacy"]["images"]
    return saved["ledgers"], saved["noise_multipliers"]


def participations(rounds):
    return Counter(c for r in range(rounds) for c in sample_cohort(SEED, r, len(SIZES), CLIENTS_PER_ROUND))


TARGETS = {
    "perada": (WITHOUT_KD, {}, 2),
    "perada, server": (WITHOUT_KD, {"ledger": "server"}, 1),
    "pfedme": (PFedMe(inner_steps=3), {}, 3),
    "fedavg_ft": (FedAvgFT(2.0), {}, 1),
    "fedavg_ft, server": (FedAvgFT(2.0), {"ledger": "server"}, 1),
    "shuffled": (WITHOUT_KD, {"sampling": "shuffle"}, 2),
    "prv": ("fedavg", {"accountant": "prv"}, 1),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "prv")) for case in TARGETS])
@pytest.mark.every(2)
def test_the_target_is_spent_by_every_client_and_never_exceeded(case):
    algorithm, options, _ = TARGETS[case]
    target = 3.0
    run = train(algorithm, {"target_epsilon": target, "delta": DELTA} | options, rounds=2)
    name = options.get("ledger", "release")
    spent = run.metrics["clients"][f"privacy/{name}_epsilon"]
    times = participations(2)
    assert sorted(set(times.values())) == [1, 2]  # unequal
    for client, epsilon in enumerate(spent):
        if times[client]:
            assert target - 0.01 <= epsilon <= target
    if name == "server":
        assert all(
            whole >= part for whole, part in zip(run.metrics["clients"]["privacy/release_epsilon"], spent, strict=True)
        )
    noise = run.info["privacy"]["sample"]["noise_multipliers"]
    if "sampling" not in options:
        assert noise[1] > noise[2] > 0  # 3 images with q = 1 need more than 14 with q = 2/7


class Cohorts(pl.Callback):
    """Who takes part in each round."""

    def __init__(self, stop_after=None):
        self.cohorts = []
        self.stop_after = stop_after

    def on_train_epoch_start(self, trainer, pl_module):
        self.cohorts.append(set(pl_module.federation.cohort.plan.clients))

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.stop_after:
            trainer.should_stop = True


def epsilon(sigma, q, steps):
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opacus.get_epsilon(delta=DELTA)


def played(sigma, limit, rounds, per_step):
    """The cohorts, and whether a client is left after each round: by the definition, one round after the other."""
    steps = Counter()

    def able(clients):
        return [c for c in clients if epsilon(sigma, rate(c), steps[c] + per_step * steps_of(c, 1)) <= limit]

    cohorts = []
    for round in range(rounds):
        if not able(CLIENTS):
            break
        cohorts.append(set(sample_cohort(SEED, round, len(SIZES), CLIENTS_PER_ROUND, able)))
        steps.update({client: per_step * steps_of(client, 1) for client in cohorts[-1]})
    return cohorts, {client: epsilon(sigma, rate(client), steps[client]) for client in CLIENTS}


@pytest.mark.parametrize(("ledger", "per_step"), [("release", 2), ("server", 1)])
@pytest.mark.every(2)
def test_clients_leave_in_the_round_that_they_cannot_afford(ledger, per_step):
    sigma = 4.0
    limit = 1.5
    privacy = {"noise_multiplier": sigma, "delta": DELTA, "max_epsilon": limit, "ledger": ledger}
    expected, spent = played(sigma, limit, 40, per_step)
    assert 3 < len(expected) < 40
    assert {len(cohort) for cohort in expected} >= {1, CLIENTS_PER_ROUND}  # they leave one after the other
    seen = Cohorts()
    with pytest.warns(UserWarning, match="no longer") as raised:
        run = train(WITHOUT_KD, privacy, rounds=40, local_epochs=1, callbacks=[seen])
    assert seen.cohorts == expected
    assert len(run.metrics["rounds"]) == len(expected)
    messages = [str(w.message) for w in raised if "can no longer take part" in str(w.message)]
    named = [int(c) for text in messages for c in text.split(" can ")[0].removeprefix("privacy: client ").split(", ")]
    assert sorted(named) == list(CLIENTS)  # each once, in the round after which it is
    for client in CLIENTS:
        got = run.metrics["clients"][f"privacy/{ledger}_epsilon"][client]
        assert got == pytest.approx(spent[client], rel=1e-9)
        assert got <= limit


@pytest.mark.slow
def test_what_was_trained_before_the_budget_was_spent_is_kept():
    privacy = {"noise_multiplier": 4.0, "delta": DELTA}
    options = {"batch_size": "full", "local_steps": 1, "local_epochs": None, "clients_per_round": None}
    with pytest.warns(UserWarning, match=r"client 2, 0, 3, 1 .*no longer"):
        limited = train(WITHOUT_KD, privacy | {"max_epsilon": 1.5 * epsilon(4.0, 1.0, 4)}, rounds=9, **options)
    rounds = len(limited.metrics["rounds"])
    assert 2 <= rounds < 9
    uninterrupted = train(WITHOUT_KD, privacy, rounds=rounds, **options)
    assert_equal(limited.state("global"), uninterrupted.state("global"))
    for m in CLIENTS:
        assert_equal(limited.state("personal", m), uninterrupted.state("personal", m))


def test_a_client_too_small_for_its_budget_is_named_at_set_up():
    """Client 1 has 3 images, which are in every batch."""
    seen = Cohorts()
    with pytest.raises(ValueError, match=r"1 of 4 clients .*client 1 \(3 images, ε ="):
        train(WITHOUT_KD, {"noise_multiplier": 2.0, "delta": DELTA, "max_epsilon": 3.3}, callbacks=[seen])
    assert seen.cohorts == []


@pytest.mark.parametrize(
    ("privacy", "options", "message"),
    [
        ({"target_epsilon": 0.01}, {}, r"client 0.*target_epsilon=0.01"),
        ({"target_epsilon": 1.0, "ledger": "server"}, {"algorithm": "standalone"}, "ledger='server' sets no limit"),
        ({"noise_multiplier": 0.0, "max_epsilon": 1.0}, {}, r"4 of 4 clients .*max_epsilon=1.0"),
    ],
)
def test_impossible_budgets_are_rejected_at_set_up(privacy, options, message):
    seen = Cohorts()
    with pytest.raises(ValueError, match=message) as raised:
        train(options.get("algorithm", WITHOUT_KD), {"delta": DELTA} | privacy, callbacks=[seen])
    assert "\n" not in str(raised.value)
    assert seen.cohorts == []


ALIKE = [WITHOUT_KD, PFedMe(prox_strength=2.0), "feddyn"]
ALIKE += [pytest.param(one, marks=pytest.mark.slow) for one in ("fedavg", APFL(lr_alpha=0.5), "fedalt_output")]
OVERWRITES = "ignore:Checkpoint directory .* exists and is not empty:UserWarning"


@pytest.mark.parametrize("algorithm", ALIKE, ids=repr)
@pytest.mark.filterwarnings(OVERWRITES)
@pytest.mark.slow
def test_two_rounds_and_two_more_are_four(tmp_path, algorithm):
    privacy = {"noise_multiplier": 8.0, "delta": DELTA, "max_norm": 0.6}
    options = {"dropout": 0.4, "momentum": 0.5, "batch_size": 8, "local_epochs": 1}
    uninterrupted = train(algorithm, privacy, 4, **options | saving(tmp_path / "whole"))
    train(algorithm, privacy, 2, **options | saving(tmp_path / "half"))
    resumed = train(
        algorithm, privacy, 4, ckpt_path=str(tmp_path / "half" / "saved.ckpt"), **options | saving(tmp_path / "half")
    )
    assert_equal(resumed.state("global"), uninterrupted.state("global"), "global")
    images = task().public[:][0]
    for m in CLIENTS:
        assert torch.equal(resumed.personal(m)(images), uninterrupted.personal(m)(images))
    assert resumed.metrics == uninterrupted.metrics
    assert ledgers_of(tmp_path / "half") == ledgers_of(tmp_path / "whole")
    assert resumed.info == uninterrupted.info


@pytest.mark.filterwarnings(OVERWRITES)
@pytest.mark.slow
def test_a_calibrated_run_goes_on_with_its_noise(tmp_path):
    privacy = {"target_epsilon": 3.0, "delta": DELTA, "max_norm": 0.6}
    uninterrupted = train(WITHOUT_KD, privacy, 4, **saving(tmp_path / "whole"))
    train(WITHOUT_KD, privacy, 4, **saving(tmp_path / "half", Cohorts(stop_after=2)))
    spent, noise = ledgers_of(tmp_path / "half")
    assert spent != ledgers_of(tmp_path / "whole")[0]
    path = str(tmp_path / "half" / "saved.ckpt")
    resumed = train(WITHOUT_KD, privacy, 4, ckpt_path=path, **saving(tmp_path / "half"))
    assert_equal(resumed.state("global"), uninterrupted.state("global"), "global")
    assert ledgers_of(tmp_path / "half") == ledgers_of(tmp_path / "whole")
    assert resumed.info["privacy"]["sample"]["noise_multipliers"] == noise
    spent = resumed.metrics["clients"]["privacy/release_epsilon"]
    assert 2.99 <= max(spent) <= 3.0
    with pytest.raises(ValueError, match=r"target_epsilon=3\.0 .*different plan") as raised:
        train(WITHOUT_KD, privacy, 6, ckpt_path=path, **saving(tmp_path / "half"))
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings(OVERWRITES)
def test_a_run_does_not_change_how_batches_are_drawn_on_the_way(tmp_path):
    """ε would be of images that are added or taken out, and of images that are made void, at once."""
    privacy = {"noise_multiplier": 5.0, "delta": DELTA}
    train(WITHOUT_KD, privacy | {"sampling": "shuffle"}, 1, **saving(tmp_path))
    path = str(tmp_path / "saved.ckpt")
    with pytest.raises(ValueError, match=r"sampling='shuffle', .*'poisson'"):
        train(WITHOUT_KD, privacy, 2, ckpt_path=path, **saving(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings(OVERWRITES)
def test_a_calibrated_run_counts_the_fine_tuning_that_is_still_to_come(tmp_path, monkeypatch):
    """It was planned for two rounds and two more epochs, and dies in the second; four rounds alone would fit."""
    privacy = {"target_epsilon": 3.0, "delta": DELTA}
    options = {"clients_per_round": None, "local_epochs": 1, "batch_size": "full"}
    begin = FederatedLoop.on_train_epoch_start

    def crash(loop, trainer, module):
        assert trainer.current_epoch < 1, "crash"
        begin(loop, trainer, module)

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="crash"):
        patch.setattr(FederatedLoop, "on_train_epoch_start", crash)
        train(FedAvgFT(2.0), privacy, 2, **options | saving(tmp_path))
    path = str(tmp_path / "saved.ckpt")
    with pytest.raises(ValueError, match=r"target_epsilon=3\.0 .*different plan"):
        train(FedAvgFT(2.0), privacy, 4, ckpt_path=path, **options | saving(tmp_path))
    uninterrupted = train(FedAvgFT(2.0), privacy, 2, ckpt_path=path, **options | saving(tmp_path))
    assert all(2.99 <= spent <= 3.0 for spent in uninterrupted.metrics["clients"]["privacy/release_epsilon"])
    again = train(
        FedAvgFT(2.0), privacy, 2, ckpt_path=path, **options | saving(tmp_path)
    )  # there is nothing left to do
    assert again.metrics == uninterrupted.metrics


@pytest.mark.slow
@pytest.mark.filterwarnings(OVERWRITES)
def test_fine_tuning_has_noise_that_no_round_has(tmp_path, monkeypatch):
    """A run that is stopped early fine-tunes; then it is resumed, and trains the round that it had not."""
    asked = []

    def spy(seed, purpose, *ids):
        asked.append((seed, purpose, ids))
        return generator(seed, purpose, *ids)

    monkeypatch.setattr("perada.privacy.protection.generator", spy)
    privacy = {"noise_multiplier": 8.0, "delta": DELTA}
    train(FedAvgFT(2.0), privacy, 3, **saving(tmp_path, Cohorts(stop_after=1)))
    train(FedAvgFT(2.0), privacy, 3, ckpt_path=str(tmp_path / "saved.ckpt"), **saving(tmp_path))
    assert len(asked) == 3 * CLIENTS_PER_ROUND + 2 * len(SIZES)
    assert len(set(asked)) == len(asked)


@pytest.mark.slow
@pytest.mark.filterwarnings(OVERWRITES)
def test_a_calibrated_run_does_not_go_on_with_other_steps(tmp_path):
    """More rounds of fewer steps: as many as were planned in all, but those trained were the longer ones."""
    privacy = {"target_epsilon": 3.0, "delta": DELTA, "max_norm": 0.6}
    train(WITHOUT_KD, privacy, 2, local_epochs=2, **saving(tmp_path))
    path = str(tmp_path / "saved.ckpt")
    with pytest.raises(ValueError, match=r"target_epsilon=3\.0 .*different plan"):
        train(
            WITHOUT_KD,
            privacy,
            4,
            ckpt_path=path,
            local_epochs=1,
            resume_allow=["training.local_epochs"],
            **saving(tmp_path),
        )


@pytest.mark.filterwarnings(OVERWRITES)
@pytest.mark.parametrize("ledger", ["release", "server"])
@pytest.mark.slow
def test_fine_tuning_once_more_stays_within_the_target(tmp_path, ledger):
    """A run that is stopped early fine-tunes. When it has gone on there is nothing left to do so again."""
    privacy = {"target_epsilon": 3.0, "delta": DELTA, "max_norm": 0.6, "ledger": ledger}
    algorithm = FedAvgFT(3.0)
    first = train(algorithm, privacy, 3, **saving(tmp_path, Cohorts(stop_after=1)))
    before = first.metrics["clients"]["privacy/release_epsilon"]
    path = str(tmp_path / "saved.ckpt")
    if ledger == "server":  # of which fine-tuning takes nothing
        second = train(algorithm, privacy, 3, ckpt_path=path, **saving(tmp_path))
        assert all(b > a for a, b in zip(before, second.metrics["clients"]["privacy/release_epsilon"], strict=True))
    else:
        with pytest.warns(UserWarning, match=r"client 0, 1, 2, 3 .*fine-tuning"):
            second = train(algorithm, privacy, 3, ckpt_path=path, **saving(tmp_path))
        assert second.metrics["rounds"][-1]["round"] == 2
    assert 2.99 <= max(second.metrics["clients"][f"privacy/{ledger}_epsilon"]) <= 3.0


@pytest.mark.every(2)
@pytest.mark.filterwarnings(OVERWRITES)
@pytest.mark.parametrize("saved", ["privacy", "client_privacy", None])
def test_private_and_ordinary_runs_do_not_go_on_from_each_other(tmp_path, saved):
    options = {"privacy": {"noise_multiplier": 8.0, "delta": DELTA}, "client_privacy": {"noise_multiplier": 8.0}}

    def fit(which, rounds, **more):
        return train(
            "fedavg",
            options["privacy"] if which == "privacy" else None,
            rounds,
            **more,
            **({"client_privacy": options["client_privacy"]} if which == "client_privacy" else {}),
        )

    fit(saved, 1, **saving(tmp_path))
    path = str(tmp_path / "saved.ckpt")
    for other in ("privacy", "client_privacy", None):
        if other == saved:
            continue
        with pytest.raises(ValueError, match=r"the checkpoint is from a run with(out)? (client_)?privacy") as raised:
            fit(other, 2, ckpt_path=path, **saving(tmp_path))
        assert "\n" not in str(raised.value)
    assert len(fit(saved, 2, ckpt_path=path, **saving(tmp_path)).metrics["rounds"]) == 2


@pytest.mark.slow
def test_clients_who_left_do_not_count_in_the_plan_of_the_others():
    """With a target and a lower limit, those who take the places of others stay within the limit too."""
    sizes = (8, 8, 8)
    data = perada.FederatedData(
        [TensorDataset(torch.randn(n, 1, 6, 6, dtype=torch.float64), torch.arange(n) % 3) for n in sizes], num_classes=3
    )
    privacy = {"target_epsilon": 4.0, "max_epsilon": 3.0, "delta": DELTA}
    with pytest.warns(UserWarning, match="no longer"):
        run = train("fedavg", privacy, 8, data=data, clients_per_round=1, seed=6)  # each is planned twice or more
    assert max(run.metrics["clients"]["privacy/release_epsilon"]) <= 3.0
    assert BATCH < min(sizes)


@pytest.mark.slow
@pytest.mark.filterwarnings(OVERWRITES)
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_the_card_of_a_run_with_more_noise_than_before_names_the_least(tmp_path, section):
    """Its ε counts both; of the noise a reader learns what there was at least."""

    def fit(sigma, rounds, **more):
        level = {"noise_multiplier": sigma, "delta": DELTA}
        chosen = {"privacy": level if section == "privacy" else None}
        more |= {"client_privacy": level} if section == "client_privacy" else {}
        return train("fedavg", chosen["privacy"], rounds, clients_per_round=None, **more, **saving(tmp_path))

    fit(2.0, 1)
    more = fit(5.0, 2, ckpt_path=str(tmp_path / "saved.ckpt"))
    record = more.info["privacy"]["sample" if section == "privacy" else "client"]
    assert record.get("noise_multiplier", record.get("noise_multipliers")) in (2.0, [2.0] * len(SIZES))
    again = fit(6.0, 3, ckpt_path=str(tmp_path / "saved.ckpt"))
    record = again.info["privacy"]["sample" if section == "privacy" else "client"]
    assert record.get("noise_multiplier", record.get("noise_multipliers")) in (2.0, [2.0] * len(SIZES))
    less = fit(1.0, 4, ckpt_path=str(tmp_path / "saved.ckpt"))
    record = less.info["privacy"]["sample" if section == "privacy" else "client"]
    assert record.get("noise_multiplier", record.get("noise_multipliers")) in (1.0, [1.0] * len(SIZES))
