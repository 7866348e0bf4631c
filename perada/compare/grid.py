# SPDX-License-Identifier: Apache-2.0
"""Values and ranges of ``--tune`` and ``--vary``: what they mean, and which point is tried next."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Literal

from perada.api import full_name
from perada.compare.entries import ENTRIES
from perada.core.seeding import derive_seed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Point = dict[str, str]
"""A point of the grid: values by the names that ``--tune`` gave."""
Sampler = Literal["tpe", "random"]

HOLD_OUT = "--data.client_validation=0.2"
VALIDATE = "--data.evaluate_on=validation"
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
    text: str  # as it was given

    @property
    def whole(self) -> bool:
        """Whether whole numbers are tried."""
        return all(re.fullmatch(r"[-+]?\d+", end) for end in (self.low, self.high))

    def __contains__(self, value: str) -> bool:
        wanted = r"[-+]?\d+" if self.whole else _NUMBER
        return bool(re.fullmatch(wanted, value)) and float(self.low) <= float(value) <= float(self.high)

    def number(self, value: str) -> float:
        """A value as a number."""
        return int(value) if self.whole else float(value)

    def written(self, value: float) -> str:
        """A value in five digits that does not leave the range by that."""
        if self.whole:
            return str(value)
        return f"{min(max(float(f'{value:.5g}'), float(self.low)), float(self.high)):.12g}"

    def distribution(self) -> "BaseDistribution":
        """What optuna draws from."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(float(self.low), float(self.high), log=self.log)


Grid = dict[str, list[str] | Range]
"""Values, or a range, by name; several options joined with ``+`` get the same value."""


def parse_grids(asked: Sequence[str], algorithms: Sequence[str]) -> dict[str, Grid]:
    """The grid of each algorithm (the recipes' own: ""), from the arguments of ``--tune``, which may begin with names.

    Raises:
        ValueError: As :func:`parse_grid`, or if a name is not an algorithm's. What is for one that is not among the
            ``algorithms`` is left out.

    >>> parse_grids(["model.lr_local=1,2", "ditto:model.momentum=0,0.9"], ["fedavg", "ditto"])["fedavg"]
    {'model.lr_local': ['1', '2']}
    """
    grids: dict[str, list[str]] = {name: [] for name in algorithms or [""]}
    for text in asked:
        named, colon, _ = text.partition("=")[0].rpartition(":")
        only = named.split(",") if colon else list(grids)
        if colon and not algorithms:
            raise ValueError(f"--tune {text!r} is for named algorithms: give --algorithms too")
        for name in only:
            if colon and name not in ENTRIES:
                raise ValueError(f"--tune {text!r} is for {name!r}, which is not an algorithm: `perada compare --help`")
            if name in grids:
                grids[name].append(text.removeprefix(f"{named}:") if colon else text)
    return {name: parse_grid(own) for name, own in grids.items()}


def parse_grid(asked: Sequence[str], option: str = "--tune") -> Grid:
    """Read the arguments of ``--tune``, without names of algorithms, or of ``--vary``.

    A range is written ``lo..hi``, ``lo..hi:log`` or ``lo..hi:linear``. Without a word, options whose names begin with
    ``lr`` are logarithmic, and others are linear.

    Raises:
        ValueError: If one is not NAME=V1,V2,... with different values, or names an option twice; or if a range is
            empty, stands among other values, or is logarithmic and begins at or below zero.

    >>> parse_grid(["lr_local+lr_personal=0.01,0.1"])
    {'model.lr_local+model.lr_personal': ['0.01', '0.1']}
    """
    grid: Grid = {}
    seen: set[str] = set()
    for text in asked:
        name, equals, listed = text.partition("=")
        values, options = split_values(listed), [full_name(one) for one in name.removeprefix("--").split("+")]
        if not equals or not all(options) or not all(values):
            raise ValueError(
                f"{option} {text!r} cannot be read: give NAME=V1,V2,..., for example model.lr_local=0.01,0.1"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"{option} {text!r} has a value twice: give each once")
        known = [option.replace(".init_args.", ".") for option in options]  # the same option with and without it
        twice = [option for n, option in enumerate(options) if known[n] in seen or known[n] in known[:n]]
        if twice:
            raise ValueError(f"{option} {text!r}: {twice[0]} is given twice, give it once")
        if fixed := {"seed_everything", *(word[2:].partition("=")[0] for word in (HOLD_OUT, VALIDATE))} & {*options}:
            what = "--seeds gives the seeds" if "seed_everything" in fixed else "this says what is scored"
            raise ValueError(f"{option} {text!r}: {what}, so it cannot be tuned or varied")
        seen.update(known)
        grid["+".join(options)] = _range(options, values, f"{option} {text}") or values
    return grid


