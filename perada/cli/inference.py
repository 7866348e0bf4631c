# SPDX-License-Identifier: Apache-2.0
"""What is done with a finished run: ``perada predict``, ``export``, ``push``, ``personalize``, ``forget``."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser

from perada.algorithms import Algorithm
from perada.cli.data import SOURCE, Source, add_options, division_of, division_of_recipe, kind_of
from perada.cli.parser import with_own_classes
from perada.core.yaml_files import read_yaml
from perada.data import Images
from perada.data.partitions.division import Division
from perada.lightning.joining import check_name, personalize
from perada.results.cards import privacy_lines, rendered
from perada.results.clients import check_none_lost, forget, joined_clients
from perada.results.formats import FILES, export_model
from perada.results.inference import find_images
from perada.results.run import Run
from perada.results.run_file import holds_adapters

RUN = "Folder that `perada fit`, `perada export` or Run.save wrote, or a checkpoint in one."
_DATA = f"{SOURCE} Or a recipe, whose data are of the client alone or name it among others. Also called --images."
_SCORES = "Whether scores and losses are written too; by default not those of a private run, which no ledger counts."
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
    parser.add_argument(
        "--encoding", type=str, default=None, help="Encoding of a text table, such as cp1252; by default UTF-8."
    )
    parser.add_argument("--client", type=str, default=None, help="Name or number of a client; else the global model.")
    parser.add_argument("--output", type=Path, default=Path("predictions.csv"), help="Table to write.")
    parser.add_argument("--batch_size", type=int, default=64, help="Images that are in memory at a time.")
    parser.add_argument("--device", type=str, default=None, help="cpu, cuda, mps; by default a GPU if there is one.")
    if any(word.partition("=")[0] == "--config" for word in words):
        raise ValueError(f"--config is not an option of `perada predict RUN --images ...`. {_RECIPE}")
    given = parser.parse_args(words)
    names, paths = find_images(given.images, given.path, given.encoding)
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
    parser.add_argument("run", type=Path, help=RUN)
    parser.add_argument("repo", type=str, help="Repository, user/name; it is made if it does not exist.")
    parser.add_argument("--client", type=str, default=None, help="Name or number of a client; else the global adapter.")
    parser.add_argument("--public", action="store_true", help="For everybody to see; else the repository is private.")
    parser.add_method_arguments(Run, "push_to_hub", skip={"repo", "client", "private", "token"}, as_group=False)
    given = vars(parser.parse_args(words))
    path, repo, public = given.pop("run"), given.pop("repo"), given.pop("public")
    print(open_run(path).push_to_hub(repo, private=not public, **given))


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write a finished run's adapters as PEFT folders, or one of its models in another format."""
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for client_0, client_1, … and global.")
    forms = Literal["peft", "onnx", "safetensors", "torch-export"]
    parser.add_argument("--format", type=forms, default="peft", help="All but peft: one model, also of a saved run.")
    parser.add_argument("--client", help="Name or number of a client, of which alone the model is written.")
    parser.add_argument("--scores", type=bool, default=None, help=_SCORES)
    given = parser.parse_args(words)
    if given.output.is_file():
        raise NotADirectoryError(f"--output={given.output} is a file; give a folder")
    if given.format != "peft":
        said = export_model(open_run(given.run), given.client, given.format, given.output)
        print(f"Wrote {given.output / FILES[given.format]}. {said}")
        return
    if holds_adapters(given.run):
        raise ValueError(
            f"{str(given.run)!r} has its adapters as PEFT folders already; --format=onnx, safetensors or torch-export "
            "writes one of its models"
        )
    run = open_run(given.run)
    check_none_lost(given.output, run.info)
    print_saved(run, run.save(given.output, client=given.client, scores=given.scores))


def print_saved(run: Run, folder: Path) -> None:
    """Say which adapters of a run are in the folder that it was saved to, and what releasing them costs."""
    written = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").is_file())
    count = f"{len(written)} adapter{'s' * (len(written) > 1)}"
    print(f"Wrote {count} to {folder}: {' … '.join(dict.fromkeys((written[0], written[-1])))}")
    lines = privacy_lines(run.info.get("privacy"), joined_clients(run.info))
    if lines:
        print(lines)


def open_run(path: Path) -> Run:
    """The run in a folder that ``perada fit`` or ``Run.save`` wrote, or of a checkpoint in one.

    Raises:
        FileNotFoundError: If there is no run, or a file of it is missing.
        ValueError: If it cannot be read.
    """
    above = [parent / "config.yaml" for parent in path.absolute().parents][:3] if path.is_file() else []
    config = next((one for one in (path / "config.yaml", *above) if one.is_file()), None)
    own = None if config is None or holds_adapters(path) else _own_algorithm(config)
    return Run.load(path, algorithm=own)


