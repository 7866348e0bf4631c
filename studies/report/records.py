# SPDX-License-Identifier: Apache-2.0
"""Records of runs, read from disk without their adapters: the input of `perada report`.

A run's folder has ``run.json``, and only ``metrics.csv`` before the first evaluation. ``perada compare`` writes one
JSON file for many runs, each with its scores but without those of its clients.
"""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from perada.core.text import abbreviated
from perada.results.report import (
    EPSILONS,
    MODES,
    PRIVACY,
    SCORE_GROUPS,
    SCORES,
    SHARES,
    SHIFTS_FILE,
    TEST_MODE,
    TYPICAL_SHARES,
    ScoreUnit,
    cell,
    first_metric,
    score_title,
    scores_beside,
    shift_names,
    shift_tables,
    table,
    title,
    title_with_metric,
    unit_of,
)
from perada.results.run_file import RUN_FILE, RunFile, check_list, naming, numbers_of, published, read_run
from perada.studies.report.contrasts import Baselines
from perada.studies.report.pictures import ForeignExample, MaskExample, Pixels, PredictedExample
from perada.studies.report.privacy_signs import may_be_private, sets_privacy, shows_privacy
from perada.system.digests import check_sealed

Counts = list[list[int]]
"""A table of numbers of images."""
CLASSIFICATION = {"has_classes": True, "exclusive": True, "default_metric": "accuracy"}
"""What a page needs of the record of :class:`.Classification`, whose module would import torch."""


ERRORS = ("ece", "mae", "mse", "rmse")
"""Metrics of which a lower score is better, by their short names."""
PAGE_SHARES = ScoreUnit(factor=100, symbol=" %", format_spec=".1f")
"""Unit of scores between 0 and 1 on a page: clients have too few test images for a second decimal."""
SCORES_LEFT_OUT = "Scores, losses and diagnostics of private runs are left out; --scores=true includes them."


@dataclass(frozen=True)
class RoundScores:
    """The clients' scores in one evaluation."""

    round: int
    scores: list[float]


@dataclass(frozen=True)
class NumberBins:
    """Counts of one predicted number over test images, as in :meth:`.NumberCounts.record`.

    Attributes:
        edges: Edges (B + 1) of the bins of true values and of predictions.
        counts: Images (B, B) by the bin of the true value (row) and of the prediction.
        residual_edges: Edges (R + 1) of the bins of residuals, prediction − true value.
        residual_counts: Images (R) by the bin of the residual.
        residual_mean: Mean residual.
        residual_std: Standard deviation of the residuals.
    """

    edges: list[float]
    counts: Counts
    residual_edges: list[float]
    residual_counts: list[int]
    residual_mean: float
    residual_std: float

    @property
    def num_images(self) -> int:
        """Number of images."""
        return sum(self.residual_counts)


