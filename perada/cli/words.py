# SPDX-License-Identifier: Apache-2.0
"""What the words of the command line stand for: recipes, algorithms and server rules by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

NAMED = ("--federated.algorithm", "--federated.algorithm.base", "--federated.server_rule")
RECIPES = Path(__file__).parents[1] / "recipes"


def recipes() -> dict[str, Path]:
    """The shipped recipes: name (path below ``recipes/`` without ending) and file."""
    return {str(path.relative_to(RECIPES).with_suffix("")): path for path in sorted(RECIPES.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A configuration file, or the shipped recipe of that name.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipes()
    key = name.removesuffix(".yaml")
    if key not in known:
        close = get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`perada ls` lists the recipes"
        raise FileNotFoundError(f"{name!r} is neither a file nor a recipe; {hint}")
    return known[key]


def spelt_out(args: Sequence[str]) -> list[str]:
    """Replace the names of recipes by their files, those of algorithms and server rules by their classes."""
    out: list[str] = []
    for before, word in zip(["", *args], args, strict=False):
        if before in NAMED:  # given as two words
            out.pop()
            word = f"{before}={word}"
        option, _, value = word.partition("=")
        if before in ("--config", "-c"):
            out.append(str(find_recipe(word)))
        elif option == "--config" and value:
            out.append(f"--config={find_recipe(value)}")
        elif option in NAMED and value:
            out += _class_words(option, value)
        else:
            out.append(word)
    return out


def _class_words(option: str, value: str) -> list[str]:
    """The option with the class that a name stands for; the option as it is where ``value`` is not a name."""
    from perada.algorithms import ALGORITHMS
    from perada.experiments.compare.entries import algorithm_words
    from perada.server import SERVER_RULES

    if option in NAMED[:2] and value in ALGORITHMS:
        return algorithm_words(value, option)
    rule = SERVER_RULES.get(value) if option == NAMED[2] else None
    return [f"{option}={rule.__name__ if rule else value}"]
