# SPDX-License-Identifier: Apache-2.0
"""The server's turn at the end of a round."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perada.algorithms import ServerStep, Slot
from perada.engine import Engine
from perada.loss_scaling import KeptScales
from perada.privacy.client_level import floor_variances
from perada.ranks import Ranks
from perada.refinement import refine
from perada.server import Updates, client_weights
from perada.settings import FederationData, Settings
from perada.states import State, clone


@dataclass
class ServerTurn:
    """Lets the algorithm make the next global state of what the clients sent. All ranks take it alike.

    Attributes:
        engine: Runs the states.
        slot: Names of the trained tensors.
        settings: How the rounds go.
        data: For the clients' sizes and the public images.
        ranks: The processes.
        scales: The student's loss scale.
        progress: Wraps the distillation's steps in a progress bar.
        diverged: Whether a distillation became NaN or infinite, and its starting point was kept.
        metrics: What was measured.
    """

    engine: Engine
    slot: Slot
    settings: Settings
    data: FederationData
    ranks: Ranks
    scales: KeptScales
    progress: Callable[[Tensor], Iterable[Tensor]]
    diverged: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __call__(
        self,
        round: int,
        clients: Sequence[int],
        num_clients: int,
        updates: Updates,
        previous: State,
        kept: dict[str, State],
    ) -> tuple[State, dict[str, State]]:
        """Take the turn.

        Args:
            round: Counted from 0.
            clients: Who sent the updates.
            num_clients: M.
            updates: What they sent.
            previous: Global state before the round.
            kept: The server's own tensors.

        Returns:
            What changes of the global state, and the server's own tensors from now on.
        """
        settings = self.settings

        def distill(student: State, teachers: Mapping[str, Tensor], average_from: float | None = None) -> State:
            device = next(iter(student.values())).device
            scales = self.scales.open("student", 1, device)
            refined = refine(
                self.engine,
                settings.distillation,
                self.data,
                round,
                student,
                teachers,
                self.slot.parameters,
                multilabel=settings.training.multilabel,
                ranks=self.ranks,
                average_from=average_from,
                progress=self.progress,
                scales=scales,
            )
            if scales is not None:
                self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
                skipped = self.metrics.get("server/skipped_steps", 0.0) + float(scales.skipped)
                self.metrics["server/skipped_steps"] = skipped
            finite = is_finite(refined)
            self.diverged |= not finite
            return refined if finite else student

        server = ServerStep(
            round,
            tuple(clients),
            num_clients,
            self.slot,
            settings.seed,
            previous,
            updates,
            client_weights(settings.weighting, [self.data.train_sizes[client] for client in clients]),
            dict(kept),
            settings.rule,
            distill,
        )
        state = clone(settings.algorithm.server_step(server))
        if settings.protection.clients is not None:
            state = floor_variances(state)
        return state, server.state


def is_finite(state: State) -> bool:
    """Whether there is neither a NaN nor an infinity in a state."""
    return all(bool(value.isfinite().all()) for value in state.values())
