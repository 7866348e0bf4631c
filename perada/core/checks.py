# SPDX-License-Identifier: Apache-2.0
"""Base class for option holders, and checks of options.

The checks raise messages of one form: ``lr must be a finite number > 0, got -1``, followed by a hint after a semicolon.

``name`` is what the user wrote; an option of a section is called ``"privacy: max_norm"``.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from perada.core.text import near_names, plain_number, value_text


class OptionError(ValueError):
    """Raised for an option whose value is rejected.

    Code that handles the error reads these attributes, never the message.

    Attributes:
        name: The option as the message calls it: ``lr``, or ``privacy: max_norm`` for one of a section.
        value: The rejected value, if it is known.
        remedy: The part of the message that explains which values are accepted, if there is one.

    >>> error = OptionError("privacy: max_norm must be > 0, got -1", name="privacy: max_norm", value=-1)
    >>> error.option, error.value
    ('privacy.max_norm', -1)
    """

    # The name is optional because an error raised in another process (a loader worker) is rebuilt from its message.
    def __init__(self, message: str, *, name: str = "", value: object = None, remedy: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.value = value
        self.remedy = remedy

    @property
    def option(self) -> str:
        """Name of the option with its section before a dot, as recipes and command lines have it."""
        return self.name.replace(": ", ".")


class OptionTypeError(OptionError, TypeError):
    """Raised for an option whose value has the wrong type."""


def invalid_option(name: str, value: object, requirement: str, hint: str = "") -> OptionError:
    """Return the error for an option that violates a requirement.

    Args:
        name: Name of the option, as the user wrote it.
        value: Its value.
        requirement: Description of valid values, such as "a finite number > 0".
        hint: Further help to choose a value.

    >>> invalid_option("lr", -1, "a finite number > 0", "0.1 is usual")
    OptionError('lr must be a finite number > 0, got -1; 0.1 is usual')
    """
    remedy = f"must be {requirement}"
    return OptionError(_format_message(name, value, remedy, hint), name=name, value=value, remedy=remedy)


def without_effect(name: str, value: object, other: str, remedy: str) -> OptionError:
    """Return the error for an option that does nothing, because of the value of another one.

    Args:
        name: Name of the option, as the user wrote it.
        value: Its value.
        other: The other option with its value, as in a call.
        remedy: What to do with the other option instead.

    >>> without_effect("delta", 2.0, "loss_function='squared'", "choose loss_function='huber'")
    OptionError("delta=2.0 has no effect with loss_function='squared'; leave it out, or choose loss_function='huber'")
    """
    message = f"{name}={value_text(value)} has no effect with {other}; leave it out, or {remedy}"
    return OptionError(message, name=name, value=value, remedy=remedy)


def _format_message(name: str, value: object, remedy: str, hint: str) -> str:
    """Return the text of an error, in one line, with a long value abbreviated."""
    message = f"{name} {remedy}, got {value_text(value)}"
    if hint:
        message += f"; {hint}"
    return message


LARGEST = 3.4e38
"""Largest real number that an option accepts by default: the largest of float32, rounded down."""
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that torch can convert: that of 64 bits."""
COUNTABLE = 10**12
"""Largest count, such as a number of rounds, that an option accepts by default."""


class Options:
    """Base class of objects made from options, whose ``repr`` lists all options and is the same in every process.

    The options are the constructor's arguments, with their present values. For a class that does not store each of
    them under its name, all attributes are listed instead.
    """

    def __setattr__(self, name: str, value: object) -> None:
        # NumPy's numbers become Python's, which all files and checkpoints can hold.
        super().__setattr__(name, plain_number(value))

    def __repr__(self) -> str:
        attributes = vars(self)
        names = list(inspect.signature(type(self)).parameters)
        if not set(names) <= attributes.keys():
            names = list(attributes)
        options = ", ".join(f"{name}={_stable_repr(attributes[name])}" for name in names)
        return f"{type(self).__name__}({options})"


def use_plain_numbers(options: object) -> None:
    """Replace NumPy's numbers in the attributes of an object by Python's, which all files and checkpoints can hold."""
    for name, value in [*vars(options).items()]:
        plain = plain_number(value)
        if plain is not value:
            # object.__setattr__() also sets the fields of a frozen dataclass.
            object.__setattr__(options, name, plain)


