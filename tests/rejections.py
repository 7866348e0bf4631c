# SPDX-License-Identifier: Apache-2.0
"""What tests assert of an error: which option, value, file or client it names, never how it is worded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from perada.core.checks import OptionError
from perada.core.text import value_text

ANY_VALUE = object()
"""Stands for any value."""


@contextmanager
def rejects(
    name: str, value: object = ANY_VALUE, *facts: object, error: type[OptionError] = OptionError
) -> Iterator[pytest.ExceptionInfo[OptionError]]:
    """Assert that code rejects an option with one line that names the option, its value and a remedy.

    Args:
        name: The option, as the message calls it: ``lr``, or ``privacy: max_norm`` for one of a section.
        value: The rejected value, which may be left out where the option itself is wrong.
        facts: What the message must name besides, such as the options to choose from.
        error: Class of the error.

    >>> with rejects("lr", -1):
    ...     raise OptionError("lr must be > 0, got -1", name="lr", value=-1, remedy="must be > 0")
    """
    with pytest.raises(error) as caught:
        yield caught
    option_error = caught.value
    message = str(option_error)
    assert option_error.name == name, message
    # An error that does not keep its remedy apart has it at the end of its message.
    remedy = option_error.remedy or re.split("[;:] ", message)[-1]
    assert remedy, f"no remedy: {message}"
    assert remedy in message.removeprefix(name)
    if value is not ANY_VALUE:
        # Texts are compared, since an array is not equal to itself and 1 is equal to True.
        assert value_text(option_error.value) == value_text(value), message
        facts = (value_text(value), *facts)
    _check_message(message, (name, *facts))


@contextmanager
def raises_naming(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Assert that code raises an error whose message, in one line, names each of some facts.

    Args:
        error: Its class, or several of which it must be one.
        facts: A number, or a text such as a client, a value, a file, an option or a command. Each must stand in the
            message between spaces or punctuation: ``1`` is not in ``client 12``.

    >>> with raises_naming(ValueError, "client 1", 7, "num_classes"):
    ...     raise ValueError("client 1 has the label 7, outside 0..4; correct num_classes")
    """
    with pytest.raises(error) as caught:
        yield caught
    _check_message(str(caught.value), facts)


def _check_message(message: str, facts: tuple[object, ...]) -> None:
    """Assert that a message is one line and names facts."""
    assert facts, "name at least one fact that the message must have"
    assert "\n" not in message
    for fact in facts:
        assert re.search(_fact_pattern(fact), message), f"{fact!r} is not named: {message}"


def _fact_pattern(fact: object) -> str:
    """Return a pattern for a fact that is not a part of a longer word or number."""
    text = str(fact)
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", text) else ""
    return f"{before}{re.escape(text)}{after}"
