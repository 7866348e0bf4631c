# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison, as Markdown: the summary, the grid, and the scores by round."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

from perada.core.text import printable
from perada.results.report import (
    ENTROPY,
    MODES,
    SCORES,
    SHARES,
    TYPICAL_SHARES,
    ScoreUnit,
    epsilon_text,
    percent,
    score_title,
    scores_beside,
    scores_of_both,
    shift_names,
    table,
    title,
    unit_of,
)
from perada.studies.compare.plan import DIAGNOSTIC_PREFIXES, SELECTION_SCORES, SELECTION_SCORES_OF_BOTH, named
from perada.studies.compare.results import (
    NO_POINT,
    Record,
    choose_trial,
    lower_is_better,
    records_of_rows,
    score_text,
    trials_of,
)


@dataclass(frozen=True)
class EpsilonColumn:
    """A column with an ε: its heading, and the explanation in the note below the table."""

    heading: str
    explanation: str


EPSILONS = {
    "privacy/server_epsilon_mean": EpsilonColumn("ε server", "mean over clients, for what they sent"),
    "privacy/release_epsilon_mean": EpsilonColumn("ε release", "for all that they trained"),
    "privacy/release_epsilon_max": EpsilonColumn("ε max", "its largest"),
    "privacy/client_epsilon_max": EpsilonColumn("ε client", "largest client-level ε"),
}


@dataclass(frozen=True)
class CostColumn:
    """A column with a cost.

    Attributes:
        heading: Heading of the column.
        metric: Name of the cost in a record.
        full_metric: Name of the same cost with full fine-tuning; empty if it is not known.
        form: Format of the number.
    """

    heading: str
    metric: str
    full_metric: str
    form: str


COSTS = (
    CostColumn("trained", "params/trained", "full/params", "{:,.0f}"),
    CostColumn("sent", "params/sent", "full/params", "{:,.0f}"),
    CostColumn("MB sent", "mb_sent", "full/mb", "{:.2f}"),
    CostColumn("s / round", "seconds_per_round", "", "{:.1f}"),
)

Columns = dict[str, Callable[[Sequence[Record]], str]]
"""For each heading, the function that returns a cell for the runs of a row."""


def summary(records: Sequence[Record]) -> str:
    """Return a table with a row for each label, and notes on it.

    Scores are means over seeds, with the sample standard deviation if there are several. Rows of one label that were
    requested with different options have these in their names.
    """
    final_records = _with_starts([record for record in records if record["stage"] != "tune"])
    rows_by_name = records_of_rows(final_records)
    columns = _summary_columns(final_records)
    table_rows = []
    for name, records_of_row in rows_by_name.items():
        runs = _finished_records(records_of_row)
        num_failed = len(records_of_row) - len(runs)
        if num_failed:
            name += f" ({num_failed} of {len(records_of_row)} failed)"
        if any(record.get("diverged") for record in runs):
            name += " (diverged)"
        table_rows.append([name, *(text_of(runs) for text_of in columns.values())])
    labels_without_point = _labels_without_point(records, final_records)
    for label in labels_without_point:
        table_rows.append([f"{label} (failed)", *["–"] * len(columns)])
    table_rows += _full_fine_tuning_rows(final_records, columns)

    parts = [table(["", *columns], table_rows), _score_note(final_records, rows_by_name)]
    parts += _stale_clients_note(rows_by_name)
    parts += _epsilon_notes(records, final_records)
    if labels_without_point:
        parts.append("\n".join(f"{label}: {NO_POINT}." for label in labels_without_point))
    return _join_printable([*parts, *_list_failures(final_records)])


def _finished_records(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "failed" not in record]


def _summary_columns(records: Sequence[Record]) -> Columns:
    """Return the columns of the summary that some record has a value for."""
    columns: Columns = {}
    for name in _summary_scores(records):
        columns[title(name)] = partial(_score_over_seeds, name=name)
    for name in _epsilons_of(records):
        columns[EPSILONS[name].heading] = partial(_epsilon_over_seeds, name=name)
    if any(_lost_in_aggregation(record) is not None for record in records):
        columns["lost"] = _lost_over_seeds
    for cost in COSTS:
        columns[cost.heading] = partial(_cost_over_seeds, cost=cost)
    if any(record.get("point") for record in records):
        columns["chosen"] = _chosen_values
    return columns


