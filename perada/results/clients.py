# SPDX-License-Identifier: Apache-2.0
"""Clients that join or leave a saved run, and what the run holds of each."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perada.results.cards import joined_record
from perada.results.inference import client_index
from perada.results.models import Models
from perada.results.report import LAST_ROUND
from perada.results.run_file import RUN_FILE, finish, read_run, write_run

Change = Callable[[str, list[Any], Any], list[Any]]
"""Makes another list of one with an entry a client, given what it is of and an entry that says nothing."""
_BY_CLIENT = ("clients", "initial", "by_round", "global/local_test", "per_class", "partition", "test_images")


def _changed(metrics: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The metrics of a run with other clients: what has an entry for each is changed, all else stays."""

    def each(name: str, value: Any) -> Any:  # noqa: ANN401  # what metrics hold
        if isinstance(value, dict):
            return {key: each(f"{name}/{key}", one) for key, one in value.items()}
        if name == "by_round":
            return [each("round", row) for row in value]
        if not isinstance(value, list):
            return value
        if name == "test_images":
            return change(name, value, 0)
        if not isinstance(value[0], list):  # but (K,) is of all clients
            return value if name.startswith("per_class/") else change(name, value, math.nan)
        return change(name, value, [0 if name.startswith("partition/") else math.nan] * len(value[0]))

    return dict(metrics) | {name: each(name, metrics[name]) for name in _BY_CLIENT if name in metrics}


def _without_client(metrics: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The metrics without the values of a client, NaN or zeros instead; its ε stay."""

    def blank(name: str, values: list[Any], nothing: Any) -> list[Any]:  # noqa: ANN401  # a number or a row
        return values if name.startswith("clients/privacy/") else [*values[:number], nothing, *values[number + 1 :]]

    found = _changed(metrics, blank)
    for told in found.get("predictions", {}).values():  # calibration is of all images together
        if "confusion" in told:
            told["confusion"] = [row for row in told["confusion"] if row[0] != number]
    return found


def joined_clients(info: Mapping[str, Any]) -> set[int]:
    """The numbers of the clients that joined when the rounds were over."""
    return {record["client"] for record in info.get("joined", [])}


def check_none_lost(folder: Path, info: Mapping[str, Any]) -> None:
    """Refuse to replace a saved run that has clients which joined it by a run that lacks them.

    Raises:
        ValueError: If there are such clients in ``folder``.
    """
    joined = read_run(folder).info.get("joined", []) if (folder / RUN_FILE).is_file() else []
    lost = [name for record in joined if (name := str(record["name"])) not in (info.get("clients") or [])]
    if lost:
        raise ValueError(
            f"--output={str(folder)!r} holds a run that {', '.join(lost)} joined, and one without would replace it: to "
            "add another client, give that folder as RUN; or give another folder"
        )


def with_joined(run: Models, alone: Models, how: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``Run.info`` and ``Run.metrics`` of a ``run`` that one more client has joined, which trained ``alone``.

    ``own_adapters`` are the clients that have one of their own, where the others share the global one.
    """
    number, told = run.num_clients, dict(run.info)
    names = told.get("clients") or list(map(str, range(number)))
    told["clients"] = [*names, how["name"]]
    told["joined"] = [*told.get("joined", []), {"client": number} | how]
    if not run.personalized or "own_adapters" in told:
        told["own_adapters"] = [*told.get("own_adapters", []), number]
    if told.get("privacy"):
        told["privacy"] = joined_record(told["privacy"], alone.info["privacy"])
    new: dict[str, Any] = {"clients/privacy/client_epsilon": 0.0}  # it sent nothing
    new |= {f"clients/{name}": own[0] for name, own in alone.metrics["clients"].items()}
    new |= {f"partition/{part}": rows[0] for part, rows in alone.metrics.get("partition", {}).items()}
    before = math.nan if how["before"] is None else how["before"]
    # It took part in none of the run's rounds, and its model is not older for that.
    new |= {"clients/personal/global_test": math.nan, f"clients/{LAST_ROUND}": math.nan, "global/local_test": before}
    new["test_images"] = alone.metrics.get("test_images", [0])[0]
    return told, _changed(
        run.metrics, lambda name, values, nothing: [*values, nothing if (own := new.get(name)) is None else own]
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
    saved.metrics = _without_client(saved.metrics, number)
    saved.files = {name: digest for name, digest in saved.files.items() if not name.startswith(f"client_{number}/")}
    write_run(folder, saved)
    shutil.rmtree(folder / f"client_{number}", ignore_errors=not (folder / f"client_{number}").exists())
    return number
