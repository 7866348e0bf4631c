# SPDX-License-Identifier: Apache-2.0
"""``perada deploy status``: the rounds and sites of a deployed run, or what a site has trained and spent.

PyTorch is imported only to compute the ε of a private site, by Opacus.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from perada.core.text import printable_lines
from perada.deploy.server.progress import RunProgress, read_run_progress
from perada.deploy.site.budget import explain_site_epsilon, steps_without_noise
from perada.deploy.site.file import Limits, SiteFile, read_site
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, read_runs
from perada.privacy.accounting import Ledger
from perada.results.report import NUMBERS, SHARES, epsilon_text, round_text, table

NONE = "–"
"""Cell of a table that has nothing to show."""


def status(parser: ArgumentParser, words: list[str]) -> None:
    """Print the progress of a deployed run, or what a site has trained and spent."""
    parser.add_argument("where", type=Path, metavar="PATH", help="Folder of a deployed run, or file of a site.")
    where = parser.parse_args(words).where
    if where.is_file():
        print(printable_lines(site_status(read_site(where))))
    else:
        print(printable_lines(run_status(read_run_progress(where))))


def site_status(site: SiteFile) -> str:
    """Format what a site has trained in each run, and spent in total."""
    states, totals = read_runs(site.state, with_tensors=False)
    surveys = sum(record.kind == "survey" and record.has_left for record in totals.jobs.values())
    answered = f"Surveys answered: {surveys} of at most {site.limits.max_surveys} (limits: max_surveys)."
    if not states:
        nothing = f"Site {site.name} has trained nothing yet."
        return f"{nothing}\n\n{answered}" if surveys else nothing
    paragraphs = [f"Site {site.name}, the current run first:", _runs_table(states)]
    paragraphs += _format_own_scores(states)

    limits = site.limits
    ledger = totals.ledger
    site_steps = ledger.history(SITE_LEDGER)
    # The site as a whole is left out if it never took part in a noisy sum and sets no limit: its ε is infinite then.
    has_noisy_sums = len(site_steps) > bool(steps_without_noise(site_steps))
    shows_site = has_noisy_sums or limits.max_site_epsilon is not None
    if shows_site:
        spent = _format_spent(ledger, SITE_LEDGER, limits, limits.max_site_epsilon)
        reason = explain_site_epsilon(ledger)
        because = f": {reason}" if reason else ""
        paragraphs.append(f"The entire site, all runs together: {spent}{because}.")
    image_steps = ledger.history(IMAGES_LEDGER)
    if image_steps:
        title = "Single images, all runs together" if shows_site else "All runs together"
        spent = _format_spent(ledger, IMAGES_LEDGER, limits, limits.max_epsilon)
        num_without_noise = steps_without_noise(image_steps)
        noun = "rounds or surveys" if surveys else "rounds"
        without_noise = f"; {num_without_noise} {noun} had no privacy" if num_without_noise else ""
        paragraphs.append(f"{title}: {spent}{without_noise}.")
    if surveys:
        paragraphs.append(answered)
    return "\n\n".join(paragraphs)


def _runs_table(run_states: Sequence[RunState]) -> str:
    """Format a table of the runs of a site."""
    header = ["run", "transport's id", "recipe", "rounds trained", "last round"]
    has_sums = any(state.summing.update_round >= 0 for state in run_states)
    if has_sums:
        header.append("last under masks")
    rows = []
    for state in run_states:
        training = state.training
        row = [
            state.run,
            state.transport_run or NONE,
            state.recipe[:8],
            str(training.num_rounds),
            round_text(training.round + 1),
        ]
        if has_sums:
            masked_round = state.summing.update_round
            row.append(str(masked_round + 1) if masked_round >= 0 else NONE)
        rows.append(row)
    return table(header, rows)


def _format_own_scores(run_states: Sequence[RunState]) -> list[str]:
    """Format the scores on the site's own test images of the newest run that has any: a sentence and a table."""
    scored = [state for state in run_states if state.scoring.own.scores]
    if not scored:
        return []
    newest = scored[0]
    scoring = newest.scoring
    own_scores = scoring.own
    unit = SHARES if own_scores.has_classes else NUMBERS
    metrics = list(next(iter(own_scores.scores.values())))
    rows = []
    for model, score_of_metric in own_scores.scores.items():
        values = [score_of_metric.get(metric) for metric in metrics]
        rows.append([model, *(unit.number(math.nan if value is None else value) for value in values)])
    sentence = f"Own test images ({own_scores.num_images}), after round {scoring.round} of run {newest.run}:"
    return [sentence, table(["model", *(f"{metric}{unit.symbol}" for metric in metrics)], rows)]


