# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` tries at a site: one local step, its time and memory, and the ε of a whole run."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from perada.data.one_client import OneClient
from perada.deploy.client import Client
from perada.deploy.messages import Order
from perada.deploy.state import RunState
from perada.privacy.accounting import history_epsilon
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
    """What a whole run spends at the site, if it takes part in every round."""
    images = client.protection(None, 0).images
    assert images is not None
    account, options = images.account, images.account.options
    history = Counter[tuple[float, float]]()
    kinds = [("train", client.recipe.rounds)]
    kinds += [("tune", 1)] if client.settings.algorithm.personalization() else []
    for kind, times in kinds:
        order = Order(kind, "0" * 32, "0" * 64)  # type: ignore[arg-type]  # one of two
        for _, sigma, rate, steps, _ in account.cost(client.plan(order), tuning=kind == "tune"):
            history[sigma, rate] += times * steps
    spent = epsilon_text(history_epsilon(history, options.delta, options.accountant))
    limit = min((one for one in (options.max_epsilon, options.target_epsilon) if one is not None), default=None)
    stops = "" if limit is None else f", and it stops at ε = {limit:g}"
    whole = f"{client.recipe.rounds} rounds spend ε = {spent} at δ = {options.delta:g}, by {options.accountant}"
    return f"yes: {whole}{stops}"
