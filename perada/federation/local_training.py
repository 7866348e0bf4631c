# SPDX-License-Identifier: Apache-2.0
"""How clients train, and a part of a round's clients with its optimisers."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.states import State, clone
from perada.engine.loss_scaling import MaskedAdam, MaskedSGD

ClientOptimizer = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class LocalTraining:
    """How clients train.

    Attributes:
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``; started afresh each round and phase.
        lr: Learning rate by role; a role without one has that of ``local``.
        momentum: Of SGD.
        weight_decay: Of the optimiser.
        clip_norm: Each client's gradient of each role is scaled down to at most this norm; ``None``: not clipped.
        multilabel: Binary cross-entropy per label instead of cross-entropy.
    """

    optimizer: ClientOptimizer
    lr: dict[str, float]
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    multilabel: bool = False

    def make(self, role: str, leaves: list[Tensor], factor: float, masked: bool = False) -> torch.optim.Optimizer:
        """Optimiser of a role's stacked leaves.

        Args:
            role: Whose rate it has.
            leaves: (C, ...).
            factor: The schedule's factor of the rate.
            masked: Some clients may skip a step.
        """
        rate = self.lr.get(role, self.lr["local"]) * factor
        if masked and self.optimizer == "sgd":
            return MaskedSGD(leaves, rate, self.momentum, self.weight_decay)
        if masked:
            return MaskedAdam(leaves, rate, self.weight_decay, decoupled=self.optimizer == "adamw")
        if self.optimizer == "sgd":
            return torch.optim.SGD(leaves, lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(leaves, lr=rate, weight_decay=self.weight_decay)


class Chunk:
    """Clients ``start … stop`` of the cohort: full stacks, the leaves of those still training, their optimisers."""

    def __init__(self, full: Stacks, kept: Stacks, received: State, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.full = {role: clone(_rows(state, start, stop)) for role, state in full.items()}
        self.kept = {role: _rows(state, start, stop) for role, state in kept.items()}
        self.received = _rows(received, start, stop)
        self.states: Stacks = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.active = 0

    def begin(
        self, trained: dict[str, tuple[str, ...]], training: LocalTraining, factor: float, masked: bool = False
    ) -> None:
        """Start a phase: leaves for all clients of the chunk and fresh optimisers."""
        self.active = self.stop - self.start
        self.optimizers = {}
        for role, state in self.full.items():
            leaves = {key: state[key].detach().requires_grad_() for key in trained[role] if key in state}
            self.states[role] = {**state, **leaves}
            if leaves:
                self.optimizers[role] = training.make(role, list(leaves.values()), factor, masked)

    def narrow(self, active: int) -> None:
        """Go on with the first ``active`` clients only; tensors and optimiser states become views."""
        before, self.active = self.active, active
        for role, state in self.states.items():
            views = {key: v.detach()[:active].requires_grad_(v.requires_grad) for key, v in state.items()}
            if role in self.optimizers:
                _replace(self.optimizers[role], {id(state[key]): views[key] for key in state}, before)
            self.states[role] = views


def _replace(optimizer: torch.optim.Optimizer, views: dict[int, Tensor], before: int) -> None:
    """Put shorter views in the place of an optimiser's parameters of ``before`` clients, and cut its state alike."""
    for group in optimizer.param_groups:
        shorter = [views[id(parameter)] for parameter in group["params"]]
        for old, new in zip(group["params"], shorter, strict=True):
            state = optimizer.state.pop(old, {})
            optimizer.state[new] = {
                name: value[: len(new)] if isinstance(value, Tensor) and value.shape[:1] == (before,) else value
                for name, value in state.items()
            }
        group["params"] = shorter


def _rows(state: State, start: int, stop: int) -> State:
    return {key: value[start:stop] for key, value in state.items()}
