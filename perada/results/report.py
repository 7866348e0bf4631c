# SPDX-License-Identifier: Apache-2.0
"""Tables of what a run measured, as Markdown."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from perada.core.text import SPREADS, printable
from perada.results.record import read_records, rounds_of_csv

TEST_MODE = (
    "Test mode, not private: noise follows from the run's seed (secure_rng: false). Whoever knows or guesses it can "
    "take the noise off, whatever ε says. Do not release what was trained so."
)
SCORES = ("personal/local_test", "personal/global_test", "global/global_test")
ENTROPY = "global/entropy"
MODES = ("global/best_mode", "global/worst_mode", ENTROPY)
PRIVACY = "privacy/"
THEORY = "theory/"
ENSEMBLE = "theory/ensemble_accuracy"
CLIENT_EPSILONS = {
    "privacy/server_epsilon": "ε server",
    "privacy/release_epsilon": "ε release",
    "privacy/client_epsilon": "ε client",
}
"""What the columns of each client's ε are called."""
ROWS = 20
"""Clients that a table shows."""
ROUND_EPSILONS = {
    "privacy/server_epsilon_mean": "ε server",
    "privacy/release_epsilon_mean": "ε release",
    "privacy/client_epsilon_max": "ε client (max)",
}
"""What the columns of the ε after a round are called."""
SHIFTS_FILE = "shifts.json"
"""Scores by kind of corruption and severity, in a run's folder."""
Kinds = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""By shift, kind of corruption and model: the score at each severity."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out a Markdown table; the first columns, as many as ``left``, are aligned left, the others right.

    Control characters and what would end a cell are replaced: names may come from anyone's file.

    >>> print(table(["a", "b"], [["x", "10"]]))
    | a |  b |
    |---|---:|
    | x | 10 |
    """
    header, *rows = [[printable(cell).replace("|", "¦") for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    widths = [max(width, 1 + (column >= left)) for column, width in enumerate(widths)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column >= left else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|".join("-" * (width + 1) + "-:"[column >= left] for column, width in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def epsilon_text(value: float) -> str:
    """An ε with two digits.

    >>> epsilon_text(2.345), epsilon_text(float("inf")), epsilon_text(float("nan"))
    ('2.35', '∞', '–')
    """
    return "–" if math.isnan(value) else "∞" if value == math.inf else f"{value:.2f}"


def mean_and_std(values: Sequence[float]) -> str:
    """Mean ± standard deviation of several ε, those of a whole population.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([1.0, float("inf")])
    ('2.00 ± 1.00', '∞')
    """
    if not all(map(math.isfinite, values)):
        return epsilon_text(fmean(values))
    return f"{epsilon_text(fmean(values))} ± {epsilon_text(pstdev(values))}"


def client_table(
    scores: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    test_mode: bool = False,
    names: Sequence[str] | None = None,
) -> str:
    """One row per client, then mean and standard deviation of all; of many clients the first ``ROWS`` are shown.

    Args:
        scores: Each client's scores by name, NaN where it has none; ε where the name begins with ``privacy/``.
        sizes: Training images of each client.
        test_mode: Whether the noise of a private run follows from its seed, which is then said.
        names: Of the clients; by default their numbers.
    """
    rows = [
        [
            names[client] if names else str(client),
            str(size),
            *(_cell(name, values[client]) for name, values in scores.items()),
        ]
        for client, size in enumerate(sizes[:ROWS])
    ]
    if len(sizes) > ROWS:
        rows.append([f"… {len(sizes) - ROWS} more", *[""] * (1 + len(scores))])
    rows.append(["mean ± std", "", *(_spread(name, values) for name, values in scores.items())])
    return _noted(table(["client", "images", *(CLIENT_EPSILONS.get(name, name) for name in scores)], rows), test_mode)


def _noted(shown: str, test_mode: bool) -> str:
    """A table, with a warning below it in the test mode."""
    return f"{shown}\n\n{TEST_MODE}" if test_mode else shown


def _spread(name: str, values: Sequence[float]) -> str:
    """Mean ± standard deviation of the clients that have the score."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–" if name.startswith(PRIVACY) else "– ± –"
    return mean_and_std(known) if name.startswith(PRIVACY) else f"{percent(fmean(known))} ± {percent(pstdev(known))}"


