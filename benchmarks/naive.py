# SPDX-License-Identifier: Apache-2.0
"""A round of PerAda as federated frameworks run it, in plain torch, and the limit: one model on large batches.

The naive way: one model whose trained tensors are copied in and out, one client after another with a ``DataLoader`` of
its own, copied state dicts, their mean, and a distillation that runs all teachers, one after another, in every step. It
takes the same steps on the same images as perada (``tests/test_benchmarks.py`` compares the states).
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
        model: The network with its adapter; it is this object's own from now on.
        data: The clients' images and the public ones.
        device: Where to compute.
        bf16: Compute in bfloat16 where autocast does, with channels_last; single precision and NCHW otherwise.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, data: FederatedData, device: torch.device, bf16: bool = False
    ) -> None:
        self.format = torch.channels_last if bf16 else torch.contiguous_format
        self.workload, self.data, self.device, self.bf16 = workload, data, device, bf16
        self.model = model.to(device).to(memory_format=self.format)
        self.keys = frozenset(trained_keys(model))
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.first = self.global_state = self._copy_out()
        self.personal: dict[int, State] = {}

    def round(self, federation: FederatedDataModule, round: int) -> dict[str, float]:
        """Run a round with the clients and images that ``federation`` draws; return the seconds of its parts."""
        began = clock(self.device)
        updates = self._train(federation.plan(round))
        trained = clock(self.device)
        mean = {key: torch.stack([update[key] for update in updates]) for key in updates[0]}
        self.global_state = {
            key: value.mean(0) if value.is_floating_point() else value[0] for key, value in mean.items()
        }
        options = self.workload.distillation
        if options.steps:
            self.distil(updates, federation.public_indices(round, options.steps, options.batch_size))
        ended = clock(self.device)
        return {"local": trained - began, "server": ended - trained, "round": ended - began}

    def _train(self, plan: RoundPlan) -> list[State]:
        """Train personal and local states of each client in turn; return what the clients send."""
        updates = []
        for client, steps in zip(plan.clients, plan.steps[0], strict=True):
            size = self.workload.batch * self.workload.steps
            batches = batch_indices(size, self.workload.batch, steps, 0, "batches", plan.round, client)
            start = self.personal.get(client, self.first)
            self.personal[client] = self._descend(client, start, batches, self.global_state)
            updates.append(self._descend(client, self.global_state, batches))
        return updates

    def _descend(self, client: int, start: State, indices: Tensor, anchor: State | None = None) -> State:
        """Local steps of one client from ``start``, pulled towards ``anchor`` if there is one."""
        self._copy_in(self.model, start)
        train_mode(self.model)
        optimizer = torch.optim.SGD(self.parameters, lr=LR)
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        for x, y in self._batches(self.data.train[client], indices):
            with self._autocast():
                logits = self.model(x)
            loss = F.cross_entropy(_full(logits), y)
            if anchor is not None:
                pairs = zip(self.parameters, names, strict=True)
                loss = loss + PROX / 2 * sum((value - anchor[name]).square().sum() for value, name in pairs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self._copy_out()

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
                logits = sum(_full(teacher(x)) for teacher in teachers) / len(teachers)
            with self._autocast():
                student = self.model(x)
            target = F.log_softmax(logits, -1)
            loss = F.kl_div(F.log_softmax(_full(student), -1), target, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.global_state = self._copy_out()

    def _batches(self, dataset: object, indices: Tensor) -> Iterator[list[Tensor]]:
        pinned = self.device.type == "cuda"
        for batch in DataLoader(dataset, batch_sampler=indices.tolist(), pin_memory=pinned):
            x, *rest = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            yield [x.contiguous(memory_format=self.format), *rest]

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _copy_in(self, model: nn.Module, state: State) -> None:
        model.load_state_dict(state, strict=False)

    def _copy_out(self) -> State:
        return copy.deepcopy({key: value for key, value in self.model.state_dict().items() if key in self.keys})


class Limit:
    """One model on the same images in batches of C·B: nothing is loaded, nothing belongs to a client.

    Args:
        workload: What is trained, and for how long.
        model: The network with its adapter, in perada's memory format; it is this object's own from now on.
        device: Where to compute.
        bf16: Compute in bfloat16 where autocast does.
    """

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device, bf16: bool = False) -> None:
        self.workload, self.device, self.bf16, self.model = workload, device, bf16, model.to(device)
        rows = workload.sampled * workload.batch
        x = torch.randn(rows, 3, workload.side, workload.side, device=device)
        convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
        self.x = x.contiguous(memory_format=torch.channels_last) if convolutions > 1 else x
        self.y = torch.arange(rows, device=device) % workload.classes
        self.optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=LR)
        train_mode(model)

    def local(self) -> float:
        """Take the steps of a round's personal and local training; return the seconds."""
        began = clock(self.device)
        for _ in range(2 * self.workload.steps):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.model(self.x)
            F.cross_entropy(_full(logits), self.y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clock(self.device) - began


def _full(logits: Tensor) -> Tensor:
    """Single precision at least, as perada takes losses."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits
