# SPDX-License-Identifier: Apache-2.0
"""How the rounds of a federation go, and what they need of the data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from perada.algorithms import Algorithm
from perada.core.batches import AnyBatch
from perada.core.rounds import Phase, RoundPlan
from perada.engine.loss_scaling import LossScaling
from perada.federation.cohort import LocalTraining
from perada.federation.store import Storage
from perada.privacy.options import ClientPrivacy, Privacy
from perada.server import Distillation, Mean, ServerRule
from perada.server.aggregate import Weighting
from perada.server.distill import ServerData

Loader = Callable[[RoundPlan], Iterable[AnyBatch]]
"""Gives the prepared local steps of a plan."""


class FederationData(ServerData, Protocol):
    """What a round needs of the data (:class:`perada.data.FederatedDataModule` has it)."""

    train_sizes: tuple[int, ...]

    @property
    def public_size(self) -> int:
        """Number of public images."""

    def test_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Prepared images and labels that clients are evaluated on, each once."""


@dataclass(frozen=True)
class Settings:
    """How the rounds go, as was asked for."""

    algorithm: Algorithm
    training: LocalTraining
    distillation: Distillation
    weighting: Weighting
    phases: tuple[Phase, ...]
    seed: int
    clients_per_round: int | None = None  # drawn in each round; by default all
    clients_per_chunk: int | None = None  # in one forward and backward pass; by default all of the round's
    rule: ServerRule = field(default_factory=Mean)
    privacy: Privacy | None = None
    client_privacy: ClientPrivacy | None = None
    storage: Storage = field(default_factory=Storage)
    loss_scaling: LossScaling | None = None  # in float16
    refuse_far: bool = False  # leave out updates much longer than the others
    diagnostics: tuple[str, ...] = ()  # of perada.federation.diagnostics, to be measured each round

    @property
    def private(self) -> bool:
        """Whether any privacy was asked for."""
        return self.privacy is not None or self.client_privacy is not None


def check_public_rule(settings: Settings, public_size: int) -> None:
    """Refuse, by a ValueError, a server rule that predicts public images where it cannot."""
    rule, algorithm = settings.rule, settings.algorithm
    if not rule.needs_public:
        return
    if not public_size:
        raise ValueError(
            f"server_rule={type(rule).__name__} looks at predictions on public images, and the data has no public set; "
            "give one (public=...), or choose another rule"
        )
    if not algorithm.global_model:
        raise ValueError(
            f"server_rule={type(rule).__name__} looks at predictions of what clients send, and the clients of "
            f"{algorithm.kind} do not send whole models; choose another rule"
        )
