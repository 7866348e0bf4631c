# SPDX-License-Identifier: Apache-2.0
"""Distillation against closed forms and a plain torch loop."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Categorical, kl_divergence

from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.server import Distillation, DistillationRound, Distiller
from perada.tasks import Classification, MultiLabel
from tests.label_kinds import task_of
from tests.rejections import rejects


def logits(seed, rows=6, classes=4):
    return 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_is_the_divergence_of_the_student_from_the_teacher(temperature):
    student = logits(0)
    teacher = logits(1)
    p = Categorical(logits=teacher / temperature)
    q = Categorical(logits=student / temperature)
    expected = kl_divergence(p, q).mean() * temperature**2
    torch.testing.assert_close(Classification().distillation_loss(student, teacher, temperature), expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_multilabel_loss_is_the_mean_bernoulli_divergence(temperature):
    student = logits(0)
    teacher = logits(1)
    p = Bernoulli(logits=teacher / temperature)
    q = Bernoulli(logits=student / temperature)
    expected = kl_divergence(p, q).mean() * temperature**2
    torch.testing.assert_close(MultiLabel().distillation_loss(student, teacher, temperature), expected)


@pytest.mark.parametrize("multilabel", [False, True])
def test_gradient_keeps_its_scale_at_any_temperature(multilabel):
    """d loss / d student = T (q_T − p_T): of order one at any T, and (z_s − z_t) / K in the limit of large T."""
    student = logits(0).requires_grad_()
    teacher = logits(1)
    temperature = 3.0
    squash = torch.sigmoid if multilabel else lambda z: z.softmax(-1)
    count = student.numel() if multilabel else len(student)
    for t in (temperature, 1e5):
        (gradient,) = torch.autograd.grad(task_of(multilabel).distillation_loss(student, teacher, t), student)
        torch.testing.assert_close(gradient, t * (squash(student / t) - squash(teacher / t)).detach() / count)
    difference = (student - teacher).detach()
    if multilabel:
        limit = difference / 4  # the slope of the sigmoid at 0
    else:
        limit = (difference - difference.mean(-1, keepdim=True)) / student.shape[-1]
    torch.testing.assert_close(gradient, limit / count, rtol=1e-3, atol=1e-4)


def test_loss_of_saturated_logits_is_finite():
    student = torch.tensor([[80.0, -80.0]])
    teacher = torch.tensor([[-80.0, 80.0]])
    assert Classification().distillation_loss(student, teacher).item() == pytest.approx(160)
    assert MultiLabel().distillation_loss(student, teacher).item() == pytest.approx(80)


def network():
    """Without a bias before the norm, whose gradient would be rounding errors that Adam makes large."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)
    ).double()


def models(count):
    """A student and its teachers, with running statistics that are not those of any batch."""
    networks = [network() for _ in range(count)]
    for model in networks:
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return networks


@pytest.mark.parametrize("kind", ["folded", "loop"])
def test_the_ensemble_is_the_mean_of_logits_in_evaluation_mode(kind):
    teachers = models(3)
    x = torch.randn(5, 1, 5, 5, dtype=torch.float64)
    expected = sum(teacher.eval()(x) for teacher in teachers).detach() / 3

    class Public:
        def public_indices(self, round, steps, batch_size):
            return torch.tensor([[0, 1, 4], [2, 3, 0]])

        def public_images(self, indices, device):
            return x[indices]

    student = models(1)[0]
    options = Distillation(2, lr=0.1, optimizer="sgd", teacher_mode="eval")
    distiller = Distiller(Engine(network(), kind), options, parameter_keys(student), Public())
    refined = distiller(get_state(student), stack([get_state(teacher) for teacher in teachers]))
    pairs = [(x[rows], expected[rows]) for rows in Public().public_indices(0, 2, 3)]
    for key, value in distiller.train(get_state(student), pairs).items():
        torch.testing.assert_close(refined[key], value, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(refined["5.weight"], get_state(student)["5.weight"])


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["folded", "loop"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("optimizer", "schedule", "multilabel", "temperature"),
    [("adam", "cosine", False, 2.0), ("sgd", "constant", True, 1.0), ("sgd", "cosine", True, 3.0)],
)
def test_run_equals_a_plain_loop(kind, mode, optimizer, schedule, multilabel, temperature):
    options = Distillation(
        4, lr=0.05, optimizer=optimizer, schedule=schedule, temperature=temperature, student_mode=mode
    )
    student = models(1)[0]
    student[4].p = 0.5 if mode == "eval" else 0.0  # in training mode its masks are perada's own
    initial = get_state(student)
    batches = [(torch.randn(6, 1, 5, 5, dtype=torch.float64), logits(step, 6, 3)) for step in range(4)]
    engine = Engine(copy.deepcopy(student), kind)
    refined = Distiller(engine, options, parameter_keys(student), None, task=task_of(multilabel)).train(
        initial, batches
    )

    plain = copy.deepcopy(student).train(mode == "train")
    optimizers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](plain.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers, 4)
    for x, teacher in batches:
        optimizers.zero_grad()
        if multilabel:
            p = torch.sigmoid(teacher / temperature)
            q = torch.sigmoid(plain(x) / temperature)
            loss = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
        else:
            loss = F.kl_div(
                (plain(x) / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="sum"
            )
            loss = loss / len(x)
        (loss * temperature**2).backward()
        optimizers.step()
        if schedule == "cosine":
            rates.step()
    expected = get_state(plain)
    for key, value in refined.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-10)
    assert not torch.allclose(refined["5.weight"], initial["5.weight"])
    assert torch.equal(refined["1.running_mean"], initial["1.running_mean"]) == (mode == "eval")
    assert all(torch.equal(value, student.state_dict()[key]) for key, value in initial.items())


