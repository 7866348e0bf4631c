# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` and `status` show: a step that is tried, what a site sends and spends, and rounds."""

import sys
import time
from collections.abc import Sequence
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
from perada.deploy.site.level import SiteLevel
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, read_runs
from perada.privacy.accounting import Ledger
from perada.results.report import epsilon_text, round_text, table

if TYPE_CHECKING:
    from perada.deploy.sums.party import Party


class StepCost(NamedTuple):
    """One local step of a client."""

    seconds: float
    steps: int  # of a round
    memory: float  # peak of the process during the step, GB
    device_memory: float | None  # peak on the GPU, GB; None on a CPU


def measure_step(client: Client) -> StepCost:
    """Take one local step from the first state; nothing of it is kept."""
    order, device = Request("train", "0" * 32, "0" * 64), client.recipe.device
    protection, plan, cuda = client.protection(None, 0), client.plan(order), device.type == "cuda"
    sampling = None if protection.images is None else protection.images.sampling()
    first = next(client.batches(plan, sampling))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.monotonic()
    client.train(order, client.recipe.template.sending, RunState(order.run), protection, only_step=first)
    if cuda:
        torch.cuda.synchronize(device)
    seconds, unit = time.monotonic() - begin, 1 if sys.platform == "darwin" else 1024  # bytes there
    memory = getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9
    there = torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None
    return StepCost(seconds, sum(own[0] for own in plan.steps), memory, there)


def format_memory(tried: StepCost) -> str:
    """What a step needs, in words."""
    here = f"{tried.memory:.2f} GB"
    return here if tried.device_memory is None else f"{here}, and {tried.device_memory:.2f} GB on the GPU"


def format_sent(client: Client, may_send: Sequence[str]) -> str:
    """What leaves a site in a round, in words."""
    recipe = client.recipe
    if client.settings.secure_sums is None:
        size = max(megabytes(recipe.sent(round)) for round in range(2))
        return f"{size:.3f} MB a round, and {', '.join(may_send) or 'nothing'} beside"
    numbers = max(recipe.contents(round, client.images).size for round in range(2))
    summed = [one for one in may_send if one in ("counts", "scores", "losses") and client.level is None]
    added = ", ".join(summed) or "no scores"
    beside = ", ".join(one for one in may_send if one in ("sizes", "epsilon")) or "nothing"
    vector = f"{numbers:,} numbers ({8 * numbers / 1e6:.3f} MB) a round"
    return f"{vector} and {added}, all under masks, and {beside} beside"


def format_sums(client: Client, party: "Party | None") -> str:
    """Among whom a site's updates are hidden."""
    secure = client.settings.secure_sums
    if secure is None:
        return "no: the server reads the site's updates"
    if party is None:
        return "asked for, and the site's file does not say among whom: add its section secure_sums"
    others = f"{secure.min_sites - 1} of {len(party.peers)} others: {', '.join(sorted(party.peers))}"
    few = "" if len(party.peers) + 1 >= secure.min_sites else "; too few, and no sum will be made"
    return f"yes: hidden among at least {others}{few}"


def format_level(level: SiteLevel, client: Client, total: Ledger | None = None) -> str:
    """What a whole run spends of the site as a whole, its limit, and what is wrong with the ``total`` of all runs."""
    limits, rounds = client.limits, client.recipe.rounds
    spent = epsilon_text(level.budget.epsilon({level.cost: rounds}))
    hidden = f"noise of its own in each sum; {rounds} rounds spend ε ≤ {spent} {format_measure(limits)}"
    amiss = _amiss(explain_site_epsilon(total or Ledger()), limits.max_site_epsilon)
    return f"{hidden}, also against the server; {format_limit(limits.max_site_epsilon)}{amiss}"


def format_privacy(client: Client, total: Ledger | None = None) -> str:
    """What a whole run spends at the site, if it takes part in every round, and the rest as :func:`format_level`."""
    limits, rounds = client.limits, client.recipe.rounds
    spent = f"ε ≤ {epsilon_text(client.budget.epsilon(client.planned))} {format_measure(limits)}"
    amiss = _amiss(explain_image_epsilon(total or Ledger()), limits.max_epsilon)
    return f"yes: a run of {rounds} rounds spends {spent}; {format_limit(limits.max_epsilon)}{amiss}"


