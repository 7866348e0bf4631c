# SPDX-License-Identifier: Apache-2.0
"""What a run says of a client that joined it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perada.core.states import State
from perada.results.per_client import with_client
from perada.results.privacy_card import joined_record
from perada.results.run_file import RUN_FILE, read_run


@dataclass(frozen=True)
class Joined:
    """A client that joined a run: its state, its scores and ε by the name of the metric, and how it came.

    ``privacy`` is the record of it alone, as in ``Run.info``; ``counts`` are its images of each class, by part.
    """

    name: str
    state: State
    metrics: dict[str, float]
    privacy: dict[str, Any] | None
    record: dict[str, Any]
    counts: dict[str, list[int]]


def joined_clients(info: Mapping[str, Any]) -> set[int]:
    """The numbers of the clients that joined when the rounds were over."""
    return {record["client"] for record in info.get("joined", [])}


def check_none_lost(folder: Path, info: Mapping[str, Any]) -> None:
    """Refuse to replace a saved run that has clients which joined it by a run that lacks them.

    Raises:
        ValueError: If there are such clients in ``folder``.
    """
    if not (folder / RUN_FILE).is_file():
        return
    there = [str(record["name"]) for record in read_run(folder).info.get("joined", [])]
    lost = [name for name in there if name not in (info.get("clients") or [])]
    if lost:
        raise ValueError(
            f"--output={str(folder)!r} holds a run that {', '.join(lost)} joined, and one without would replace it: to "
            "add another client, give that folder as RUN; or give another folder"
        )


def with_joined(
    info: Mapping[str, Any], metrics: Mapping[str, Any], number: int, joined: Joined, shared: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``Run.info`` and ``Run.metrics`` of a run of ``number`` clients that one more has joined.

    ``own_adapters`` are the clients that have one of their own, where the others ``shared`` the global one.
    """
    names = info.get("clients") or list(map(str, range(number)))
    record = {"client": number, "name": joined.name} | joined.record
    told = dict(info) | {"clients": [*names, joined.name], "joined": [*info.get("joined", []), record]}
    if shared or "own_adapters" in told:
        told["own_adapters"] = [*told.get("own_adapters", []), number]
    if told.get("privacy"):
        told["privacy"] = joined_record(told["privacy"], joined.privacy)
    return told, with_client(metrics, joined.metrics, joined.record["before"], joined.counts)