def _summary_scores(records: Sequence[Record]) -> list[str]:
    """Return the names of the scores in the summary, in its order."""
    test_images: list[int] = []
    names: set[str] = set()
    for record in records:
        test_images += record.get("test_images", [])
        names.update(record)
    modes = [name for name in MODES if any(record.get(name) is not None for record in records)]
    own_score, *other_scores = SCORES
    own_scores = [own_score, *scores_beside(records, test_images)]
    return [*own_scores, *other_scores, *scores_of_both(names), *modes, *shift_names(names)]


def _epsilons_of(records: Sequence[Record]) -> list[str]:
    """Return the names of the ε that some record has."""
    return [name for name in EPSILONS if any(name in record for record in records)]


def _labels_without_point(records: Sequence[Record], final_records: Sequence[Record]) -> list[str]:
    """Return the labels that were tuned but have no run in the table, since no point of the grid has a score."""
    labels_with_run = {record["label"] for record in final_records}
    tuned_labels = dict.fromkeys(record["label"] for record in records if record["stage"] == "tune")
    return [label for label in tuned_labels if label not in labels_with_run]


def _full_fine_tuning_rows(records: Sequence[Record], columns: Columns) -> list[list[str]]:
    """Return a row with the costs of full fine-tuning for each size of model."""
    record_of_size: dict[tuple[int, float], Record] = {}
    # The first record with a size has the row's label, so it comes last and remains.
    for record in reversed(records):
        if "full/params" in record:
            record_of_size[record["full/params"], record["full/mb"]] = record
    rows = []
    for record in reversed(record_of_size.values()):
        name = "full fine-tuning, for comparison"
        if len(record_of_size) > 1:
            name += f" ({record['label']})"
        costs = {cost.heading: cost.form.format(record[cost.full_metric]) for cost in COSTS if cost.full_metric}
        rows.append([name, *(costs.get(heading, "") for heading in columns)])
    return rows


def _score_note(records: Sequence[Record], rows_by_name: dict[str, list[Record]]) -> str:
    unit = "%"
    if not all(record.get("has_classes", True) for record in records):
        unit = "the units of the targets"
    if any(record.get(ENTROPY) is not None for record in records):
        unit += ", entropy in nats"
    scores = "Scores"
    metrics = {record.get("metric") for record in records}
    if len(metrics) == 1 and None not in metrics:
        metric = str(metrics.pop())
        scores += f": {score_title(metric)}"
    note = (
        f"{scores} in {unit}. Each client's personal model is tested on the "
        "client's own test images and on those of all clients (means over clients), the global model on the latter. "
        "Parameters trained and sent, and MB sent, are of one client in one round."
    )
    if any(len(_finished_records(records_of_row)) > 1 for records_of_row in rows_by_name.values()):
        note += " ± is the sample standard deviation over seeds."
    return note


def _stale_clients_note(rows_by_name: dict[str, list[Record]]) -> list[str]:
    """Return a note on the rows in which clients ended with models that are older than half of the rounds, if any."""
    lines = []
    for name, records_of_row in rows_by_name.items():
        runs = [record for record in records_of_row if record.get("stale_clients")]
        if not runs:
            continue
        worst = max(runs, key=lambda record: record["stale_clients"])
        seed = f" with seed {worst['seed']}" if len(records_of_row) > 1 else ""
        lines.append(f"- {name}: {worst['stale_clients']} of {worst['num_clients']} clients{seed}")
    if not lines:
        return []
    head = (
        "Personal models of clients that have not taken part for more than half of the rounds are stale but included "
        "in the means; train more rounds, or raise clients_per_round. Runs with such clients:"
    )
    return ["\n".join([head, "", *lines])]


def _epsilon_notes(records: Sequence[Record], final_records: Sequence[Record]) -> list[str]:
    """Return the meanings of the columns of ε, and the cost of all runs together; empty without private runs."""
    names = _epsilons_of(final_records)
    if not names:
        return []
    meanings = [f"{EPSILONS[name].heading}: {EPSILONS[name].explanation}" for name in names]
    return ["; ".join(meanings) + ".", _composition_note(records)]


def _composition_note(records: Sequence[Record]) -> str:
    """Return a note on what all private runs cost together: the sum of their ε (basic composition)."""
    sums = []
    for name in ("privacy/release_epsilon_max", "privacy/client_epsilon_max"):
        epsilons = [float(record[name]) for record in records if record.get(name) is not None]
        if epsilons:
            sums.append(f"{EPSILONS[name].heading} = {epsilon_text(math.fsum(epsilons))} of {len(epsilons)} runs")
    return (
        "Each ε is that of one run. Runs on the same images add up over all rows and seeds: whoever sees them all "
        f"sees at most {', '.join(sums)}, at as many times the δ."
    )


