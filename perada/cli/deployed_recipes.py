# SPDX-License-Identifier: Apache-2.0
"""Builds recipes for the parties of a deployment: with a site's own data, or without any client's."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.loggers import Logger
from torch.utils.data import Dataset

import perada.data
from perada.cli.foreign_classes import foreign_classes
from perada.cli.parser import resolve_names
from perada.cli.recipes import recipe_text
from perada.cli.runs import PeradaCLI
from perada.core.checks import check_integer
from perada.core.text import abbreviated, quoted
from perada.data import FederatedData, FederatedDataModule
from perada.data.broken_images import without_broken
from perada.data.medical.reading import MedicalReading
from perada.data.partitions.division import Division
from perada.data.sets.manifest import OwnImages
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.site.client import single_client_data
from perada.deploy.site.file import SiteFile
from perada.deploy.site.split import load_splits, split_key
from perada.system.files import Scratch, writing
from perada.system.yaml_files import iterate_strings, parse_yaml
from perada.tasks import Classification, Task

SHARED_DATA_OPTIONS = (
    "public",
    "public_fraction",
    "validation_fraction",
    "train_limit",
    "test_limit",
    "public_limit",
    "dataset",
    "partition",
    "seed",
    "shifts",
    "shifts_when",
)
"""Options of a recipe's data that describe the data of all clients and of the server."""
PARTITION_OPTIONS = ("seed", "train_limit", "test_limit")
"""Options that determine how a data set is partitioned. They apply to sites that are clients of the recipe's data."""
SHARED_MEDICAL_OPTIONS = ("window", "frames", "axis", "foreground_only", "dicom_group")
"""Options of a recipe's image set that determine which frames of medical images are read, and how."""
SHARED_IMAGE_OPTIONS = ("size", "gray", "full_scale", "test_share", "seed", *SHARED_MEDICAL_OPTIONS)
"""Options of a recipe's image set that also apply to a site's: how files are read, and test images selected."""
SHARED_TABLE_OPTIONS = ("path", "uid", "label", "split", "separator", "unknown", "blank", "numbers", "group", "mask")
"""The same, if both the recipe and the site have a table."""
MASK_OPTIONS = ("mask_values",)
"""The same, if the recipe's images have masks."""
MASK_FOLDER_OPTIONS = ("images", "masks")
"""The same, if both the recipe and the site have folders of images and of masks."""
SINGLE_CLIENT = {"class_path": "IID", "init_args": {"num_clients": 1}}
"""Partition of a site's dataset, all of whose images belong to the site."""
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "devices=1", "num_nodes=1")
"""Trainer options of both parties."""


def site_recipe(path: Path, site_file: SiteFile) -> Recipe:
    """Build a recipe with the data of a site in place of the recipe's.

    Args:
        path: File of the recipe.
        site_file: Content of the site's file.

    Raises:
        ValueError: If the file is not the one that the site approved, which is checked before its content is read; or
            the site's data have a class that the recipe does not name, or no such client.
    """
    text = path.read_bytes()
    check_approved(path, text, site_file)
    content = _parse_recipe(text, str(path))
    _check_unapproved_classes(path, text, content, site_file)
    built = _build_with_site_data(content, site_file)
    cli = built.cli
    recipe = Recipe(text, cli.model, cli.loop, cli.trainer, built.data)

    algorithm = cli.loop.algorithm
    has_teachers_at_sites = algorithm.uses_distillation and not algorithm.builds_teachers
    adds_up_logits = cli.loop.secure_sums is not None and has_teachers_at_sites
    is_private = cli.loop.privacy is not None or cli.loop.client_privacy is not None
    if adds_up_logits or is_private:
        # The public images are those of the recipe as it was written, with its data set and partition.
        original = _build_cli(content, site_file.accelerator).datamodule
        recipe.public = _comparable_images(original) if is_private else _public_images(original)
        recipe.prepare = original.prepare
    return recipe


class SiteObjects(NamedTuple):
    """The objects of a recipe with the data of a site in place of the recipe's.

    Attributes:
        cli: The objects; its own data module has the site's image set.
        data: The site's images, as those of a single client.
    """

    cli: PeradaCLI
    data: FederatedDataModule


