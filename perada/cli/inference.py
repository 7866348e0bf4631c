# SPDX-License-Identifier: Apache-2.0
"""Commands for a finished run: ``perada predict``, ``export``, ``push``, ``clients add``, ``clients remove``.

Their options are checked before anything large is imported: a wrong name of a client must not take seconds.
"""

import sys
from argparse import SUPPRESS
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from perada.cli.foreign_classes import foreign_classes
from perada.cli.sources import SOURCE_HELP, TABLES
from perada.core.text import abbreviated, quoted
from perada.results.client_names import available_client
from perada.results.run_file import RUN_FILE, layout_of, read_run
from perada.system.files import check_output_file, check_output_folder
from perada.system.garbage import collection_paused
from perada.system.yaml_files import read_yaml

if TYPE_CHECKING:
    from perada.algorithms import Algorithm
    from perada.cli.data import Source
    from perada.data import FederatedData
    from perada.results.run import Run

RUN_HELP = "Folder written by `perada fit`, `perada export` or Run.save, or a checkpoint in one."
TRUST_HELP = (
    "Build the run's algorithm if its config.yaml names a class that is not part of perada. This runs the code of the "
    "module, which may be in the current folder."
)
_DATA_HELP = (
    f"{SOURCE_HELP} Or a recipe with the data of this client, or of several, from which --client selects one. --images "
    "is the same option."
)
_SCORES_HELP = (
    "Write scores and losses too. By default only for runs without privacy, since privacy accounting does not cover "
    "them."
)
_RECIPE_USE = (
    "`perada predict --config RECIPE --ckpt_path PATH` predicts the recipe's test images, with its data; `perada test "
    "--help` lists its options."
)


def _add_run(parser: ArgumentParser) -> None:
    """Add the options with which a run is opened."""
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)


def _add_prediction_options(parser: ArgumentParser) -> None:
    """Add the options of ``perada predict``."""
    _add_run(parser)
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        help="An image, a folder of images, or a table (.csv, .tsv, .parquet) that lists them.",
    )
    parser.add_argument(
        "--path", type=str, default="path", metavar="COLUMN", help="Column of a table with the paths of the files."
    )
    parser.add_argument(
        "--encoding", type=str, default=None, help="Encoding of a text table, such as cp1252; by default UTF-8."
    )
    parser.add_argument(
        "--client",
        type=str,
        default=None,
        help="Name or number of the client whose model predicts; by default, the global model.",
    )
    parser.add_argument(
        "--prediction",
        choices=("personal", "global", "both"),
        default=None,
        help="Models with which the client predicts; by default those of the run's option evaluation.prediction.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("predictions.csv"),
        help="Table to write. Masks are written to PNG files in the folder of this name, without its extension.",
    )
    parser.add_argument(
        "--dicom",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="New folder for the predictions of DICOM files as DICOM, of the same patients and studies: a SEG for each "
        "series if masks are predicted, else a structured report for each image.",
    )
    parser.add_argument("--batch_size", type=int, default=64, help="Number of images in memory at a time.")
    parser.add_argument("--device", type=str, default=None, help="cpu, cuda or mps; by default a GPU if available.")


def predict(parser: ArgumentParser, words: list[str]) -> None:
    """Predict images with a model of a run, and write a table."""
    parser.description = f"Predict images with a model of a run, without its data. {_RECIPE_USE}"
    _add_prediction_options(parser)
    if any(word.partition("=")[0] == "--config" for word in words):
        raise ValueError(f"--config is not an option of `perada predict RUN --images ...`. {_RECIPE_USE}")
    options = parser.parse_args(words)
    output = options.output
    check_output_file("--output", output, "predictions.csv")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output={output}: the folder {str(output.parent)!r} does not exist; create it")
    if not options.images.exists():
        raise FileNotFoundError(
            f"{str(options.images)!r} does not exist; pass an image, a folder, or a table ({', '.join(TABLES)})"
        )
    check_client(options.run, options.client)
    with collection_paused():
        import torch

        from perada.results.inference import each_frame, find_images

    if options.dicom is not None:
        from perada.results.dicom_predictions import check_dicom_folder, model_name, write_dicom

        check_dicom_folder(options.dicom)

    names, paths = find_images(options.images, options.path, options.encoding)
    device = options.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = open_run(options.run, trust=options.trust)
    if run.info["task"]["per_pixel"]:
        check_output_folder("--output", output.with_suffix(""))
    names, paths = each_frame(names, paths, run.preprocessing.medical)
    # Run.predict adds the files that cannot be read.
    error_of_file: dict[Path, str] = {}
    predictions = run.predict(
        paths,
        options.client,
        prediction=options.prediction,
        batch_size=options.batch_size,
        device=device,
        progress=sys.stderr.isatty(),
        broken=error_of_file,
    )
    readable_names = [name for name, path in zip(names, paths, strict=True) if path not in error_of_file]
    predictions = replace(predictions, paths=tuple(readable_names), sources=predictions.paths)
    if predictions.labels.ndim == 3:
        output = predictions.save_masks(output.with_suffix(""))
    else:
        predictions.to_csv(output)
    plural = "s" if len(readable_names) > 1 else ""
    print(f"Predictions of {len(readable_names)} image{plural}: {output}")
    if options.dicom is not None:
        written = write_dicom(predictions, model_name(run, options.client), options.dicom)
        print(f"DICOM files: {len(written)} in {options.dicom}")
    if error_of_file:
        raise ValueError(
            f"{len(paths) - len(readable_names)} of {len(paths)} images have no prediction and are missing from "
            f"{str(output)!r}: {'; '.join(error_of_file.values())}"
        )


