# SPDX-License-Identifier: Apache-2.0
"""Recipes that ship with perada, their combinations, and files that list recipes to compare."""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from perada.cli.foreign_classes import foreign_classes
from perada.cli.options import hint
from perada.core.text import quoted
from perada.system.yaml_files import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"
PREFIXED_GROUPS = ("method", "privacy", "paper")
"""Groups whose recipes have the group in their names, such as ``method/ditto``."""
GROUPS = ("data", *PREFIXED_GROUPS)
"""Folders of recipes; those outside are complete."""
COMBINED_GROUPS = ("data", "method", "privacy")
"""Groups of the parts of a combination such as ``cifar10/ditto/sample``, each over those before it."""
CONFIG_FILE = "config.yaml"
"""File of a run with its options."""
RUN_CONTENTS = ("run.json", "partition.json", "metrics.csv", "checkpoints")
"""Files and folders, one of which stands beside it in the folder of a run."""
WIDTH = 100
"""Largest number of columns of the overview."""
OVERVIEW_END = """\
`perada ls method`, `perada ls paper` or `perada ls PREFIX` prints full descriptions.
Recipes can be combined, by several options or by one name; later recipes override earlier ones:
  perada fit --config cifar10_vit --config method/ditto --config privacy/sample
  perada fit --config cifar10_vit/ditto/sample
`perada cp cifar10_vit/ditto/sample mine.yaml` writes a combination as one file."""


def shipped_recipes() -> dict[str, Path]:
    """Return the file of every shipped recipe, by its name."""
    files = {}
    for path in sorted(RECIPES.rglob("*.yaml")):
        group = path.parent.name
        name = f"{group}/{path.stem}" if group in PREFIXED_GROUPS else path.stem
        files[name] = path
    return files


def find_recipe(name: str) -> list[Path]:
    """Return a configuration file, or the files of a shipped recipe or combination; later files take precedence.

    Raises:
        FileNotFoundError: If there is none.
    """
    if Path(name).is_file():
        return [Path(name)]
    key = name.removesuffix(".yaml")
    shipped = shipped_recipes()
    if key in shipped:
        return [shipped[key]]
    words = key.split("/")
    paths: list[Path] = []
    for group, word in zip(COMBINED_GROUPS, words, strict=False):
        path = RECIPES / group / f"{word}.yaml"
        if path not in shipped.values():
            break
        paths.append(path)
    if paths and len(paths) == len(words):
        return paths
    if "," in name:
        options = " ".join(f"--config {part.strip()}" for part in name.split(","))
        proposal = f"to combine recipes, repeat the option: {options}"
    elif paths:
        proposal = _hint_for_combination(words, len(paths))
    else:
        data_sets = [path.stem for path in shipped.values() if path.parent.name == "data"]
        with_same_end = ["/".join([data_set, *words[1:]]) for data_set in data_sets]
        proposal = hint(key, [*shipped, *with_same_end], "`perada ls` lists the recipes")
    raise FileNotFoundError(f"{name!r} is neither a file nor a recipe; {proposal}")


def _hint_for_combination(words: Sequence[str], num_existing: int) -> str:
    """Propose a combination in place of one whose first words exist, and no further ones."""
    existing = "/".join(words[:num_existing])
    longer = combinations(existing)
    misspelt = "/".join(words[: num_existing + 1])
    return hint(misspelt, longer, f"did you mean {existing!r}?")


def combinations(name: str) -> list[str]:
    """Return the names that combine a dataset, or a dataset and a method, with one more recipe.

    >>> combinations("cifar10/ditto")
    ['cifar10/ditto/client', 'cifar10/ditto/sample']
    """
    words = name.split("/")
    parts = [RECIPES / group / f"{word}.yaml" for group, word in zip(COMBINED_GROUPS, words, strict=False)]
    if len(words) >= len(COMBINED_GROUPS) or not all(path.is_file() for path in parts):
        return []
    group = COMBINED_GROUPS[len(words)]
    return [f"{name}/{path.stem}" for path in sorted((RECIPES / group).glob("*.yaml"))]


