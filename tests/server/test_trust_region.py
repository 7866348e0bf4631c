# SPDX-License-Identifier: Apache-2.0
"""How far a distilled model may be from the clients' average, against plain loops in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import perada
from perada.algorithms import FedDF, FedEnsemble
from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.server import Distillation, Distiller, SecureSums
from perada.server.distill import PUBLIC_BATCH, TeacherBatches
from tests.options import sections

from .federations import three_clients

STEPS = torch.tensor([[0, 1, 4], [4, 0, 1], [2, 3, 0], [3, 3, 1]])
OPTIONS = {"lr": 0.1, "optimizer": "sgd", "schedule": "constant"}


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()


def models(count):
    """Networks with running statistics that are not those of any batch."""
    torch.manual_seed(0)
    networks = [network() for _ in range(count)]
    for model in networks:
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return networks


class Public:
    """Public images, and the server's labelled ones, which are the same."""

    def __init__(self):
        self.images = torch.randn(5, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def public_indices(self, round, steps, batch_size):
        return STEPS

    def public_images(self, indices, device):
        return self.images[indices]

    def validation_batches(self, device):
        return [(self.images, torch.arange(5) % 3)]


def distilled_by_a_loop(student, teachers, previous, share, student_mode):
    """Distil with the statistics of all five images, then move back: one teacher and one tensor after another."""
    x = Public().images
    with torch.no_grad():
        target = sum(copy.deepcopy(teacher).train()(x) for teacher in teachers) / len(teachers)
    refined = copy.deepcopy(student).train(student_mode == "train")
    optimizer = torch.optim.SGD(refined.parameters(), lr=0.1)
    for rows in STEPS:
        loss = F.kl_div(refined(x[rows]).log_softmax(1), target[rows].softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def distance(one, other):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return math.sqrt(sum(float((a - b).detach().square().sum()) for a, b in pairs))

    moved = distance(refined, student)
    radius = share * distance(student, previous)
    end = get_state(refined)
    start = get_state(student)
    if moved <= radius:
        return end, moved, radius
    for key, value in end.items():
        if value.is_floating_point():
            end[key] = start[key] + radius / moved * (value - start[key])
    return end, moved, radius


@pytest.mark.every(2)
@pytest.mark.parametrize("student_mode", ["eval", "train"])
@pytest.mark.parametrize(("share", "is_moved_back"), [(0.01, True), (5.0, False)])
def test_distillation_within_the_region_equals_a_plain_loop(student_mode, share, is_moved_back):
    student, previous, *teachers = models(5)
    options = Distillation(len(STEPS), student_mode=student_mode, trust_region=share, **OPTIONS)
    distiller = Distiller(Engine(network()), options, parameter_keys(student), Public())
    states = stack([get_state(teacher) for teacher in teachers])
    refined = distiller(get_state(student), states, previous=get_state(previous))
    expected, moved, radius = distilled_by_a_loop(student, teachers, previous, share, student_mode)
    assert (moved > radius) == is_moved_back
    for key, value in refined.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-10)
    unlimited = distiller(get_state(student), states)
    assert torch.equal(unlimited["4.weight"], refined["4.weight"]) != is_moved_back


def test_an_average_that_stays_where_the_round_began_is_not_distilled():
    student, *teachers = models(3)
    distiller = Distiller(Engine(network()), Distillation(4, **OPTIONS), parameter_keys(student), Public())
    refined = distiller(
        get_state(student), stack([get_state(teacher) for teacher in teachers]), previous=get_state(student)
    )
    assert all(torch.equal(value, get_state(student)[key]) for key, value in refined.items())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_student_that_diverges_is_not_moved_back_but_dropped(wrong):
    student, previous, *teachers = models(4)
    options = Distillation(4, **OPTIONS | {"lr": 1e38 if wrong == math.inf else 0.1})
    distiller = Distiller(Engine(network()), options, parameter_keys(student), Public())
    states = stack([get_state(teacher) for teacher in teachers])
    if math.isnan(wrong):
        states["4.weight"][0] = wrong
    refined = distiller(get_state(student), states, previous=get_state(previous))
    assert distiller.report.diverged
    assert all(torch.equal(value, get_state(student)[key]) for key, value in refined.items())


def test_what_is_scored_on_labelled_images_is_what_is_returned():
    student, previous, *teachers = models(5)
    options = Distillation(4, validate_every=1, trust_region=0.01, **OPTIONS)
    distiller = Distiller(Engine(network()), options, parameter_keys(student), Public())
    scored = []
    score = distiller._validation_accuracy
    distiller._validation_accuracy = lambda state: (
        scored.append((state, len(scored))) or float(len(scored) == 3) + score(state) / 9
    )
    refined = distiller(get_state(student), stack([get_state(t) for t in teachers]), previous=get_state(previous))
    assert [number for _, number in scored] == [0, 1, 2, 3, 4]
    assert all(torch.equal(value, scored[2][0][key]) for key, value in refined.items())
    parameters = parameter_keys(student)
    flat = {
        name: torch.cat([get_state(m)[key].flatten() for key in parameters])
        for name, m in {"student": student, "previous": previous}.items()
    }
    moved = torch.cat([refined[key].flatten() for key in parameters]) - flat["student"]
    assert float(moved.norm()) == pytest.approx(0.01 * float((flat["student"] - flat["previous"]).norm()))


@pytest.mark.parametrize("share", [0, -1, math.nan, math.inf, "0.5"])
def test_a_share_that_is_not_above_zero_is_rejected(share):
    with pytest.raises(ValueError, match="distillation: trust_region must be "):
        Distillation(trust_region=share)
    assert Distillation(trust_region=None).trust_region is None


@pytest.mark.parametrize("public", [3, PUBLIC_BATCH, PUBLIC_BATCH + 1, 3 * PUBLIC_BATCH + 5])
def test_teachers_see_each_public_image_once_in_batches_of_equal_sizes(public):
    random = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(public, generator=random) for _ in range(3)])
    plan = TeacherBatches.of_steps(indices, Distillation(3), Engine(network()))
    assert plan.batch_statistics
    assert torch.equal(torch.cat(plan.index_batches)[plan.rows], indices)
    assert sorted(torch.cat(plan.index_batches).tolist()) == list(range(public))
    sizes = [len(batch) for batch in plan.index_batches]
    assert max(sizes) <= PUBLIC_BATCH
    assert max(sizes) - min(sizes) <= 1
    # A set in the order of its classes is not divided by class.
    assert torch.cat(plan.index_batches).tolist() == indices[0].tolist()


