# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` and `status` print: a trial step, what a site sends and spends, and rounds."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, NamedTuple

import torch

from perada.core.states import megabytes
from perada.deploy.protocol import Request
from perada.deploy.server.progress import RunProgress
from perada.deploy.site.budget import explain_image_epsilon, explain_site_epsilon, steps_without_noise
from perada.deploy.site.client import Client
from perada.deploy.site.file import Limits, SiteFile
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, read_runs
from perada.privacy.accounting import Ledger
from perada.results.report import NUMBERS, SHARES, epsilon_text, round_text, table

if TYPE_CHECKING:
    from perada.deploy.sums.party import Party

NONE = "–"
"""Cell of a table that has nothing to show."""


class StepCost(NamedTuple):
    """Cost of one local step of a client.

    Attributes:
        seconds: Duration of the step.
        num_steps: Number of steps in a round.
        memory: Peak memory of the process during the step, in GB.
        device_memory: Peak memory on the GPU, in GB; None on a CPU.
    """

    seconds: float
    num_steps: int
    memory: float
    device_memory: float | None


def measure_step(client: Client) -> StepCost:
    """Take one local step from the first state, and measure it; nothing is kept."""
    request = Request("train", "0" * 32, "0" * 64)
    device = client.recipe.device
    is_cuda = device.type == "cuda"
    protection = client.protection(None, 0)
    plan = client.plan(request)
    sampling = None if protection.images is None else protection.images.sampling()
    batch = next(client.batches(plan, sampling))
    with suppress(OSError):
        # On Linux this resets the peak of the process's memory.
        Path("/proc/self/clear_refs").write_text("5")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.monotonic()
    client.train(request, client.recipe.template.sending, RunState(request.run), protection, only_step=batch)
    if is_cuda:
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - begin
    # ru_maxrss is in bytes on macOS, and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return StepCost(
        seconds=seconds,
        num_steps=sum(steps[0] for steps in plan.steps),
        memory=getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9,
        device_memory=torch.cuda.max_memory_allocated(device) / 1e9 if is_cuda else None,
    )


def format_memory(cost: StepCost) -> str:
    """Format the memory that a step needs."""
    memory = f"{cost.memory:.2f} GB"
    if cost.device_memory is None:
        return memory
    return f"{memory}, and {cost.device_memory:.2f} GB on the GPU"


def format_sent(client: Client, may_send: Sequence[str]) -> str:
    """Format what a site sends in a round."""
    recipe = client.recipe
    if client.settings.secure_sums is None:
        size = max(megabytes(recipe.sent(round)) for round in range(2))
        return f"{size:.3f} MB per round, plus {', '.join(may_send) or 'nothing else'}"
    vector_size = max(recipe.contents(round, client.images).size for round in range(2))
    summed: list[str] = []
    if client.site_privacy is None:
        summed = [kind for kind in may_send if kind in ("counts", "scores", "losses")]
    unmasked = [kind for kind in may_send if kind in ("sizes", "epsilon")]
    vector = f"{vector_size:,} numbers ({8 * vector_size / 1e6:.3f} MB) per round"
    return f"{vector} and {', '.join(summed) or 'no scores'}, all masked, plus {', '.join(unmasked) or 'nothing else'}"


def format_sums(client: Client, party: "Party | None") -> str:
    """Format the sites among which a site's updates are hidden."""
    options = client.settings.secure_sums
    if options is None:
        return "no: the server reads the site's updates"
    if party is None:
        return "requested, but the site's file does not list the other sites; add its section secure_sums"
    num_peers = len(party.peers)
    too_few = "" if num_peers + 1 >= options.min_sites else "; too few, so no sum will be computed"
    peers = ", ".join(sorted(party.peers))
    return f"yes: hidden among at least {options.min_sites - 1} of {num_peers} others: {peers}{too_few}"


def format_site_privacy(client: Client, ledger: Ledger | None = None) -> str:
    """Format the client-level budget that a complete run spends; "" for a recipe whose sums have no noise.

    Args:
        client: The recipe with the site's data.
        ledger: What all runs have spent.
    """
    privacy = client.site_privacy
    if privacy is None:
        return ""
    limits = client.limits
    rounds = client.recipe.rounds
    spent = epsilon_text(privacy.budget.epsilon({privacy.cost: rounds}))
    problem = _format_infinity(explain_site_epsilon(ledger or Ledger()), limits.max_site_epsilon)
    return (
        f"adds its own noise to each sum; {rounds} rounds spend ε ≤ {spent} {format_measure(limits)}, also against "
        f"the server; {format_limit(limits.max_site_epsilon)}{problem}"
    )


def format_privacy(client: Client, ledger: Ledger | None = None) -> str:
    """Format the image-level budget that a complete run spends, if the site takes part in every round.

    Args:
        client: The recipe with the site's data.
        ledger: What all runs have spent.
    """
    limits = client.limits
    spent = epsilon_text(client.budget.epsilon(client.planned))
    problem = _format_infinity(explain_image_epsilon(ledger or Ledger()), limits.max_epsilon)
    return (
        f"yes: a run of {client.recipe.rounds} rounds spends ε ≤ {spent} {format_measure(limits)}; "
        f"{format_limit(limits.max_epsilon)}{problem}"
    )


def _format_infinity(reason: str, max_epsilon: float | None) -> str:
    """Format why ε is infinite, and the consequence if the site sets a limit; "" if it is finite."""
    if not reason:
        return ""
    consequence = "" if max_epsilon is None else ", so every round will be rejected"
    return f"; but {reason}{consequence}"


def format_measure(limits: Limits) -> str:
    """Format the δ and accountant of a site's ε."""
    return f"at δ = {limits.delta:g}, by {limits.accountant}"


def format_limit(max_epsilon: float | None) -> str:
    """Format the largest ε that a site allows; None for that of one complete run."""
    return "that is its limit over all runs" if max_epsilon is None else f"its limit over all runs is {max_epsilon:g}"


def site_status(site: SiteFile) -> str:
    """Format what a site has trained in each run, and spent in total."""
    states, totals = read_runs(site.state)
    if not states:
        return f"Site {site.name} has trained nothing yet."
    paragraphs = [f"Site {site.name}, the current run first:", _runs_table(states)]

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
        without_noise = f"; {num_without_noise} rounds had no privacy" if num_without_noise else ""
        paragraphs.append(f"{title}: {spent}{without_noise}.")
    return "\n\n".join(paragraphs)


def _runs_table(states: Sequence[RunState]) -> str:
    """Format a table of the runs of a site."""
    header = ["run", "transport's id", "recipe", "rounds trained", "last round"]
    has_sums = any(state.summing.update_round >= 0 for state in states)
    if has_sums:
        header.append("last under masks")
    rows = []
    for state in states:
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


def _format_spent(ledger: Ledger, owner: int, limits: Limits, max_epsilon: float | None) -> str:
    """Format the image-level or client-level ε of a site, and its limit."""
    epsilon = epsilon_text(ledger.epsilon(owner, limits.delta, limits.accountant))
    limit = "that of one complete run" if max_epsilon is None else f"{max_epsilon:g}"
    return f"ε {epsilon} (the limit is {limit}) {format_measure(limits)}"


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