def _with_starts(records: Sequence[Record]) -> list[Record]:
    """Return the records with each initial model once.

    If values that were varied change its scores, its label names them.
    """
    starts = [record for record in records if record["stage"] == "start"]
    runs = {(record.get("recipe"), record["seed"]) for record in starts}
    scores = {(record.get("recipe"), record["seed"], *(record.get(name) for name in SCORES)) for record in starts}
    is_the_same_everywhere = len(scores) == len(runs)
    remaining = []
    seen: set[tuple[str, int]] = set()
    for record in records:
        if record["stage"] == "start":
            if not is_the_same_everywhere:
                record = record | {"label": record["label"] + named(record.get("varied", {}))}
            if (record["label"], record["seed"]) in seen:
                continue
            seen.add((record["label"], record["seed"]))
        remaining.append(record)
    return remaining


def grid_table(records: Sequence[Record]) -> str:
    """Return a table of the scores of a grid with a row for each setting, and which one was chosen."""
    trials = [record for record in records if record["stage"] == "tune"]
    texts: dict[str, None] = {}  # in order
    chosen_by: dict[str, None] = {}
    for record in trials:
        texts.update(dict.fromkeys(record["point"]))
        chosen_by.update(dict.fromkeys(record.get("chosen_by", SELECTION_SCORES)))
    rows = []
    for label, records_of_row in records_of_rows(trials).items():
        trials_of_row = trials_of(records_of_row)
        best = choose_trial(trials_of_row)
        for trial in trials_of_row:
            records_of_trial = [record for record in trial.records if record is not None]
            values = [trial.point.get(name, "") for name in texts]
            is_chosen = best is not None and trial.point == best.point
            rows.append([label, *values, score_text(records_of_trial), "chosen" if is_chosen else ""])
    # A file without trials has a table without rows.
    unit = unit_of(trials[0]) if trials else SHARES
    all_lower = all(lower_is_better(record) for record in trials)
    note = _grid_note(list(texts), list(chosen_by), lower_chosen=all_lower, unit=unit)
    if len({record["seed"] for record in trials}) > 1:
        note += " ± is the sample standard deviation over seeds."
    return _join_printable([table(["", *texts, "score", ""], rows), note, *_list_failures(trials)])


def _grid_note(tuned_options: Sequence[str], chosen_by: Sequence[str], *, lower_chosen: bool, unit: ScoreUnit) -> str:
    """Return the explanation of the grid's scores.

    Args:
        tuned_options: Options that were tuned.
        chosen_by: Scores that chose, with a minus if lower values are better.
        lower_chosen: Whether the lowest score is chosen in all rows; then the minus is left out.
        unit: Unit of the scores.
    """
    scores_of_both = [name for name in chosen_by if name.removeprefix("-") in SELECTION_SCORES_OF_BOTH]
    scores_of_one = [name for name in chosen_by if name not in scores_of_both]
    # Rows whose clients have two models are chosen by the same scores as the others, but of another prediction.
    only_some_have_both = bool(scores_of_both and scores_of_one)
    if only_some_have_both:
        chosen_by = scores_of_one
    scores = []
    for signed_name in chosen_by:
        minus = "-" if signed_name.startswith("-") and not lower_chosen else ""
        scores.append(minus + title(signed_name.removeprefix("-")))
    scores_text = " and ".join(scores)
    if len(scores) > 1:
        scores_text = f"mean of {scores_text}"
    if only_some_have_both:
        scores_text += ", by both models of a client where it has both"
    direction = "; the lowest is chosen" if lower_chosen else ""
    quantity = unit.label(f"Scores of {' and '.join(tuned_options)}")
    return f"{quantity}: {scores_text}, of held-out validation images{direction}."


