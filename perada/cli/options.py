# SPDX-License-Identifier: Apache-2.0
"""Help texts and names of options without importing torch and Lightning, and proposals for wrong names.

``commands.json`` holds the help and options of all parsers. ``make commands`` writes it, and
``tests/cli/test_commands_file.py`` fails if it differs from the parsers.
"""

import json
import shutil
from argparse import ArgumentError
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import yaml

from perada.cli.wrapping import rewrapped
from perada.core.text import near_names
from perada.system.yaml_files import YamlFileError, read_yaml

STORED_WIDTH = 80
"""Width of the help texts in ``commands.json``, a terminal's default."""
COMMANDS_FILE = Path(__file__).with_name("commands.json")
TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))
SECTIONS_OF_RECIPES = ("trainer", "model", "data", "federated", "training", "evaluation")
LINKED_SECTIONS = ("training", "distillation", "evaluation", "privacy", "client_privacy", "secure_sums")
"""Sections of the federated loop; the parser links them to its arguments of the same names."""
RECIPE_COMMANDS = ("fit", "test", "predict")
"""Commands that take the options of recipes."""
SWEEP_COMMANDS = ("compare", "choose", "evaluate")
"""Commands that take the options of recipes beside their own."""
COMMANDS_IN_RECIPES = (*RECIPE_COMMANDS, "compare")
"""Commands that may have a section in a recipe, with options for them only."""
UNCHECKED_COMMANDS = ("data inspect", "data survey", "clients add", "check", "completion")
"""Commands whose options are not checked here: they depend on the images that are named, or are those of a recipe,
which its own parser checks; ``check`` lists all mistakes at once; ``completion`` gets incomplete lines."""


class CommandFacts(TypedDict):
    """A command: the lines of its help, and its options with the values of those that have few."""

    help: list[str]
    options: dict[str, list[str]]


class Facts(TypedDict):
    """Content of ``commands.json``."""

    lightning: str  # version whose Trainer has the options that are listed
    sections: list[str]  # options that stand for a group of others
    recipe_options: dict[str, list[str]]
    commands: dict[str, CommandFacts]


@cache
def options_by_foreign_name() -> dict[str, tuple[str, ...]]:
    """Return the options that have different names in papers and other programs, by these names."""
    options_by_name = {}
    for options, names in TEXTS["elsewhere"].items():
        for name in names.split():
            options_by_name[name] = tuple(options.split())
    return options_by_name


@cache
def stored_commands() -> Facts:
    """Read ``commands.json``."""
    commands: Facts = json.loads(COMMANDS_FILE.read_text(encoding="utf-8"))
    return commands


def help_text(command: str, words: Sequence[str]) -> str | None:
    """Return the help of a command if nothing else is requested; None if its parser must answer."""
    if command not in stored_commands()["commands"] or not words or words[-1] not in ("-h", "--help"):
        return None
    # Other commands' help may depend on the words before it.
    if len(words) > 1 and command not in ("fit", "test"):
        return None
    if any(word.partition("=")[0] in ("-h", "--help") for word in words[:-1]):
        return None
    lines = stored_commands()["commands"][command]["help"]
    width = shutil.get_terminal_size().columns
    return "\n".join(lines) if width == STORED_WIDTH else rewrapped(lines, width)


def reject_unknown_options(command: str, words: Sequence[str]) -> None:
    """Reject options that a command does not have according to ``commands.json``.

    The parser decides what cannot be decided here: arguments of classes, values, and some commands.

    Raises:
        ArgumentError: If an option does not exist.
    """
    if command not in stored_commands()["commands"] or command in UNCHECKED_COMMANDS:
        return
    takes_recipes = command in (*RECIPE_COMMANDS, *SWEEP_COMMANDS)
    options = set(stored_commands()["commands"][command]["options"])
    if takes_recipes:
        options |= {f"--{name}" for name in _recipe_options()}
    for word in words:
        if word == "--":
            return
        option = word.partition("=")[0]
        if not option.startswith("--") or _option_exists(option, options):
            continue
        if takes_recipes and _may_be_trainer_option(option.removeprefix("--")):
            continue
        raise _unknown_option(command, option, takes_recipes)


def _unknown_option(command: str, option: str, takes_recipes: bool) -> ArgumentError:
    """Return the error for an option that a command does not have, with those that may have been meant."""
    proposals = near_names(option, stored_commands()["commands"][command]["options"])
    if takes_recipes and not proposals:
        proposals = [f"--{name}" for name in propose_options(option.removeprefix("--"), _recipe_options())]
    remedy = f"`perada {command} --help` lists the options"
    if proposals:
        remedy = f"did you mean {' or '.join(proposals)}?"
    return ArgumentError(None, f"unrecognized arguments: {option}; {remedy}")


def check_recipe(path: Path) -> None:
    """Reject a recipe with an option that does not exist.

    Raises:
        YamlFileError: If there is one; the message names the file, and what may have been meant.
    """
    options = _recipe_options()
    check_sections(path)
    for key, value in read_yaml(path).items():
        names = [key]
        if key in SECTIONS_OF_RECIPES and isinstance(value, dict):
            names = [f"{key}.{name}" for name in value]
        for name in names:
            if _option_exists(name, options) or name in COMMANDS_IN_RECIPES or _may_be_trainer_option(name):
                continue
            wrong_name = name
            if name == key and isinstance(value, dict) and value:
                # The first option of a misspelt section gives a better hint.
                wrong_name = f"{name}.{next(iter(value))}"
            proposals = propose_options(wrong_name, options)
            remedy = f"did you mean {' or '.join(proposals)}?" if proposals else "`perada fit --help` lists the options"
            raise YamlFileError(f"{path}: there is no option {name!r}; {remedy}")


