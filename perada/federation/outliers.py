# SPDX-License-Identifier: Apache-2.0
"""Updates that are much longer than the others of their round: what they are, and the option that drops them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice
from perada.core.rounds import RoundPlan
from perada.core.states import (
    State,
    as_matrix,
    column_blocks,
    device_of,
    double,
    double_dtype,
    to_device_async,
)
from perada.privacy.options import ClientPrivacy
from perada.server import Updates
from perada.server.aggregate import names_with_change, squared_changes
from perada.server.sums import SecureSums

OUTLIER_FACTOR = 50.0
"""A change whose norm exceeds the round's median by more than this factor, per step, is an outlier.

Changes of honest clients with two images were up to 20 times as long.
"""


def check_drop_outliers(
    drop_outliers: bool, client_privacy: ClientPrivacy | None, secure_sums: SecureSums | None
) -> None:
    """Check the option ``drop_outliers`` and that the other options support it.

    Args:
        drop_outliers: The option.
        client_privacy: Client-level privacy; None without it.
        secure_sums: Secure sums; None without them.

    Raises:
        OptionError: If they do not.
    """
    check_choice("drop_outliers", drop_outliers, [False, True])
    if drop_outliers and client_privacy is not None:
        raise OptionError(
            "client_privacy does not support drop_outliers=True: its accounting covers all clients; leave "
            "drop_outliers out",
            name="drop_outliers",
            value=True,
        )
    if drop_outliers and secure_sums is not None:
        raise OptionError(
            "secure_sums does not support drop_outliers=True: it compares single updates; leave drop_outliers out, or "
            "leave secure_sums out",
            name="drop_outliers",
            value=True,
        )


def find_outliers(
    parameter_names: Iterable[str],
    updates: Updates,
    received: State,
    plan: RoundPlan,
    places: Sequence[int],
    with_metrics: bool,
) -> tuple[dict[int, float], dict[str, float]]:
    """Find outliers (:func:`outliers_of_norms`) among updates. A collective.

    Args:
        parameter_names: Names of trained parameters. Running statistics are left out, since those of an honest client
            with two images may be far from all others.
        updates: Updates of C clients.
        received: States (c, ...) that this rank's clients among them had received.
        plan: The round's clients and their steps.
        places: Places of the C clients in the plan.
        with_metrics: Whether to compute metrics too, which transfers a state between ranks.

    Returns:
        For each outlier, by client, its change's norm divided by the median norm; and the metrics.
    """
    changes = _norms_and_cosines(parameter_names, updates, received, with_metrics)
    norms = changes.norms
    cosines = changes.cosines
    outliers = outliers_of_norms(norms, plan, places)
    if cosines is None:
        return outliers, {}
    clients = [plan.clients[place] for place in places]
    # The cosine of a client that did not move is NaN, which must be neither the largest nor the smallest.
    longest = int(norms.nan_to_num(-1).argmax())
    most_opposed = int(cosines.nan_to_num(2).argmin())
    return outliers, {
        "updates/norm_median": float(norms.nanmedian()),
        "updates/norm_max": float(norms[longest]),
        "updates/norm_max_client": float(clients[longest]),
        "updates/cosine_min": float(cosines[most_opposed]),
        "updates/cosine_min_client": float(clients[most_opposed]),
    }


def outliers_of_norms(norms: Tensor, plan: RoundPlan, places: Sequence[int]) -> dict[int, float]:
    """Find clients whose change has a norm above :data:`OUTLIER_FACTOR` times the median.

    For a client that took k times as many steps as the median client, the limit is k times as large.

    Args:
        norms: Norms (C,) of the changes, on the CPU.
        plan: The round's clients and their steps.
        places: Places of the C clients in the plan.

    Returns:
        For each outlier, by client, its change's norm divided by the median norm.
    """
    median = float(norms.nanmedian())
    steps = [sum(steps_of_phases) for steps_of_phases in zip(*plan.steps, strict=True)]
    usual_steps = max(1, median_low(steps))
    outliers = {}
    for place, norm in zip(places, norms.tolist(), strict=True):
        steps_ratio = max(1, steps[place] / usual_steps)
        if median > 0 and norm > OUTLIER_FACTOR * median * steps_ratio:
            outliers[plan.clients[place]] = norm / median
    return outliers


@dataclass(frozen=True)
class _MeasuredChanges:
    """How far the clients of a round moved, and where to.

    Attributes:
        norms: Norms (C,) of the clients' changes.
        cosines: Cosines (C,) of the changes with the mean change; None if they were not requested.
    """

    norms: Tensor
    cosines: Tensor | None


def _norms_and_cosines(
    parameter_names: Iterable[str], updates: Updates, received: State, with_cosines: bool
) -> _MeasuredChanges:
    """Measure the clients' changes. A collective.

    Args:
        parameter_names: Names of trained parameters.
        updates: Updates of C clients.
        received: States (c, ...) that this rank's clients among them had received.
        with_cosines: Whether to compare each change with the mean change too.

    Returns:
        The measurements, on the CPU.
    """
    device = torch.device("cpu")
    if received:
        device = device_of(received)
    dtype = double_dtype(device)
    squares = torch.zeros(updates.num_clients, dtype=dtype, device=device)
    # Inner products of the changes with the mean change.
    products = torch.zeros(updates.num_clients, dtype=dtype, device=device)
    mean_square = torch.zeros((), dtype=dtype, device=device)
    rows = to_device_async(torch.tensor(updates.places, dtype=torch.int64), device)
    if updates.local_rows:
        squares[rows] = squared_changes(parameter_names, updates.local_rows, received)
    compared: list[str] = []
    if with_cosines:
        compared = names_with_change(parameter_names, updates.local_rows, received)
    for name in compared:
        sent_rows = as_matrix(updates.local_rows[name])
        received_rows = as_matrix(received[name])
        # Block by block: changes of all clients in double precision would not fit the caches.
        blocks = list(column_blocks(sent_rows))
        mean_change = squares.new_zeros(sent_rows.shape[1])
        for block in blocks:
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            mean_change[block] = change.sum(0) / updates.num_clients
        # One collective for all blocks, since ranks have different numbers of blocks.
        updates.ranks.sum_([mean_change])
        mean_square += mean_change.square().sum()
        for block in blocks:
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            products[rows] += (change * mean_change[block]).sum(1)
    # Both take one collective, and one transfer to the host.
    table = torch.stack([squares, products])
    updates.ranks.sum_([table])
    squares, products = table.cpu().double()
    mean_square = mean_square.cpu().double()
    norms = squares.sqrt()
    if not with_cosines:
        return _MeasuredChanges(norms, None)
    return _MeasuredChanges(norms, products / (norms * mean_square.sqrt()))
