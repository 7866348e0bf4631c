# SPDX-License-Identifier: Apache-2.0
"""Images named on a command line: `perada data inspect`, and a first recipe for them (`perada init`)."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from jsonargparse import ArgumentParser
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import check_choice, check_integer
from perada.core.files import writing
from perada.core.text import abbreviated, printable
from perada.data import IID, ByDomain, HuggingFace, ImageMasks, Images, ImageTable
from perada.data.inspection import Inspection, inspect_division
from perada.data.partitions.division import Division
from perada.data.partitions.shares import Array
from perada.data.sets.folders import list_images, propose_layout
from perada.data.sets.manifest import SPLITS
from perada.data.sets.tables import BINARY, UNKNOWN_CELLS, guess_separator, read_table
from perada.privacy.accounting import check_target
from perada.results.report import ROWS, table
from perada.studies.drawing import check_drawing, new_figure
from perada.studies.report.class_figures import partition_figure
from perada.studies.report.plotting import report_style

Source = Images | ImageMasks | ImageTable | HuggingFace
SOURCE_HELP = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a Hugging Face dataset or its folder."
TABLES = (".csv", ".tsv", ".parquet")
MIN_IMAGES_OF_CLIENT = 10
"""Clients with fewer training images are listed."""
MIN_IMAGES_OF_CLASS = 5
"""Classes with fewer training images are listed."""
MAX_COLUMNS = 12
"""Largest number of classes in the table."""
MAX_LISTED = 10
"""Largest number of files or clients in a list."""
IMAGES_PER_CLIENT = 20
"""Images of a client in a first recipe that divides the images at random."""
COMMON_COLUMNS = {  # names with underscores between words, the commonest first
    "path": (
        "path",
        "file",
        "filename",
        "file_name",
        "filepath",
        "file_path",
        "image",
        "image_path",
        "image_file",
        "imagepath",
        "img",
        "img_path",
        "image_name",
        "relative_path",
    ),
    "label": ("label", "labels", "class", "class_name", "target", "category", "diagnosis", "finding", "findings", "y"),
    "client": (
        "client",
        "client_id",
        "client_name",
        "site",
        "site_id",
        "hospital",
        "institution",
        "institute",
        "center",
        "centre",
        "clinic",
        "user",
        "user_id",
        "device",
    ),
    "group": ("group", "patient", "patient_id", "patientid", "subject", "subject_id", "person", "person_id"),
    "split": ("split", "set", "subset", "phase", "fold"),
}
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)
QUESTIONS = {
    "images": ("Your images, a folder or a table; empty for the handwritten digits that come with perada", ""),
    "algorithm": ("Algorithm: perada and ditto train one model per client, fedavg one for all clients", "perada"),
    "rounds": ("Communication rounds", "30"),
    "epsilon": ("Privacy: the ε that training may spend on each image, such as 8; empty for no privacy", ""),
}


def source_class(source: str) -> type[Source] | None:
    """Return the class that reads a source; None if it is neither ``hf:NAME`` nor a table nor a folder."""
    if source.startswith("hf:"):
        return HuggingFace
    if Path(source).suffix.lower() in TABLES:
        return ImageTable
    return Images if Path(source).is_dir() else None


def add_options(parser: ArgumentParser, images_class: type[Source], section: str | None = None) -> None:
    """Add the options of an image set to a parser, without those that commands set themselves."""
    skipped: set[str | int] = {"root", "table", "name", "size", "in_memory", "train"}
    parser.add_class_arguments(images_class, section, skip=skipped)


def make_division(source: str, images_class: type[Source], options: dict[str, Any]) -> Division:
    """Divide the images of a source by client, or assign all of them to one if the source names no clients."""
    name = source.removeprefix("hf:") if images_class is HuggingFace else source
    images = images_class(name, **options)
    if isinstance(images, Images):
        has_clients = "{client}" in images.layout
    elif isinstance(images, ImageMasks):
        has_clients = "client" in images.columns
    else:
        has_clients = images.client is not None or "client" in images.listing.columns
    return Division(images, ByDomain("client") if has_clients else IID(1))


def recipe_division(words: Sequence[str]) -> Division:
    """Return the data of a recipe named by options of ``perada fit``."""
    from perada.cli.runs import PeradaCLI

    data = PeradaCLI(words, run=False).datamodule
    data.prepare_data()
    division: Division = data.division
    return division


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
        formats = new_figure(1, 1).canvas.get_supported_filetypes()
        check_choice("--output: the kind of picture", output.suffix.lower().lstrip("."), list(formats))
    if any(word.startswith("--config") for word in words):
        division = recipe_division(words)
    else:
        division = _parse_source(parser, words)
    inspection = inspect_division(division)
    if output_options.json:
        print(json.dumps(inspection_record(inspection), ensure_ascii=False))
    else:
        print(format_inspection(inspection))
    if output is not None:
        draw(inspection, output)
        print(f"Figure: {output}", file=sys.stderr if output_options.json else sys.stdout)
    if not inspection.usable:
        sys.exit(1)


def _parse_source(parser: ArgumentParser, words: list[str]) -> Division:
    """Return the images named on a command line, with the options of their class."""
    parser.add_argument("source", help=f"{SOURCE_HELP} Or --config RECIPE and its options.")
    if words and not words[0].startswith("-") and source_class(words[0]) is None:
        problem = "is not a table of a known format" if Path(words[0]).is_file() else "does not exist"
        sources = f"{SOURCE_HELP[0].lower()}{SOURCE_HELP[1:].rstrip('.')}"
        raise FileNotFoundError(f"{words[0]!r} {problem}; pass one of: {sources}")
    images_class: type[Source] = Images
    for word in words:
        class_of_word = None if word.startswith("-") else source_class(word)
        if class_of_word is not None:
            images_class = class_of_word
            break
    add_options(parser, images_class)
    options = vars(parser.parse_args(words))
    options.pop("output")
    options.pop("json")
    source = options.pop("source")
    # Images are read small, since only their headers and classes are of interest.
    return make_division(source, images_class, {"size": 32} | options)


def format_inspection(inspection: Inspection) -> str:
    """Format an inspection: a table, a summary, problems to fix, and notes."""
    lists = {
        "Cannot be read": inspection.broken,
        "In the test split and in training": [" is ".join(pair) for pair in inspection.leaks],
        "Several clients have it": [" is ".join(pair) for pair in inspection.shared],
        "One client has it twice": [" is ".join(pair) for pair in inspection.repeated],
        "Only one client has it": [f"class {name}: {client}" for name, client in inspection.single_client_classes],
        "Worth knowing": _notes(inspection),
    }
    unknown_table = ""
    if inspection.unknown_train.any() or inspection.unknown_test.any():
        unknown_table = _clients_table(inspection, inspection.unknown_train, inspection.unknown_test)
    return TEMPLATES.get_template("inspection.txt.jinja").render(
        table=_clients_table(inspection, inspection.train, inspection.test),
        unknown_table=unknown_table,
        lists=lists,
        most=MAX_LISTED,
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


def _notes(inspection: Inspection) -> list[str]:
    """Return notes that do not prevent a run."""
    notes = list(inspection.notes)
    if len(inspection.classes) == 1 and not inspection.several_labels:
        notes.append(f"all images are of the class {inspection.classes[0]}: a run requires at least two classes")
    rare_classes = inspection.train.sum(0) < MIN_IMAGES_OF_CLASS
    if rare_classes.any():
        names = abbreviated(np.array(inspection.classes)[rare_classes].tolist(), MAX_LISTED)
        notes.append(f"fewer than {MIN_IMAGES_OF_CLASS} training images of the class: {names}")
    small_clients = inspection.images[:, 0] < MIN_IMAGES_OF_CLIENT
    if small_clients.any():
        names = abbreviated(np.array(inspection.clients)[small_clients].tolist(), MAX_LISTED)
        notes.append(f"fewer than {MIN_IMAGES_OF_CLIENT} training images: {names}")
    untested_clients = inspection.images[:, 1] == 0
    if untested_clients.any():
        notes.append(
            f"no test images: {abbreviated(np.array(inspection.clients)[untested_clients].tolist(), MAX_LISTED)}"
        )
    return notes


def _is_binary(cells: set[str]) -> bool:
    """Return whether the different cells of a column are zeros and ones, some of which may be unknown."""
    known_cells = cells - UNKNOWN_CELLS - {""}
    return bool(known_cells) and known_cells <= BINARY


def draw(inspection: Inspection, output: Path) -> None:
    """Draw the training images of each client and class, like the report of a run."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with report_style(), writing(output):
        figure = partition_figure(inspection.train.tolist(), inspection.classes, inspection.clients)
        # Without the version of matplotlib the same data give the same file.
        metadata = {"Software": None} if output.suffix.lower() == ".png" else None
        figure.savefig(output, dpi=100, metadata=metadata)


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Ask for everything that no option sets, and write a recipe."""
    for name, (question, default) in QUESTIONS.items():
        value = "PATH" if name == "images" else name.upper()
        parser.add_argument(f"--{name}", type=str, metavar=value, help=f"{question}. (default: {default or 'none'})")
    parser.add_argument("--output", type=Path, default=Path("recipe.yaml"), help="File to write.")
    parser.add_argument(
        "--yes", action="store_true", help="Do not ask; use the default of everything that no option sets."
    )
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    options = parser.parse_args(words)
    output = options.output
    if output.exists() and not options.force:
        raise FileExistsError(f"{str(output)!r} already exists; choose a different --output or add --force")
    if not options.yes and not sys.stdin.isatty() and any(options[name] is None for name in QUESTIONS):
        raise ValueError(
            "there is no terminal for questions; add --yes, and options for everything that should "
            "differ from the default"
        )
    answers = {}
    for name, (question, default) in QUESTIONS.items():
        answer = options[name]
        if answer is None and not options.yes:
            answer = input(f"{question} [{default}]: ").strip() or None
        answers[name] = default if answer is None else answer
    text = write_recipe(**answers)
    output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(f"Wrote {output}; run it with: perada fit --config {output}")


def write_recipe(images: str, algorithm: str, rounds: str, epsilon: str) -> str:
    """Return the text of a recipe for the answers to the questions, each as it was typed.

    Raises:
        ValueError: If an answer is invalid.
        FileNotFoundError: If the images are not there.
    """
    from perada.algorithms import make_algorithm

    distils = make_algorithm(algorithm).uses_distillation
    check_integer("rounds", yaml.safe_load(rounds))
    if epsilon:
        check_target("epsilon", yaml.safe_load(epsilon))
    template = TEMPLATES.get_template("recipe.yaml.jinja")
    values: dict[str, Any] = {
        "images": images,
        "algorithm": algorithm,
        "rounds": int(rounds),
        "epsilon": epsilon,
        "distils": distils,
    }
    if not images:
        return template.render(values)
    images_class = source_class(images)
    if images_class is None or not Path(images).exists():
        raise FileNotFoundError(f"images={images!r} does not exist; pass a folder or a table ({', '.join(TABLES)})")
    if images_class is ImageTable:
        options = table_options(images)
        image_table = ImageTable(**options)
        num_images = len(image_table.read_manifest().paths)  # which also checks the files and the labels
        has_clients = image_table.client is not None or "client" in image_table.listing.columns
    else:
        files = list_images(Path(images))
        layout = propose_layout(files)
        if not layout:
            raise ValueError(_no_layout_message(images, files))
        options = {"root": images, "layout": layout}
        num_images = len(files)
        has_clients = "{client}" in layout
    values |= {
        "kind": images_class.__name__,
        "options": json.dumps(options, ensure_ascii=False),  # JSON is YAML
        "unknown_labels": "unknown" in options,
        "blank_labels": "blank" in options,
        "clients": has_clients,
        "num_clients": max(2, min(10, num_images // IMAGES_PER_CLIENT)),
    }
    return template.render(values)


def _no_layout_message(images: str, files: list[str]) -> str:
    """Return why no layout was found for a folder of images, and the remedy."""
    if all("/" not in file for file in files):
        return (
            f"images={images!r} has {len(files)} images but no folders, so their classes are unknown; sort them into "
            "one folder per class (or client/class), or pass a table (.csv) that lists them"
        )
    return (
        f"images={images!r} has images such as {files[0]!r}, whose folder layout cannot be inferred; write a recipe "
        "with layout (docs/own_images.md), or pass a table (.csv) that lists them"
    )


def table_options(path: str) -> dict[str, Any]:
    """Infer the options with which :class:`.ImageTable` reads a table, from its header and rows.

    Raises:
        ValueError: If no column holds the paths of images, or their labels.
    """
    columns, _ = read_table(Path(path))
    values = {name: column.tolist() for name, column in columns.items()}
    options: dict[str, Any] = {"table": path}
    path_column = _find_path_column(path, values)
    first_path = values[path_column][0]
    if not (Path(path).parent / first_path).is_file() and Path(first_path).is_file():
        options["folder"] = "."  # paths begin where the command was started
    columns_by_role = {"path": path_column}
    for role in ("client", "group", "split"):
        free_columns = [name for name in values if name not in columns_by_role.values()]
        name = _find_common_column(role, free_columns)
        if name is None:
            continue
        # A column of other values, such as numbers of folds, is not that of the splits.
        if role == "split" and not all(str(word).lower() in SPLITS for word in values[name]):
            continue
        columns_by_role[role] = name
    options |= {role: name for role, name in columns_by_role.items() if name != role}
    label = _find_label_columns(path, values, [name for name in values if name not in columns_by_role.values()])
    if label != "label":
        options["label"] = label
    if isinstance(label, list):
        options |= _policies_of_unknown([cell.strip().lower() for name in label for cell in values[name]])
    if isinstance(label, str) and all(isinstance(cell, str) for cell in values[label]):
        separator = guess_separator(values[label])
        if separator is not None:
            options["separator"] = separator
    return options


def _policies_of_unknown(cells: Sequence[str]) -> dict[str, str]:
    """Choose how unknown labels are read, from all cells of the label columns."""
    has_unknown = not UNKNOWN_CELLS.isdisjoint(cells)
    has_blank = "" in cells
    policies = {}
    if has_unknown and has_blank:
        # As in CheXpert, where -1 is an uncertain finding, and a blank one that the report does not mention.
        policies["blank"] = "absent"
    if has_unknown or has_blank:
        # Does not invent labels.
        policies["unknown"] = "ignore"
    return policies


def _find_common_column(role: str, names: list[str]) -> str | None:
    """Return the column whose name is common for a role; None if there is none."""
    by_normalized_name = {re.sub(r"[\s_-]+", "_", name.strip().lower()): name for name in names}
    for common_name in COMMON_COLUMNS[role]:
        if common_name in by_normalized_name:
            return by_normalized_name[common_name]
    return None


def _find_path_column(table: str, values: dict[str, list[Any]]) -> str:
    """Return the column with the paths of images.

    Raises:
        ValueError: If there is none.
    """
    common = _find_common_column("path", list(values))
    if common is not None:
        return common
    for name, column in values.items():
        if isinstance(column[0], str) and column[0].lower().endswith(IMG_EXTENSIONS):
            return name
    raise ValueError(
        f"images={table!r} has no column of image files among {', '.join(map(repr, values))}; rename the column to "
        "'path'"
    )


def _find_label_columns(table: str, values: dict[str, list[Any]], names: list[str]) -> str | list[str]:
    """Return the column of the labels, or the columns of zeros and ones, among these names.

    Raises:
        ValueError: If they cannot be guessed.
    """
    common = _find_common_column("label", names)
    if common is not None:
        return common
    binary = [name for name in names if _is_binary({str(cell).strip().lower() for cell in values[name]})]
    if len(binary) > 1:
        return binary
    # A column that has another value in almost every row, such as a number or a date, is no class.
    classes = [name for name in names if 2 * len({str(cell) for cell in values[name]}) <= len(values[name])]
    if len(classes) == 1:
        return classes[0]
    raise ValueError(
        f"images={table!r}: the column of the labels cannot be inferred from {', '.join(map(repr, values))}; rename "
        "it to 'label'"
    )
