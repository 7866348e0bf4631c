# SPDX-License-Identifier: Apache-2.0
"""What came out, as Markdown."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from perada.compare.plan import CHOSEN_BY, DIAGNOSED, named
from perada.compare.results import choose, score, shown_score
from perada.core.text import printable
from perada.results.report import ENTROPY, MODES, SCORES, epsilon_text, percent, shift_names, table

Records = Sequence[dict[str, Any]]
EPSILONS = {
    "privacy/server_epsilon_mean": ("ε server", "mean over clients, of what they sent"),
    "privacy/release_epsilon_mean": ("ε release", "of all that they trained"),
    "privacy/release_epsilon_max": ("ε max", "its largest"),
    "privacy/client_epsilon_max": ("ε client", "largest of a client as a whole"),
}
"""What the columns of ε are called, and what they are."""
COSTS = ("trained", "sent", "MB sent", "s / round")
NO_POINT = "every run of the grid failed or diverged: give --tune other values"


def summary(records: Records) -> str:
    """A row for each label, mean over seeds (± standard deviation where there are several), and what failed.

    Rows of one label that were asked for with different options are told apart by them.
    """
    shown = _with_starts([record for record in records if record["stage"] != "tune"])
    groups = _groups(shown)
    labels = [every[0]["label"] for every in groups.values()]
    tried = dict.fromkeys(record["label"] for record in records if record["stage"] == "tune")
    lost = [label for label in tried if label not in labels]
    tuned = any(record.get("point") for record in shown)
    private = [name for name in EPSILONS if any(name in record for record in shown)]
    scored = [*SCORES, *(name for name in MODES if any(record.get(name) is not None for record in shown))]
    scored += shift_names(name for record in shown for name in record)
    header = ["", *scored, *(EPSILONS[name][0] for name in private), *COSTS, *(["chosen"] if tuned else [])]
    rows = []
    for name, every in groups.items():
        runs = [record for record in every if "failed" not in record]
        if len(runs) < len(every):
            name += f" ({len(every) - len(runs)} of {len(every)} failed)"
        if any(record.get("diverged") for record in runs):
            name += " (diverged)"
        point = [", ".join(every[-1].get("point", {}).values()) or "–"] if tuned else []
        scores = [_over_seeds(runs, name) for name in scored]
        rows.append([name, *scores, *(_epsilon(runs, ledger) for ledger in private), *_costs(runs), *point])
    rows += [[f"{label} (failed)", *["–"] * (len(header) - 1)] for label in lost]
    whole = {(one["full/params"], one["full/mb"]): one for one in reversed(shown) if "full/params" in one}
    for (params, size), first in reversed(whole.items()):
        name = "full fine-tuning would" + (f" ({first['label']})" if len(whole) > 1 else "")
        cells = {"": name} | dict(zip(COSTS, [_count(params), _count(params), f"{size:.2f}"], strict=False))
        rows.append([cells.get(column, "") for column in header])
    unit = f"Scores in %{', entropy in nats' * (ENTROPY in scored)}"
    notes = [f"{unit}, trained and sent parameters and MB sent of one client in one round."]
    if any(len([record for record in every if "failed" not in record]) > 1 for every in groups.values()):
        notes[0] += " ± is the sample standard deviation over seeds."
    notes += ["; ".join(": ".join(EPSILONS[name]) for name in private) + ".", _composed(records)] if private else []
    notes += ["\n".join(f"{label}: {NO_POINT}." for label in lost)] if lost else []
    return _plain("\n\n".join([table(header, rows), *notes, *_failures(shown)]))


def _composed(records: Records) -> str:
    """What all private runs together cost, by the sum of their ε (basic composition)."""
    sums = []
    for name in ("privacy/release_epsilon_max", "privacy/client_epsilon_max"):
        spent = [float(value) for record in records if (value := record.get(name)) is not None]
        if spent:
            sums.append(f"{EPSILONS[name][0]} = {epsilon_text(math.fsum(spent))} of {len(spent)} runs")
    return (
        "Each ε is of one run. Those of runs on the same images add up, over all rows and seeds: whoever sees them all "
        f"sees at most {', '.join(sums)}, at as many times the δ."
    )


def _groups(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Records by the name of their row: the label, and what else was asked for that other rows of it were not."""
    groups: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for record in records:
        # The initial model is one row, whichever command scored it.
        variant = () if record["stage"] == "start" else tuple(record["variant"])
        groups.setdefault((record["label"], variant), []).append(record)
    common: dict[str, set[str]] = {}
    for label, variant in groups:
        common[label] = common.get(label, set(variant)) & set(variant)
    return {
        " ".join([label, *(word for word in variant if word not in common[label])]): every
        for (label, variant), every in groups.items()
    }


def _with_starts(records: Records) -> list[dict[str, Any]]:
    """The records; where values that were varied change the initial model's scores, its labels name them."""
    found: dict[tuple[str, int], set[tuple[float | None, ...]]] = {}
    for record in records:
        if record["stage"] == "start":
            scores = tuple(record.get(name) for name in SCORES)
            found.setdefault((record.get("recipe", ""), record["seed"]), set()).add(scores)
    alike = all(len(scores) == 1 for scores in found.values())
    seen, kept = set(), []
    for record in records:
        if record["stage"] == "start":
            if not alike:
                record = record | {"label": record["label"] + named(record.get("varied", {}))}
            key = record["label"], record["seed"]
            if key in seen:
                continue
            seen.add(key)
        kept.append(record)
    return kept


def _plain(text: str) -> str:
    """What a terminal may be sent: names and reasons come from a file."""
    return "\n".join(map(printable, text.split("\n")))


