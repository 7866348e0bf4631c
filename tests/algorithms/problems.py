# SPDX-License-Identifier: Apache-2.0
"""The small problems that algorithms are tried on, and the plain ingredients of their references.

A problem is a network and what of it is trained: ``net`` has a convolution, BatchNorm and a linear layer, ``linear`` is
softmax regression, which is convex. Everything is in float64.
"""

import math
from collections import OrderedDict
from functools import cache

import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.adapters import DualLoraConfig
from perada.data import Phase
from tests.options import sections

ROUNDS = 3
CLIENTS_PER_ROUND = 3
BATCH = 4
EPOCHS = 2
CLASSES = 3
SIZES = (9, 3, 14, 6)
CLIENTS = range(len(SIZES))
LR_PERSONAL = 0.2
LR_LOCAL = 0.1
LR_SERVER = 2.0
PROX = 0.7
DISTILL_STEPS = 4
PUBLIC = 7
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}
LORA = LoraConfig(r=2, target_modules=["conv"], init_lora_weights=True)
MERGING = ("fedex_lora", "flora")
"""Algorithms that merge into the weights under LoRA, which may then not be trained."""
OF_LORA = ("ffa_lora", "fedsa_lora", "rolora", "het_lora", *MERGING)
"""Algorithms that are about LoRA's factors, and need an adapter that has them."""
OF_BRANCHES = ("feddpa", "feddpa_f", "fedalt_row")
"""Algorithms that are about a shared and a private branch of LoRA."""
ADAPTER_OF = dict.fromkeys(OF_LORA, LORA) | dict.fromkeys(OF_BRANCHES, DualLoraConfig(r=2, target_modules=["conv"]))
PROBLEMS = {
    "net-full": {"adapter": "full"},
    "net-adapter": {
        "adapter": LoraConfig(r=2, target_modules=["conv"], modules_to_save=["norm"], init_lora_weights=True)
    },
    "net-branches": {"adapter": DualLoraConfig(r=2, target_modules=["conv"], modules_to_save=["norm"])},
    "net-gate": {
        "adapter": DualLoraConfig(r=2, lora_alpha=16, gate=True, target_modules=["conv"], modules_to_save=["norm"])
    },
    "net-biases": {"adapter": "bias_norm"},
    "net-backbone": {"adapter": LORA, "train_backbone": True},
    "linear-full": {"adapter": "full"},
    "linear-head": {"adapter": "head"},
}


@cache
def task():
    random = torch.Generator().manual_seed(3)

    def images(n):
        return torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64)

    train = [TensorDataset(images(n), torch.arange(n) * (m + 1) % CLASSES) for m, n in enumerate(SIZES)]
    return perada.FederatedData(train, public=TensorDataset(images(PUBLIC)), num_classes=CLASSES)