def _stable_repr(value: object) -> str:
    """Return a ``repr`` that is the same in every process: sets are sorted, addresses in memory left out."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


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
        value: Its value.
        ge: Inclusive lower bound.
        gt: Exclusive lower bound.
        le: Inclusive upper bound. Without ``le`` and ``lt`` it is :data:`LARGEST` or, for integers,
            :data:`LARGEST_INTEGER`.
        lt: Exclusive upper bound.
        optional: Whether ``None`` is accepted too.
        hint: End of the message, such as what a value means.

    Raises:
        OptionError: If the value is rejected.

    >>> check_number("lr", 0.1, gt=0)
    >>> check_number("lr", -1, gt=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr must be a finite number > 0, got -1
    >>> check_number("lr", 1e300, ge=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr must be a finite number >= 0 and <= 3.4e+38, got 1e+300
    """
    if value is None and optional:
        return
    number = _to_float(value)
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST
    if le is None and lt is None and largest < number < math.inf:
        # Set only for numbers that exceed it, so that other messages do not mention the default bound.
        le = largest
    accepted = (
        math.isfinite(number)
        and (ge is None or number >= ge)
        and (gt is None or number > gt)
        and (le is None or number <= le)
        and (lt is None or number < lt)
    )
    if not accepted:
        requirement = f"a finite number{_describe_range(ge=ge, gt=gt, le=le, lt=lt)}"
        if optional:
            requirement += " or None"
        raise invalid_option(name, value, requirement, hint)


