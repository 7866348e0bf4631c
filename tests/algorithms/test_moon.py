# SPDX-License-Identifier: Apache-2.0
"""MOON in its limits, and what a step is given of a model; its plain loop is in ``references.py``."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedEnsemble, HetLoRA, Moon
from perada.core.states import get_state, stack
from perada.engine import Engine
from tests.options import sections
from tests.rejections import rejects

from .problems import QUIET, assert_same, finetune, task


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_without_contrast_it_is_fedavg(engine):
    """With dropout, too: passes that train nothing draw nothing."""
    run, plain = (finetune(one, engine=engine, dropout=0.4) for one in (Moon(mu=0.0), "fedavg"))
    assert_same(run.state("global"), plain.state("global"), "global")


def test_the_first_round_is_that_of_fedavg():
    """w is then the previous model of all clients, and there is nothing to tell apart."""
    run, plain = (finetune(one, rounds=1) for one in (Moon(mu=5.0), "fedavg"))
    assert_same(run.state("global"), plain.state("global"), "global")


@pytest.mark.slow
def test_chunks_of_clients_change_nothing():
    run, plain = (finetune(Moon(mu=2.0), clients_per_chunk=size) for size in (2, None))
    assert_same(run.state("global"), plain.state("global"), "global")


@pytest.mark.parametrize(("algorithm", "name"), [(Moon(), "Moon"), (HetLoRA(Moon()), "HetLoRA of Moon")])
def test_private_training_rejects_it_by_name(algorithm, name):
    privacy = perada.Privacy(noise_multiplier=1, delta=1e-3, secure_rng=False)
    with pytest.raises(ValueError, match=rf"privacy.*{name}"):
        finetune(algorithm, "net-adapter", rounds=1, privacy=privacy)


@pytest.mark.parametrize("kind", ["folded", "loop"])
@pytest.mark.parametrize("compile", [None, {"backend": "eager"}])
def test_representations_are_what_the_head_is_given(kind, compile):
    def net():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()

    random = torch.Generator().manual_seed(0)
    model = net()
    states = [get_state(net()) for _ in range(3)]
    x = torch.randn(3, 4, 1, 6, 6, generator=random, dtype=torch.float64)
    engine = Engine(model, kind, compile=compile)
    leaves = {key: value.requires_grad_() for key, value in stack(states).items()}
    logits, result = engine.outputs(leaves, x, "3", training=True, counts=(4, 2, 3))
    for m, (state, rows) in enumerate(zip(states, (4, 2, 3), strict=True)):
        inner = functional_call(model[:3], {k: v for k, v in state.items() if k[0] == "0"}, (x[m, :rows],))
        torch.testing.assert_close(result[m, :rows], inner)
        torch.testing.assert_close(logits[m, :rows], inner @ state["3.weight"].T + state["3.bias"])
    (gradient,) = torch.autograd.grad(result[1, :2].sum(), [leaves["0.bias"]])
    assert gradient[1].abs().min() > 0 and not gradient[[0, 2]].any()
    assert not [module for module in engine.runs.modules() if module._forward_pre_hooks]


def single():
    """The clients' images in single precision, in which features are cached."""
    given = [
        TensorDataset(*(value.float() if value.is_floating_point() else value for value in one[:]))
        for one in task().train
    ]
    return perada.FederatedData(given, num_classes=3)


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_with_features_cached_before_the_head(engine):
    """All that runs is the head, whose input is then the cached features."""
    results = []
    for cache in (True, False):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
        options = {"adapter": "head", "engine": engine, "rounds": 3, "batch_size": 4, "lr_local": 0.2} | QUIET
        results.append(
            perada.finetune(net, single(), **sections(algorithm=Moon(mu=2.0), cache_features=cache, **options))
        )
    for key, value in results[0].state("global").items():
        torch.testing.assert_close(value, results[1].state("global")[key], rtol=1e-4, atol=1e-5)


def test_rejections():
    with rejects("tau", 0):
        Moon(tau=0)
    with pytest.raises(ValueError, match="Moon"):
        FedEnsemble(base=Moon())
    with pytest.raises(ValueError, match="no head"):
        Moon().check(perada.algorithms.TensorNames(("a.weight",), ("a.weight",)), 3)