def push(parser: ArgumentParser, words: list[str]) -> None:
    """Upload one adapter of a run to the Hugging Face Hub."""
    with collection_paused():
        from perada.results.run import Run

    _add_run(parser)
    parser.add_argument("repo", type=str, help="Repository on the Hub, as user/name; created if it does not exist.")
    parser.add_argument(
        "--client",
        type=str,
        default=None,
        help="Name or number of the client whose adapter to upload; by default, the global adapter.",
    )
    parser.add_argument("--public", action="store_true", help="Make the repository public; by default it is private.")
    parser.add_method_arguments(Run, "push_to_hub", skip={"repo", "client", "private", "token"}, as_group=False)
    options = vars(parser.parse_args(words))
    path = options.pop("run")
    check_client(path, options["client"])
    repo = options.pop("repo")
    public = options.pop("public")
    trust = options.pop("trust")
    print(open_run(path, trust=trust).push_to_hub(repo, private=not public, **options))


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write a finished run's adapters as PEFT folders, or one of its models in another format."""
    _add_run(parser)
    parser.add_argument("--output", type=Path, required=True, help="Folder for client_0, client_1, … and global.")
    parser.add_argument(
        "--format",
        type=Literal["peft", "onnx", "safetensors", "torch-export", "monai"],
        default="peft",
        help="Format of the files. All but peft write a single model; monai writes it as a MONAI bundle.",
    )
    parser.add_argument("--client", help="Name or number of the client whose model to write.")
    parser.add_argument(
        "--prediction",
        choices=("personal", "global", "both"),
        default=None,
        help="Models of the client to write; by default those of the run's option evaluation.prediction. With "
        "--format=peft personal or both, for the folders of all clients.",
    )
    parser.add_argument("--scores", type=bool, default=None, help=_SCORES_HELP)
    options = parser.parse_args(words)
    check_output_folder("--output", options.output)
    check_client(options.run, options.client)
    if options.format == "peft" and options.prediction == "global":
        raise ValueError(
            "--prediction=global has no effect with --format=peft, which writes the global adapter into the folder "
            "global; leave it out, or choose personal or both"
        )
    with collection_paused():
        from perada.results.clients import check_none_lost
        from perada.results.formats import FILES, export_model

    if options.format != "peft":
        run = open_run(options.run, trust=options.trust)
        note = export_model(run, options.client, options.format, options.output, options.prediction)
        written = str(options.output / FILES[options.format])
        if options.format == "monai":
            written = f"the MONAI bundle {options.output}"
        print(f"Wrote {written}. {note}")
        return
    if layout_of(options.run) == "adapters":
        raise ValueError(
            f"{str(options.run)!r} already has its adapters as PEFT folders; use --format=onnx, safetensors, "
            "torch-export or monai to write one of its models"
        )
    run = open_run(options.run, trust=options.trust)
    check_none_lost(options.output, run.info)
    folder = run.export(options.output, client=options.client, prediction=options.prediction, scores=options.scores)
    print_saved(run, folder)
    _check_exported_models(run, options.client)


