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
from perada.data.partitions.division import groups_of, identities_of
from perada.data.partitions.shares import hashed_share, whole_groups

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


def held_out(
    groups: Sequence[Array], share: float, seed: int, identities: Sequence[Array | None] | None = None
) -> list[tuple[Array, Array]]:
    """Draw each client's held-out images: about ``share`` of them, but at least one and never all.

    Each client's draw is its own, whatever the others have. Images of one group, such as a patient's, are all held out
    or all trained on; where each image is a group, the share is rounded to whole images. Images of one's own are chosen
    by what they are, and not by their number (:func:`.hashed_share`).

    Args:
        groups: Of each client, the group of each of its images.
        share: From above 0 to below 1.
        seed: What the draws follow from.
        identities: Of each client, a word that stands for each image or its group; None for positions.

    Returns:
        For each client the rows that it trains on and those held out, ascending.

    Raises:
        ValueError: If clients have fewer than two images, or images of one group alone; they are named.

    >>> [(len(kept), len(held)) for kept, held in held_out([np.arange(10), np.arange(2)], 0.3, seed=0)]
    [(7, 3), (1, 1)]
    """
    names = identities or [None] * len(groups)
    groups = [own if known is None else known for own, known in zip(groups, names, strict=True)]
    single = [len(own) > 1 and len(np.unique(own)) < 2 for own in groups]
    _refuse([client for client, own in enumerate(groups) if len(own) < 2], share, "fewer than 2")
    _refuse([client for client, alone in enumerate(single) if alone], share, "those of one group alone, as one patient")
    parts = []
    for client, own in enumerate(groups):
        if names[client] is not None:
            alone: list[list[str]] = [[]] * len(own)
            held = hashed_share(own.tolist(), [client] * len(own), alone, share, derive_seed(seed, "client_validation"))
            parts.append((np.setdiff1d(np.arange(len(own)), held), held))
            continue
        rng = np.random.default_rng(derive_seed(seed, "client_validation", client))
        held, kept = whole_groups(own, [round(len(own) * share)], rng, least=1)
        parts.append((kept, held))
    return parts


def _refuse(clients: Sequence[int], share: float, what: str) -> None:
    """Name the clients that cannot hold out images, if there are any."""
    if clients:
        names = ", ".join(map(str, clients[:10])) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
        raise ValueError(
            f"client_validation={share} asks every client for a validation image and one to train on, and "
            f"client{'s' * (len(clients) > 1)} {names} {'have' if len(clients) > 1 else 'has'} {what}: give them "
            "more (min_per_client of Dirichlet), leave them out, or set client_validation to 0"
        )


def hold_out(
    data: FederatedData, record: dict[str, Any], share: float, seed: int, evaluate_on: EvaluateOn
) -> tuple[FederatedData, dict[str, Any]]:
    """Take the validation images out of the clients' training sets; see :func:`held_out`.

    ``record`` is what ``partition.json`` holds: positions, or nothing where the data were given and not divided. With
    ``evaluate_on="validation"`` the held-out images take the place of the test images.
    """
    groups = [groups_of(dataset, np.arange(length(dataset))) for dataset in data.train]
    identities = [identities_of(dataset, np.arange(length(dataset))) for dataset in data.train]
    parts = held_out(groups, share, seed, identities)
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