def test_dropout_of_the_student_follows_from_seed_and_round():
    student = models(1)[0]
    batches = [(torch.randn(6, 1, 5, 5).double(), logits(step, 6, 3)) for step in range(2)]
    initial = get_state(student)
    names = parameter_keys(student)

    def weight(kind, mode="train", **of):
        options = Distillation(2, student_mode=mode)
        context = DistillationRound(**of)
        distiller = Distiller(Engine(network(), kind), options, names, None, context)
        torch.rand(1)  # torch's own stream has no say
        return distiller.train(initial, batches)["5.weight"]

    one = weight("folded", index=3, seed=1)
    other = weight("loop", index=3, seed=1)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert torch.equal(one, weight("folded", index=3, seed=1))
    for unlike in ({"index": 3, "seed": 2}, {"index": 4, "seed": 1}):
        assert not torch.allclose(one, weight("folded", **unlike))
    assert torch.equal(weight("folded", "eval", index=3), weight("folded", "eval", index=4))


@pytest.mark.parametrize(("average_from", "counted"), [(0.0, [1, 2, 3, 4]), (0.5, [3, 4]), (0.6, [4]), (1.0, [])])
def test_the_students_states_are_averaged_along_the_way(average_from, counted):
    """The states after 1, 2, ... steps are those of runs that stop there, at a constant rate."""
    student = models(1)[0]
    batches = [(torch.randn(6, 1, 5, 5).double(), logits(step, 6, 3)) for step in range(4)]
    initial = get_state(student)
    names = parameter_keys(student)
    engine = Engine(network(), "loop")
    options = Distillation(4, lr=0.05, schedule="constant")
    distiller = Distiller(engine, options, names, None)
    out = distiller.train(initial, batches, average_from=average_from)
    after = {steps: distiller.train(initial, batches[:steps]) for steps in counted or [4]}
    for key in names:
        torch.testing.assert_close(out[key], sum(state[key] for state in after.values()) / len(after))
    assert torch.equal(out["1.running_var"], initial["1.running_var"])


def run_with_scores(scores, validate_every, steps=4):
    """Distil with a validation that gives these scores in turn; also the states it was asked about."""
    student = get_state(nn.Linear(2, 3))
    asked = []

    def validate(state):
        asked.append({key: value.clone() for key, value in state.items()})
        return scores[len(asked) - 1]

    batches = ((torch.randn(4, 2), torch.randn(4, 3)) for _ in range(steps))
    options = Distillation(steps, lr=0.1, validate_every=validate_every)
    distiller = Distiller(Engine(nn.Linear(2, 3)), options, ("weight", "bias"), None)
    distiller._validation_accuracy = validate
    out = distiller.train(student, batches)
    same = [all(torch.equal(state[key], out[key]) for key in out) for state in asked]
    return same, torch.equal(asked[0]["weight"], student["weight"])


def test_validation_keeps_the_best_student():
    assert run_with_scores([0.1, 0.5, 0.9, 0.9, 0.2], 1) == ([False, False, True, False, False], True)


def test_validation_falls_back_to_the_average_where_distillation_does_not_help():
    assert run_with_scores([0.7, 0.7, 0.1], 2) == ([True, False, False], True)


def test_the_last_student_is_validated_however_many_steps_there_are():
    assert run_with_scores([0.1, 0.2], 100) == ([False, True], True)
    assert run_with_scores([0.1, 0.2, 0.3], 3) == ([False, False, True], True)


def test_devices_do_not_share_the_steps_of_a_student_in_training_mode():
    with pytest.raises(ValueError, match="share_steps=True"):
        Distillation(share_steps=True, student_mode="train")


def test_rates_fall_along_a_cosine_and_rounds_end():
    rates = [Distillation(4, lr=2.0).learning_rate(step) for step in range(4)]
    assert rates == pytest.approx([1 + math.cos(math.pi * step / 4) for step in range(4)])
    assert Distillation(4, lr=2.0, schedule="constant").learning_rate(3) == 2
    assert [Distillation(until_round=2).active(round) for round in range(4)] == [True, True, False, False]
    assert Distillation().active(10_000)
    assert not Distillation(0).active(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("temperature", 0.0),
        ("optimizer", "lion"),
        ("schedule", "linear"),
        ("validate_every", -1),
        ("validate_every", 2.5),
        ("steps", 1.5),
        ("batch_size", "all"),
        ("lr", "fast"),
        ("lr", float("inf")),
        ("until_round", -1),
        ("student_mode", "training"),
    ],
)
def test_options_that_cannot_work_are_rejected(name, value):
    with rejects(f"distillation: {name}", value):
        Distillation(**{name: value})
