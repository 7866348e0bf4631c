# SPDX-License-Identifier: Apache-2.0
"""What came out: the file of results, read when a command resumes where it stopped, and its tables, as Markdown."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from perada.core.digests import check_sealed, sealed
from perada.core.files import write_atomic
from perada.core.text import printable
from perada.results.report import (
    ENTROPY,
    MODES,
    SCORES,
    epsilon_text,
    percent,
    scores_beside,
    shift_names,
    table,
    title,
)
from perada.studies.compare.grid import Point
from perada.studies.compare.plan import CHOSEN_BY, DIAGNOSED, Job, named

Record = dict[str, Any]
EPSILONS = {
    "privacy/server_epsilon_mean": ("ε server", "mean over clients, of what they sent"),
    "privacy/release_epsilon_mean": ("ε release", "of all that they trained"),
    "privacy/release_epsilon_max": ("ε max", "its largest"),
    "privacy/client_epsilon_max": ("ε client", "largest of a client as a whole"),
}
"""What the columns of ε are called, and what they are."""
COSTS = {
    "trained": ("params/trained", "full/params", "{:,.0f}"),
    "sent": ("params/sent", "full/params", "{:,.0f}"),
    "MB sent": ("mb_sent", "full/mb", "{:.2f}"),
    "s / round": ("seconds_per_round", "", "{:.1f}"),
}
"""What the columns of costs show, what it would be of full fine-tuning, and in which form."""
NO_POINT = "every run of the grid failed or diverged: give --tune other values"


class Results:
    """Records of runs, in a JSON file, whose own are read, or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is not None and path.is_file():
            try:
                self.records = [check_sealed(record) for record in json.loads(path.read_text(encoding="utf-8"))]
                if any("stage" not in record for record in self.records):
                    raise TypeError("its records say no stage")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{str(path)!r} holds no results of this version of `perada compare` ({error}): give "
                    "another file, or delete it"
                ) from error

    def check(self, digests: dict[str, str]) -> None:
        """Refuse to resume with a recipe that was edited: old and new rows would be mixed; ``digests`` are by name."""
        for record in self.records:
            if digests.get(record["recipe"], record["digest"]) != record["digest"]:
                raise ValueError(
                    f"--output {str(self.path)!r} holds results of an earlier version of {record['recipe']!r}: give "
                    "another file, or delete it"
                )

    def find(self, job: Job) -> Record | None:
        """The record of a run that did not fail."""
        return self._with(stage=job.stage, args=job.args)

    def started(self, job: Job) -> bool:
        """Whether the initial model of a run was scored."""
        return self._with(stage="start", recipe=job.recipe, varied=job.varied, seed=job.seed) is not None

    def _with(self, **same: object) -> Record | None:
        return next((one for one in self.records if "failed" not in one and same.items() <= one.items()), None)

    def add(self, record: Record) -> None:
        """Add a record, replacing an earlier one of the same run, and write the file."""
        same = ("stage", "args", "recipe", "varied", "seed")
        self.records = [old for old in self.records if any(old.get(name) != record.get(name) for name in same)]
        self.records.append(record)
        self.write()

    def arrange(self, jobs: Iterable[Job]) -> None:
        """Put the records of these runs last, in this order, and write the file."""
        places = {(job.stage, tuple(job.args)): place for place, job in enumerate(jobs)}
        # The sort is stable: what is not of these runs stays in front, in its order.
        self.records.sort(key=lambda record: places.get((record["stage"], tuple(record["args"])), -1))
        self.write()

    def write(self) -> None:
        """Write the file, if there is to be one, whole or not at all."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = [sealed(record) for record in self.records]
            write_atomic(self.path, json.dumps(written, indent=1, allow_nan=False).encode())

    def seconds(self, label: str = "") -> float:
        """Mean duration of the runs of a row, of all rows where it has none yet, or 0."""
        known = [record for record in self.records if record.get("seconds") and "failed" not in record]
        own = [record for record in known if record["label"] == label]
        return fmean(record["seconds"] for record in own or known) if known else 0.0


def choose(tried: Iterable[tuple[Point, Record | None]]) -> tuple[Point, Record] | None:
    """The point of the grid with the best score, the first of several, and its record; None where no run has one."""
    scored = [(point, record, value) for point, record in tried if record and (value := score(record)) is not None]
    return max(scored, key=lambda one: one[2])[:2] if scored else None


def score(record: Record | None) -> float | None:
    """What the grid is judged by: the mean of the scores in ``chosen_by``; None for a run that failed or diverged.

    A name with a minus before it counts negative, since the lower score is the better one. A run has diverged where a
    training loss or a score became NaN or infinite.
    """
    if record is None or "failed" in record or record["diverged"]:
        return None
    signs = {name.removeprefix("-"): -1 if name.startswith("-") else 1 for name in record.get("chosen_by", CHOSEN_BY)}
    if any(record.get(name) is None for name in signs):
        return None
    return fmean(sign * record[name] for name, sign in signs.items())


def shown_score(record: Record) -> str:
    """A score as it is printed, in %: an error, or the mean of several, without the minus that it is chosen by."""
    value = score(record)
    if value is None:
        return "failed" if "failed" in record else "diverged"
    return percent(-value if _lower(record) else value)


def _lower(record: Record) -> bool:
    """Whether the lower score is the better one."""
    return all(name.startswith("-") for name in record.get("chosen_by", CHOSEN_BY))


def summary(records: Sequence[Record]) -> str:
    """A row for each label, mean over seeds (± standard deviation where there are several), and what failed.

    Rows of one label that were asked for with different options are told apart by them.
    """
    shown = _with_starts([record for record in records if record["stage"] != "tune"])
    groups = _groups(shown)
    tried = dict.fromkeys(record["label"] for record in records if record["stage"] == "tune")
    lost = [label for label in tried if label not in {record["label"] for record in shown}]
    private = [name for name in EPSILONS if any(name in record for record in shown)]
    beside = scores_beside(shown, [count for record in shown for count in record.get("test_images", [])])
    scored = [
        SCORES[0],
        *beside,
        *SCORES[1:],
        *(name for name in MODES if any(record.get(name) is not None for record in shown)),
    ]
    scored += shift_names(name for record in shown for name in record)
    columns: dict[str, Callable[[Sequence[Record]], str]] = {
        title(name): partial(_over_seeds, name=name) for name in scored
    }
    columns |= {EPSILONS[name][0]: partial(_epsilon, name=name) for name in private}
    if any(_lost(record) is not None for record in shown):
        columns["lost"] = lambda runs: _mean([value for value in map(_lost, runs) if value is not None], percent)
    columns |= {heading: partial(_cost, name=name, form=form) for heading, (name, _, form) in COSTS.items()}
    if any(record.get("point") for record in shown):
        columns["chosen"] = lambda runs: ", ".join(v for run in runs[-1:] for v in run.get("point", {}).values()) or "–"
    rows = []
    for name, every in groups.items():
        runs = [record for record in every if "failed" not in record]
        if len(runs) < len(every):
            name += f" ({len(every) - len(runs)} of {len(every)} failed)"
        if any(record.get("diverged") for record in runs):
            name += " (diverged)"
        rows.append([name, *(column(runs) for column in columns.values())])
    rows += [[f"{label} (failed)", *["–"] * len(columns)] for label in lost]
    whole = {(one["full/params"], one["full/mb"]): one for one in reversed(shown) if "full/params" in one}
    for first in reversed(whole.values()):
        name = "full fine-tuning, for comparison" + (f" ({first['label']})" if len(whole) > 1 else "")
        cells = {heading: form.format(first[full]) for heading, (_, full, form) in COSTS.items() if full}
        rows.append([name, *(cells.get(column, "") for column in columns)])
    notes = [
        f"Scores in %{', entropy in nats' * (ENTROPY in scored)}. Each client's personal model is tested on the "
        "client's own test images and on those of all clients (means over clients), the global model on the latter. "
        "Parameters trained and sent, and MB sent, are of one client in one round."
    ]
    if any(len([record for record in every if "failed" not in record]) > 1 for every in groups.values()):
        notes[0] += " ± is the sample standard deviation over seeds."
    notes += _staleness(groups)
    notes += ["; ".join(": ".join(EPSILONS[name]) for name in private) + ".", _composed(records)] if private else []
    notes += ["\n".join(f"{label}: {NO_POINT}." for label in lost)] if lost else []
    return _plain([table(["", *columns], rows), *notes, *_failures(shown)])


def _staleness(groups: dict[str, list[Record]]) -> list[str]:
    """Name the rows in whose runs clients ended with models of their own that are older than half the rounds."""
    lines = []
    for name, every in groups.items():
        runs = [record for record in every if record.get("stale_clients")]
        if not runs:
            continue
        worst = max(runs, key=lambda record: record["stale_clients"])
        seed = f" with seed {worst['seed']}" if len(every) > 1 else ""
        lines.append(f"- {name}: {worst['stale_clients']} of {worst['num_clients']} clients{seed}")
    if not lines:
        return []
    head = (
        "Personal models of clients that have not taken part for more than half of the rounds are that old, and the "
        "means include them. More rounds, or more clients_per_round, help. There are such clients in:"
    )
    return ["\n".join([head, "", *lines])]


def _composed(records: Sequence[Record]) -> str:
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


def _groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by the name of their row: the label, and what else was asked for that other rows of it were not."""
    groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in records:
        # The initial model is one row, whichever command scored it; a grid may be extended by a later command.
        own = {"start": "", "tune": ("--tune=", "--choose_by=", "--trials=", "--sampler=")}.get(record["stage"], ())
        variant = tuple(word for word in record["variant"] if not word.startswith(own))
        groups.setdefault((record["label"], variant), []).append(record)
    common: dict[str, set[str]] = {}
    for label, variant in groups:
        common[label] = common.get(label, set(variant)) & set(variant)
    return {
        " ".join([label, *(word for word in variant if word not in common[label])]): every
        for (label, variant), every in groups.items()
    }


