# SPDX-License-Identifier: Apache-2.0
"""Half precision: loss scales against torch's GradScaler client by client, and what bound of single precision holds."""

import copy
import math
from collections import OrderedDict
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Broadcast, FedAvg, make_algorithm
from perada.core.ranks import Ranks
from perada.core.rounds import CohortBatch, Phase, RoundPlan
from perada.core.states import expand, get_state, parameter_keys
from perada.engine import Engine, frozen_layers, loss_scaling, stacked_layers
from perada.engine.loss_scaling import LossScales
from perada.federation.chunk import LocalRound
from perada.federation.cohort import Cohort
from perada.federation.local_trainer import LocalTrainer
from perada.federation.settings import LocalTraining, Settings
from perada.lightning import setup
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.server import Distillation, Distiller
from perada.tasks import MultiLabel
from tests.chunks import in_chunks
from tests.methods import make_method
from tests.options import sections

LossScaling = partial(torch.amp.GradScaler, "cpu")
STEPS = (12, 9, 9, 4)
COUNTS = (6, 4, 6, 5)
CLASSES = 3
CLIENTS = tuple(range(10, 10 + len(STEPS)))
OPTIMIZERS = {
    "momentum": (
        ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ),
    "sgd": (("sgd", {}), lambda p: torch.optim.SGD(p, 0.1)),
    "adam": (("adam", {"weight_decay": 0.1}), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    "adamw": (("adamw", {"weight_decay": 0.1}), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
}
WILD = {(1, 3), (1, 6), (2, 0)}
"""(client, step) whose images are so large that the gradient overflows; the loss does not."""


def network():
    layers = {
        "conv": nn.Conv2d(2, 5, 3),
        "act": nn.Softplus(),  # grows with the images
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "fc": nn.Linear(20, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))


def batches(wild=None):
    """Single-label, or multi-label where images of :data:`WILD` are multiplied by ``wild``."""
    random = torch.Generator().manual_seed(7)
    created = []
    for step in range(STEPS[0]):
        active = sum(count > step for count in STEPS)
        x = torch.randn(active, max(COUNTS[:active]), 2, 5, 5, generator=random)
        y = torch.randint(0, CLASSES, x.shape[:2], generator=random)
        if wild is not None:
            x = x.double()
            y = F.one_hot(y, CLASSES).double()
        for client in range(active):
            if wild and (client, step) in WILD:
                x[client] *= wild
                y[client] = 0.5  # so that no prediction is right
        created.append(CohortBatch(CLIENTS[:active], x, y, COUNTS[:active], 0, step))
    return created


def half():
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


def cohort(model, training, algorithm="fedavg", engine="folded", options=None, clients=CLIENTS, chunk=None, **more):
    algorithm = make_method(algorithm)
    tensor_names = find_tensor_names(model, "fc")
    initial = get_state(model)
    kept = {
        role: expand(state, len(clients))
        for role, state in algorithm.initial_client_state(initial, tensor_names).items()
    }
    plan = RoundPlan(3, clients, (STEPS[: len(clients)],), chunk)
    phases = (Phase("local"),)
    settings = Settings(algorithm, training, Distillation(0), "uniform", phases, 0, loss_scaling=options, **more)
    received = algorithm.broadcast(Broadcast(initial, tensor_names, 3, clients, len(CLIENTS), 0))
    trainer = LocalTrainer(Engine(model, engine), tensor_names, settings)
    return Cohort(LocalRound.begin(trainer, plan, kept, received))


class SendsAProduct(FedAvg):
    """Clients send a product of what they trained, too."""

    def end_round(self, trained, client_state, received, tensor_names):
        weight = trained["local"]["fc.weight"]
        return {}, trained["local"] | {"product": weight @ weight.mT}


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_steps_are_in_half_precision_and_what_is_sent_is_not(chunk):
    """Chunks close between the steps of others."""
    running = cohort(network(), LocalTraining("sgd", {"local": 0.1}), SendsAProduct(), chunk=chunk)
    for batch in in_chunks(batches(), chunk or len(CLIENTS)):
        with half():
            running.step(batch)
    sent = running.finish().sent
    expected = sent["fc.weight"] @ sent["fc.weight"].mT
    torch.testing.assert_close(sent["product"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize(("engine", "chunk"), [("folded", None), ("folded", 3), ("loop", 1)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.every(24)
def test_each_client_trains_as_with_a_grad_scaler_of_its_own(optimizer, engine, chunk, clip_norm):
    model, ((name, options), make) = network(), OPTIMIZERS[optimizer]
    scaling = LossScaling(2.0**26, 2.0, 0.5, 2)
    training = LocalTraining(name, {"local": 0.1}, clip_norm=clip_norm, **options)
    running = cohort(model, training, engine=engine, options=scaling, chunk=chunk)
    for batch in in_chunks(batches(), chunk or len(CLIENTS)):
        with half():
            running.step(batch)
    results = running.finish()
    updates = results.sent
    finite = results.finite
    assert finite.all()
    for row, (steps, count) in enumerate(zip(STEPS, COUNTS, strict=True)):
        alone = copy.deepcopy(model)
        optimizer = make(alone.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2)
        skipped = 0
        for batch in batches()[:steps]:
            with half():
                loss = F.cross_entropy(alone(batch.x[row, :count]).float(), batch.y[row, :count])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
        assert 2 < skipped < steps or steps == 4  # overflows at first, and again after the scale has grown
        assert running.local_round.scales.skipped[row] == skipped
        assert running.local_round.scales.scale[row] == scaler.get_scale()
        for key, value in get_state(alone).items():
            torch.testing.assert_close(updates[key][row], value, rtol=1e-2, atol=2e-3)
            if engine == "loop" and name == "sgd":  # the very same products; Adam makes much of what is rounded
                torch.testing.assert_close(updates[key][row], value, rtol=1e-5, atol=1e-6)


ALGORITHMS = [
    "perada",
    "fedavg",
    "feddyn",
    "scaffold",
    "moon",
    "apfl",
    "pfedme",
    "ditto",
    "fedalt_output",
    "fedsim_output",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("optimizer", [("sgd", {"momentum": 0.9, "weight_decay": 0.1}), ("adam", {})])
@pytest.mark.every(20)
def test_a_skipped_step_is_one_that_was_never_taken(algorithm, optimizer):
    """In double precision with images that overflow it, so that skipping is all that the scales add."""
    if algorithm == "apfl":
        algorithm = make_algorithm("apfl", lr_alpha=0.1)
    model = network().double()
    training = LocalTraining(optimizer[0], {"local": 0.05}, **optimizer[1], task=MultiLabel())
    scaling = LossScaling(2.0**126, 2.0, 0.5, 1000)
    running = cohort(model, training, algorithm, options=scaling)
    plain = []
    for batch in batches(wild=1e280):
        running.step(batch)
    results = running.finish()
    kept = results.client_state
    sent = results.sent
    finite = results.finite
    assert finite.all()
    descents = 2 if algorithm in ("perada", "ditto") or not isinstance(algorithm, str) else 1
    wanted = [descents * sum(client == row for client, _ in WILD) for row in range(len(CLIENTS))]
    if algorithm == "pfedme":
        wanted = [3 * count for count in wanted]
    assert running.local_round.scales.skipped.tolist() == wanted
    for row in range(len(CLIENTS)):
        plain = cohort(model, training, algorithm, clients=CLIENTS[row : row + 1])
        for batch in batches(wild=1.0)[: STEPS[row]]:
            if (row, batch.step) not in WILD:
                one = slice(row, row + 1)
                plain.step(CohortBatch(CLIENTS[one], batch.x[one], batch.y[one], COUNTS[one], 0, batch.step))
        alone = plain.finish()
        kept_alone = alone.client_state
        sent_alone = alone.sent
        pairs = [(sent, sent_alone), *((kept[role], kept_alone[role]) for role in kept)]
        for got, expected in pairs:
            for key, value in expected.items():
                torch.testing.assert_close(got[key][row], value[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_masked_optimizers_are_torchs_for_those_that_step(name):
    (kind, options), torchs = OPTIMIZERS[name]
    values = torch.randn(3, 2, 4, dtype=torch.float64)
    stack = values.clone().requires_grad_()
    alone = [value.clone().requires_grad_() for value in values]
    optimizer = LocalTraining(kind, {"local": 0.1}, **options).make("local", [stack], 1.0, masked=True)
    single = [torchs([leaf]) for leaf in alone]
    for step in range(6):
        stepping = torch.tensor([True, step not in (0, 3), step > 3])
        stack.grad = torch.randn_like(stack)
        stack.grad[~stepping] = float("nan")
        optimizer.step_rows(stepping)
        for leaf, own, gradient, good in zip(alone, single, stack.grad, stepping, strict=True):
            if good:
                leaf.grad = gradient.clone()
                own.step()
    torch.testing.assert_close(stack.detach(), torch.stack([leaf.detach() for leaf in alone]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_student_is_distilled_as_with_a_grad_scaler(kind):
    model = network()
    state = get_state(model)
    keys = parameter_keys(model)
    random = torch.Generator().manual_seed(5)
    pairs = [(torch.randn(4, 2, 5, 5, generator=random), torch.randn(4, 3, generator=random)) for _ in range(8)]
    scales = LossScales(LossScaling(2.0**22, 2.0, 0.5, 2), 1, None, torch.device("cpu"))
    options = Distillation(8, lr=0.05, optimizer=kind, schedule="constant")
    with half():
        refined = Distiller(Engine(model, "loop"), options, keys, None).train(state, pairs, scales=scales)
    alone = copy.deepcopy(model).eval()
    optimizer = (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(alone.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    for x, teacher in pairs:
        with half():
            out = alone(x).float()
        loss = F.kl_div(out.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scales.scale.item() == scaler.get_scale()
    assert 2 < scales.skipped < 7
    for key, value in get_state(alone).items():
        torch.testing.assert_close(
            refined[key], value, rtol=1e-2 if kind == "adam" else 1e-5, atol=1e-3 if kind == "adam" else 1e-6
        )


def test_the_next_round_starts_from_the_smallest_scale_of_those_that_stepped():
    scales = LossScales(LossScaling(8.0, 2.0, 0.5, 3), 4, (16.0, 2), torch.device("cpu"))
    gradients = torch.ones(4, 2)
    gradients[1, 0], gradients[2, 1], gradients[3, 1] = float("inf"), float("nan"), float("-inf")
    assert scales.update([gradients], slice(0, 4)).tolist() == [True, False, False, False]
    assert scales.scale.tolist() == [32, 8, 8, 8]
    assert scales.good_steps.tolist() == [0, 0, 0, 0]
    everyone = torch.ones(4, dtype=torch.bool)
    assert scales.settle(everyone, Ranks()) == (32.0, 0)
    assert scales.settle(~scales.stepped, Ranks()) == (8.0, 0)  # none stepped: all are asked
    assert scales.settle(~everyone, Ranks()) == (16.0, 2)  # all broke: as it was
    gradients[1] = 1
    scales.update([gradients[:2]], slice(0, 2))
    assert scales.settle(everyone, Ranks()) == (8.0, 1)
    assert scales.skipped.tolist() == [0, 1, 1, 1]


def plugin(**options):
    """Lightning takes bfloat16 instead where a CPU is asked for float16 by name."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))]}


def finetune(tiny, rounds=2, **options):
    options = tiny.options | {"rounds": rounds, "logger": False, "num_classes": 3} | options
    return tiny.finetune(**options)


def records(run, name):
    return [record[name] for record in run.metrics["rounds"]]


@pytest.mark.slow
def test_scales_go_on_from_round_to_round(tiny):
    run = finetune(tiny, 3, **plugin(init_scale=2.0**24))
    skipped = records(run, "train/skipped_steps")
    assert skipped[0] > 0
    assert skipped[1:] == [0, 0] or skipped[1] < skipped[0] / 2
    assert records(run, "server/skipped_steps")[-1] == 0
    assert "train/skipped_steps" not in finetune(tiny, 1).metrics["rounds"][0]


@pytest.mark.slow
def test_resume_in_float16_is_exact(tiny, tmp_path):
    scale = {"init_scale": 2.0**24, "growth_interval": 5}
    options = {"logger": True, "default_root_dir": tmp_path}
    uninterrupted = finetune(tiny, 4, **plugin(**scale), **options | {"logger": False})
    finetune(tiny, 2, **plugin(**scale), **options)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    resumed = finetune(tiny, 4, **plugin(**scale), **options, ckpt_path=str(checkpoint))
    for key, value in uninterrupted.state("global").items():
        assert torch.equal(value, resumed.state("global")[key])
    assert records(uninterrupted, "train/skipped_steps") == records(resumed, "train/skipped_steps")


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "grown"), [(1, True), (1000, False)])
def test_a_resumed_run_has_the_scaler_that_it_is_given(tiny, tmp_path, interval, grown):
    options = {"logger": True, "default_root_dir": tmp_path}
    finetune(tiny, 1, **plugin(init_scale=2.0, growth_interval=1000), **options)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    finetune(tiny, 2, **plugin(growth_interval=interval), **options, ckpt_path=str(checkpoint))
    (resumed,) = {*tmp_path.rglob("last.ckpt")} - {checkpoint}
    scale, _ = torch.load(resumed, weights_only=True)["perada"]["federation"]["loss_scales"]["clients"]
    assert (scale > 2.0) == grown


def test_float16_is_rejected_where_training_is_private(tiny):
    with pytest.raises(ValueError, match=r"16-mixed.*set precision='bf16-mixed'"):
        finetune(tiny, 1, privacy={"noise_multiplier": 1.0, "delta": 1e-3}, **plugin())


def test_a_disabled_scaler_scales_nothing(tiny):
    run = finetune(tiny, 1, **plugin(enabled=False))
    assert "train/skipped_steps" not in run.metrics["rounds"][0]


@pytest.mark.parametrize(
    ("precision", "bound"), [("bf16-mixed", 0.1), pytest.param("16-mixed", 0.02, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_half_precision_follows_single_precision(precision, bound):
    """Two rounds of PerAda on a small ResNet with LoRA: the distance to single precision over the distance moved."""
    random = torch.Generator().manual_seed(0)
    prototypes = torch.randn(4, 3, 32, 32, generator=random)

    def part(size):
        y = torch.randint(0, 4, (size,), generator=random)
        return TensorDataset(prototypes[y] / 2 + torch.randn(size, 3, 32, 32, generator=random), y)

    public = TensorDataset(torch.randn(16, 3, 32, 32, generator=random))
    data = perada.FederatedData([part(24), part(16), part(32)], [part(6)] * 3, public)
    rates = {"lr_personal": 0.02, "lr_local": 0.02, "distill_lr": 0.01, "distill_optimizer": "sgd"}
    quiet = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    sizes = {"batch_size": 8, "distill_steps": 5, "distill_batch_size": 8}
    lower = {"precision": precision} if precision == "bf16-mixed" else plugin(init_scale=2.0**10)
    runs = []
    for rounds, options in ((0, {}), (2, {}), (2, lower)):
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=4, zero_init_last=False)
        runs.append(
            perada.finetune(
                model, data, **sections(adapter="lora", rounds=rounds, **rates, **quiet, **sizes, **options)
            )
        )
    for role, client in (("global", None), ("personal", 0), ("personal", 1), ("personal", 2)):
        start, single, half = (
            torch.cat([run.state(role, client)[key].flatten() for key in run.state("global")]) for run in runs
        )
        assert 1e-4 < (half - single).norm() / (single - start).norm() < bound


READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "bincount", "allclose")


class DeviceReads(TorchDispatchMode):
    """Counts the operations whose result's value or shape the host must wait for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
            for part in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if by_mask or name.startswith(READS):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operations_of_a_gpu(monkeypatch):
    """Run what a GPU runs: on a CPU, where reading costs nothing, sums of rows and the taps of small maps are read."""

    def finite_rows(stack):
        return torch.linalg.vector_norm(stack.flatten(1), math.inf, dim=1).isfinite()

    monkeypatch.setattr(loss_scaling, "finite_rows", finite_rows)
    for layers in (frozen_layers, stacked_layers):
        monkeypatch.setattr(layers, "is_small_map", lambda conv, x: False)


@pytest.mark.parametrize("scaling", [None, LossScaling(2.0**20, 2.0, 0.5, 2)], ids=["single", "float16"])
@pytest.mark.parametrize("adapter", ["residual", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_local_steps_read_nothing_from_the_device(scaling, adapter, operations_of_a_gpu):
    """PerAda with momentum, clipping, dropout and BatchNorm, on clients of unequal batches."""
    options = {"dropout": 0.3} if adapter == "residual" else {}
    model = insert_adapter(build_backbone("test_resnet", CLASSES, pretrained=False), adapter, **options).model
    training = LocalTraining("sgd", {"local": 0.1, "personal": 0.1}, momentum=0.9, clip_norm=1.0)
    running = cohort(model, training, "perada", options=scaling)
    # The first step of a run compares states of the CPU's random generator.
    running.local_round.trainer.uses_global_random = False
    float_batches = [batch._replace(x=torch.randn(*batch.x.shape[:2], 3, 16, 16)) for batch in batches()[:5]]
    with torch.autocast("cpu", torch.float16, enabled=scaling is not None, cache_enabled=False), DeviceReads() as reads:
        for batch in float_batches:
            running.step(batch)
    assert reads.found == []
    assert scaling is None or running.local_round.scales.skipped.sum() > 0


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("scaling", [None, LossScaling(2.0**20, 2.0, 0.5, 2)], ids=["single", "float16"])
def test_distillation_reads_nothing_from_the_device(scaling, kind, operations_of_a_gpu):
    model = build_backbone("test_resnet", CLASSES, pretrained=False).model
    for parameter in model.parameters():
        parameter.requires_grad_()
    state = get_state(model)
    keys = parameter_keys(model)
    scales = scaling and LossScales(scaling, 1, None, torch.device("cpu"))
    pairs = [(torch.randn(4, 3, 16, 16), torch.randn(4, CLASSES)) for _ in range(3)]
    options = Distillation(3, lr=0.05, optimizer=kind)
    with torch.autocast("cpu", torch.float16, enabled=scaling is not None, cache_enabled=False), DeviceReads() as reads:
        Distiller(Engine(model, "folded"), options, keys, None).train(state, pairs, average_from=0.5, scales=scales)
    assert reads.found == []


@pytest.mark.slow
@pytest.mark.parametrize("half", [0.002, 0.0005])
def test_one_line_says_where_bfloat16_is_the_slower_one(monkeypatch, caplog, half):
    monkeypatch.setattr(setup, "product_seconds", lambda dtype: half if dtype == torch.bfloat16 else 0.001)
    data = perada.data.FederatedData([TensorDataset(torch.randn(4, 3, 32, 32), torch.arange(4) % 2)] * 2)
    caplog.set_level("INFO", "pytorch_lightning")
    perada.finetune("test_resnet", data, pretrained=False, algorithm="fedavg", rounds=1, precision="bf16-mixed")
    lines = [record.message for record in caplog.records if "is not faster on this processor" in record.message]
    assert len(lines) == (half > 0.001)
    assert all("2.0 ms in bfloat16 and 1.0 ms in single precision" in line for line in lines)
