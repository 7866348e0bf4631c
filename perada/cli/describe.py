# SPDX-License-Identifier: Apache-2.0
"""Writes ``commands.json``: help and options of all commands, from their parsers. Run by ``make commands``."""

import json
import os
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from typing import get_args
from unittest.mock import patch

from jsonargparse import ArgumentParser

from perada.api import OPTION_CLASSES
from perada.cli.help_format import new_parser, option_names
from perada.cli.main import COMMANDS, Tree
from perada.cli.options import (
    COMMANDS_FILE,
    RECIPE_COMMANDS,
    SECTIONS_OF_RECIPES,
    STORED_WIDTH,
    CommandFacts,
    Facts,
)
from perada.cli.parser import option_class_names
from perada.cli.runs import PeradaCLI
from perada.engine import EngineName

OPTIONS_WITHOUT_EFFECT = {f"--federated.{name}.help" for name in OPTION_CLASSES}
"""Options of the parser that have no effect, since the loop's arguments are separate sections."""


def describe() -> Facts:
    """Return the content of ``commands.json``."""
    with patch.dict(os.environ, {"COLUMNS": str(STORED_WIDTH)}):
        commands = {}
        for path, (target, description) in commands_of_tree(COMMANDS):
            commands[" ".join(path)] = _describe_command(path, target, description)
    recipe_options: dict[str, list[str]] = {}
    for parser in _recipe_parsers():
        recipe_options |= _describe_options(parser._actions)
    options_by_name = {}
    for option, values in sorted(recipe_options.items()):
        name = option.removeprefix("--")
        if option.startswith("--") and name not in SECTIONS_OF_RECIPES:
            options_by_name[name] = values
    return {
        "lightning": version("pytorch-lightning"),
        "sections": list(SECTIONS_OF_RECIPES),
        "recipe_options": options_by_name,
        "commands": commands,
    }


def commands_of_tree(tree: Tree, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], tuple[str, str]]]:
    """Yield every command of a tree as words, with where its function is and its line of help."""
    for name, (entry, line) in tree.items():
        if isinstance(entry, str):
            yield (*prefix, name), (entry, line)
        else:
            yield from commands_of_tree(entry, (*prefix, name))


def _describe_command(command_words: tuple[str, ...], target: str, description: str) -> CommandFacts:
    """Return the help that a command prints, and the options that it adds to its parser for that."""
    module, _, function = target.partition(":")
    parser = new_parser(" ".join(["perada", *command_words]), description)
    text = StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        getattr(import_module(f"perada.{module}"), function)(parser, ["--help"])
    lines = [line.rstrip() for line in text.getvalue().rstrip().splitlines()]
    return {"help": lines, "options": _describe_options(parser._actions)}


def _recipe_parsers() -> list[ArgumentParser]:
    """Return the parsers of the commands of LightningCLI, which are built when they print their help."""
    for name in RECIPE_COMMANDS:
        with redirect_stdout(StringIO()), suppress(SystemExit):
            PeradaCLI([name, "--help"])
    parsers: dict[str, ArgumentParser] = {}
    for parts in PeradaCLI.parsers.values():
        parsers |= parts.get("_subcommand_parsers", {})
    return [parsers[name] for name in RECIPE_COMMANDS]


def _describe_options(actions: Iterable[Action]) -> dict[str, list[str]]:
    """Return the options of a parser, with the values of those that have few."""
    names = {}
    for action in actions:
        if action.help == SUPPRESS:
            continue
        for option in option_names(action):
            if option not in OPTIONS_WITHOUT_EFFECT:
                names[option] = _values_of_action(action)
    return names


def _values_of_action(action: Action) -> list[str]:
    if action.dest in option_class_names():
        return option_class_names()[action.dest]
    if action.dest == "training.engine":
        # It also takes the path of a class, so its parser has no list of values.
        return list(get_args(EngineName))
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    words = re.fullmatch(r"\{([\w.,-]+)\}", metavar)
    return words[1].split(",") if words else []


if __name__ == "__main__":
    COMMANDS_FILE.write_text(json.dumps(describe(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Wrote {COMMANDS_FILE}")
