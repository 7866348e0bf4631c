# SPDX-License-Identifier: Apache-2.0
"""What a finished run left on disk, read for a report: nothing large is imported, and no adapter is loaded.

A run's folder has ``run.json``, and ``metrics.csv`` alone before the first evaluation; ``perada compare`` writes one
JSON file of many runs, each with its scores and without its clients.
"""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.core.files import check_sealed

Counts = list[list[int]]


@dataclass
class Record:
    """One run; what is not known is empty.

    Attributes:
        name: Of the folder, or of the row of a comparison.
        folder: Where it was read.
        info: As :class:`perada.Run` has it.
        rounds: What each round measured; its ``round`` is counted from 0.
        clients: The scores of each client (M,), by name.
        initial: Those before the first round.
        by_round: For each evaluation its round, and the scores of each client.
        global_local: The global model's score on the images of each client.
        partition: Images (M, K) of each client and class, by ``train`` and ``test``.
        confusion: By model, rows of client, class, predicted class and number of images.
        calibration: By model, ``count``, ``right`` and mean ``confidence`` of each bin.
        shifts: By shift, kind of corruption and model, the score at each ``severity``.
        train_sizes: Training images of each client.
        command: What was typed, word by word.
        config: The text of ``config.yaml``.
        group: What tells a row of a comparison from the others, whose seeds make one row.
        seed: Of a comparison's run.
    """

    name: str
    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    clients: dict[str, list[float]] = field(default_factory=dict)
    initial: dict[str, list[float]] = field(default_factory=dict)
    by_round: list[tuple[int, list[float]]] = field(default_factory=list)
    global_local: list[float] = field(default_factory=list)
    partition: dict[str, Counts] = field(default_factory=dict)
    confusion: dict[str, Counts] = field(default_factory=dict)
    calibration: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    shifts: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    train_sizes: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    config: str = ""
    group: str = ""
    seed: int | None = None

    @property
    def client_names(self) -> list[str]:
        """The names of the clients, or their numbers."""
        lengths = [len(self.train_sizes), *map(len, self.clients.values())]
        return self.info.get("clients") or list(map(str, range(max(lengths))))

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, or their numbers."""
        return self.info.get("classes") or list(map(str, range(self.info.get("num_classes", 0))))

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several labels."""
        return bool(self.info.get("multilabel"))

    def last(self, name: str) -> float:
        """The last value of a metric; NaN where there is none."""
        return next((row[name] for row in reversed(self.rounds) if name in row), math.nan)


def read_records(path: Path) -> list[Record]:
    """The run of a folder, or the runs of a comparison's file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If what is there is not what perada wrote.
    """
    if path.is_file():
        return _of_comparison(path)
    if (path / "run.json").is_file():
        return [_of_json(path, path / "run.json")]
    if not (path / "metrics.csv").is_file():
        inside = sorted(path.glob("*/metrics.csv"), key=lambda file: file.stat().st_mtime)
        hint = f"the newest run in it is {str(inside[-1].parent)!r}" if inside else "give a run folder, for example "
        raise FileNotFoundError(
            f"{str(path)!r} {'holds no metrics.csv' if path.is_dir() else 'is not there'}; {hint}"
            + ("" if inside else "lightning_logs/version_0, a folder of Run.save, or the JSON file of a comparison")
        )
    return [Record(path.resolve().name, path, rounds=rounds_of_csv(path / "metrics.csv"), config=_config(path))]


def rounds_of_csv(path: Path) -> list[dict[str, float]]:
    """The rounds of a ``metrics.csv``, whose rows of one round are joined.

    Raises:
        ValueError: If it holds no rounds, or no numbers.
    """
    rounds: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if "epoch" not in (lines.fieldnames or ()):
            raise ValueError(f"{str(path)!r} holds no rounds of training; give the folder of a run of `perada fit`")
        for row in lines:
            number = int(row["epoch"])
            values = {name: float(value) for name, value in row.items() if value and name not in ("epoch", "round")}
            rounds.setdefault(number, {"round": number}).update(values)
    return [values for _, values in sorted(rounds.items())]


