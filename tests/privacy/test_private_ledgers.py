# SPDX-License-Identifier: Apache-2.0
"""What a private run writes into its ledgers, and whether the server's leaves out just what nothing sent depends on."""

import math
from collections import Counter

import pytest
import pytorch_lightning as pl
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from pytorch_lightning.callbacks import ModelCheckpoint

from perada.algorithms import (
    APFL,
    FedAlt,
    FedAvg,
    FedAvgFT,
    FedEnsemble,
    FedRep,
    FFALoRA,
    PerAda,
    PFedMe,
)
from perada.core.rounds import Phase, make_plan
from perada.data.batches.round_batches import RoundBatches
from perada.privacy import Privacy, history_epsilon
from perada.privacy.account import Account, QueryPlan
from tests.methods import NAMED, make_method

from ..algorithms.problems import ADAPTER_OF, BATCH, CLIENTS, LORA, ROUNDS, SIZES, assert_equal, distance
from .private_loop import PrivateLoop, rate, steps_of, train

DELTA = 1e-3


pytestmark = pytest.mark.usefixtures("quick_epsilon")


CHEAP = {"noise_multiplier": 0.0, "max_norm": 0.6, "delta": DELTA}
BACKBONE = {"adapter": LORA, "train_backbone": True}
MADE = {"fed_ensemble": lambda: FedEnsemble(modes=2, strata=2)}
REJECTED = ("moon", "fedrod")  # they look at the outputs of the model; see test_private_rejections.py
MORE = {
    "fed_ensemble of perada": lambda: FedEnsemble(base=PerAda(), modes=2, strata=2),
    "ffa_lora of apfl": lambda: FFALoRA(APFL()),
}


class Rounds(pl.Callback):
    """Keeps the global state after every round."""

    def __init__(self):
        self.states = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.states.append({key: value.clone() for key, value in pl_module.federation.global_state.items()})


def run_with(name, monkeypatch, other=()):
    """Three rounds in which the streams ``other`` see other images; also the streams that there were, by kind."""
    seen = set()
    tuned = set()
    item = RoundBatches.__getitem__

    def changed(self, step):
        batches = item(self, step)
        if self.private is None:  # the trial batch at set-up
            return batches
        (tuned if self.plan.round == ROUNDS else seen).update(batches)
        return {
            stream: batch._replace(x=1 - batch.x.flip(-1)) if stream in other else batch
            for stream, batch in batches.items()
        }

    options = dict(BACKBONE) if name.endswith("_adapter") else {}
    own = name.partition(" ")[0]
    options |= {"adapter": ADAPTER_OF[own]} if own in ADAPTER_OF else {}
    if name in ("perada", "feddf", "fedbe", "fed_ensemble of perada"):
        options |= {"distill_steps": 2}
    algorithm = (MADE | MORE).get(name, lambda: make_method(name))()
    rounds = Rounds()
    with monkeypatch.context() as patched:
        patched.setattr(RoundBatches, "__getitem__", changed)
        run = train(algorithm, CHEAP, callbacks=[rounds], local_epochs=1, **options)
    return algorithm, run, rounds.states, seen, tuned


TAKEN = [name for name in NAMED if name not in REJECTED] + [*MORE]
# Distillation and a personal model; ranks that travel; several global models around a personal one.
QUICK = ("perada", "het_lora", "fed_ensemble of perada")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TAKEN])
@pytest.mark.filterwarnings("ignore:.*times the round's median:UserWarning")  # of A, whose gradient is first zero
def test_what_is_unsent_never_reaches_the_server(name, monkeypatch):
    """Other images for a stream change the global states of three rounds if, and only if, the stream is not unsent."""
    algorithm, run, states, seen, tuned = run_with(name, monkeypatch)
    assert len(states) == ROUNDS
    assert seen
    assert (seen | tuned) >= algorithm.unsent
    for stream in sorted(seen | tuned):
        _, other, changed, _, _ = run_with(name, monkeypatch, other=(stream,))
        if stream in algorithm.unsent or stream not in seen:
            for state, before in zip(changed, states, strict=True):
                assert_equal(state, before, stream)
            moved = max(distance(other.state("personal", m), run.state("personal", m)) for m in CLIENTS)
            assert moved > 1e-3, f"{stream} trains nothing"
        else:  # one round after the other, since a client sends in each what it made of its images
            assert all(distance(state, before) > 1e-6 for state, before in zip(changed, states, strict=True)), stream


