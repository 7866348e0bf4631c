# SPDX-License-Identifier: Apache-2.0
"""Every algorithm against a plain loop over rounds, clients and batches, written from its definition.

A new algorithm adds one row to ``ALGORITHMS``: its name, what ``finetune`` is asked for beside the common options, and
a function that says what must come out. That function gets a :class:`Reference`: batches, and gradient descent on
plain dictionaries of tensors.
"""

import math
from collections import OrderedDict
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvgFT
from perada.data import Phase

ROUNDS, CLIENTS_PER_ROUND, BATCH, EPOCHS, CLASSES = 3, 3, 4, 2, 3
SIZES = (9, 3, 14, 6)
LR_PERSONAL, LR_LOCAL, LR_SERVER, PROX, DISTILL_STEPS, PUBLIC = 0.2, 0.1, 0.05, 0.7, 4, 7
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


class Reference:
    """The plain ingredients of an algorithm.

    Attributes:
        initial: The state everyone starts from.
        rounds: For each round ``{client: its batches (x, y)}``.
        last: What every client would train on after the last round, in one epoch.
    """

    def __init__(self, model, data, initial):
        self.model, self.initial = model, initial
        self.trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.served = perada.FederatedDataModule(data, batch_size=BATCH)
        self.served.configure_rounds(seed=0, clients_per_round=CLIENTS_PER_ROUND, phases=[Phase(epochs=EPOCHS)])
        self.rounds = [self._batches(self.served.plan(round)) for round in range(ROUNDS)]
        self.last = self._batches(self.served.plan_for(range(len(SIZES)), ROUNDS, [Phase(epochs=1)]))

    def _batches(self, plan):
        batches = {client: [] for client in plan.clients}
        for batch in self.served.cohort_loader(plan):
            for row, (client, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
                batches[client].append((batch.x[row, :count], batch.y[row, :count]))
        return batches

    def copies(self):
        return [dict(self.initial) for _ in SIZES]

    def _descend(self, state, loss, lr):
        """One step of gradient descent; ``loss`` maps leaves to a scalar, and may move running statistics."""
        leaves = {key: value.clone().requires_grad_(key in self.trained) for key, value in state.items()}
        names = sorted(self.trained)
        for name, gradient in zip(names, torch.autograd.grad(loss(leaves), [leaves[n] for n in names]), strict=True):
            leaves[name] = leaves[name] - lr * gradient
        return {key: value.detach() for key, value in leaves.items()}

    def train(self, state, batches, lr, prox=0.0, anchor=None):
        """Minibatch descent on the task loss, plus prox/2 ||state − anchor||² over what is trained."""
        for x, y in batches:

            def loss(leaves, x=x, y=y):
                out = F.cross_entropy(functional_call(self.model.train(), leaves, (x,)), y)
                if anchor is not None:
                    out = out + prox / 2 * sum((leaves[key] - anchor[key]).square().sum() for key in self.trained)
                return out

            state = self._descend(state, loss, lr)
        return state

    def mean(self, states, weights=None):
        weights = weights or [1] * len(states)
        out = {}
        for key in states[0]:
            values = [state[key] for state in states]
            if values[0].is_floating_point():
                out[key] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
            else:
                out[key] = max(values)
        return out

    def distil(self, student, teachers, round, batch_size, temperature=1.0):
        """SGD with cosine-annealed rate on KL(mean of the teachers' logits || student)."""
        rates = [LR_SERVER * (1 + math.cos(math.pi * step / DISTILL_STEPS)) / 2 for step in range(DISTILL_STEPS)]
        images = self.served.public_indices(round, DISTILL_STEPS, batch_size)
        for lr, rows in zip(rates, images, strict=True):
            x = self.served.public_images(rows)
            self.model.eval()
            teacher = sum(functional_call(self.model, state, (x,)).detach() for state in teachers) / len(teachers)

            def loss(leaves, x=x, teacher=teacher):
                p = (teacher / temperature).softmax(1)
                logs = (functional_call(self.model.eval(), leaves, (x,)) / temperature).log_softmax(1)
                return temperature**2 * (p * (p.log() - logs)).sum(1).mean()

            student = self._descend(student, loss, lr)
        return student


def fedavg(ref, weighted=False):
    w = ref.initial
    for batches in ref.rounds:
        updates = [ref.train(w, own, LR_LOCAL) for own in batches.values()]
        w = ref.mean(updates, [SIZES[m] for m in batches] if weighted else None)
    return w, [w] * len(SIZES)


def fedavg_by_samples(ref):
    return fedavg(ref, weighted=True)


def fedavg_ft(ref):
    w, _ = fedavg(ref)
    return w, [ref.train(w, ref.last[m], LR_PERSONAL) for m in range(len(SIZES))]


def standalone(ref):
    personal = ref.copies()
    for batches in ref.rounds:
        for m, own in batches.items():
            personal[m] = ref.train(personal[m], own, LR_PERSONAL)
    return ref.initial, personal


def ditto(ref, until_round=0, **distillation):
    w, personal = ref.initial, ref.copies()
    for round, batches in enumerate(ref.rounds):
        updates = []
        for m, own in batches.items():
            personal[m] = ref.train(personal[m], own, LR_PERSONAL, PROX, anchor=w)
            updates.append(ref.train(w, own, LR_LOCAL))
        w = ref.mean(updates)
        if round < until_round:
            w = ref.distil(w, updates, round, **distillation)
    return w, personal


def perada_two_rounds(ref):
    return ditto(ref, until_round=2, batch_size=3)


def perada_all_rounds(ref):
    return ditto(ref, until_round=ROUNDS, batch_size=PUBLIC, temperature=2.0)


ALGORITHMS = [
    ("fedavg", {}, fedavg),
    ("fedavg", {"weighting": "samples"}, fedavg_by_samples),
    ("fedavg_ft", {}, fedavg_ft),
    ("standalone", {}, standalone),
    ("ditto", {"prox_strength": PROX}, ditto),
    ("perada_no_kd", {"prox_strength": PROX}, ditto),
    ("perada", {"prox_strength": PROX, "distill_batch_size": 3, "distill_until_round": 2}, perada_two_rounds),
    # A batch larger than the public set is the whole set.
    ("perada", {"prox_strength": PROX, "distill_batch_size": 64, "distill_temperature": 2.0}, perada_all_rounds),
]
ADAPTERS = {
    "full": "full",
    "adapter": LoraConfig(r=2, target_modules=["conv"], modules_to_save=["norm"], init_lora_weights=True),
}


@cache
def task():
    random = torch.Generator().manual_seed(3)

    def images(n):
        return torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64)

    train = [TensorDataset(images(n), torch.arange(n) * (m + 1) % CLASSES) for m, n in enumerate(SIZES)]
    return perada.FederatedData(train, public=TensorDataset(images(PUBLIC)), num_classes=CLASSES)


