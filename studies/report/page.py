# SPDX-License-Identifier: Apache-2.0
"""The page of a report and its accompanying files."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from perada.core.text import cell_text, printable, printable_lines
from perada.results.overwriting import foreign_file
from perada.results.report import SCORES, SCORES_OF_BOTH, score_title, scores_beside, title_with_metric
from perada.results.run_file import RUN_FILE
from perada.studies.drawing import check_drawing
from perada.studies.report.baselines import predicts_with_both
from perada.studies.report.contrasts import Baselines
from perada.studies.report.figures import OWN_SCORE
from perada.studies.report.outcome import describe_outcome
from perada.studies.report.pictures import (
    find_examples,
    find_foreign_images,
    find_predicted_images,
    has_masks,
    read_example,
    read_foreign_image,
    read_predicted_image,
    read_public_pictures,
)
from perada.studies.report.records import RunRecord, unit_on_page
from perada.studies.report.sections import MAX_ROWS, Cell, Section, Table, sections
from perada.studies.report.several import comparison
from perada.system.files import check_output_folder, write_atomic, writing

PAGE = "index.html"
_CRITERIA = {"own": "own images", "all": "images of all clients"}
"""Titles of the test sets of a comparison, by its criteria."""
MARK = '<meta name="generator" content="perada">'
"""Line in the head of the page that distinguishes it from other pages."""


@dataclass
class RunPart:
    """The sections of one of several runs, under a heading."""

    key: str
    title: str
    intro: str
    sections: list[Section]


def check_page(output: Path) -> None:
    """Check that a report can be written to a folder, before anything is read.

    Raises:
        FileExistsError: If the folder has an ``index.html`` that is not a report.
        NotADirectoryError: If ``output``, or a folder above it, is a file.
        PermissionError: If this user may not write to it.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    check_output_folder("--output", output)
    page = output / PAGE
    if page.exists() and not _is_report(page):
        raise foreign_file(page)
    check_drawing("perada report --output", "report")


def _is_report(page: Path) -> bool:
    """Return whether perada wrote a page. It writes no links, whose targets are not read."""
    return not page.is_symlink() and MARK in page.read_text(encoding="utf-8", errors="replace")[:1000]


def _check_files(output: Path, names: Iterable[str]) -> None:
    """Raise a FileExistsError if a folder has files of these names that do not belong to a report."""
    page = output / PAGE
    if page.exists():
        if not _is_report(page):
            raise foreign_file(page)
        return
    for name in names:
        if (output / name).exists():
            raise foreign_file(output / name)


def write_page(
    output: Path,
    run_records: Sequence[RunRecord],
    with_scores: bool | None = None,
    *,
    refresh: int | None = None,
) -> Path:
    """Write ``index.html``, and next to it each figure as PNG and each table as CSV.

    Args:
        output: Folder of the page.
        run_records: The runs.
        with_scores: Whether to show scores, losses and diagnostics. By default those of private runs are left out,
            since they follow from the clients' images and no ledger counts them.
        refresh: Seconds after which a browser reloads the page; by default it never does.

    Returns:
        The page's path. It loads nothing from a network, and has no script; names of clients and classes are text.

    Raises:
        FileExistsError: If a file would be replaced that is not part of a report.
    """
    visible_records = []
    for record in run_records:
        has_scores = not record.private if with_scores is None else with_scores
        visible_records.append(record if has_scores else record.published())

    sections_and_runs: list[Section | RunPart] = []
    if len(visible_records) == 1:
        sections_and_runs += sections(visible_records[0])
    else:
        sections_and_runs += comparison(visible_records)
        sections_and_runs += _run_parts(visible_records)
    all_sections: list[Section] = []
    for part in sections_and_runs:
        all_sections += part.sections if isinstance(part, RunPart) else [part]

    path = output / PAGE
    page = _render_page(visible_records, sections_and_runs, refresh)
    contents: dict[str, bytes] = {}
    for section in all_sections:
        for figure in section.figures:
            contents[f"{figure.name}.png"] = figure.png
        for table in section.tables:
            contents[f"{table.name}.csv"] = as_csv(table).encode()
    _check_files(output, contents)
    output.mkdir(parents=True, exist_ok=True)
    with writing(output):
        for name, content in contents.items():
            (output / name).write_bytes(content)
    write_atomic(path, page.encode())  # a browser may reload it at any time
    return path


