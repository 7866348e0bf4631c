# SPDX-License-Identifier: Apache-2.0
"""A first recipe for one's own images (`perada init`)."""

import json
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

import numpy as np
import yaml
from jsonargparse import ArgumentParser, Namespace
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.cli.answers import TaskName, check_answer
from perada.cli.data import TEMPLATES, infer_mask_values, source_class
from perada.cli.messages import one_line
from perada.cli.sources import TABLES
from perada.core.checks import check_choice
from perada.core.text import abbreviated, printable
from perada.data import FederatedDataModule, ImageMasks, Images, ImageTable
from perada.data.batches.transforms import size_of_file
from perada.data.medical.reading import MEDICAL_EXTENSIONS
from perada.data.partitions.division import Division
from perada.data.sets.base import Manifest
from perada.data.sets.folders import have_masks, reject_masks_in_image_folders
from perada.data.sets.image_paths import list_images
from perada.data.sets.label_columns import (
    BINARY,
    UNKNOWN_CELLS,
    Decimal,
    guess_separator,
    holds_measurements,
    is_number,
)
from perada.data.sets.layouts import folder_below, propose_layout
from perada.data.sets.manifest import SPLITS, ImageFiles
from perada.data.sets.mask_folders import find_mask_folders, folder_of_clients
from perada.data.sets.table_files import read_table
from perada.data.training_checks import check_as_training_does
from perada.system.files import check_output_file, writing

