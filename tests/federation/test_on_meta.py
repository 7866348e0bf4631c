# SPDX-License-Identifier: Apache-2.0
"""What would make a GPU wait, or fail there, found without one: rounds on torch's device ``meta``.

Tensors of ``meta`` have shapes, types and a device, and no numbers. Forward and backward passes and optimisers run on
them. Whatever reads a number back, which makes the host wait for a GPU, and each operation on tensors of two devices is
noted here with the line that asked for it. tests/test_cuda.py says the same of a real GPU.

Forward passes also run on fake tensors of ``cuda``, for what the code decides by the name of the device.
"""

import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from perada.algorithms import FedAvg
from perada.core.seeding import Streams
from perada.core.states import clone, expand, get_state
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy
from perada.server import Distillation
from perada.server.rules import SERVER_RULES, make_rule
from tests.methods import NAMED

from ..algorithms.problems import LORA
from .simulation import CLASSES, SMALL_NETWORKS, Case, case_of, simulate, small_network

META = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten


@dataclass(frozen=True)
class Request:
    """A line of perada that asked for an operation.

    Attributes:
        file: Name of the file.
        function: Name of the function.
        line: Number of the line.
        text: The line.
    """

    file: str
    function: str
    line: int
    text: str


class Watch(TorchDispatchMode):
    """Notes where numbers are read back from ``meta``, and where tensors of two devices meet.

    A number that is read back is 1 or True, so that what follows goes its usual way. A scalar of the CPU may take part
    in any operation, as on a GPU.

    Attributes:
        waits: Where numbers were read back.
        meetings: Where tensors of two devices met, with the operation.
        sent: Where tensors of the CPU were copied to the device.
    """

    def __init__(self):
        super().__init__()
        self.waits: list[Request] = []
        self.meetings: list[tuple[str, Request]] = []
        self.sent: list[Request] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        devices = set(devices_in((args, kwargs)))
        if "meta" not in devices:
            if func is aten._to_copy.default and kwargs.get("device") == META and "cpu" in devices:
                self.sent.append(request())
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.waits.append(request())
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and kwargs.get("device") == CPU:
            self.waits.append(request())
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if "cpu" in devices:
            if func is aten.copy_.default:  # onto the device, which is what it is for
                self.sent.append(request())
            else:
                self.meetings.append((str(func), request()))
            return func(*args, **kwargs)
        return on_meta(func, args, kwargs)


