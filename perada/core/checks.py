# SPDX-License-Identifier: Apache-2.0
"""Range checks of options, with one style of message: the value, that it cannot be used, the remedy.

``name`` is what the user wrote; an option of a section is called ``"privacy: max_norm"``.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real


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
    """Refuse what is not a finite number in a range.

    Args:
        name: The option.
        value: What was given; NumPy's numbers count, ``True`` and ``False`` do not.
        least: Smallest number allowed.
        above: The number must be greater than it.
        most: Largest number allowed.
        below: The number must be less than it.
        optional: Whether ``None`` is allowed.
        hint: What the message ends with, such as what a value means.

    Raises:
        ValueError: With the value and the remedy.

    >>> check_number("lr", 0.1, above=0)
    >>> check_number("lr", -1, above=0)
    Traceback (most recent call last):
    ValueError: lr=-1 cannot be used; give a finite number above 0
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    fits = (least is None or number >= least) and (above is None or number > above)
    fits = fits and (most is None or number <= most) and (below is None or number < below) and math.isfinite(number)
    if not fits and not (optional and value is None):
        _refuse(name, value, f"a finite number{_range(least, above, most, below)}", optional, hint)


def check_whole(
    name: str,
    value: object,
    least: int = 1,
    *,
    most: int | None = None,
    also: Sequence[str] = (),
    optional: bool = False,
    hint: str = "",
) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Args:
        name: The option.
        value: What was given; NumPy's integers count, ``True`` and ``False`` do not.
        least: Smallest number allowed.
        most: Largest number allowed.
        also: Words that are allowed too, such as ``"full"``.
        optional: Whether ``None`` is allowed.
        hint: What the message ends with.

    Raises:
        ValueError: With the value and the remedy.

    >>> check_whole("batch_size", "full", also=["full"])
    >>> check_whole("batch_size", 0, also=["full"])
    Traceback (most recent call last):
    ValueError: batch_size=0 cannot be used; give a whole number of 1 or more, or 'full'
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    fits = number >= least and (most is None or number <= most)
    if not fits and not (optional and value is None) and not (isinstance(value, str) and value in also):
        what = f"a whole number{_range(least, None, most, None)}" + "".join(f", or {word!r}" for word in also)
        _refuse(name, value, what, optional, hint)


def check_choice(name: str, value: object, allowed: Sequence[object], *, hint: str = "") -> None:
    """Refuse what is not one of ``allowed``.

    Raises:
        ValueError: With the value and the choice.

    >>> check_choice("optimizer", "sgdd", ["sgd", "adam"])
    Traceback (most recent call last):
    ValueError: optimizer='sgdd' is unknown; choose one of 'sgd', 'adam'
    """
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}{_ending(hint)}")


def _range(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None and below is not None:
        return f" from {least} to below {below}"
    if least is not None:
        return f" of {least} or more"
    if above is not None:
        upper = f" and up to {most}" if most is not None else f" and below {below}" if below is not None else ""
        return f" above {above}{upper}"
    return ""


def _refuse(name: str, value: object, what: str, optional: bool, hint: str) -> None:
    leave = ", or leave it out" if optional else ""
    raise ValueError(f"{name}={value!r} cannot be used; give {what}{leave}{_ending(hint)}")


def _ending(hint: str) -> str:
    return f" ({hint})" if hint else ""
