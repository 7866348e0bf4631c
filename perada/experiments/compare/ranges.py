# SPDX-License-Identifier: Apache-2.0
"""Ranges of ``--tune``: what one means, and which point is tried next."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from perada.core.seeding import derive_seed
from perada.experiments.compare.plan import Grid, Point, Sampler

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DRAWN = 5
"""Trials that tpe draws at random before it models the scores."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|linear))?")


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both as they were written; whole ones where both are."""

    low: str
    high: str
    log: bool  # drawn evenly in the logarithm

    @property
    def whole(self) -> bool:
        """Whether whole numbers are tried."""
        return all(re.fullmatch(r"[-+]?\d+", end) for end in (self.low, self.high))


def ranges(grid: Grid) -> dict[str, Range]:
    """The options of a grid that have a range, written ``lo..hi``, ``lo..hi:log`` or ``lo..hi:linear``.

    Without a word, options whose names begin with ``lr`` are logarithmic, and others are linear.

    Raises:
        ValueError: If a range is empty, stands among other values, or is logarithmic and begins at or below zero.

    >>> ranges({"model.lr_local": ["1e-3..0.1"], "model.momentum": ["0", "0.9"]})
    {'model.lr_local': Range(low='1e-3', high='0.1', log=True)}
    """
    found: dict[str, Range] = {}
    for name, values in grid.items():
        for value in values:
            match = _RANGE.fullmatch(value)
            if match is None:
                continue
            text = f"--tune {name}={','.join(values)}"
            if len(values) > 1:
                raise ValueError(f"{text!r}: a range stands alone, give either a range or values")
            low, high, scale = match.groups()
            rate = any(option.rpartition(".")[2].startswith("lr") for option in name.split("+"))
            log = scale == "log" or (scale is None and rate)
            if not float(low) < float(high):
                raise ValueError(f"{text!r}: {low} is not below {high}, give the lower end first")
            if log and float(low) <= 0:
                raise ValueError(f"{text!r}: a logarithmic range begins above zero, raise {low} or add :linear")
            found[name] = Range(low, high, log)
    return found


def require_optuna() -> None:
    """Refuse to sample without the package that does so."""
    if find_spec("optuna") is None:
        raise ModuleNotFoundError("--tune with a range needs the package 'optuna': pip install perada[tune]")


def ends(grid: Grid) -> list[Point]:
    """Two points between which all others lie: with every range at its low end and at its high end."""
    found = ranges(grid)
    return [
        {name: getattr(found[name], end) if name in found else values[place] for name, values in grid.items()}
        for end, place in (("low", 0), ("high", -1))
    ]


def inside(grid: Grid, point: Point) -> bool:
    """Whether a point has a value of the grid for each of its options, and no other.

    >>> inside({"lr": ["0.1..1"]}, {"lr": "0.5"}), inside({"lr": ["0.1..1"]}, {"lr": "2"})
    (True, False)
    """
    found = ranges(grid)

    def fits(name: str, value: str) -> bool:
        if name not in found:
            return value in grid[name]
        wanted = r"[-+]?\d+" if found[name].whole else _NUMBER
        return bool(re.fullmatch(wanted, value)) and float(found[name].low) <= float(value) <= float(found[name].high)

    return point.keys() == grid.keys() and all(fits(name, value) for name, value in point.items())


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
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = _space(grid)
    drawn = derive_seed(seed, "tune", number) % 2**32
    chosen = (
        optuna.samplers.RandomSampler(seed=drawn)
        if sampler == "random"
        else optuna.samplers.TPESampler(seed=drawn, n_startup_trials=DRAWN)
    )
    study = optuna.create_study(direction="maximize", sampler=chosen)
    for point, score in told:
        if inside(grid, point):
            values = _numbers(grid, point)
            # A trial that was pruned before its first score ranks behind all that have one.
            state = TrialState.PRUNED if score is None else TrialState.COMPLETE
            study.add_trial(create_trial(params=values, distributions=space, value=score, state=state))
    given = study.ask(space).params
    return {name: _written(value, ranges(grid).get(name)) for name, value in given.items()}


def _written(value: str | float, own: Range | None) -> str:
    """A value in five digits that does not leave its range by that."""
    if own is None or own.whole:
        return str(value)
    return f"{min(max(float(f'{value:.5g}'), float(own.low)), float(own.high)):.12g}"


def _space(grid: Grid) -> "dict[str, BaseDistribution]":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space: dict[str, BaseDistribution] = {}
    found = ranges(grid)
    for name, values in grid.items():
        if name not in found:
            space[name] = CategoricalDistribution(values)
        elif (one := found[name]).whole:
            space[name] = IntDistribution(int(one.low), int(one.high), log=one.log)
        else:
            space[name] = FloatDistribution(float(one.low), float(one.high), log=one.log)
    return space


def _numbers(grid: Grid, point: Point) -> dict[str, str | int | float]:
    """A point as optuna has it: numbers where the option has a range."""
    found = ranges(grid)
    return {
        name: value if name not in found else int(value) if found[name].whole else float(value)
        for name, value in point.items()
    }
