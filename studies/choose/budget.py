# SPDX-License-Identifier: Apache-2.0
"""Durations, the rungs of successive halving, and the largest search that fits into a budget of time."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from perada.studies.choose.candidates import ALWAYS_TRAINED, DROPPED_FIRST

REDUCTION = 3
"""A rung keeps one in three settings and trains these three times as long: Hyperband's default (Li et al., 2018)."""
RUNGS = 3
CANDIDATES = (27, 18, 12, 9, 6, 3)
"""Numbers of settings of each method, the first ones where time allows."""
FEWEST_FINALISTS = 3
LAST_REDUCTIONS = ((3, 1, 3), (2, 1, 2), (1, 1, 1))
"""Draws, settings and seeds of small plans, one after another."""
SHORTENING = 0.75
"""Factor by which runs become shorter from a plan to the next smaller one."""
SHORTEST_WITH_ALL_METHODS = 1 / 3
"""Share of the recipe's rounds below which methods are left out before runs become shorter."""
FEWEST_ROUNDS = 5
HELD_OUT_SHARE = 0.2
"""Share of the training images on which settings are scored, and which the trials do not train on (grid.HOLD_OUT)."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str, option: str = "--budget") -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: If the text is not a positive number with a unit.

    >>> parse_duration("90s"), parse_duration("1.5h"), parse_duration("1h30m")
    (90.0, 5400.0, 5400.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text.strip().lower())
    is_complete = "".join(number + unit for number, unit in parts) == text.strip().lower()
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not parts or not is_complete or seconds == 0:
        raise ValueError(f"{option} {text!r} is not a duration; write a number with a unit: 90s, 30m or 2h")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration for people, rounded up.

    >>> format_duration(42.1), format_duration(150), format_duration(5400)
    ('43 s', '2 min 30 s', '1 h 30 min')
    """
    whole_seconds = math.ceil(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 600:
        minutes = whole_seconds // 60
        rest = whole_seconds % 60
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    whole_minutes = math.ceil(seconds / 60)
    hours = whole_minutes // 60
    minutes = whole_minutes % 60
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass(frozen=True)
class Rung:
    """A rung of successive halving: the settings of a method that reach it, and the rounds that they are trained."""

    num_candidates: int
    rounds: int


def make_rungs(num_candidates: int, rounds: int) -> list[Rung]:
    """Return the rungs for the settings of one method; the last one trains for all rounds.

    >>> [(rung.num_candidates, rung.rounds) for rung in make_rungs(9, 30)]
    [(9, 4), (3, 10), (1, 30)]
    """
    num_rungs = RUNGS
    if num_candidates <= REDUCTION:
        # One setting of three remains after the first rung.
        num_rungs = 2 if num_candidates > 1 else 1
    rungs: list[Rung] = []
    remaining = num_candidates
    for number in range(num_rungs):
        rounds_of_rung = math.ceil(rounds / REDUCTION ** (num_rungs - 1 - number))
        if rungs and rounds_of_rung == rungs[-1].rounds:
            # With few rounds, two rungs may be as long as each other: the settings are compared once.
            continue
        rungs.append(Rung(remaining, rounds_of_rung))
        remaining = math.ceil(remaining / REDUCTION)
    return rungs


@dataclass(frozen=True)
class Cost:
    """What the runs of a method cost.

    Attributes:
        per_run: Seconds of a run that do not depend on its rounds: set-up, final fine-tuning and scoring.
        per_round: Seconds of a round.
    """

    per_run: float
    per_round: float

    def seconds(self, rounds: float) -> float:
        """Return the duration of a run."""
        return self.per_run + rounds * self.per_round


@dataclass(frozen=True)
class SearchPlan:
    """What is tried.

    Attributes:
        methods: Names of the methods.
        num_candidates: Settings of each method.
        num_draws: Draws of held-out images on which each setting is scored.
        num_finalists: Methods that are trained on all training images.
        seeds: Seeds of these runs.
        rounds: Rounds of a complete run.
        num_levels: Adapters that are tried one after another, from the cheapest on; 0 if settings are drawn from all.
        num_added: Settings of the cheapest adapter that were added in the time that was not enough for a dearer one.
    """

    methods: tuple[str, ...]
    num_candidates: int
    num_draws: int
    num_finalists: int
    seeds: tuple[int, ...]
    rounds: int
    num_levels: int = 0
    num_added: int = 0

    @property
    def rungs(self) -> list[Rung]:
        """The rungs of each method."""
        return make_rungs(self.num_candidates, self.rounds)

    def search_seconds(self, costs: Mapping[str, Cost]) -> float:
        """Return how long the trials take, one after another."""
        seconds = 0.0
        for method in self.methods:
            former_rounds = 0
            for rung in self.rungs:
                segment_seconds = costs[method].seconds(rung.rounds - former_rounds)
                seconds += rung.num_candidates * self.num_draws * segment_seconds
                former_rounds = rung.rounds
        return seconds

    def final_seconds(self, costs: Mapping[str, Cost], finalists: Sequence[str] = ()) -> float:
        """Return how long the last rung takes, one run after another.

        Args:
            costs: Costs by method.
            finalists: Methods in the last rung; without them it is expected to have methods of average cost.
        """
        durations = []
        for method in finalists or self.methods:
            # Trials take as many steps.
            durations.append(costs[method].seconds(self.rounds))
        expected = sum(durations) if finalists else self.num_finalists * sum(durations) / len(durations)
        return len(self.seeds) * expected

    def seconds(self, costs: Mapping[str, Cost], jobs: int) -> float:
        """Return how long everything takes."""
        return (self.search_seconds(costs) + self.final_seconds(costs)) / jobs

    def describe(self) -> str:
        """Return the plan as a sentence for people."""
        number = self.num_candidates + self.num_added
        settings = "one setting" if number == 1 else f"{number} settings"
        draws = "" if self.num_draws == 1 else f" on {self.num_draws} draws of held-out images"
        steps = " → ".join(f"{rung.num_candidates} for {rung.rounds}" for rung in self.rungs)
        seeds = "one seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        if self.num_levels:
            settings += " of the cheapest adapter"
            draws += ", and if time is left one setting of each dearer adapter"
        return (
            f"{len(self.methods)} methods with {settings} each{draws} ({steps} rounds); then the best setting of "
            f"{self.num_finalists} methods on all training images with {seeds}, {self.rounds} rounds"
        )


def shrinking_plans(plan: SearchPlan) -> Iterator[SearchPlan]:
    """Yield plans from the largest to the smallest, in the order in which docs/choose.md says that they shrink.

    Settings go first, since the recipe's own is among those that remain, then methods of the last rung, which are the
    worst on held-out images. Draws are kept longer: where images are few, one draw would choose methods by chance.
    Rounds come next: some methods learn more slowly than others, and would be judged too early. Methods go last, but
    for very short runs: one that is not tried cannot be found to be the best.
    """
    rounds_of_recipe = plan.rounds
    yield plan
    for number in CANDIDATES:
        if number < plan.num_candidates:
            plan = replace(plan, num_candidates=number)
            yield plan
    while plan.num_finalists > FEWEST_FINALISTS:
        plan = replace(plan, num_finalists=plan.num_finalists - 1)
        yield plan
    for num_draws, num_candidates, num_seeds in LAST_REDUCTIONS:
        while plan.num_draws > num_draws:
            plan = replace(plan, num_draws=plan.num_draws - 1)
            yield plan
        if plan.num_candidates > num_candidates:
            plan = replace(plan, num_candidates=num_candidates)
            yield plan
        while len(plan.seeds) > num_seeds:
            plan = replace(plan, seeds=plan.seeds[:-1])
            yield plan
    for shorter in shorter_plans(plan, max(FEWEST_ROUNDS, math.ceil(SHORTEST_WITH_ALL_METHODS * rounds_of_recipe))):
        plan = shorter
        yield plan
    for method in DROPPED_FIRST:
        remaining = tuple(name for name in plan.methods if name != method)
        if len(remaining) < len(plan.methods) and len(remaining) > len(ALWAYS_TRAINED):
            num_finalists = min(plan.num_finalists, len(remaining))
            plan = replace(plan, methods=remaining, num_finalists=num_finalists)
            yield plan
    yield from shorter_plans(plan, FEWEST_ROUNDS)


def shorter_plans(plan: SearchPlan, fewest_rounds: int) -> Iterator[SearchPlan]:
    """Yield plans with fewer and fewer rounds, but not fewer than ``fewest_rounds``."""
    while plan.rounds > fewest_rounds:
        plan = replace(plan, rounds=max(fewest_rounds, math.floor(SHORTENING * plan.rounds)))
        yield plan


def growing_plans(plan: SearchPlan, largest: SearchPlan) -> Iterator[SearchPlan]:
    """Yield larger plans for the rest of the time: with more draws first, the most of them, then with more settings.

    Args:
        plan: The plan that was carried out.
        largest: The plan if time did not matter.
    """
    for number in range(largest.num_draws, plan.num_draws, -1):
        yield replace(plan, num_draws=number)
    for number in CANDIDATES:
        if plan.num_candidates < number <= largest.num_candidates:
            yield replace(plan, num_candidates=number)


def final_plans(plan: SearchPlan, seeds: Sequence[int]) -> Iterator[SearchPlan]:
    """Yield plans for the last rung, from the largest to the smallest: fewer methods first, then fewer seeds."""
    for num_seeds in range(len(seeds), 0, -1):
        for num_finalists in range(len(plan.methods), 0, -1):
            is_smallest = num_finalists < FEWEST_FINALISTS and num_finalists < len(plan.methods)
            if not is_smallest:
                yield replace(plan, num_finalists=num_finalists, seeds=tuple(seeds[:num_seeds]))


def fit_plan(largest: SearchPlan, costs: Mapping[str, Cost], seconds: float, jobs: int) -> SearchPlan | None:
    """Return the largest plan that fits into the time; None if none does."""
    for plan in shrinking_plans(largest):
        if plan.seconds(costs, jobs) <= seconds:
            return plan
    return None


def smallest_plan(largest: SearchPlan) -> SearchPlan:
    """Return the smallest plan."""
    *_, smallest = shrinking_plans(largest)
    return smallest


def num_draws_for(num_held_out: int) -> int:
    """Return on how many draws of held-out images settings are scored.

    With n images the standard error of an accuracy of 80 % is 0.4 / √n. Draws are added until it is 1.5 percentage
    points, up to five, which together hold out every image about once.

    >>> num_draws_for(1000), num_draws_for(300), num_draws_for(20)
    (1, 3, 5)
    """
    num_images = (0.4 / 0.015) ** 2
    num_draws = math.ceil(num_images / max(1, num_held_out))
    return min(5, max(1, num_draws))


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Return the mean of measured costs."""
    return Cost(
        per_run=sum(cost.per_run for cost in costs) / len(costs),
        per_round=sum(cost.per_round for cost in costs) / len(costs),
    )
