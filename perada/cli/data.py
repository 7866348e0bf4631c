# SPDX-License-Identifier: Apache-2.0
"""Images as words of a command name them, what is understood of them, and a first recipe for them (`perada init`)."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from jsonargparse import ArgumentParser
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import check_choice, check_whole
from perada.core.files import writing
from perada.core.text import printable, some
from perada.data import IID, ByDomain, HuggingFace, Images, ImageTable
from perada.data.inspection import Inspection, inspect_division
from perada.data.partitions.division import Division
from perada.data.sets.folders import best_proposal, list_images
from perada.data.sets.manifest import SPLITS
from perada.data.sets.tables import BINARY, read_table, separator_of
from perada.privacy.accounting import check_target
from perada.results.report import ROWS, table
from perada.studies.drawing import check_drawing, new_figure
from perada.studies.report.class_figures import partition_figure
from perada.studies.report.drawn import drawing

Source = Images | ImageTable | HuggingFace
SOURCE = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a set of Hugging Face or its folder."
TABLES = (".csv", ".tsv", ".parquet")
FEW = 10  # clients with fewer training images are named
FEW_OF_CLASS = 5  # and classes with fewer
COLUMNS = 12  # classes that the table shows
NAMES = 10  # files and clients that are named of each kind
IMAGES_PER_CLIENT = 20  # in a first recipe, where the images are divided at random
USUAL_COLUMNS = {  # names of columns, with underscores between words, the commonest first
    "path": (
        *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_file"),
        *("imagepath", "img", "img_path", "image_name", "relative_path"),
    ),
    "label": ("label", "labels", "class", "class_name", "target", "category", "diagnosis", "finding", "findings", "y"),
    "client": (
        *("client", "client_id", "client_name", "site", "site_id", "hospital", "institution", "institute", "center"),
        *("centre", "clinic", "user", "user_id", "device"),
    ),
    "group": ("group", "patient", "patient_id", "patientid", "subject", "subject_id", "person", "person_id"),
    "split": ("split", "set", "subset", "phase", "fold"),
}
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)
QUESTIONS = {
    "images": ("Your images, a folder or a table; empty for the handwritten digits that come with perada", ""),
    "algorithm": ("Algorithm: perada and ditto give every client a model, fedavg gives all of them one", "perada"),
    "rounds": ("Communication rounds", "30"),
    "epsilon": ("Privacy: the ε that training may cost each image, such as 8; empty for none", ""),
}


def kind_of(value: str) -> type[Source] | None:
    """What a source is read by; None for what is neither ``hf:NAME`` nor a table nor a folder."""
    if value.startswith("hf:"):
        return HuggingFace
    if Path(value).suffix.lower() in TABLES:
        return ImageTable
    return Images if Path(value).is_dir() else None


def add_options(parser: ArgumentParser, kind: type[Source], section: str | None = None) -> None:
    """Add the options of a source, but for those that a command gives itself."""
    own = {"root", "table", "name", "size", "in_memory", "train"}
    parser.add_class_arguments(kind, section, skip=own)


def division_of(value: str, kind: type[Source], options: dict[str, Any]) -> Division:
    """The images of a source, by client where clients are known."""
    images = kind(value.removeprefix("hf:") if kind is HuggingFace else value, **options)
    if isinstance(images, Images):
        known = "{client}" in images.layout
    else:
        known = images.client is not None or "client" in images.listed[0]
    return Division(images, ByDomain("client") if known else IID(1))


def division_of_recipe(words: Sequence[str]) -> Division:
    """The data of a recipe, which options of ``perada fit`` name."""
    from perada.cli.runs import PeradaCLI

    data = PeradaCLI(words, run=False).datamodule
    data.prepare_data()
    divided: Division = data.division
    return divided


def inspect(parser: ArgumentParser, words: list[str]) -> None:
    """Print what is understood of a folder, a table or a recipe's data; the exit status is 1 if it must be fixed."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for one in (parser, own):
        one.add_argument("--output", type=Path, help="File for a figure of clients and classes, such as classes.png.")
    given, words = own.parse_known_args(words)
    if given.output is not None:
        check_drawing("perada data inspect --output")
        kinds = new_figure(1, 1).canvas.get_supported_filetypes()
        check_choice("--output: the kind of picture", given.output.suffix.lower().lstrip("."), list(kinds))
    if any(word.startswith("--config") for word in words):
        division = division_of_recipe(words)
    else:
        parser.add_argument("source", help=f"{SOURCE} Or --config RECIPE and its options.")
        if words and not words[0].startswith("-") and kind_of(words[0]) is None:
            told = "is a file, and no table of these kinds" if Path(words[0]).is_file() else "is not there"
            raise FileNotFoundError(f"{words[0]!r} {told}; give one: {SOURCE[0].lower()}{SOURCE[1:].rstrip('.')}")
        kind = next((kind for word in words if not word.startswith("-") and (kind := kind_of(word))), Images)
        add_options(parser, kind)
        options = vars(parser.parse_args(words))
        options.pop("output")
        division = division_of(options.pop("source"), kind, {"size": 32} | options)  # small: what is read is not kept
    found = inspect_division(division)
    print(shown(found))
    if given.output is not None:
        draw(found, given.output)
        print(f"Figure: {given.output}")
    if not found.usable:
        sys.exit(1)


