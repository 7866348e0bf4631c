# SPDX-License-Identifier: Apache-2.0
"""``perada completion``: what a shell proposes when the Tab key is pressed.

The script that a shell loads asks this program for the words, so it needs no update when options change.
"""

import os
from collections.abc import Iterable

from jsonargparse import ArgumentParser

from perada.cli.options import facts
from perada.cli.recipes import recipes

ASK = "perada completion words"
SCRIPTS = {
    "bash": f"complete -o default -C '{ASK}' perada\n",
    "zsh": f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    f"complete -o default -C '{ASK}' perada\n",
}
"""By shell: the script. Where no word is proposed, the shell proposes files (``-o default``)."""
TAKE_RECIPES = ("check", "compare", "cp", "deploy init")
"""Commands that are given recipes without an option before them."""


def completion(parser: ArgumentParser, words: list[str]) -> None:
    """Print the script of a shell; ``words`` is what the script asks for, with the line in ``COMP_LINE``."""
    if words[:1] == ["words"]:
        # The shell adds the program, the word under the cursor, and the one before it.
        current = words[2] if len(words) > 2 else ""
        end = int(os.environ.get("COMP_POINT") or -1)
        line = os.environ.get("COMP_LINE", "")
        print("\n".join(proposals(line if end < 0 else line[:end], current)))
        return
    parser.description = (
        "Load it in this shell: source <(perada completion bash). For every shell: add that to ~/.bashrc."
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="The shell.")
    print(SCRIPTS[parser.parse_args(words).shell], end="")


def proposals(line: str, current: str) -> list[str]:
    """The words that may stand at the end of a line.

    Args:
        line: What was typed so far, with the program's name.
        current: The word at its end as the shell takes it: bash parts words at ``=``, zsh does not.

    >>> proposals("perada dep", "dep"), proposals("perada deploy ke", "ke")
    (['deploy'], ['keys'])
    >>> proposals("perada fit --optimizer=sg", "sg"), proposals("perada fit --optimizer=sg", "--optimizer=sg")
    (['sgd'], ['--optimizer=sgd'])
    """
    from perada.cli.main import COMMANDS, Tree

    words = line.split()[1:]
    typed = "" if line[-1:].isspace() or not words else words.pop()
    entry: str | Tree = COMMANDS
    path: list[str] = []
    while isinstance(entry, dict) and words and words[0] in entry:
        path.append(words[0])
        entry = entry[words.pop(0)][0]
    if isinstance(entry, dict):
        return [] if words else _beginning(typed, [*entry, "--help"])
    command = " ".join(path)
    option, equals, value = typed.partition("=")
    if equals and option.startswith("--"):
        before = f"{option}=" if current.startswith("--") else ""
        return [before + one for one in _beginning(value, _values(command, option, value))]
    if typed.startswith("-"):
        return _beginning(typed, _options(command))
    last = next((word for word in reversed(words) if word.startswith("-")), "")
    if last and "=" not in last:
        return _beginning(typed, _values(command, last, typed))
    return _beginning(typed, _recipe_names(typed)) if command in TAKE_RECIPES and not last else []


def _beginning(typed: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(typed)]


def _options(command: str) -> dict[str, list[str]]:
    """The options of a command, with dashes, and their values."""
    options = dict(facts()["commands"][command]["options"])
    # Those of LightningCLI and of compare take the options of recipes; `predict` has some of its own beside them.
    if command in ("fit", "validate", "test", "predict", "check", "compare"):
        of_recipes = facts()["recipe_options"]
        options |= {f"--{name}": values for name, values in of_recipes.items()}
        options |= {f"--{short}": of_recipes.get(full, []) for short, full in facts()["short_names"].items()}
    return options


def _values(command: str, option: str, typed: str) -> list[str]:
    if option in ("--config", "-c"):
        return _recipe_names(typed)
    return _options(command).get(option, [])


def _recipe_names(typed: str) -> list[str]:
    """Names of recipes, without combinations of more parts than were begun."""
    groups = ("method/", "privacy/", "paper/")
    return [name for name in recipes() if name.count("/") <= typed.count("/") or name.startswith(groups)]
