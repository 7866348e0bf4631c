# SPDX-License-Identifier: Apache-2.0
"""Images named on a command line, and `perada data inspect`."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jsonargparse import ArgumentParser
from PIL import Image

from perada.cli.sources import SOURCE_HELP, TABLES, check_source
from perada.core.checks import check_choice
from perada.core.text import abbreviated, printable, printable_json
from perada.data import IID, ByDomain, FederatedDataModule, HuggingFace, ImageMasks, Images, ImageTable
from perada.data.inspection import Inspection, inspect_division
from perada.data.medical.facts import differences
from perada.data.medical.reading import medical_kind
from perada.data.partitions.division import Division
from perada.data.partitions.shares import Array
from perada.data.sets.folders import have_masks
from perada.data.sets.image_paths import list_images
from perada.results.report import ROWS, table
from perada.studies.drawing import check_drawing, new_figure
from perada.studies.report.class_figures import partition_figure
from perada.studies.report.plotting import report_style
from perada.system.files import check_output_file, writing

Source = Images | ImageMasks | ImageTable | HuggingFace
MIN_IMAGES_OF_CLIENT = 10
"""Clients with fewer training images are listed."""
MIN_IMAGES_OF_CLASS = 5
"""Classes with fewer training images are listed."""
MAX_COLUMNS = 12
"""Largest number of classes in the table."""
FOREGROUND = 255
"""Value of the foreground in many masks with two classes."""
MASKS_READ = 20
"""Number of masks of a folder whose values are looked at."""
MAX_NAMES = 10
"""Largest number of files or clients in a list."""
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)


def source_class(source: str) -> type[Source] | None:
    """Return the class that reads a source, as if it had no masks; see :func:`image_class`."""
    if source.startswith("hf:"):
        return HuggingFace
    if Path(source).suffix.lower() in TABLES:
        return ImageTable
    return Images if Path(source).is_dir() else None


def image_class(source: str, words: Sequence[str], prefix: str = "--") -> type[Source] | None:
    """Return the class that reads a source; None if it is neither ``hf:NAME`` nor a table nor a folder.

    A folder has masks if it has folders ``images`` and ``masks`` beside each other, or options name them.

    Args:
        source: What the command line names.
        words: Its words, with the options of the class.
        prefix: Beginning of these options.
    """
    class_of_source = source_class(source)
    if class_of_source is not Images:
        return class_of_source
    if any(word.startswith((f"{prefix}mask", f"{prefix}images")) for word in words):
        return ImageMasks
    with warnings.catch_warnings():
        # The class warns of skipped files.
        warnings.simplefilter("ignore")
        return ImageMasks if have_masks(list_images(Path(source))) else Images


def infer_mask_values(files: Sequence[str]) -> dict[str, list[int]]:
    """Return the option ``mask_values`` if the masks have black and white pixels only, and {} otherwise.

    White would otherwise stand for pixels without a class. The first masks of each folder are read, since clients may
    write them differently.
    """
    mask_values: set[int] = set()
    files_of_folder: dict[str, list[str]] = {}
    for file in files:
        files_of_folder.setdefault(str(Path(file).parent), []).append(file)
    sampled = [file for folder_files in files_of_folder.values() for file in folder_files[:MASKS_READ]]
    for file in sampled:
        if medical_kind(file) is not None:
            # Volumes of labels hold the numbers of classes.
            return {}
        with Image.open(file) as mask:
            mask_values |= {*np.unique(np.array(mask)).tolist()}
    return {"mask_values": [0, FOREGROUND]} if mask_values == {0, FOREGROUND} else {}


def add_options(parser: ArgumentParser, images_class: type[Source], section: str | None = None) -> None:
    """Add the options of an image set to a parser, without those that commands set themselves."""
    skipped: set[str | int] = {"root", "table", "name", "size", "in_memory", "train"}
    parser.add_class_arguments(images_class, section, skip=skipped)


def make_division(source: str, images_class: type[Source], arguments: dict[str, Any]) -> Division:
    """Divide the images of a source by client, or assign all of them to one if the source names no clients."""
    images = images_class(source.removeprefix("hf:"), **arguments)
    return Division(images, ByDomain("client") if images.names_clients else IID(1))


def recipe_division(words: Sequence[str]) -> Division:
    """Return the data of a recipe named by options of ``perada fit``."""
    return _division_of(_recipe_data(words))


def _division_of(data: FederatedDataModule) -> Division:
    """Return the division of a recipe's dataset, which every recipe has."""
    assert data.division is not None
    return data.division


