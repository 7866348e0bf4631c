# SPDX-License-Identifier: Apache-2.0
"""Clients that join or leave a saved run, and the run's records of each client."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perada.results.cards import joined_record
from perada.results.client_names import client_index
from perada.results.models import Models
from perada.results.overwriting import check_saved_run
from perada.results.report import LAST_ROUND
from perada.results.run_file import (
    PERSONAL,
    RUN_FILE,
    TYPICAL,
    RunFile,
    StateIndex,
    finish_interrupted_move,
    kind_of,
    read_run,
    write_run,
)
from perada.results.state_files import StateFiles, delete_unlisted, write_states
from perada.system.files import sync

EditList = Callable[[str, list[Any], Any], list[Any]]
"""Returns a changed list, given the name of the metric, the list with one entry per client, and an empty entry."""
FAILED_OUTPUTS = "failed_outputs"
"""Metric with the models whose outputs are NaN or infinite, of which each names its client."""
_METRICS_BY_CLIENT = ("clients", "initial", "by_round", "global/local_test", "per_class", "partition", "test_images")


def _edit_client_lists(metrics: Mapping[str, Any], edit: EditList) -> dict[str, Any]:
    """Return the metrics with every list that has one entry per client edited, and all else unchanged."""
    edited = dict(metrics)
    for name in _METRICS_BY_CLIENT:
        if name in metrics:
            edited[name] = _edit_metric(name, metrics[name], edit)
    return edited


def _edit_metric(name: str, value: Any, edit: EditList) -> Any:  # noqa: ANN401  # whatever metrics hold
    if isinstance(value, dict):
        return {key: _edit_metric(f"{name}/{key}", entry, edit) for key, entry in value.items()}
    if name == "by_round":
        return [_edit_metric("round", row, edit) for row in value]
    if not isinstance(value, list):
        return value
    if name == "test_images":
        return edit(name, value, 0)
    if isinstance(value[0], list):  # (M, K)
        empty_cell = 0 if name.startswith("partition/") else math.nan
        return edit(name, value, [empty_cell] * len(value[0]))
    if name.startswith("per_class/"):  # (K,) over all clients
        return value
    return edit(name, value, math.nan)


def _without_client(metrics: Mapping[str, Any], client: int) -> dict[str, Any]:
    """Return the metrics with NaN or zeros in place of a client's values, except for its ε."""

    def clear(name: str, values_of_clients: list[Any], empty: object) -> list[Any]:
        if name.startswith("clients/privacy/"):
            return values_of_clients
        return [*values_of_clients[:client], empty, *values_of_clients[client + 1 :]]

    cleared = _edit_client_lists(metrics, clear)
    # The calibration of predictions is that of all images together.
    for predictions in cleared.get("predictions", {}).values():
        if "confusion" in predictions:
            predictions["confusion"] = [row for row in predictions["confusion"] if row[0] != client]
    if FAILED_OUTPUTS in cleared:
        cleared[FAILED_OUTPUTS] = [entry for entry in cleared[FAILED_OUTPUTS] if entry["client"] != client]
    return cleared


