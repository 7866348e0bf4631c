# SPDX-License-Identifier: Apache-2.0
"""Metrics of a deployed round, by the names that a simulation's have, from what sites allow to be known."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perada.deploy.recipe import Recipe
from perada.deploy.records import Member, Record
from perada.federation.metrics import Metric, spread

Facts = Mapping[str, Any]
"""What a site says beside its update (:class:`perada.deploy.messages.Answer`)."""


def measured(recipe: Recipe, record: Record, roster: Sequence[Member], facts: Sequence[Facts]) -> dict[str, float]:
    """Metrics of a round, from the facts of the sites that count in it."""
    template, algorithm, slot = recipe.template, recipe.loop.algorithm, recipe.module.slot
    trained = {
        (role, name)
        for role, state in template.opened.items()
        for phase in recipe.loop.phases
        for name in algorithm.trained(role, phase.name, slot)
        if name in state
    }
    found = {
        "params/trained": float(sum(template.opened[role][name][0].numel() for role, name in trained)),
        "params/sent": float(sum(value.numel() for key, value in template.sent.items() if key in slot.parameters)),
        "comm/up_mb": record.up,
        "comm/down_mb": record.down,
        "deploy/asked": float(len(record.asked)),
        "deploy/answered": float(len(record.answered)),
    }
    for role in template.opened:
        losses = [fact["losses"][role] for fact in facts if role in fact.get("losses", {})]
        if losses and len(losses) == len(facts):
            found[f"train/{role}_loss"] = float(torch.tensor(losses).mean())
    for name in ("release", "server"):
        spent = [member.epsilon[name] for member in roster if name in member.epsilon]
        if spent:
            values = torch.tensor([math.inf if value is None else value for value in spent])
            found[f"privacy/{name}_epsilon_mean"] = float(values.mean())
            found[f"privacy/{name}_epsilon_max"] = float(values.max())
    return found


def mean_scores(metrics: Sequence[Metric], facts: Sequence[Facts]) -> dict[str, float]:
    """Mean scores of the sites' models on their own images, and the global model's accuracy on the images of all."""
    found: dict[str, float] = {}
    counts = [fact.get("counts", {}) for fact in facts]
    sizes = [own.get("personal", own.get("global", [0, 0]))[1] for own in counts]
    weights = torch.tensor(sizes, dtype=torch.float64) if facts and all(sizes) else None
    for place, metric in enumerate(metrics):
        ending = f"_{metric.name}" if place else ""
        own = [_own_score(fact, metric) for fact in facts]
        if any(map(math.isfinite, own)):
            found |= spread(f"personal/local_test{ending}", torch.tensor(own), metric.falls, weights)
        shared = [one["global"] for one in counts if "global" in one and one["global"][1]]
        if metric.compute is None and shared:
            found[f"global/global_test{ending}"] = sum(right for right, _ in shared) / sum(total for _, total in shared)
    return found


def _own_score(facts: Facts, metric: Metric) -> float:
    """A site's score of the model that it predicts with; NaN where it says none."""
    for model in ("personal", "global"):
        if metric.compute is None and model in facts.get("counts", {}):
            right, total = facts["counts"][model]
            return right / total if total else math.nan
        value = facts.get("scores", {}).get(model, {}).get(metric.name)
        if value is not None:
            return float(value)
    return math.nan