def with_pictures(run_records: Sequence[RunRecord], with_scores: bool | None, pictures: Path) -> RunRecord:
    """Return the record of the only run with the test images to show.

    Args:
        run_records: The runs of the page.
        with_scores: See :func:`write_page`.
        pictures: Folder of ``perada predict --config`` with masks, with images that are predicted correctly or not, or
            with images that look foreign.

    Raises:
        ValueError: If there are several runs, the run is private and its scores are left out, or a file does not fit
            or is damaged.
        FileNotFoundError: If there are no pictures.
    """
    if len(run_records) != 1 or not run_records[0].info:
        raise ValueError("--pictures needs a single run, and one that was scored; pass one folder of a run")
    record = run_records[0]
    if record.private and not with_scores:
        raise ValueError(
            "--pictures shows test images, but the run is private and its ε does not cover them; add --scores=true, "
            "or leave --pictures out"
        )
    # All headers are checked before the imports that reading pixels takes.
    num_clients = len(record.client_names)
    foreign_files = find_foreign_images(pictures, num_clients)
    predicted_files = find_predicted_images(pictures, num_clients, len(record.class_names))
    files_of_examples = []
    if has_masks(pictures) or not (foreign_files or predicted_files):
        files_of_examples = find_examples(pictures, num_clients)
    return replace(
        record,
        examples=[read_example(pictures, example_files) for example_files in files_of_examples],
        foreign_examples=[read_foreign_image(pictures, image) for image in foreign_files],
        predicted_examples=[read_predicted_image(pictures, image) for image in predicted_files],
        public_pictures=read_public_pictures(pictures),
    )


def _run_parts(run_records: Sequence[RunRecord]) -> list[RunPart]:
    """Return the parts of the page with one run each, except those of a comparison's file."""
    parts = []
    for number, record in enumerate(run_records, start=1):
        if record.row_name:
            continue
        own_sections = sections(record, prefix=f"run{number}_")
        if own_sections:
            intro = f"From {printable(str(record.folder))}."
            parts.append(RunPart(f"run{number}", f"Run {number}: {record.name}", intro, own_sections))
    return parts


def _render_page(
    run_records: Sequence[RunRecord], sections_and_runs: Sequence[Section | RunPart], refresh: int | None
) -> str:
    import jinja2

    template = files("perada.studies.report").joinpath("page.html").read_text(encoding="utf-8")
    # Names come from anyone's files, so everything is escaped but the figures' own markup.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    notes = []
    outcome = None
    if len(run_records) == 1:
        title = _run_title(run_records[0])
        subtitle = _describe_run(run_records[0])
        facts = _collect_facts(run_records[0])
        outcome = describe_outcome(run_records[0])
        if run_records[0].undefined_note:
            notes.append(run_records[0].undefined_note)
    else:
        for record in run_records:
            if record.undefined_note:
                seed = "" if record.seed is None else f", seed {record.seed}"
                notes.append(f"{record.name}{seed}: {record.undefined_note}")
        title = f"{len(run_records)} runs"
        subtitle = "Side by side, then each of them."
        facts = []
    page = environment.from_string(template).render(
        title=title,
        subtitle=subtitle,
        outcome=outcome,
        facts=facts,
        notes=notes,
        parts=sections_and_runs,
        max_rows=MAX_ROWS,
        refresh=refresh,
    )
    return printable_lines(page)


