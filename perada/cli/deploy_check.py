# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` prints: a trial step, and what a site would send and spend."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, NamedTuple

import torch

from perada.cli.deploy_status import format_measure
from perada.core.states import megabytes
from perada.core.text import printable
from perada.data import FederatedDataModule
from perada.data.checks.masks import MaskCounter
from perada.deploy.protocol import Request
from perada.deploy.site.budget import explain_image_epsilon, explain_site_epsilon
from perada.deploy.site.client import Client
from perada.deploy.state import RunState
from perada.privacy.accounting import Ledger
from perada.results.report import epsilon_text

if TYPE_CHECKING:
    from perada.deploy.sums.party import Party


class MeasuredStep(NamedTuple):
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


def measure_step(client: Client) -> MeasuredStep:
    """Take one local step from the first state, and measure it; nothing is kept."""
    request = Request("train", "0" * 32, "0" * 64)
    device = client.recipe.device
    is_cuda = device.type == "cuda"
    protection = client.protection(None, 0)
    plan = client.plan(request)
    sampling = None if protection.image_account is None else protection.image_account.sampling()
    batch = next(client.batches(plan, sampling))
    with suppress(OSError):
        # On Linux this resets the peak of the process's memory.
        Path("/proc/self/clear_refs").write_text("5")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.monotonic()
    client.train(request, client.recipe.template.received, RunState(request.run), protection, only_step=batch)
    if is_cuda:
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - begin
    # ru_maxrss is in bytes on macOS, and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return MeasuredStep(
        seconds=seconds,
        num_steps=sum(steps[0] for steps in plan.steps),
        memory=getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9,
        device_memory=torch.cuda.max_memory_allocated(device) / 1e9 if is_cuda else None,
    )


def format_memory(cost: MeasuredStep) -> str:
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
    vector_size = max(recipe.contents(round, client.public_images).size for round in range(2))
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


def format_limit(max_epsilon: float | None) -> str:
    """Format the largest ε that a site allows; None for that of one complete run."""
    return "that is its limit over all runs" if max_epsilon is None else f"its limit over all runs is {max_epsilon:g}"


def format_mask_values(data: FederatedDataModule) -> str:
    """Format the classes in the training masks of a site, for its operator to compare with other sites.

    Nothing of it is sent: a site's classes may reveal who its patients are.

    Returns:
        The classes with their share of the pixels; an empty string without masks, or if they are not all known.
    """
    masks = data.checked.train.labels_of(0)
    if not data.task.per_pixel or masks is None:
        return ""
    counter = MaskCounter(data.task.border_target)
    counter.add(masks)
    num_pixels = sum(counter.pixels.values())
    descriptions = []
    for number, count in sorted(counter.pixels.items()):
        name = "ignored" if number == counter.ignored else ""
        if data.classes is not None and 0 <= number < len(data.classes):
            name = data.classes[number]
        description = f"{number} ({name})" if name else str(number)
        descriptions.append(f"{description} {100 * count / num_pixels:.3g} %")
    return printable(", ".join(descriptions))
