# SPDX-License-Identifier: Apache-2.0
"""The page of a report and the files beside it."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from perada.core.files import writing
from perada.core.text import cell_text, printable
from perada.results.report import SCORES, percent, scores_beside, title
from perada.studies.drawing import check_drawing
from perada.studies.report.records import Record
from perada.studies.report.sections import SHOWN, Cell, Section, Table, all_of, sections
from perada.studies.report.several import comparison


@dataclass
class Part:
    """One of several runs, with its sections."""

    key: str
    title: str
    intro: str
    sections: list[Section]


def check_page(output: Path) -> None:
    """See that a report can be made and written into a folder, before anything is read.

    Raises:
        FileExistsError: If ``output`` is a file.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"--output {str(output)!r} is a file; give a folder")
    check_drawing("perada report --output", "report")


def write_page(output: Path, records: Sequence[Record], scores: bool | None = None) -> Path:
    """Write ``index.html``, and beside it each figure as PNG and each table as CSV.

    Args:
        output: Folder of the page.
        records: The runs.
        scores: Whether scores, losses and diagnostics are shown; by default not those of private runs, since they
            follow from clients' images and no ledger counts them.

    Returns:
        The page's path. It loads nothing from a network, and has no script; names of clients and classes are text.
    """
    shown = (not record.private if scores is None else scores for record in records)
    records = [record if show else record.published() for record, show in zip(records, shown, strict=True)]
    parts: list[Section | Part] = []
    if len(records) == 1:
        found = sections(records[0])
        parts += found
    else:
        found = comparison(records)
        parts += found
        for number, record in enumerate(records, 1):
            own = sections(record, f"run{number}_") if not record.group else []
            if own:
                where = f"From {printable(str(record.folder))}."
                parts.append(Part(f"run{number}", f"Run {number}: {record.name}", where, own))
                found = found + own
    drawn, tables = all_of(found)
    output.mkdir(parents=True, exist_ok=True)
    path, page = output / "index.html", _html(records, parts)
    with writing(output):
        for figure in drawn:
            (output / f"{figure.name}.png").write_bytes(figure.png)
        for table in tables:
            (output / f"{table.name}.csv").write_text(as_csv(table), encoding="utf-8")
        path.write_text(page, encoding="utf-8")
    return path


def _html(records: Sequence[Record], parts: Sequence[Section | Part]) -> str:
    import jinja2

    text = files("perada.studies.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    one = records[0] if len(records) == 1 else None
    title = f"Run {one.name}" if one else f"{len(records)} runs"
    subtitle = _described(one) if one else "Side by side, then each of them."
    facts = _facts(one) if one else []
    return environment.from_string(text).render(title=title, subtitle=subtitle, facts=facts, parts=parts, most=SHOWN)


def _described(record: Record) -> str:
    info = record.info
    if not info:
        return "Its folder has the rounds alone."
    what = f"{info.get('algorithm', 'unknown algorithm')} on {info.get('backbone') or 'a network of its own'}"
    seed = "" if info.get("seed") is None else f", seed {info['seed']}"
    count = len(record.client_names)
    sizes = [
        counted(count, "client"),
        counted(info["num_classes"], "class", "es"),
        counted(len(record.rounds), "round"),
    ]
    first = (info.get("training") or {}).get("metric") or "auto"
    while first and isinstance(first, list | dict):  # of several metrics the first, by its name
        first = next(iter(first))
    if first == "auto":
        first = "auroc" if record.several_labels else "accuracy"
    scored = f" Scores are {first}, in %."
    return f"{what}, {', '.join(sizes)}{seed}.{scored if 'training' in info else ''}"


def counted(number: int, word: str, plural: str = "s") -> str:
    """A number and what is counted.

    >>> counted(1, "round"), counted(3, "class", "es")
    ('1 round', '3 classes')
    """
    return f"{number} {word}{plural if number != 1 else ''}"


def _facts(record: Record) -> list[tuple[str, str]]:
    """The scores after the last round, and what they were before."""
    names = [SCORES[0], *scores_beside(record.rounds[-1:], record.test_images), *SCORES[1:]]
    found = [(title(name), f"{percent(record.last(name))} %") for name in names if not math.isnan(record.last(name))]
    initial = [value for value in record.initial.get(SCORES[0], []) if value == value]
    if initial:
        found.insert(0, (f"{title(SCORES[0])}, before training", f"{percent(sum(initial) / len(initial))} %"))
    return found


def as_csv(table: Table) -> str:
    """A table as CSV: scores from 0 to 1, nothing for NaN, and no cell that a spreadsheet takes for a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_cell, table.header))
    writer.writerows(map(_cell, row) for row in table.rows)
    return file.getvalue()


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell_text(cell)
    return "" if cell != cell else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