def _format_spent(ledger: Ledger, owner: int, limits: Limits, max_epsilon: float | None) -> str:
    """Format the image-level or client-level ε of a site, and its limit."""
    epsilon = epsilon_text(ledger.epsilon(owner, limits.delta, limits.accountant))
    limit = "that of one complete run" if max_epsilon is None else f"{max_epsilon:g}"
    return f"ε {epsilon} (the limit is {limit}) {format_measure(limits)}"


def format_measure(limits: Limits) -> str:
    """Format the δ and accountant of a site's ε."""
    return f"at δ = {limits.delta:g}, by {limits.accountant}"


def run_status(progress: RunProgress) -> str:
    """Format the progress of a deployed run, its rounds, and its sites."""
    rows = []
    for member in progress.roster:
        epsilons = []
        for ledger, value in member.epsilon.items():
            epsilons.append(f"{ledger} {epsilon_text(math.inf if value is None else value)}")
        rows.append(
            [
                member.name,
                NONE if member.size is None else str(member.size),
                str(member.rounds),
                round_text(member.last_round),
                member.left or NONE,
                ", ".join(epsilons) or NONE,
            ]
        )
    header = ["site", "images", "rounds", "last round", "left", "ε"]
    filled = [index for index, _ in enumerate(header) if any(row[index] != NONE for row in rows)]
    sites = table([header[index] for index in filled], [[row[index] for index in filled] for row in rows])
    parts = [f"Run {progress.run}: {progress.done} of {progress.rounds} rounds"]
    if progress.records:
        parts.append(format_rounds(progress))
    if rows:
        parts.append(sites)
    parts += _format_run_privacy(progress)
    return "\n\n".join(parts)


def _format_run_privacy(progress: RunProgress) -> list[str]:
    """Format the ε of a private run after its last round, one paragraph for each level of privacy."""
    latest = latest_metrics(progress)
    paragraphs = []
    if "privacy/release_epsilon_max" in latest:
        release = epsilon_text(latest["privacy/release_epsilon_max"])
        server = epsilon_text(latest["privacy/server_epsilon_max"])
        unknown = (
            "; ∞ stands for sites that do not report it (`epsilon` in may_send)" if "∞" in (release, server) else ""
        )
        paragraphs.append(f"Single images: at most ε {release} (release ledger), {server} (server ledger){unknown}.")
    if "privacy/client_epsilon_max" in latest:
        paragraphs.append(f"Whole sites: at most ε {epsilon_text(latest['privacy/client_epsilon_max'])}.")
    return paragraphs


def latest_metrics(progress: RunProgress) -> dict[str, float]:
    """Return the last value of each metric of a run, without those that were never a number."""
    latest: dict[str, float] = {}
    for row in progress.history:
        latest |= {name: value for name, value in row.items() if not math.isnan(value)}
    return latest


def format_rounds(progress: RunProgress) -> str:
    """Format a table of the rounds of a deployed run, counted from 1.

    Columns of problems are left out if no round had any.
    """
    has_sums = any(record.summed for record in progress.records)
    missing = [_format_reasons(dict.fromkeys(record.away, "away") | record.failed) for record in progress.records]
    not_joined = [_format_reasons(record.outside) for record in progress.records]
    no_update = [record.void or NONE for record in progress.records]
    problems = {"missing": missing, "not joined": not_joined, "no update because": no_update}
    shown_problems = {title: cells for title, cells in problems.items() if set(cells) != {NONE}}
    unit = SHARES if progress.has_classes else NUMBERS
    rows = []
    for index, (record, metrics) in enumerate(zip(progress.records, progress.history, strict=True)):
        score = metrics.get("personal/local_test", math.nan)
        row = [str(record.round + 1), f"{len(record.used)} of {len(record.selected)}"]
        if has_sums:
            row.append(", ".join(record.summed) or NONE)
        row += [cells[index] for cells in shown_problems.values()]
        row += [
            f"{record.seconds:.1f}",
            f"{record.up + record.down:.2f}",
            unit.number(score),
        ]
        rows.append(row)
    sum_header = ["in the sum"] if has_sums else []
    header = ["round", "sites used", *sum_header, *shown_problems, "seconds", "MB", f"own images{unit.symbol}"]
    return table(header, rows)


def _format_reasons(reasons: Mapping[str, str]) -> str:
    """Format sites, each with its reason."""
    return ", ".join(f"{name} ({reason})" for name, reason in reasons.items()) or NONE
