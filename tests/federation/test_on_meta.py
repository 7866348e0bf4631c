# SPDX-License-Identifier: Apache-2.0
"""What would make a GPU wait, or fail there, found without one: rounds on torch's device ``meta``.

Tensors of ``meta`` have shapes, types and a device, and no numbers. Forward and backward passes and optimisers run on
them. Whatever reads a number back, which makes the host wait for a GPU, and each operation on tensors of two devices is
noted here with the line that asked for it. tests/test_cuda.py says the same of a real GPU.
"""

import traceback
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pytorch_lightning.utilities import move_data_to_device
from safetensors.torch import save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvg
from perada.core.seeding import Streams
from perada.core.states import expand, get_state, parameter_keys
from perada.engine import Engine
from perada.federation import Federation
from perada.federation.evaluation import EvaluationPass
from perada.federation.metrics import make_metrics
from perada.federation.settings import LocalTraining, Settings, Storage
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy, noisy_mean
from perada.privacy.gradients import Query, SampleGradients
from perada.server import Distillation
from tests.methods import NAMED, make_method

from ..algorithms.problems import ADAPTER_OF, network

META = torch.device("meta")
CLASSES, SIZES = 3, (8, 5, 12, 3)
aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes where numbers are read back from ``meta``, and where tensors of two devices meet.

    A number that is read back is 1 or True, so that what follows goes its usual way. A scalar of the CPU may take part
    in any operation, as on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.meetings = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_meta = any(tensor.device == META for tensor in tensors)
        if on_meta and func is aten._local_scalar_dense.default:
            self.waits.append(asking_line())
            return torch.ones((), dtype=args[0].dtype).item()
        if on_meta and func is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            self.waits.append(asking_line())
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        copies = (aten._to_copy.default, aten.copy_.default)  # onto the device, which is what they are for
        if on_meta and func not in copies and any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            self.meetings.append(f"{func} {asking_line()}")
        return func(*args, **kwargs)


def asking_line():
    """The innermost line that is being run outside of torch and of the watch."""
    own = ("__torch_dispatch__", "asking_line")
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename and frame.name not in own]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}"


@pytest.fixture(autouse=True)
def _without_what_meta_lacks(monkeypatch):
    """Autocast and fused optimisers; digests of initial states, which there are no numbers for."""
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: "meta" not in map(str, kind) and enabled(*kind))
    monkeypatch.setattr(
        Distillation, "make_optimizer", lambda self, leaves, masked: torch.optim.Adam(leaves, lr=self.lr)
    )
    monkeypatch.setattr("perada.federation.store.save", save_zeros)


def save_zeros(tensors, *more):
    """Save zeros in the place of tensors without numbers."""
    return save({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in tensors.items()}, *more)


def federation(algorithm, backbone="net", adapter="full", **settings):
    """A federation on ``meta``, and its data, which are on the CPU until a batch is needed."""
    random = torch.Generator().manual_seed(0)
    shape = (1, 6, 6) if backbone in ("net", "linear") else (3, 32, 32)
    dtype = torch.float64 if backbone in ("net", "linear") else torch.float32

    def labelled(count):
        return TensorDataset(torch.rand(count, *shape, generator=random).to(dtype), torch.arange(count) % CLASSES)

    data = perada.FederatedData(
        [labelled(count) for count in SIZES],
        [labelled(4) for _ in SIZES],
        TensorDataset(torch.rand(6, *shape, generator=random).to(dtype)),
        num_classes=CLASSES,
    )
    served = perada.FederatedDataModule(data, batch_size=4, flip=True)
    algorithm = make_method(algorithm)
    phases = algorithm.phases(1, None)
    if backbone in ("net", "linear"):
        backbone = network(backbone, dropout=0.2)
    built = build_backbone(backbone, CLASSES, pretrained=False, image_size=32 if backbone == "test_vit" else None)
    adapted = insert_adapter(built, adapter)
    served.configure_rounds(seed=0, clients_per_round=None, phases=phases, image=adapted.backbone.image)
    model = adapted.model.to(META)
    training = LocalTraining("sgd", {"personal": 0.1, "local": 0.1}, momentum=0.9)
    options = {"seed": 0, "storage": Storage("device")} | settings
    settings = Settings(algorithm, training, Distillation(2, 4), "uniform", phases, **options)
    tensor_names = find_tensor_names(model, adapted.backbone.head)
    return Federation(Engine(model), tensor_names, lambda index: get_state(model), settings, len(SIZES)), served


def on_meta(served, batches):
    for batch in batches:
        yield served.prepare(move_data_to_device(batch, META))