class SendsPersonal(PerAda):
    """Its parent's `unsent` does not hold of it any more."""

    def end_round(self, trained, kept, received, tensor_names):
        return {"personal": trained["personal"]}, trained["personal"]


class SendsALittle(PerAda):
    def end_round(self, trained, kept, received, tensor_names):
        keeps, sent = super().end_round(trained, kept, received, tensor_names)
        return keeps, {key: value + 1e-3 * trained["personal"][key] for key, value in sent.items()}


class StartsFromPersonal(PerAda):
    """In the second round what the first one left."""

    def begin_round(self, kept, received, tensor_names):
        return {"personal": kept["personal"], "local": kept["personal"]}


class PulledByPersonal(PerAda):
    def client_step(self, step):
        step.descend("personal", step.loss("personal"))
        step.descend("local", step.loss("local"), pull=(0.1, step.states["personal"]))


class RestartsFromPersonal(PerAda):
    def client_step(self, step):
        step.descend("personal", step.loss("personal"))
        step.restart("local", step.states["personal"])
        step.descend("local", step.loss("local"))


class SendsInTheNextRound(PerAda):
    def initial_client_state(self, initial, tensor_names):
        return {"personal": initial, "before": initial}

    def end_round(self, trained, kept, received, tensor_names):
        return {"personal": trained["personal"], "before": trained["personal"]}, kept["before"]


class Remembers(PerAda):
    memory = None

    def end_round(self, trained, kept, received, tensor_names):
        before, self.memory = self.memory, trained["personal"]
        return {"personal": trained["personal"]}, before or trained["local"]


class SendsItsShare(APFL):
    def __init__(self):
        super().__init__(lr_alpha=0.5)

    def end_round(self, trained, kept, received, tensor_names):
        keeps, sent = super().end_round(trained, kept, received, tensor_names)
        return keeps, sent | {"alpha": trained["share"]["alpha"]}

    def server_step(self, server):
        return {key: value for key, value in super().server_step(server).items() if key != "alpha"}


class LooksAhead(PerAda):
    """The local gradient is taken at a point that the personal state has moved."""

    def client_step(self, step):
        step.descend("personal", step.loss("personal"))
        ahead = {
            key: value + 0.1 * step.states["personal"][key].detach() for key, value in step.states["local"].items()
        }
        step.descend("local", step.loss(ahead, "local"))


class SendsPersonalLate(PerAda):
    def client_step(self, step):
        super().client_step(step)
        if step.round >= 4:
            step.restart("local", step.states["personal"])


class SaysTooMuch(FedAvg):
    unsent = frozenset({"local"})


class Wipes(SendsPersonal):
    def server_step(self, server):
        step = super().server_step(server)
        for value in server.updates.local_rows.values():
            value.zero_()
        return step


LEAKS = [
    SendsPersonal,
    SendsALittle,
    StartsFromPersonal,
    PulledByPersonal,
    RestartsFromPersonal,
    SendsInTheNextRound,
    Remembers,
    SendsItsShare,
    LooksAhead,
    SaysTooMuch,
    Wipes,
    lambda: FedEnsemble(SendsPersonal(), modes=2, strata=2),
]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_an_algorithm_that_sends_what_it_calls_unsent_is_rejected(leak):
    started = Rounds()
    with pytest.raises(ValueError, match=r"privacy: \w+\.unsent lists '\w+', .*round \d") as error:
        train(leak(), CHEAP, callbacks=[started], distill_steps=2)
    assert "\n" not in str(error.value)
    assert started.states == []


@pytest.mark.every(2)
@pytest.mark.parametrize("rounds", [5, 20])
def test_what_is_sent_after_some_rounds_is_rejected_before_the_first(rounds):
    started = Rounds()
    with pytest.raises(ValueError, match=r"unsent lists 'personal', .*round \d+"):
        train(SendsPersonalLate(), CHEAP, rounds, callbacks=[started])
    assert started.states == []
    assert len(train(SendsPersonalLate(), CHEAP, 4).metrics["rounds"]) == 4  # it is never sent in so few