@dataclass
class RunRecord:
    """A run as described by its files; everything missing there is empty.

    Attributes:
        name: Name of the folder, or of the row of a comparison.
        folder: Where it was read.
        info, rounds, initial, partition, shifts: As in :class:`perada.Run`.
        scores_of_clients: Its ``clients``.
        by_round: Each client's score on its own images in each evaluation.
        global_local: The global model's score on the images of each client.
        failed_outputs: Models whose outputs are NaN or infinite for some test images, in a sentence; empty if none.
        confusion: Rows of client, class, predicted class and number of images, by model.
        calibration: ``count``, number of ``right`` predictions and mean ``confidence`` of each bin, by model.
        numbers: Counts of each predicted number, by model.
        examples: Test images with their masks, if the page shows any.
        foreign_examples: Test images that look foreign to their clients, if the page shows any.
        predicted_examples: Test images with right and wrong predictions, if the page shows any.
        public_pictures: Some of the server's public images, if the page shows any.
        personal_models: Whether clients have models of their own.
        baselines: Training alone and one shared model, with which the run is compared, if they are known.
        train_sizes: Training images of each client.
        test_images: Test images of each client; for a run of a comparison the fewest and the most of a client.
        command: The command line, word by word.
        config: The text of ``config.yaml``.
        row_name: For a run of a comparison: what its row has in common, whatever the seed.
        seed: Seed of the run, if it is known.
        without_scores: Whether scores were left out because the run is private.
        has_signs_of_privacy: Whether other files of the folder show that the run was private.
    """

    name: str
    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    scores_of_clients: dict[str, list[float]] = field(default_factory=dict)
    initial: dict[str, list[float]] = field(default_factory=dict)
    by_round: list[RoundScores] = field(default_factory=list)
    global_local: list[float] = field(default_factory=list)
    failed_outputs: str = ""
    partition: dict[str, Counts] = field(default_factory=dict)
    confusion: dict[str, Counts] = field(default_factory=dict)
    calibration: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    numbers: dict[str, list[NumberBins]] = field(default_factory=dict)
    shifts: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    examples: list[MaskExample] = field(default_factory=list)
    foreign_examples: list[ForeignExample] = field(default_factory=list)
    predicted_examples: list[PredictedExample] = field(default_factory=list)
    public_pictures: list[Pixels] = field(default_factory=list)
    personal_models: bool = True
    baselines: Baselines | None = None
    train_sizes: list[int] = field(default_factory=list)
    test_images: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    config: str = ""
    row_name: str = ""
    seed: int | None = None
    without_scores: bool = False
    has_signs_of_privacy: bool = False

    @property
    def client_names(self) -> list[str]:
        """The names of the clients, or their numbers."""
        names: list[str] | None = self.info.get("clients")
        if names:
            return names
        num_clients = max(len(self.train_sizes), *(len(values) for values in self.scores_of_clients.values()), 0)
        return [str(client) for client in range(num_clients)]

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, or their numbers."""
        names: list[str] | None = self.info.get("classes")
        if names:
            return names
        return [str(number) for number in range(self.info.get("num_classes", 0))]

    @property
    def task(self) -> dict[str, Any]:
        """Record of the task (:meth:`.Task.record`): one class per image unless the run has another."""
        task_record: dict[str, Any] | None = self.info.get("task")
        return task_record or CLASSIFICATION

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several labels."""
        return self.has_classes and not self.task["exclusive"]

    @property
    def has_classes(self) -> bool:
        """Whether classes or labels are predicted, and not numbers."""
        return bool(self.task.get("has_classes", True))

    @property
    def first_metric(self) -> str:
        """The metric of the scores, the first of several."""
        return first_metric(self.info)

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower score is better; errors that users name themselves are not known as such."""
        return self.first_metric.removesuffix("_per_target") in ERRORS

    @property
    def unit(self) -> ScoreUnit:
        """The unit of the scores on a page."""
        return unit_on_page(unit_of(self.task))

    @property
    def score_name(self) -> str:
        """The name of what scores are, for axes of figures: the metric if the run's files have it."""
        if "training" not in self.info:
            return "score"
        return score_title(self.first_metric)

    @property
    def private(self) -> bool:
        """Whether the run was private, at the level of images or of clients.

        Before the first evaluation there is no `run.json`, and perhaps no ε among the metrics. Then the configuration
        or the journal shows it.
        """
        has_ledgers = any(name.startswith(PRIVACY) for name in self.metric_names)
        is_recorded = bool(self.info.get("privacy")) or has_ledgers or self.has_signs_of_privacy
        return is_recorded or bool(sets_privacy(self.config))

    @property
    def metric_names(self) -> list[str]:
        """The names in all rounds, in the order of their first rounds."""
        names: dict[str, None] = {}
        for row in self.rounds:
            names.update(dict.fromkeys(row))
        return list(names)

    def published(self) -> "RunRecord":
        """Return the record without anything that depends on the clients' images and is not counted by the ledgers."""
        info, metrics = published(self.info, {"rounds": self.rounds, "clients": self.scores_of_clients})
        return replace(
            self,
            info=info,
            rounds=metrics["rounds"],
            scores_of_clients=metrics["clients"],
            initial={},
            by_round=[],
            global_local=[],
            failed_outputs="",
            partition={},
            confusion={},
            calibration={},
            numbers={},
            shifts={},
            test_images=[],
            baselines=None,
            without_scores=True,
        )

    @property
    def undefined_scores(self) -> list[str]:
        """The mean scores that were measured last as NaN, because a model has no score or no client has one."""
        measured = self.metric_names
        means = [*(name for name in SCORES if name in measured), *shift_names(measured)]
        return [name for name in means if math.isnan(self.last(name))]

    @property
    def undefined_note(self) -> str:
        """A sentence on scores that are not shown because outputs are NaN or infinite; empty if there are none."""
        if self.failed_outputs:
            return f"{self.failed_outputs}. No mean over the other clients is shown."
        if self.undefined_scores and not self.without_scores:
            titles = abbreviated([title(name) for name in self.undefined_scores])
            return (
                f"There is no mean after the last round of: {titles}. Outputs of a model are NaN or infinite, or no "
                "client has a score."
            )
        return ""

    def has_mean_after(self, round: int) -> bool:
        """Return whether the mean of the clients' scores on their own images after a round is not NaN."""
        for row in self.rounds:
            if row["round"] == round:
                return not math.isnan(row.get(SCORES[0], 0.0))
        return True

    def last(self, name: str) -> float:
        """Return the last value of a metric; NaN if there is none."""
        for row in reversed(self.rounds):
            if name in row:
                return row[name]
        return math.nan