def joined_clients(info: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the clients that joined after the rounds."""
    return {record["client"] for record in info.get("joined", [])}


def check_none_lost(folder: Path, info: Mapping[str, Any]) -> None:
    """Check that a folder has no foreign files, and no run with a client that joined it and that another run lacks.

    Args:
        folder: Folder that the run is to be saved to.
        info: ``Run.info`` of the run.

    Raises:
        FileExistsError: If a file would be replaced that perada did not write.
        ValueError: If such a client is missing.
    """
    check_saved_run(folder)
    if not (folder / RUN_FILE).is_file():
        return
    names = info.get("clients") or []
    joined_names = [str(record["name"]) for record in read_run(folder).info.get("joined", [])]
    missing = [name for name in joined_names if name not in names]
    if missing:
        raise ValueError(
            f"--output={str(folder)!r} contains a run that {', '.join(missing)} joined, and a run without them would "
            "replace it: to add another client, pass that folder as RUN; or choose a different folder"
        )


def with_joined(run: Models, single: Models, record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``Run.info`` and ``Run.metrics`` of a run with one more client.

    Args:
        run: The run.
        single: The run of the new client only.
        record: The client's entry in ``info["joined"]``, without its number.
    """
    client = run.num_clients
    info = dict(run.info)
    names = info.get("clients") or [str(number) for number in range(client)]
    info["clients"] = [*names, record["name"]]
    info["joined"] = [*info.get("joined", []), {"client": client} | record]
    if not run.personalized or "own_adapters" in info:
        # The other clients share the global adapter.
        info["own_adapters"] = [*info.get("own_adapters", []), client]
    if info.get("privacy"):
        info["privacy"] = joined_record(info["privacy"], single.info["privacy"])

    entries: dict[str, Any] = {"clients/privacy/client_epsilon": 0.0}  # the client sent nothing
    for name, values in single.metrics["clients"].items():
        entries[f"clients/{name}"] = values[0]
    for part, rows in single.metrics.get("partition", {}).items():
        entries[f"partition/{part}"] = rows[0]
    # The new client is scored by itself, so that "all" images are its own.
    for name in single.metrics["clients"]:
        if name.partition("/")[2].startswith("global_test"):
            entries[f"clients/{name}"] = math.nan
    # NaN and not 0 ("never took part"), for which the personal model would be called old.
    entries[f"clients/{LAST_ROUND}"] = math.nan
    entries["global/local_test"] = record["before"]
    if record["before"] is None:
        entries["global/local_test"] = math.nan
    entries["test_images"] = single.metrics.get("test_images", [0])[0]

    def append_entry(name: str, joined_entries: list[Any], empty: object) -> list[Any]:
        entry = entries.get(name)
        if entry is None:
            entry = empty
        return [*joined_entries, entry]

    metrics = _edit_client_lists(run.metrics, append_entry)
    failed_outputs = [entry | {"client": client} for entry in single.metrics.get(FAILED_OUTPUTS, [])]
    if failed_outputs:
        metrics[FAILED_OUTPUTS] = [*metrics.get(FAILED_OUTPUTS, []), *failed_outputs]
    return info, metrics


def forget(folder: Path, client: int | str) -> int:
    """Remove a client's adapter, name and scores from a folder that ``Run.save`` or ``Run.export`` wrote.

    Others keep their numbers. First the file with the client's state is written again without it, under a new name.
    Then ``run.json`` is replaced, atomically, and the client's former file or folder is deleted. If this is
    interrupted, the run can be read, and the call can be repeated to delete the remaining files. The ε of a private run
    are kept, since they state what the global adapter reveals. The client's number of images is not kept.

    Returns:
        The client's number.

    Raises:
        FileNotFoundError: If there is no saved run.
        ValueError: If there is no such client, or the folder has checkpoints, which hold the client's state, too.
    """
    finish_interrupted_move(folder)
    saved = read_run(folder)
    checkpoints = sorted(folder.rglob("*.ckpt"))
    if checkpoints:
        raise ValueError(
            f"{str(checkpoints[0])!r} is a checkpoint, which contains every client's state, so nothing was removed; "
            f"export the run to a different folder (perada export {folder} --output FOLDER), remove the client there, "
            "and delete the run folder"
        )
    info = saved.info
    interrupted = _delete_forgotten(folder, saved)
    try:
        number = client_index(client, info.get("clients"), saved.num_clients)
    except ValueError:
        # The interrupted call has already removed the client's name.
        if interrupted:
            return interrupted[-1]
        raise
    if info.get("clients"):
        windows = info["preprocessing"].get("medical", {}).get("window_of_client", {})
        windows.pop(info["clients"][number], None)
        info["clients"][number] = f"(forgotten {number})"
    info["joined"] = [record for record in info.get("joined", []) if record["client"] != number]
    # The last one is the client of an interrupted call.
    info["forgotten"] = [*(other for other in info.get("forgotten", []) if other != number), number]
    # A rate reveals the number of images.
    images = (info.get("training") or {}).get("images")
    sample_rates = (info.get("privacy") or {}).get("sample", {}).get("sample_rates")
    for values in (images, sample_rates):
        if values and number < len(values):
            values[number] = 0
    saved.metrics = _without_client(saved.metrics, number)
    client_folder = folder / f"client_{number}"
    prefix = f"{client_folder.name}/"
    saved.files = {name: digest for name, digest in saved.files.items() if not name.startswith(prefix)}
    saved.states = _write_without(folder, saved.states, number)
    write_run(folder, saved)
    if saved.layout == "states":
        delete_unlisted(folder, saved.states)
    else:
        shutil.rmtree(client_folder, ignore_errors=not client_folder.exists())
    return number


def _write_without(folder: Path, state_index: StateIndex, client: int) -> StateIndex:
    """Write the files with a client's states again, without them and under other names, and return the new index."""
    index: StateIndex = {}
    for name, part in state_index.items():
        kind = kind_of(name)
        if kind not in (PERSONAL, TYPICAL) or client not in part.rows:
            index[name] = part
            continue
        rows = [number for number in part.rows if number != client]
        read_state = StateFiles(folder, kind, {name: part})
        # The names of all files in the folder: one that an interrupted call left is not overwritten, but deleted.
        used_names = {*state_index, *(path.name for path in folder.glob("*.safetensors"))}
        written = write_states(folder, kind, rows, read_state, used_names)
        sync([*(folder / new_name for new_name in written), folder])
        index |= written
    return index


def _delete_forgotten(folder: Path, saved: RunFile) -> list[int]:
    """Delete the files that an interrupted :func:`forget` left, and return the numbers of their clients."""
    forgotten: list[int] = list(saved.info.get("forgotten", []))
    if saved.layout == "states":
        deleted_files = delete_unlisted(folder, saved.states)
        return forgotten if deleted_files else []
    deleted = []
    for number in forgotten:
        client_folder = folder / f"client_{number}"
        if client_folder.is_dir():
            shutil.rmtree(client_folder)
            deleted.append(number)
    return deleted