def print_saved(run: "Run", folder: Path) -> None:
    """Print which adapters of a run are in the folder that it was saved to, and the privacy cost of releasing them."""
    from perada.results.cards import privacy_lines
    from perada.results.clients import joined_clients

    names = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").is_file())
    plural = "s" if len(names) > 1 else ""
    first_and_last = " … ".join(dict.fromkeys((names[0], names[-1])))
    print(f"Wrote {len(names)} adapter{plural} to {folder}: {first_and_last}")
    lines = privacy_lines(run.info.get("privacy"), joined_clients(run.info))
    if lines:
        print(lines)


def _check_exported_models(run: "Run", client: str | None) -> None:
    """Raise a FailedOutputsError if models that were written have outputs that are NaN or infinite.

    Args:
        run: The run.
        client: The client whose model was written; None for all models.
    """
    from perada.scores.failed_outputs import REMEDY, FailedOutputsError, describe_failed, failed_of_records

    failed = failed_of_records(run.metrics.get("failed_outputs", []))
    if client is not None:
        number = run.number(client)
        failed = [entry for entry in failed if entry.model == "personal" and entry.client == number]
    if failed:
        message = describe_failed(failed, run.info.get("clients"), anonymous=bool(run.info.get("privacy")))
        raise FailedOutputsError(f"the adapters were written, but {message}; {REMEDY}")


def open_run(path: Path, *, trust: bool = False) -> "Run":
    """Load the run in a folder written by ``perada fit`` or ``Run.save``, or of a checkpoint in one.

    Args:
        path: The folder, or the checkpoint.
        trust: Whether to import the class of its algorithm if that is not perada's.

    Raises:
        FileNotFoundError: If there is no run, or a file of it is missing.
        ValueError: If it cannot be read, or names a class that is not perada's and is not trusted.
    """
    with collection_paused():
        from perada.results.run import Run

    algorithm = None
    if layout_of(path) == "checkpoints":
        config = _find_config(path)
        if config is not None:
            algorithm = _build_user_algorithm(config, path, trust=trust)
    return Run.load(path, algorithm=algorithm)


def check_client(path: Path, client: str | None) -> None:
    """Reject the name or number of a client that a run does not have, from the run's record.

    Args:
        path: Folder of the run, or a checkpoint in one.
        client: The client; None for the global model.
    """
    folders = [path, *path.absolute().parents[:3]] if path.is_file() else [path]
    record = next((folder for folder in folders if (folder / RUN_FILE).is_file()), None)
    # Run.load reports a folder without a record.
    if client is not None and record is not None:
        run_file = read_run(record)
        available_client(client, run_file.info, run_file.num_clients)


def _find_config(path: Path) -> Path | None:
    """Return the ``config.yaml`` of a run folder, or of the run of a checkpoint."""
    folders = [path]
    if path.is_file():
        # A checkpoint is at most three folders below its run.
        folders += path.absolute().parents[:3]
    for folder in folders:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def _build_user_algorithm(config_path: Path, run_folder: Path, *, trust: bool) -> "Algorithm | None":
    """Build the algorithm of a run's ``config.yaml`` if its class, or one that it wraps, is not perada's.

    Args:
        config_path: The file.
        run_folder: The run's folder or checkpoint, which must be intact before anything is imported.
        trust: Whether modules that are not perada's may be imported.

    Raises:
        ValueError: If they may not, or the algorithm cannot be built.
    """
    try:
        entry = read_yaml(config_path)["federated"].get("algorithm")
        classes = foreign_classes(entry)
    except (KeyError, AttributeError) as error:
        raise ValueError(
            f"the algorithm in {str(config_path)!r} cannot be re-created ({type(error).__name__}: {error}); correct it"
        ) from error
    if not classes:
        return None
    if not trust:
        raise ValueError(
            f"{str(config_path)!r} names {quoted(classes)}, which is not part of perada and was not imported; if you "
            "trust this code and the run, add --trust"
        )
    with collection_paused():
        from perada.algorithms import Algorithm
        from perada.cli.parser import with_own_classes
        from perada.results.restore import check_intact_file, checkpoint_of

    check_intact_file(checkpoint_of(run_folder))
    try:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--algorithm", type=Algorithm)
        parsed = with_own_classes(lambda: parser.parse_object({"algorithm": entry}))
        algorithm: Algorithm = parser.instantiate_classes(parsed).algorithm
    except Exception as error:  # whatever a user's class raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"the algorithm in {str(config_path)!r} cannot be re-created ({reason}); correct it"
        ) from error
    return algorithm