def run(folder, rounds, lr_local=0.1, **options):
    torch.manual_seed(0)
    arguments = {"steps": 5, "batch_size": 6, "lr": 0.05} | options.pop("distillation", {})
    return perada.finetune(
        network(),
        three_clients(),
        **sections(
            adapter="full",
            rounds=rounds,
            local_steps=2,
            batch_size=4,
            lr_local=lr_local,
            distillation=arguments,
            default_root_dir=folder,
            accelerator="cpu",
            enable_progress_bar=False,
            **options,
        ),
    )


def parameters_of(run):
    state = run.state("global")
    return torch.cat([state[key].flatten() for key in parameter_keys(network())])


def test_the_first_round_of_a_run_ends_on_the_border(tmp_path):
    """Clients with hardly any rate stay where the round began, and without distillation it ends with the average."""
    start = parameters_of(run(tmp_path, 1, lr_local=1e-30, distillation={"steps": 0}, enable_checkpointing=False))
    average = parameters_of(run(tmp_path, 1, distillation={"steps": 0}, enable_checkpointing=False))
    distilled = parameters_of(run(tmp_path, 1, enable_checkpointing=False))
    assert float((distilled - average).norm()) == pytest.approx(0.25 * float((average - start).norm()))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    uninterrupted = run(tmp_path / "uninterrupted", 4, enable_checkpointing=False)
    run(tmp_path / "half", 2)
    (checkpoint,) = (tmp_path / "half").rglob("last.ckpt")
    resumed = run(tmp_path / "half", 4, ckpt_path=str(checkpoint))
    assert torch.equal(parameters_of(resumed), parameters_of(uninterrupted))
    with pytest.raises(ValueError, match="trust_region"):
        run(tmp_path / "half", 5, distillation={"trust_region": None}, ckpt_path=str(checkpoint))


def test_secure_sums_have_the_same_region(tmp_path):
    plain, summed = (
        parameters_of(run(tmp_path, 2, secure_sums=sums, enable_checkpointing=False))
        for sums in (None, SecureSums(fraction_bits=40))
    )
    unlimited = parameters_of(run(tmp_path, 2, distillation={"trust_region": None}, enable_checkpointing=False))
    torch.testing.assert_close(summed, plain, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(unlimited, plain, atol=1e-3)


@pytest.mark.slow
def test_each_mode_of_an_ensemble_has_a_region_of_its_own(tmp_path):
    """In one round of two modes, each is moved by half of what its own clients moved it."""

    def modes(lr=0.1, **distillation):
        algorithm = FedEnsemble(FedDF(), modes=2)
        ended = run(
            tmp_path, 1, algorithm=algorithm, distillation=distillation, lr_local=lr, enable_checkpointing=False
        )
        keys = parameter_keys(network())
        return torch.stack([torch.cat([state[key].flatten() for key in keys]) for state in ended.states("global")])

    started = modes(1e-30, steps=0)
    average = modes(steps=0)
    distilled = modes()
    radii = 0.25 * (average - started).norm(dim=1)
    assert abs(float(radii[0] - radii[1])) > 1e-3
    torch.testing.assert_close((distilled - average).norm(dim=1), radii)