def _guarded(path: Path, read: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # whatever it reads
    """Read a JSON file, which anyone may have written, and name it where it is not what it should be."""
    try:
        return read(check_sealed(json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is not what perada wrote ({type(error).__name__}: {error}); give another run, or delete it"
        ) from error


def _of_json(folder: Path, path: Path) -> Record:
    record: Record = _guarded(path, lambda content: _run(folder, content))
    record.config, logged = _config(folder), folder / "metrics.csv"
    if logged.is_file():  # rounds after the last evaluation of a run that is under way, or was stopped
        record.rounds += [row for row in rounds_of_csv(logged) if row["round"] >= len(record.rounds)]
    return record


def _run(folder: Path, content: dict[str, Any]) -> Record:
    metrics, info, count = content["metrics"], dict(content["info"]), content["num_clients"]
    classes = info["num_classes"]
    for what, number in (("num_clients", count), ("num_classes", classes)):
        if type(number) is not int or not 0 < number <= 10**7:
            raise ValueError(f"{what} is {number!r}")
    for key, wanted in (("clients", count), ("classes", classes)):
        names = info.get(key)
        if names is not None and (len(names) != wanted or not all(isinstance(one, str) for one in names)):
            raise ValueError(f"{key} are not {wanted} names")

    if not isinstance(info.get("training") or {}, dict):
        raise TypeError(f"training is {info['training']!r}")

    def each(values: Any) -> list[float]:  # noqa: ANN401  # whatever a file holds
        found = [round(value, 6) for value in _numbers(values)]  # as a run writes the scores before and by round
        if len(found) != count:
            raise ValueError(f"{len(found)} values for {count} clients")
        return found

    predictions = metrics.get("predictions", {})
    partition = {part: [_whole(row, classes) for row in rows] for part, rows in metrics.get("partition", {}).items()}
    if any(len(rows) != count for rows in partition.values()):
        raise ValueError(f"partition is not of {count} clients")
    confusion = {
        who: [_whole(row, 4) for row in one["confusion"]] for who, one in predictions.items() if "confusion" in one
    }
    for rows in confusion.values():
        if any(row[0] >= count or max(row[1:3]) >= classes for row in rows):
            raise ValueError("confusion names a client or a class that does not exist")
    return Record(
        folder.resolve().name,
        folder,
        info,
        [_scores(row) for row in metrics["rounds"]],
        {name: each(values) for name, values in metrics["clients"].items()},
        {name: each(values) for name, values in metrics.get("initial", {}).items()},
        [(int(row["round"]), each(row["personal/local_test"])) for row in metrics.get("by_round", [])],
        each(metrics["global/local_test"]) if "global/local_test" in metrics else [],
        partition,
        confusion,
        {who: _bins(one["calibration"]) for who, one in predictions.items()},
        {name: {kind: _curve(curve) for kind, curve in own.items()} for name, own in metrics.get("shifts", {}).items()},
        _whole(content.get("train_sizes", []), count if "train_sizes" in content else 0),
        [str(word) for word in content.get("command", [])],
        seed=info.get("seed") if type(info.get("seed")) is int else None,
    )


def _of_comparison(path: Path) -> list[Record]:
    def read(content: Any) -> list[Record]:  # noqa: ANN401  # whatever a file holds
        if not isinstance(content, list):
            raise TypeError("it holds no list of runs")
        runs = [one for one in map(check_sealed, content) if one["stage"] == "run" and "failed" not in one]
        if not runs:
            raise ValueError("it holds no finished run")
        return [_row(path, one) for one in runs]

    records: list[Record] = _guarded(path, read)
    return records


def _row(path: Path, one: dict[str, Any]) -> Record:
    """A run of a comparison: its curve if it has one, ending in its last scores."""
    last = _scores(
        {name: value for name, value in one.items() if name.startswith(("personal/", "global/", "privacy/"))}
    )
    curve = [_scores(row) for row in one.get("history", [])]
    rounds = [row | {"round": row["round"] - 1} for row in curve]  # counted from 1 there
    if not rounds:
        rounds = [{"round": 0} | last]
    rounds[-1] |= last
    label = " ".join([str(one["label"]), *(str(word) for word in one.get("variant", []))])
    return Record(str(one["label"]), path, rounds=rounds, group=label, seed=int(one["seed"]))


def _config(folder: Path) -> str:
    path = folder / "config.yaml"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _numbers(values: Any) -> list[float]:  # noqa: ANN401  # whatever a file holds
    """Numbers, of which JSON knows neither NaN, which is null, nor infinity, which is a word."""
    if not isinstance(values, list):
        raise TypeError(f"{str(values)[:40]!r} is not a list of numbers")
    return [math.nan if value is None else float(value) for value in values]


def _whole(values: Any, length: int) -> list[int]:  # noqa: ANN401  # whatever a file holds
    if not isinstance(values, list) or len(values) != length or any(type(one) is not int or one < 0 for one in values):
        raise TypeError(f"{str(values)[:40]!r} are not {length} counts")
    return values


def _scores(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a round that are numbers."""
    return {str(name): math.nan if value is None else float(value) for name, value in row.items()}


def _bins(calibration: dict[str, Any]) -> dict[str, list[float]]:
    found = {name: _numbers(calibration[name]) for name in ("count", "right", "confidence")}
    if len({len(values) for values in found.values()}) > 1:
        raise ValueError("calibration has bins of different numbers")
    return found


def _curve(curve: dict[str, Any]) -> dict[str, list[float]]:
    found = {name: _numbers(values) for name, values in curve.items()}
    if any(len(values) != len(found["severity"]) for values in found.values()):
        raise ValueError("a shift has not as many scores as severities")
    return found