def add_client(parser: ArgumentParser, words: list[str]) -> None:
    """Train a model for a new client of a finished run, and write it next to the others or, with them, elsewhere."""
    with collection_paused():
        from perada.cli.data import add_options, image_class, recipe_division
        from perada.data import Images
        from perada.lightning.joining import check_name_of_new_client, personalize
        from perada.results.clients import check_none_lost

    _add_run(parser)
    parser.add_argument("--data", required=True, help=_DATA_HELP)
    parser.add_argument(
        "--client", type=str, default=None, help="Name of the client; by default, its name in the data."
    )
    parser.add_argument(
        "--output", type=Path, default=None, help="Folder for the run with the client; by default RUN, if it is saved."
    )
    skipped: set[str | int] = {"run", "data", "name", "algorithm", "progress"}
    training_names = parser.add_function_arguments(personalize, skip=skipped, as_group=False)
    words, source = _find_source(words)
    images_class = image_class(source, words, "--images.") if source else Images
    if images_class is not None:
        add_options(parser, images_class, "images")
        # --images is --data here, and not the file of options that jsonargparse would read.
        parser._option_string_actions["--images"].help = SUPPRESS
    if images_class is Images:
        parser.set_defaults({"images.layout": "{class}/*"})
    options = parser.parse_args(words)
    path = options.run
    output = options.output
    if output is None and layout_of(path) == "checkpoints" and path.is_dir():
        raise ValueError(f"{str(path)!r} is a run folder of `perada fit`, which is never changed; set --output FOLDER")
    if output is not None:
        check_output_folder("--output", output)
    run = open_run(path, trust=options.trust)
    check_name_of_new_client(run, options.client)
    if output is not None and output.absolute() != path.absolute():
        check_none_lost(output, run.info)
    if images_class is None:
        data = recipe_division(["--config", options.data]).share_out()
    else:
        data = _read_like_run(run, images_class, options.data, vars(options.images))
    training = {name: options[name] for name in training_names}
    joined = personalize(run, data, options.client, **training, progress=sys.stderr.isatty())
    if output is None:
        folder = joined.add_client(path, joined.num_clients - 1)
    else:
        folder = joined.export(output)
    print(_describe_joined(joined, folder))


def _describe_joined(run: "Run", folder: Path) -> str:
    """Describe the client that joined a run last, whose adapter is in a folder."""
    from perada.results.cards import metric_title, render_template
    from perada.results.report import unit_of

    return render_template(
        "joined",
        record=run.info["joined"][-1],
        client=run.num_clients - 1,
        sample_level=(run.info.get("privacy") or {}).get("sample"),
        folder=folder,
        unit=unit_of(run.info["task"]),
        metric=metric_title(run.info),
    )


def remove_client(parser: ArgumentParser, words: list[str]) -> None:
    """Remove a client from a saved run, and print what the removal does not undo."""
    parser.add_argument("run", type=Path, help="Folder written by Run.save, `perada export` or `perada clients add`.")
    parser.add_argument("--client", type=str, required=True, help="Name or number of the client.")
    options = vars(parser.parse_args(words))
    with collection_paused():
        from perada.results.cards import render_template
        from perada.results.clients import forget

    number = forget(options["run"], options["client"])
    print(render_template("forgotten", number=number, **options))


def _find_source(words: list[str]) -> tuple[list[str], str]:
    """Replace ``--images`` by ``--data`` in a command line.

    Returns:
        The words of the command line, and the value of the option; empty if it is missing.
    """
    renamed = []
    positions = []
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--images", "--data"):
            positions.append(position)
            renamed.append(f"--data{equals}{value}")
        else:
            renamed.append(word)
    if len(positions) > 1:
        raise ValueError("--images and --data are the same option; use only one")
    if not positions:
        return renamed, ""
    _, _, source = renamed[positions[0]].partition("=")
    if not source:
        source = "".join(renamed[positions[0] + 1 : positions[0] + 2])
    return renamed, source


