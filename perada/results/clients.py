# SPDX-License-Identifier: Apache-2.0
"""Clients that join or leave a saved run, and what the run holds of each."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perada.core.states import State
from perada.results.cards import joined_record
from perada.results.inference import client_index
from perada.results.run_file import RUN_FILE, finish, read_run, write_run

ABSENT = {"privacy/client_epsilon": 0.0}
"""Of a client that joined, by the name of the metric; it sent nothing. What is not named is NaN."""


def with_client(
    metrics: Mapping[str, Any], scores: Mapping[str, float], before: float | None, counts: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The metrics of a run with one more client, of which ``scores`` are known, by the name of the metric.

    ``before`` is what the global model scores on its images; ``counts`` are its images of each class, by part.
    """
    found = dict(metrics)
    found["clients"] = {
        name: [*values, scores.get(name, ABSENT.get(name, math.nan))] for name, values in metrics["clients"].items()
    }
    if "initial" in found:
        found["initial"] = {name: [*values, math.nan] for name, values in found["initial"].items()}
    if "by_round" in found:
        found["by_round"] = [_each(row, lambda values: [*values, math.nan]) for row in found["by_round"]]
    if "global/local_test" in found:
        found["global/local_test"] = [*found["global/local_test"], math.nan if before is None else before]
    if "per_class" in found:
        found["per_class"] = {name: _more_rows(rows) for name, rows in found["per_class"].items()}
    if "partition" in found:
        parts = found["partition"]
        found["partition"] = {part: [*rows, list(counts.get(part, [0] * len(rows[0])))] for part, rows in parts.items()}
    return found


def without_client(metrics: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The metrics without the values of a client, NaN or zeros instead; its ε stay."""

    def blank(values: Sequence[Any]) -> list[Any]:
        return [*values[:number], math.nan, *values[number + 1 :]]

    found = dict(metrics)
    found["clients"] = {
        name: list(values) if name.startswith("privacy/") else blank(values)
        for name, values in metrics["clients"].items()
    }
    if "initial" in found:
        found["initial"] = _each(found["initial"], blank)
    if "by_round" in found:
        found["by_round"] = [_each(row, blank) for row in found["by_round"]]
    if "global/local_test" in found:
        found["global/local_test"] = blank(found["global/local_test"])
    for name, filler in (("per_class", math.nan), ("partition", 0)):
        if name in found:
            found[name] = {key: _blank_row(rows, number, filler) for key, rows in found[name].items()}
    if "predictions" in found:
        found["predictions"] = {role: _others(told, number) for role, told in found["predictions"].items()}
    return found


def _each(content: Mapping[str, Any], change: Any) -> dict[str, Any]:  # noqa: ANN401  # lists to lists
    return {name: change(value) if isinstance(value, list) else value for name, value in content.items()}


def _blank_row(rows: list[Any], number: int, filler: float) -> list[Any]:
    """Rows (M, K) without one; what is (K,) is of all clients."""
    if not isinstance(rows[0], list):
        return rows
    return [*rows[:number], [filler] * len(rows[0]), *rows[number + 1 :]]


def _more_rows(rows: list[Any]) -> list[Any]:
    """Rows (M + 1, K) of (M, K); what is (K,) is of all clients."""
    return [*rows, [math.nan] * len(rows[0])] if isinstance(rows[0], list) else rows


def _others(told: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What was predicted, without the rows of a client's confusions; calibration is of all images together."""
    rows = {"confusion": [row for row in told["confusion"] if row[0] != number]} if "confusion" in told else {}
    return dict(told) | rows


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


NOT_UNDONE = (
    "This does not undo what others learned from the client: the global adapter, and the adapters of the clients that "
    "were pulled towards it, have seen what it sent, and the means over clients in the run's history count its scores. "
    "Copies made before still have its adapter. Where that must go too, train again without the client."
)


def forget(folder: Path, client: int | str) -> int:
    """Remove a client's adapter, name and scores from a folder that ``Run.save`` wrote; numbers of others stay.

    ``run.json`` is replaced first, in one step, and then the client's folder is deleted: whatever happens in between,
    the run can be read, and the call can be repeated, which deletes what was left. The ε of a private run stay, since
    they say what the global adapter reveals; of how many images a client had, nothing stays.

    Returns:
        The client's number.

    Raises:
        FileNotFoundError: If there is no saved run.
        ValueError: If there is no such client, or checkpoints are in the folder, which hold the client's state too.
    """
    finish(folder)
    saved = read_run(folder)
    checkpoints = sorted(folder.rglob("*.ckpt"))
    if checkpoints:
        raise ValueError(
            f"{str(checkpoints[0])!r} is a checkpoint, which holds every client's state: nothing was removed; export "
            "the run to a folder of its own (perada export), forget the client there, and delete the run folder"
        )
    info = saved.info
    left: list[int] = [number for number in info.get("forgotten", []) if (folder / f"client_{number}").is_dir()]
    for number in left:  # of a call that was interrupted
        shutil.rmtree(folder / f"client_{number}")
    try:
        number = client_index(client, info.get("clients"), saved.num_clients)
    except ValueError:
        if left:  # by then it had lost its name
            return left[-1]
        raise
    if info.get("clients"):
        info["clients"][number] = f"(forgotten {number})"
    info["joined"] = [record for record in info.get("joined", []) if record["client"] != number]
    info["forgotten"] = sorted({*info.get("forgotten", []), number})
    sample = (info.get("privacy") or {}).get("sample", {})
    for values in ((info.get("training") or {}).get("images"), sample.get("sample_rates")):
        if values and number < len(values):
            values[number] = 0
    saved.metrics = without_client(saved.metrics, number)
    saved.files = {name: digest for name, digest in saved.files.items() if not name.startswith(f"client_{number}/")}
    write_run(folder, saved)
    shutil.rmtree(folder / f"client_{number}", ignore_errors=not (folder / f"client_{number}").exists())
    return number