def _recipe_data(words: Sequence[str]) -> FederatedDataModule:
    """Return the data module of a recipe, with its files."""
    from perada.cli.runs import PeradaCLI

    data: FederatedDataModule = PeradaCLI(words, run=False).datamodule
    data.prepare_data()
    return data


def inspect(parser: ArgumentParser, words: list[str]) -> None:
    """Print how a folder, a table or a recipe's data is interpreted; the exit status is 1 if it must be fixed."""
    # The option is read first, since the other options depend on what is inspected.
    output_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (parser, output_parser):
        each.add_argument("--output", type=Path, help="File for a figure of the clients' classes, such as classes.png.")
        each.add_argument("--json", action="store_true", help="Print the result as JSON, with all clients and classes.")
    output_options, words = output_parser.parse_known_args(words)
    output = output_options.output
    if output is not None:
        check_drawing("perada data inspect --output")
        check_output_file("--output", output, "classes.png")
        formats = new_figure(1, 1).canvas.get_supported_filetypes()
        check_choice("--output: the kind of picture", output.suffix.lower().lstrip("."), list(formats))
    run_options = None
    if any(word.startswith("--config") for word in words):
        data = _recipe_data(words)
        division = _division_of(data)
        run_options = data.run_options
    else:
        with warnings.catch_warnings():
            # The inspection, which lists the images again, has the same warnings.
            warnings.simplefilter("ignore")
            division = _parse_source(parser, words)
    inspection = inspect_division(division, run_options)
    if output_options.json:
        print(printable_json(json.dumps(inspection_record(inspection), ensure_ascii=False)))
    else:
        print(format_inspection(inspection))
    if output is not None:
        draw_division(inspection, output)
        print(f"Figure: {output}", file=sys.stderr if output_options.json else sys.stdout)
    if not inspection.usable:
        sys.exit(1)


def _parse_source(parser: ArgumentParser, words: list[str]) -> Division:
    """Return the images named on a command line, with the options of their class."""
    parser.add_argument("source", help=f"{SOURCE_HELP} Or --config RECIPE and its options.")
    if words and not words[0].startswith("-"):
        check_source(words[0])
    images_class: type[Source] = Images
    for word in words:
        class_of_word = None if word.startswith("-") else image_class(word, words)
        if class_of_word is not None:
            images_class = class_of_word
            break
    add_options(parser, images_class)
    options = vars(parser.parse_args(words))
    options.pop("output")
    options.pop("json")
    source = options.pop("source")
    if images_class is ImageMasks and options["mask_values"] is None:
        # A recipe of `perada init` has the same values.
        manifest = ImageMasks(source, images=options["images"], masks=options["masks"]).read_manifest()
        inferred_values = infer_mask_values(manifest.masks or [])
        if inferred_values:
            values = inferred_values["mask_values"]
            print(
                f"The masks are black and white, so mask_values={values} is assumed; `perada init` writes it, other "
                f"recipes need it.",
                file=sys.stderr,
            )
        options |= inferred_values
    # Images are read small, since only their headers and classes are of interest.
    return make_division(source, images_class, {"size": 32} | options)


def format_inspection(inspection: Inspection) -> str:
    """Format an inspection: a table, a summary, problems to fix, and notes."""
    lists = {
        "Rejected by training": inspection.rejections,
        "Cannot be read": inspection.broken,
        "Headers of DICOM and NIfTI files": _header_lines(inspection),
        "What differs between clients": differences(inspection.clients, inspection.headers)
        if inspection.headers
        else [],
        "Values in the masks, in % of the pixels": _mask_value_lines(inspection),
        "In the test split and in training": [" is ".join(pair) for pair in inspection.leaks],
        "Several clients have it": [" is ".join(pair) for pair in inspection.shared],
        "One client has it twice": [" is ".join(pair) for pair in inspection.repeated],
        "Equal images have different labels": [" and ".join(pair) for pair in inspection.contradictions],
        "Only one client has it": [f"class {name}: {client}" for name, client in inspection.single_client_classes],
        "Worth knowing": _notes_on_inspection(inspection),
    }
    unknown_table = ""
    if inspection.unknown_train.any() or inspection.unknown_test.any():
        unknown_table = _clients_table(inspection, inspection.unknown_train, inspection.unknown_test)
    return TEMPLATES.get_template("inspection.txt.jinja").render(
        table=_clients_table(inspection, inspection.train, inspection.test),
        unknown_table=unknown_table,
        lists=lists,
        most=MAX_NAMES,
        printable=printable,
        median=np.median,
        found=inspection,
    )


