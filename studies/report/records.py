# SPDX-License-Identifier: Apache-2.0
"""What runs left on disk, read without their adapters: what `perada report` shows.

A run's folder has ``run.json``, and ``metrics.csv`` alone before the first evaluation; ``perada compare`` writes one
JSON file of many runs, each with its scores and without its clients.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perada.core.digests import check_sealed
from perada.results.report import (
    EPSILONS,
    MODES,
    PRIVACY,
    SCORES,
    SHIFTS_FILE,
    TEST_MODE,
    cell,
    scores_beside,
    shift_names,
    shift_tables,
    table,
    title,
)
from perada.results.run_file import RUN_FILE, RunFile, check_list, naming, numbers_of, published, read_run

Counts = list[list[int]]


@dataclass
class Record:
    """One run; what is not known is empty.

    Attributes:
        name: Of the folder, or of the row of a comparison.
        folder: Where it was read.
        info, rounds, clients, initial, partition, shifts: As :class:`perada.Run` has them.
        by_round: For each evaluation its round, and the scores of each client.
        global_local: The global model's score on the images of each client.
        confusion: By model, rows of client, class, predicted class and number of images.
        calibration: By model, ``count``, ``right`` and mean ``confidence`` of each bin.
        train_sizes: Training images of each client.
        test_images: Images that each client is scored on; of a comparison's run the fewest and the most of a client.
        command: What was typed, word by word.
        config: The text of ``config.yaml``.
        group: What tells a row of a comparison from the others, whose seeds make one row.
        seed: Of a comparison's run.
        without_scores: Whether scores were left out, since the run was private.
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
    test_images: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    config: str = ""
    group: str = ""
    seed: int | None = None
    without_scores: bool = False

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

    @property
    def private(self) -> bool:
        """Whether a run was private, in images or in whole clients."""
        logged = any(name.startswith(PRIVACY) for row in self.rounds for name in row)
        return bool(self.info.get("privacy")) or logged

    def published(self) -> "Record":
        """The record without what follows from clients' images beside the ledgers."""
        metrics = {"rounds": self.rounds, "clients": self.clients}
        info, kept = published(self.info, metrics)
        return replace(
            self,
            info=info,
            rounds=kept["rounds"],
            clients=kept["clients"],
            initial={},
            by_round=[],
            global_local=[],
            partition={},
            confusion={},
            calibration={},
            shifts={},
            test_images=[],
            without_scores=True,
        )

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
        with naming(path):
            rows = [numbers_of(check_sealed(one)) for one in json.loads(path.read_text(encoding="utf-8"))]
            records = [_row(path, one) for one in rows if one["stage"] == "run" and "failed" not in one]
            if not records:
                raise ValueError("it holds no finished run")
        return records
    config, logged, shifts = (path / name for name in ("config.yaml", "metrics.csv", SHIFTS_FILE))
    if (path / RUN_FILE).is_file():
        saved = read_run(path)
        with naming(path / RUN_FILE):
            record = _record(path, saved)
    elif logged.is_file():
        record = Record(path.resolve().name, path)
    else:
        inside = sorted(path.glob("*/metrics.csv"), key=lambda file: file.stat().st_mtime)
        hint = (
            "give a run folder, for example lightning_logs/version_0, a folder of Run.save, or a file of perada compare"
        )
        hint = f"the newest run in it is {str(inside[-1].parent)!r}" if inside else hint
        what = "holds no metrics.csv" if path.is_dir() else "is not there"
        raise FileNotFoundError(f"{str(path)!r} {what}; {hint}")
    if config.is_file():
        record.config = config.read_text(encoding="utf-8", errors="replace")
    if shifts.is_file() and not record.shifts:
        with naming(shifts):
            record.shifts = _shifts(json.loads(shifts.read_text(encoding="utf-8")))
    if logged.is_file():  # of a run that is under way, or was stopped, the rounds after the last evaluation
        record.rounds += [row for row in rounds_of_csv(logged) if row["round"] >= len(record.rounds)]
    return [record]


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


def _record(folder: Path, saved: RunFile) -> Record:
    """A run as its file has it, with what is checked there no further."""
    metrics, count, classes = saved.metrics, saved.num_clients, saved.info["num_classes"]
    predictions, partition = metrics.get("predictions", {}), metrics.get("partition", {})
    confusion = {who: one["confusion"] for who, one in predictions.items() if "confusion" in one}
    check_list([*partition.values()], None, count, classes, kind=int)
    check_list([*confusion.values()], None, None, 4, kind=int)
    if any(row[0] >= count or max(row[1:3]) >= classes for rows in confusion.values() for row in rows):
        raise ValueError("confusion names a client or a class that does not exist")
    for one in predictions.values():
        bins = one["calibration"]
        check_list([bins[name] for name in ("count", "right", "confidence")], 3, len(bins["count"]))

    def each(scores: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """As a run writes those by round."""
        return {name: [round(value, 6) for value in values] for name, values in scores.items()}

    return Record(
        folder.resolve().name,
        folder,
        saved.info,
        metrics["rounds"],
        each(metrics["clients"]),
        metrics.get("initial", {}),
        [(row["round"], row["personal/local_test"]) for row in metrics.get("by_round", [])],
        each({"": metrics.get("global/local_test", [])})[""],
        partition,
        confusion,
        {who: one["calibration"] for who, one in predictions.items()},
        _shifts(metrics.get("shifts", {})),
        saved.train_sizes,
        metrics.get("test_images", []),
        saved.command,
        seed=saved.info.get("seed"),
    )


def _row(path: Path, one: dict[str, Any]) -> Record:
    """A run of a comparison: its curve if it has one, ending in its last scores."""
    last = {name: value for name, value in one.items() if name.startswith(("personal/", "global/", "privacy/"))}
    rounds = [row | {"round": row["round"] - 1} for row in one.get("history", [])]  # counted from 1 there
    if not rounds:
        rounds = [{"round": 0} | last]
    rounds[-1] |= last
    for row in rounds:
        check_list([*row.values()], None)
    label = " ".join([str(one["label"]), *(str(word) for word in one.get("variant", []))])
    test_images = one.get("test_images", [])
    check_list(test_images, None, kind=int)
    return Record(str(one["label"]), path, rounds=rounds, test_images=test_images, group=label, seed=int(one["seed"]))


def _shifts(content: Any) -> Any:  # noqa: ANN401  # whatever a file holds
    """Scores by shift, kind of corruption and model, each with as many as there are severities."""
    for curve in (curve for kinds in content.values() for curve in kinds.values()):
        check_list([*curve.values()], None, len(curve["severity"]))
    return content


def run_report(folder: Path) -> str:
    """The rounds of a run, and its scores on corrupted images.

    Raises:
        FileNotFoundError: If there is no run in ``folder``.
        ValueError: If it holds no rounds.
    """
    (record,) = read_records(folder)
    names = {name for values in record.rounds for name in values}
    beside = scores_beside(record.rounds, record.test_images)
    shown = [
        name for name in (SCORES[0], *beside, *SCORES[1:], *MODES, *shift_names(names), *EPSILONS) if name in names
    ]
    losses = sorted(name for name in names if name.startswith("train/"))
    shown += sorted(name for name in names if name.startswith(("theory/", "updates/lora_")))
    body = [
        [str(int(row["round"]) + 1), *(cell(name, row[name]) if name in row else "" for name in [*losses, *shown])]
        for row in record.rounds
    ]
    header = ["round", *map(title, [*losses, *shown])]
    warned = [TEST_MODE] if "privacy/test_mode" in names else []
    return "\n\n".join([table(header, body), *warned, *shift_tables(record.shifts)])
