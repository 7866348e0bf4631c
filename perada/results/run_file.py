# SPDX-License-Identifier: Apache-2.0
"""``run.json``, the file beside a saved run's adapters that says what the run was and how it went."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perada.core.checks import check_whole
from perada.data.preprocessing import Preprocessing
from perada.results.privacy_card import check_record

RUN_FILE = "run.json"
RESULTS_FILE = "results.json"
"""Info and metrics as in :data:`RUN_FILE`, in the folder that a fit writes into while it runs."""
FORMAT = 1


@dataclass
class RunFile:
    """What the file holds.

    Attributes:
        info: What the run was (:class:`perada.Run`).
        metrics: How it went.
        num_clients: M.
        global_models: States that the global model averages.
        shared: Whether clients have no states of their own.
    """

    info: dict[str, Any]
    metrics: dict[str, Any]
    num_clients: int
    global_models: int
    shared: bool


def write_run(folder: Path, content: RunFile) -> None:
    """Write the file into ``folder``, where it stands in full or not at all."""
    written = {
        "format": FORMAT,
        "num_clients": content.num_clients,
        "global_models": content.global_models,
        "shared": content.shared,
        "info": content.info,
        "metrics": content.metrics,
    }
    write_json(folder / RUN_FILE, written)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file, whole or not at all: NaN becomes null, infinity a word, and a list of numbers is one line."""
    text = json.dumps(_replace(content, _to_json), indent=2, allow_nan=False)
    # No string of JSON holds a line break, so that only what is between values is taken out.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\n *", " ", found[0]), text)
    part = path.with_name(f".{path.name}.partial")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def read_run(folder: Path) -> RunFile:
    """Read the file in ``folder``.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not what :func:`write_run` wrote.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no run: it has no {RUN_FILE}; give one that Run.save wrote")
    try:
        saved = json.loads(path.read_text())
        if saved["format"] != FORMAT:
            raise KeyError(f"format {saved['format']}, this version reads {FORMAT}")
        metrics = _replace(saved["metrics"], lambda value: math.nan if value is None else _from_json(value))
        models, shared = saved.get("global_models", 1), saved.get("shared", False)
        read = RunFile(dict(saved["info"]), metrics, saved["num_clients"], models, shared)
        check_whole("num_clients", read.num_clients)
        check_whole("global_models", read.global_models)
        _check_info(read)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{str(path)!r} is broken ({type(error).__name__}: {error}); save it again") from error
    return read


def _check_info(read: RunFile) -> None:
    info = read.info
    check_whole("num_classes", info["num_classes"])
    check_whole("built_for", info.get("built_for"), optional=True)
    if info.get("privacy"):
        info["privacy"] = _replace(info["privacy"], _from_json)
        check_record(info["privacy"], read.num_clients)
    for key in ("classes", "clients"):
        names = info.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise TypeError(f"{key} is {names!r}, no list of names")
    for number in info.get("forgotten", []):
        check_whole("forgotten", number, 0, most=read.num_clients - 1)
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