_EXTENSIONS = IMG_EXTENSIONS + MEDICAL_EXTENSIONS
FEW_IMAGES = 20
"""Number of images below which a share of one in ten may be none."""
PRETRAINED_SIZE = 224
"""Height and width of the images that most networks of timm were trained on."""
SMALLEST_SIZE = 64
"""Height and width below which such networks have one position or none left after the last layer."""
MOST_ENLARGED = 4
"""How many times a recipe enlarges small images: such networks gain a point or two from more, while the time of a round
grows with the number of pixels."""
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
    "mask": ("mask", "mask_path", "mask_file", "mask_filename", "mask_name", "segmentation", "seg", "annotation"),
}
QUESTIONS = {
    "images": ("Your images, a folder or a table; empty for the handwritten digits that come with perada", ""),
    "task": (
        "What is learnt from the labels: classes, labels (several per image), numbers or masks; empty to infer it from "
        "the images",
        "",
    ),
    "algorithm": ("Algorithm: perada and ditto train one model per client, fedavg one for all clients", "perada"),
    "rounds": ("Communication rounds", "30"),
    "epsilon": ("Privacy: the ε that training may spend on each image, such as 8; empty for no privacy", ""),
}


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Ask for everything that no option sets, and write a recipe."""
    for name, (question, default) in QUESTIONS.items():
        value = "PATH" if name == "images" else name.upper()
        parser.add_argument(f"--{name}", type=str, metavar=value, help=f"{question}. (default: {default or 'none'})")
    parser.add_argument(
        "--layout",
        type=str,
        help="Positions of client and class in the paths of a folder, such as {client}/{class}/*; by default inferred.",
    )
    parser.add_argument("--encoding", type=str, help="Encoding of a text table, such as cp1252; by default UTF-8.")
    parser.add_argument(
        "--decimal",
        type=str,
        help="What separates the fraction of numbers in a table, a point or a comma (--decimal ,); by default a point.",
    )
    parser.add_argument(
        "--classes",
        type=list[str] | None,
        help="All classes, such as '[NA, benign, malignant]', which confirms names that look like missing labels; by "
        "default those that occur.",
    )
    parser.add_argument(
        "--mask_values",
        type=list[int] | None,
        help="Value of each class in masks, such as '[0, 255]'; by default inferred.",
    )
    parser.add_argument("--output", type=Path, default=Path("recipe.yaml"), help="File to write.")
    parser.add_argument(
        "--yes", action="store_true", help="Do not ask; use the default of everything that no option sets."
    )
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    options = parser.parse_args(words)
    output = options.output
    check_output_file("--output", output, "recipe.yaml")
    if output.exists() and not options.force:
        raise FileExistsError(f"{str(output)!r} already exists; choose a different --output or add --force")
    if not options.yes and not sys.stdin.isatty() and any(options[name] is None for name in QUESTIONS):
        raise ValueError(
            "there is no terminal for questions; add --yes, and options for everything that should "
            "differ from the default"
        )
    if options.decimal is not None:
        check_choice("decimal", options.decimal, get_args(Decimal))
    # Options are checked before the first question, and each answer before the next question.
    for name in QUESTIONS:
        if options[name] is not None:
            check_answer(name, options[name])
    answers = {}
    for name, (_, default) in QUESTIONS.items():
        answer = options[name]
        if answer is None:
            answer = default if options.yes else _ask_question(name)
        answers[name] = answer
    source = None
    if answers["images"]:
        declared = _declared_options(options)
        source = read_source(
            answers["images"], answers["task"], options.layout, options.encoding, options.decimal, declared
        )
        print(source.summary)
    text = compose_recipe(**answers, inferred_source=source)
    if source is not None:
        check_images(text, source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(f"Wrote {output}; run it with: perada fit --config {output}")
    if not answers["epsilon"]:
        # Runs with privacy would spend it once more for each method.
        print(f"Find the method and settings that suit your images with: perada choose {output} --budget 30m")


def _declared_options(parsed_options: Namespace) -> dict[str, list[Any]]:
    """Return the options of images that only the user can know, if they are set: names of classes, values of masks."""
    declared = {}
    for name in ("classes", "mask_values"):
        if parsed_options[name] is not None:
            declared[name] = list(parsed_options[name])
    return declared


def _ask_question(name: str) -> str:
    """Ask a question until the answer is valid, and return the answer, or the default if it is empty."""
    question, default = QUESTIONS[name]
    while True:
        try:
            answer = input(f"{question} [{default}]: ").strip()
        except EOFError:
            raise ValueError(f"the answers ended before the question for {name}; set --{name}, or add --yes") from None
        if not answer:
            return default
        try:
            check_answer(name, answer)
        except (ValueError, OSError) as error:
            # One typo must not cost the answers before it.
            print(f"{one_line(error)}; try again")
            continue
        return answer


def compose_recipe(
    images: str,
    algorithm: str,
    rounds: str,
    epsilon: str,
    task: str = "",
    inferred_source: "InferredSource | None" = None,
) -> str:
    """Return the text of a recipe for the answers to the questions, each as it was typed.

    Args:
        images: Folder or table of the images; empty for digits.
        algorithm: Name of the algorithm.
        rounds: Number of rounds.
        epsilon: The ε that training may spend on each image; empty for no privacy.
        task: What is learnt, one of ``TASKS``; empty to infer it.
        inferred_source: How the images are read; None to infer it.

    Raises:
        ValueError: If an answer is invalid.
        FileNotFoundError: If the images are not there.
    """
    from perada.algorithms import make_algorithm

    answers = {"algorithm": algorithm, "rounds": rounds, "epsilon": epsilon, "task": task, "images": images}
    for name, answer in answers.items():
        check_answer(name, answer)
    chosen_algorithm = make_algorithm(algorithm)
    distils = chosen_algorithm.uses_distillation
    has_personal = chosen_algorithm.inference == "personal" or chosen_algorithm.personalization() is not None
    template = TEMPLATES.get_template("recipe.yaml.jinja")
    value_of_field: dict[str, Any] = {
        "images": images,
        "algorithm": algorithm,
        "rounds": int(rounds),
        "epsilon": epsilon,
        "distils": distils,
        # A private run rejects it.
        "predicts_with_both": has_personal and chosen_algorithm.global_model and not epsilon,
        "public_fraction": 0.1,
        "image_size": 32,
        "longer_side": 0,
    }
    if not images:
        if task not in ("", "classes"):
            raise ValueError(f"task={task!r} needs images with {task}, but the digits have classes; pass images")
        return template.render(value_of_field)
    if inferred_source is None:
        inferred_source = read_source(images, task)
    if inferred_source.task == "masks" and epsilon:
        raise ValueError(
            f"epsilon={epsilon!r} cannot be combined with masks: the decoders of segmentation_models_pytorch train "
            "BatchNorm, which mixes the images of a batch; leave epsilon out, or pass a network with GroupNorm in "
            "Python (docs/tasks.md)"
        )
    value_of_field |= {
        "kind": inferred_source.class_name,
        "options": json.dumps(inferred_source.options, ensure_ascii=False),  # JSON is YAML
        "task": inferred_source.task,
        "unknown_labels": "unknown" in inferred_source.options,
        "blank_labels": "blank" in inferred_source.options,
        "clients": inferred_source.has_clients,
        "image_size": inferred_source.image_size,
        "longer_side": inferred_source.longer_side,
        "public_fraction": 0.25 if inferred_source.num_images < FEW_IMAGES else 0.1,
        "num_clients": max(2, min(10, inferred_source.num_images // IMAGES_PER_CLIENT)),
    }
    return template.render(value_of_field)


def check_images(recipe: str, inferred_source: "InferredSource") -> None:
    """Check a recipe's images as the set-up of a run does, and print its warnings.

    Args:
        recipe: Text of the recipe.
        inferred_source: How the images are read. Those that cannot be read were reported, and are left out.

    Raises:
        ValueError: If training would reject the images.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedDataModule, "data")
    parsed = parser.parse_object({"data": yaml.safe_load(recipe)["data"]})
    data_module: FederatedDataModule = parser.instantiate_classes(parsed).data
    division = data_module.division
    assert division is not None
    with warnings.catch_warnings():
        # Those of the list of images were shown when it was read first.
        warnings.simplefilter("ignore")
        data = division.share_out()
    broken = {train: _positions_of(inferred_source.unreadable_files, division, train) for train in (True, False)}
    findings = check_as_training_does(data, data_module.run_options, broken)
    if findings.rejections:
        raise ValueError(
            f"training would reject these images, so no recipe was written: {'; '.join(findings.rejections)}"
        )
    for message in findings.warnings:
        warnings.warn(message, stacklevel=2)


