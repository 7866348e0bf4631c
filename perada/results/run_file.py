# SPDX-License-Identifier: Apache-2.0
"""``run.json``, the file beside a saved run's adapters that says what the run was and how it went."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.core.checks import check_whole
from perada.core.digests import SUMS_FILE, check_sealed, digest_of, sealed
from perada.core.files import check_links, write_atomic
from perada.data.preprocessing import Preprocessing
from perada.results.privacy_card import check_record

RUN_FILE = "run.json"
FORMAT = 1
_OWN = re.compile(r"run\.json|(adapter_config|config)\.json|\w+\.safetensors|SHA256SUMS|(client|global)(_\d+)?")
"""What perada reads in a folder."""
_IN_FOLDER = re.compile(r"(\w+/)?\w+\.safetensors")


@dataclass
class RunFile:
    """What the file holds.

    Attributes:
        info: What the run was (:class:`perada.Run`).
        metrics: How it went.
        num_clients: M.
        global_models: States that the global model averages.
        shared: Whether clients have no states of their own.
        files: Digests of the tensors' files, by their paths in the folder.
        in_checkpoints: Whether the states are in the folder's checkpoints, as a fit leaves them.
        more: What a fit says besides: ``train_sizes``, and its ``command``.
    """

    info: dict[str, Any]
    metrics: dict[str, Any]
    num_clients: int
    global_models: int
    shared: bool
    files: dict[str, str] = field(default_factory=dict)
    in_checkpoints: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def write_run(folder: Path, content: RunFile) -> None:
    """Write the file into ``folder``, where it stands in full or not at all."""
    written = {
        "format": FORMAT,
        "num_clients": content.num_clients,
        "global_models": content.global_models,
        "shared": content.shared,
        "info": content.info,
        "metrics": content.metrics,
        "files": content.files,
        "in_checkpoints": content.in_checkpoints,
        **content.more,
    }
    write_json(folder / RUN_FILE, written)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file, whole or not at all: NaN becomes null, infinity a word, and a list of numbers is one line.

    Its first entry is a digest of the others (:func:`perada.core.digests.sealed`).
    """
    text = json.dumps(sealed(_replace(content, _to_json)), indent=2, allow_nan=False)
    # No string of JSON holds a line break, so that only what is between values is taken out.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\n *", " ", found[0]), text)
    write_atomic(path, text.encode() + b"\n", durable=False)


def read_run(folder: Path) -> RunFile:
    """Read the file in ``folder``.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not what :func:`write_run` wrote, or the folder has links to what is outside.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no run: it has no {RUN_FILE}; give one that Run.save wrote")
    check_links(folder, _OWN)
    try:
        saved = check_sealed(json.loads(path.read_text(encoding="utf-8")))
        if saved["format"] != FORMAT:
            raise KeyError(f"format {saved['format']}, this version reads {FORMAT}")
        metrics = _replace(saved["metrics"], lambda value: math.nan if value is None else _from_json(value))
        models, shared = saved.get("global_models", 1), saved.get("shared", False)
        files, live = dict(saved.get("files", {})), bool(saved.get("in_checkpoints"))
        read = RunFile(dict(saved["info"]), metrics, saved["num_clients"], models, shared, files, live)
        check_whole("num_clients", read.num_clients, most=10_000_000)
        check_whole("global_models", read.global_models, most=10_000_000)
        _check_info(read)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{str(path)!r} is broken ({type(error).__name__}: {error}); save it again") from error
    return read


def holds_adapters(folder: Path) -> bool:
    """Whether a folder has a run's adapters as PEFT folders, and not in checkpoints."""
    return (folder / RUN_FILE).is_file() and not read_run(folder).in_checkpoints


def check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare a run's files of tensors with their digests in ``run.json``; a missing one is named where it is read.

    Raises:
        ValueError: If a file is not the run's, or the digests beside it are missing.
    """
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            continue
        if path.parent != folder and not (path.parent / SUMS_FILE).is_file():
            raise ValueError(f"{str(path.parent)!r} lacks {SUMS_FILE}; copy the whole folder")
        if digest_of(path) != digest:
            raise ValueError(
                f"{str(path)!r} was changed or damaged since it was written, or is of another run, as {RUN_FILE} "
                "shows; take a copy of the folder that is whole, or save the run again"
            )


def _check_info(read: RunFile) -> None:
    info = read.info
    for name, digest in read.files.items():
        if not isinstance(digest, str) or not _IN_FOLDER.fullmatch(name):
            raise ValueError(f"files names {name!r}, which is no file of a saved run")
    check_whole("num_classes", info["num_classes"])
    check_whole("built_for", info.get("built_for"), optional=True)
    if info.get("privacy"):
        info["privacy"] = _replace(info["privacy"], _from_json)
        check_record(info["privacy"], read.num_clients)
    for key in ("classes", "clients"):
        names = info.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise TypeError(f"{key} is {names!r}, no list of names")
    numbers = {name: list(info.get(name, [])) for name in ("forgotten", "own_adapters")}
    numbers["joined"] = [record["client"] for record in info.get("joined", [])]
    for name, clients in numbers.items():
        for number in clients:
            check_whole(name, number, 0, most=read.num_clients - 1)
    if not isinstance(info.get("adapter_of", ""), str):
        raise TypeError(f"adapter_of is {info['adapter_of']!r}, no name of a client")
    if info.get("preprocessing") is not None:
        Preprocessing.of_record(info["preprocessing"])
    missing = {"backbone", "pretrained", "num_classes", "image_size"} - set(info)
    if missing:
        raise KeyError(f"info lacks {sorted(missing)}")


def _replace(content: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # any JSON
    """Apply ``change`` to the values within dictionaries and lists."""
    if isinstance(content, dict):
        return {key: _replace(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [_replace(value, change) for value in content]
    return change(content)


def _to_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    """JSON has no NaN, which becomes null, and no infinity, which becomes a word that ``float`` reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _from_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    return float(value) if value in ("inf", "-inf") else value
