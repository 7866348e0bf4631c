# SPDX-License-Identifier: Apache-2.0
"""What is to go: it works as before, and warns once at each place where it is used (docs/api.md says how long)."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
GOING: dict[str, str] = {}
"""What is deprecated in the modules that were imported, and the version in which it goes."""


def _warn(what: str, until: str, instead: str) -> None:
    warnings.warn(f"{what} is deprecated and goes with perada {until}; use {instead}", FutureWarning, stacklevel=3)


def deprecated(until: str, instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function or a method that goes with the version ``until``; ``instead`` is what to use."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        GOING[what := f"{function.__qualname__}()"] = until

        @wraps(function)
        def warned(*given: P.args, **named: P.kwargs) -> R:
            _warn(what, until, instead)
            return function(*given, **named)

        return warned

    return mark


def renamed(until: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords by the names that they had, given as ``old="new"``, up to the version ``until``.

    The function raises a TypeError if it is given both.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        GOING.update({f"{function.__qualname__}({old}=)": until for old in names})

        @wraps(function)
        def warned(*given: P.args, **named: P.kwargs) -> R:
            for old in names.keys() & named.keys():
                _warn(f"{function.__qualname__}({old}=)", until, f"{names[old]}=")
                if names[old] in named:
                    raise TypeError(f"{function.__qualname__}() got {old}= and {names[old]}=; give the second alone")
                named[names[old]] = named.pop(old)
            return function(*given, **named)

        return warned

    return mark


def moved(module: str, until: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of a ``module`` for names that it had, each with its path now, up to the version ``until``.

    >>> __getattr__ = moved(__name__, "2.0.0", {"old": "math.pi"})
    """
    GOING.update({f"{module}.{name}": until for name in places})

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", until, places[name])
        home, _, last = places[name].rpartition(".")
        return getattr(import_module(home), last)

    return get
