# SPDX-License-Identifier: Apache-2.0
"""Which row of a comparison to take, in words, and which differences chance may explain."""

from collections.abc import Iterable, Sequence

from perada.core.text import printable_lines
from perada.results.report import SHARES, ScoreUnit, table
from perada.studies.compare.comparison import CRITERIA, MEAN, OWN, ComparedRow, Comparison, NotComparableError
from perada.studies.compare.differences import Difference
from perada.studies.compare.results import Record

MAYBE_CHANCE = "≈"
"""Marks a difference that chance may explain."""
ROWS_LISTED = 5
"""Largest number of rows that a sentence names."""
CLIENTS_LISTED = 3
"""Largest number of clients that are named on either side."""


def verdict(records: Iterable[Record]) -> str:
    """Return the verdict on the finished runs of a comparison: what to take, and a table of differences.

    Returns:
        Markdown; empty if fewer than two rows have scores of clients.
    """
    try:
        comparison = Comparison(records)
    except NotComparableError as error:
        if error.is_worth_saying:
            return f"No advice on which row to take: {error}."
        return ""
    parts = [
        _format_title(comparison),
        _format_advice(comparison),
        _make_difference_table(comparison),
        _format_note(comparison),
    ]
    return printable_lines("\n\n".join(parts))


def _format_title(comparison: Comparison) -> str:
    num_seeds = len(comparison.seeds)
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    clients = "one client" if comparison.num_clients == 1 else f"{comparison.num_clients} clients"
    return f"Which row to take, judged on {clients} with {seeds}:"


def _format_advice(comparison: Comparison) -> str:
    """Return what to take by each criterion, and which clients gain over training alone."""
    lines = [f"- {_format_advice_on(comparison, criterion)}" for criterion in comparison.criteria]
    lines += [f"- {line}" for line in _describe_gains_over_training_alone(comparison)]
    return "\n".join(lines)


def _format_advice_on(comparison: Comparison, criterion: str) -> str:
    """Return the sentence on one criterion: the best row, and what chance may put in its place."""
    best = comparison.best(criterion)
    score = comparison.unit.text(best.mean(criterion))
    text = f"{_capitalize_first(CRITERIA[criterion])}: {best.name} ({score})"
    # Differences that chance may explain leave other rows in question.
    names_level = [entry.second for entry in comparison.differences(criterion) if not entry.is_significant]
    rows_level = [row for row in comparison.rows if row.name in names_level]
    if not rows_level:
        if len(comparison.seeds) == 1:
            return f"{text}, ahead of all others in this run."
        return f"{text}. It is better than all others."
    text += f". Chance may explain its lead over {_join_names([row.name for row in rows_level])}."
    cheapest = min([best, *rows_level], key=lambda row: row.megabytes)
    if cheapest.megabytes < best.megabytes:
        text += f" Of these, {cheapest.name} sends least ({_format_megabytes(cheapest)})."
    return text


def _describe_gains_over_training_alone(comparison: Comparison) -> list[str]:
    """Return which clients gain and lose on their own images by the best row that sends something.

    Returns:
        One sentence; none unless a row trains alone and another one does not.
    """
    alone = [row for row in comparison.rows if row.trains_alone]
    federated = [row for row in comparison.rows if not row.trains_alone]
    if not alone or not federated or OWN not in comparison.criteria:
        return []
    criterion = MEAN if MEAN in comparison.criteria else OWN
    sign = -1 if comparison.lower_is_better else 1
    chosen = max(federated, key=lambda row: sign * row.mean(criterion))
    for entry in comparison.differences(OWN, reference=chosen.name):
        if entry.second == alone[0].name:
            return [_describe_gains(comparison, entry)]
    return []