@pytest.mark.every(2)
@pytest.mark.parametrize("leak", [SendsPersonal, PulledByPersonal], ids=lambda leak: leak.__name__)
def test_without_the_claim_it_is_counted_as_sent(leak):
    class Honest(leak):
        unsent = frozenset()

    run = train(Honest(), CHEAP | {"noise_multiplier": SIGMA}, rounds=1)
    sample = run.info["privacy"]["sample"]
    assert sample["server"] == sample["release"]
    assert max(sample["server"]) > 0


def count_ledger(cohorts, algorithm_counts, tuning=None):
    """The ledger's rows of a run, counted by hand: ``{client: {(σ, q): steps}}`` of the clients that took part."""
    ledger = {client: Counter() for client in CLIENTS}
    for cohort in cohorts:
        for client in cohort:
            ledger[client].update(algorithm_counts(client))
    for client in CLIENTS if tuning else ():
        ledger[client].update(tuning(client))
    return {client: dict(history) for client, history in ledger.items() if history}


def ledgers_of(path):
    """Both ledgers as a checkpoint holds them."""
    saved = torch.load(path, weights_only=True)["perada"]["federation"]["privacy"]["images"]["ledgers"]
    result = {}
    for name, state in saved.items():
        result[name] = {client: {} for client, *_ in state["rows"]}
        for client, sigma, q, steps in state["rows"]:
            result[name][client][sigma, q] = steps
    return result


def step_by_step(history, accountant):
    """Opacus's own accountant, told of one step after the other."""
    opacus = {"rdp": RDPAccountant, "prv": PRVAccountant}[accountant]()
    for (sigma, q), steps in sorted(history.items()):
        for _ in range(steps):
            opacus.step(noise_multiplier=sigma, sample_rate=q)
    return opacus.get_epsilon(delta=DELTA) if history else 0.0


SIGMA = 3.0
PASSES = {client: math.ceil(steps_of(client) / math.ceil(SIZES[client] / BATCH)) for client in CLIENTS}


def poisson(times, looks=1):
    return lambda client: {(SIGMA / looks**0.5, rate(client)): times * steps_of(client)}


LEDGERS = {
    # steps of what is sent, of all that is trained, and of the fine-tuning after the last round
    "perada": (PerAda(distill=False), {}, poisson(1), poisson(2), None),
    "fedavg": ("fedavg", {}, poisson(1), poisson(1), None),
    "standalone": ("standalone", {}, lambda client: {}, poisson(1), None),
    "fedalt": (FedAlt("output"), {}, poisson(2), poisson(2), None),
    "fedrep without head": (FedRep(0), {}, poisson(1), poisson(1), None),
    "pfedme": (PFedMe(inner_steps=3), {}, poisson(1, 3), poisson(1, 3), None),
    "fedavg_ft": (
        FedAvgFT(2.0),
        {},
        poisson(1),
        poisson(1),
        lambda client: {(SIGMA, rate(client)): steps_of(client, 2)},
    ),
    "shuffled": (
        PerAda(distill=False),
        {"sampling": "shuffle"},
        lambda client: {(SIGMA, 1.0): PASSES[client]},
        lambda client: {(SIGMA, 1.0): 2 * PASSES[client]},
        None,
    ),
    "shuffled phases": (
        FedAlt("output", personal_epochs=0.5),
        {"sampling": "shuffle"},
        *[lambda client: {(SIGMA, 1.0): math.ceil((steps_of(client) + steps_of(client, 0.5)) / (steps_of(client, 1)))}]
        * 2,
        None,
    ),
}