def _build_with_site_data(content: dict[str, Any], site_file: SiteFile) -> SiteObjects:
    """Build the objects of a recipe with the data of a site.

    Args:
        content: Content of the recipe, with names resolved.
        site_file: Content of the site's file.

    Raises:
        ValueError: If the site's data have a class that the recipe does not name, or no such client.
    """
    recipe_data = content.get("data") or {}
    class_names = class_names_of(recipe_data.get("dataset"))
    site_data = _site_data_options(site_file, recipe_data, class_names)
    own_options = {key: value for key, value in recipe_data.items() if key not in SHARED_DATA_OPTIONS}
    cli = _build_cli(content | {"data": own_options | site_data}, site_file.accelerator)

    data = _client_data(cli.datamodule.division, site_file, class_names)
    parsed_data = cli.config["data"]
    options = {key: value for key, value in vars(parsed_data).items() if key not in (*SHARED_DATA_OPTIONS, "data")}
    # The parser has only the class and the arguments of the task.
    options["task"] = cli.datamodule.chosen_task
    seed = site_data.get("seed", recipe_data.get("seed", parsed_data.seed))
    return SiteObjects(cli, FederatedDataModule(data, **options, seed=seed))


def check_classes_of_job(path: Path, text: bytes, site_file: SiteFile) -> None:
    """Check that the recipe of a job that is not approved names only classes of perada, before anything is imported.

    Args:
        path: File of the recipe.
        text: Its bytes.
        site_file: Content of the site's file.

    Raises:
        ValueError: If it names others.
    """
    _check_unapproved_classes(path, text, _parse_recipe(text, str(path)), site_file)


def evaluated_site(path: Path, content: dict[str, Any], site_file: SiteFile) -> SiteObjects:
    """Build the images of a site for an evaluation, with the network of weights.

    Args:
        path: File of the recipe, which is approved.
        content: Its sections on data and network.
        site_file: Content of the site's file.

    Raises:
        ValueError: If the site's data do not fit.
    """
    return _build_with_site_data(_parse_recipe(yaml.safe_dump(content).encode(), str(path)), site_file)


class PredictedClasses(NamedTuple):
    """What the models of a recipe predict.

    Attributes:
        task: The task.
        names: Names of the classes or numbers, or their positions.
    """

    task: Task
    names: tuple[str, ...]


def evaluated_classes(content: dict[str, Any], source: str) -> PredictedClasses:
    """Return what the models of an evaluation predict, from its recipe alone.

    Args:
        content: Sections on data and network.
        source: Name of the recipe in messages.

    Raises:
        ValueError: If the recipe does not name the classes.
    """
    resolved = _parse_recipe(yaml.safe_dump(content).encode(), source)
    names = class_names_of((resolved.get("data") or {}).get("dataset"))
    # Where images are, and how they are divided, is known at the sites only, so a recipe may leave it out.
    data = {"partition": SINGLE_CLIENT} | (resolved.get("data") or {})
    dataset_class, options = _split_class_entry(data.get("dataset"))
    if _reads_own_images(dataset_class):
        path_option = "table" if dataset_class == "ImageTable" else "root"
        data["dataset"] = {"class_path": dataset_class, "init_args": {path_option: "."} | options}
    cli = _build_cli(resolved | {"data": data}, "cpu")
    num_classes = _count_classes(cli, names)
    dataset = cli.datamodule.division.dataset
    task = cli.datamodule.chosen_task or getattr(dataset, "task", None) or Classification()
    return PredictedClasses(task, names or tuple(map(str, range(num_classes))))