def curve_tables(records: Sequence[Record]) -> str:
    """Return a table for each score and diagnostic, with a column for each round; empty without scores by round."""
    runs = [record for record in records if record["stage"] == "run" and record.get("history")]
    rounds: set[int] = set()
    diagnostics: dict[str, None] = {}  # in order
    for record in runs:
        for metrics in record["history"]:
            rounds.add(metrics["round"])
            diagnostics.update(dict.fromkeys(name for name in metrics if name.startswith(DIAGNOSTIC_PREFIXES)))
    tables = []
    for name in (*SCORES, *diagnostics):
        rows = []
        for label, records_of_row in records_of_rows(runs).items():
            histories = [_history_by_round(record) for record in records_of_row]
            if not any(name in metrics for history in histories for metrics in history.values()):
                continue
            cells = []
            for number in sorted(rounds):
                metrics_of_seeds = [history.get(number, {}) for history in histories]
                cells.append(_over_seeds(metrics_of_seeds, name, unit_of(records_of_row[0])))
            rows.append([label, *cells])
        if rows:
            tables.append(table([f"{title(name)} after round", *(str(number) for number in sorted(rounds))], rows))
    return _join_printable(tables)


def _history_by_round(record: Record) -> dict[int, Record]:
    return {metrics["round"]: metrics for metrics in record["history"]}


def _join_printable(paragraphs: Iterable[str]) -> str:
    """Join parts with empty lines between them, without control characters: names and reasons come from a file."""
    lines = "\n\n".join(paragraphs).split("\n")
    return "\n".join(printable(line) for line in lines)


def _list_failures(records: Sequence[Record]) -> list[str]:
    """Return the list of the runs that failed, with the reasons, if there are any."""
    lines = []
    for record in records:
        if "failed" in record:
            run = [record["label"], f"seed {record['seed']}", *record["point"].values()]
            lines.append(f"- {', '.join(run)}: {record['failed']}")
        if "failed_outputs" in record:
            lines.append(f"- {record['label']}, seed {record['seed']}: {record['failed_outputs']}")
    return ["\n".join(["Failed:", "", *lines])] if lines else []


def _score_over_seeds(runs: Sequence[Record], name: str) -> str:
    """Return the cell of a score or diagnostic, in the unit of the runs' scores."""
    unit = unit_of(runs[0]) if runs else SHARES
    return _over_seeds(runs, name, unit)


def _over_seeds(runs: Sequence[Record], name: str, unit: ScoreUnit) -> str:
    """Return the cell of a score or diagnostic; ``unit`` is that of scores."""
    text_of: Callable[[float], str]
    if name == ENTROPY:
        text_of = "{:.2f}".format
    elif name.startswith(DIAGNOSTIC_PREFIXES):
        text_of = "{:.4g}".format
    elif name.startswith(TYPICAL_SHARES):
        text_of = percent
    else:
        text_of = unit.number
    if any(name in run and run[name] is None for run in runs):
        # The score was NaN in some run. A mean over the other seeds would look like that of all.
        return "–"
    return _format_mean([run[name] for run in runs if run.get(name) is not None], text_of)


def _epsilon_over_seeds(runs: Sequence[Record], name: str) -> str:
    """Return the cell of an ε: the largest over seeds of a largest over clients, the mean over seeds of a mean."""
    values = [float(run[name]) for run in runs if name in run]
    if values and name.endswith("_max"):
        return epsilon_text(max(values))
    return _format_mean(values, epsilon_text)


def _lost_over_seeds(runs: Sequence[Record]) -> str:
    """Return the cell of what aggregation lost."""
    values = []
    for run in runs:
        lost = _lost_in_aggregation(run)
        if lost is not None:
            values.append(lost)
    return _format_mean(values, percent)


def _lost_in_aggregation(record: Record) -> float | None:
    """Return what the mean of LoRA's factors lost of the mean of the products, over rounds; None if not measured."""
    values = []
    for metrics in record.get("history", ()):
        error = metrics.get("updates/lora_error")
        if error is None:  # only server rules for LoRA report an error, and then it is what is lost
            error = metrics.get("updates/lora_residual")
        if error is not None:
            values.append(error)
    return fmean(values) if values else None


def _cost_over_seeds(runs: Sequence[Record], cost: CostColumn) -> str:
    """Return the cell of a cost."""
    values = [run[cost.metric] for run in runs if cost.metric in run]
    return cost.form.format(fmean(values)) if values else "–"


def _chosen_values(runs: Sequence[Record]) -> str:
    """Return the cell with the values chosen from the grid, which apply to all seeds."""
    if not runs:
        return "–"
    return ", ".join(runs[-1].get("point", {}).values()) or "–"


def _format_mean(values: Sequence[float], text_of: Callable[[float], str]) -> str:
    """Return the mean, with the standard deviation if there are several values; a dash if there are none."""
    if not values:
        return "–"
    mean = text_of(fmean(values))
    if len(values) > 1 and all(math.isfinite(value) for value in values):
        return f"{mean} ± {text_of(stdev(values))}"
    return mean
