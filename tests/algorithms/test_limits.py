# SPDX-License-Identifier: Apache-2.0
"""Limits in which one algorithm is another, with dropout: the same streams are drawn from.

They hold to the bit where both take the same sums. FedAvg adds updates as they come, since it needs only their mean,
while ensembles and averages of a part of the model keep the updates. The two orders of addition differ by 4e-16.
"""

from functools import cache

import pytest
import torch

from perada.algorithms import APFL, MTL, Ditto, FedAvg, FedEnsemble, FedProx, FedRep, make_algorithm
from perada.server.rules import FedAvgM, ModifiedLocalGD

from .problems import CLIENTS, PROX, assert_equal, assert_same, distance, finetune, is_head

ENGINES = pytest.mark.parametrize("engine", ["folded", "loop"])
WAYS = pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("folded", "net-adapter"),
        ("loop", "net-full"),
        pytest.param("folded", "net-full", marks=pytest.mark.slow),
        pytest.param("loop", "net-adapter", marks=pytest.mark.slow),
    ],
)
ROUNDING = 1e-12
"""Largest difference between sums in another order, after three rounds in float64: a thousand times what was seen."""
NO_KD = make_algorithm("perada", prox_strength=PROX, distill=False)


def train(algorithm, engine, problem="net-full", **options):
    return finetune(algorithm, problem, engine, dropout=0.4, **options)


@cache
def fedavg(engine, problem="net-full"):
    return train("fedavg", engine, problem)


def assert_equal_global(run, other):
    assert_equal(run.state("global"), other.state("global"), "global")


def assert_same_global(run, other):
    assert_same(run.state("global"), other.state("global"), "global", relative=ROUNDING, absolute=ROUNDING)


def assert_same_personal(run, other):
    for m in CLIENTS:
        state = run.state("personal", m)
        expected = other.state("personal", m)
        assert_same(state, expected, f"personal {m}", relative=ROUNDING, absolute=ROUNDING)


def assert_equal_personal(run, other):
    for m in CLIENTS:
        assert_equal(run.state("personal", m), other.state("personal", m), f"personal {m}")


class FedAvgBesidePulledModels(FedAvg):
    """Ditto as its authors tell it: FedAvg, and a solver of loss + λ/2 ||v − w||² whose pull is in the loss itself."""

    inference = "personal"

    def initial_client_state(self, initial, tensor_names):
        return {"personal": initial}

    def begin_round(self, kept, received, tensor_names):
        return super().begin_round(kept, received, tensor_names) | kept

    def client_step(self, step):
        v = step.states["personal"]
        parameters = [key for key, value in v.items() if value.requires_grad]
        apart = sum((v[key] - step.received[key]).square().flatten(1).sum(1) for key in parameters)
        step.descend("personal", step.loss("personal") + PROX / 2 * apart)
        super().client_step(step)

    def end_round(self, trained, kept, received, tensor_names):
        return {"personal": trained["personal"]}, super().end_round(trained, kept, received, tensor_names)[1]


@WAYS
@pytest.mark.slow
def test_perada_without_distillation_is_ditto(engine, problem):
    expected = train(FedAvgBesidePulledModels(), engine, problem)
    for run in (
        train(Ditto(PROX), engine, problem),
        train(NO_KD, engine, problem),
        train("perada", engine, problem, prox_strength=PROX, distill_steps=0),
    ):
        assert_equal_global(run, fedavg(engine, problem))
        for m in CLIENTS:  # but for the order of sums in the gradient
            assert_same(run.state("personal", m), expected.state("personal", m), f"personal {m}")


@pytest.mark.slow
@ENGINES
def test_without_a_pull_clients_stand_alone(engine):
    alone = train("standalone", engine)
    assert_equal_personal(train(Ditto(0.0), engine), alone)
    assert_equal_personal(train(MTL(0.0), engine), alone)
    assert distance(train(Ditto(PROX), engine).state("personal", 2), alone.state("personal", 2)) > 0.01


@WAYS
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (FedProx(0.0), {}),
        ("feddf", {"distill_steps": 0}),
        ("fedavg", {"server_rule": "mean"}),
        ("fedavg", {"server_rule": ModifiedLocalGD(alpha=1.0)}),
        ("fedavg", {"server_rule": FedAvgM(lr=1.0, momentum=0.0)}),
        (APFL(alpha=0.0), {}),
        (APFL(alpha=0.3), {}),
        (APFL(alpha=0.6, lr_alpha=0.1), {}),
        (APFL(alpha=1.0), {}),
    ],
)
@pytest.mark.every(40)
def test_global_models_that_are_those_of_fedavg(engine, problem, algorithm, options):
    assert_equal_global(train(algorithm, engine, problem, **options), fedavg(engine, problem))


@pytest.mark.slow
@WAYS
def test_the_global_model_of_one_mode_is_that_of_fedavg(engine, problem):
    assert_same_global(train(FedEnsemble(modes=1, strata=2), engine, problem), fedavg(engine, problem))


@pytest.mark.slow
def test_the_options_of_these_limits_do_something():
    average = fedavg("folded").state("global")
    for algorithm, options in [
        (FedProx(PROX), {}),
        ("feddf", {}),
        ("fedavg", {"server_rule": ModifiedLocalGD(alpha=0.5)}),
        ("fedavg", {"server_rule": FedAvgM(lr=1.0, momentum=0.5)}),
    ]:
        assert distance(train(algorithm, "folded", **options).state("global"), average) > 1e-3


@pytest.mark.slow
@ENGINES
def test_apfl_of_alpha_one_is_standalone(engine):
    assert_equal_personal(train(APFL(alpha=1.0), engine), train("standalone", engine))


@pytest.mark.slow
@WAYS
def test_one_mode_of_perada_is_perada(engine, problem):
    run = train(FedEnsemble(base=NO_KD, modes=1, strata=2), engine, problem)
    alone = train(NO_KD, engine, problem)
    assert_same_global(run, alone)
    assert_same_personal(run, alone)


class FedAvgOfBody(FedAvg):
    """FedAvg with a frozen head, which the server does not average either: a third thrice is not quite the whole."""

    def trainable_keys(self, role, phase, tensor_names, round):
        return tuple(name for name in tensor_names.parameters if not is_head(name))

    def server_step(self, server):
        return {key: value for key, value in super().server_step(server).items() if not is_head(key)}


@pytest.mark.slow
@WAYS
def test_fedrep_without_head_epochs_is_fedavg_of_the_body(engine, problem):
    """Heads do not move and all start the same: everybody's model is that of FedAvg whose head is frozen."""
    run = train(FedRep(head_epochs=0), engine, problem)
    body = train(FedAvgOfBody(), engine, problem)
    assert_same_personal(run, body)
    assert distance(body.state("global"), fedavg(engine, problem).state("global")) > 0.01
    initial = finetune("fedavg", problem, rounds=0).state("global")
    for key, value in body.state("global").items():
        assert torch.equal(value, initial[key]) == is_head(key)