def network(kind, dropout=0.0):
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "act": nn.Tanh(),  # not after the norm, which would make the convolution's bias idle
        "norm": nn.BatchNorm2d(4),
        "bend": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "drop": nn.Dropout(dropout),
        "fc": nn.Linear(4, CLASSES),
    }
    if kind == "linear":
        layers = {"flat": layers["flat"], "drop": layers["drop"], "fc": nn.Linear(36, CLASSES)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for layer in layers.values():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return nn.Sequential(OrderedDict(layers)).double()


def finetune(algorithm, problem="net-full", engine="folded", rounds=ROUNDS, dropout=0.0, **options):
    common = {
        "clients_per_round": CLIENTS_PER_ROUND,
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "lr_personal": LR_PERSONAL,
        "lr_local": LR_LOCAL,
        "distill_steps": DISTILL_STEPS,
        "distill_lr": LR_SERVER,
        "distill_optimizer": "sgd",
    }
    arguments = PROBLEMS[problem] | common | QUIET | options
    if "distillation" not in arguments:
        # The references distil as the paper says: nothing limits the student.
        arguments["distillation"] = {"teacher_mode": "eval", "trust_region": None}
    return perada.finetune(
        network(problem.partition("-")[0], dropout),
        task(),
        **sections(
            algorithm=algorithm,
            engine=engine,
            rounds=rounds,
            **sections(**arguments),
        ),
    )


def is_head(key):
    return key.startswith("fc.")


def is_norm(key):
    return key.startswith("norm.")


def is_input_layer(key):
    return key.startswith("conv.")


def is_adapter(key):
    return "lora_" in key


def is_down(key):
    return "lora_A" in key


def is_up(key):
    return "lora_B" in key


def is_shared(key):
    return ".shared_" in key


def is_private(key):
    return ".private_" in key or ".gate." in key


def moved(state, gradient, lr):
    """One step of gradient descent on the tensors that there is a gradient for."""
    return {key: value - lr * gradient[key] if key in gradient else value for key, value in state.items()}


def only(gradient, which):
    return {key: value for key, value in gradient.items() if which(key)}


def chosen(state, which):
    return {key: value for key, value in state.items() if which(key)}


class Reference:
    """The plain ingredients of an algorithm.

    Attributes:
        problem: Its name.
        initial: The state everyone starts from.
        trained: Names of its parameters; the others are running statistics and counters.
        rounds: For each round ``{client: its batches (x, y)}``.
        last: What every client would train on after the last round, in one epoch.
    """

    def __init__(self, problem):
        start = finetune("fedavg", problem, rounds=0)
        self.problem, self.model, self.initial = problem, start.global_model(), start.state("global")
        self.head = next(
            name for name in ("fc.modules_to_save.default", "fc") if name in dict(self.model.named_modules())
        )
        self.trained = sorted(name for name, _ in self.model.named_parameters() if name in self.initial)
        self.served = perada.FederatedDataModule(task(), batch_size=BATCH)
        self.rounds = [
            {m: batches for m, (batches,) in client_batches.items()}
            for client_batches in self.rounds_in_phases([Phase(epochs=EPOCHS)])
        ]
        self.last = self.batches(self.served.plan_for(CLIENTS, ROUNDS, [Phase(epochs=1)]))

    def rounds_in_phases(self, phases):
        """For each round ``{client: [its batches of the first phase, of the second, ...]}``."""
        self.served.configure_rounds(seed=0, clients_per_round=CLIENTS_PER_ROUND, phases=phases)
        rounds = []
        for round in range(ROUNDS):
            plan = self.served.plan(round)
            rounds.append({client: [[] for _ in phases] for client in plan.clients})
            for batch, client, x, y in self._rows(plan):
                rounds[-1][client][batch.phase].append((x, y))
        return rounds

    def batches(self, plan):
        batches = {client: [] for client in plan.clients}
        for _, client, x, y in self._rows(plan):
            batches[client].append((x, y))
        return batches

    def _rows(self, plan):
        for batch in self.served.cohort_loader(plan):
            for row, (client, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
                yield batch, client, batch.x[row, :count], batch.y[row, :count]

    def copies(self):
        return [dict(self.initial) for _ in CLIENTS]

    def difference(self, left, right):
        """left − right over the parameters."""
        return {key: left[key] - right[key] for key in self.trained}

    def zeros(self):
        return {key: torch.zeros_like(self.initial[key]) for key in self.trained}

    def _pass(self, state, loss):
        """Gradient of ``loss``, a function of the leaves, and the state with its running statistics moved on."""
        leaves = {key: value.clone().requires_grad_(key in self.trained) for key, value in state.items()}
        gradients = torch.autograd.grad(loss(leaves), [leaves[name] for name in self.trained])
        return dict(zip(self.trained, gradients, strict=True)), {key: value.detach() for key, value in leaves.items()}

    def loss(self, state, client):
        """Mean loss on a client's training images, each counted once, in evaluation mode."""
        x, y = task().train[client][:]
        return float(F.cross_entropy(functional_call(self.model.eval(), state, (x,)), y))

    def gradient(self, state, x, y):
        """Gradient of the task loss in a training pass, and the state with the statistics of that pass."""
        return self._pass(state, lambda leaves: F.cross_entropy(functional_call(self.model.train(), leaves, (x,)), y))

    def train(self, state, batches, lr, prox=0.0, anchor=None, slope=None, which=lambda key: True):
        """Minibatch descent on the task loss, plus prox/2 ||state − anchor||², plus <slope, state>, on ``which``."""
        for x, y in batches:
            gradient, state = self.gradient(state, x, y)
            for key in gradient:
                if anchor is not None:
                    gradient[key] = gradient[key] + prox * (state[key] - anchor[key])
                if slope is not None:
                    gradient[key] = gradient[key] + slope[key]
            state = moved(state, only(gradient, which), lr)
        return state

    def mean(self, states, weights=None):
        """Mean of tensors, largest of counters."""
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
        """SGD with cosine-annealed rate on KL(mean of the teachers' logits || student); the student by step."""
        rates = [LR_SERVER * (1 + math.cos(math.pi * step / DISTILL_STEPS)) / 2 for step in range(DISTILL_STEPS)]
        images = self.served.public_indices(round, DISTILL_STEPS, batch_size)
        path = []
        for lr, rows in zip(rates, images, strict=True):
            x = self.served.public_images(rows)
            self.model.eval()
            teacher = sum(functional_call(self.model, state, (x,)).detach() for state in teachers) / len(teachers)

            def loss(leaves, x=x, teacher=teacher):
                p = (teacher / temperature).softmax(1)
                logs = (functional_call(self.model.eval(), leaves, (x,)) / temperature).log_softmax(1)
                return temperature**2 * (p * (p.log() - logs)).sum(1).mean()

            student = moved(student, self._pass(student, loss)[0], lr)
            path.append(student)
        return path


@cache
def reference(problem):
    return Reference(problem)


def distance(left, right):
    return sum(float((left[key] - right[key]).abs().sum()) for key in left if left[key].is_floating_point())


def assert_same(state, expected, what, relative=1e-9, absolute=1e-11):
    assert state.keys() == expected.keys(), what
    for key, value in state.items():
        torch.testing.assert_close(
            value, expected[key], rtol=relative, atol=absolute, msg=lambda m, key=key: f"{what} {key}: {m}"
        )


def assert_equal(state, expected, what=""):
    """To the bit."""
    assert state.keys() == expected.keys(), what
    assert [key for key in state if not torch.equal(state[key], expected[key])] == [], what