def _positions_of(paths: Sequence[str], division: Division, train: bool) -> set[int]:
    """Return the positions of files among the images of a split."""
    if not paths:
        return set()
    # Images of folders and tables are files.
    images = cast(ImageFiles, division.dataset.with_split(train))
    return {position for position, path in enumerate(images.files) if path in paths}


@dataclass(frozen=True)
class InferredSource:
    """How images are read.

    Attributes:
        class_name: Name of the class that reads them.
        options: Its options.
        task: What is learnt from their labels.
        num_images: Number of images.
        has_clients: Whether the source names their clients.
        summary: What was found and assumed, for people.
        unreadable_files: Files that cannot be read.
        longer_side: Median of the images' longer sides in pixels; 0 if no image can be read.
    """

    class_name: str
    options: dict[str, Any]
    task: TaskName
    num_images: int
    has_clients: bool
    summary: str = ""
    unreadable_files: Sequence[str] = ()
    longer_side: int = 0

    @property
    def image_size(self) -> int:
        """Height and width that the recipe resizes images to."""
        if not self.longer_side:
            return PRETRAINED_SIZE
        enlarged = MOST_ENLARGED * self.longer_side
        # Networks halve the size up to five times.
        multiple_of_32 = 32 * math.ceil(enlarged / 32)
        return min(PRETRAINED_SIZE, max(SMALLEST_SIZE, multiple_of_32))