def _run_title(record: RunRecord) -> str:
    """Return the recipes, the folder's name and the date of a run, as far as they are known.

    The date is that of the last round, in local time: the run's files have none inside.
    """
    words = record.command
    recipes = []
    for index, word in enumerate(words):
        if word.startswith("--config="):
            recipes.append(Path(word.removeprefix("--config=")).stem)
        elif word == "--config":
            recipes += [Path(name).stem for name in words[index + 1 : index + 2]]
    run_title = f"Run {record.name}"
    if recipes:
        run_title = f"{' + '.join(recipes)}, run {record.name}"
    for name in (RUN_FILE, "metrics.csv"):
        file = record.folder / name
        if file.is_file():
            day = datetime.fromtimestamp(file.stat().st_mtime).astimezone().date()
            return f"{run_title}, {day.isoformat()}"
    return run_title


def _describe_run(record: RunRecord) -> str:
    """Return a sentence on the algorithm, the backbone and the sizes of a run."""
    info = record.info
    if not info:
        return "Its folder has only the rounds."
    algorithm = info.get("algorithm", "unknown algorithm")
    backbone = info.get("backbone") or "a custom network"
    clients = counted(len(record.client_names), "client")
    classes = counted(info["num_classes"], "class", "es")
    if not record.has_classes:
        classes = counted(info["num_classes"], "target")
    rounds = counted(len(record.rounds), "round")
    sentence = f"{algorithm} on {backbone}, {clients}, {classes}, {rounds}"
    if info.get("seed") is not None:
        sentence += f", seed {info['seed']}"
    if "training" in info:
        metric = score_title(record.first_metric)
        if record.unit.symbol:
            metric += f", in{record.unit.symbol}"
        return f"{sentence}. Scores are {metric}."
    return f"{sentence}."


def counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number and what is counted.

    >>> counted(1, "round"), counted(3, "class", "es")
    ('1 round', '3 classes')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page, with its name."""

    name: str
    value: str


def _collect_facts(record: RunRecord) -> list[Fact]:
    """Return the mean scores after the last round, beside those of the baselines or from before training."""
    if record.baselines is not None:
        return _facts_beside_baselines(record.baselines)
    facts = []
    initial = [score for score in record.initial.get(OWN_SCORE, []) if not math.isnan(score)]
    if initial:
        own_title = title_with_metric(OWN_SCORE, record.first_metric)
        before = "before training" if record.info.get("text_head") is None else "zero-shot"
        facts.append(Fact(f"{own_title}, {before}", record.unit.text(sum(initial) / len(initial))))
    own_score, *other_scores = SCORES
    names = [own_score, *scores_beside(record.rounds[-1:], record.test_images), *other_scores]
    if predicts_with_both(record):
        names += SCORES_OF_BOTH
    for name in names:
        score = record.last(name)
        if name in record.undefined_scores or not math.isnan(score):
            facts.append(Fact(title_with_metric(name, record.first_metric), record.unit.text(score)))
    return facts


def _facts_beside_baselines(baselines: Baselines) -> list[Fact]:
    """Return the mean scores of the run and of each baseline, on own images and on those of all clients."""
    comparison = baselines.comparison
    facts = []
    for criterion in ("own", "all"):
        if criterion not in comparison.criteria:
            continue
        for row in comparison.rows:
            score = unit_on_page(comparison.unit).text(row.mean(criterion))
            facts.append(Fact(f"{_CRITERIA[criterion]}, {row.name}", score))
    return facts


def as_csv(table: Table) -> str:
    """Return a table as CSV, with scores from 0 to 1.

    NaN is an empty cell, and no text is taken for a formula by a spreadsheet.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_csv_cell(name) for name in table.column_names])
    for row in table.rows:
        writer.writerow([_csv_cell(cell) for cell in row])
    return file.getvalue()


def _csv_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell_text(printable(cell))
    if isinstance(cell, int):
        return str(cell)
    return "" if math.isnan(cell) else f"{cell:.6g}"
