# SPDX-License-Identifier: Apache-2.0
"""``perada.finetune`` against Algorithm 1 written out in plain torch: full batches, three rounds, distillation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada

ROUNDS = 3
STEPS = 2
DISTILL_STEPS = 4
LR_PERSONAL = 0.2
LR_LOCAL = 0.1
LR_SERVER = 0.01
PROX = 0.7
SIZES = (9, 4, 12, 6)
CLASSES = 3


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    ).double()


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def task(multilabel):
    random = torch.Generator().manual_seed(3)

    def part(n):
        x = torch.randn(n, 1, 8, 8, generator=random, dtype=torch.float64)
        if multilabel:
            return TensorDataset(x, torch.randint(0, 2, (n, CLASSES), generator=random).float())
        return TensorDataset(x, torch.arange(n) % CLASSES)

    public = torch.randn(10, 1, 8, 8, generator=random, dtype=torch.float64)
    return perada.FederatedData([part(n) for n in SIZES], [part(3) for _ in SIZES], TensorDataset(public))


def algorithm_1(model, initial, data, cohorts, multilabel, optimizer, student_mode, teacher_mode):
    """Algorithm 1 of the paper, client after client, on plain dictionaries."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    task_loss = F.binary_cross_entropy_with_logits if multilabel else F.cross_entropy

    def train(start, x, y, lr, anchor=None):
        state = {key: value.clone() for key, value in start.items()}
        model.train()
        for _ in range(STEPS):
            leaves = {key: value.detach().requires_grad_(key in trained) for key, value in state.items()}
            loss = task_loss(functional_call(model, leaves, (x,)), y)
            if anchor is not None:
                loss = loss + PROX / 2 * sum(((leaves[key] - anchor[key]) ** 2).sum() for key in trained)
            names = sorted(trained)
            gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
            for name, gradient in zip(names, gradients, strict=True):
                leaves[name] = leaves[name].detach() - lr * gradient
            state = {key: value.detach() for key, value in leaves.items()}
        return state

    def logits(state, x, mode="eval"):
        model.train(mode == "train")
        return functional_call(model, state, (x,))

    w = {key: value.clone() for key, value in initial.items()}
    personal = [{key: value.clone() for key, value in initial.items()} for _ in SIZES]
    public = data.public.tensors[0]
    for cohort in cohorts:
        local = []
        for m in cohort:
            x, y = data.train[m].tensors
            personal[m] = train(personal[m], x, y, LR_PERSONAL, anchor=w)
            local.append(train(w, x, y, LR_LOCAL))
        w = {key: sum(state[key] for state in local) / len(local) for key in w}
        with torch.no_grad():
            teachers = [{key: value.clone() for key, value in state.items()} for state in local]
            teacher = sum(logits(state, public, teacher_mode) for state in teachers) / len(local)
        student = {key: value.clone().requires_grad_(key in trained) for key, value in w.items()}
        steps = getattr(torch.optim, optimizer)([student[name] for name in sorted(trained)], lr=LR_SERVER)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, DISTILL_STEPS)
        for _ in range(DISTILL_STEPS):
            out = logits(student, public, student_mode)
            if multilabel:
                p = teacher.sigmoid()
                q = out.sigmoid()
                loss = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
            else:
                p = teacher.softmax(1)
                q = out.softmax(1)
                loss = (p * (p / q).log()).sum(1).mean()
            steps.zero_grad()
            loss.backward()
            steps.step()
            schedule.step()
        w = {key: value.detach() for key, value in student.items()}
    return w, personal


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("clients_per_round", [None, 2])
@pytest.mark.parametrize(
    ("network", "multilabel", "optimizer", "student_mode", "teacher_mode"),
    [
        (convolutional, False, "Adam", "eval", "eval"),
        pytest.param(convolutional, False, "Adam", "train", "eval", marks=pytest.mark.slow),
        (convolutional, True, "SGD", "train", "train"),
        (convolutional, False, "SGD", "eval", "train"),
        (linear, True, "SGD", "eval", "train"),
    ],
)
@pytest.mark.every(8)
def test_three_rounds_equal_algorithm_1(
    network, multilabel, optimizer, student_mode, teacher_mode, clients_per_round, engine
):
    data = task(multilabel)
    backbone = network()

    def run(rounds):
        return perada.finetune(
            backbone,
            data,
            adapter="full",
            rounds=rounds,
            clients_per_round=clients_per_round,
            batch_size="full",
            local_steps=STEPS,
            lr_personal=LR_PERSONAL,
            lr_local=LR_LOCAL,
            algorithm_options={"prox_strength": PROX},
            distillation={
                "steps": DISTILL_STEPS,
                "batch_size": "full",
                "lr": LR_SERVER,
                "optimizer": optimizer.lower(),
                "student_mode": student_mode,
                "teacher_mode": teacher_mode,
                "trust_region": None,
            },
            training={"engine": engine},
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
        )

    start = run(0)
    end = run(ROUNDS)
    model = start.global_model()
    module = perada.FederatedDataModule(data, batch_size="full")
    module.configure_rounds(seed=0, clients_per_round=clients_per_round, phases=[perada.data.Phase()])
    cohorts = [module.plan(round).clients for round in range(ROUNDS)]
    w, personal = algorithm_1(
        model, start.state("global"), data, cohorts, multilabel, optimizer, student_mode, teacher_mode
    )
    moved = 0.0
    for role, expected in [(("global",), w), *((("personal", m), personal[m]) for m in range(len(SIZES)))]:
        for key, value in end.state(*role).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-10, msg=f"{role} {key}")
                moved += float((value - start.state("global")[key]).abs().sum())
    assert moved > 1
    assert math.isfinite(end.metrics["rounds"][-1]["train/personal_loss"])