def _own_algorithm(config: Path) -> Algorithm | None:
    """The algorithm that a run's ``config.yaml`` names, if it or its base is not perada's; nothing else is made."""
    try:
        asked = read_yaml(config)["federated"].get("algorithm")
        found = [asked] if isinstance(asked, str) else re.findall(r"class_path: (\S+)", yaml.safe_dump(asked))
        if all("." not in name or name.startswith("perada.") for name in found):
            return None
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--algorithm", type=Algorithm)
        parsed = with_own_classes(lambda: parser.parse_object({"algorithm": asked}))
        made: Algorithm = parser.instantiate_classes(parsed).algorithm
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"the algorithm in {str(config)!r} cannot be made again ({reason}); correct it") from error
    return made


def join(parser: ArgumentParser, words: list[str]) -> None:
    """Train a model for a new client of a finished run, and write it beside the others or with them elsewhere."""
    parser.add_argument("run", type=Path, help=RUN)
    parser.add_argument("--data", required=True, help=_DATA)
    parser.add_argument("--client", type=str, default=None, help="What the client is called; else as the data say.")
    parser.add_argument(
        "--output", type=Path, default=None, help="Folder for the run with the client; by default RUN, if it is saved."
    )
    skipped: set[str | int] = {"run", "data", "name", "algorithm", "progress"}
    own_options = parser.add_function_arguments(personalize, skip=skipped, as_group=False)
    words, kind = _source(words)
    if kind is not None:
        add_options(parser, kind, "images")
    if kind is Images:
        parser.set_defaults({"images.layout": "{class}/*"})
    given = vars(parser.parse_args(words))
    path, source, output = given.pop("run"), given.pop("data"), given.pop("output")
    options = {name: given.pop(name) for name in own_options}
    name, own = given.pop("client"), given.pop("images", None)
    saved = holds_adapters(path)
    if output is None and not saved and path.is_dir():
        raise ValueError(f"{str(path)!r} is a run folder of `perada fit`, which is left as it is; give --output FOLDER")
    if output is not None and output.is_file():
        raise NotADirectoryError(f"--output={output} is a file; give a folder")
    run = open_run(path)
    check_name(run, name)
    if output is not None and output.absolute() != path.absolute():
        check_none_lost(output, run.info)
    images = division_of_recipe(["--config", source]) if kind is None else _read_as(run, kind, source, vars(own))
    data = images.share_out()
    joined = personalize(run, data, name, **options, progress=sys.stderr.isatty())
    client = joined.num_clients - 1
    folder = joined.add_client(path, client) if output is None else joined.save(output)
    told, sample = joined.info["joined"][-1], (joined.info.get("privacy") or {}).get("sample")
    print(rendered("joined", told=told, client=client, sample=sample, folder=folder))


def leave(parser: ArgumentParser, words: list[str]) -> None:
    """Remove a client from a saved run, and say what that does not undo."""
    parser.add_argument("run", type=Path, help="Folder that Run.save, `perada export` or `perada personalize` wrote.")
    parser.add_argument("--client", type=str, required=True, help="Name or number of the client.")
    given = vars(parser.parse_args(words))
    number = forget(given["run"], given["client"])
    print(rendered("forgotten", number=number, **given))


def _source(words: list[str]) -> tuple[list[str], type[Source] | None]:
    """The words with ``--data`` in the place of ``--images``, and what it names: images, or (None) a recipe."""
    words = [f"--data{word[8:]}" if word.partition("=")[0] == "--images" else word for word in words]
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == "--data"]
    if len(places) > 1:
        raise ValueError("--images and --data are the same option; give it once")
    after = "".join(words[place + 1] for place in places if place + 1 < len(words))
    value = "".join(words[place].partition("=")[2] or after for place in places)
    return words, kind_of(value) if value else Images


def _read_as(run: Run, kind: type[Source], source: str, options: dict[str, Any]) -> Division:
    """The images of a source, by client where clients are known, read as the run's own were."""
    known = run.preprocessing
    size = max(known.resize[0][:2]) if known.resize else known.shape[-1]
    white = known.full_scale if options["full_scale"] is None else options["full_scale"]
    read = {"size": size, "gray": options["gray"] or known.channels == 1, "full_scale": white}
    return division_of(source, kind, options | read)
