# SPDX-License-Identifier: Apache-2.0
"""What a round did, and what of it is measured."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from perada.algorithms import Slot, ensemble_of
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares
from perada.core.states import State, expand, megabytes, numel
from perada.federation.cohort import Cohort, Trained
from perada.federation.settings import Settings


@dataclass
class RoundReport:
    """What a round did; ``metrics`` are training losses, numbers of parameters, megabytes sent.

    What became NaN or infinite does not count: ``broken`` clients were left out, a distillation that ``diverged`` kept
    its starting point, and with ``broken_server`` the global state stayed as it was. Clients that are ``far`` sent a
    change so many times as long as the median. ``failed`` are those of whom a sample could not be read, and why; in a
    private run they train without it.
    """

    broken: list[int] = field(default_factory=list)
    diverged: bool = False
    broken_server: bool = False
    far: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Outcomes(NamedTuple):
    """What became of the C clients of a round, known to all ranks; every tensor is (C,), on the CPU."""

    finite: Tensor  # whose training stayed finite
    counts: Tensor  # whose update counts
    losses: dict[str, Tensor]  # mean over a client's steps, by role, where the role has one
    skipped: Tensor | None  # steps that were, in float16

    def broken(self, plan: RoundPlan) -> list[int]:
        """The clients whose training became NaN or infinite."""
        return [client for client, fine in zip(plan.clients, self.finite.tolist(), strict=True) if not fine]


def gather_outcomes(cohort: Cohort, trained: Trained, shares: Shares, ranks: Ranks) -> Outcomes:
    """Put together what the ranks know of their clients, or of a stand-in where one has none; one collective."""
    finite, counts, places, clients = trained.finite, trained.counts, shares.places, len(shares.plan.clients)
    roles, means = list(cohort.losses), cohort.mean_losses()
    known = [torch.full_like(finite, role in means) for role in roles]
    skipped = torch.zeros_like(finite) if cohort.scales is None else cohort.scales.skipped
    rows = [finite, counts, skipped, *known, *(means.get(role, cohort.losses[role]) for role in roles)]
    table = torch.zeros(len(rows), clients, dtype=torch.float64)
    if places:
        table[:, places] = torch.stack([row.detach().to("cpu", torch.float64) for row in rows])[:, : len(places)]
    ranks.sum_([table])
    losses = zip(roles, table[3 : 3 + len(roles)], table[3 + len(roles) :], strict=True)
    return Outcomes(
        table[0].bool(),
        table[1].bool(),
        {role: row.float() for role, has, row in losses if has.any()},
        None if cohort.scales is None else table[2],
    )


def round_metrics(
    settings: Settings, slot: Slot, global_state: State, cohort: Cohort, sent: State, outcomes: Outcomes
) -> dict[str, float]:
    """Training losses, and what one client trains and all of them send; ``cohort`` and ``sent`` are of some of them."""
    algorithm, full, clients = settings.algorithm, cohort.chunks[0].full, len(outcomes.finite)
    # Every client is sent all models where it compares them, and takes one.
    received = (
        global_state if ensemble_of(algorithm).compares else {k: value[0] for k, value in cohort.received.items()}
    )
    names = {
        (role, name)
        for role, state in full.items()
        for phase in settings.phases
        for name in algorithm.trained(role, phase.name, slot)
        if name in state
    }
    sent = {key: value[0] for key, value in sent.items()}
    metrics = {
        "params/trained": float(sum(full[role][name][0].numel() for role, name in names)),
        "params/sent": float(numel({key: value for key, value in sent.items() if key in slot.parameters})),
        "comm/up_mb": megabytes(expand(sent, clients)),
        "comm/down_mb": megabytes(expand(received, clients)) if algorithm.sends else 0.0,
    }
    shown = {} if settings.client_privacy is not None else outcomes.losses  # no ledger counts them
    if outcomes.skipped is not None:
        metrics["train/skipped_steps"] = float(outcomes.skipped.sum())
    return metrics | {f"train/{role}_loss": float(losses[outcomes.finite].mean()) for role, losses in shown.items()}