def check_sections(path: Path) -> None:
    """Reject a recipe with a section that has no options, or a class without a name.

    Raises:
        YamlFileError: If there is one; the message names the file, and what to write.
    """
    recipe = read_yaml(path)
    for name in SECTIONS_OF_RECIPES:
        value = recipe.get(name)
        if value is None or isinstance(value, dict):
            continue
        # A section may be a file of its options.
        is_file = isinstance(value, str) and ((path.parent / value).is_file() or Path(value).is_file())
        if not is_file:
            raise YamlFileError(
                f"{path}: {name!r} must be a section with options, got {value!r}; write NAME: VALUE in each line"
            )
    _check_class_paths(recipe, path, "")


def _check_class_paths(section: object, path: Path, option: str) -> None:
    """Raise a YamlFileError if a ``class_path`` within a section of a recipe is not a text."""
    if isinstance(section, list):
        for entry in section:
            _check_class_paths(entry, path, option)
    if not isinstance(section, dict):
        return
    for key, value in section.items():
        if key == "class_path" and not isinstance(value, str):
            raise YamlFileError(f"{path}: class_path of {option!r} must be the name of a class, got {value!r}; set it")
        # init_args is no part of an option's name.
        below = option if key == "init_args" else f"{option}.{key}".lstrip(".")
        _check_class_paths(value, path, below)


def _recipe_options() -> set[str]:
    """Return the names of all options of recipes, without dashes."""
    return {*stored_commands()["recipe_options"], *stored_commands()["sections"]}


def _option_exists(name: str, option_names: Collection[str]) -> bool:
    """Return whether an option exists, or belongs to the value of one, like an argument of a class."""
    if name.removesuffix("+") in option_names:
        return True
    dashes = "--" if name.startswith("--") else ""
    sections = {f"{dashes}{section}" for section in stored_commands()["sections"]}
    parent, _, _ = name.rpartition(".")
    while parent:
        if parent in option_names and parent not in sections:
            return True
        parent, _, _ = parent.rpartition(".")
    return False


def _may_be_trainer_option(name: str) -> bool:
    """Return whether an option of the trainer may exist in the installed version of Lightning."""
    return name.startswith("trainer.") and version("pytorch-lightning") != stored_commands()["lightning"]


def propose_options(wrong_name: str, option_names: Collection[str]) -> list[str]:
    """Return the options that a wrong name may mean.

    Args:
        wrong_name: Name of an option that does not exist.
        option_names: Names of all options.

    >>> propose_options("trainer.rounds", ["trainer.max_epochs", "trainer.max_steps"])
    ['trainer.max_epochs']
    >>> propose_options("model.adaptr", ["model.adapter", "data.dataset"])
    ['model.adapter']
    >>> propose_options("federated.privacy.max_norm", ["privacy", "client_privacy"])
    ['privacy.max_norm']
    """
    # The loop takes these sections, so they are looked for in its own.
    without_loop = wrong_name.removeprefix("federated.")
    if without_loop.partition(".")[0] in LINKED_SECTIONS and _option_exists(without_loop, option_names):
        return [without_loop]
    section, _, last = wrong_name.rpartition(".")
    # Each word may stand for the last part of an option's name, or be a name used elsewhere.
    meanings: dict[str, list[str]] = {}
    for name in option_names:
        meanings.setdefault(name.rpartition(".")[2], []).append(name)
    for word, targets in options_by_foreign_name().items():
        existing = [name for name in targets if name in option_names or name.rpartition(".")[0] in option_names]
        if existing:
            meanings[word] = existing

    word = last.replace("-", "_").lower()
    if word not in meanings:
        word = "".join(near_names(word, meanings))  # at most one
    if not word:
        return near_names(wrong_name, option_names)
    in_section = [name for name in meanings[word] if section and name.startswith(f"{section}.")]
    return in_section or meanings[word]


def command_hint(wrong: str, commands: Collection[str], prog: str) -> str:
    """Propose the command that may have been meant by a word.

    Args:
        wrong: Word that is not among the commands.
        commands: Names of the commands.
        prog: The words before it, with the program's name.

    >>> command_hint("validate", ["fit", "test"], "perada")
    "did you mean 'test'?"
    """
    group = prog.removeprefix("perada").strip()
    for command, names in TEXTS["commands"].items():
        if wrong.lower() in names.split() and command.startswith(group):
            command_in_group = command.removeprefix(group).strip()
            return f"did you mean {command_in_group!r}?"
    return hint(wrong, commands, f"`{prog} --help` lists the commands")


def hint(wrong: str, words: Iterable[str], otherwise: str) -> str:
    """Propose the word that an unknown word may mean; return ``otherwise`` if none is similar."""
    proposals = near_names(wrong, words)
    return f"did you mean {proposals[0]!r}?" if proposals else otherwise
