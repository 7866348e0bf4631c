# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: those that ship, their combinations, and files that say what to compare."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from perada.cli.options import hint
from perada.core.yaml_files import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"
GROUPS = {
    "data": "Data sets, each with a backbone and a budget",
    "method": "Methods",
    "privacy": "Privacy",
    "paper": "Tables and figures of the papers, each for `perada compare NAME`",
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
    return names


def find_recipe(name: str) -> list[Path]:
    """A configuration file, or the files of the shipped recipe of that name."""
    if Path(name).is_file():
        return [Path(name)]
    known = recipes()
    key = name.removesuffix(".yaml")
    if key not in known:
        # Of a combination that there is not, the part that there is.
        parts = [key.rsplit("/", cut)[0] for cut in range(1, key.count("/"))]
        shorter = [part for part in parts if part in known]
        meant = f"did you mean {shorter[0]!r}?" if shorter else hint(key, known, "`perada ls` lists the recipes")
        raise FileNotFoundError(f"{name!r} is neither a file nor a recipe; {meant}")
    return known[key]


def listing() -> str:
    """The shipped recipes in their groups, each with its first line."""
    blocks = []
    for group, title in GROUPS.items():
        prefix = f"{group}/" if group in ("method", "privacy", "paper") else ""
        files = sorted((RECIPES / group).glob("*.yaml"))
        blocks.append("\n".join([f"{title}:", *(f"  {prefix + path.stem:28}  {_comment(path)[0]}" for path in files)]))
    return "\n\n".join([*blocks, COMBINE])


def whole(name: str) -> str:
    """A recipe as one file: its own text, or its files merged under a first line that says what they are."""
    paths = find_recipe(name)
    if len(paths) == 1:
        read_yaml(paths[0])  # names the line of a mistake before the text is copied or sent to sites
        return paths[0].read_text(encoding="utf-8")
    data, method, *privacy = map(_comment, paths)
    parts = [method, data, *privacy]
    first = "; ".join(part[0].removesuffix(".") for part in parts) + "."
    merged: dict[str, Any] = {}
    for path in paths:
        merged = _merged(merged, read_yaml(path))
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


def recipe_files(name: str) -> list[Path]:
    """The files of a recipe that is to be run, and is not a comparison of some.

    Raises:
        FileNotFoundError: If there is no such recipe.
        YamlFileError: If a file is not the YAML that it should be.
        ValueError: If it is a comparison.
    """
    paths = find_recipe(name)
    if is_comparison(paths[0]):
        raise ValueError(f"{name!r} is a comparison of recipes, not one of them; run it with: perada compare {name}")
    return paths


def recipe_names(words: Sequence[str]) -> Iterator[str]:
    """The recipes that words of the command line name."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option in ("--config", "-c") and (equals or after):
            yield value if equals else after


def is_comparison(path: Path) -> bool:
    """Whether a file is not a recipe, but says which recipes to compare."""
    return "compare" in read_yaml(path)


def comparison_file(word: str) -> Path | None:
    """The file that a word names, if it says which recipes to compare."""
    named = word in recipes() or (Path(word).suffix == ".yaml" and Path(word).is_file())
    path = find_recipe(word)[0] if named else None
    return path if path is not None and is_comparison(path) else None
