# SPDX-License-Identifier: Apache-2.0
"""A survey as a table, as JSON, and in words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perada.core.text import printable
from perada.results.report import table
from perada.survey.findings import compare_with_others, describe_total
from perada.survey.layout import SurveyTally
from perada.system.files import write_atomic

TOGETHER = "together"


@dataclass(frozen=True)
class Survey:
    """Result of a survey.

    Attributes:
        total: Sum over sites.
        rows: Tallies of the sites, or clients, that are known, by name.
        missing: Why other sites are not in the sum, by name.
        sites: Names of the sites in the sum.
    """

    total: SurveyTally
    rows: Mapping[str, SurveyTally] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    sites: Sequence[str] = ()

    def findings(self) -> dict[str, list[str]]:
        """Return where sites do not fit together: of the sum, and of each site whose tally is known, by name."""
        findings = {TOGETHER: describe_total(self.total)}
        if self.total.num_sites > 1:
            for name, row in self.rows.items():
                findings[name] = compare_with_others(row, self.total.without(row))
        return findings


def format_counts(survey: Survey) -> str:
    """Format all counts that are not zero as a table, with a column for each known site and one for the sum.

    Of a single site without a column of its own, the sum is the site's.
    """
    min_count = survey.total.layout.options.min_count
    rows = []
    for block, name, cell in survey.total.rows():
        cells = [row.cell(block, name).describe(min_count) for row in survey.rows.values()]
        sites = "" if survey.total.is_noisy else f"{cell.num_sites} of {survey.total.num_sites}"
        rows.append([block, name, *cells, cell.describe(min_count), sites])
    if survey.total.num_sites == 1:
        return table(["", "count of", "images"], [row[:3] for row in rows], left_columns=2)
    return table(["", "count of", *survey.rows, TOGETHER, "at sites"], rows, left_columns=2)


def format_findings(survey: Survey) -> str:
    """Format where sites do not fit together as a list."""
    lines = []
    for name, findings in survey.findings().items():
        for finding in findings:
            subject = "" if survey.total.num_sites == 1 else f"{printable(name)}: "
            lines.append(f"- {subject}{printable(finding)}")
    return "\n".join(lines) or "- Nothing, as far as counts show it."


def format_survey(survey: Survey) -> str:
    """Format a survey as a page of Markdown."""
    total = survey.total
    parts = ["## What does not fit", "", format_findings(survey), ""]
    if len(survey.rows) < total.num_sites > 1:
        parts += [
            "Only sums are known of sites without a column. Each site's own log says how it differs from the others.",
            "",
        ]
    if total.is_noisy:
        parts += [
            f"The counts have noise with a standard deviation of {total.noise:.1f}; those below {3 * total.noise:.0f} "
            "are not shown.",
            "",
        ]
    if survey.missing:
        names = ", ".join(f"{printable(name)} ({code})" for name, code in survey.missing.items())
        parts += [f"Not in the sum: {names}.", ""]
    return "\n".join([*parts, "## Counts", "", format_counts(survey)])


def survey_record(survey: Survey) -> dict[str, Any]:
    """Return a survey as values for a JSON file."""
    return {
        "options": asdict(survey.total.layout.options),
        "sites": list(survey.sites),
        "missing": dict(survey.missing),
        "findings": survey.findings(),
        "noise": survey.total.noise,
        TOGETHER: _tally_record(survey.total),
        "rows": {name: _tally_record(row) for name, row in survey.rows.items()},
    }


def _tally_record(tally: SurveyTally) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts that are not zero by block and name."""
    record: dict[str, dict[str, dict[str, int]]] = {}
    for block, name, cell in tally.rows():
        record.setdefault(block, {})[name] = asdict(cell)
    return record


def write_survey(survey: Survey, folder: Path, name: str) -> Path:
    """Write the page and the record of a survey, ``NAME.md`` and ``NAME.json``, and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    record = json.dumps(survey_record(survey), indent=1, ensure_ascii=False)
    write_atomic(folder / f"{name}.json", record.encode())
    page = folder / f"{name}.md"
    write_atomic(page, f"# Survey of {survey.total.num_sites} sites\n\n{format_survey(survey)}\n".encode())
    return page
