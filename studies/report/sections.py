# SPDX-License-Identifier: Apache-2.0
"""What the page says of one run, section by section: a sentence, figures, and the tables behind them."""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perada.results.cards import check_record, privacy_lines
from perada.results.clients import joined_clients
from perada.results.report import LAST_ROUND, SCORES, epsilon_text, round_text, shift_names, title
from perada.studies.report import class_figures, figures
from perada.studies.report.drawn import Drawn
from perada.studies.report.facts import accuracies, confusion_tables, expected_calibration_error, sent
from perada.studies.report.records import Record

Cell = str | int | float
SHOWN = 200
"""Rows of a table that the page has; its file has all."""


@dataclass
class Table:
    """A table of the page, and its CSV file.

    Attributes:
        name: Of its file, without an ending.
        caption: What it is.
        header: Names of the columns.
        rows: Words, whole numbers, and scores from 0 to 1, which the page shows in %. A column ``± …`` stands in the
            cells of the one before.
        plain: Columns whose numbers are not scores.
        metrics: Whether columns, or the first cells of rows, are metrics. The file has their names, the page words.
    """

    name: str
    caption: str
    header: list[str]
    rows: list[list[Cell]]
    plain: Sequence[str] = ()
    metrics: Literal["", "columns", "rows"] = ""

    @property
    def columns(self) -> list[int]:
        """Those that the page has, ``± …`` left out."""
        return [place for place, name in enumerate(self.header) if not name.startswith("± ")]

    def head(self, column: int) -> str:
        """What the page calls a column."""
        name = self.header[column]
        if self.metrics != "columns":
            return name
        before = "before: " if name.startswith("before: ") else ""
        return before + title(name.removeprefix(before))

    def is_word(self, column: int) -> bool:
        """Whether a column holds words."""
        return not column or any(isinstance(row[column], str) for row in self.rows[:1])

    def shown(self, row: Sequence[Cell], column: int) -> str:
        """A cell as the page has it."""
        text = self._shown(column, row[column])
        error = row[column + 1] if column + 1 < len(row) and self.header[column + 1].startswith("± ") else ""
        return f"{text} ± {self._shown(column, error)}" if error == error and error != "" else text

    def _shown(self, column: int, cell: Cell) -> str:
        if isinstance(cell, str):
            return title(cell) if self.metrics == "rows" and column == 0 else cell
        if self.header[column] == LAST_ROUND:
            return round_text(cell)
        if isinstance(cell, int):
            return f"{cell:,}"
        if math.isnan(cell):
            return "–"
        if self.header[column] in self.plain:
            if "ε" in self.header[column]:
                return epsilon_text(cell)
            return f"{cell:,.0f}" if cell >= 1000 and cell == int(cell) else f"{cell:.4g}"
        return f"{100 * cell:.2f}"


@dataclass
class Section:
    """A part of the page under a heading; ``text`` is set as it is; tables are ``opened``, or folded."""

    key: str
    title: str
    intro: str
    drawn: list[Drawn] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    text: str = ""
    opened: bool = False


Draw = Callable[[Record, str], Drawn | None]
_NOT_COVERED = (
    "This page itself is not covered: its scores and numbers of images follow from the clients' images, "
    "exactly. Show it only to those who may know them."
)
_LEFT_OUT = (
    "Scores, losses and diagnostics are left out, since they follow from the clients' images and no ledger counts "
    "them; --scores=true shows them. Numbers of images are taken as known."
)


def sections(record: Record, prefix: str = "") -> list[Section]:
    """The sections that a run has something for; ``prefix`` begins the names of their files."""
    found = [
        _rounds(record, prefix),
        _clients(record, prefix),
        _partition(record, prefix),
        _confusion(record, prefix),
        _calibration(record, prefix),
        _communication(record, prefix),
        _shifts(record, prefix),
        _privacy(record, prefix),
        _settings(record, prefix),
    ]
    return [section for section in found if section.drawn or section.tables or section.text]


def _drawn(record: Record, prefix: str, *draw: Draw) -> list[Drawn]:
    made = [one(record, f"{prefix}{one.__name__}") for one in draw]
    return [figure for figure in made if figure is not None]