def _with_starts(records: Sequence[Record]) -> list[Record]:
    """The records, each initial model once; where values that were varied change its scores, its label names them."""
    starts = [record for record in records if record["stage"] == "start"]
    scores = {(record.get("recipe"), record["seed"], *map(record.get, SCORES)) for record in starts}
    alike = len(scores) == len({key[:2] for key in scores})
    kept: dict[Any, Record] = {}
    for place, record in enumerate(records):
        if record["stage"] == "start":
            record = record if alike else record | {"label": record["label"] + named(record.get("varied", {}))}
            kept.setdefault((record["label"], record["seed"]), record)
        else:
            kept[place] = record
    return list(kept.values())


def grid_table(records: Sequence[Record]) -> str:
    """The scores of the grid, a row for each run in the order in which they ran, and which one was chosen."""
    tried = [record for record in records if record["stage"] == "tune"]
    names = list(dict.fromkeys(name for record in tried for name in record["point"]))
    rows = []
    for label, own in _groups(tried).items():
        best = choose((record["point"], record) for record in own)
        for record in own:
            chosen = "chosen" * (best is not None and record["point"] == best[0])
            rows.append([label, *(record["point"].get(name, "") for name in names), shown_score(record), chosen])
    by = list(dict.fromkeys(name for record in tried for name in record.get("chosen_by", CHOSEN_BY)))
    lower = all(map(_lower, tried))
    what = " and ".join(_scored_by(name, lower) for name in by)
    note = (
        f"Scores of {' and '.join(names)} in %: {'mean of ' * (len(by) > 1)}{what}, of held-out validation images"
        f"{'; the lowest is chosen' * lower}."
    )
    return _plain([table(["", *names, "score", ""], rows), note, *_failures(tried)])