def _client_data(division: Division, site_file: SiteFile, class_names: tuple[str, ...] | None) -> FederatedData:
    """Return the images of the site, which is one of the clients of a division.

    Args:
        division: Division of the recipe's or the site's images among clients.
        site_file: Content of the site's file.
        class_names: Names of the recipe's classes; None if it has none.

    Raises:
        ValueError: If there is no such client, or if the site's classes are not the recipe's.
    """
    division.download()
    if isinstance(division.dataset, OwnImages):
        # The split of former starts must stay the same when images are added.
        division.dataset.fixed_splits = load_splits(site_file.state).get(split_key(division.dataset), {})
    all_clients = division.share_out()
    index = site_file.data.get("client", 0)
    num_clients = len(all_clients.train)
    check_integer("data: client", index, 0, le=num_clients - 1, hint="it is a client's number in the partition")
    data = single_client_data(all_clients, index)
    if class_names is not None and data.classes is not None and tuple(data.classes) != class_names:
        raise ValueError(
            f"the site's classes are {abbreviated(data.classes)}, but the recipe's are {abbreviated(class_names)}; "
            "pass the site's data as a folder (root) or a table, whose classes are matched by name"
        )
    return data


def check_approved(path: Path, text: bytes, site_file: SiteFile) -> None:
    """Check that a site has approved the content of a recipe's file.

    Raises:
        ValueError: If it has not.
    """
    approved = site_file.recipes.get(path.absolute())
    if approved is None:
        raise ValueError(f"{str(path)!r} is not among the site's recipes; list it there after reading it")
    sha256 = hashlib.sha256(text).hexdigest()
    if approved.sha256 not in ("", sha256):
        raise ValueError(
            f"{str(path)!r} has the SHA-256 {sha256}, but the site approves {approved.sha256}: nothing in it was run; "
            "ask for the approved recipe, or read this one and add its sha256 to the site's file"
        )


def _check_unapproved_classes(path: Path, text: bytes, recipe_content: dict[str, Any], site_file: SiteFile) -> None:
    """Check that a recipe that is not approved names only classes of perada, before anything is imported.

    Args:
        path: File of the recipe.
        text: Its bytes.
        recipe_content: Its content.
        site_file: Content of the site's file.

    Raises:
        ValueError: If it names others.
    """
    is_approved = bool(site_file.recipes[path.absolute()].sha256)
    classes = [] if is_approved else foreign_classes(recipe_content)
    if classes:
        raise ValueError(
            f"{str(path)!r} is not approved and names {quoted(classes)}, which is not part of perada and was not "
            f"imported; read this code and the recipe, and add sha256: {hashlib.sha256(text).hexdigest()} to the "
            "site's file if you trust them"
        )


def _site_data_options(
    site_file: SiteFile, recipe_data: dict[str, Any], class_names: Sequence[str] | None
) -> dict[str, Any]:
    """Return the data module options that replace those that the recipe has for all clients.

    Args:
        site_file: Content of the site's file.
        recipe_data: Section ``data`` of the recipe.
        class_names: Names of the classes, if the recipe has them.
    """
    site_data = {key: value for key, value in site_file.data.items() if key != "client"}
    if "dataset" in site_data:
        # The site is a client of the recipe's own partition, which is drawn from these options.
        drawn = {key: recipe_data[key] for key in PARTITION_OPTIONS if key in recipe_data}
        return drawn | site_data
    images = site_images(site_file.name, site_data, recipe_data, class_names)
    return {"dataset": images, "partition": SINGLE_CLIENT}


def site_images(
    site_name: str, site_data: dict[str, Any], recipe_data: dict[str, Any], class_names: Sequence[str] | None
) -> dict[str, Any]:
    """Return a site's folder or table as an image set that reads and splits its files as the recipe's set does.

    Args:
        site_name: Name of the site, by which the recipe may have a window.
        site_data: Options of the site's images.
        recipe_data: Section ``data`` of the recipe.
        class_names: Names of the classes, if the recipe has them.
    """
    recipe_class, recipe_options = _split_class_entry(recipe_data.get("dataset"))
    if "table" in site_data:
        site_class = "ImageTable"
    elif recipe_class == "ImageMasks" or recipe_options.get("mask"):
        site_class = "ImageMasks"
    else:
        site_class = "Images"
    shared_options: tuple[str, ...] = ()
    if _reads_own_images(recipe_class):
        shared_options = SHARED_IMAGE_OPTIONS
        if recipe_class == site_class == "ImageTable":
            shared_options += SHARED_TABLE_OPTIONS
        if recipe_class == site_class == "ImageMasks":
            shared_options += MASK_FOLDER_OPTIONS
        if site_class in ("ImageTable", "ImageMasks"):
            shared_options += MASK_OPTIONS
    options = {key: recipe_options[key] for key in shared_options if key in recipe_options}
    if not shared_options and recipe_data.get("image_size"):
        # The recipe's set is of other images, and has no options of files.
        options["size"] = recipe_data["image_size"]
    windows = options.get("window")
    if isinstance(windows, dict) and "window" not in site_data:
        options["window"] = MedicalReading.checked(windows).of_client(site_name).record()["window"]
    options |= site_data
    if class_names is not None:
        options["classes"] = list(class_names)
    return {"class_path": site_class, "init_args": options}


