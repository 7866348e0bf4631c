# SPDX-License-Identifier: Apache-2.0
"""Values and ranges of ``--tune`` and ``--vary``: what they mean, and which point is tried next."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import yaml

from perada.api import full_name
from perada.core.seeding import derive_seed

Point = dict[str, str]
"""A point of the grid: values by the names that ``--tune`` gave."""
Sampler = Literal["tpe", "random"]

HOLD_OUT = "--data.client_validation=0.2"
VALIDATE = "--data.evaluate_on=validation"
_FIXED = {"seed_everything": "--seeds gives the seeds"}
_FIXED |= {word[2:].partition("=")[0]: "this says what is scored" for word in (HOLD_OUT, VALIDATE)}
DRAWN = 5
"""Trials that tpe draws at random before it models the scores."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|linear))?")


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``; whole ones where both are."""

    low: float
    high: float
    log: bool  # drawn evenly in the logarithm

    def number(self, value: str) -> float:
        """A value as a number; a ValueError if it is none of this kind."""
        return type(self.low)(value)

    def __contains__(self, value: str) -> bool:
        try:
            return self.low <= self.number(value) <= self.high
        except ValueError:
            return False

    def written(self, value: float) -> str:
        """A value in five digits that does not leave the range by that."""
        if isinstance(self.low, int):
            return str(value)
        return f"{min(max(float(f'{value:.5g}'), self.low), self.high):.12g}"


Grid = dict[str, list[str] | Range]
"""Values, or a range, by name; several options joined with ``+`` get the same value."""


def parse_grid(asked: Sequence[str], option: str = "--tune") -> Grid:
    """Read the arguments of ``--tune``, without names of algorithms, or of ``--vary``.

    A range is written ``lo..hi``, ``lo..hi:log`` or ``lo..hi:linear``. Without a word, options whose names begin with
    ``lr`` are logarithmic, and others are linear.

    >>> parse_grid(["lr_local+lr_personal=0.01,0.1"])
    {'model.lr_local+model.lr_personal': ['0.01', '0.1']}
    """
    grid: Grid = {}
    seen: set[str] = set()
    for text in asked:
        name, _, listed = text.removeprefix("--").partition("=")
        values, options = split_values(listed), list(map(full_name, name.split("+")))
        if not values or not all(options):
            raise ValueError(
                f"{option} {text!r} cannot be read: give NAME=V1,V2,..., for example model.lr_local=0.01,0.1"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"{option} {text!r} has a value twice: give each once")
        for one in options:
            check_free(one, f"{option} {text!r}")
            known = one.replace(".init_args.", ".")  # the same option with and without it
            if known in seen:
                raise ValueError(f"{option} {text!r}: {one} is given twice, give it once")
            seen.add(known)
        grid["+".join(options)] = _range(options, values, f"{option} {text}") or values
    return grid


def check_free(name: str, where: str) -> None:
    """Refuse an option of ``perada fit`` that `perada compare` sets itself."""
    reason = _FIXED.get(full_name(name))
    if reason is not None:
        raise ValueError(f"{where}: {reason}, so it cannot be tuned or varied")


def split_values(text: str) -> list[str]:
    """What stands between commas, but for those within brackets or quotes; none where that cannot be read.

    >>> split_values('1, [2,3],{"a": "b,c"},"d, e"')
    ['1', '[2,3]', '{"a": "b,c"}', 'd, e']
    """
    try:
        listed: Any = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    return [
        node.value if isinstance(node, yaml.ScalarNode) else text[node.start_mark.index - 1 : node.end_mark.index - 1]
        for node in listed.value
    ]


def _range(options: Sequence[str], values: Sequence[str], text: str) -> Range | None:
    """The range among the values of options, if there is one."""
    match = next(filter(None, map(_RANGE.fullmatch, values)), None)
    if match is None:
        return None
    if len(values) > 1:
        raise ValueError(f"{text!r}: a range stands alone, give either a range or values")
    low, high, scale = match.groups()
    kind = int if all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high)) else float
    log = scale == "log" or (scale is None and any(one.rpartition(".")[2].startswith("lr") for one in options))
    if not kind(low) < kind(high):
        raise ValueError(f"{text!r}: {low} is not below {high}, give the lower end first")
    if log and kind(low) <= 0:
        raise ValueError(f"{text!r}: a logarithmic range begins above zero, raise {low} or add :linear")
    return Range(kind(low), kind(high), log)


def ranged(grid: Grid) -> bool:
    """Whether a grid has a range, of which points are drawn."""
    return any(isinstance(values, Range) for values in grid.values())


def points(grid: Grid) -> list[Point]:
    """Every point of a grid of values; none of an empty one, or where there is a range."""
    lists = [values for values in grid.values() if not isinstance(values, Range)]
    return [dict(zip(grid, one, strict=True)) for one in product(*lists) if one] if len(lists) == len(grid) else []


def corners(grid: Grid) -> list[Point]:
    """Points that together have every value, and both ends of every range."""
    listed = {
        name: [values.written(values.low), values.written(values.high)] if isinstance(values, Range) else values
        for name, values in grid.items()
    }
    most = max(map(len, listed.values()), default=0)
    return [{name: values[min(place, len(values) - 1)] for name, values in listed.items()} for place in range(most)]


def inside(grid: Grid, point: Point) -> bool:
    """Whether a point has a value of the grid for each of its options, and no other.

    >>> inside(parse_grid(["lr=0.1..1"]), {"lr": "0.5"}), inside(parse_grid(["lr=0.1..1"]), {"lr": "2"})
    (True, False)
    """
    return point.keys() == grid.keys() and all(value in grid[name] for name, value in point.items())


def propose(grid: Grid, told: Sequence[tuple[Point, float | None]], number: int, sampler: Sampler, seed: int) -> Point:
    """The point of trial ``number``, a function of the arguments alone.

    The study is made anew of what is ``told``, so that nothing has to be kept but the results.

    Args:
        grid: Values or a range for each option.
        told: Earlier points and their scores, of which the higher is better; None where a run failed or diverged,
            which counts as worse than all scores. Points outside of the grid are left out.
        number: Of the trial, from 0.
        sampler: ``tpe``, the tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011), or ``random``.
        seed: Of the draws; trials at random are the same for all algorithms.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {}
    for name, values in grid.items():
        if isinstance(values, Range):
            kind: Any = IntDistribution if isinstance(values.low, int) else FloatDistribution
            space[name] = kind(values.low, values.high, log=values.log)
        else:
            space[name] = CategoricalDistribution(values)
    drawn = derive_seed(seed, "tune", number) % 2**32
    tpe = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=DRAWN)
    chosen = optuna.samplers.RandomSampler(seed=drawn) if sampler == "random" else tpe
    study = optuna.create_study(direction="maximize", sampler=chosen)
    for point, score in told:
        if inside(grid, point):
            read = {
                name: values.number(point[name]) if isinstance(values, Range) else point[name]
                for name, values in grid.items()
            }
            # A trial that was pruned before its first score ranks behind all that have one.
            state = TrialState.PRUNED if score is None else TrialState.COMPLETE
            study.add_trial(create_trial(params=read, distributions=space, value=score, state=state))
    given = study.ask(space).params
    return {
        name: values.written(given[name]) if isinstance(values, Range) else str(given[name])
        for name, values in grid.items()
    }