def _describe_gains(comparison: Comparison, entry: Difference) -> str:
    """Return how many clients gain and lose by a difference, with the largest gains and losses."""
    by_client = list(zip(entry.of_clients, comparison.client_names, strict=True))
    # A client without a score has NaN, which is neither.
    gains = sorted([pair for pair in by_client if pair[0] > 0], key=lambda pair: -pair[0])
    losses = sorted([pair for pair in by_client if pair[0] < 0], key=lambda pair: pair[0])
    unit = comparison.unit
    text = f"With {entry.first} instead of {entry.second}, own images gain at {_list_clients(gains, unit)}"
    return f"{text} and lose at {_list_clients(losses, unit)}, of {comparison.num_clients} clients."


def _list_clients(pairs: Sequence[tuple[float, str]], unit: ScoreUnit) -> str:
    """Return the number of clients, with the differences and names of the first ones."""
    if not pairs:
        return "none"
    examples = [f"{name} {_format_signed(value, unit)}" for value, name in pairs[:CLIENTS_LISTED]]
    ending = ", ..." if len(pairs) > CLIENTS_LISTED else ""
    return f"{len(pairs)} ({', '.join(examples)}{ending})"


def _make_difference_table(comparison: Comparison) -> str:
    """Return a table with the differences of all rows from the best one by each criterion."""
    cells_of_row: dict[str, list[str]] = {row.name: [] for row in comparison.rows}
    for criterion in comparison.criteria:
        best = comparison.best(criterion)
        cells_of_row[best.name].append(f"best: {comparison.unit.number(best.mean(criterion))}")
        for entry in comparison.differences(criterion):
            cells_of_row[entry.second].append(_format_difference(entry, comparison.unit))
    rows = [[name, *cells] for name, cells in cells_of_row.items()]
    return table(["", *(CRITERIA[criterion] for criterion in comparison.criteria)], rows)


def _format_difference(entry: Difference, unit: ScoreUnit) -> str:
    """Return how far a row is behind the best one, with its interval."""
    interval = f"[{_format_signed(-entry.high, unit)}, {_format_signed(-entry.low, unit)}]"
    mark = "" if entry.is_significant else f"{MAYBE_CHANCE} "
    return f"{mark}{_format_signed(-entry.mean, unit)} {interval}"


def _format_note(comparison: Comparison) -> str:
    """Return what the table shows and what its intervals do not cover."""
    unit = "percentage points" if comparison.unit is SHARES else "the unit of the scores"
    note = (
        f"Differences from the best row of each column in {unit}, with 95 % confidence intervals. {MAYBE_CHANCE}: "
        "chance may explain the difference (p ≥ 0.05 after Holm's correction for all differences of the table)."
    )
    if comparison.lower_is_better:
        note += " Lower scores are better; a negative difference is a worse score."
    if comparison.without_scores:
        note += f" Left out, since a run diverged or a model has no score: {_join_names(comparison.without_scores)}."
    if len(comparison.seeds) == 1:
        note += (
            " With one seed, intervals cover the choice of clients only. Another seed may reverse a difference that is "
            "not marked; --seeds 0 1 2 tells."
        )
    return note


def _format_signed(value: float, unit: ScoreUnit) -> str:
    """Return a difference with its sign."""
    if unit is SHARES:
        text = f"{unit.factor * value:+.1f}"
    else:
        text = f"{value:+.3g}"
    if float(text) == 0:
        return "0"  # not −0.0
    return text.replace("-", "−")


def _format_megabytes(row: ComparedRow) -> str:
    return "nothing" if row.trains_alone else f"{row.megabytes:.2f} MB"


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _join_names(names: Sequence[str]) -> str:
    """Return names as an enumeration, the first ones of many, with semicolons if names have commas.

    >>> _join_names(["a"]), _join_names(["a", "b", "c"]), _join_names(["a, b", "c"])
    ('a', 'a, b and c', 'a, b; c')
    """
    if len(names) > ROWS_LISTED:
        names = [*names[: ROWS_LISTED - 1], f"{len(names) - ROWS_LISTED + 1} more"]
    if any("," in name for name in names):
        return "; ".join(names)
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
