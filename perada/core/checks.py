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


LARGEST, LARGEST_WHOLE = 3.4e38, 2**63 - 1
COUNTABLE = 10**12


class Options:
    """Something made from options, whose ``repr`` names the class and all of them and is the same in every process.

    The options are the constructor's arguments, with the values that they have now. Of a class that does not keep each
    under its own name, everything that the object holds is shown.
    """

    def __repr__(self) -> str:
        held, taken = vars(self), inspect.signature(type(self)).parameters
        names = taken if taken.keys() <= held.keys() else held
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(held[name])}' for name in names)})"


def _shown(value: object) -> str:
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(ordered))  # addresses, of functions and the like, are a process's own


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    """Refuse what is not a finite number in a range, or ``None`` where it is ``optional``.

    NumPy's numbers count, ``True`` and ``False`` do not. Of the bounds, ``least`` and ``most`` are allowed themselves.
    Without an upper one it is the end of float32, of whole numbers that of 64 bits, which torch can convert.

    Raises:
        OptionError: With the value and the remedy; it ends with ``hint``, such as what a value means.

    >>> check_number("lr", 0.1, above=0)
    >>> check_number("lr", -1, above=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr=-1 cannot be used; give a finite number above 0
    >>> check_number("lr", 1e300, least=0)
    Traceback (most recent call last):
    perada.core.checks.OptionError: lr=1e+300 cannot be used; give a finite number from 0 to 3.4e+38
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = sys.float_info.max
    end = LARGEST_WHOLE if isinstance(value, int) else LARGEST
    if most is None and below is None and end < abs(number) < math.inf:
        most = end
    fits = (least is None or number >= least) and (above is None or number > above)
    fits = fits and (most is None or number <= most) and (below is None or number < below) and math.isfinite(number)
    if not fits and not (optional and value is None):
        _refuse(name, value, f"a finite number{_range(least, above, most, below)}", optional, hint)


def check_whole(
    name: str,
    value: object,
    least: int = 1,
    *,
    most: int | None = COUNTABLE,
    also: Sequence[str] = (),
    optional: bool = False,
    hint: str = "",
) -> None:
    """Refuse what is not a whole number from ``least`` to ``most``, one of the words ``also``, or ``None`` if optional.

    NumPy's integers count, ``True`` and ``False`` do not. ``most=None`` sets no limit.

    Raises:
        OptionError: With the value and the remedy; it ends with ``hint``.

    >>> check_whole("batch_size", "full", also=["full"])
    >>> check_whole("batch_size", 0, also=["full"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: batch_size=0 cannot be used; give a whole number of 1 or more, or 'full'
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    fits = number >= least and (most is None or number <= most)
    most = None if most == COUNTABLE and number <= COUNTABLE else most
    if not fits and not (optional and value is None) and not (isinstance(value, str) and value in also):
        what = f"a whole number{_range(least, None, most, None)}" + "".join(f", or {word!r}" for word in also)
        _refuse(name, value, what, optional, hint)


def whole_share(share: float, count: int) -> int:
    """``floor(share * count)``; what the rounding of a float takes from such a product is given back.

    >>> int(0.29 * 100), whole_share(0.29, 100)
    (28, 29)
    """
    return math.floor(share * count + 1e-9)


def check_choice(name: str, value: object, allowed: Sequence[object], *, hint: str = "") -> None:
    """Refuse what is not one of ``allowed``.

    Raises:
        OptionError: With the value and the choice.

    >>> check_choice("optimizer", "sgdd", ["sgd", "adam"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: optimizer='sgdd' is unknown; choose one of 'sgd', 'adam'
    """
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        more = f" ({hint})" if hint else ""
        remedy = f"choose one of {', '.join(map(repr, allowed))}{more}"
        raise OptionError(f"{name}={value!r} is unknown; {remedy}", name=name, value=value, remedy=remedy)


def check_known(name: str, value: object, known: Iterable[str], also: str = "") -> None:
    """Refuse a name that is not ``known``: an OptionError with the names that are close, or else all of them.

    >>> check_known("algorithm", "perda", ["perada", "ditto"])
    Traceback (most recent call last):
    perada.core.checks.OptionError: algorithm='perda' is unknown; did you mean 'perada'?
    """
    if value in (names := list(known)):
        return
    longer = [one for one in names if value and one.startswith(f"{value}_")]
    close = longer or near_names(str(value), names)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"choose one of {', '.join(names)}{also}"
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


def _range(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    upper = f"below {below}" if most is None else f"{most}"
    if most is None and below is None:
        return f" of {least} or more" if least is not None else f" above {above}" if above is not None else ""
    if least is not None:
        return f" from {least} to {upper}"
    return "" if above is None else f" above {above} and {upper if most is None else f'up to {most}'}"


def _refuse(name: str, value: object, what: str, optional: bool, hint: str) -> None:
    more = (", or leave it out" if optional else "") + (f" ({hint})" if hint else "")
    short = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:60]}…"
    remedy = f"give {what}{more}"
    raise OptionError(f"{name}={short} cannot be used; {remedy}", name=name, value=value, remedy=remedy)


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
    if missing := [module for module in modules if find_spec(module) is None]:
        several = len(missing) > 1
        raise ModuleNotFoundError(
            f"{what} needs {' and '.join(missing)}, which {'are' if several else 'is'} not installed; "
            f"pip install 'perada[{extra}]'"
        )


def installed(module: str, what: object, extra: str) -> Any:  # noqa: ANN401  # a module
    """A library of an extra, which ``what`` needs.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} needs {module}, which is not installed ({error}); pip install 'perada[{extra}]'"
        ) from error
