# SPDX-License-Identifier: Apache-2.0
"""A round of PerAda as federated frameworks run it, in plain torch, and the limit: one model on large batches.

The naive way: one model whose trained tensors are copied in and out, one client after another with its own
``DataLoader``, copied state dicts, their mean, and a distillation that runs all teachers, one after another, in every
step. It takes the same steps on the same images as perada (``tests/test_benchmarks.py`` compares the states).
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.timing import clock
from benchmarks.workload import LR, PROX, Workload
from perada.core.rounds import RoundPlan, batch_indices
from perada.core.states import State, train_mode, trained_keys
from perada.data import FederatedData, FederatedDataModule


class Naive:
    """A server and its clients, each round in plain torch.

    Args:
        workload: What is trained, and for how long.
        model: The network with its adapter, which must not be used elsewhere.
        data: The clients' images and the public ones.
        device: Where to compute.
        bf16: Whether to compute in bfloat16 where autocast does, with channels_last; else in float32 with NCHW.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, data: FederatedData, device: torch.device, bf16: bool = False
    ) -> None:
        self.workload = workload
        self.data = data
        self.device = device
        self.bf16 = bf16
        self.format = torch.channels_last if bf16 else torch.contiguous_format
        self.model = model.to(device).to(memory_format=self.format)
        self.keys = frozenset(trained_keys(model))
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.initial_state = self._copy_out()
        self.global_state = self.initial_state
        self.personal: dict[int, State] = {}

    def round(self, federation: FederatedDataModule, round_number: int) -> dict[str, float]:
        """Run a round with the clients and images that ``federation`` draws, and return the seconds of its parts."""
        started_at = clock(self.device)
        updates = self._train(federation.plan(round_number))
        trained_at = clock(self.device)
        self.global_state = _mean_state(updates)
        options = self.workload.distillation
        if options.steps:
            self.distil(updates, federation.public_indices(round_number, options.steps, options.batch_size))
        ended_at = clock(self.device)
        return {
            "local": trained_at - started_at,
            "server": ended_at - trained_at,
            "round": ended_at - started_at,
        }

    def _train(self, plan: RoundPlan) -> list[State]:
        """Train personal and local states of one client after another, and return what the clients send."""
        updates = []
        for client, steps in zip(plan.clients, plan.steps[0], strict=True):
            num_images = self.workload.batch * self.workload.steps
            batches = batch_indices(num_images, self.workload.batch, steps, 0, "batches", plan.round, client)
            personal = self.personal.get(client, self.initial_state)
            self.personal[client] = self._descend(client, personal, batches, anchor=self.global_state)
            updates.append(self._descend(client, self.global_state, batches))
        return updates

    def _descend(self, client: int, start: State, indices: Tensor, anchor: State | None = None) -> State:
        """Return a client's state after local steps from ``start``, pulled towards ``anchor`` if there is one."""
        self._copy_in(self.model, start)
        train_mode(self.model)
        optimizer = torch.optim.SGD(self.parameters, lr=LR)
        for x, y in self._batches(self.data.train[client], indices):
            with self._autocast():
                logits = self.model(x)
            loss = F.cross_entropy(_float32(logits), y)
            if anchor is not None:
                loss = loss + PROX / 2 * self._squared_distance(anchor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self._copy_out()

    def _squared_distance(self, anchor: State) -> Tensor:
        """Return the squared distance of the trained parameters to those of a state."""
        distance = torch.zeros((), device=self.device)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                distance = distance + (parameter - anchor[name]).square().sum()
        return distance

    def distil(self, updates: list[State], indices: Tensor) -> None:
        """Distil the clients' mean logits into the mean of their states."""
        options = self.workload.distillation
        teachers = [copy.deepcopy(self.model) for _ in updates]
        for teacher, update in zip(teachers, updates, strict=True):
            self._copy_in(teacher, update)
            teacher.eval()
        self._copy_in(self.model, self.global_state)
        self.model.eval()
        optimizer = torch.optim.Adam(self.parameters, lr=options.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        assert self.data.public is not None
        for (x,) in self._batches(self.data.public, indices):
            with torch.no_grad(), self._autocast():
                teacher_logits = sum(_float32(teacher(x)) for teacher in teachers) / len(teachers)
            with self._autocast():
                student_logits = self.model(x)
            loss = F.kl_div(
                F.log_softmax(_float32(student_logits), -1),
                F.log_softmax(teacher_logits, -1),
                log_target=True,
                reduction="batchmean",
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.global_state = self._copy_out()

    def _batches(self, dataset: object, indices: Tensor) -> Iterator[list[Tensor]]:
        is_pinned = self.device.type == "cuda"
        for batch in DataLoader(dataset, batch_sampler=indices.tolist(), pin_memory=is_pinned):
            x, *labels = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            yield [x.contiguous(memory_format=self.format), *labels]

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _copy_in(self, model: nn.Module, state: State) -> None:
        model.load_state_dict(state, strict=False)

    def _copy_out(self) -> State:
        return copy.deepcopy({key: value for key, value in self.model.state_dict().items() if key in self.keys})


def _mean_state(states: list[State]) -> State:
    """Return the mean of states; integers, such as BatchNorm's counters, are those of the first state."""
    mean = {}
    for key, first_value in states[0].items():
        if first_value.is_floating_point():
            mean[key] = torch.stack([state[key] for state in states]).mean(0)
        else:
            mean[key] = first_value
    return mean


class Limit:
    """One model on the same images in batches of C · B: no image is loaded, and no state belongs to a client.

    Args:
        workload: What is trained, and for how long.
        model: The network with its adapter, in perada's memory format, which must not be used elsewhere.
        device: Where to compute.
        bf16: Whether to compute in bfloat16 where autocast does.
    """

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device, bf16: bool = False) -> None:
        self.workload = workload
        self.device = device
        self.bf16 = bf16
        self.model = model.to(device)
        num_images = workload.sampled * workload.batch
        self.x = torch.randn(num_images, 3, workload.side, workload.side, device=device)
        num_convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
        if num_convolutions > 1:  # one is the patch embedding of a transformer
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.arange(num_images, device=device) % workload.classes
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR)
        train_mode(model)

    def local(self) -> float:
        """Take the steps of a round's personal and local training, and return the seconds."""
        started_at = clock(self.device)
        for _ in range(2 * self.workload.steps):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.model(self.x)
            F.cross_entropy(_float32(logits), self.y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clock(self.device) - started_at


def _float32(logits: Tensor) -> Tensor:
    """Return logits in at least single precision, in which perada computes losses."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits
