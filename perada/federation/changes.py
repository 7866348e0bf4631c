# SPDX-License-Identifier: Apache-2.0
"""How far each client's update is from what it received: who sends something else than the others."""

from collections.abc import Iterable, Sequence
from statistics import median_low

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares
from perada.core.states import State
from perada.server.aggregate import double

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
