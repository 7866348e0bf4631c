# SPDX-License-Identifier: Apache-2.0
"""Values and ranges of ``--tune`` and ``--vary``: their syntax, and the choice of the next point."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import yaml

from perada.core.seeding import derive_seed

Point = dict[str, str]
"""A point of the grid: values by the names of ``--tune``."""
Sampler = Literal["tpe", "random"]

HOLD_OUT = "--data.client_validation=0.2"
VALIDATE = "--data.evaluate_on=validation"
_FIXED = {"seed_everything": "--seeds sets the seeds"}
for _word in (HOLD_OUT, VALIDATE):
    _FIXED[_word.removeprefix("--").partition("=")[0]] = "this determines what is scored"
RANDOM_TRIALS = 5
"""Number of trials that tpe draws at random before it models the scores."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|linear))?")


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, integers if both are.

    Attributes:
        low: Lower end.
        high: Upper end.
        log: Whether the logarithm is drawn uniformly.
    """

    low: float
    high: float
    log: bool

    def number(self, value: str) -> float:
        """Return a value as a number.

        Raises:
            ValueError: If it is not a number of the range's kind.
        """
        return type(self.low)(value)

    def __contains__(self, value: str) -> bool:
        try:
            return self.low <= self.number(value) <= self.high
        except ValueError:
            return False

    def text_of(self, value: float) -> str:
        """Round a value to five digits, without leaving the range."""
        if isinstance(self.low, int):
            return str(value)
        rounded = float(f"{value:.5g}")
        return f"{min(max(rounded, self.low), self.high):.12g}"


Grid = dict[str, list[str] | Range]
"""Values, or a range, by name; several options joined with ``+`` get the same value."""


def options_of_name(name: str) -> list[str]:
    """Return the options that a name of a grid or point represents.

    >>> options_of_name("training.lr_local+training.momentum")
    ['training.lr_local', 'training.momentum']
    """
    return name.split("+")


def parse_grid(option_words: Sequence[str], option: str = "--tune") -> Grid:
    """Parse the arguments of ``--tune``, without names of algorithms, or of ``--vary``.

    A range is written ``lo..hi``, ``lo..hi:log`` or ``lo..hi:linear``. Without a scale, options whose names begin with
    ``lr`` are logarithmic, and others are linear.

    Raises:
        ValueError: If an argument cannot be read, or names an option or a value twice.

    >>> parse_grid(["training.lr_local+training.lr_personal=0.01,0.1"])
    {'training.lr_local+training.lr_personal': ['0.01', '0.1']}
    """
    grid: Grid = {}
    seen: set[str] = set()
    for argument in option_words:
        name, _, values_text = argument.removeprefix("--").partition("=")
        values = split_values(values_text)
        options = options_of_name(name)
        if not values or not all(options):
            raise ValueError(
                f"{option} {argument!r} cannot be parsed; write NAME=V1,V2,..., for example training.lr_local=0.01,0.1"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"{option} {argument!r} has a duplicate value; list each value once")
        for full_option in options:
            check_free(full_option, f"{option} {argument!r}")
            short_option = full_option.replace(".init_args.", ".")  # the same option with and without it
            if short_option in seen:
                raise ValueError(f"{option} {argument!r}: {full_option} is set twice; set it once")
            seen.add(short_option)
        grid["+".join(options)] = _parse_range(options, values, f"{option} {argument}") or values
    return grid


def check_free(name: str, where: str) -> None:
    """Raise if `perada compare` sets an option of ``perada fit`` itself.

    Args:
        name: Name of the option.
        where: Beginning of the message.
    """
    reason = _FIXED.get(name)
    if reason is not None:
        raise ValueError(f"{where} cannot be tuned or varied: {reason}")


def split_values(text: str) -> list[str]:
    """Split a text at commas outside brackets and quotes; return nothing if it cannot be parsed.

    >>> split_values('1, [2,3],{"a": "b,c"},"d, e"')
    ['1', '[2,3]', '{"a": "b,c"}', 'd, e']
    """
    try:
        sequence: Any = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    values = []
    for node in sequence.value:
        if isinstance(node, yaml.ScalarNode):
            values.append(node.value)
        else:
            # Lists and dictionaries stay as they are written. The marks count the bracket before the text.
            values.append(text[node.start_mark.index - 1 : node.end_mark.index - 1])
    return values


def _parse_range(options: Sequence[str], texts: Sequence[str], text: str) -> Range | None:
    """Return the values of options as a range; None if they are not a range.

    Args:
        options: The options.
        texts: Their values, as they are written.
        text: The whole argument, for messages.
    """
    matches = [_RANGE.fullmatch(value) for value in texts]
    match = next((match for match in matches if match is not None), None)
    if match is None:
        return None
    if len(texts) > 1:
        raise ValueError(f"{text!r}: a range cannot be mixed with values; use either a range or values")
    low_text, high_text, scale = match.groups()
    has_integer_ends = all(re.fullmatch(r"[-+]?\d+", end) for end in (low_text, high_text))
    kind = int if has_integer_ends else float
    low = kind(low_text)
    high = kind(high_text)
    if scale is None:
        is_log = any(name.rpartition(".")[2].startswith("lr") for name in options)
    else:
        is_log = scale == "log"
    if low >= high:
        raise ValueError(f"{text!r}: {low_text} is not below {high_text}; write the lower end first")
    if is_log and low <= 0:
        raise ValueError(f"{text!r}: a logarithmic range must begin above zero; raise {low_text} or add :linear")
    return Range(low, high, is_log)


def has_range(grid: Grid) -> bool:
    """Return whether a grid has a range, from which points are drawn."""
    return any(isinstance(values, Range) for values in grid.values())


def points(grid: Grid) -> list[Point]:
    """Return every point of a grid of values; none for an empty grid, or one with a range."""
    value_lists = [values for values in grid.values() if not isinstance(values, Range)]
    if not grid or len(value_lists) < len(grid):
        return []
    return [dict(zip(grid, values, strict=True)) for values in product(*value_lists)]


def corners(grid: Grid) -> list[Point]:
    """Return points that together have every value, and both ends of every range."""
    values_of_option: dict[str, list[str]] = {}
    for name, values in grid.items():
        if isinstance(values, Range):
            values_of_option[name] = [values.text_of(values.low), values.text_of(values.high)]
        else:
            values_of_option[name] = values
    num_points = max((len(values) for values in values_of_option.values()), default=0)
    corner_points = []
    for number in range(num_points):
        # Options with fewer values repeat their last one.
        corner_points.append({name: values[min(number, len(values) - 1)] for name, values in values_of_option.items()})
    return corner_points


def inside(grid: Grid, point: Point) -> bool:
    """Return whether a point has a value of the grid for each of its options, and no other options.

    >>> inside(parse_grid(["lr=0.1..1"]), {"lr": "0.5"}), inside(parse_grid(["lr=0.1..1"]), {"lr": "2"})
    (True, False)
    """
    return point.keys() == grid.keys() and all(value in grid[name] for name, value in point.items())


class Observation(NamedTuple):
    """A point of the grid and its score, where higher is better; None if the run failed or diverged."""

    point: Point
    score: float | None


def propose(grid: Grid, observations: Sequence[Observation], number: int, sampler: Sampler, seed: int) -> Point:
    """Return the point of the next trial, a deterministic function of the arguments.

    Optuna's study is made anew from the observations, so that only the results have to be stored.

    Args:
        grid: Values or a range for each option.
        observations: Earlier points and their scores. A point without a score counts as worse than all others. Points
            outside the grid are left out.
        number: Number of the trial, from 0.
        sampler: ``tpe``, the tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011), or ``random``.
        seed: Seed of the draws; random trials are the same for all algorithms.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = _search_space(grid)
    trial_seed = derive_seed(seed, "tune", number) % 2**32
    optuna_sampler: optuna.samplers.BaseSampler
    if sampler == "random":
        optuna_sampler = optuna.samplers.RandomSampler(seed=trial_seed)
    else:
        optuna_sampler = optuna.samplers.TPESampler(seed=trial_seed, n_startup_trials=RANDOM_TRIALS)
    study = optuna.create_study(direction="maximize", sampler=optuna_sampler)
    for point, score in observations:
        if not inside(grid, point):
            continue
        parameters: dict[str, str | float] = {}
        for name, values in grid.items():
            parameters[name] = values.number(point[name]) if isinstance(values, Range) else point[name]
        # A trial that was pruned before its first score ranks behind all that have one.
        state = TrialState.PRUNED if score is None else TrialState.COMPLETE
        study.add_trial(create_trial(params=parameters, distributions=space, value=score, state=state))
    proposed = study.ask(space).params
    next_point = {}
    for name, values in grid.items():
        value = proposed[name]
        next_point[name] = values.text_of(value) if isinstance(values, Range) else str(value)
    return next_point


def _search_space(grid: Grid) -> dict[str, Any]:
    """Return Optuna's distribution for each option."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space: dict[str, Any] = {}
    for name, values in grid.items():
        if not isinstance(values, Range):
            space[name] = CategoricalDistribution(values)
        elif isinstance(values.low, int):
            space[name] = IntDistribution(values.low, int(values.high), log=values.log)
        else:
            space[name] = FloatDistribution(values.low, values.high, log=values.log)
    return space
