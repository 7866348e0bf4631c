# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: those that ship, their combinations, and files that list recipes to compare."""

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
    """Return the files of every recipe by its name; later files take precedence over earlier ones."""
    names = {}
    for path in sorted(RECIPES.rglob("*.yaml")):
        names[path.relative_to(RECIPES).with_suffix("").as_posix()] = [path]
    by_group: dict[str, list[Path]] = {group: [] for group in ("data", "method", "privacy")}
    for (path,) in names.values():
        if path.parent.name in by_group:
            by_group[path.parent.name].append(path)
    for data in by_group["data"]:
        names[data.stem] = [data]
        for method in by_group["method"]:
            names[f"{data.stem}/{method.stem}"] = [data, method]
            for privacy in by_group["privacy"]:
                names[f"{data.stem}/{method.stem}/{privacy.stem}"] = [data, method, privacy]
    return names


def find_recipe(name: str) -> list[Path]:
    """Return a configuration file, or the files of the shipped recipe of that name.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if Path(name).is_file():
        return [Path(name)]
    paths_by_name = recipes()
    key = name.removesuffix(".yaml")
    if key in paths_by_name:
        return paths_by_name[key]
    # If a combination does not exist, propose its longest part that does.
    prefixes = [key.rsplit("/", cut)[0] for cut in range(1, key.count("/"))]
    existing = [prefix for prefix in prefixes if prefix in paths_by_name]
    if existing:
        proposal = f"did you mean {existing[0]!r}?"
    else:
        proposal = hint(key, paths_by_name, "`perada ls` lists the recipes")
    raise FileNotFoundError(f"{name!r} is neither a file nor a recipe; {proposal}")


def listing() -> str:
    """Format the shipped recipes by group, each with its first line."""
    blocks = []
    for group, title in GROUPS.items():
        prefix = f"{group}/" if group in ("method", "privacy", "paper") else ""
        lines = [f"{title}:"]
        for path in sorted((RECIPES / group).glob("*.yaml")):
            lines.append(f"  {prefix + path.stem:28}  {_leading_comment(path)[0]}")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, COMBINE])


def recipe_text(name: str) -> str:
    """Return a recipe as the text of one file: its own, or that of its files merged under a comment on them."""
    paths = find_recipe(name)
    if len(paths) == 1:
        # An error names the line of a mistake before the text is copied or sent to sites.
        read_yaml(paths[0])
        return paths[0].read_text(encoding="utf-8")
    data, method, *privacy = [_leading_comment(path) for path in paths]
    comments = [method, data, *privacy]
    comment = ["; ".join(lines[0].removesuffix(".") for lines in comments) + "."]
    for lines in comments:
        comment += lines[1:]
    merged: dict[str, Any] = {}
    for path in paths:
        merged = _merge(merged, read_yaml(path))
    return "".join(f"# {line}\n" for line in comment) + yaml.safe_dump(merged, sort_keys=False)


def _leading_comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("# ") for line in comment]


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Merge two sections. The upper one takes precedence, and removes what it sets to null."""
    merged = lower | upper
    for key, value in lower.items():
        if isinstance(value, dict) and isinstance(upper.get(key), dict):
            merged[key] = _merge(value, upper[key])
    return {key: value for key, value in merged.items() if value is not None}


def recipe_files(name: str) -> list[Path]:
    """Return the files of a recipe that can be run.

    Raises:
        FileNotFoundError: If there is no such recipe.
        YamlFileError: If a file is malformed.
        ValueError: If it is a comparison of recipes.
    """
    paths = find_recipe(name)
    if is_comparison(paths[0]):
        raise ValueError(f"{name!r} is a comparison of recipes, not one of them; run it with: perada compare {name}")
    return paths


def recipe_names(words: Sequence[str]) -> Iterator[str]:
    """Yield the recipes on a command line."""
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals:
            yield value
        elif next_word:
            yield next_word


def is_comparison(path: Path) -> bool:
    """Return whether a file is a list of recipes to compare, and not a recipe."""
    return "compare" in read_yaml(path)


def comparison_file(word: str) -> Path | None:
    """Return the file with recipes to compare that a word names; None if it names none."""
    is_file = Path(word).suffix == ".yaml" and Path(word).is_file()
    if not is_file and word not in recipes():
        return None
    path = find_recipe(word)[0]
    return path if is_comparison(path) else None
