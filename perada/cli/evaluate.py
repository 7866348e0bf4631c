# SPDX-License-Identifier: Apache-2.0
"""``perada evaluate``: score existing models on the images of a recipe's clients, without training."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jsonargparse import ArgumentParser

from perada.cli.recipes import find_recipe
from perada.system.files import check_output_folder
from perada.system.garbage import collection_paused

if TYPE_CHECKING:
    from perada.evaluation.evaluate import Evaluable, ModelChoice
    from perada.federation.options import Prediction

_PREDICTIONS: tuple["Prediction", ...] = ("personal", "global", "both")
_MODEL_HELP = (
    "Models: folders or checkpoints of runs, and files of weights (.safetensors, .pt, .pth) of the recipe's backbone. "
    "RUN:personal, RUN:global and RUN:both choose with which of its models a run predicts, NAME=PATH how a model is "
    "called."
)


class NamedPath(NamedTuple):
    """A model on a command line.

    Attributes:
        name: What it is called.
        path: Its path.
        prediction: Models with which clients of a run predict; None for those of the run's option.
    """

    name: str
    path: Path
    prediction: "Prediction | None"


def parse_model(word: str) -> NamedPath:
    """Parse a model: a path, with ``NAME=`` in front and one of the predictions behind it, or without.

    Raises:
        FileNotFoundError: If it does not exist.

    >>> parse_model("last=.:global")
    NamedPath(name='last', path=PosixPath('.'), prediction='global')
    """
    name = ""
    text = word
    if "=" in text and not Path(text).exists():
        name, _, text = text.partition("=")
    prediction: Prediction | None = None
    for candidate in _PREDICTIONS:
        beginning = text.removesuffix(f":{candidate}")
        if beginning != text and not Path(text).exists():
            text = beginning
            prediction = candidate
            break
    path = Path(text)
    if not path.exists():
        raise FileNotFoundError(
            f"{text!r} does not exist; pass the folder of a run, a checkpoint, or a file of weights"
        )
    if not name:
        name = path.absolute().name if path.is_dir() else path.stem
        if prediction is not None:
            name += f":{prediction}"
    return NamedPath(name, path, prediction)


def evaluate_models(parser: ArgumentParser, words: list[str]) -> None:
    """Score models on the test images of a recipe's clients, print tables, and write them."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        "--config",
        type=str,
        default=None,
        metavar="RECIPE",
        help="Recipe with the images and the backbone of weights; options of `perada fit`, such as "
        "--data.dataset.root, may follow.",
    )
    parser.add_argument("--output", type=Path, default=None, help="Folder for evaluation.json and evaluation.csv.")
    parser.add_argument("--device", type=str, default=None, help="cpu, cuda or mps; by default a GPU if available.")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Build a run's algorithm if its config.yaml names a class that is not part of perada.",
    )
    if not words or {"-h", "--help"} & {*words}:
        parser.parse_args(["--help"])
    is_option = [word.startswith("-") for word in words]
    num_models = is_option.index(True) if any(is_option) else len(words)
    own_words, recipe_words = _split_options(words[num_models:])
    options = parser.parse_args([*words[:num_models], *own_words])
    named_paths = [parse_model(word) for word in options.models]
    _check_names(named_paths)
    if options.output is not None:
        check_output_folder("--output", options.output)
    recipes = [word for word in recipe_words if word.startswith("--config=")]
    if not recipes:
        raise ValueError("--config is missing, the recipe with the images to evaluate on; `perada ls` lists some")
    for word in recipes:
        find_recipe(word.removeprefix("--config="))
    with collection_paused():
        import torch

        from perada.cli.inference import open_run
        from perada.cli.runs import PeradaCLI
        from perada.evaluation.evaluate import evaluate as evaluate_models
        from perada.evaluation.evaluate import is_weights_file

    cli = PeradaCLI(recipe_words, run=False)
    models: dict[str, ModelChoice] = {}
    for name, path, prediction in named_paths:
        model: Evaluable = path if is_weights_file(path) else open_run(path, trust=options.trust)
        models[name] = model if prediction is None else (model, prediction)
    result = evaluate_models(
        models,
        cli.datamodule,
        backbone=cli.model.backbone,
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        seed=cli.loop.seed,
        progress=sys.stderr.isatty(),
    )
    print(result)
    if options.output is not None:
        print(f"\nWritten: {result.save(options.output)}")


def _split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Divide the options of a command line into those of this command, and those of the recipe.

    Returns:
        The words of both; a recipe is ``--config=RECIPE`` in one word.
    """
    own_words = []
    recipe_words = []
    position = 0
    while position < len(words):
        option, equals, value = words[position].partition("=")
        position += 1
        if option == "--trust":
            own_words.append(option)
            continue
        if option not in ("--config", "--output", "--device"):
            recipe_words.append(f"{option}{equals}{value}")
            continue
        if not equals:
            value = "".join(words[position : position + 1])
            position += 1
        (recipe_words if option == "--config" else own_words).append(f"{option}={value}")
    return own_words, recipe_words


def _check_names(named_paths: list[NamedPath]) -> None:
    """Raise a ValueError if two models have one name."""
    names = [each.name for each in named_paths]
    for each in named_paths:
        if names.count(each.name) > 1:
            raise ValueError(
                f"two models are called {each.name!r}; name them, as in first={each.path}, to tell them apart in tables"
            )
