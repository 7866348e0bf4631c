# SPDX-License-Identifier: Apache-2.0
"""Named algorithms as recipes and command lines write them: the path of a class, and arguments."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perada.algorithms import ALGORITHMS
from perada.algorithms.base import Algorithm


def class_path_of(kind: Callable[..., Any]) -> str:
    """Return the path by which a recipe names a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def algorithm_spec(name: str) -> dict[str, Any]:
    """Return the class of a named algorithm, and the arguments that distinguish it from other names of that class.

    Returns:
        ``class_path`` and ``init_args``, as in a recipe.
    """
    if name not in ALGORITHMS:
        return {"class_path": name, "init_args": {}}
    constructor = _constructor_of(ALGORITHMS[name])
    defaults = inspect.signature(constructor.kind).parameters
    # Names of the same class differ in these arguments; the others of them have their defaults.
    init_args = {}
    for make in ALGORITHMS.values():
        other = _constructor_of(make)
        if other.kind is constructor.kind:
            for argument in other.arguments:
                init_args[argument] = constructor.arguments.get(argument, defaults[argument].default)
    return {"class_path": class_path_of(constructor.kind), "init_args": init_args}


def option_words(option: str, spec: dict[str, Any]) -> list[str]:
    """Return the options of ``perada fit`` for a class with its arguments.

    >>> option_words("data.partition", {"class_path": "Shards", "init_args": {"num_clients": 3}})
    ['--data.partition=Shards', '--data.partition.num_clients=3']
    """
    words = [f"--{option}={spec['class_path']}"]
    for name, value in spec.get("init_args", {}).items():
        value_text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{option}.{name}={value_text}")
    return words


@dataclass(frozen=True)
class _Constructor:
    """A class and the arguments that it is called with, by name."""

    kind: Callable[..., Algorithm]
    arguments: dict[str, Any]


def _constructor_of(make: Callable[..., Algorithm]) -> _Constructor:
    """Return the class and the arguments of a value of :data:`perada.algorithms.ALGORITHMS`."""
    bound = partial(make)  # of a class a partial without arguments; partials of partials are flattened
    arguments = inspect.signature(bound.func).bind_partial(*bound.args, **bound.keywords).arguments
    return _Constructor(bound.func, arguments)