def _reads_own_images(class_name: str) -> bool:
    """Return whether a class of perada's image sets reads a user's files."""
    dataset_class = getattr(perada.data, class_name, None)
    return isinstance(dataset_class, type) and issubclass(dataset_class, OwnImages)


def _comparable_images(data: FederatedDataModule) -> Dataset[Any] | None:
    """Return the public set of a private recipe, which a site compares with its own images.

    Raises:
        ValueError: If the recipe takes the public set from the clients' images.
        FileNotFoundError: If the site does not have the set.
    """
    for option in ("public_fraction", "validation_fraction"):
        fraction = getattr(data.division, option)
        if fraction:
            raise ValueError(
                f"privacy: {option}={fraction} would hand a share of the sites' own images to the server; approve a "
                f"recipe without {option}"
            )
    try:
        return _public_images(data)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "privacy: the recipe's public set is missing at this site, so it cannot be checked for the site's own "
            f"images ({error}); put it at the path in the recipe, or approve a recipe without a public set"
        ) from error


def server_recipe(name: str, folder: Path | None = None) -> ServerRecipe:
    """Build a recipe for the server.

    Args:
        name: Name of the recipe.
        folder: Folder in which the recipe's loggers write; None for no loggers.

    Raises:
        ValueError: If the recipe does not have the number of classes, or the public set would be clients' images.
    """
    text = recipe_text(name).encode()
    content = _parse_recipe(text, name)
    class_names = class_names_of((content.get("data") or {}).get("dataset"))
    cli = _build_cli(content, "auto")
    data_options = cli.config["data"]
    for option in ("public_fraction", "validation_fraction"):
        if data_options[option]:
            raise ValueError(
                f"{option}={data_options[option]} cannot be deployed: the server has none of the clients' images; set "
                "data.public, as in the recipe `sites` (perada cp sites federation.yaml)"
            )
    dataset = cli.datamodule.division.dataset
    num_classes = _count_classes(cli, class_names)
    return ServerRecipe(
        text,
        cli.model,
        cli.loop,
        cli.trainer,
        cli.datamodule,
        public=_public_images(cli.datamodule),
        num_classes=num_classes,
        task=cli.datamodule.chosen_task or getattr(dataset, "task", None) or Classification(),
        classes=class_names,
        loggers=[] if folder is None else _build_loggers(content, folder),
    )


def _count_classes(cli: PeradaCLI, class_names: Sequence[str] | None) -> int:
    """Return the number of classes of a recipe at the server.

    Args:
        cli: The objects of the recipe.
        class_names: Names of the classes; None if they are unknown.

    Raises:
        ValueError: If neither the recipe nor its image set has it.
    """
    num_classes: int = len(class_names or ()) or cli.config["data"].num_classes or cli.model.num_classes
    if not num_classes:
        # A user's own image set reads its classes from files, which are at the sites.
        with suppress(FileNotFoundError):
            num_classes = cli.datamodule.division.dataset.num_classes
    if not num_classes:
        raise ValueError(
            "the recipe does not specify the classes, and no client's images are read here; list them in the options "
            "of its image set, as in classes: [benign, malignant], or set data.num_classes, as in the recipe `sites` "
            "(perada cp sites federation.yaml)"
        )
    return num_classes