def devices_in(values):
    """The kinds of devices of all tensors among arguments, without scalars of the CPU."""
    if isinstance(values, torch.Tensor):
        if values.dim() or values.device == META:
            yield values.device.type
    elif isinstance(values, dict):
        yield from devices_in(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from devices_in(value)


RESULTS: dict[Any, Any] = {}
"""Layouts of the results of operations that make new tensors, by operation and layouts of the arguments.

torch finds them in Python, which takes longer than on a CPU the operation itself.
"""


def on_meta(func, args, kwargs):
    """Run an operation on meta tensors, whose results are taken from :data:`RESULTS` if they are there."""
    aliases = any(value.alias_info is not None for value in (*func._schema.arguments, *func._schema.returns))
    if aliases:
        return func(*args, **kwargs)
    try:
        key = (func, layout(args), layout(kwargs))
        cached = RESULTS.get(key)
    except TypeError:  # an argument of another kind
        return func(*args, **kwargs)
    if cached is None:
        results = func(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            RESULTS[key] = layout(results)
        elif isinstance(results, tuple) and all(isinstance(result, torch.Tensor) for result in results):
            RESULTS[key] = layout(results)
        return results
    if isinstance(cached, Layout):
        return cached.make()
    return tuple(result.make() for result in cached)


class Layout(NamedTuple):
    """What a meta tensor has."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self):
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


def layout(value):
    """The layout of all tensors in a value, which can be hashed."""
    if isinstance(value, torch.Tensor):
        return Layout(value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(layout(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, layout(part)) for name, part in value.items())
    return type(value), value


def request():
    """The innermost line that is being run outside of torch and of the watch."""
    functions_of_watch = ("__torch_dispatch__", "request")
    frames = []
    for frame in traceback.extract_stack():
        if "/torch/" not in frame.filename and frame.name not in functions_of_watch:
            frames.append(frame)
    frame = frames[-1]
    return Request(Path(frame.filename).name, frame.name, frame.lineno, frame.line)


@pytest.fixture(autouse=True)
def _without_what_meta_lacks(monkeypatch):
    """Autocast and fused optimisers; digests of initial states, which there are no numbers for."""
    enabled = torch.is_autocast_enabled
    autocast = torch.autocast
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: "meta" not in map(str, kind) and enabled(*kind))
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **options: nullcontext() if kind == "meta" else autocast(kind, **options)
    )
    monkeypatch.setattr(
        Distillation, "make_optimizer", lambda self, leaves, masked: torch.optim.Adam(leaves, lr=self.lr)
    )
    monkeypatch.setattr("perada.federation.store.save", save_zeros)


def save_zeros(tensors, *more):
    """Save zeros in the place of tensors without numbers."""
    return save({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in tensors.items()}, *more)


CASES = [case_of(name) for name in NAMED]
CASES += [
    Case("perada", "test_resnet", "residual"),
    pytest.param(Case("ditto", "test_vit", "lora"), marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Watched:
    """What was seen in rounds.

    Attributes:
        steps: Local steps.
        full_steps: Those among them in which no client's batch has rows of padding.
        opening: The beginnings of rounds.
        closing: The ends of rounds.
        scoring: The scoring of all models.
        tuning: The fine-tuning after the last round.
    """

    steps: Watch
    full_steps: Watch
    opening: Watch
    closing: Watch
    scoring: Watch
    tuning: Watch


def run_rounds(simulation, rounds=1):
    """Run rounds, and look at each of their parts; the number of waits is that of the last round."""
    federation = simulation.federation
    watched = Watched(*[Watch() for _ in range(6)])
    for round in range(rounds):
        with watched.opening:
            cohort = simulation.begin_round(round)
        for batch in list(simulation.load(cohort.plan)):
            # In private training there is a batch for each stream, and their sizes are drawn.
            is_full = not isinstance(batch, dict) and len(set(batch.counts)) == 1
            with watched.full_steps if is_full else watched.steps:
                cohort.step(batch)
        watched.closing.waits.clear()
        with watched.closing:
            federation.end_round(simulation.served, simulation.load)
    with watched.scoring:
        simulation.score()
    with watched.tuning:
        simulation.personalize()
    return watched


NECESSARY_WAITS = {
    ("cohort.py", "_totals_of_all"): (1, "the clients' losses, and who stayed finite, in one table"),
    ("aggregate.py", "change_norms"): (1, "how long the updates are, if only their sums are kept"),
    ("outliers.py", "_norms_and_cosines"): (2, "how long and how alike the updates are, in two tables"),
    ("states.py", "is_finite"): (2, "whether the global state is finite, and the distilled one"),
    ("distill.py", "_sum_logits_over_ranks"): (1, "whose logits are finite"),
    ("distill.py", "_distance_between"): (
        2,
        "the trust region: from the former state to the average, and on to the student",
    ),
    ("ensembles.py", "server_step"): (1, "which client had which of the ensemble's modes"),
    ("lora.py", "end_round"): (1, "which of LoRA's factors RoLoRA trains, by a flag that was received"),
    ("het_lora.py", "_to_cpu"): (1, "the factors of all layers in one buffer, for decompositions on the CPU"),
    ("het_lora.py", "_used_ranks"): (2, "the ranks in use, before and after"),
    ("robust.py", "inner_products"): (2, "inner products of the clients' changes, of parameters and of all tensors"),
    ("robust.py", "trust"): (2, "the clients' predictions, and the server's"),
    ("low_rank.py", "_as_matrices"): (4, "both factors of this network's two layers, for decompositions on the CPU"),
}
"""Where a round has to wait when it ends: by file and function how often at most, and for what."""


def check_waits(watch):
    """Each wait has its reason in :data:`NECESSARY_WAITS`, and occurs no more often than that says."""
    unknown = [request for request in watch.waits if place(request) not in NECESSARY_WAITS]
    assert unknown == []
    for key, count in Counter(map(place, watch.waits)).items():
        limit, reason = NECESSARY_WAITS[key]
        assert count <= limit, f"{key} waits {count} times for {reason}"


def place(request):
    return request.file, request.function


IN_TWO_ROUNDS = ("perada", "scaffold", "fedrep", "rolora")
"""Methods that are run for two rounds: in the second, clients begin from what they kept."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_stay_on_their_device_and_wait_only_where_they_must(case):
    rounds = 2 if case.method in IN_TWO_ROUNDS else 1
    watched = run_rounds(case.simulate(device="meta", sizes=(8, 5)), rounds)
    for part in (watched.steps, watched.full_steps, watched.scoring):
        assert part.waits == []
    for part in vars(watched).values():
        assert part.meetings == []
    for part in (watched.opening, watched.closing, watched.tuning):
        check_waits(part)
    assert watched.closing.waits
    # Also what a CUDA graph requires: it would send the same numbers in each step.
    assert watched.full_steps.sent == []


@pytest.mark.filterwarnings("ignore:.*the server rule cannot be applied:UserWarning")  # to so few clients
@pytest.mark.parametrize("rule", SERVER_RULES)
def test_server_rules_stay_on_their_device(rule):
    server_rule = make_rule(rule)
    if server_rule.needs_factors:
        simulation = simulate("fedavg", "net", LORA, device="meta", sizes=(4, 4, 3), rule=server_rule)
    else:
        simulation = simulate("fedavg", "net", device="meta", sizes=(4, 4, 3), rule=server_rule)
    watched = run_rounds(simulation)
    assert watched.closing.meetings == []
    check_waits(watched.closing)


def test_the_end_of_a_round_waits_as_often_for_many_tensors_as_for_few():
    few, many = (run_rounds(simulate("perada", backbone, device="meta")) for backbone in ("linear", "net"))
    assert [place(request) for request in few.closing.waits] == [place(request) for request in many.closing.waits]


PRIVATE = [name for name in NAMED if name not in ("moon", "fedrod")]
"""Methods that private training supports: the others look at the network's outputs."""


@pytest.mark.parametrize("method", PRIVATE)
def test_private_steps_never_wait(method):
    """Their noise is drawn on the CPU, and sent."""
    privacy = Privacy(1.0, secure_rng=False)
    watched = run_rounds(case_of(method, "group_net").simulate(device="meta", sizes=(4, 3), privacy=privacy))
    for part in (watched.steps, watched.full_steps):
        assert part.waits == []
        assert part.meetings == []


@pytest.mark.parametrize(
    "options",
    [
        {"physical_batch_size": 2, "secure_rng": True},
        {"engine": "opacus", "physical_batch_size": 2},
        {"clipping": "per_layer", "sampling": "shuffle"},
    ],
    ids=str,
)
def test_private_options_never_wait(options):
    privacy = Privacy(1.0, **{"secure_rng": False} | options)
    watched = run_rounds(simulate("perada", "group_net", device="meta", sizes=(8, 5), privacy=privacy))
    for part in (watched.steps, watched.full_steps):
        assert part.waits == []
        assert part.meetings == []


@pytest.mark.every(4)
@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_private_gradients_of_a_transformer_never_wait(adapter, engine):
    privacy = Privacy(1.0, secure_rng=False, engine=engine)
    watched = run_rounds(simulate("fedavg", "test_vit", adapter, device="meta", sizes=(4, 3), privacy=privacy))
    for part in (watched.steps, watched.full_steps):
        assert part.waits == []
        assert part.meetings == []


FORWARD = [
    ("net", "full", "folded"),
    ("net", "full", "loop"),
    ("test_resnet", "residual", "folded"),
    pytest.param("test_vit", "lora", "folded", marks=pytest.mark.slow),
    pytest.param("test_efficientnet", "residual", "folded", marks=pytest.mark.slow),
    pytest.param("test_resnet", "residual", "loop", marks=pytest.mark.slow),
    pytest.param("test_vit", "lora", "loop", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backbone", "adapter", "engine"), FORWARD)
def test_forward_passes_run_on_fake_tensors_of_cuda(backbone, adapter, engine):
    """In training and in evaluation; tensors of two devices in one operation, and reading a value, are errors there."""
    is_small = backbone in SMALL_NETWORKS
    built = build_backbone(
        small_network(backbone) if is_small else backbone,
        CLASSES,
        pretrained=False,
        image_size=32 if backbone == "test_vit" else None,
    )
    model = insert_adapter(built, adapter).model
    mode = FakeTensorMode()
    put_on_fake_cuda(model, mode)
    with mode:
        passes = Engine(model, engine)
        states = clone(expand(get_state(model), 2))  # training changes running statistics in place
        shape = (1, 6, 6) if is_small else (3, 32, 32)
        x = torch.empty(2, 4, *shape, device="cuda", dtype=torch.float64 if is_small else torch.float32)
        streams = Streams(*torch.empty(2, 2, dtype=torch.int64, device="cuda"))
        for counts in ((4, 4), (4, 2)) if is_small else ((4, 4),):
            logits = passes.logits(states, x, training=True, counts=counts, streams=streams)
            assert (logits.device.type, logits.shape) == ("cuda", (2, 4, CLASSES))
        logits = passes.shared_logits(states, x[0])
        assert (logits.device.type, logits.shape) == ("cuda", (2, 4, CLASSES))


def put_on_fake_cuda(model, mode):
    """Replace all tensors of a model by fake ones, which a machine without a GPU has too."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(parameter.detach())
                with mode:
                    on_cuda = torch.nn.Parameter(fake.to("cuda"), requires_grad=parameter.requires_grad)
                module._parameters[name] = on_cuda
        for name, buffer in module._buffers.items():
            if buffer is not None:
                fake = mode.from_tensor(buffer)
                with mode:
                    module._buffers[name] = fake.to("cuda")


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


class Sending(FedAvg):
    """FedAvg that copies a weight from the CPU in each step."""

    def client_step(self, step):
        loss = step.loss("local")
        step.descend("local", loss * torch.ones(len(loss)).to(loss.device))


def test_what_waits_or_is_elsewhere_is_noticed():
    watched = run_rounds(simulate(Reading(), device="meta"))
    waits = watched.steps.waits + watched.full_steps.waits
    assert len(waits) == 3  # the steps of the client with 12 images in batches of 4
    assert all("if float(step.loss" in request.text for request in waits)
    watched = run_rounds(simulate(Elsewhere(), device="meta"))
    assert len(watched.steps.meetings + watched.full_steps.meetings) == 3
    watched = run_rounds(simulate(Sending(), device="meta"))
    assert watched.full_steps.sent
