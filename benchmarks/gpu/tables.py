# SPDX-License-Identifier: Apache-2.0
"""The results of ``make gpu`` as Markdown, from what is in its folder: after each part, and also if it was cut off."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.runner import RECORD

ABOUT = {"benchmark", "machine", "instructions", "threads", "load", "commit", "torch"}
"""What a benchmark's row says of the machine, which is shown once."""
BEGIN = "<!-- make gpu: begin -->"
END = "<!-- make gpu: end -->"
"""Between these lines a page has the tables."""


def page(parts: Sequence[Part], output: Path) -> str:
    """Return the tables of a folder of results, those of parts that were cut off too."""
    record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    outcomes = {outcome["name"]: outcome for outcome in record["parts"]}
    machine = "; ".join(f"{name} {value}" for name, value in record["machine"].items())
    blocks = [f"Measured by `make gpu` on: {machine}."]
    rows = []
    for part in parts:
        outcome = outcomes.get(part.name, {"status": "not run", "reason": "not reached", "seconds": 0.0})
        rows.append([f"`{part.name}`", part.purpose, outcome["status"], f"{outcome['seconds']:.0f}", outcome["reason"]])
    blocks.append(markdown(["part", "what it answers", "status", "s", "reason"], rows))
    for part in parts:
        body = _body(output, part.name)
        if body:
            blocks.append(f"**{part.name}**: {part.purpose}\n\n{body}")
    return "\n\n".join(blocks) + "\n"


def _body(output: Path, name: str) -> str:
    """Return what a part's files show, or nothing where there are none."""
    file = output / f"{name}.json"
    if not file.is_file():
        return _tests(output / f"{name}.log")
    try:
        return _results(json.loads(file.read_text(encoding="utf-8")))
    except Exception as error:  # whatever one file holds, the tables of the others are written
        return f"`{file.name}` cannot be shown: {type(error).__name__}: {error}"


def write_into(document: Path, text: str) -> None:
    """Put the tables between the two marks of a document.

    Raises:
        ValueError: If it does not have both.
    """
    content = document.read_text(encoding="utf-8")
    before, begin, behind_begin = content.partition(BEGIN)
    _, end, after = behind_begin.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} must have the lines {BEGIN!r} and {END!r}, between which the tables go")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = []
    for row in (columns, ["---"] * len(columns), *rows):
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _results(records: list[dict[str, Any]]) -> str:
    """Return the table of a benchmark, or of a comparison."""
    if any("stage" in record for record in records):
        return _comparison(records)
    columns: dict[str, None] = {}  # in order
    for record in records:
        for name, value in record.items():
            if name not in ABOUT and not isinstance(value, dict):
                columns[name] = None
    rows = []
    for record in records:
        cells = [record.get(name, "") for name in columns]
        rows.append(["" if isinstance(cell, dict) else _cell_text(cell) for cell in cells])
    return markdown(list(columns), rows)


def _cell_text(value: object) -> str:
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return str(value)


def _comparison(records: list[dict[str, Any]]) -> str:
    """Return a comparison's table of the seeds that all methods have, or of all that there is if none is complete."""
    from perada.studies.compare.tables import summary  # needs torch, which the runner does without

    runs = [record for record in records if record["stage"] == "run" and "failed" not in record]
    labels = {record["label"] for record in runs}
    seeds = sorted({record["seed"] for record in runs})
    complete_seeds = []
    for seed in seeds:
        labels_with_seed = {run["label"] for run in runs if run["seed"] == seed}
        if labels_with_seed == labels:
            complete_seeds.append(seed)
    seeds_text = ", ".join(str(seed) for seed in complete_seeds)
    note = f"Seeds of all methods: {seeds_text or 'none'}."
    if not runs:
        return note
    if complete_seeds:
        records = [record for record in records if record["seed"] in complete_seeds]
    return f"{note}\n\n{summary(records)}"


def _tests(log: Path) -> str:
    """Return how many tests passed, and which did not, from a log in which pytest names each."""
    if not log.is_file():
        return ""
    outcomes: dict[str, list[str]] = {name: [] for name in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        # As in "tests/test_cuda.py::test_a_local_step_never_waits[apfl] PASSED [ 60%]".
        for place, word in enumerate(words):
            if word in outcomes and place and "::" in words[0]:
                outcomes[word].append(words[0])
                break
    if not any(outcomes.values()):
        return ""
    counts = ", ".join(f"{len(names)} {status.lower()}" for status, names in outcomes.items())
    wrong = [f"- `{name}`" for name in (*outcomes["FAILED"], *outcomes["ERROR"])]
    return "\n".join([f"{counts}.", *wrong])
