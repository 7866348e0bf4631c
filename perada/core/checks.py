# SPDX-License-Identifier: Apache-2.0
"""Options: the base of what is made from them, and range checks.

The checks have one style of message: the value, that it cannot be used, the remedy.

``name`` is what the user wrote; an option of a section is called ``"privacy: max_norm"``.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from perada.core.text import near_names


class OptionError(ValueError):
    """An option that is rejected.

    Whoever handles the error reads these facts, and never the message.

    Attributes:
        name: The option as the message calls it: ``lr``, or ``privacy: max_norm`` for one of a section.
        value: What it was set to, as far as it is known.
        remedy: What to set instead, if that is a part of the message of its own.

    >>> error = OptionError("privacy: max_norm=-1 cannot be used; give 1", name="privacy: max_norm", value=-1)
    >>> error.option, error.value
    ('privacy.max_norm', -1)
    """

    # The name can be left out because an error of another process (a loader worker) is made again of its message only.
    def __init__(self, message: str, *, name: str = "", value: object = None, remedy: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.value = value
        self.remedy = remedy

    @property
    def option(self) -> str:
        """The option with its section before a dot, as recipes and command lines have it."""
        return self.name.replace(": ", ".")

    def renamed(self, name: str) -> "OptionError":
        """Make the same error for a caller who knows the option by another name."""
        message = name + str(self).removeprefix(self.name)
        return OptionError(message, name=name, value=self.value, remedy=self.remedy)


class OptionTypeError(OptionError, TypeError):
    """An option whose value has a type that is rejected."""


LARGEST = 3.4e38
"""Largest real number that an option may be unless it says otherwise: the end of float32."""
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that torch can convert: that of 64 bits."""
COUNTABLE = 10**12
"""Largest count, such as a number of rounds, unless an option says otherwise."""


class Options:
    """Something made from options, whose ``repr`` names the class and all of them and is the same in every process.

    The options are the constructor's arguments, with the values that they have now. Of a class that does not keep each
    under its own name, everything that the object holds is shown.
    """

    def __repr__(self) -> str:
        attributes = vars(self)
        arguments = inspect.signature(type(self)).parameters
        names = arguments if arguments.keys() <= attributes.keys() else attributes
        options = ", ".join(f"{name}={_stable_repr(attributes[name])}" for name in names)
        return f"{type(self).__name__}({options})"


def _stable_repr(value: object) -> str:
    """Return a ``repr`` that is the same in every process: sets are sorted, addresses in memory left out."""
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(ordered))


