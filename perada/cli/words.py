# SPDX-License-Identifier: Apache-2.0
"""What the words of the command line stand for: recipes, algorithms and server rules by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

NAMED = ("--federated.algorithm", "--federated.algorithm.base", "--federated.server_rule")
RECIPES = Path(__file__).parents[1] / "recipes"
GROUPS = {
    "data": "Data sets, each with a backbone and a budget",
    "method": "Methods",
    "privacy": "Privacy",
    "": "Complete recipes",
}
COMBINE = """\
Combine them, each over those before it:
  perada fit --config cifar10_vit --config method/ditto --config privacy/sample
cifar10_vit/ditto/sample is one name for these three, and cifar10_vit/ditto for the first two.
`perada cp cifar10_vit/ditto/sample mine.yaml` writes them as one file."""


def recipes() -> dict[str, list[Path]]:
    """Every name of a recipe, and the files that are merged for it, each over those before it."""
    names = {path.relative_to(RECIPES).with_suffix("").as_posix(): [path] for path in sorted(RECIPES.rglob("*.yaml"))}
    data, methods, privacy = (
        [path for (path,) in names.values() if path.parent.name == group] for group in list(GROUPS)[:3]
    )
    for one in data:
        names[one.stem] = [one]
        for method in methods:
            names[f"{one.stem}/{method.stem}"] = [one, method]
            names |= {f"{one.stem}/{method.stem}/{last.stem}": [one, method, last] for last in privacy}
            if one.stem.endswith("_vit"):  # its former name
                names[f"dp/{one.stem[:-4]}/{method.stem}"] = names[f"{one.stem}/{method.stem}/sample"]
    return names | {"dp/cifar10/perada": names["cifar10_vit/perada_table5/sample"]}


def find_recipe(name: str) -> list[Path]:
    """A configuration file, or the files of the shipped recipe of that name.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if Path(name).is_file():
        return [Path(name)]
    known = recipes()
    key = name.removesuffix(".yaml")
    if key not in known:
        close = get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`perada ls` lists the recipes"
        raise FileNotFoundError(f"{name!r} is neither a file nor a recipe; {hint}")
    return known[key]


def listing() -> str:
    """The shipped recipes in their groups, each with its first line."""
    blocks = []
    for group, title in GROUPS.items():
        prefix = f"{group}/" if group in ("method", "privacy") else ""
        files = sorted((RECIPES / group).glob("*.yaml"))
        blocks.append("\n".join([f"{title}:", *(f"  {prefix + path.stem:26}  {_comment(path)[0]}" for path in files)]))
    return "\n\n".join([*blocks, COMBINE])


def whole(name: str) -> str:
    """A recipe as one file: its own text, or its files merged under a first line that says what they are."""
    paths = find_recipe(name)
    if len(paths) == 1:
        return paths[0].read_text(encoding="utf-8")
    data, method, *privacy = map(_comment, paths)
    parts = [method, data, *privacy]
    first = "; ".join(part[0].removesuffix(".") for part in parts) + "."
    merged: dict[str, Any] = {}
    for path in paths:
        merged = _merged(merged, yaml.safe_load(path.read_text(encoding="utf-8")))
    comment = [first, *(line for part in parts for line in part[1:])]
    return "".join(f"# {line}\n" for line in comment) + yaml.safe_dump(merged, sort_keys=False)


def _comment(path: Path) -> list[str]:
    """The lines of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One section over another; what is null above is left out."""
    both = [key for key in below if isinstance(below[key], dict) and isinstance(above.get(key), dict)]
    merged = below | above | {key: _merged(below[key], above[key]) for key in both}
    return {key: value for key, value in merged.items() if value is not None}


def spelt_out(args: Sequence[str]) -> list[str]:
    """Replace the names of recipes by their files, those of algorithms and server rules by their classes."""
    out: list[str] = []
    for before, word in zip(["", *args], args, strict=False):
        if before in NAMED:  # given as two words
            out.pop()
            word = f"{before}={word}"
        option, _, value = word.partition("=")
        if before in ("--config", "-c"):
            out.pop()
            out += [f"--config={path}" for path in find_recipe(word)]
        elif option == "--config" and value:
            out += [f"--config={path}" for path in find_recipe(value)]
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