def _rounds(record: Record, prefix: str) -> Section:
    names = list(dict.fromkeys(name for row in record.rounds for name in row if name not in ("round", "step")))
    first = [name for name in SCORES if name in names]
    names = [*first, *(name for name in names if name not in first)]
    plain = [name for name in names if not name.startswith(("personal/", "global/")) or name == "global/entropy"]
    rows: list[list[Cell]] = [
        [int(row["round"]) + 1, *(row.get(name, math.nan) for name in names)] for row in record.rounds
    ]
    header = ["round", *names]
    tables = [Table(f"{prefix}rounds", "What each round measured", header, rows, plain, "columns")] if rows else []
    intro = "Scores in % after each round. The band holds the middle 80 % of clients; round 0 is before training."
    return Section("rounds", "Rounds", intro, _drawn(record, prefix, figures.curves, figures.losses), tables)


def _clients(record: Record, prefix: str) -> Section:
    columns: dict[str, Sequence[float]] = {}
    if SCORES[0] in record.initial:
        columns["before: personal/local_test"] = record.initial[SCORES[0]]
    columns |= record.clients
    if record.global_local:
        columns["global/local_test"] = record.global_local
    order = sorted(range(len(record.client_names)), key=lambda client: _last(columns.get(SCORES[0]), client))
    sizes = record.train_sizes
    rows: list[list[Cell]] = [
        [record.client_names[client], *([sizes[client]] if sizes else []), *(own[client] for own in columns.values())]
        for client in order
    ]
    header = ["client", *(["training images"] if sizes else []), *columns]
    plain = [name for name in columns if name.startswith("privacy/") or name == LAST_ROUND]
    caption = "Each client, sorted by its score"
    tables = [Table(f"{prefix}clients", caption, header, rows, plain, "columns")] if columns else []
    intro = (
        "Each client's own model on its own test images, before the first round and after the last. The second figure "
    )
    intro += "has the global model on the same images: above the line, the client's own is better."
    if LAST_ROUND in columns:
        intro += " A client's own model is as old as the last round in which the client took part."
    drawn = _drawn(record, prefix, figures.before_and_after, figures.personal_and_global)
    return Section("clients", "Clients", intro, drawn, tables)


def _last(values: Sequence[float] | None, client: int) -> float:
    """To sort by; clients without a score come last."""
    value = values[client] if values else math.nan
    return math.inf if math.isnan(value) else value


def _partition(record: Record, prefix: str) -> Section:
    tables = []
    for part, counts in record.partition.items():
        rows: list[list[Cell]] = [[name, *own, sum(own)] for name, own in zip(record.client_names, counts, strict=True)]
        header = ["client", *record.class_names, "all labels" if record.several_labels else "all"]
        what = "Training" if part == "train" else "Test"
        tables.append(
            Table(f"{prefix}partition_{_plain(part)}", f"{what} images of each client and class", header, rows)
        )
    intro = "Who has how many images of which class."
    if record.several_labels:
        intro = "Who has how many images with which label. An image with several labels is counted for each."
    return Section("partition", "Partition", intro, _drawn(record, prefix, class_figures.partition), tables)


def _confusion(record: Record, prefix: str) -> Section:
    tables = []
    for who in record.confusion:
        own = confusion_tables(record, who)
        score, rows = accuracies(own), list[list[Cell]]()
        for client in sorted(own, key=lambda one: score[one]):
            pairs = [
                (count, a, b) for a, row in enumerate(own[client]) for b, count in enumerate(row) if a != b and count
            ]
            most = max(pairs, default=None)
            names = record.class_names
            worst = f"{names[most[1]]} taken for {names[most[2]]}: {most[0]}" if most else "–"
            rows.append([record.client_names[client], sum(map(sum, own[client])), score[client], worst])
        header = ["client", "test images", "accuracy", "most frequent mistake"]
        caption = (
            f"Mistakes of {'each client’s own' if who == 'personal' else 'the global'} model on the client’s images"
        )
        tables.append(Table(f"{prefix}mistakes_{_plain(who)}", caption, header, rows))
    intro = (
        "Rows are the classes of the test images, columns what they were taken for. The colour is the share of the row."
    )
    drawn = _drawn(record, prefix, class_figures.confusion, class_figures.confusion_by_client)
    return Section("confusion", "Confusion", intro, drawn, tables)


