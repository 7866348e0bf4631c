# SPDX-License-Identifier: Apache-2.0
"""What a run says of a client that joined it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perada.core.states import State
from perada.results.privacy_card import joined_record


@dataclass(frozen=True)
class Joined:
    """A client that joined a run: its state, its scores and ε by the name of the metric, and how it came.

    ``privacy`` is the record of it alone, as in ``Run.info``.
    """

    name: str
    state: State
    metrics: dict[str, float]
    privacy: dict[str, Any] | None
    record: dict[str, Any]


def with_joined(
    info: Mapping[str, Any], metrics: Mapping[str, Any], number: int, joined: Joined
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``Run.info`` and ``Run.metrics`` of a run of ``number`` clients that one more has joined."""
    names = info.get("clients") or list(map(str, range(number)))
    record = {"client": number, "name": joined.name} | joined.record
    told = dict(info) | {"clients": [*names, joined.name], "joined": [*info.get("joined", []), record]}
    if told.get("privacy"):
        told["privacy"] = joined_record(told["privacy"], joined.privacy)
    clients = {}
    for name, values in metrics["clients"].items():
        absent = 0.0 if name == "privacy/client_epsilon" else math.nan  # it sends nothing
        clients[name] = [*values, joined.metrics.get(name, absent)]
    return told, dict(metrics) | {"clients": clients}