def unit_on_page(unit: ScoreUnit) -> ScoreUnit:
    """Return the unit in which a page shows scores, which has fewer digits for shares."""
    return PAGE_SHARES if unit is SHARES else unit


def lack_scores(run_records: Sequence[RunRecord], with_scores: bool | None) -> bool:
    """Return whether a page leaves out scores because a run is private and ``--scores`` is not set."""
    return with_scores is None and any(record.private for record in run_records)


def read_records(path: Path) -> list[RunRecord]:
    """Read the run of a folder, or the runs of a comparison's file.

    Raises:
        FileNotFoundError: If there is no run.
        ValueError: If the content is not what perada wrote.
    """
    if path.is_file():
        return _read_comparison(path)
    return [_read_folder(path)]


def _read_comparison(path: Path) -> list[RunRecord]:
    """Read the finished runs in a file of ``perada compare``."""
    with naming(path):
        entries = [numbers_of(check_sealed(entry)) for entry in json.loads(path.read_text(encoding="utf-8"))]
        records = []
        for entry in entries:
            if entry["stage"] == "run" and "failed" not in entry:
                records.append(_record_of_comparison(path, entry))
        if not records:
            raise ValueError("it has no finished run")
    return records


def _read_folder(folder: Path) -> RunRecord:
    """Read the run of a folder; before its first evaluation it only has ``metrics.csv``."""
    metrics_file = folder / "metrics.csv"
    if (folder / RUN_FILE).is_file():
        run_file = read_run(folder)
        with naming(folder / RUN_FILE):
            record = _record_of_run(folder, run_file)
    elif metrics_file.is_file():
        record = RunRecord(folder.resolve().name, folder)
    else:
        raise FileNotFoundError(_no_run_message(folder))

    config_file = folder / "config.yaml"
    if config_file.is_file():
        record.config = config_file.read_text(encoding="utf-8", errors="replace")
    record.has_signs_of_privacy = shows_privacy(folder)
    is_unknown = not record.info and sets_privacy(record.config) is None
    if is_unknown and not record.private:
        record.has_signs_of_privacy = may_be_private(folder)
    shifts_file = folder / SHIFTS_FILE
    if shifts_file.is_file() and not record.shifts:
        with naming(shifts_file):
            record.shifts = _checked_shifts(json.loads(shifts_file.read_text(encoding="utf-8")))
    if metrics_file.is_file():
        # A run that is under way, or was stopped, has logged rounds after its last evaluation.
        num_evaluated = len(record.rounds)
        record.rounds += [row for row in rounds_of_csv(metrics_file) if row["round"] >= num_evaluated]
    return record