def _read_like_run(run: "Run", images_class: "type[Source]", source: str, options: dict[str, Any]) -> "FederatedData":
    """Return the images of a source, read and labelled like the run's."""
    from perada.cli.data import make_division
    from perada.data.medical.reading import DEFAULT_READING

    preprocessing = run.preprocessing
    size = preprocessing.shape[-1]
    if preprocessing.resize:
        size = max(preprocessing.resize[0][:2])
    full_scale = options["full_scale"]
    if full_scale is None:
        full_scale = preprocessing.full_scale
    gray = options["gray"] or preprocessing.channels == 1
    options = options | {"size": size, "gray": gray, "full_scale": full_scale}
    medical = preprocessing.medical.record()
    for name, default in DEFAULT_READING.record().items():
        # Options of the command line come first.
        if options[name] == default:
            options[name] = medical[name]
    if options["window"] is None:
        raise ValueError(
            f"--data={source}: each client of the run has a window of its own "
            f"({abbreviated(list(preprocessing.medical.window_of_client))}); set that of the new one with "
            "--images.window, such as file"
        )
    task = run.info["task"]
    if task["per_pixel"]:
        options = _with_masks(run, images_class, source, options)
    elif not task["has_classes"]:
        options = _with_numbers(run, images_class, source, options)
    data = make_division(source, images_class, options).share_out()
    names_in_run = run.info.get("classes") or []
    has_other_names = not {*(data.classes or ())} <= {*names_in_run}
    if not task["has_classes"] and has_other_names:
        # Columns with other names were listed in the order of the run's numbers.
        data = replace(data, classes=None)
    return data


def _with_masks(run: "Run", images_class: "type[Source]", source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a source whose masks have the classes of the run.

    Raises:
        ValueError: If the source has no masks.
    """
    from perada.cli.data import infer_mask_values
    from perada.data import HuggingFace

    # All sources that can have masks have this option.
    if "mask_values" not in options:
        raise ValueError(
            f"--data={source}: the run predicts masks, but this folder has no folders images and masks; add them, or "
            "pass a table with a column of masks (--images.mask=COLUMN)"
        )
    if options["classes"] is None:
        # Masks have no names of classes: their numbers are those of the run.
        options = options | {"classes": run.info.get("classes")}
    # A folder of masks has no column to name.
    if options.get("mask", "") is None:
        options = options | {"mask": _column_of_masks(images_class, source, options)}
    if images_class is HuggingFace or options["mask_values"] is not None or run.info["num_classes"] != 2:
        return options
    # A recipe of `perada init` does the same: black and white masks are those of two classes.
    manifest = images_class(source, **options).read_manifest()
    return options | infer_mask_values(manifest.masks or [])


def _column_of_masks(images_class: "type[Source]", source: str, options: dict[str, Any]) -> str:
    """Return the column of the masks, if the user did not name it.

    Raises:
        ValueError: If there is no column ``mask``.
    """
    columns = _columns_of(images_class, source, options)
    if "mask" not in columns:
        raise ValueError(
            f"--data={source}: the run predicts masks; name their column with --images.mask, one of "
            f"{', '.join(map(repr, columns))}"
        )
    return "mask"


def _with_numbers(run: "Run", images_class: "type[Source]", source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a source whose numbers are those of the run, by default in columns of the same names.

    Raises:
        ValueError: If the source is a folder of images, or its columns are unknown.
    """
    num_targets = run.info["num_classes"]
    names: list[str] = run.info.get("classes") or []
    description = ", ".join(names) or f"{num_targets} number{'s' if num_targets > 1 else ''}"
    if "numbers" not in options:
        raise ValueError(f"--data={source}: the run predicts {description}; pass a table with a column for each number")
    if options["numbers"] is None:
        columns = _columns_of(images_class, source, options)
        if not names or not {*names} <= {*columns}:
            raise ValueError(
                f"--data={source}: the run predicts {description}; name the columns of these numbers with "
                f"--images.numbers, of {', '.join(map(repr, columns))}"
            )
        return options | {"numbers": names}
    columns_of_numbers = options["numbers"]
    if isinstance(columns_of_numbers, str):
        columns_of_numbers = [columns_of_numbers]
    if len(columns_of_numbers) != num_targets:
        raise ValueError(
            f"--images.numbers names {len(columns_of_numbers)} columns ({', '.join(columns_of_numbers)}), but the run "
            f"predicts {description}"
        )
    return options


def _columns_of(images_class: "type[Source]", source: str, options: dict[str, Any]) -> list[str]:
    """Return the columns of a table, or of a set of Hugging Face."""
    from perada.cli.data import make_division
    from perada.data.sets.manifest import ListedImages

    images = make_division(source, images_class, options).dataset
    assert isinstance(images, ListedImages)
    return list(images.listing.columns)
