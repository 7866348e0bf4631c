# SPDX-License-Identifier: Apache-2.0
"""What a round did, and what of it is measured."""

from dataclasses import dataclass, field

from torch import Tensor

from perada.algorithms import Slot
from perada.cohort import Cohort
from perada.settings import Settings
from perada.states import State, megabytes, numel


@dataclass
class RoundReport:
    """What a round did.

    Attributes:
        broken: Clients whose training became NaN or infinite and who were left out.
        diverged: The distillation became NaN or infinite, and its starting point was kept.
        broken_server: The server's step became NaN or infinite, and the global state stayed as it was.
        metrics: Training losses, numbers of parameters, megabytes sent.
    """

    broken: list[int] = field(default_factory=list)
    diverged: bool = False
    broken_server: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


def round_metrics(
    settings: Settings, slot: Slot, global_state: State, cohort: Cohort, updates: State, finite: Tensor
) -> dict[str, float]:
    """Training loss, and what one client trains and all of them send.

    Args:
        settings: How the rounds go.
        slot: Names of the trained tensors.
        global_state: As it was sent.
        cohort: The round's clients.
        updates: What they sent, (C, ...).
        finite: Indices of those whose training stayed finite.
    """
    algorithm, full = settings.algorithm, cohort.chunks[0].full
    received = sum(megabytes(chunk.received) for chunk in cohort.chunks)
    if algorithm.compares:  # every client is sent all models, and takes one
        received = megabytes(global_state) * len(cohort.plan.clients)
    names = {
        (role, name)
        for role, state in full.items()
        for phase in settings.phases
        for name in algorithm.trained(role, phase.name, slot)
        if name in state
    }
    sent = {key: value[0] for key, value in updates.items()}
    metrics = {
        "params/trained": float(sum(full[role][name][0].numel() for role, name in names)),
        "params/sent": float(numel({key: value for key, value in sent.items() if key in slot.parameters})),
        "comm/up_mb": megabytes(updates),
        "comm/down_mb": received if algorithm.sends else 0.0,
    }
    shown = {} if settings.protection.clients is not None else cohort.mean_losses()  # no ledger counts them
    if cohort.scales is not None:
        metrics["train/skipped_steps"] = float(cohort.scales.skipped.sum())
    return metrics | {f"train/{role}_loss": float(losses[finite].mean()) for role, losses in shown.items()}