def read_source(
    images_path: str,
    task: str = "",
    layout: str | None = None,
    encoding: str | None = None,
    decimal: Decimal | None = None,
    declared_options: Mapping[str, Any] | None = None,
) -> InferredSource:
    """Infer how images are read, and read their list.

    Args:
        images_path: Folder or table of the images.
        task: What is learnt, one of ``TASKS``; empty to infer it.
        layout: Layout of a folder; None to infer it.
        encoding: Encoding of a table; None for UTF-8.
        decimal: What separates the fraction of a table's numbers; None for a point.
        declared_options: Options ``classes`` and ``mask_values`` of the images that the user has set.

    Raises:
        ValueError: If it cannot be inferred, or an option does not fit the kind of source.
    """
    is_table = source_class(images_path) is ImageTable
    if is_table and layout is not None:
        raise ValueError(f"--layout={layout} is for folders, but images={images_path!r} is a table; leave it out")
    if not is_table and encoding is not None:
        raise ValueError(f"--encoding={encoding} is for tables, but images={images_path!r} is a folder; leave it out")
    if not is_table and decimal is not None:
        raise ValueError(f"--decimal={decimal} is for tables, but images={images_path!r} is a folder; leave it out")
    declared = dict(declared_options or {})
    if is_table:
        source = _read_table(images_path, task, declared, encoding, decimal)
    else:
        source = _read_folder(images_path, task, declared, layout)
    if "mask_values" in declared and source.task != "masks":
        raise ValueError(
            f"--mask_values={declared['mask_values']} is for masks, but {source.task} are learnt from "
            f"images={images_path!r}; leave it out"
        )
    return source


@dataclass(frozen=True)
class OpenedFiles:
    """What the beginnings of image files tell.

    Attributes:
        unreadable_files: Files that cannot be read.
        longer_side: Median of the longer sides of the others in pixels; 0 if there are none.
    """

    unreadable_files: Sequence[str]
    longer_side: int


def _open_files(manifest: Manifest) -> OpenedFiles:
    """Open the files of images; their pixels are not read."""
    broken = []
    longer_sides = []
    for path in manifest.paths:
        try:
            longer_sides.append(max(size_of_file(path)))
        except (OSError, SyntaxError, ValueError):
            broken.append(path)
    return OpenedFiles(broken, round(median(longer_sides)) if longer_sides else 0)


def _describe_findings(manifest: Manifest, task: TaskName, unreadable_files: Sequence[str], assumed: str) -> str:
    """Describe what was found: images, clients, classes, files that cannot be read, and what was assumed."""
    clients = np.unique(manifest.columns.get("client", []))
    client_text = "no clients"
    if len(clients):
        noun = "client" if len(clients) == 1 else "clients"
        client_text = f"{len(clients)} {noun} ({abbreviated(clients.tolist())})"
    lines = [f"{len(manifest.paths)} images, {client_text}, learning {task}"]
    if manifest.classes is not None:
        lines[0] += f": {len(manifest.classes)} ({abbreviated([str(name) for name in manifest.classes])})"
    if unreadable_files:
        noun = "file" if len(unreadable_files) == 1 else "files"
        lines.append(
            f"{len(unreadable_files)} {noun} cannot be read: {abbreviated(unreadable_files)}; "
            "`perada data inspect` explains them"
        )
    if len(clients) == 1:
        lines.append(
            "All images belong to one client; if there are several, name a folder above or below, or --layout."
        )
    lines.append(f"Assumed: {assumed}")
    return "\n".join(printable(line) for line in lines)


def _read_table(
    path: str,
    task: str,
    declared: dict[str, Any],
    encoding: str | None = None,
    decimal: Decimal | None = None,
) -> InferredSource:
    """Infer how a table is read, and check its files and labels. Declared options take precedence.

    Raises:
        ValueError: If the columns cannot be inferred, or a row is wrong.
    """
    options = table_options(path, task, encoding, decimal) | declared
    image_table = ImageTable(**options)
    manifest = image_table.read_manifest()
    inferred_task: TaskName = "classes"
    if "mask" in options:
        inferred_task = "masks"
        if "mask_values" not in declared:
            options |= infer_mask_values(manifest.masks or [])
    elif "numbers" in options:
        inferred_task = "numbers"
    elif "separator" in options or isinstance(options.get("label"), list):
        inferred_task = "labels"
    has_clients = image_table.client is not None or "client" in image_table.listing.columns
    return _describe_source("ImageTable", options, inferred_task, has_clients, manifest)