def _to_float(value: object) -> float:
    """Convert a real number to a float; return NaN for everything else."""
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
        value: Its value.
        ge: Smallest integer that is accepted.
        le: Largest integer that is accepted; ``None`` for no limit.
        also: Words that are accepted too.
        optional: Whether ``None`` is accepted too.
        hint: End of the message, such as what a value means.

    Raises:
        OptionError: If the value is rejected.

    >>> check_integer("batch_size", "full", also=["full"])
    >>> check_integer("batch_size", 0, also=["full"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: batch_size must be an integer >= 1 or 'full', got 0
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
        # The default bound is mentioned only for numbers that exceed it.
        le = None
    requirement = f"an integer{_describe_range(ge=ge, le=le)}"
    for word in also:
        requirement += f" or {word!r}"
    if optional:
        requirement += " or None"
    raise invalid_option(name, value, requirement, hint)


def _describe_range(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> str:
    """Describe a range for a message, with a space in front; return an empty string for no bounds."""
    bounds = {">=": ge, ">": gt, "<=": le, "<": lt}
    conditions = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
    return f" {' and '.join(conditions)}" if conditions else ""


def floor_share(share: float, count: int) -> int:
    """Return ``floor(share * count)`` without the loss of one that rounding of the product can cause.

    >>> int(0.29 * 100), floor_share(0.29, 100)
    (28, 29)
    """
    return math.floor(share * count + 1e-9)


def check_choice(name: str, value: object, allowed: Sequence[object], *, hint: str = "") -> None:
    """Reject a value that is not one of ``allowed``.

    Raises:
        OptionError: If the value is rejected.

    >>> check_choice("optimizer", "sgdd", ["sgd", "adam"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: optimizer must be one of 'sgd', 'adam', got 'sgdd'
    """
    plain_value = plain_number(value)
    for choice in allowed:
        # Types are compared too: 1 == True, and "no" of YAML is False.
        if plain_value is choice or (type(plain_value) is type(choice) and plain_value == choice):
            return
    choices = ", ".join(repr(choice) for choice in allowed)
    raise invalid_option(name, value, f"one of {choices}", hint)


def check_known(name: str, value: object, choices: Iterable[str], also: str = "") -> None:
    """Reject a name that is not one of many.

    Args:
        name: Name of the option, as the user wrote it.
        value: Its value.
        choices: The names that exist.
        also: Other values that are accepted, as the end of the message.

    Raises:
        OptionError: With the names that are close to the value or, if there are none, all of them.

    >>> check_known("algorithm", "perda", ["perada", "ditto"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: algorithm='perda' is unknown; did you mean 'perada'?
    >>> check_known("resume_allow", "lr_local", ["training.lr_local", "batch_size"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: resume_allow='lr_local' is unknown; did you mean 'training.lr_local'?
    """
    names = list(choices)
    if value in names:
        return
    proposals = [name for name in names if value and name.startswith(f"{value}_")]
    if not proposals:
        proposals = near_names(str(value), names)
    if not proposals:
        # An option without its section.
        proposals = [name for name in names if value and name.endswith(f".{value}")]
    if proposals:
        remedy = f"did you mean {' or '.join(map(repr, proposals))}?"
    else:
        remedy = f"choose one of {', '.join(names)}{also}"
    message = f"{name}={value_text(value)} is unknown; {remedy}"
    raise OptionError(message, name=name, value=value, remedy=remedy)


def check_name(name: str, value: object, optional: bool = False) -> None:
    """Reject a value that is neither a non-empty string nor a path nor, if optional, ``None``.

    Raises:
        OptionError: If the value is rejected.

    >>> check_name("column", ["domain"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: column must be a non-empty string, got ['domain']
    """
    if value is None and optional:
        return
    if isinstance(value, str | PurePath) and str(value):
        return
    raise invalid_option(name, value, "a non-empty string or None" if optional else "a non-empty string")


def checked_names(name: str, value: object) -> list[str] | None:
    """Return names as a list of Python's strings, or None for None.

    Any collection in a fixed order is accepted, such as a column of pandas or the keys of a dictionary.

    Raises:
        OptionTypeError: If the value is none of these or empty, or an entry is not a non-empty string.

    >>> checked_names("classes", {"cat": 0, "dog": 1}.keys())
    ['cat', 'dog']
    """
    if value is None:
        return None
    # A set has no order.
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | set | frozenset):
        entries = list(value)
        names = [str(entry) for entry in entries if isinstance(entry, str) and entry]
        if names and len(names) == len(entries):
            return names
    remedy = "must be a list of names (non-empty strings), at least one, or None"
    raise OptionTypeError(_format_message(name, value, remedy, ""), name=name, value=value, remedy=remedy)


def checked_path(name: str, value: object) -> Path:
    """Return a path, after checking that the value names one.

    Raises:
        OptionTypeError: If the value is not a path, is empty, or has a null character, which no path may have.

    >>> checked_path("folder", None)
    Traceback (most recent call last):
    perada.core.checks.OptionTypeError: folder must be a path, got None
    """
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if isinstance(path, str) and path and "\0" not in path:
            return Path(path)
    remedy = "must be a path"
    raise OptionTypeError(_format_message(name, value, remedy, ""), name=name, value=value, remedy=remedy)


def check_type(name: str, value: object, expected_type: type, example: str) -> None:
    """Reject a value that is neither ``None`` nor of a type.

    Raises:
        OptionTypeError: If the value is rejected.

    >>> check_type("partition", 0.1, dict, "{'alpha': 0.1}")
    Traceback (most recent call last):
    perada.core.checks.OptionTypeError: partition must be of type dict or None, got 0.1; for example {'alpha': 0.1}
    """
    if value is not None and not isinstance(value, expected_type):
        remedy = f"must be of type {expected_type.__name__} or None"
        message = _format_message(name, value, remedy, f"for example {example}")
        raise OptionTypeError(message, name=name, value=value, remedy=remedy)


def check_options(name: str, value: object, example: str) -> None:
    """Reject a value that is not a dictionary of options by name.

    Raises:
        OptionError: If the value is rejected.

    >>> check_options("adapter_options", 3, "{'r': 8}")
    Traceback (most recent call last):
    perada.core.checks.OptionError: adapter_options must be a dictionary of options, got 3; for example {'r': 8}
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid_option(name, value, "a dictionary of options", f"for example {example}")


def check_installed(what: object, extra: str, *modules: str) -> None:
    """Check that the libraries of an extra are installed, without importing them.

    Args:
        what: Name of the feature that needs them, for the message.
        extra: Name of the extra.
        modules: Names of the libraries' top-level modules.

    >>> check_installed("metrics_port", "monitoring", "no_such_library")
    Traceback (most recent call last):
    ModuleNotFoundError: metrics_port needs no_such_library, which is not installed; pip install 'perada[monitoring]'

    Raises:
        ModuleNotFoundError: With those that are not installed.
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