def _amiss(reason: str, own: float | None) -> str:
    """What is said of an ε that is infinite for a ``reason``, if there is one, where ``own`` is the site's limit."""
    if not reason:
        return ""
    return f"; but {reason}" + ("" if own is None else ", and every round will be refused")


def format_measure(limits: Limits) -> str:
    """How a site counts ε."""
    return f"at δ = {limits.delta:g}, by {limits.accountant}"


def format_limit(own: float | None) -> str:
    """The largest ε that a site allows, where ``own`` is the one that it gives."""
    return "that is its limit over all runs" if own is None else f"its limit over all runs is {own:g}"


def site_status(given: SiteFile) -> str:
    """What a site has trained in each run, and spent in all."""
    states, all_runs = read_runs(given.state)
    if not states:
        return f"Site {given.name} has trained nothing yet."
    titles = ["run", "transport's id", "recipe", "rounds trained", "last round"]
    rows = [
        [one.run, one.transport or "–", one.recipe[:8], str(one.trained), round_text(one.round + 1)] for one in states
    ]
    if any(one.summed >= 0 for one in states):
        titles.append("last under masks")
        rows = [[*row, str(one.summed + 1) if one.summed >= 0 else "–"] for row, one in zip(rows, states, strict=True)]
    text = f"Site {given.name}, the current run first:\n\n{table(titles, rows)}"
    total, limits = Ledger(), given.limits
    total.load_state_dict(all_runs["total"])

    def spent(whose: str, owner: int, own: float | None) -> str:
        found = epsilon_text(total.epsilon(owner, limits.delta, limits.accountant))
        most = "one whole run's" if own is None else f"{own:g}"
        return f"\n\n{whose}: ε {found} (the limit is {most}) {format_measure(limits)}"

    of_site = total.history(SITE_LEDGER)
    # Of a site that never took part in a noisy sum, and has no limit of it, everybody knows that its ε is infinite.
    whole = len(of_site) > bool(steps_without_noise(of_site)) or limits.max_site_epsilon is not None
    if whole:
        text += spent("The site as a whole, all runs together", SITE_LEDGER, limits.max_site_epsilon)
        reason = explain_site_epsilon(total)
        text += f": {reason}." if reason else "."
    if not total.history(IMAGES_LEDGER):
        return text
    bare = steps_without_noise(total.history(IMAGES_LEDGER))
    without = f"; {bare} rounds had no privacy" if bare else ""
    whose = "Single images, all runs together" if whole else "All runs together"
    return f"{text}{spent(whose, IMAGES_LEDGER, limits.max_epsilon)}{without}."


def run_status(progress: RunProgress) -> str:
    """How far a deployed run is, its rounds, and its sites."""
    rows = []
    for member in progress.roster:
        spent = {name: float("inf") if one is None else one for name, one in member.epsilon.items()}
        epsilons = ", ".join(f"{name} {epsilon_text(one)}" for name, one in spent.items())
        size = "–" if member.size is None else str(member.size)
        last = round_text(member.last_round)
        rows.append([member.name, size, str(member.rounds), last, member.left or "–", epsilons or "–"])
    sites = table(["site", "images", "rounds", "last round", "left", "ε"], rows)
    return f"Run {progress.run}: {progress.done} of {progress.rounds} rounds\n\n{format_rounds(progress)}\n\n{sites}"


def format_rounds(progress: RunProgress) -> str:
    """The rounds of a deployed run as a table, counted from 1."""
    rows, summed = [], any(record.summed for record in progress.records)
    for record, row in zip(progress.records, progress.history, strict=True):
        reasons = dict.fromkeys(record.away, "away") | record.failed
        missing = ", ".join(f"{name} ({why})" for name, why in reasons.items()) or "–"
        outside = ", ".join(f"{name} ({why})" for name, why in record.outside.items()) or "–"
        score = row.get("personal/local_test", float("nan"))
        answered, traffic = f"{len(record.answered)}/{len(record.asked)}", f"{record.up + record.down:.2f}"
        shown = "–" if score != score else f"{100 * score:.1f}"
        inside = [", ".join(record.summed) or "–"] if summed else []
        told = [missing, outside, record.void or "–", f"{record.seconds:.1f}", traffic, shown]
        rows.append([str(record.round + 1), answered, *inside, *told])
    sums = ["in the sum"] if summed else []
    return table(["round", "answered", *sums, "missing", "outside", "void", "s", "MB", "own images %"], rows)