def _describe_source(
    class_name: str, options: dict[str, Any], task: TaskName, has_clients: bool, manifest: Manifest
) -> InferredSource:
    """Return how images are read, after a look at their files."""
    opened = _open_files(manifest)
    return InferredSource(
        class_name=class_name,
        options=options,
        task=task,
        num_images=len(manifest.paths),
        has_clients=has_clients,
        summary=_describe_findings(manifest, task, opened.unreadable_files, _describe_assumptions(options)),
        unreadable_files=opened.unreadable_files,
        longer_side=opened.longer_side,
    )


def _describe_assumptions(options: dict[str, Any]) -> str:
    """Describe the options that were inferred."""
    return ", ".join(f"{name}: {value}" for name, value in options.items())


def _read_folder(folder: str, task: str, declared: dict[str, Any], layout: str | None = None) -> InferredSource:
    """Infer how a folder is read: as images and masks, or as images in folders of classes. See :func:`_read_table`.

    Raises:
        ValueError: If its layout cannot be inferred, or the task needs a table.
    """
    if task in ("labels", "numbers"):
        raise ValueError(
            f"task={task!r} needs a table ({', '.join(TABLES)}) of the images with their {task}, but images={folder!r} "
            "is a folder; pass the table"
        )
    files = list_images(Path(folder))
    if layout is None and (task == "masks" or (not task and have_masks(files))):
        _check_level_of_masks(folder, files)
        # Reading the list also checks that each image has a mask.
        manifest = ImageMasks(folder).read_manifest()
        inferred_values = {} if "mask_values" in declared else infer_mask_values(manifest.masks or [])
        options = {"root": folder} | inferred_values | declared
        return _describe_source("ImageMasks", options, "masks", "client" in manifest.columns, manifest)
    if layout is None:
        if "classes" not in declared:
            reject_masks_in_image_folders(Path(folder), files)
        layout = propose_layout(files)
        if not layout:
            raise ValueError(_no_layout_message(folder, files))
        _check_level(folder, files, layout)
    # Reading the list also checks that the layout matches most images.
    layout_options = {"root": folder, "layout": layout} | declared
    manifest = Images(folder, layout=layout, classes=declared.get("classes")).read_manifest()
    return _describe_source("Images", layout_options, "classes", "{client}" in layout, manifest)


def _check_level_of_masks(folder: str, files: list[str]) -> None:
    """Reject a folder above that of the clients, which would all become one client.

    Args:
        folder: The folder that was named.
        files: Paths of the images and masks below it.
    """
    pairs = find_mask_folders(files)
    shared = folder_of_clients([pair.parent for pair in pairs], SPLITS.keys())
    if shared:
        clients = sorted({pair.parent[len(shared)] for pair in pairs})
        raise ValueError(
            f"images={folder!r} seems too high: all images and masks are in {'/'.join(shared)!r}, in folders for "
            f"{abbreviated(clients)}, which would be one client; use --images {Path(folder, *shared)}"
        )


def _check_level(folder: str, files: list[str], layout: str) -> None:
    """Reject a folder above that of the clients, which would all become one client.

    Args:
        folder: The folder that was named.
        files: Paths of the images below it.
        layout: Their guessed layout.
    """
    if "**" not in layout:
        return
    path = Path(folder)
    files_in_path = files
    while True:
        deep_folders = {file.split("/")[0] for file in files_in_path if file.count("/") > 2}
        if len(deep_folders) != 1:
            return
        top = deep_folders.pop()
        files_below = [file.removeprefix(f"{top}/") for file in files_in_path if file.startswith(f"{top}/")]
        layout_below = propose_layout(files_below)
        is_folder_of_clients = layout_below and folder_below(files_in_path, layout_below) == top
        path /= top
        if is_folder_of_clients:
            name = path.relative_to(folder).as_posix()
            raise ValueError(
                f"images={folder!r} seems too high: {len(files_below)} of {len(files)} images are in {name!r}, with "
                f"the layout {layout_below}; use --images {path}, or set --layout"
            )
        files_in_path = files_below