def _no_run_message(folder: Path) -> str:
    """Return the message for a folder without a run, which names the newest run in its subfolders if there is one."""
    problem = "has no metrics.csv" if folder.is_dir() else "does not exist"
    runs_inside = sorted(folder.glob("*/metrics.csv"), key=lambda file: file.stat().st_mtime)
    if runs_inside:
        remedy = f"the newest run in it is {str(runs_inside[-1].parent)!r}"
    else:
        remedy = (
            "pass a run folder, for example lightning_logs/version_0, a folder of Run.save, or a file of perada compare"
        )
    return f"{str(folder)!r} {problem}; {remedy}"


def rounds_of_csv(path: Path) -> list[dict[str, float]]:
    """Read the rounds of a ``metrics.csv``, in which a round may have several lines.

    Raises:
        ValueError: If it has no rounds, or a value is not a number.
    """
    metrics_of_round: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if "epoch" not in (lines.fieldnames or ()):
            raise ValueError(f"{str(path)!r} has no training rounds; pass the folder of a run of `perada fit`")
        for line in lines:
            number = int(line["epoch"])
            metrics = metrics_of_round.setdefault(number, {"round": number})
            for name, text in line.items():
                if text and name not in ("epoch", "round"):
                    metrics[name] = float(text)
    return [metrics_of_round[number] for number in sorted(metrics_of_round)]


def _record_of_run(folder: Path, run_file: RunFile) -> RunRecord:
    """Return the record of a ``run.json``, after checking the parts that only a report reads."""
    metrics = run_file.metrics
    predictions = metrics.get("predictions", {})
    partition = metrics.get("partition", {})
    confusion = {}
    calibration = {}
    for model, counts in predictions.items():
        if "confusion" in counts:
            confusion[model] = counts["confusion"]
        if "calibration" in counts:
            calibration[model] = counts["calibration"]

    num_classes = run_file.info["num_classes"]
    numbers: dict[str, list[NumberBins]] = {}
    for model, counts in predictions.items():
        bins_of_targets = [NumberBins(**bins) for bins in counts.get("numbers", [])]
        _check_number_bins(bins_of_targets, num_classes)
        if bins_of_targets:
            numbers[model] = bins_of_targets
    check_list(list(partition.values()), None, run_file.num_clients, num_classes, value_type=int)
    _check_confusion(confusion, run_file.num_clients, num_classes)
    for bins in calibration.values():
        check_list([bins["count"], bins["right"], bins["confidence"]], 3, len(bins["count"]))

    failed_outputs = ""
    if metrics.get("failed_outputs"):
        # This import loads torch, which takes longer than drawing the page, so most pages do without.
        from perada.scores.failed_outputs import describe_failed, failed_of_records

        message = describe_failed(failed_of_records(metrics["failed_outputs"]), run_file.info.get("clients"))
        failed_outputs = message[:1].upper() + message[1:]

    by_round = []
    for row in metrics.get("by_round", []):
        by_round.append(RoundScores(row["round"], row["personal/local_test"]))
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        info=run_file.info,
        rounds=metrics["rounds"],
        scores_of_clients=metrics["clients"],
        initial=metrics.get("initial", {}),
        by_round=by_round,
        global_local=metrics.get("global/local_test", []),
        failed_outputs=failed_outputs,
        partition=partition,
        confusion=confusion,
        calibration=calibration,
        numbers=numbers,
        shifts=_checked_shifts(metrics.get("shifts", {})),
        train_sizes=run_file.train_sizes,
        test_images=metrics.get("test_images", []),
        command=run_file.command,
        seed=run_file.info.get("seed"),
        personal_models=not run_file.shared,
    )


def _check_confusion(confusion: dict[str, Counts], num_clients: int, num_classes: int) -> None:
    """Check that the rows of client, class, predicted class and images are numbers in range."""
    check_list(list(confusion.values()), None, None, 4, value_type=int)
    for rows in confusion.values():
        for client, label, predicted, _ in rows:
            if client >= num_clients or label >= num_classes or predicted >= num_classes:
                raise ValueError("confusion refers to a client or a class that does not exist")


