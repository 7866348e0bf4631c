# SPDX-License-Identifier: Apache-2.0
"""``perada completion``: tab completion in shells.

The script that a shell loads calls this program for proposals, so it stays valid when commands and options change.
"""

import os
from collections.abc import Iterable

from jsonargparse import ArgumentParser

from perada.cli.options import RECIPE_COMMANDS, stored_commands
from perada.cli.recipes import combinations, shipped_recipes

PROPOSALS_COMMAND = "perada completion words"
SCRIPTS = {
    "bash": f"complete -o default -C '{PROPOSALS_COMMAND}' perada\n",
    "zsh": f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    f"complete -o default -C '{PROPOSALS_COMMAND}' perada\n",
}
"""Script for each shell. If perada proposes no word, the shell proposes files (``-o default``)."""
RECIPE_ARGUMENT_COMMANDS = ("check", "choose", "compare", "cp", "ls", "deploy init")
"""Commands with recipes as positional arguments."""


def completion(parser: ArgumentParser, words: list[str]) -> None:
    """Print the script for a shell or, if the script calls this program, the proposals for a line.

    Args:
        parser: Parser of the command, without arguments so far.
        words: Arguments of the command: the name of a shell or, if the script calls it, ``words`` and more.
    """
    if words[:1] == ["words"]:
        _print_proposals(words)
        return
    parser.description = (
        "Load it in this shell: source <(perada completion bash). For all shells, add that line to ~/.bashrc."
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="The shell.")
    shell = parser.parse_args(words).shell
    print(SCRIPTS[shell], end="")


def _print_proposals(words: list[str]) -> None:
    """Print the proposals for the line that a shell passes in its environment, one in each line."""
    # For `complete -C`, bash appends the program, the word under the cursor and the word before it to the command.
    current = words[2] if len(words) > 2 else ""
    line = os.environ.get("COMP_LINE", "")
    cursor = os.environ.get("COMP_POINT")
    if cursor:
        line = line[: int(cursor)]
    print("\n".join(proposals(line, current)))


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
    # No word is being typed if the cursor is after a space.
    typed = ""
    if words and not line[-1].isspace():
        typed = words.pop()

    # Follow the words down the tree of commands, such as "deploy" and "keys".
    entry: str | Tree = COMMANDS
    command_words: list[str] = []
    while isinstance(entry, dict) and words and words[0] in entry:
        word = words.pop(0)
        command_words.append(word)
        entry = entry[word][0]
    if isinstance(entry, dict):
        # The command is incomplete, or a word is not part of any.
        if words:
            return []
        return _starting_with(typed, [*entry, "--help"])

    command = " ".join(command_words)
    option, equals, value = typed.partition("=")
    if equals and option.startswith("--"):
        values_to_propose = _starting_with(value, _values_of_option(command, option, value))
        if current.startswith("--"):
            # A shell that does not split at "=" replaces the option too.
            return [f"{option}={proposal}" for proposal in values_to_propose]
        return values_to_propose
    if typed.startswith("-"):
        return _starting_with(typed, _options_of_command(command))
    options = [word for word in words if word.startswith("-")]
    if options:
        last_option = options[-1]
        if "=" in last_option:
            return []
        return _starting_with(typed, _values_of_option(command, last_option, typed))
    if command in RECIPE_ARGUMENT_COMMANDS:
        return _starting_with(typed, _recipe_names(typed))
    return []


def _starting_with(prefix: str, words: Iterable[str]) -> list[str]:
    """Return the words that start with a prefix."""
    return [word for word in words if word.startswith(prefix)]


def _options_of_command(command: str) -> dict[str, list[str]]:
    """Return the options of a command, each with its leading dashes and the values to propose for it."""
    options = dict(stored_commands()["commands"][command]["options"])
    # These commands also take every option that a recipe may set.
    if command in (*RECIPE_COMMANDS, "check", "choose", "compare"):
        for name, values in stored_commands()["recipe_options"].items():
            options[f"--{name}"] = values
    return options


def _values_of_option(command: str, option: str, typed: str) -> list[str]:
    """Return the values to propose for an option.

    Args:
        command: Name of the command, such as ``deploy keys``.
        option: Name of the option with its leading dashes.
        typed: Beginning of the value.
    """
    if option in ("--config", "-c"):
        return _recipe_names(typed)
    return _options_of_command(command).get(option, [])


def _recipe_names(typed: str) -> list[str]:
    """Return the names of all recipes, and of combinations that begin with what was typed before the last slash."""
    other_parts = typed.rpartition("/")[0]
    return [*shipped_recipes(), *combinations(other_parts)]
