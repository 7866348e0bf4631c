# SPDX-License-Identifier: Apache-2.0
"""The result of an evaluation: its rows, as tables for people and as JSON and CSV."""

import csv
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from perada.core.checks import checked_path
from perada.core.text import abbreviated, cell_text
from perada.evaluation.rows import AUROC, ScoreRow, pairs_of
from perada.results.report import table
from perada.scores.intervals import FEWEST, LEVEL
from perada.system.files import check_output_folder, writing

JSON_FILE = "evaluation.json"
CSV_FILE = "evaluation.csv"


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of models at every client and on the images of all clients, with intervals.

    Attributes:
        models: Names of the models.
        rows: The scores, and the differences of each pair of models.
        notes: What a reader must know, such as clients for which the global model stands in.
    """

    models: tuple[str, ...]
    rows: tuple[ScoreRow, ...]
    notes: tuple[str, ...] = ()

    def find(
        self, client: str, model: str, score: str, *, versus: str | None = None, class_name: str | None = None
    ) -> ScoreRow:
        """Return a row.

        Args:
            client: Name of the client, or ``pooled``.
            model: Name of the model.
            score: Name of the score.
            versus: Name of the model whose score is subtracted.
            class_name: The class of a score of one class.

        Raises:
            KeyError: If there is no such row.
        """
        key = (client, model, versus, score, class_name)
        for row in self.rows:
            if key == (row.client, row.model, row.versus, row.score, row.class_name):
                return row
        raise KeyError(f"there is no row {key}")

    def record(self) -> dict[str, Any]:
        """Return the result in plain types."""
        return {
            "level": LEVEL,
            "fewest": FEWEST,
            "models": list(self.models),
            "notes": list(self.notes),
            "rows": [row.record() for row in self.rows],
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``evaluation.json`` and ``evaluation.csv``, with a row for each score.

        Raises:
            OSError: If they cannot be written.
        """
        folder = checked_path("folder", folder)
        check_output_folder("folder", folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record(), indent=1, ensure_ascii=False, allow_nan=False)
        with writing(folder / JSON_FILE):
            (folder / JSON_FILE).write_text(f"{text}\n", encoding="utf-8")
        header = [*(field.name for field in fields(ScoreRow)), "too_few"]
        with writing(folder / CSV_FILE), (folder / CSV_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for row in self.rows:
                record = row.record()
                writer.writerow([_format_cell(record[name]) for name in header])
        return folder

    def __str__(self) -> str:
        """Return a table of each score with a row for each client."""
        names = dict.fromkeys(row.score for row in self.rows if row.class_name is None)
        parts = [self._table_of_score(name) for name in names]
        parts += self.notes
        return "\n\n".join(parts)

    def _table_of_score(self, score: str) -> str:
        """Return the table of a score, with a column for each model and each pair of models."""
        columns: list[tuple[str, str | None]] = [(model, None) for model in self.models]
        columns += pairs_of(self.models)
        rows_of_score = {}
        images_of_client: dict[str, int] = {}
        for row in self.rows:
            if row.score == score and row.class_name is None:
                rows_of_score[row.client, row.model, row.versus] = row
                images_of_client[row.client] = row.images
        header = ["client", "images"]
        header += [model if versus is None else f"{model} − {versus}" for model, versus in columns]
        lines = []
        for client, images in images_of_client.items():
            cells = [format_row(rows_of_score.get((client, *column))) for column in columns]
            # A site of a deployment does not send its number of images.
            lines.append([client, str(images) if images else "–", *cells])
        text = f"{score} (interval of {100 * LEVEL:.0f} %)\n\n{table(header, lines)}"
        unranked = dict.fromkeys(
            client for (client, _, versus), row in rows_of_score.items() if versus is None and not row.is_ranked
        )
        if unranked:
            kind = "images with or without the class" if score == AUROC else "images or groups of images"
            reason = f"fewer than {FEWEST} {kind}"
            text += f"\n\nToo few to rank ({reason}): {abbreviated(list(unranked))}"
        return text


def format_row(row: ScoreRow | None) -> str:
    """Return a score with its interval; in brackets if its support is too small to rank clients by it.

    >>> format_row(ScoreRow("north", "ours", None, "accuracy", None, 0.9, 0.7, 0.97, 20, 20))
    '0.900 [0.700, 0.970]'
    >>> format_row(ScoreRow("north", "ours", None, "auroc", None, 0.9, 0.1, 0.99, 2, 20))
    'too few: 2 (0.900)'
    """
    if row is None or math.isnan(row.value):
        return "–"
    value = _format_number(row.value)
    if not row.is_ranked:
        return f"too few: {row.support} ({value})"
    if math.isnan(row.low):
        return value
    return f"{value} [{_format_number(row.low)}, {_format_number(row.high)}]"


def _format_number(value: float) -> str:
    """Return a number with three decimal places, or four digits if it is larger."""
    # Small negative numbers are rounded to 0, and not to -0.
    return f"{round(value, 3) + 0.0:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _format_cell(value: object) -> str:
    """Return the cell of a value in a table that spreadsheets read."""
    if value is None:
        return ""
    return cell_text(value) if isinstance(value, str) else str(value)
