# SPDX-License-Identifier: Apache-2.0
"""How the rounds of a run go: who may be drawn, and for what training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perada.core.checks import check_whole
from perada.core.rounds import BatchSize, Phase, PrivateSampling, RoundPlan, make_plan, sample_cohort


@dataclass(frozen=True)
class Schedule:
    """What all rounds have in common: the options of :meth:`perada.data.FederatedDataModule.configure_rounds`.

    Raises:
        ValueError: If there are no phases, or ``private`` is for another number of them.
    """

    clients_per_round: int | None = None
    phases: tuple[Phase, ...] = (Phase(),)
    private: PrivateSampling | None = None
    eligible: Callable[[Sequence[int]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("there are no phases of local training; give at least one")
        if self.private is not None and len(self.private.streams) != len(self.phases):
            raise ValueError(
                f"private names the streams of {len(self.private.streams)} phases, and there are {len(self.phases)}; "
                "name those of each phase"
            )

    def check_clients(self, num_clients: int) -> None:
        """Refuse to draw more clients than there are."""
        hint = f"there are {num_clients} clients"
        check_whole("clients_per_round", self.clients_per_round, most=num_clients, optional=True, hint=hint)

    def plan(self, seed: int, round: int, sizes: Sequence[int], batch_size: BatchSize) -> RoundPlan:
        """Draw the clients of a round by the run's seed, and count their steps; refused if none may take part."""
        clients = sample_cohort(seed, round, len(sizes), self.clients_per_round, self.eligible)
        return make_plan(round, clients, sizes, self.phases, batch_size)
