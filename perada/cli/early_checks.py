# SPDX-License-Identifier: Apache-2.0
"""Checks of command lines before a command's module, and so PyTorch, is imported: a mistake must not take seconds.

The commands check everything again, since they also know what depends on the images.
"""

import argparse
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import yaml

from perada.cli.answers import check_answer
from perada.cli.recipes import find_recipe
from perada.cli.sources import SOURCE_HELP, check_source
from perada.results.client_names import available_client, check_new_name, client_index
from perada.results.run_file import RUN_FILE, read_run
from perada.system.files import check_output_file

ANSWERS = ("rounds", "task", "epsilon", "images")
"""Questions of `perada init` whose answers are checked here. That for the algorithm needs the algorithms."""
MAX_SEED = 2**32 - 1
"""Largest seed, which is NumPy's."""


def check_early(command: str, words: Sequence[str]) -> None:
    """Reject wrong paths, numbers and clients of some commands.

    Raises:
        ValueError: If a value is wrong.
        FileNotFoundError: If a run or images do not exist.
    """
    check = _CHECKS.get(command)
    if check is not None and not {"-h", "--help"} & {*words}:
        check(words)


def _options_of(words: Sequence[str], *option_names: str) -> argparse.Namespace:
    """Return the values of some options, and the words before all options as ``first``; others are not looked at."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in option_names:
        parser.add_argument(f"--{name}")
    try:
        options, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:
        # The command's own parser explains it.
        options = argparse.Namespace(**dict.fromkeys(option_names))
    options.first = list(takewhile(lambda word: not word.startswith("-"), words))
    return options


def _check_init(words: Sequence[str]) -> None:
    """Check the options of `perada init`."""
    options = vars(_options_of(words, *ANSWERS, "output"))
    for name in ANSWERS:
        if options[name] is not None:
            check_answer(name, options[name])
    if options["output"] is not None:
        check_output_file("--output", Path(options["output"]), "recipe.yaml")


def _reject_missing(command: str, names: Sequence[str]) -> NoReturn:
    """Raise an ArgumentError for required arguments that are missing, with the words of the parser."""
    missing = ", ".join(names)
    raise ArgumentError(
        None, f"the following arguments are required: {missing}; `perada {command} --help` explains them"
    )


def _positional_words(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the words that are neither options nor values of options.

    Args:
        words: Words of a command.
        flags: Its options without a value.
    """
    positional = []
    is_value = False
    for word in words:
        if word.startswith("--"):
            is_value = "=" not in word and word not in flags
        elif is_value:
            is_value = False
        else:
            positional.append(word)
    return positional


def _check_inspect(words: Sequence[str]) -> None:
    """Check the images of `perada data inspect`."""
    # A word after an option may be its value.
    if words and not words[0].startswith("-"):
        check_source(words[0])


def _check_compare(words: Sequence[str]) -> None:
    """Check that `perada compare` has a recipe, and its seeds."""
    if not words:
        _reject_missing("compare", ["RECIPE"])
    _check_seeds(words)


def _check_choose(words: Sequence[str]) -> None:
    """Check that `perada choose` has a recipe, and its seeds."""
    if not words:
        _reject_missing("choose", ["RECIPE"])
    _check_seeds(words)


def _check_seeds(words: Sequence[str]) -> None:
    """Check the seeds of a command that runs recipes several times."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    seed_options = ("--seeds", "--tune_seeds")
    for option in seed_options:
        parser.add_argument(option, nargs="+", default=[])
    try:
        options, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:
        # The command's own parser explains it.
        return
    for option in seed_options:
        for word in getattr(options, option.removeprefix("--")):
            seed = _yaml_value(word)
            if not isinstance(seed, int) or isinstance(seed, bool):
                raise ValueError(f"{option}: must be an integer, got {word!r}; separate several by spaces")
            if not 0 <= seed <= MAX_SEED:
                raise ValueError(f"{option}: must be an integer from 0 to {MAX_SEED}, got {word!r}")


def _yaml_value(word: str) -> object:
    """Return the value of a word in YAML, in which options are written; the word itself if it is none."""
    try:
        value: object = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return value


def _check_push(words: Sequence[str]) -> None:
    """Check that `perada push` has a run and a repository, the run, and its client."""
    names = ["RUN", "REPO"]
    num_given = len(_positional_words(words, ["--public", "--trust"]))
    options = _options_of(words, "client")
    if num_given < len(names):
        _reject_missing("push", names[num_given:])
    if options.first:
        run = Path(options.first[0])
        _check_run(run)
        if options.client is not None and (run / RUN_FILE).is_file():
            saved = read_run(run)
            available_client(options.client, saved.info, saved.num_clients)


def _check_added(words: Sequence[str]) -> None:
    """Check the run, the new client's name and the images of `perada clients add`."""
    if not words:
        _reject_missing("clients add", ["RUN", "--data"])
    options = _options_of(words, "client", "data", "images")
    if not options.first:
        return
    run = Path(options.first[0])
    _check_run(run)
    if options.client is not None and (run / RUN_FILE).is_file():
        saved = read_run(run)
        check_new_name("client", options.client, saved.info.get("clients"), saved.num_clients)
    if options.data is not None and options.images is not None:
        # The command explains that they are the same option.
        return
    source = options.data if options.images is None else options.images
    if source is None:
        raise ValueError(f"--data is missing, the images of the new client. {SOURCE_HELP}")
    _check_new_images(source)


def _check_new_images(source: str) -> None:
    """Raise a FileNotFoundError unless there are such images, or a recipe that has them."""
    try:
        check_source(source)
    except FileNotFoundError as error:
        try:
            find_recipe(source)
        except FileNotFoundError:
            raise FileNotFoundError(f"--data: {error}. Or a recipe; `perada ls` lists them") from None


def _check_removed(words: Sequence[str]) -> None:
    """Check the run of `perada clients remove`, and the client."""
    options = _options_of(words, "client")
    if options.first and options.client is not None:
        saved = read_run(Path(options.first[0]))
        # A client whose removal was interrupted has lost its name.
        if not saved.info.get("forgotten"):
            client_index(options.client, saved.info.get("clients"), saved.num_clients)


def _check_run(path: Path) -> None:
    """Raise a FileNotFoundError for a folder that contains neither a saved run nor a checkpoint."""
    if not path.is_dir() or (path / RUN_FILE).is_file() or any((path / "checkpoints").rglob("*.ckpt")):
        return
    if (path.absolute().parent / RUN_FILE).is_file():
        # Run.load explains that this is one adapter of the run.
        return
    raise FileNotFoundError(
        f"{str(path)!r} is not a finished run: it has neither a {RUN_FILE} nor a checkpoint; pass a folder written by "
        "`perada fit` or Run.save"
    )


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "choose": _check_choose,
    "compare": _check_compare,
    "data inspect": _check_inspect,
    "init": _check_init,
    "push": _check_push,
    "clients add": _check_added,
    "clients remove": _check_removed,
}