def _check_number_bins(bins_of_targets: Sequence[NumberBins], num_targets: int) -> None:
    """Check that there is an entry for each target, and a count for each bin."""
    if len(bins_of_targets) not in (0, num_targets):
        raise ValueError(f"numbers has {len(bins_of_targets)} targets instead of {num_targets}")
    for bins in bins_of_targets:
        num_bins = len(bins.counts)
        check_list(bins.counts, num_bins, num_bins, value_type=int)
        check_list(bins.residual_counts, None, value_type=int)
        check_list(bins.edges, num_bins + 1)
        check_list(bins.residual_edges, len(bins.residual_counts) + 1)
        check_list([bins.residual_mean, bins.residual_std], 2)
        for edges in (bins.edges, bins.residual_edges):
            are_increasing = all(left < right for left, right in pairwise(edges))
            if not are_increasing or not all(map(math.isfinite, edges)):
                raise ValueError("the edges of the bins of numbers must be finite and increasing")


def _record_of_comparison(path: Path, entry: dict[str, Any]) -> RunRecord:
    """Return the record of a comparison's run: its rounds, if they were kept, and its final scores in the last one."""
    groups = (*SCORE_GROUPS, TYPICAL_SHARES, PRIVACY)
    final_scores = {name: value for name, value in entry.items() if name.startswith(groups)}
    rounds: list[dict[str, float]] = []
    for row in entry.get("history", []):
        rounds.append(row | {"round": row["round"] - 1})  # a comparison counts rounds from 1
    if rounds:
        rounds[-1] |= final_scores
    else:
        rounds = [{"round": 0} | final_scores]
    for row in rounds:
        check_list(list(row.values()), None)
    test_images = entry.get("test_images", [])
    check_list(test_images, None, value_type=int)
    label = str(entry["label"])
    variant = [str(word) for word in entry.get("variant", [])]
    return RunRecord(
        name=label,
        folder=path,
        rounds=rounds,
        test_images=test_images,
        failed_outputs=str(entry.get("failed_outputs", "")),
        row_name=" ".join([label, *variant]),
        seed=int(entry["seed"]),
    )


def _checked_shifts(shifts: Any) -> Any:  # noqa: ANN401  # the content of a file that anyone may have written
    """Return the scores by shift, kind of corruption and model, after checking that each severity has one."""
    for curve_of_kind in shifts.values():
        for curve in curve_of_kind.values():
            check_list(list(curve.values()), None, len(curve["severity"]))
    return shifts


def run_report(folder: Path) -> str:
    """Return tables of a run's rounds and of its scores on corrupted images.

    Raises:
        FileNotFoundError: If there is no run in ``folder``.
        ValueError: If it has no rounds.
    """
    (record,) = read_records(folder)
    columns = _report_columns(record)
    unit = unit_of(record.task)
    rows = []
    for round_metrics in record.rounds:
        cells = [str(int(round_metrics["round"]) + 1)]
        for name in columns:
            cells.append(cell(name, round_metrics[name], unit) if name in round_metrics else "")
        rows.append(cells)
    header = ["round", *(title_with_metric(name, record.first_metric) for name in columns)]
    parts = [table(header, rows)]
    if record.undefined_note:
        parts.append(record.undefined_note)
    if "privacy/test_mode" in record.metric_names:
        parts.append(TEST_MODE)
    return "\n\n".join([*parts, *shift_tables(record.shifts, unit)])


def _report_columns(record: RunRecord) -> list[str]:
    """Return the metrics that the table of a run's rounds has, in its order."""
    measured = record.metric_names
    losses = sorted(name for name in measured if name.startswith("train/"))
    own_score, *other_scores = SCORES
    scores = [own_score, *scores_beside(record.rounds, record.test_images), *other_scores, *MODES]
    scores += [*shift_names(measured), *EPSILONS]
    diagnostics = sorted(name for name in measured if name.startswith(("theory/", "updates/lora_")))
    return [*losses, *(name for name in scores if name in measured), *diagnostics]