def run_report(folder: Path) -> str:
    """The rounds of a run, from its ``metrics.csv`` or, without one, from ``run.json``.

    Raises:
        FileNotFoundError: If there is none of them in ``folder``.
        ValueError: If they hold no rounds.
    """
    path = folder / "metrics.csv"
    found = rounds_of_csv(path) if path.is_file() else read_records(folder)[0].rounds
    rounds = {int(row["round"]): row for row in found}
    names = {name for values in rounds.values() for name in values}
    shown = [name for name in (*SCORES, *MODES, *shift_names(names), *ROUND_EPSILONS) if name in names]
    losses = sorted(name for name in names if name.startswith("train/"))
    shown += sorted(name for name in names if name.startswith(THEORY))
    body = [
        [str(round), *(_cell(name, values[name]) if name in values else "" for name in [*losses, *shown])]
        for round, values in sorted(rounds.items())
    ]
    header = ["round", *losses, *(ROUND_EPSILONS.get(name, name) for name in shown)]
    shown_rounds = _noted(table(header, body), "privacy/test_mode" in names)
    return "\n\n".join([shown_rounds, *shift_tables(_kinds(folder / SHIFTS_FILE))])


def shift_names(names: Iterable[str]) -> list[str]:
    """Those of the ``names`` that are mean scores on a shifted test set.

    >>> shift_names(["personal/local_test", "personal/fog", "personal/fog_std", "global/fog", "comm/up_mb"])
    ['personal/fog', 'global/fog']
    """
    scores = [name for name in names if name.startswith(("personal/", "global/")) and not name.endswith(SPREADS)]
    return sorted({*scores} - {*SCORES, *MODES}, key=lambda name: (name.partition("/")[2], name[0] != "p"))


def shift_tables(kinds: Kinds) -> list[str]:
    """For each shift of corruptions and each model, a table of its score by kind and severity, and of their mean."""
    return [
        _shift_table(shift, model, {kind: (curve["severity"], curve[model]) for kind, curve in curves.items()})
        for shift, curves in kinds.items()
        for model in ("personal", "global")
        if all(model in curve for curve in curves.values())
    ]


def _shift_table(shift: str, model: str, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    severities = list(dict.fromkeys(severity for found, _ in curves.values() for severity in found))
    rows = []
    for kind, (found, values) in curves.items():
        known = dict(zip(found, values, strict=True))
        cells = [percent(known.get(severity, math.nan)) for severity in severities]
        rows.append([kind, *cells, percent(fmean(values))])
    return table([f"{model}/{shift}", *(f"severity {severity}" for severity in severities), "mean"], rows)


def _kinds(path: Path) -> Kinds:
    """What a run's folder holds of corruptions; nothing where there were none."""
    if not path.is_file():
        return {}
    try:
        kinds: Kinds = json.loads(path.read_text(encoding="utf-8"))
        shift_tables(kinds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is broken ({type(error).__name__}: {error}); delete it") from None
    return kinds


def mode_line(scores: Mapping[str, float]) -> str:
    """What the models of an ensemble do alone, on one line; empty where there is no ensemble."""
    return ", ".join(f"{name} {_cell(name, scores[name])}" for name in MODES if name in scores)


def _cell(name: str, value: float) -> str:
    if name.startswith(PRIVACY):
        return epsilon_text(value)
    if name.startswith("train/"):
        return f"{value:.4f}"
    if name.startswith(THEORY) and name != ENSEMBLE:
        return f"{value:.4g}"
    return f"{value:.4f} nats" if name == ENTROPY else percent(value)


def percent(value: float) -> str:
    """A share in percent with two digits; a dash for NaN."""
    return "–" if value != value else f"{100 * value:.2f}"