def _no_layout_message(images_path: str, files: list[str]) -> str:
    """Return why no layout was found for a folder of images, and the remedy."""
    if all("/" not in file for file in files):
        return (
            f"images={images_path!r} has {len(files)} images but no folders, so their classes are unknown; sort them "
            "into one folder per class (or client/class), or pass a table (.csv) that lists them"
        )
    return (
        f"images={images_path!r} has images such as {files[0]!r}, whose folder layout cannot be inferred; set "
        "--layout (docs/own_images.md), or pass a table (.csv) that lists them"
    )


def table_options(
    path: str, task: str = "", encoding: str | None = None, decimal: Decimal | None = None
) -> dict[str, Any]:
    """Infer the options with which :class:`.ImageTable` reads a table, from its header and rows.

    Args:
        path: File of the table.
        task: What is learnt from the labels, one of ``TASKS``; empty to infer it.
        encoding: Encoding of a text table; None for UTF-8.
        decimal: What separates the fraction of numbers; None for a point.

    Raises:
        ValueError: If no column holds the paths of images, or their labels.
    """
    columns, _ = read_table(Path(path), encoding=encoding)
    values = {name: column.tolist() for name, column in columns.items()}
    options: dict[str, Any] = {"table": path}
    if encoding is not None:
        options["encoding"] = encoding
    if decimal is not None:
        options["decimal"] = decimal
    path_column = _find_path_column(path, values)
    first_path = values[path_column][0]
    if not (Path(path).parent / first_path).is_file() and Path(first_path).is_file():
        # Paths begin where the command was started.
        options["folder"] = "."
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
    free_columns = [name for name in values if name not in columns_by_role.values()]
    free_values = {name: values[name] for name in free_columns}
    label_options = _label_options(free_values, task, decimal or ".")
    if label_options is None:
        value_kind = {"masks": "mask", "numbers": "number"}.get(task, "label")
        column_name = "mask" if task == "masks" else "label"
        comma_remedy = ""
        if decimal is None and _find_number_column(free_values, task, ","):
            comma_remedy = "add --decimal , if its numbers have decimal commas, or "
        raise ValueError(
            f"images={path!r}: the column of the {value_kind}s cannot be inferred from {', '.join(map(repr, values))}; "
            f"{comma_remedy}rename it to {column_name!r}"
        )
    label = label_options.get("label", "label")
    if decimal is None and isinstance(label, str) and _has_comma_measurements(free_values.get(label, [])):
        raise ValueError(
            f"images={path!r}: {label} has numbers with decimal commas, such as {free_values[label][0]!r}; add "
            "--decimal , to predict them"
        )
    return options | label_options


def _has_comma_measurements(cells: Sequence[Any]) -> bool:
    """Return whether a column holds measurements with decimal commas."""
    return holds_measurements([str(cell).strip() for cell in cells], ",")


def _label_options(values_of_columns: dict[str, list[Any]], task: str, decimal: Decimal = ".") -> dict[str, Any] | None:
    """Infer the options that name the labels; None if they cannot be inferred.

    Args:
        values_of_columns: Cells of the columns that have no other role.
        task: What is learnt from the labels, one of ``TASKS``; empty to infer it.
        decimal: What separates the fraction of numbers.
    """
    if task in ("", "masks"):
        mask = _find_mask_column(values_of_columns)
        if mask is not None:
            return {"mask": mask}
    numbers = _find_number_column(values_of_columns, task, decimal)
    if numbers is not None:
        return {"numbers": numbers}
    label_columns: str | list[str] | None = None
    if task not in ("numbers", "masks"):
        label_columns = _find_label_columns(values_of_columns, task)
    if label_columns is None:
        return None
    options: dict[str, Any] = {}
    if label_columns != "label":
        options["label"] = label_columns
    if isinstance(label_columns, list):
        cells = []
        for name in label_columns:
            cells += [cell.strip().lower() for cell in values_of_columns[name]]
        options |= _policies_of_unknown(cells)
    elif task != "classes" and all(isinstance(cell, str) for cell in values_of_columns[label_columns]):
        separator = guess_separator(values_of_columns[label_columns])
        if separator is not None:
            options["separator"] = separator
    return options


