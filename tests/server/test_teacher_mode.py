# SPDX-License-Identifier: Apache-2.0
"""Teachers whose norms use the statistics of the public batch, against plain loops in float64."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import perada
from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.server import Distillation, Distiller
from perada.server.distill import PUBLIC_BATCH, TeacherBatches
from tests.options import sections
from tests.rejections import rejects

from .federations import three_clients

ENGINES = pytest.mark.parametrize("kind", ["folded", "loop"])
STEPS = torch.tensor([[0, 1, 4], [4, 0, 1], [2, 3, 0], [3, 3, 1]])
"""The second step has the images of the first in another order; the last has an image twice."""


def network(norm=nn.BatchNorm2d, **options):
    layers = OrderedDict(
        conv=nn.Conv2d(1, 4, 3, bias=False),
        norm=norm(4, **options),
        act=nn.ReLU(),
        drop=nn.Dropout(0.5),
        flat=nn.Flatten(),
        fc=nn.Linear(36, 3),
    )
    return nn.Sequential(layers).double()


def models(count, **options):
    """Networks with running statistics that are not those of any batch."""
    torch.manual_seed(0)
    networks = [network(**options) for _ in range(count)]
    for model in networks:
        model.norm.weight.data.uniform_(0.5, 2)
        if model.norm.running_mean is not None:
            model.norm.running_mean.normal_()
            model.norm.running_var.uniform_(0.5, 2)
    return networks


class Public:
    """Public images that count how often they are read."""

    def __init__(self, images, steps):
        self.images = images
        self.steps = steps
        self.read = 0

    def public_indices(self, round, steps, batch_size):
        return self.steps

    def public_images(self, indices, device):
        self.read += len(indices)
        return self.images[indices]


def images(count=5):
    return torch.randn(count, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def in_training_mode(model, x):
    """Logits by the statistics of ``x``, of a copy without dropout."""
    model = copy.deepcopy(model).train()
    model.drop.p = 0.0
    with torch.no_grad():
        return model(x)


def distilled_by_a_loop(student, teachers, x, student_mode):
    """Distil as the option says: plain torch, one teacher after another, one step after another."""
    student = copy.deepcopy(student).train(student_mode == "train")
    student.drop.p = 0.0
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for rows in STEPS:
        target = sum(in_training_mode(teacher, x[rows]) for teacher in teachers) / len(teachers)
        loss = F.kl_div(student(x[rows]).log_softmax(1), target.softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student


OPTIONS = {"lr": 0.1, "optimizer": "sgd", "schedule": "constant", "teacher_mode": "train"}


@pytest.mark.every(3)
@ENGINES
@pytest.mark.parametrize("student_mode", ["eval", "train"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_distillation_equals_a_plain_loop(kind, student_mode, momentum):
    student, *teachers = models(4, momentum=momentum)
    student.drop.p = 0.0 if student_mode == "train" else 0.5  # its masks would be perada's own
    x = images()
    options = Distillation(len(STEPS), student_mode=student_mode, **OPTIONS)
    public = Public(x, STEPS)
    states = stack([get_state(teacher) for teacher in teachers])
    before = {key: value.clone() for key, value in states.items()}
    distiller = Distiller(Engine(copy.deepcopy(student), kind), options, parameter_keys(student), public)
    refined = distiller(get_state(student), states)
    expected = get_state(distilled_by_a_loop(student, teachers, x, student_mode))
    for key, value in refined.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-10)
    assert all(torch.equal(value, before[key]) for key, value in states.items())
    evaluated = Distillation(len(STEPS), **OPTIONS | {"teacher_mode": "eval"})
    other = Distiller(distiller.engine, evaluated, parameter_keys(student), public)
    assert not torch.allclose(other(get_state(student), states)["fc.weight"], refined["fc.weight"], atol=1e-4)


@pytest.mark.every(3)
@ENGINES
@pytest.mark.parametrize(
    "options",
    [
        {"norm": nn.InstanceNorm2d, "affine": True, "track_running_stats": True},
        {"track_running_stats": False},
        {"eps": 0.1},
    ],
)
@pytest.mark.filterwarnings("ignore:engine='auto':UserWarning")
def test_logits_of_each_kind_of_norm_are_those_of_training_mode(kind, options):
    teachers = models(3, **options)
    x = images(6)
    engine = Engine(network(**options), "auto" if "norm" in options else kind)
    states = stack([get_state(teacher) for teacher in teachers])
    expected = torch.stack([in_training_mode(teacher, x) for teacher in teachers])
    for rows in (None, 4, 1):  # however few may run at once, a batch stays whole
        actual = engine.shared_logits(states, x, rows, batch_statistics=True)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@ENGINES
def test_a_frozen_norm_keeps_the_statistics_that_it_came_with(kind):
    frozen = models(1)[0]
    x = images()
    frozen.norm.requires_grad_(False)
    before = copy.deepcopy(frozen.norm.state_dict())
    engine = Engine(frozen, kind)
    trained = {key: value for key, value in get_state(frozen).items() if not key.startswith("norm")}
    states = {key: value.unsqueeze(0) for key, value in trained.items()}
    assert not engine.has_batch_norms
    result = engine.shared_logits(states, x, batch_statistics=True)
    torch.testing.assert_close(result[0], frozen.eval()(x).detach(), rtol=1e-9, atol=1e-10)
    assert all(torch.equal(value, before[key]) for key, value in frozen.norm.state_dict().items())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.Identity, nn.GroupNorm])
def test_each_image_passes_once_where_the_mode_makes_no_difference(norm):
    make = (lambda channels: nn.GroupNorm(2, channels)) if norm is nn.GroupNorm else norm
    torch.manual_seed(0)
    student, *teachers = (network(make) for _ in range(3))
    results = []
    read = []
    for mode in ("train", "eval"):
        public = Public(images(), STEPS)
        chosen = Distillation(len(STEPS), **OPTIONS | {"teacher_mode": mode})
        distiller = Distiller(Engine(student), chosen, parameter_keys(student), public)
        results.append(distiller(get_state(student), stack([get_state(teacher) for teacher in teachers])))
        read.append(public.read)
    students_share = STEPS.numel()
    assert read[1] == students_share + 5
    if norm is nn.BatchNorm2d:
        assert read[0] == students_share + 9  # three batches of three: two steps share theirs
    else:
        assert read[0] == read[1]
        assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


def test_steps_on_all_public_images_share_one_batch():
    engine = Engine(network())
    indices = torch.stack([torch.randperm(7) for _ in range(20)])
    plan = TeacherBatches.of_steps(indices, Distillation(20, "full", teacher_mode="train"), engine)
    assert [batch.tolist() for batch in plan.index_batches] == [list(range(7))]
    assert torch.equal(plan.rows, indices)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("public", [3, 2 * PUBLIC_BATCH + 5])
def test_rows_of_the_batches_are_the_images_of_the_steps(mode, public):
    random = torch.Generator().manual_seed(0)
    indices = torch.randint(0, public, (4, 600), generator=random)
    plan = TeacherBatches.of_steps(indices, Distillation(4, teacher_mode=mode), Engine(network()))
    assert torch.equal(torch.cat(plan.index_batches)[plan.rows], indices)
    assert plan.size == len(torch.cat(plan.index_batches))
    if mode == "train":
        for batch, step in zip(plan.rows // 600, indices, strict=True):
            assert plan.index_batches[int(batch.unique())].tolist() == sorted(step.tolist())


def run(folder, rounds, engine="auto", teacher_mode="train", **options):
    torch.manual_seed(0)
    return perada.finetune(
        network().to(options.pop("dtype", torch.float64)),
        three_clients(),
        **sections(
            adapter="full",
            rounds=rounds,
            clients_per_round=2,
            local_steps=2,
            batch_size=4,
            lr_local=0.1,
            lr_personal=0.1,
            distillation={"steps": 3, "batch_size": 6, "lr": 0.01, "teacher_mode": teacher_mode},
            engine=engine,
            default_root_dir=folder,
            accelerator="cpu",
            enable_progress_bar=False,
            **options,
        ),
    )


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    uninterrupted = run(tmp_path / "whole", 4, enable_checkpointing=False)
    run(tmp_path / "half", 2)
    (checkpoint,) = (tmp_path / "half").rglob("last.ckpt")
    resumed = run(tmp_path / "half", 4, ckpt_path=str(checkpoint))
    for key, value in uninterrupted.state("global").items():
        assert torch.equal(resumed.state("global")[key], value), key


def test_engines_agree_and_the_mode_matters(tmp_path):
    folded, loop, evaluated = (
        run(tmp_path, 2, engine, mode, enable_checkpointing=False).state("global")
        for engine, mode in (("folded", "train"), ("loop", "train"), ("folded", "eval"))
    )
    for key, value in folded.items():
        torch.testing.assert_close(loop[key], value, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(folded["fc.weight"], evaluated["fc.weight"], atol=1e-5)


def test_a_run_is_not_resumed_in_the_other_mode(tmp_path):
    run(tmp_path, 1)
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    with pytest.raises(ValueError, match="teacher_mode"):
        run(tmp_path, 2, teacher_mode="eval", ckpt_path=str(checkpoint))


@pytest.mark.every(3)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true", "bf16-true"])
def test_half_precision_is_close_to_a_plain_loop(precision):
    """Teachers under autocast, or of half-precision numbers; norms work in single precision in both."""
    dtype = {"bf16-mixed": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]
    teachers = [model.to(dtype) for model in models(3)]
    x = images(6).to(dtype)
    states = stack([get_state(teacher) for teacher in teachers])
    engine = Engine(network().to(dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        actual = engine.shared_logits(states, x, batch_statistics=True)
        expected = torch.stack([in_training_mode(teacher, x) for teacher in teachers])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), rtol=0.05, atol=0.05)
    assert torch.equal(states["norm.running_mean"], stack([get_state(t) for t in teachers])["norm.running_mean"])


def test_an_unknown_mode_is_rejected():
    with rejects("distillation: teacher_mode", "batch"):
        Distillation(teacher_mode="batch")
