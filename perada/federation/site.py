# SPDX-License-Identifier: Apache-2.0
"""The clients' half of a round: the same for all clients of a simulation, and for the one client of a site."""

from collections.abc import Sequence

from perada.algorithms import Algorithm, Slot, Stacks
from perada.core.rounds import Phase, RoundPlan
from perada.core.states import State
from perada.engine.engine import Engine
from perada.engine.loss_scaling import KeptScales
from perada.federation.cohort import Cohort
from perada.federation.settings import Settings
from perada.privacy.protection import Protection


class Site:
    """Where clients train: what they keep and what reaches them come in, a :class:`Cohort` that trains comes out.

    Its ``close()`` gives what they keep from then on, and what they send. Nothing here knows the server's state.

    Attributes:
        engine, slot, settings: Of the run.
        protection: What the clients' images are protected by.
        scales: The clients' loss scales, in float16.
    """

    def __init__(self, engine: Engine, slot: Slot, settings: Settings, protection: Protection | None = None) -> None:
        self.engine, self.slot, self.settings, self.protection = engine, slot, settings, protection or Protection()
        self.scales = KeptScales(settings.loss_scaling)

    def open(self, plan: RoundPlan, kept: Stacks, received: State, factor: float = 1.0) -> Cohort:
        """Start local training of the plan's C clients.

        Args:
            plan: Who trains, and for how many steps.
            kept: What the clients keep, (C, ...) by role.
            received: What the server sent, (C, ...).
            factor: Of the learning rates in this round.
        """
        return self._cohort(self.settings.algorithm, self.settings.phases, plan, kept, received, factor, tuning=False)

    def open_tuning(self, plan: RoundPlan, kept: Stacks, received: State, factor: float = 1.0) -> Cohort:
        """Start the fine-tuning that follows the last round, as :meth:`open` starts a round."""
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        return self._cohort(tuning[0], [tuning[1]], plan, kept, received, factor, tuning=True)

    def _cohort(
        self,
        algorithm: Algorithm,
        phases: Sequence[Phase],
        plan: RoundPlan,
        kept: Stacks,
        received: State,
        factor: float,
        tuning: bool,
    ) -> Cohort:
        device = next(self.engine.model.parameters()).device
        return Cohort(
            self.engine,
            algorithm,
            self.slot,
            plan,
            phases,
            kept,
            received,
            self.settings.training,
            factor=factor,
            seed=self.settings.seed,
            clients_per_chunk=self.settings.clients_per_chunk,
            private=self.protection.open(plan, tuning),
            scales=self.scales.open("clients", len(plan.clients), device),
        )