def shown(found: Inspection) -> str:
    """An inspection as text: a table, what there is, what must be fixed, what else is worth knowing."""
    lists = {
        "Cannot be read": found.broken,
        "In the test split and in training": [" is ".join(pair) for pair in found.leaks],
        "Several clients have it": [" is ".join(pair) for pair in found.shared],
        "One client has it twice": [" is ".join(pair) for pair in found.repeated],
        "Only one client has it": [f"class {name}: {client}" for name, client in found.of_one_client],
        "Worth knowing": _notes(found),
    }
    given = {"table": _table(found), "lists": lists, "most": NAMES, "printable": printable, "median": np.median}
    return TEMPLATES.get_template("inspection.txt.jinja").render(given, found=found)


def _table(found: Inspection) -> str:
    more = [f"… {len(found.classes) - COLUMNS} more"] * (len(found.classes) > COLUMNS)
    header = ["client", *found.classes[:COLUMNS], *more, "images"]
    parts = [[*part[:ROWS].tolist(), part.sum(0).tolist()] for part in (found.train, found.test, found.images)]
    rows = []
    for name, train, test, images in zip([*found.clients[:ROWS], "all"], *parts, strict=True):
        cells = [f"{a} / {b}" for a, b in zip(train[:COLUMNS], test[:COLUMNS], strict=True)]
        rows.append([name, *cells, *[""] * len(more), f"{images[0]} / {images[1]}"])
    if len(found.clients) > ROWS:
        rows.insert(-1, [f"… {len(found.clients) - ROWS} more", *[""] * (len(header) - 1)])
    return table(header, rows)


def _notes(found: Inspection) -> list[str]:
    """What does not stand in the way of a run."""
    one = len(found.classes) == 1 and not found.several_labels
    notes = [f"all images are of the class {found.classes[0]}: a run needs two classes at least"] if one else []
    for what, names, scarce in (
        (f"fewer than {FEW_OF_CLASS} training images of the class", found.classes, found.train.sum(0) < FEW_OF_CLASS),
        (f"fewer than {FEW} training images", found.clients, found.images[:, 0] < FEW),
        ("no test images", found.clients, found.images[:, 1] == 0),
    ):
        if scarce.any():
            notes.append(f"{what}: {some(np.array(names)[scarce].tolist(), NAMES)}")
    return found.notes + notes


def draw(found: Inspection, output: Path) -> None:
    """Draw the training images of each client and class as a picture, as the report of a run does."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with drawing(), writing(output):
        figure = partition_figure(found.train.tolist(), found.classes, found.clients)
        figure.savefig(output, dpi=100, metadata={"Software": None} if output.suffix.lower() == ".png" else None)


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Ask what no option says, and write the recipe."""
    for name, (question, default) in QUESTIONS.items():
        parser.add_argument(f"--{name}", type=str, help=f"{question}. (default: {default or 'none'})")
    parser.add_argument("--output", type=Path, default=Path("recipe.yaml"), help="File to write.")
    parser.add_argument("--yes", action="store_true", help="Ask nothing: what no option says has its default.")
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    given = parser.parse_args(words)
    if given.output.exists() and not given.force:
        raise FileExistsError(f"{str(given.output)!r} exists already; choose another --output or add --force")
    if not given.yes and not sys.stdin.isatty() and any(given[name] is None for name in QUESTIONS):
        raise ValueError("there is no terminal to ask in: add --yes, and options for what is not to be the default")
    answers = {}
    for name, (question, default) in QUESTIONS.items():
        asks = given[name] is None and not given.yes
        answer = input(f"{question} [{default}]: ").strip() or default if asks else given[name]
        answers[name] = default if answer is None else answer
    text = recipe(**answers)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with writing(given.output):
        given.output.write_text(text, encoding="utf-8")
    print(f"Wrote {given.output}; run it with: perada fit --config {given.output}")