def _scored_by(name: str, lower: bool) -> str:
    """A name of ``chosen_by`` in words, with the minus before it, unless the ``lower`` score of all is the better."""
    minus = "-" if name.startswith("-") and not lower else ""
    return minus + title(name.removeprefix("-"))


def curve_tables(records: Sequence[Record]) -> str:
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
            parts.append(table([f"{title(name)} after round", *map(str, rounds)], rows))
    return _plain(parts)


def _plain(parts: Iterable[str]) -> str:
    """The parts one below another, as a terminal may be sent them: names and reasons come from a file."""
    return "\n".join(map(printable, "\n\n".join(parts).split("\n")))


def _failures(records: Sequence[Record]) -> list[str]:
    lines = []
    for record in records:
        if "failed" in record:
            run = [record["label"], f"seed {record['seed']}", *record["point"].values()]
            lines.append(f"- {', '.join(run)}: {record['failed']}")
    return ["\n".join(["Failed:", "", *lines])] if lines else []


def _over_seeds(runs: Sequence[Record], name: str) -> str:
    text: Callable[[float], str] = percent
    if name == ENTROPY or name.startswith(DIAGNOSED):
        text = ("{:.2f}" if name == ENTROPY else "{:.4g}").format
    return _mean([run[name] for run in runs if run.get(name) is not None], text)


def _epsilon(runs: Sequence[Record], name: str) -> str:
    """Largest ε over seeds of what is the largest over clients; mean over seeds of what is their mean."""
    values = [float(run[name]) for run in runs if name in run]
    return epsilon_text(max(values)) if values and name.endswith("_max") else _mean(values, epsilon_text)


def _lost(run: Record) -> float | None:
    """What a round's mean of LoRA's factors lost of the mean of the products, over the rounds; None if not measured."""
    both = ("updates/lora_error", "updates/lora_residual")  # under a server rule for it, the first is what is lost
    values = [next((row[name] for name in both if row.get(name) is not None), None) for row in run.get("history", ())]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _cost(runs: Sequence[Record], name: str, form: str) -> str:
    values = [run[name] for run in runs if name in run]
    return form.format(fmean(values)) if values else "–"


def _mean(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The mean, with the standard deviation where there are several; a dash where there is none."""
    if not values:
        return "–"
    spread = f" ± {text(stdev(values))}" if len(values) > 1 and all(map(math.isfinite, values)) else ""
    return text(fmean(values)) + spread
