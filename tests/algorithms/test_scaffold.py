# SPDX-License-Identifier: Apache-2.0
"""What SCAFFOLD is for, and what its control variates are; its plain loop is in ``references.py``."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedEnsemble, Scaffold, make_algorithm
from tests.options import sections
from tests.rejections import rejects

from .problems import CLIENTS, LR_LOCAL, QUIET, SIZES, assert_same, distance, finetune, reference

WHOLE = {"clients_per_round": len(SIZES), "batch_size": "full"}


@cache
def many_images():
    """Three clients with random labels and a few features: the mean loss of a linear model has a minimum."""
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 1, 1, 2, generator=random, dtype=torch.float64) * (m + 1),
            (torch.rand(n, generator=random) < 0.2 + 0.3 * m).long(),
        )
        for m, n in enumerate((20, 30, 40))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*sent a change .* times the round's median:UserWarning")  # all are nearly 0
@pytest.mark.parametrize("clients_per_round", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_it_goes_to_the_minimum_where_fedavg_does_not(clients_per_round):
    """With full batches; FedAvg's fixed point is not where the gradients of the clients' losses add up to 0."""
    data = perada.FederatedData([TensorDataset(*one) for one in many_images()], num_classes=2)

    def slope(algorithm):
        options = {"rounds": 120, "local_steps": 4, "lr_local": 0.3, "batch_size": "full", "distill_steps": 0}
        net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2)).double()
        arguments = options | QUIET | {"clients_per_round": clients_per_round}
        model = perada.finetune(net, data, **sections(algorithm=algorithm, adapter="full", **arguments)).global_model()
        losses = [F.cross_entropy(model(x), y) for x, y in many_images()]
        (gradient,) = torch.autograd.grad(sum(losses), [model[1].weight])
        return float(gradient.norm())

    assert slope("scaffold") < 0.01 * slope("fedavg")


def test_one_step_of_all_clients_is_that_of_fedavg():
    """Then the corrections cancel out."""
    options = WHOLE | {"local_epochs": None, "local_steps": 1}
    runs = [finetune(name, "linear-full", **options) for name in ("scaffold", "fedavg")]
    assert_same(runs[0].state("global"), runs[1].state("global"), "global")


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_under_momentum_the_control_variate_is_the_mean_gradient(engine):
    """Of the second round, whose c_i and c are not 0; (x - y) / (K lr) would be another."""
    ref = reference("linear-full")
    momentum = 0.9
    w = reference("linear-full").initial
    server = ref.zeros()
    clients = [ref.zeros() for _ in CLIENTS]
    for batches in ref.rounds[:2]:
        updates = []
        before = dict(enumerate(clients))
        for m, client_batches in batches.items():
            local = w
            velocity = ref.zeros()
            total = ref.zeros()
            for x, y in client_batches:
                gradient, _ = ref.gradient(local, x, y)
                total = {key: total[key] + gradient[key] / len(client_batches) for key in total}
                push = {key: gradient[key] - clients[m][key] + server[key] for key in gradient}
                velocity = {key: momentum * velocity[key] + push[key] for key in push}
                local = local | {key: local[key] - LR_LOCAL * velocity[key] for key in velocity}
            clients[m] = total
            updates.append(local)
        change = [ref.difference(clients[m], before[m]) for m in batches]
        server = {key: c + sum(one[key] for one in change) / len(SIZES) for key, c in server.items()}
        w = ref.mean(updates)
    run = finetune("scaffold", "linear-full", engine, rounds=2, momentum=momentum)
    assert_same(run.state("global"), w, "global")
    assert distance(w, ref.initial) > 0.1


def test_what_travels_is_counted():
    run = finetune("scaffold", rounds=1)
    size = sum(value.numel() for value in reference("net-full").zeros().values())
    metrics = run.metrics["rounds"][-1]
    assert (metrics["params/trained"], metrics["params/sent"]) == (size, 2 * size)
    plain = finetune("fedavg", rounds=1).metrics["rounds"][-1]
    for way in ("comm/up_mb", "comm/down_mb"):
        assert metrics[way] - plain[way] == pytest.approx(3 * size * 8 / 1e6)


def test_rejections():
    with rejects("server_lr", 0):
        Scaffold(server_lr=0)
    with pytest.raises(ValueError, match="Scaffold"):
        FedEnsemble(base=make_algorithm("scaffold"))


def test_privacy_of_whole_clients_covers_the_control_variates():
    """A bound so small that nothing moves leaves c at 0 too, so that later rounds are those of FedAvg."""
    privacy = {"noise_multiplier": 0.0, "max_norm": 1e-9, "delta": 1e-3, "secure_rng": False}
    run = finetune("scaffold", client_privacy=privacy)
    state = run.state("global")
    initial = reference("net-full").initial
    parameters = reference("net-full").trained
    assert max(float((state[key] - initial[key]).abs().max()) for key in parameters) < 1e-8
    assert all(torch.isfinite(value).all() for value in state.values())