def recipe(images: str, algorithm: str, rounds: str, epsilon: str) -> str:
    """A recipe by the answers to the questions, each a text as it was typed.

    Raises:
        ValueError: If an answer cannot be used.
        FileNotFoundError: If the images are not there.
    """
    from perada.algorithms import make_algorithm, with_server_rule

    distils = make_algorithm(with_server_rule(algorithm, None)[0]).distills
    check_whole("rounds", yaml.safe_load(rounds))
    if epsilon:
        check_target("epsilon", yaml.safe_load(epsilon))
    made = TEMPLATES.get_template("recipe.yaml.jinja")
    answers = {"images": images, "algorithm": algorithm, "rounds": int(rounds), "epsilon": epsilon}
    if not images:
        return made.render(answers, distils=distils)
    kind = kind_of(images)
    if kind is None or not Path(images).exists():
        raise FileNotFoundError(f"images={images!r} is not there; give a folder or a table ({', '.join(TABLES)})")
    if kind is ImageTable:
        options = table_options(images)
        table = ImageTable(**options)
        count = len(table.read_manifest().paths)  # which also checks the files and the labels
        clients = table.client is not None or "client" in table.listed[0]
    else:
        files = list_images(Path(images))
        layout = best_proposal(files)
        if not layout:
            raise ValueError(_no_layout(images, files))
        options = {"root": images, "layout": layout}
        count = len(files)
        clients = "{client}" in layout
    written = json.dumps(options, ensure_ascii=False)
    few = max(2, min(10, count // IMAGES_PER_CLIENT))
    return made.render(answers, distils=distils, kind=kind.__name__, options=written, clients=clients, num_clients=few)


def _no_layout(images: str, files: list[str]) -> str:
    """Why no layout was found for a folder of images, and what to do."""
    if all("/" not in file for file in files):
        return (
            f"images={images!r} holds {len(files)} images and no folders, so their classes are not known; sort them "
            "into a folder for each class (or client/class), or give a table (.csv) that lists them"
        )
    return (
        f"images={images!r} has images such as {files[0]!r}, whose folders have no layout that can be guessed; write a "
        "recipe with layout, as docs/own_images.md explains, or give a table (.csv) that lists them"
    )


def table_options(path: str) -> dict[str, Any]:
    """The options by which :class:`.ImageTable` reads a table, guessed from its header and first rows.

    Raises:
        ValueError: If no column holds the paths of images, or their labels.
    """
    columns, _ = read_table(Path(path))
    values = {name: column.tolist() for name, column in columns.items()}
    options: dict[str, Any] = {"table": path}
    files = _column_of_files(path, values)
    if not (Path(path).parent / values[files][0]).is_file() and Path(values[files][0]).is_file():
        options["folder"] = "."  # paths begin where the command was started
    chosen = {"path": files}
    for role in ("client", "group", "split"):
        name = _usual_column(role, [name for name in values if name not in chosen.values()])
        if name is not None and (role != "split" or all(str(word).lower() in SPLITS for word in values[name])):
            chosen[role] = name
    options |= {role: name for role, name in chosen.items() if name != role}
    label = _label_columns(path, values, [name for name in values if name not in chosen.values()])
    if label != "label":
        options["label"] = label
    if isinstance(label, str) and all(isinstance(cell, str) for cell in values[label]):
        separator = separator_of(values[label])
        options |= {} if separator is None else {"separator": separator}
    return options


def _usual_column(role: str, names: list[str]) -> str | None:
    """The column whose name is usual for a role, if there is one."""
    plain = {re.sub(r"[\s_-]+", "_", name.strip().lower()): name for name in names}
    return next((plain[usual] for usual in USUAL_COLUMNS[role] if usual in plain), None)


def _column_of_files(table: str, values: dict[str, list[Any]]) -> str:
    """The column that holds the paths of images."""
    usual = _usual_column("path", list(values))
    if usual is not None:
        return usual
    for name, column in values.items():
        if isinstance(column[0], str) and column[0].lower().endswith(IMG_EXTENSIONS):
            return name
    raise ValueError(
        f"images={table!r} has no column of image files among {', '.join(map(repr, values))}; rename the column to "
        "'path'"
    )


def _label_columns(table: str, values: dict[str, list[Any]], names: list[str]) -> str | list[str]:
    """The column of the labels, or the columns of zeros and ones, among these names."""
    usual = _usual_column("label", names)
    if usual is not None:
        return usual
    binary = [name for name in names if {str(cell).lower() for cell in values[name]} <= BINARY]
    if len(binary) > 1:
        return binary
    # A column that has another value in almost every row, such as a number or a date, is no class.
    classes = [name for name in names if 2 * len({str(cell) for cell in values[name]}) <= len(values[name])]
    if len(classes) == 1:
        return classes[0]
    raise ValueError(
        f"images={table!r}: which column holds the labels cannot be guessed from {', '.join(map(repr, values))}; "
        "rename it to 'label'"
    )
