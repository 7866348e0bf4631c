# SPDX-License-Identifier: Apache-2.0
"""What a finished run is used for without its data: ``perada predict``, ``export --format``, ``push``."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from jsonargparse import ArgumentParser

from perada.algorithms import Algorithm, PerAda
from perada.cli.parser import import_named
from perada.lightning.checkpoint import newest_whole
from perada.lightning.module import FederatedClassifier
from perada.lightning.restore import restored
from perada.results.formats import FILES, Format, export_model
from perada.results.inference import find_images
from perada.results.run import Run
from perada.results.run_file import RUN_FILE

RUN = "Folder that Run.save or `perada export` wrote, run folder of `perada fit`, or checkpoint in one."
_RECIPE = "`perada predict --config RECIPE --ckpt_path PATH` predicts the recipe's own test images, with its data; "
_RECIPE += "`perada test --help` lists its options."


def predict(parser: ArgumentParser, words: list[str]) -> None:
    """Predict images with a model of a run, and write a table."""
    parser.description = f"Predict images with a model of a run, without its data. {_RECIPE}"
    parser.add_argument("run", type=Path, help=RUN)
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        help="An image, a folder of images, or a table (.csv, .tsv, .parquet) that lists them.",
    )
    parser.add_argument("--path", type=str, default="path", help="Column of a table that has the files' paths.")
    parser.add_argument("--client", type=str, default=None, help="Name or number of a client; else the global model.")
    parser.add_argument("--output", type=Path, default=Path("predictions.csv"), help="Table to write.")
    parser.add_argument("--batch_size", type=int, default=64, help="Images that are in memory at a time.")
    parser.add_argument("--device", type=str, default=None, help="cpu, cuda, mps; by default a GPU if there is one.")
    if any(word.partition("=")[0] == "--config" for word in words):
        raise ValueError(f"--config is not an option of `perada predict RUN --images ...`. {_RECIPE}")
    given = parser.parse_args(words)
    names, paths = find_images(given.images, given.path)
    if not given.output.parent.is_dir():
        raise FileNotFoundError(f"--output={given.output}: there is no folder {str(given.output.parent)!r}; make it")
    if given.output.is_dir():
        raise IsADirectoryError(
            f"--output={given.output} is a folder; give a file, such as {given.output / 'predictions.csv'}"
        )
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    broken: dict[Path, str] = {}
    options = {"batch_size": given.batch_size, "device": device, "progress": sys.stderr.isatty(), "broken": broken}
    found = open_run(given.run).predict(paths, given.client, **options)
    names = [name for name, path in zip(names, paths, strict=True) if path not in broken]
    replace(found, paths=tuple(names)).to_csv(given.output)
    print(f"Predictions of {len(names)} image{'s' * (len(names) > 1)}: {given.output}")
    if broken:
        raise ValueError(
            f"{len(paths) - len(names)} of {len(paths)} images cannot be read, and are not in {str(given.output)!r}: "
            f"{'; '.join(broken.values())}"
        )


def push(parser: ArgumentParser, words: list[str]) -> None:
    """Upload one adapter of a run to the Hugging Face Hub."""
    parser.add_argument("run", type=Path, help="Folder that Run.save or `perada export` wrote.")
    parser.add_argument("repo", type=str, help="Repository, user/name; it is made if it does not exist.")
    parser.add_argument("--client", type=str, default=None, help="Name or number of a client; else the global adapter.")
    parser.add_argument("--public", action="store_true", help="For everybody to see; else the repository is private.")
    parser.add_argument("--license", type=str, default="unknown", help="Of the adapter, as the Hub writes licences.")
    parser.add_argument(
        "--scores", type=bool | None, default=None, help="Whether scores go along; by default not of a private run."
    )
    given = vars(parser.parse_args(words))
    path, repo, public = given.pop("run"), given.pop("repo"), given.pop("public")
    if not (path / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"{str(path)!r} holds no {RUN_FILE}: give one that `perada export RUN --output FOLDER` or Run.save wrote"
        )
    print(Run.load(path).push_to_hub(repo, private=not public, **given))


def export_one(path: Path, client: str | None, form: Format, folder: Path) -> None:
    """Write one model of a run in a format of other programs."""
    said = export_model(open_run(path), client, form, folder)
    print(f"Wrote {folder / FILES[form]}. {said}")


def open_run(path: Path) -> Run:
    """The run in a folder that ``Run.save`` wrote, in a run folder of ``perada fit``, or of a checkpoint in one.

    Raises:
        FileNotFoundError: If there is no run, or a file of it is missing.
        ValueError: If it cannot be read.
    """
    if (path / RUN_FILE).is_file():
        return Run.load(path)
    if path.is_file():
        checkpoint: Path | None = path
        above = [parent / "config.yaml" for parent in path.absolute().parents][:3]
        config = next((one for one in above if one.is_file()), None)
    else:
        checkpoint = newest_whole((path / "checkpoints").rglob("*.ckpt"))
        config = path / "config.yaml"
    if config is None or not config.is_file() or checkpoint is None:
        if (path / "adapter_config.json").is_file() and (path.absolute().parent / RUN_FILE).is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is one adapter of a run; give the folder that it is in, {str(path.parent)!r}, and "
                "choose the client with --client"
            )
        whole = f"neither {RUN_FILE}, nor config.yaml and a whole checkpoint"
        lacks = "no config.yaml above it" if path.is_file() else whole
        raise FileNotFoundError(
            f"{str(path)!r} is no finished run: it has {lacks}; give a folder that Run.save wrote, or a run folder of "
            "`perada fit`"
        )
    return restored(*_described(config), checkpoint)


def _described(config: Path) -> tuple[FederatedClassifier, Algorithm]:
    """The model and the algorithm that a run's ``config.yaml`` describes; nothing else in it is made."""
    import_named([str(config)])
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    try:
        sections = {"model": content["model"], "algorithm": content["federated"].get("algorithm")}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(config)!r} is not the config.yaml of a run ({error}); give a run's folder") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedClassifier, "model")
    parser.add_argument("--algorithm", type=Algorithm | None)
    try:
        made = parser.instantiate_classes(parser.parse_object(sections))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{str(config)!r} cannot be read back ({reason}); of a run made in Python, use a folder that Run.save wrote"
        ) from error
    return made.model, made.algorithm or PerAda()
