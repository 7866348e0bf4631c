# SPDX-License-Identifier: Apache-2.0
"""One local step of many clients × 64 images, folded, against one step of a single model on the same images.

By number of clients, by adapter and its size. The single model is the limit: the same network, adapter and images, one
batch, nothing per client. The loop over clients (one model, one client after another, batch 64) is what simulators do
otherwise.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import timm
import torch
import torch.nn.functional as F

from benchmarks.timing import growth, in_new_process, ratio, take_turns
from perada.core.seeding import Streams
from perada.core.states import State, expand, get_state, parameter_keys, train_mode
from perada.engine import Engine, EngineName
from perada.engine.engine import client_losses
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.tasks import Classification

Way = Literal["folded", "loop", "single"]
ROWS = 64
"""Images of a client."""
CLASSES = 10


@dataclass(frozen=True)
class Adapter:
    """An adapter to be measured.

    Attributes:
        label: Name in the table.
        name: Name of the adapter.
        clients: Numbers of clients.
        options: Options of the adapter.
    """

    label: str
    name: str
    clients: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


ADAPTERS = (
    Adapter("residual", "residual", clients=(1, 4, 8, 16)),
    Adapter("lora, r=4", "lora", clients=(8,), options={"r": 4}),
    Adapter("lora, r=16", "lora", clients=(8,), options={"r": 16}),
    Adapter("head", "head", clients=(8,)),
)


@dataclass(frozen=True)
class Case:
    """A step to be measured."""

    adapter: Adapter
    clients: int
    backbone: str
    bf16: bool
    device: torch.device


def cohort_step(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 at 32×32 in fp32 and in bf16, both with channels_last; the three ways take turns."""
    backbone = "test_resnet" if quick else "resnet18"
    for adapter in ADAPTERS:
        for clients in (2,) if quick else adapter.clients:
            for bf16 in (False, True):
                case = Case(adapter, clients, backbone, bf16, device)
                steps = {way: _step(way, case) for way in get_args(Way)}
                seconds = take_turns(steps, device, repeats, warm_up=2)
                row = {
                    "adapter": adapter.label,
                    "clients": clients,
                    "precision": "bf16" if bf16 else "fp32",
                    "folded / single": ratio(seconds["folded"], seconds["single"]),
                    "loop / folded": ratio(seconds["loop"], seconds["folded"]),
                    "images per second": round(clients * ROWS / statistics.median(seconds["folded"])),
                }
                if not quick:
                    row["peak MB, folded"] = round(_peak_memory("folded", case))
                    row["peak MB, loop"] = round(_peak_memory("loop", case))
                yield row


def _peak_memory(way: Way, case: Case) -> float:
    """Return the growth of memory by the second step in MB."""
    if case.device.type == "cuda":
        return _growth_by_step(way, case)
    # A GPU's peak can be reset; that of a process counts only if nothing ran in it before.
    return in_new_process(_growth_by_step, way, case)


def _growth_by_step(way: Way, case: Case) -> float:
    step = _step(way, case)
    step()
    return growth(step, case.device)


def _step(way: Way, case: Case) -> Callable[[], None]:
    """Return a function that takes one SGD step on all images."""
    torch.manual_seed(0)
    backbone = build_backbone(timm.create_model(case.backbone, num_classes=CLASSES))
    model = insert_adapter(backbone, case.adapter.name, **case.adapter.options).model.to(case.device)
    x = torch.randn(case.clients, ROWS, 3, 32, 32, device=case.device)
    y = torch.randint(0, CLASSES, (case.clients, ROWS), device=case.device)
    model = model.to(memory_format=torch.channels_last)
    if way == "single":
        return _single_step(model, x, y, case.bf16)
    return _stacked_step(model, x, y, case.bf16, way)


def _single_step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, bf16: bool) -> Callable[[], None]:
    """Return a step of one model on the images of all clients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    images = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    labels = y.flatten()

    def step() -> None:
        train_mode(model)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Chunk:
    """Clients that are trained in one pass: their places, stacked states, optimizer, and streams of dropout."""

    clients: slice
    state: State
    optimizer: torch.optim.Optimizer
    streams: Streams


def _stacked_step(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, bf16: bool, engine_name: EngineName
) -> Callable[[], None]:
    """Return a step of all clients in one pass, or for the loop one client after another, as a cohort takes it."""
    engine = Engine(model, engine_name, channels_last=True)
    trained = set(parameter_keys(model))
    num_clients = len(x)
    chunk_size = num_clients if engine_name == "folded" else 1
    chunks = []
    for start in range(0, num_clients, chunk_size):
        state = {}
        for key, value in expand(get_state(model), chunk_size).items():
            state[key] = value.clone().requires_grad_(key in trained)
        optimizer = torch.optim.SGD([value for value in state.values() if value.requires_grad], lr=0.01)
        streams = Streams.derived(0, "dropout", clients=range(start, start + chunk_size), device=x.device)
        chunks.append(Chunk(slice(start, start + chunk_size), state, optimizer, streams))

    def step() -> None:
        for chunk in chunks:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                logits = engine.logits(chunk.state, x[chunk.clients], training=True, streams=chunk.streams)
                loss = client_losses(logits, y[chunk.clients], [ROWS] * chunk_size, Classification()).sum()
            loss.backward()
            chunk.optimizer.step()
            chunk.optimizer.zero_grad()

    return step