def grid_table(records: Records) -> str:
    """The scores of the grid, one row for each label, or for each trial of a range, in the order in which they ran."""
    every = [record for record in records if record["stage"] == "tune"]
    drawn = [record for record in every if any(word.startswith("--trials=") for word in record["variant"])]
    listed = [record for record in every if record not in drawn]
    tables = [make(own) for make, own in ((_value_table, listed), (_trial_table, drawn)) if own]
    return _plain("\n\n".join([*tables, _note(every), *_failures(every)]))


def _trial_table(tried: Records) -> str:
    names = _tuned(tried)
    rows = []
    for (label, _), own in _rows(tried).items():
        best = choose([(record["point"], record) for record in own])
        for record in own:
            chosen = "chosen" if best and record["point"] == best[0] else ""
            rows.append([label, *(record["point"].get(name, "") for name in names), _score(record), chosen])
    return table(["", *names, "score", ""], rows)


def _value_table(tried: Records) -> str:
    names = _tuned(tried)
    points = list(dict.fromkeys(tuple(record["point"].get(name, "") for name in names) for record in tried))
    everywhere = all({*record["point"]} == {*names} for record in tried)
    heads = [
        ", ".join(point) if everywhere else named({n: v for n, v in zip(names, point, strict=True) if v})[2:]
        for point in points
    ]
    groups = _rows(tried)
    labels = [label for label, _ in groups]
    rows = []
    for (label, options), own in groups.items():
        best = choose([(record["point"], record) for record in own])
        found = {tuple(record["point"].get(name, "") for name in names): _score(record) for record in own}
        row = " ".join([label, *options]) if labels.count(label) > 1 else label
        chosen = ", ".join(best[0].values()) if best else "–"
        rows.append([row, *(found.get(point, "") for point in points), chosen])
    return table(["", *heads, "chosen"], rows)


def _tuned(tried: Records) -> list[str]:
    """The names of what was tuned."""
    return list(dict.fromkeys(name for record in tried for name in record["point"]))


def _rows(tried: Records) -> dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]]:
    """Records by label and options, but for the grid's own: a grid may be extended by a later command."""
    own = ("--tune=", "--choose_by=", "--trials=", "--sampler=")
    rows: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for record in tried:
        options = tuple(word for word in record["variant"] if not word.startswith(own))
        rows.setdefault((record["label"], options), []).append(record)
    return rows


def _note(tried: Records) -> str:
    by = dict.fromkeys(name for record in tried for name in record.get("chosen_by", CHOSEN_BY))
    lower = all(name.startswith("-") for name in by)
    parts = [name.removeprefix("-" * lower) for name in by]
    what = f"mean of {' and '.join(parts)}" if len(parts) > 1 else parts[0]
    best = "; the lowest is chosen" * lower
    return f"Scores of {' and '.join(_tuned(tried))} in %: {what} on held-out validation images{best}."


def curve_tables(records: Records) -> str:
    """One table for each score and diagnostic, a column a round; empty where only the last round has any."""
    runs = [record for record in records if record["stage"] == "run" and record.get("history")]
    every_row = [row for record in runs for row in record["history"]]
    rounds = sorted({row["round"] for row in every_row})
    diagnosed = dict.fromkeys(name for row in every_row for name in row if name.startswith(DIAGNOSED))
    parts = []
    for name in (*SCORES, *diagnosed):
        rows = []
        for label, every in _groups(runs).items():
            own = [{row["round"]: row for row in record["history"]} for record in every]
            if any(name in row for one in own for row in one.values()):
                rows.append([label, *(_over_seeds([one.get(round, {}) for one in own], name) for round in rounds)])
        if rows:
            parts.append(table([f"{name} after round", *map(str, rounds)], rows))
    return _plain("\n\n".join(parts))


def _score(record: dict[str, Any]) -> str:
    value = score(record)
    if value is None:
        return "failed" if "failed" in record else "diverged"
    return shown_score(value, record.get("chosen_by", CHOSEN_BY))


def _failures(records: Records) -> list[str]:
    lines = [
        f"- {record['label']}, seed {record['seed']}{', ' * bool(record['point'])}"
        f"{', '.join(record['point'].values())}: {record['failed']}"
        for record in records
        if "failed" in record
    ]
    return ["\n".join(["Failed:", "", *lines])] if lines else []


def _over_seeds(runs: Records, name: str) -> str:
    text: Callable[[float], str] = percent
    if name == ENTROPY or name.startswith(DIAGNOSED):
        text = ("{:.2f}" if name == ENTROPY else "{:.4g}").format
    return _mean([run[name] for run in runs if run.get(name) is not None], text)


def _epsilon(runs: Records, name: str) -> str:
    """Largest ε over seeds of what is the largest over clients; mean over seeds of what is their mean."""
    values = [float(run[name]) for run in runs if name in run]
    return epsilon_text(max(values)) if values and name.endswith("_max") else _mean(values, epsilon_text)


def _mean(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The mean, with the standard deviation where there are several; a dash where there is none."""
    if not values:
        return "–"
    spread = f" ± {text(stdev(values))}" if len(values) > 1 and all(map(math.isfinite, values)) else ""
    return text(fmean(values)) + spread


def _costs(runs: Records) -> list[str]:
    if not runs or "params/trained" not in runs[-1]:
        return ["–"] * len(COSTS)
    last = runs[-1]
    seconds = fmean(run["seconds_per_round"] for run in runs)
    return [_count(last["params/trained"]), _count(last["params/sent"]), f"{last['mb_sent']:.2f}", f"{seconds:.1f}"]


_count = "{:,.0f}".format