def check_number(
    name: str,
    value: object,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    """Reject a value that is not a finite number in a range.

    NumPy's numbers are accepted, ``True`` and ``False`` are not.

    Args:
        name: Name of the option, as the user wrote it.
        value: What it was set to.
        ge: Lower bound that is allowed itself.
        gt: Lower bound that is not.
        le: Upper bound that is allowed itself. Without ``le`` and ``lt`` it is :data:`LARGEST` or, for integers,
            :data:`LARGEST_INTEGER`.
        lt: Upper bound that is not.
        optional: Whether ``None`` is accepted too.
        hint: End of the message, such as what a value means.

    Raises:
        OptionError: With the value and the remedy.

    >>> check_number("lr", 0.1, gt=0)
    >>> check_number("lr", -1, gt=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr=-1 cannot be used; give a finite number above 0
    >>> check_number("lr", 1e300, ge=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr=1e+300 cannot be used; give a finite number from 0 to 3.4e+38
    """
    if value is None and optional:
        return
    number = _to_float(value)
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST
    if le is None and lt is None and largest < abs(number) < math.inf:
        le = largest  # named in the message only where the number is larger
    accepted = (
        math.isfinite(number)
        and (ge is None or number >= ge)
        and (gt is None or number > gt)
        and (le is None or number <= le)
        and (lt is None or number < lt)
    )
    if not accepted:
        _refuse(name, value, f"a finite number{_range(ge, gt, le, lt)}", optional, hint)


def _to_float(value: object) -> float:
    """Convert a real number; NaN for everything else."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return sys.float_info.max


def check_integer(
    name: str,
    value: object,
    ge: int = 1,
    *,
    le: int | None = COUNTABLE,
    also: Sequence[str] = (),
    optional: bool = False,
    hint: str = "",
) -> None:
    """Reject a value that is not an integer in a range.

    NumPy's integers are accepted, ``True`` and ``False`` are not.

    Args:
        name: Name of the option, as the user wrote it.
        value: What it was set to.
        ge: Smallest integer that is accepted.
        le: Largest integer that is accepted; ``None`` for no limit.
        also: Words that are accepted too.
        optional: Whether ``None`` is accepted too.
        hint: End of the message, such as what a value means.

    Raises:
        OptionError: With the value and the remedy.

    >>> check_integer("batch_size", "full", also=["full"])
    >>> check_integer("batch_size", 0, also=["full"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: batch_size=0 cannot be used; give a whole number of 1 or more, or 'full'
    """
    if value is None and optional:
        return
    if isinstance(value, str) and value in also:
        return
    number = None
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= ge and (le is None or number <= le):
            return
    if le == COUNTABLE and (number is None or number <= COUNTABLE):
        le = None  # named in the message only where the number is larger
    words = "".join(f", or {word!r}" for word in also)
    _refuse(name, value, f"a whole number{_range(ge, None, le, None)}{words}", optional, hint)


def floor_share(share: float, count: int) -> int:
    """``floor(share * count)``; what the rounding of a float takes from such a product is given back.

    >>> int(0.29 * 100), floor_share(0.29, 100)
    (28, 29)
    """
    return math.floor(share * count + 1e-9)


def check_choice(name: str, value: object, allowed: Sequence[object], *, hint: str = "") -> None:
    """Reject a value that is not one of ``allowed``.

    Raises:
        OptionError: With the value and the choice.

    >>> check_choice("optimizer", "sgdd", ["sgd", "adam"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: optimizer='sgdd' is unknown; choose one of 'sgd', 'adam'
    """
    for choice in allowed:
        # Types are compared too: 1 == True, and "no" of YAML is False.
        if value is choice or (type(value) is type(choice) and value == choice):
            return
    remedy = f"choose one of {', '.join(map(repr, allowed))}"
    if hint:
        remedy += f" ({hint})"
    raise OptionError(f"{name}={value!r} is unknown; {remedy}", name=name, value=value, remedy=remedy)


def check_known(name: str, value: object, known: Iterable[str], also: str = "") -> None:
    """Refuse a name that is not ``known``: an OptionError with the names that are close, or else all of them.

    >>> check_known("algorithm", "perda", ["perada", "ditto"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: algorithm='perda' is unknown; did you mean 'perada'?
    """
    names = list(known)
    if value in names:
        return
    completions = [name for name in names if value and name.startswith(f"{value}_")]
    close = completions or near_names(str(value), names)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = f"choose one of {', '.join(names)}{also}"
    raise OptionError(f"{name}={value!r} is unknown; {hint}", name=name, value=value, remedy=hint)


def check_name(name: str, value: object, optional: bool = False) -> None:
    """Refuse, by an OptionError, what is not text of at least one letter (a path will do), or ``None`` if optional.

    >>> check_name("column", ["domain"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: column=['domain'] cannot be used; give a text
    """
    if not (isinstance(value, str | PurePath) and str(value)) and not (optional and value is None):
        _refuse(name, value, "a text", optional, "")


def check_type(name: str, value: object, kind: type, such: str) -> None:
    """Refuse, by an OptionTypeError, what is neither ``None`` nor of a kind; ``such`` is an example.

    >>> check_type("partition", 0.1, dict, "{'alpha': 0.1}")
    Traceback (most recent call last):
    perada.core.checks.OptionTypeError: partition=0.1 cannot be used; give one such as {'alpha': 0.1}, or leave it out
    """
    if value is not None and not isinstance(value, kind):
        remedy = f"give one such as {such}, or leave it out"
        raise OptionTypeError(f"{name}={value!r} cannot be used; {remedy}", name=name, value=value, remedy=remedy)


def _range(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    """Describe a range for a message, with a space in front; empty where there is no lower bound."""
    if le is None and lt is None:
        if ge is not None:
            return f" of {ge} or more"
        return "" if gt is None else f" above {gt}"
    if ge is not None:
        return f" from {ge} to below {lt}" if le is None else f" from {ge} to {le}"
    if gt is None:
        return ""
    return f" above {gt} and below {lt}" if le is None else f" above {gt} and up to {le}"


def _refuse(name: str, value: object, what: str, optional: bool, hint: str) -> None:
    remedy = f"give {what}"
    if optional:
        remedy += ", or leave it out"
    if hint:
        remedy += f" ({hint})"
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:60]}…"
    raise OptionError(f"{name}={shown} cannot be used; {remedy}", name=name, value=value, remedy=remedy)


def check_options(name: str, value: object, hint: str) -> None:
    """Refuse, by an OptionError, what is not a dictionary of options by name; ``hint`` is an example.

    >>> check_options("adapter_options", 3, "{'r': 8}")
    Traceback (most recent call last):
    perada.core.checks.OptionError: adapter_options=3 cannot be used; give a dictionary of options, such as {'r': 8}
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        remedy = f"give a dictionary of options, such as {hint}"
        raise OptionError(f"{name}={value!r} cannot be used; {remedy}", name=name, value=value, remedy=remedy)


def check_installed(what: object, extra: str, *modules: str) -> None:
    """Refuse to continue without the libraries of an extra that ``what`` needs; none of them is imported for it.

    >>> check_installed("metrics_port", "monitoring", "no_such_library")
    Traceback (most recent call last):
    ModuleNotFoundError: metrics_port needs no_such_library, which is not installed; pip install 'perada[monitoring]'

    Raises:
        ModuleNotFoundError: Names those that are not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise ModuleNotFoundError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed; pip install 'perada[{extra}]'"
        )


def installed(module: str, what: object, extra: str) -> Any:  # noqa: ANN401  # a module
    """Import a library of an extra, which ``what`` needs.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} needs {module}, which is not installed ({error}); pip install 'perada[{extra}]'"
        ) from error
