# SPDX-License-Identifier: Apache-2.0
"""What is known of the options before torch and Lightning are imported: help texts, names, and what may be meant.

``commands.json`` holds what the parsers say of themselves. ``make commands`` writes it, and
``tests/cli/test_commands_file.py`` fails where it differs from the parsers.
"""

import json
from argparse import ArgumentError
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import yaml

from perada.core.text import near_names
from perada.core.yaml_files import YamlFileError, read_yaml

COMMANDS_FILE = Path(__file__).with_name("commands.json")
TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))
ELSEWHERE = {name: tuple(targets.split()) for targets, names in TEXTS["elsewhere"].items() for name in names.split()}
"""Options by what they are called in papers and other programs."""
SECTIONS_OF_RECIPES = ("trainer", "model", "data", "federated")
RECIPE_COMMANDS = ("fit", "validate", "test", "predict")
"""Commands whose options are those of recipes."""
UNCHECKED = ("data inspect", "personalize", "check", "completion")
"""Commands whose options depend on the kind of images that is named; ``check``, which lists all mistakes at once; and
``completion``, which is given lines that are not finished."""


class CommandFacts(TypedDict):
    """A command: its help, line by line, and its options, each with the values that it can have if they are few."""

    help: list[str]
    options: dict[str, list[str]]


class Facts(TypedDict):
    """What ``commands.json`` holds."""

    lightning: str  # version whose Trainer has the options that are listed
    short_names: dict[str, str]  # of options, and the full names that they stand for
    sections: list[str]  # options that stand for a group of others
    recipe_options: dict[str, list[str]]
    commands: dict[str, CommandFacts]


@cache
def facts() -> Facts:
    """Read ``commands.json``."""
    content: Facts = json.loads(COMMANDS_FILE.read_text(encoding="utf-8"))
    return content


def help_text(command: str, words: Sequence[str]) -> str | None:
    """The help of a command where nothing else is asked for; else None, and its parser answers."""
    if command not in facts()["commands"] or not words or words[-1] not in ("-h", "--help"):
        return None
    # Other commands' help may depend on the words before it.
    if len(words) > 1 and command not in RECIPE_COMMANDS[:3]:
        return None
    if any(word.partition("=")[0] in ("-h", "--help") for word in words[:-1]):
        return None
    return "\n".join(facts()["commands"][command]["help"])


def check_options(command: str, words: Sequence[str]) -> None:
    """Refuse options that a command does not have, and those of recipes that it names, by what ``commands.json`` says.

    What cannot be decided without the parser is left to it: arguments of classes, values, and some commands.

    Raises:
        ArgumentError: If there is no such option.
        YamlFileError: If a recipe has an option that there is not.
    """
    if command not in facts()["commands"] or command in UNCHECKED:
        return
    takes_recipes = command in (*RECIPE_COMMANDS, "compare")
    known = set(facts()["commands"][command]["options"])
    if takes_recipes:
        known |= {f"--{name}" for name in _recipe_options()}
    for word in words:
        if word == "--":
            return
        option = word.partition("=")[0]
        if not option.startswith("--") or _is_known(option, known):
            continue
        if takes_recipes:
            if _may_be_lightnings(option[2:]):
                continue
            near = [f"--{name}" for name in nearest(option[2:], _recipe_options(), facts()["short_names"])]
            near = near_names(option, facts()["commands"][command]["options"]) or near
        else:
            near = near_names(option, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"`perada {command} --help` lists the options"
        raise ArgumentError(None, f"unrecognized arguments: {option}; {remedy}")


def check_recipe(path: Path) -> None:
    """Refuse a recipe of the user's with an option that there is not.

    Raises:
        YamlFileError: With the file and what may be meant.
    """
    known = _recipe_options()
    for key, value in read_yaml(path).items():
        names = [key]
        if key in SECTIONS_OF_RECIPES and not isinstance(value, dict | str | None):
            raise YamlFileError(f"{path}: {key!r} must be a section with options, got {value!r}; write {key}: {{...}}")
        if key in SECTIONS_OF_RECIPES and isinstance(value, dict):
            names = [f"{key}.{name}" for name in value]
        for name in names:
            if _is_known(name, known) or name in (*RECIPE_COMMANDS, "compare") or _may_be_lightnings(name):
                continue
            inner = next(iter(value)) if isinstance(value, dict) and value else ""
            # Of a misspelt section the option in it tells more.
            near = nearest(f"{name}.{inner}" if inner and name == key else name, known, facts()["short_names"])
            remedy = f"did you mean {' or '.join(near)}?" if near else "`perada fit --help` lists the options"
            raise YamlFileError(f"{path}: there is no option {name!r}; {remedy}")


def _recipe_options() -> set[str]:
    """Names of all options of recipes, without dashes."""
    names = {*facts()["recipe_options"], *facts()["sections"], *facts()["short_names"]}
    return names


def _is_known(name: str, known: Collection[str]) -> bool:
    """Whether there is such an option, or one to whose value it belongs, as an argument of a class does."""
    if name.removesuffix("+") in known:
        return True
    dashes = "--" if name.startswith("--") else ""
    sections = {f"{dashes}{section}" for section in facts()["sections"]}
    # Lightning's section for the loop has them too, though they stand beside it.
    for privacy in ("privacy", "client_privacy"):
        if f"{name}.".startswith(f"{dashes}federated.{privacy}."):
            return True
    above = name.rpartition(".")[0]
    while above:
        if above in known and above not in sections:
            return True
        above = above.rpartition(".")[0]
    return False


def _may_be_lightnings(name: str) -> bool:
    """Whether an option of the trainer may be one that another version of Lightning has."""
    return name.startswith("trainer.") and version("pytorch-lightning") != facts()["lightning"]


def nearest(key: str, known: Collection[str], full_names: Mapping[str, str]) -> list[str]:
    """The options that a wrong ``key`` may stand for; none where nothing is near.

    >>> nearest("trainer.rounds", ["trainer.max_epochs", "trainer.max_steps"], {"rounds": "trainer.max_epochs"})
    ['trainer.max_epochs']
    >>> nearest("model.adaptr", ["model.adapter", "data.dataset"], {})
    ['model.adapter']
    """
    section, _, last = key.rpartition(".")
    full = [name for name in known if name not in full_names]
    meanings: dict[str, list[str]] = {}
    for name in full:
        meanings.setdefault(name.rpartition(".")[2], []).append(name)
    for word, targets in (ELSEWHERE | {short: (name,) for short, name in full_names.items()}).items():
        existing = [name for name in targets if name in full or name.rpartition(".")[0] in full]
        if existing:
            meanings[word] = existing
    if not section:
        meanings |= {name: [name] for name in full_names}
    last = last.replace("-", "_").lower()
    word = last if last in meanings else "".join(near_names(last, meanings))
    if not word:
        return near_names(key, full)
    of_section = [name for name in meanings[word] if section and name.startswith(f"{section}.")]
    return of_section or meanings[word]


def hint(wrong: str, known: Iterable[str], otherwise: str) -> str:
    """What may have been meant by a word that is not among the ``known`` ones."""
    close = near_names(wrong, known)
    return f"did you mean {close[0]!r}?" if close else otherwise
