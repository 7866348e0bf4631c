# SPDX-License-Identifier: Apache-2.0
"""`perada check`: all that a run would refuse or warn of, by its own set-up, without training."""

import copy
import re
import sys
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from perada.cli.messages import one_line
from perada.cli.parser import full_names, spelt_out, wrong_option
from perada.cli.recipes import recipe_files
from perada.cli.runs import PeradaCLI, make_cli
from perada.core.text import printable
from perada.studies.compare.running import quiet

REFUSALS = (ValueError, TypeError, OSError, ImportError, ArgumentError, MisconfigurationException)
"""What a run ends in where it is refused; any other error is a mistake in the program."""
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false")
_NAME = re.compile(r"(?:((?:client_)?privacy|distillation): )?([a-z_][\w.]*)(?:=|:| '| is \d)")
"""How a message begins with the option that it is about."""


class _SetUpError(Exception):
    """Ends a run that is set up, before its first round."""


class _Stop(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise _SetUpError


def check(parser: ArgumentParser, words: list[str]) -> None:
    """Print what would be refused and warned of; the exit status is 1 if the recipe cannot be run."""
    parser.add_argument("recipe", nargs="*", help="Recipe, and others over it. Options of `perada fit` may follow.")
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    asks = {"-h", "--help"} & {*words}
    names: list[str] = parser.parse_args([*asks] or words[:first]).recipe
    given = [f"--config={path}" for name in names for path in recipe_files(name)] + spelt_out(words[first:])
    texts = [Path(word[9:]).read_text(encoding="utf-8") for word in given if word.startswith("--config=")]
    if not texts:
        raise ValueError("give a recipe: perada check RECIPE; `perada ls` lists those that ship")
    recipes = [full_names(yaml.safe_load(text) or {}) for text in texts]
    refused, warned, made = findings(recipes, [word for word in given if not word.startswith("--config=")])
    for title, lines in (("Refused", refused), ("Warned of", warned)):
        if lines:
            print("\n".join([f"{title} ({len(lines)}):", *(f"- {line}" for line in lines)]), end="\n\n")
    if refused or made is None:
        print("This cannot be run until it is fixed.")
        sys.exit(1)
    data, rounds = made.datamodule, made.trainer.max_epochs
    print(f"This can be run: {data.num_clients} clients, {sum(data.train_sizes)} training images, {rounds} rounds.")


def findings(recipes: list[dict[str, Any]], words: Sequence[str]) -> tuple[list[str], list[str], PeradaCLI | None]:
    """What would be refused, what would be warned of, and the run of these recipes over one another, if there can be.

    An option that is refused is left out, and the rest is tried again: so all are found, not only the first. What is
    then refused only because the option is left out is not of the recipe, and is not said.
    """
    recipes, words, refused = copy.deepcopy(recipes), list(words), list[str]()
    while True:
        with quiet(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            made, error = _set_up(recipes, words)
        said = [printable(" ".join(str(one.message).split())) for one in caught if one.category is UserWarning]
        if error is None:
            return refused, list(dict.fromkeys(said)), made
        known = _leave_out(error, recipes, words)
        if known or not refused:
            refused.append(one_line(error))
        if not known:
            return refused, list(dict.fromkeys(said)), None


def _set_up(recipes: list[dict[str, Any]], words: list[str]) -> tuple[PeradaCLI | None, Exception | None]:
    """A run that is ready for its first round, or why it cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.yaml" for number in range(len(recipes))]
        for path, recipe in zip(paths, recipes, strict=True):
            path.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        given = [*(f"--config={path}" for path in paths), *words, *(f"--trainer.{option}" for option in QUIET)]
        try:
            made = make_cli(given, run=False)
            made.trainer.callbacks.insert(0, _Stop())  # type: ignore[attr-defined]  # set by Lightning
            made.trainer.fit(made.model, made.datamodule)
        except _SetUpError:
            return made, None
        except REFUSALS as error:
            return None, error
    return None, None


def _leave_out(error: Exception, recipes: list[dict[str, Any]], words: list[str]) -> bool:
    """Remove the option that an error is about, where it is clear which one it is; whether there was one."""
    if wrong := wrong_option(str(error)):
        name = wrong[1]
    elif found := _NAME.match(one_line(error)):
        name = ".".join(filter(None, found.groups()))
    else:
        return False
    given = [place for place, word in enumerate(words) if word.startswith("--") and _is(name, word[2:].split("=")[0])]
    if given:
        follows = "=" not in words[given[-1]] and not "".join(words[given[-1] + 1 :][:1]).startswith("-")
        del words[given[-1] : given[-1] + 1 + follows]
        return True
    places = [list(_places(name, recipe)) for recipe in recipes]
    if not any(places) or any(len(own) > 1 for own in places):
        return False
    for section, own in zip(recipes, places, strict=True):
        for *above, last in own:
            del reduce(getitem, above, section)[last]
    return True


def _places(name: str, section: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where an option stands in a recipe, by its full name or the last part of it."""
    for key, value in section.items():
        here = (*above, key)
        if _is(name, ".".join(part for part in here if part != "init_args")):
            yield here
        elif isinstance(value, dict):
            yield from _places(name, value, here)


def _is(name: str, full: str) -> bool:
    return full == name or full.endswith(f".{name}")
