# SPDX-License-Identifier: Apache-2.0
"""Validation images at the clients: a share of what each one trains on is set aside, to choose settings by."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import Subset

from perada.core.checks import check_choice, check_number
from perada.core.seeding import derive_seed
from perada.data.batches.samples import length
from perada.data.federated import FederatedData
from perada.data.partitions.apportion import Array

EvaluateOn = Literal["test", "validation"]


def check_holdout(share: float, evaluate_on: str) -> None:
    """Refuse what is not a share, or would leave nothing to evaluate on."""
    check_number("client_validation", share, least=0, below=1, hint="a share of each client's training images")
    check_choice("evaluate_on", evaluate_on, get_args(EvaluateOn))
    if evaluate_on == "validation" and not share:
        raise ValueError(
            "evaluate_on is 'validation' and client_validation is 0: say what share of their training images clients "
            "hold out, for example client_validation=0.2"
        )


def held_out(sizes: Sequence[int], share: float, seed: int) -> list[tuple[Array, Array]]:
    """Draw each client's held-out images: ``share`` of them, rounded, but at least one and never all.

    Each client's draw is its own, whatever the others have.

    Returns:
        For each client the rows that it trains on and those held out, ascending.

    Raises:
        ValueError: If clients have fewer than two images; they are named.

    >>> [(len(kept), len(held)) for kept, held in held_out([10, 2], 0.3, seed=0)]
    [(7, 3), (1, 1)]
    """
    small = [client for client, size in enumerate(sizes) if size < 2]
    if small:
        names = ", ".join(map(str, small[:10])) + (f" and {len(small) - 10} more" if len(small) > 10 else "")
        raise ValueError(
            f"client_validation={share} asks every client for a validation image and one to train on, and "
            f"client{'s' * (len(small) > 1)} {names} {'have' if len(small) > 1 else 'has'} fewer than 2: give them "
            "more (min_per_client of Dirichlet), leave them out, or set client_validation to 0"
        )
    parts = []
    for client, size in enumerate(sizes):
        order = np.random.default_rng(derive_seed(seed, "client_validation", client)).permutation(size)
        count = min(max(1, round(size * share)), size - 1)
        parts.append((np.sort(order[count:]), np.sort(order[:count])))
    return parts


def hold_out(
    data: FederatedData, record: dict[str, Any], share: float, seed: int, evaluate_on: EvaluateOn
) -> tuple[FederatedData, dict[str, Any]]:
    """Take the validation images out of the clients' training sets; see :func:`held_out`.

    ``record`` is what ``partition.json`` holds: positions, or nothing where the data were given and not divided. With
    ``evaluate_on="validation"`` the held-out images take the place of the test images.
    """
    parts = held_out(list(map(length, data.train)), share, seed)
    train, validation = (
        [Subset(dataset, rows[part].tolist()) for dataset, rows in zip(data.train, parts, strict=True)]
        for part in (0, 1)
    )
    if not record:
        record = {"client_validation_sizes": [len(held) for _, held in parts]}
    else:
        positions = [np.asarray(own) for own in record["train"]]
        kept, held = ([own[rows[part]].tolist() for own, rows in zip(positions, parts, strict=True)] for part in (0, 1))
        record = {**record, "train": kept, "client_validation": held}
    return replace(data, train=train, test=validation if evaluate_on == "validation" else data.test), record