def overview() -> str:
    """Format all shipped recipes by group, on one screen: about 50 lines of at most 100 columns."""
    by_group: dict[str, list[Path]] = {group: [] for group in (*GROUPS, RECIPES.name)}
    for path in shipped_recipes().values():
        by_group[path.parent.name].append(path)
    methods = [path.stem for path in by_group["method"]]
    blocks = [
        ["Datasets, each with a backbone and a budget:", *_short_lines(by_group["data"])],
        ["Methods, method/NAME:", *_lay_out_columns(methods)],
        ["Privacy, privacy/NAME:", *_short_lines(by_group["privacy"])],
        ["Tables and figures of papers, for `perada compare paper/NAME`:", *_paper_lines(by_group["paper"])],
        ["Complete recipes, and comparisons of them:", *_short_lines(by_group[RECIPES.name])],
        [OVERVIEW_END],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _short_lines(paths: Sequence[Path]) -> list[str]:
    """Format recipes in a line each, with the beginning of their descriptions."""
    lines = []
    for path in paths:
        name = f"  {path.stem:26} "
        lines.append(name + first_clauses(_leading_comment(path)[0], WIDTH - len(name)))
    return lines


def first_clauses(sentence: str, width: int) -> str:
    """Return as many clauses of a sentence as fit into a width; words if the first clause is longer.

    >>> first_clauses("CIFAR-10, 20 clients, Dirichlet 0.1: the setting of a paper.", 40)
    'CIFAR-10, 20 clients, Dirichlet 0.1'
    """
    if len(sentence) <= width:
        return sentence
    ends = [match.start() for match in re.finditer("[,:;] ", sentence[: width + 2])]
    for end in reversed(ends):
        clauses = sentence[:end]
        # A comma may stand in parentheses, as in "(Xie et al., CVPR 2024)".
        if clauses.count("(") == clauses.count(")"):
            return clauses
    return shorten(sentence, width, placeholder=" …")


def _paper_lines(paths: Sequence[Path]) -> list[str]:
    """Format one line per paper, with the tables and figures that have comparisons."""
    figures_by_paper: dict[str, list[str]] = {}
    for path in paths:
        # A name such as perada_table1_cifar10 gives the paper, the table, and its data set.
        match = re.fullmatch(r"(\w+?)_((?:figure|table)\d+|protocol)(_\w+)?", path.stem)
        if match is None:
            raise AssertionError(f"the name of {path} has no table or figure")
        figures = figures_by_paper.setdefault(match[1], [])
        if match[2] not in figures:
            figures.append(match[2])
    return [f"  {paper + '_*':16} {' '.join(figures)}" for paper, figures in figures_by_paper.items()]


def _lay_out_columns(names: Sequence[str]) -> list[str]:
    """Lay out names in as few lines as fit, sorted from top to bottom.

    >>> _lay_out_columns(["a", "b", "c"])
    ['  a  b  c']
    """
    num_lines = 1
    while True:
        columns = [names[start : start + num_lines] for start in range(0, len(names), num_lines)]
        widths = [max(len(name) for name in column) + 2 for column in columns]
        if sum(widths) <= WIDTH or len(columns) == 1:
            break
        num_lines += 1
    lines = [""] * num_lines
    for column, width in zip(columns, widths, strict=True):
        for row, name in enumerate(column):
            lines[row] += f"  {name}".ljust(width)
    return [line.rstrip() for line in lines]


def descriptions(prefix: str) -> str:
    """Format the recipes of a group, or whose names begin with a prefix, with their full descriptions.

    Args:
        prefix: Name of a group, or the beginning of names: ``cifar10``, or ``cifar10/di`` for combinations.

    Raises:
        ValueError: If there is none.
    """
    shipped = shipped_recipes()
    lines = []
    for name, path in shipped.items():
        if path.parent.name == prefix or name.startswith(prefix) or path.stem.startswith(prefix):
            lines.append(f"{name:38} {_leading_comment(path)[0]}")
    parent = prefix.rpartition("/")[0]
    siblings = combinations(parent)
    names = [name for name in siblings if name.startswith(prefix)]
    if prefix in names:
        names += combinations(prefix)
    for name in sorted(names):
        lines.append(f"{name:38} {_combined_description(find_recipe(name))}")
    if not lines:
        proposal = hint(prefix, [*GROUPS, *shipped, *siblings], "`perada ls` lists the recipes")
        raise ValueError(f"no recipe name begins with {prefix!r}; {proposal}")
    return "\n".join(lines)


def recipe_text(name: str) -> str:
    """Return a recipe as the text of one file; a combination's files are merged under a comment on them."""
    paths = find_recipe(name)
    if len(paths) == 1:
        # An error names the line of a mistake before the text is copied or sent to sites.
        read_yaml(paths[0])
        return paths[0].read_text(encoding="utf-8")
    comment = [_combined_description(paths)]
    for path in _method_first(paths):
        comment += _leading_comment(path)[1:]
    merged: dict[str, Any] = {}
    for path in paths:
        merged = _merge_sections(merged, read_yaml(path))
    return "".join(f"# {line}\n" for line in comment) + yaml.safe_dump(merged, sort_keys=False)


def _combined_description(paths: Sequence[Path]) -> str:
    """Return the first lines of the comments of a combination's recipes as one sentence."""
    descriptions_of_parts = [_leading_comment(path)[0].removesuffix(".") for path in _method_first(paths)]
    return f"{'; '.join(descriptions_of_parts)}."


def _method_first(paths: Sequence[Path]) -> list[Path]:
    """Return the recipes of a combination in the order of its description: method, data set, privacy."""
    data_set, method, *privacy = paths
    return [method, data_set, *privacy]


def _leading_comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("# ") for line in comment]