@pytest.mark.parametrize("case", LEDGERS)
@pytest.mark.every(4)
def test_ledgers_hold_what_was_counted_by_hand(case, tmp_path):
    algorithm, options, sent, trained, tuning = LEDGERS[case]
    saving = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True}
    run = train(algorithm, {"noise_multiplier": SIGMA, "delta": DELTA} | options, **saving)
    cohorts = [PrivateLoop.cohort(None, round) for round in range(ROUNDS)]
    assert len({len([c for c in cohorts if m in c]) for m in CLIENTS}) > 1  # not all take part equally often
    expected = {"server": count_ledger(cohorts, sent), "release": count_ledger(cohorts, trained, tuning)}
    assert {n: {c: h for c, h in led.items() if h} for n, led in ledgers_of(tmp_path / "saved.ckpt").items()} == {
        name: {client: history for client, history in ledger.items() if history} for name, ledger in expected.items()
    }
    for name, ledger in expected.items():
        spent = run.metrics["clients"][f"privacy/{name}_epsilon"]
        assert spent == pytest.approx([step_by_step(ledger.get(client, {}), "rdp") for client in CLIENTS], rel=1e-9)
        last = run.metrics["rounds"][-1]
        if tuning is None:
            assert last[f"privacy/{name}_epsilon_mean"] == pytest.approx(sum(spent) / len(spent))
            assert last[f"privacy/{name}_epsilon_max"] == max(spent)
        assert run.info["privacy"]["sample"][name] == spent


def test_the_most_gradients_of_any_phase_are_counted_for_shuffled_passes():
    """A pass goes on from one phase to the next: an image may be in a batch of either, with one gradient or three."""
    phases = (Phase("a", 1), Phase("b", 1))
    options = Privacy(noise_multiplier=2.0, sampling="shuffle", delta=DELTA)
    for queries in (({"local": 1}, {"local": 3}), ({"local": 3}, {"local": 1})):
        account = Account(options, [10], 4, QueryPlan(phases, queries))
        assert account.round_costs(make_plan(0, [0], [10], phases, 4)) == [(0, 2.0 / 3**0.5, 1.0, 2, True)]


@pytest.mark.parametrize(("former", "later"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_least_noise_of_all_parts_of_a_run_is_kept(former, later):
    queries = QueryPlan((Phase("local", 1),), ({"local": 1},))
    accounts = [
        Account(Privacy(noise_multiplier=sigma, delta=DELTA), [10, 20], 5, queries) for sigma in (former, later)
    ]
    first, second = accounts
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["least_noise"] == [1.0, 1.0]


def test_no_epsilon_is_planned_where_the_number_of_rounds_is_open():
    phases = (Phase("local", 1),)
    options = Privacy(noise_multiplier=2.0, delta=DELTA)
    queries = QueryPlan(phases, ({"local": 1},))
    assert Account(options, [10], 5, queries).planned_epsilons(1) == {}
    planned = Account(options, [10], 5, queries, planned=lambda start: [3 - start]).planned_epsilons(1)
    assert planned["release"] == planned["server"] == [history_epsilon({(2.0, 0.5): 6}, DELTA)]


def test_epsilon_by_prv_equals_opacus():
    run = train(PerAda(distill=False), {"noise_multiplier": SIGMA, "delta": DELTA, "accountant": "prv"}, rounds=1)
    client = max(PrivateLoop.cohort(None, 0), key=lambda client: SIZES[client])
    for name, times in (("server", 1), ("release", 2)):
        expected = step_by_step({(SIGMA, rate(client)): times * steps_of(client)}, "prv")
        assert run.metrics["clients"][f"privacy/{name}_epsilon"][client] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("sigma", "epochs", "published"), [(0.7, 45, 7.10), (1.1, 60, 3.01), (1.3, 15, 1.19)])
def test_published_epsilon_of_the_mnist_example(sigma, epochs, published):
    """The three settings of the MNIST examples of Opacus (its README) and TensorFlow Privacy: batch 256, δ = 1e-5.

    They are from before both converted by Balle et al. 2020: ε was the least RDP(α) − log δ / (α − 1) (Mironov 2017,
    proposition 3). The newer conversion adds log(1 − 1/α) − log α / (α − 1), which is negative.
    """
    q = 256 / 60000
    steps = epochs * 60000 // 256
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    rdp = compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders)
    classic = [value - math.log(1e-5) / (alpha - 1) for alpha, value in zip(orders, rdp, strict=True)]
    assert min(classic) == pytest.approx(published, abs=0.006)
    gains = [math.log1p(-1 / alpha) - math.log(alpha) / (alpha - 1) for alpha in orders]
    newer = min(value + gain for value, gain in zip(classic, gains, strict=True))
    assert history_epsilon({(sigma, q): steps}, 1e-5) == pytest.approx(newer, rel=1e-9)
    assert newer < min(classic)
