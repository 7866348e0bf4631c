# SPDX-License-Identifier: Apache-2.0
"""A run that is resumed with more clients than its checkpoint has."""

from collections.abc import Sequence
from typing import Any

from perada.data import FederatedDataModule

CLIENTS = "clients"
"""What ``resume_allow`` must name for it."""
OF_CLIENTS = ("number of clients", "clients' numbers of images", "partition of the data")
"""What a checkpoint then need not have in common with the run that loads it."""


def grown(saved: dict[str, Any], data: FederatedDataModule, allowed: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint holds, for a run with its clients and others, where that is ``allowed``.

    Clients are known by name where both runs have names, or else by number. The others start from the global state.
    What was scored or fine-tuned is left out: it is of the former clients alone.

    Raises:
        ValueError: If a client is gone or has another number of images, or the run is private.
    """
    former = saved["belongs"]
    if CLIENTS not in allowed or former["number of clients"] == data.num_clients:
        return saved
    names, here = saved.get("info", {}).get("clients"), data.client_names
    if names is not None and here is not None:
        gone = next((name for name in names if name not in here), None)
        numbers = [] if gone else [here.index(name) for name in names]
    else:
        names, numbers = None, list(range(former["number of clients"]))
        gone = data.num_clients if data.num_clients < len(numbers) else None
    if gone is not None:
        raise ValueError(
            f"client {gone!r} of the checkpoint is not among the {data.num_clients} clients of this run; resume with "
            "all of its clients and others"
        )
    for old, new in enumerate(numbers):
        images = former["clients' numbers of images"][old], data.train_sizes[new]
        if images[0] != images[1]:
            who = names[old] if names else old
            raise ValueError(
                f"client {who} had {images[0]} training images when the checkpoint was written, and here it has "
                f"{images[1]}; give the former clients the images that they had (such as by ByDomain)"
            )
    ledgers = saved["federation"]["privacy"] or {}
    if len(numbers) < data.num_clients and (ledgers.get("images") or ledgers.get("clients")):
        raise ValueError(
            f"the checkpoint is of a private run of {len(numbers)} clients, and here there are {data.num_clients}: its "
            "noise and its ledgers are of these clients; start anew, or let the others join by perada personalize"
        )
    federation = saved["federation"] | {"tuned": None, "numbers": numbers}
    nothing: dict[str, Any] = {key: {} for key in ("scores", "per_client", "per_class", "shifted", "measured")}
    return saved | {"federation": federation} | nothing
