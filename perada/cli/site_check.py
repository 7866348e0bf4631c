# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` tries at a site: one local step, its time and memory, and the ε of a whole run."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from perada.deploy.protocol import Order
from perada.deploy.site.client import Client
from perada.deploy.site.data import OneClient
from perada.deploy.site.state import RunState
from perada.results.report import epsilon_text


class Tried(NamedTuple):
    """One local step of a client."""

    seconds: float
    steps: int  # of a round
    memory: float | None  # peak of the process during the step, GB; None where the system does not say
    device_memory: float | None  # peak on the GPU, GB; None on a CPU


def try_step(client: Client) -> Tried:
    """Take one local step from the first state; nothing of it is kept."""
    order, device = Order("train", "0" * 32, "0" * 64), client.recipe.device
    numbered, private = OneClient(client.data, 0), client.protection(None, 0).images
    plan = client.plan(order)
    first = next(iter(numbered.batches(plan, device, None if private is None else private.sampling())))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.monotonic()
    protection = client.protection(None, 0)
    client.train(order, client.recipe.template.sending, RunState(order.run), protection, only_step=first)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - begin
    there = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return Tried(seconds, sum(own[0] for own in plan.steps), _peak(), there)


def _peak() -> float | None:
    """Peak of this process's resident memory, GB."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "")
    return int(line.split()[1]) * 1024 / 1e9 if line else None


def shown_memory(tried: Tried) -> str:
    """What a step needs, in words."""
    here = "not known on this system" if tried.memory is None else f"{tried.memory:.2f} GB"
    return here if tried.device_memory is None else f"{here}, and {tried.device_memory:.2f} GB on the GPU"


def shown_privacy(client: Client) -> str:
    """What a whole run spends at the site, if it takes part in every round, and the site's limit."""
    limits, rounds = client.limits, client.recipe.rounds
    spent, own = epsilon_text(client.epsilon(client.planned)), limits.max_epsilon
    limit = "that is its limit over all runs" if own is None else f"its limit over all runs is {own:g}"
    return f"yes: a run of {rounds} rounds spends ε ≤ {spent} at δ = {limits.delta:g}, by {limits.accountant}; {limit}"