def inspection_record(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as JSON: lists of clients and classes in place of arrays, and whether it can be used."""
    record: dict[str, Any] = {"usable": inspection.usable}
    for field in fields(inspection):
        value = getattr(inspection, field.name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if field.name == "headers":
            value = [headers.record() for headers in inspection.headers]
        record[field.name] = value
    return record


def _clients_table(inspection: Inspection, train_counts: Array, test_counts: Array) -> str:
    """Format a table of counts (M, K) by client and class."""
    classes = inspection.classes[:MAX_COLUMNS]
    clients = inspection.clients[:ROWS]
    num_more_classes = len(inspection.classes) - len(classes)
    num_more_clients = len(inspection.clients) - len(clients)
    header = ["client", *classes]
    if num_more_classes:
        header.append(f"… {num_more_classes} more")
    header.append("images")
    counts = zip(
        [*clients, "all"],
        [*train_counts[:ROWS].tolist(), train_counts.sum(0).tolist()],
        [*test_counts[:ROWS].tolist(), test_counts.sum(0).tolist()],
        [*inspection.images[:ROWS].tolist(), inspection.images.sum(0).tolist()],
        strict=True,
    )
    rows = []
    for name, train, test, (num_train, num_test) in counts:
        row = [name]
        for class_train, class_test in zip(train[:MAX_COLUMNS], test[:MAX_COLUMNS], strict=True):
            row.append(f"{class_train} / {class_test}")
        if num_more_classes:
            row.append("")
        row.append(f"{num_train} / {num_test}")
        rows.append(row)
    if num_more_clients:
        rows.insert(-1, [f"… {num_more_clients} more", *[""] * (len(header) - 1)])
    return table(header, rows)


def _mask_value_lines(inspection: Inspection) -> list[str]:
    """Return the values of each client's masks, side by side, so that differences between clients are seen."""
    lines = []
    for client, shares in zip(inspection.clients, inspection.mask_values, strict=False):
        values = [f"{value} ({100 * share:.3g} %)" for value, share in shares.items()]
        lines.append(f"{client}: {abbreviated(values, MAX_COLUMNS)}")
    return lines


def _header_lines(inspection: Inspection) -> list[str]:
    """Return the headers of each client's medical images."""
    lines = []
    for client, headers in zip(inspection.clients, inspection.headers, strict=False):
        if headers.counts:
            lines.append(f"{client}: {headers.describe()}")
    return lines


def _notes_on_inspection(inspection: Inspection) -> list[str]:
    """Return notes that do not prevent a run."""
    notes = list(inspection.notes)
    if len(inspection.classes) == 1 and not inspection.several_labels:
        notes.append(f"all images are of the class {inspection.classes[0]}: a run requires at least two classes")
    rare_classes = inspection.train.sum(0) < MIN_IMAGES_OF_CLASS
    if rare_classes.any():
        names = abbreviated(np.array(inspection.classes)[rare_classes].tolist(), MAX_NAMES)
        notes.append(f"fewer than {MIN_IMAGES_OF_CLASS} training images of the class: {names}")
    small_clients = inspection.images[:, 0] < MIN_IMAGES_OF_CLIENT
    if small_clients.any():
        names = abbreviated(np.array(inspection.clients)[small_clients].tolist(), MAX_NAMES)
        notes.append(f"fewer than {MIN_IMAGES_OF_CLIENT} training images: {names}")
    untested_clients = inspection.images[:, 1] == 0
    if untested_clients.any():
        notes.append(
            f"no test images: {abbreviated(np.array(inspection.clients)[untested_clients].tolist(), MAX_NAMES)}"
        )
    return notes


def draw_division(inspection: Inspection, output: Path) -> None:
    """Draw the training images of each client and class, like the report of a run."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with report_style(), writing(output):
        figure = partition_figure(inspection.train.tolist(), inspection.classes, inspection.clients)
        # Without the version of matplotlib the same data give the same file.
        metadata = {"Software": None} if output.suffix.lower() == ".png" else None
        figure.savefig(output, dpi=100, metadata=metadata)
