# SPDX-License-Identifier: Apache-2.0
"""``perada completion``: tab completion in shells.

The script that a shell loads asks this program for proposals, so it needs no update when options change.
"""

import os
from collections.abc import Iterable

from jsonargparse import ArgumentParser

from perada.cli.options import RECIPE_COMMANDS, facts
from perada.cli.recipes import combinations, shipped_recipes

PROPOSALS_COMMAND = "perada completion words"
SCRIPTS = {
    "bash": f"complete -o default -C '{PROPOSALS_COMMAND}' perada\n",
    "zsh": f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    f"complete -o default -C '{PROPOSALS_COMMAND}' perada\n",
}
"""Script for each shell. If no word is proposed, the shell proposes files (``-o default``)."""
RECIPE_ARGUMENT_COMMANDS = ("check", "compare", "cp", "ls", "deploy init")
"""Commands that take recipes without an option before them."""


def completion(parser: ArgumentParser, words: list[str]) -> None:
    """Print the script for a shell, or the proposals that the script asks for."""
    if words[:1] == ["words"]:
        # The shell adds the program, the word under the cursor and the one before it, and sets COMP_LINE.
        current = words[2] if len(words) > 2 else ""
        end = int(os.environ.get("COMP_POINT") or -1)
        line = os.environ.get("COMP_LINE", "")
        if end >= 0:
            line = line[:end]
        print("\n".join(proposals(line, current)))
        return
    parser.description = (
        "Load it in this shell: source <(perada completion bash). For all shells, add that line to ~/.bashrc."
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="The shell.")
    print(SCRIPTS[parser.parse_args(words).shell], end="")


def proposals(line: str, current: str) -> list[str]:
    """Return the words that may complete a line.

    Args:
        line: Line up to the cursor, with the program's name.
        current: Its last word according to the shell: bash splits words at ``=``, zsh does not.

    >>> proposals("perada dep", "dep"), proposals("perada deploy ke", "ke")
    (['deploy'], ['keys'])
    >>> proposals("perada fit --training.optimizer=sg", "sg")
    ['sgd']
    >>> proposals("perada fit --training.optimizer=sg", "--training.optimizer=sg")
    ['--training.optimizer=sgd']
    """
    from perada.cli.main import COMMANDS, Tree

    words = line.split()[1:]
    typed = "" if line[-1:].isspace() or not words else words.pop()
    entry: str | Tree = COMMANDS
    path: list[str] = []
    while isinstance(entry, dict) and words and words[0] in entry:
        path.append(words[0])
        entry = entry[words.pop(0)][0]
    if isinstance(entry, dict):  # the command is not complete
        return [] if words else _starting_with(typed, [*entry, "--help"])
    command = " ".join(path)
    option, equals, value = typed.partition("=")
    if equals and option.startswith("--"):
        # A shell that does not split at "=" replaces the option too.
        prefix = f"{option}=" if current.startswith("--") else ""
        return [prefix + proposal for proposal in _starting_with(value, _values(command, option, value))]
    if typed.startswith("-"):
        return _starting_with(typed, _options(command))
    options = [word for word in words if word.startswith("-")]
    if not options:
        return _starting_with(typed, _recipe_names(typed)) if command in RECIPE_ARGUMENT_COMMANDS else []
    last_option = options[-1]
    return [] if "=" in last_option else _starting_with(typed, _values(command, last_option, typed))


def _starting_with(prefix: str, words: Iterable[str]) -> list[str]:
    """Return the words that start with a prefix."""
    return [word for word in words if word.startswith(prefix)]


def _options(command: str) -> dict[str, list[str]]:
    """Return the options of a command, with dashes, and the values of each."""
    options = dict(facts()["commands"][command]["options"])
    # These take the options of recipes too.
    if command in (*RECIPE_COMMANDS, "check", "compare"):
        for name, values in facts()["recipe_options"].items():
            options[f"--{name}"] = values
    return options


def _values(command: str, option: str, typed: str) -> list[str]:
    """Return the values of an option."""
    if option in ("--config", "-c"):
        return _recipe_names(typed)
    return _options(command).get(option, [])


def _recipe_names(typed: str) -> list[str]:
    """Return the names of recipes, and of combinations whose other parts were typed."""
    other_parts, _, _ = typed.rpartition("/")
    return [*shipped_recipes(), *combinations(other_parts)]