def _merge_sections(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Merge two sections. The upper one takes precedence, and removes what it sets to null."""
    merged = lower | upper
    for key, value in lower.items():
        if isinstance(value, dict) and isinstance(upper.get(key), dict):
            merged[key] = _merge_sections(value, upper[key])
    return {key: value for key, value in merged.items() if value is not None}


def recipe_files(name: str) -> list[Path]:
    """Return the files of a recipe that can be run.

    Raises:
        FileNotFoundError: If there is no such recipe.
        YamlFileError: If a file is malformed.
        ValueError: If it is a comparison of recipes, or the file of a run that names a class that is not perada's.
    """
    paths = find_recipe(name)
    for path in paths:
        _check_config_of_run(path)
    if is_comparison(paths[0]):
        raise ValueError(f"{name!r} is a comparison of recipes, not a recipe; run it with: perada compare {name}")
    return paths


def _check_config_of_run(path: Path) -> None:
    """Raise a ValueError if a file is the ``config.yaml`` of a run and names a class that is not perada's.

    A recipe is a program, which its user chose to run. The folder of a run may come from anyone.
    """
    is_of_run = path.name == CONFIG_FILE and any((path.absolute().parent / name).exists() for name in RUN_CONTENTS)
    classes = foreign_classes(read_yaml(path)) if is_of_run else []
    if classes:
        raise ValueError(
            f"{str(path)!r} is the file of a run and names {quoted(classes)}, which is not part of perada and was not "
            "imported; if you trust this code, copy the file out of the run's folder, and pass the copy"
        )


def recipe_names(words: Sequence[str]) -> Iterator[str]:
    """Yield the recipes on a command line."""
    for word, next_word in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals:
            yield value
        elif next_word:
            yield next_word


def is_comparison(path: Path) -> bool:
    """Return whether a file is a list of recipes to compare rather than a recipe."""
    return "compare" in read_yaml(path)


def comparison_file(word: str) -> Path | None:
    """Return the file with recipes to compare that a word names; None if it names none."""
    if Path(word).suffix == ".yaml" and Path(word).is_file():
        path: Path | None = Path(word)
    else:
        path = shipped_recipes().get(word)
    if path is None or not is_comparison(path):
        return None
    return path