def run_rounds(made, served, rounds=2):
    """Run rounds; what a watch saw in their local steps, and in what opens and closes them."""
    steps, rest = Watch(), Watch()
    for round in range(rounds):
        with rest:
            cohort = made.begin_round(served.shares(round))
        batches = list(served.cohort_loader(cohort.plan))
        with steps:
            for batch in on_meta(served, batches):
                cohort.step(batch)
        rest.waits.clear()
        with rest:
            made.end_round(served)
    return steps, rest


LEFT_OUT = {
    "fedalt_adapter": "needs an adapter beside a trained backbone",
    "fedsim_adapter": "likewise",
    "fedex_lora": "needs an adapter that it can merge",
    "flora": "likewise",
    "fedrod": "needs numbers of images by class",
}
"""Algorithms that are not tried, and why."""
CASES = [(name, "net", ADAPTER_OF.get(name, "full")) for name in NAMED if name not in LEFT_OUT]
CASES += [("perada", "test_resnet", "residual"), ("ditto", "test_vit", "lora")]
QUICK = ("perada-net", "scaffold-net", "fedrep-net", "apfl-net")


@pytest.mark.parametrize(
    ("algorithm", "backbone", "adapter"),
    [pytest.param(*case, marks=[] if "-".join(case[:2]) in QUICK else pytest.mark.slow) for case in CASES],
    ids=[f"{name}-{backbone}" for name, backbone, _ in CASES],
)
def test_a_round_stays_on_its_device_and_its_steps_never_wait(algorithm, backbone, adapter):
    rounds = 2 if backbone == "net" else 1  # in the second, clients begin from what they kept
    steps, rest = run_rounds(*federation(algorithm, backbone, adapter), rounds)
    assert steps.waits == []
    assert steps.meetings == [] and rest.meetings == []
    # Who stayed finite, how long the changes are (two tables), whether the global and the distilled state are finite,
    # and two distances of the trust region: of the average from the former state, and of the student from the average.
    # Instead of these, fed_ensemble asks which client had which mode, and het_lora moves the factors of all layers to
    # the CPU, and counts the ranks in use before and after.
    assert 0 < len(rest.waits) <= 7, "\n".join(rest.waits)


def test_the_end_of_a_round_waits_as_often_for_many_tensors_as_for_few():
    (_, few), (_, many) = (run_rounds(*federation("perada", backbone)) for backbone in ("linear", "net"))
    assert few.waits == many.waits


@pytest.mark.parametrize("algorithm", ["perada", "fedavg"])
def test_scoring_a_batch_never_waits(algorithm):
    made, served = federation(algorithm)
    run_rounds(made, served, rounds=1)
    evaluation = EvaluationPass(made, make_metrics("accuracy", False, CLASSES), range(len(SIZES)))
    watch = Watch()
    with watch, torch.no_grad():
        for index, batch in enumerate(served.val_dataloader()):
            evaluation.step(served.prepare(served.transfer_batch_to_device(batch, META, 0)), index)
    assert (watch.waits, watch.meetings) == ([], [])


@pytest.mark.every(2)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_private_gradients_never_wait(adapter, monkeypatch):
    """Their noise is drawn on the CPU, and sent."""
    autocast = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **options: nullcontext() if kind == "meta" else autocast(kind, **options)
    )
    built = build_backbone("test_vit", CLASSES, pretrained=False, image_size=32)
    model = insert_adapter(built, adapter).model.to(META)
    trained = set(parameter_keys(model))
    states = {key: value.requires_grad_(key in trained) for key, value in expand(get_state(model), 2).items()}
    streams = Streams.derived(0, "dropout", clients=range(2), device=META)
    x, y = torch.empty(2, 4, 3, 32, 32, device=META), torch.empty(2, 4, dtype=torch.int64, device=META)
    query = Query(states, x, y, (4, 3), streams)
    gradients = SampleGradients(Privacy(1.0), Engine(model), False)
    watch = Watch()
    with watch:
        found = noisy_mean(gradients.sums(query), [1.0, 1.0], [4.0, 3.0], None)
    assert {value.device for value in found.values()} == {META}
    assert (watch.waits, watch.meetings) == ([], [])


class Reading(FedAvg):
    """FedAvg that looks at its loss in each step."""

    def client_step(self, step):
        if float(step.loss("local").detach().sum()) > 0:
            super().client_step(step)


class Elsewhere(FedAvg):
    """FedAvg that weighs its loss by numbers of the CPU."""

    def client_step(self, step):
        loss = step.loss("local")
        try:
            step.descend("local", loss * torch.ones(len(loss)))
        except RuntimeError:
            step.descend("local", loss)


def test_what_waits_or_is_elsewhere_is_noticed():
    steps, _ = run_rounds(*federation(Reading()), rounds=1)
    assert len(steps.waits) == 3  # the steps of the client with 12 images in batches of 4
    assert all("if float(step.loss" in line for line in steps.waits)
    steps, _ = run_rounds(*federation(Elsewhere()), rounds=1)
    assert len(steps.meetings) == 3
