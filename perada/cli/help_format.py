# SPDX-License-Identifier: Apache-2.0
"""Format the help of options in plain words, without the Python types that jsonargparse adds to each."""

import re
from argparse import SUPPRESS, Action
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse._actions import _ActionConfigLoad

from perada.cli.options import TEXTS

_ROLE = re.compile(r":[\w:]+:`[.~]?([^`]+)`")
"""A cross-reference in a docstring, such as :class:`.Corruptions`."""
_WORDS_OF_YAML = {"True": "true", "False": "false", "None": "null"}
"""Words of recipes and command lines for Python's constants."""
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "NAME", Path: "PATH"}
"""Placeholders of values by type. A single float or str has the name of its option instead; in a list, it has these."""


class HelpFormatter(DefaultHelpFormatter):
    """Format options as ``--option VALUE``, their description, and their default as it is typed."""

    def _get_help_string(self, action: Action) -> str:
        if action.dest == "help":
            return super()._get_help_string(action)
        text = option_text(action)
        notes = []
        # The usage shows which positional arguments are required.
        if action.required and action.option_strings and "(required" not in text:
            notes.append("required")
        default = default_text(action)
        if default and "(default:" not in text:
            notes.append(f"default: {default}")
        if notes:
            text += f" ({', '.join(notes)})"
        return text.strip()

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(option_names(action))
        if action.nargs == 0 or action.dest == "print_config":
            return names
        # Python before 3.13 would repeat the value behind each name.
        return f"{names} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _metavar_formatter(self, action: Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        # jsonargparse sets these two.
        if isinstance(action, _ActionConfigLoad) or action.metavar == "[ITEM,...]":
            metavar = self._get_default_metavar_for_optional(action)
            return lambda size: (metavar,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        if isinstance(action, _ActionConfigLoad):
            return "FILE"
        hint = _value_type(action)
        if get_origin(hint) in (list, tuple, Sequence):
            return f"[{_METAVARS.get(get_args(hint)[0], 'ITEM')},...]"
        for value_type in (int, Path):
            if isinstance(hint, type) and issubclass(hint, value_type):
                return _METAVARS[value_type]
        return action.dest.rpartition(".")[2].upper()

    def _get_default_metavar_for_positional(self, action: Action) -> str:
        return action.dest.upper()


def new_parser(prog: str, description: str | None = None) -> ArgumentParser:
    """Return the parser of a command, whose options must be written in full."""
    return ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )


def option_names(action: Action) -> list[str]:
    """Return the names of an option, with dashes."""
    # jsonargparse adds NAME+, which appends to a list.
    return [name for name in action.option_strings if not name.endswith("+")]


def option_text(action: Action) -> str:
    """Return the description of an option without markup."""
    if isinstance(action, _ActionConfigLoad):
        return "YAML file with the options of this section."
    if action.dest == "print_config":
        text: str = TEXTS["lightning"]["print_config"]
        return text
    return plain_text(action.help or "")


def plain_text(docstring: str) -> str:
    """Return a text of a docstring without the markup of Sphinx, on one line.

    >>> plain_text("``end``, a :class:`~perada.data.Corruptions` or ``None``")
    'end, a Corruptions or null'
    """
    text = _ROLE.sub(lambda role: role[1].rpartition(".")[2], docstring)
    for constant, word in _WORDS_OF_YAML.items():
        text = text.replace(f"``{constant}``", word)
    return " ".join(text.replace("``", "").split())


def default_text(action: Action) -> str:
    """Return the default of an option as it is typed; "" if there is none, or nothing that can be typed."""
    default = action.default
    if action.nargs == 0 or default == SUPPRESS:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float | str | Path):
        return str(default)
    if isinstance(default, Sequence):
        values = [str(value) for value in default]
        if action.nargs in ("+", "*"):
            return " ".join(values)
        return f"[{', '.join(values)}]" if values else ""
    return ""


def _value_type(action: Action) -> object:
    """Return the type of an option's value, or an alias such as ``list[str]``, without None."""
    # jsonargparse keeps the types that argparse lacks in its actions.
    hint = action.type or getattr(action, "_typehint", None)
    members = [member for member in get_args(hint) if member is not NoneType]
    if NoneType in get_args(hint) and len(members) == 1:
        return members[0]
    return hint