def _calibration(record: Record, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    errors = []
    for who, bins in record.calibration.items():
        errors.append(f"{who} {100 * expected_calibration_error(bins):.2f} %")
        for count, right, sure in zip(bins["count"], bins["right"], bins["confidence"], strict=True):
            if count:
                rows.append([who, int(count), sure, right / count])
    header = ["model", "predictions", "mean confidence", "right"]
    tables = [Table(f"{prefix}calibration", "Bins of confidence", header, rows)] if rows else []
    intro = "How often predictions of a given confidence are right: below the line, the model is too sure of itself. "
    intro += f"Expected calibration error (ECE): {', '.join(errors)}."
    return Section("calibration", "Calibration", intro, _drawn(record, prefix, class_figures.calibration), tables)


def _communication(record: Record, prefix: str) -> Section:
    total = sent(record)
    rows: list[list[Cell]] = [
        [int(row["round"]) + 1, mb, *(row.get(name, math.nan) for name in (SCORES[0], SCORES[2]))]
        for row, mb in zip(record.rounds, total, strict=True)
    ]
    header = ["round", "MB sent so far", SCORES[0], SCORES[2]]
    caption = "Megabytes sent, up and down, by all clients together"
    drawn = _drawn(record, prefix, figures.communication)
    plain = ["MB sent so far"]
    tables = [Table(f"{prefix}communication", caption, header, rows, plain, "columns")] if drawn else []
    return Section("communication", "Communication", "What the scores cost in megabytes sent.", drawn, tables)


def _shifts(record: Record, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    for shift, own in record.shifts.items():
        for kind, curve in own.items():
            for who in ("personal", "global"):
                pairs = zip(curve["severity"], curve.get(who, []), strict=False)
                rows += [[shift, kind, int(severity), who, value] for severity, value in pairs]
    header = ["shift", "kind", "severity", "model", "score"]
    tables = [Table(f"{prefix}shifts", "By kind of corruption and severity", header, rows)] if rows else []
    names = shift_names(name for row in record.rounds for name in row if row[name] == row[name])
    names = [name for name in names if not name.partition("/")[2].startswith(("local_test", "global_test"))]
    if names:
        means: list[list[Cell]] = [[name, record.last(name), record.last(f"{name}_std")] for name in names]
        header = ["score", "mean over clients", "std over clients"]
        caption = "Scores on each shifted test set"
        tables.insert(0, Table(f"{prefix}shift_means", caption, header, means, metrics="rows"))
    intro = "All models on test images that are not as those in training."
    return Section("shifts", "Shifted test sets", intro, _drawn(record, prefix, figures.shifts), tables)


def _privacy(record: Record, prefix: str) -> Section:
    privacy = record.info.get("privacy")
    if not privacy:
        return Section("privacy", "Privacy", "", _drawn(record, prefix, figures.epsilon))
    try:
        check_record(privacy, len(record.client_names))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(record.folder)!r}: its privacy record is broken ({error}); give another run") from error
    lines = privacy_lines(privacy, joined_clients(record.info)).splitlines()
    intro = " ".join([*lines, _LEFT_OUT if record.without_scores else _NOT_COVERED])
    rows: list[list[Cell]] = []
    ledgers = {f"ε {name}": privacy["sample"][name] for name in ("server", "release") if "sample" in privacy}
    ledgers |= {"ε client": privacy["client"]["epsilon"]} if "client" in privacy else {}
    for client, name in enumerate(record.client_names):
        rows.append([name, *(float(values[client]) for values in ledgers.values())])
    tables = [Table(f"{prefix}privacy", "The privacy ledgers of each client", ["client", *ledgers], rows, [*ledgers])]
    return Section("privacy", "Privacy", intro, _drawn(record, prefix, figures.epsilon), tables)


def _settings(record: Record, prefix: str) -> Section:
    info = {name: value for name, value in record.info.items() if name not in ("classes", "clients", "privacy")}
    rows: list[list[Cell]] = [[name, str(value)] for name, value in info.items()]
    tables = [Table(f"{prefix}run", "What the run was", ["setting", "value"], rows)] if rows else []
    command = shlex.join(record.command)
    again = f"perada fit --config {shlex.quote(str(record.folder / 'config.yaml'))}" if record.config else ""
    parts = [f"# the command\n{command}"] if command else []
    parts += (
        [f"# the same again\n{again}\n\n# config.yaml\n{record.config}"] if record.command and record.config else []
    )
    parts += [f"# config.yaml\n{record.config}"] if record.config and not record.command else []
    intro = "All that it takes to run it again."
    return Section("settings", "Settings", intro, [], tables, "\n\n".join(parts))


def _plain(name: str) -> str:
    """A word of a file that goes into a file's name: letters alone."""
    return "".join(letter for letter in name if letter.isascii() and letter.isalnum())


def all_of(found: Iterable[Section]) -> tuple[list[Drawn], list[Table]]:
    """The figures and the tables of sections."""
    every = list(found)
    return [one for section in every for one in section.drawn], [one for section in every for one in section.tables]