def _public_images(data: FederatedDataModule) -> Dataset[Any] | None:
    """Return the recipe's readable public images, like a simulation (``on_broken``)."""
    division = data.division
    if division is None or division.public is None:
        return None
    public = division.public_images(division.dataset, [])
    return without_broken(FederatedData([], public=public), data.on_broken, data.num_workers).public


def _build_loggers(recipe_content: dict[str, Any], folder: Path) -> list[Logger]:
    """Build the loggers of a recipe, with paths relative to a folder.

    CSV loggers are left out: the run's folder has ``metrics.csv`` in any case.
    """
    section = (recipe_content.get("trainer") or {}).get("logger")
    entries = section if isinstance(section, list) else [section]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--logger", type=Logger)
    loggers = []
    for entry in entries:
        if isinstance(entry, bool | None):
            # The entry is no class, such as `logger: false`.
            continue
        name, options = _split_class_entry(entry)
        if name == "CSVLogger":
            continue
        save_dir = folder / (options.get("save_dir") or ".")
        class_path = entry if isinstance(entry, str) else entry["class_path"]
        config = {"class_path": class_path, "init_args": options | {"save_dir": str(save_dir)}}
        loggers.append(parser.instantiate_classes(parser.parse_object({"logger": config})).logger)
    return loggers


def _split_class_entry(entry: object) -> tuple[str, dict[str, Any]]:
    """Return the name of a class in a recipe, without its module, and its options."""
    section: dict[str, Any] = entry if isinstance(entry, dict) else {"class_path": entry}
    _, _, name = str(section.get("class_path")).rpartition(".")
    return name, section.get("init_args") or {}


def class_names_of(dataset: object) -> tuple[str, ...] | None:
    """Return the names of the classes of a recipe's data set; None if they are only known from its files."""
    name, options = _split_class_entry(dataset)
    if name == "Scanners":
        # Scanners are a view of another set, with the same classes.
        return class_names_of(options.get("dataset"))
    names = options.get("classes")
    if not names:
        # Built-in sets have the same classes in every copy.
        names = getattr(getattr(perada.data, name, None), "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        return None
    return tuple(names) or None


def _parse_recipe(text: bytes, source: str) -> dict[str, Any]:
    """Parse a recipe, replacing names by classes.

    Args:
        text: Content of its file.
        source: Name of the file in messages.

    Raises:
        ValueError: If it names a file with options: a site approves the text, and such a file may change.
    """
    content = resolve_names(parse_yaml(text, source))
    if (content.get("trainer") or {}).get("callbacks"):
        raise ValueError("callbacks cannot be deployed: there is no Trainer to call them; leave callbacks out")
    data = content.get("data")
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in SHARED_DATA_OPTIONS}
    for option, word in iterate_strings(content | {"data": data}):
        if _is_options_file(word):
            raise ValueError(
                f"the recipe names the file {word!r} for {option}, which its digest does not cover; write the file's "
                "content into the recipe"
            )
    return content


def _is_options_file(word: str) -> bool:
    """Return whether a value names a file that jsonargparse would read options from."""
    try:
        with Path(word).expanduser().open("rb") as file:
            return isinstance(yaml.safe_load(file), dict)
    except (OSError, ValueError, yaml.YAMLError):
        # There is no such file, the value cannot be a path, or the file is not YAML.
        return False


def _build_cli(recipe_content: dict[str, Any], accelerator: str) -> PeradaCLI:
    """Build the objects of a recipe on one device, without its loggers."""
    recipe_content = {key: value for key, value in recipe_content.items() if key not in ("ckpt_path", "weights_only")}
    trainer = {key: value for key, value in (recipe_content.get("trainer") or {}).items() if key != "logger"}
    if accelerator != "auto":
        trainer["accelerator"] = accelerator
    recipe_content["trainer"] = trainer
    # The recipe gets a folder of its own, since relative paths of files with options begin where the recipe is.
    with Scratch() as folder:
        file = folder / "recipe.yaml"
        with writing(file):
            file.write_text(yaml.safe_dump(recipe_content, sort_keys=False), encoding="utf-8")
        overrides = [f"--trainer.{option}" for option in QUIET]
        return PeradaCLI(["--config", str(file), *overrides], run=False)