def _policies_of_unknown(cells: Sequence[str]) -> dict[str, str]:
    """Choose how unknown labels are read, from all cells of the label columns."""
    has_unknown = not UNKNOWN_CELLS.isdisjoint(cells)
    has_blank = "" in cells
    policies = {}
    if has_unknown and has_blank:
        # CheXpert has such columns: -1 is an uncertain finding, and a blank one that the report does not mention.
        policies["blank"] = "absent"
    if has_unknown or has_blank:
        # This policy invents no labels.
        policies["unknown"] = "ignore"
    return policies


def _find_common_column(role: str, column_names: list[str]) -> str | None:
    """Return the column whose name is common for a role; None if there is none."""
    by_normalized_name = {re.sub(r"[\s_-]+", "_", name.strip().lower()): name for name in column_names}
    for common_name in COMMON_COLUMNS[role]:
        if common_name in by_normalized_name:
            return by_normalized_name[common_name]
    return None


def _find_path_column(table: str, values_of_columns: dict[str, list[Any]]) -> str:
    """Return the column with the paths of images.

    Raises:
        ValueError: If there is none.
    """
    common = _find_common_column("path", list(values_of_columns))
    if common is not None:
        return common
    for name, column in values_of_columns.items():
        if isinstance(column[0], str) and column[0].lower().endswith(_EXTENSIONS):
            return name
    raise ValueError(
        f"images={table!r} has no column of image files among {', '.join(map(repr, values_of_columns))}; rename the "
        "column to 'path'"
    )


def _find_mask_column(values_of_columns: dict[str, list[Any]]) -> str | None:
    """Return the column of the files of masks; None if there is none."""
    name = _find_common_column("mask", list(values_of_columns))
    if name is None or not str(values_of_columns[name][0]).lower().endswith(_EXTENSIONS):
        return None
    return name


def _find_number_column(values_of_columns: dict[str, list[Any]], task: str, decimal: Decimal) -> str | None:
    """Return the column of numbers to predict; None if there is none, or there are classes and no task is set."""
    if task not in ("", "numbers"):
        return None
    cells = {name: [str(cell).strip() for cell in column] for name, column in values_of_columns.items()}
    common = _find_common_column("label", list(values_of_columns))
    if common is not None:
        is_target = holds_measurements(cells[common], decimal)
        if task == "numbers":
            is_target = all(is_number(cell, decimal) for cell in cells[common])
        return common if is_target else None
    if not task and _find_label_columns(values_of_columns, task) is not None:
        return None
    numeric = [name for name, column in cells.items() if all(is_number(cell, decimal) for cell in column)]
    measured = [name for name in numeric if holds_measurements(cells[name], decimal)]
    # Whole numbers may be identities of images, so numbers with a fraction come first.
    candidates = measured or (numeric if task else [])
    return candidates[0] if len(candidates) == 1 else None


def _find_label_columns(values_of_columns: dict[str, list[Any]], task: str) -> str | list[str] | None:
    """Return the column of the labels, or the columns of zeros and ones; None if they cannot be guessed."""
    common = _find_common_column("label", list(values_of_columns))
    if common is not None:
        return common
    binary: list[str] = []
    label_columns: list[str] = []
    for name, column in values_of_columns.items():
        cells = {str(cell).strip().lower() for cell in column}
        if _is_binary(cells):
            binary.append(name)
        # A column that has another value in almost every row, such as a number or a date, is no class.
        if 2 * len({str(cell) for cell in column}) <= len(column):
            label_columns.append(name)
    if len(binary) > 1 and task != "classes":
        return binary
    if len(label_columns) == 1 and task != "labels":
        return label_columns[0]
    return None


def _is_binary(cells: set[str]) -> bool:
    """Return whether the different cells of a column are zeros and ones, some of which may be unknown."""
    known_cells = cells - UNKNOWN_CELLS - {""}
    return bool(known_cells) and known_cells <= BINARY
