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
from perada.privacy.options import ClientPrivacy, Privacy, test_mode
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

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run follows from the seed, which is then written nowhere."""
        return test_mode(self.privacy, self.client_privacy)


def check_rule(settings: Settings, public: int, labelled: int) -> None:
    """Refuse, by a ValueError, a server rule that predicts images that the server has not; their numbers are given."""
    rule, algorithm = settings.rule, settings.algorithm
    name = f"server_rule={type(rule).__name__}"
    if rule.needs == "public" and not public:
        raise ValueError(
            f"{name} looks at predictions on public images, and there are none; give a public set (public=...), or "
            "choose another rule"
        )
    if rule.needs == "labelled" and not labelled:
        raise ValueError(
            f"{name} looks at predictions on labelled images of the server, and there are none; give server_validation "
            "(or validation_fraction), or choose another rule"
        )
    if rule.needs and not algorithm.global_model:
        raise ValueError(
            f"{name} looks at predictions of what clients send, and the clients of {algorithm.kind} do not send whole "
            "models; choose another rule"
        )