@cache
def network(dropout=0.0):
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "norm": nn.BatchNorm2d(4),
        "act": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "drop": nn.Dropout(dropout),
        "fc": nn.Linear(4, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def finetune(algorithm, adapter="full", engine="folded", rounds=ROUNDS, dropout=0.0, **options):
    common = {
        "clients_per_round": CLIENTS_PER_ROUND,
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "lr_personal": LR_PERSONAL,
        "lr_local": LR_LOCAL,
        "distill_steps": DISTILL_STEPS,
        "lr_server": LR_SERVER,
        "server_optimizer": "sgd",
    }
    return perada.finetune(
        network(dropout),
        task(),
        adapter=ADAPTERS[adapter],
        algorithm=algorithm,
        engine=engine,
        rounds=rounds,
        **common | options,
        **QUIET,
    )


@cache
def reference(adapter):
    start = finetune("fedavg", adapter, rounds=0)
    model = start.global_model()
    initial = start.state("global")
    if adapter == "adapter":
        assert not any(p.requires_grad for name, p in model.named_parameters() if name.endswith("base_layer.weight"))
    return Reference(model, task(), initial)


def distance(left, right):
    return sum(float((left[key] - right[key]).abs().sum()) for key in left if left[key].is_floating_point())


def assert_same(run, w, personal):
    for role, expected in [(("global",), w), *((("personal", m), state) for m, state in enumerate(personal))]:
        state = run.state(*role)
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-7, atol=1e-9, msg=f"{role} {key}")


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("name", "options", "expected"), ALGORITHMS, ids=[row[2].__name__ for row in ALGORITHMS])
def test_equals_its_definition(name, options, expected, adapter, engine):
    ref = reference(adapter)
    w, personal = expected(ref)
    assert_same(finetune(name, adapter, engine, **options), w, personal)
    # The comparison would be empty if nothing moved: only Standalone's global state stays.
    assert (distance(w, ref.initial) > 0.1) == (name != "standalone")
    assert max(distance(state, ref.initial) for state in personal) > 0.1


def test_clients_that_were_never_sampled_keep_the_initial_state():
    run = finetune("ditto", rounds=1)
    (left_out,) = set(range(len(SIZES))) - set(reference("full").rounds[0])
    assert distance(run.state("personal", left_out), reference("full").initial) == 0


def test_fine_tuning_for_longer_is_asked_of_the_algorithm():
    ref = reference("full")
    w, _ = fedavg(ref)
    plan = ref.served.plan_for(range(len(SIZES)), ROUNDS, [Phase(epochs=2.5)])
    batches = ref._batches(plan)
    personal = [ref.train(w, batches[m], LR_PERSONAL) for m in range(len(SIZES))]
    assert_same(finetune(FedAvgFT(finetune_epochs=2.5)), w, personal)
    assert min(distance(state, w) for state in personal) > 0.1


def equal(left, right):
    return all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_relations_between_algorithms_hold_to_the_bit(engine):
    """With dropout: the same streams are drawn from, whatever the algorithm."""
    options = {"engine": engine, "dropout": 0.4}
    no_kd = finetune("perada_no_kd", prox_strength=PROX, **options)
    ditto = finetune("ditto", prox_strength=PROX, **options)
    free = finetune("ditto", prox_strength=0.0, **options)
    alone = finetune("standalone", **options)
    average = finetune("fedavg", **options)
    undistilled = finetune("perada", prox_strength=PROX, distill_steps=0, **options)
    assert equal(no_kd.state("global"), ditto.state("global"))
    assert equal(no_kd.state("global"), undistilled.state("global"))
    assert equal(ditto.state("global"), average.state("global"))
    for m in range(len(SIZES)):
        assert equal(no_kd.state("personal", m), ditto.state("personal", m))
        assert equal(no_kd.state("personal", m), undistilled.state("personal", m))
        assert equal(free.state("personal", m), alone.state("personal", m))
        assert not equal(free.state("personal", m), ditto.state("personal", m))


def test_the_pull_leaves_running_statistics_alone():
    """A pull so strong that v = w after every step: statistics are still those of the client's own batches."""
    ref = reference("full")
    run = finetune("ditto", rounds=1, prox_strength=1 / LR_PERSONAL, local_steps=1)
    (m, batches), *_ = ref.rounds[0].items()
    x = batches[0][0]
    features = functional_call(ref.model.conv, {k[5:]: v for k, v in ref.initial.items() if k[:5] == "conv."}, (x,))
    expected = 0.9 * ref.initial["norm.running_mean"] + 0.1 * features.mean((0, 2, 3))
    torch.testing.assert_close(run.state("personal", m)["norm.running_mean"], expected)