def split_values(text: str) -> list[str]:
    """What stands between commas, but for those within brackets or quotes; quotes around a whole value are left out.

    >>> split_values('1, [2,3],{"a": "b,c"},"d, e"')
    ['1', '[2,3]', '{"a": "b,c"}', 'd, e']
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    stripped = [value.strip() for value in values]
    return [value[1:-1] if re.fullmatch(r"\"[^\"]*\"|'[^']*'", value) else value for value in stripped]


def _range(options: Sequence[str], values: Sequence[str], text: str) -> Range | None:
    """The range among the values of options, if there is one."""
    match = next(filter(None, map(_RANGE.fullmatch, values)), None)
    if match is None:
        return None
    if len(values) > 1:
        raise ValueError(f"{text!r}: a range stands alone, give either a range or values")
    low, high, scale = match.groups()
    log = scale == "log" or (scale is None and any(one.rpartition(".")[2].startswith("lr") for one in options))
    if not float(low) < float(high):
        raise ValueError(f"{text!r}: {low} is not below {high}, give the lower end first")
    if log and float(low) <= 0:
        raise ValueError(f"{text!r}: a logarithmic range begins above zero, raise {low} or add :linear")
    return Range(low, high, log, values[0])


def ranged(grid: Grid) -> bool:
    """Whether a grid has a range, of which points are drawn."""
    return any(isinstance(values, Range) for values in grid.values())


def points(grid: Grid) -> list[Point]:
    """Every point of a grid of values; none of an empty one, or where there is a range."""
    lists = [values for values in grid.values() if not isinstance(values, Range)]
    return [dict(zip(grid, one, strict=True)) for one in product(*lists) if one] if len(lists) == len(grid) else []


def ends(grid: Grid) -> list[Point]:
    """Two points between which all others lie: with every range at its low end and at its high end."""
    return [
        {name: getattr(values, end) if isinstance(values, Range) else values[place] for name, values in grid.items()}
        for end, place in (("low", 0), ("high", -1))
    ]


def inside(grid: Grid, point: Point) -> bool:
    """Whether a point has a value of the grid for each of its options, and no other.

    >>> inside(parse_grid(["lr=0.1..1"]), {"lr": "0.5"}), inside(parse_grid(["lr=0.1..1"]), {"lr": "2"})
    (True, False)
    """
    return point.keys() == grid.keys() and all(value in grid[name] for name, value in point.items())


def require_optuna() -> None:
    """Refuse to sample without the package that does so."""
    if find_spec("optuna") is None:
        raise ModuleNotFoundError("--tune with a range needs the package 'optuna': pip install perada[tune]")


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
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = {name: values for name, values in grid.items() if isinstance(values, Range)}
    space = {
        name: values.distribution() if isinstance(values, Range) else CategoricalDistribution(values)
        for name, values in grid.items()
    }
    drawn = derive_seed(seed, "tune", number) % 2**32
    chosen = (
        optuna.samplers.RandomSampler(seed=drawn)
        if sampler == "random"
        else optuna.samplers.TPESampler(seed=drawn, n_startup_trials=DRAWN)
    )
    study = optuna.create_study(direction="maximize", sampler=chosen)
    for point, score in told:
        if inside(grid, point):
            values = {name: found[name].number(value) if name in found else value for name, value in point.items()}
            # A trial that was pruned before its first score ranks behind all that have one.
            state = TrialState.PRUNED if score is None else TrialState.COMPLETE
            study.add_trial(create_trial(params=values, distributions=space, value=score, state=state))
    given = study.ask(space).params
    return {name: found[name].written(value) if name in found else str(value) for name, value in given.items()}
