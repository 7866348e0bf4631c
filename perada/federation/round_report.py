# SPDX-License-Identifier: Apache-2.0
"""What a round reports: metrics, and how far each client's update went."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from perada.algorithms import Slot
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares
from perada.core.states import State, expand, megabytes, numel
from perada.federation.cohort import Cohort, Trained
from perada.federation.settings import Settings
from perada.server.aggregate import double


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
    received = global_state if algorithm.compares else {k: value[0] for k, value in cohort.received.items()}
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


FAR = 50.0
"""A change that is so many times as long as the median of the round's, step for step, is named.

Of honest clients with two images, changes were 20 times as long.
"""


def look_at(
    names: Sequence[str],
    sent: State,
    received: State,
    shares: Shares,
    good: Sequence[int],
    ranks: Ranks,
    shown: bool,
) -> tuple[dict[int, float], dict[str, float]]:
    """The clients whose updates are far from the others', and the round's metrics of the updates where ``shown``."""
    places, plan = shares.places, shares.plan
    received = {key: value[: len(places)] for key, value in received.items()}
    found = changes(names, sent, received, places, good, len(plan.clients), ranks, cosines=shown)
    return far(found[0], plan), change_metrics(found, plan.clients) if shown else {}


def changes(
    names: Iterable[str],
    sent: State,
    received: State,
    places: Sequence[int],
    good: Sequence[int],
    clients: int,
    ranks: Ranks,
    cosines: bool,
) -> Tensor:
    """Norms of the clients' changes of the parameters ``names``, all together, and their cosines with the mean change.

    Running statistics do not count: those of an honest client with two images may be far from all others.

    Args:
        names: Of the trained parameters.
        sent: What this process's clients sent (c, ...).
        received: What they had received (c, ...).
        places: Where they stand among the round's C clients.
        good: Those of the C whose updates count.
        clients: C.
        ranks: The processes; all call it.
        cosines: Whether to compute them, which moves a state between processes.

    Returns:
        (2, C) in float64, on the CPU; NaN for those that do not count, and for cosines that are not computed.
    """
    rows = [row for row, place in enumerate(places) if place in set(good)]
    own = [places[row] for row in rows]
    table = torch.zeros(2, clients, dtype=torch.float64)
    length = torch.zeros((), dtype=torch.float64)
    for key in names:
        if key not in sent or key not in received or received[key].shape != sent[key].shape:
            continue
        change = (double(sent[key][rows]) - double(received[key][rows])).flatten(1)
        table[0, own] += change.square().sum(1).to(table)
        if cosines:
            mean = change.sum(0) / len(good)
            ranks.sum_([mean])
            table[1, own] += (change * mean).sum(1).to(table)
            length += mean.square().sum().to(length)
    ranks.sum_([table])
    norms = table[0].sqrt()
    left_out = torch.ones(clients, dtype=torch.bool).index_fill(0, torch.tensor(good, dtype=torch.long), False)
    found = torch.stack([norms, table[1] / (norms * length.sqrt()) if cosines else torch.full_like(norms, torch.nan)])
    return found.masked_fill(left_out, torch.nan)


def far(norms: Tensor, plan: RoundPlan) -> dict[int, float]:
    """The clients of a round whose change (C,) is much longer than the others': by how many times the median.

    A client that took more steps than the median of them may have moved so many times as far.

    >>> plan = RoundPlan(0, (4, 6, 7, 9), ((60, 3, 2, 2),))
    >>> far(torch.tensor([20.0, 1.0, 1.5, 300.0]), plan)
    {9: 200.0}
    """
    middle = float(norms.nanmedian())
    steps = [sum(own) for own in zip(*plan.steps, strict=True)]
    usual = max(1, median_low(steps))
    found = {}
    for client, norm, taken in zip(plan.clients, norms.tolist(), steps, strict=True):
        if middle > 0 and norm > FAR * middle * max(1, taken / usual):
            found[client] = norm / middle
    return found


def change_metrics(found: Tensor, clients: Sequence[int]) -> dict[str, float]:
    """The round's metrics of :func:`changes`: the longest change and the one against the others, and whose they are."""
    norms, cosines = found
    longest, against = int(norms.nan_to_num(-1).argmax()), int(cosines.nan_to_num(2).argmin())
    return {
        "updates/norm_median": float(norms.nanmedian()),
        "updates/norm_max": float(norms[longest]),
        "updates/norm_max_client": float(clients[longest]),
        "updates/cosine_min": float(cosines[against]),
        "updates/cosine_min_client": float(clients[against]),
    }
