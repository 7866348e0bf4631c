# SPDX-License-Identifier: Apache-2.0
"""Checks of command lines before a command's module, and so PyTorch, is imported: a mistake must not take seconds.

The commands check everything again, since they also know what depends on the images.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from perada.cli.answers import check_answer
from perada.cli.sources import SOURCE_HELP, TABLES
from perada.core.files import check_output_file
from perada.results.client_names import available_client, check_new_name, client_index
from perada.results.run_file import RUN_FILE, read_run

ANSWERS = ("rounds", "task", "epsilon", "images")
"""Questions of `perada init` whose answers are checked here. That for the algorithm needs the algorithms."""


def check_early(command: str, words: Sequence[str]) -> None:
    """Reject wrong paths, numbers and clients of some commands.

    Raises:
        ValueError: If a value is wrong.
        FileNotFoundError: If a run or images do not exist.
    """
    check = _CHECKS.get(command)
    if check is not None and not {"-h", "--help"} & {*words}:
        check(words)


def _options_of(words: Sequence[str], *names: str) -> argparse.Namespace:
    """Return the values of some options, and the words before all options as ``first``; others are not looked at."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    try:
        options, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:
        # The command's own parser explains it.
        options = argparse.Namespace(**dict.fromkeys(names))
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


def _check_push(words: Sequence[str]) -> None:
    """Check the run of `perada push`, and its client."""
    options = _options_of(words, "client")
    if options.first:
        run = Path(options.first[0])
        _check_run(run)
        if options.client is not None and (run / RUN_FILE).is_file():
            saved = read_run(run)
            available_client(options.client, saved.info, saved.num_clients)


def _check_added(words: Sequence[str]) -> None:
    """Check the run, the new client's name and the images of `perada clients add`."""
    options = _options_of(words, "client", "data", "images")
    if not options.first:
        return
    run = Path(options.first[0])
    _check_run(run)
    if options.client is not None and (run / RUN_FILE).is_file():
        saved = read_run(run)
        check_new_name("client", options.client, saved.info.get("clients"), saved.num_clients)
    source = options.data if options.images is None else options.images
    if source is None:
        raise ValueError(f"--data is missing, the images of the new client. {SOURCE_HELP}")
    path = Path(source)
    # Anything else may be the name of a recipe.
    if path.suffix.lower() in TABLES and not path.exists():
        raise FileNotFoundError(f"--data={source}: the file does not exist; pass one of: {SOURCE_HELP}")


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
    "init": _check_init,
    "push": _check_push,
    "clients add": _check_added,
    "clients remove": _check_removed,
}
