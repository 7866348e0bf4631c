# SPDX-License-Identifier: Apache-2.0
"""Recipes as the parties of a deployment read them: with a site's own data, or without any client's."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.loggers import Logger
from torch.utils.data import Dataset

import perada.data
from perada.cli.parser import full_names
from perada.cli.recipes import whole
from perada.cli.runs import PeradaCLI
from perada.core.checks import check_whole
from perada.core.files import Scratch, writing
from perada.core.text import some
from perada.core.yaml_files import parse_yaml
from perada.data import FederatedData, FederatedDataModule
from perada.data.inspection import without_broken
from perada.data.sets.manifest import OwnImages
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.site.client import single_client_data
from perada.deploy.site.file import SiteFile
from perada.deploy.site.split import divided_by, remembered

OF_ALL = "public public_fraction validation_fraction train_limit test_limit public_limit".split()
OF_ALL += "dataset partition seed shifts shifts_when".split()
"""Options of a recipe's data that say what all clients and the server have."""
DRAWN_BY = ("seed", "train_limit", "test_limit")
"""Options by which a dataset is divided among clients: a site that names dataset and partition has the recipe's."""
SHARED_BY_IMAGES = ("size", "gray", "full_scale", "test_share", "seed")
"""Options of a recipe's image set of one's own by which a site, too, reads its files and chooses its test images."""
SHARED_BY_TABLES = ("path", "label", "split", "separator", "group")
"""Likewise, where both the recipe and the site have a table."""
NOWHERE = {"class_path": "IID", "init_args": {"num_clients": 1}}
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "devices=1", "num_nodes=1")


def site_recipe(path: Path, given: SiteFile) -> Recipe:
    """A recipe with the data of a site in the place of its own, and its own classes by their names.

    Raises:
        ValueError: If the file is not the one that the site approved, which is looked at before anything that it says;
            or the site's data have a class that the recipe does not name, or no such client.
    """
    text, approved = path.read_bytes(), given.recipes.get(path.absolute())
    if approved is None:
        raise ValueError(f"{str(path)!r} is not among the site's recipes; list it there, once you have read it")
    sha256 = hashlib.sha256(text).hexdigest()
    if approved.sha256 not in ("", sha256):
        raise ValueError(
            f"{str(path)!r} has the SHA-256 {sha256}, and the site approves {approved.sha256}: nothing of it was run. "
            "Ask for the recipe that was approved; or read this one, and write its sha256 into the site's file"
        )
    content = _content(text, str(path))
    said = content.get("data") or {}
    kept = {key: value for key, value in said.items() if key not in OF_ALL}
    named, place = _named_classes(said.get("dataset")), given.data.get("client", 0)
    own = {key: value for key, value in given.data.items() if key != "client"}
    if "dataset" in own:
        # The site is a client of the recipe's own partition, which is drawn from these options.
        own = {key: said[key] for key in DRAWN_BY if key in said} | own
    else:
        dataset = _images_of_site(own, said, named)
        own = {"dataset": dataset, "partition": NOWHERE}
    cli = _parsed(content | {"data": kept | own}, given.accelerator)
    division = cli.datamodule.division
    division.download()
    if isinstance(division.dataset, OwnImages):
        division.dataset.known = remembered(given.state).get(divided_by(division.dataset), {})
    whole_data = division.share_out()
    check_whole("data: client", place, 0, most=len(whole_data.train) - 1, hint="of the partition's clients")
    data = single_client_data(whole_data, place)
    if named is not None and data.classes is not None and tuple(data.classes) != named:
        raise ValueError(
            f"the site's classes are {some(data.classes)}, and the recipe's {some(named)}; give the site's data as a "
            "folder (root) or a table, whose classes are taken by their names"
        )
    options = {key: value for key, value in vars(cli.config["data"]).items() if key not in (*OF_ALL, "data")}
    seed = own.get("seed", said.get("seed", cli.config["data"].seed))
    served = FederatedDataModule(data, **options, seed=seed)
    loop = cli.loop
    algorithm = loop.algorithm
    adds_up_logits = loop.secure_sums is not None and algorithm.distills and not algorithm.own_teachers
    private = loop.privacy is not None or loop.client_privacy is not None
    if not (adds_up_logits or private):
        return Recipe(text, cli.model, loop, cli.trainer, served)
    whole_recipe = _parsed(content, given.accelerator).datamodule
    public = _compared_images(whole_recipe) if private else _public_images(whole_recipe)
    return Recipe(text, cli.model, loop, cli.trainer, served, public, whole_recipe.prepare)


def _compared_images(data: FederatedDataModule) -> Dataset[Any] | None:
    """The public set of a private recipe, which a site compares with its own images.

    Raises:
        ValueError: If the recipe takes the public set from the clients' images.
        FileNotFoundError: If the set is not at the site.
    """
    for option in ("public_fraction", "validation_fraction"):
        share = getattr(data.division, option)
        if share:
            raise ValueError(
                f"privacy: {option}={share} would hand a share of the sites' own images to the server; approve a "
                "recipe without it"
            )
    try:
        return _public_images(data)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"privacy: the recipe's public set is not at this site, so that nobody can see whether it holds the site's "
            f"own images ({error}); put it where the recipe says, or approve a recipe without a public set"
        ) from error


def _images_of_site(own: dict[str, Any], said: dict[str, Any], classes: Sequence[str] | None) -> dict[str, Any]:
    """A site's folder or table as an image set that reads, and divides, its files as the recipe's set does.

    Args:
        own: What the site says of its images.
        said: The section ``data`` of the recipe.
        classes: Their names, if the recipe gives them.
    """
    kind, options_of_recipe = _class_of(said.get("dataset"))
    site_kind = "ImageTable" if "table" in own else "Images"
    shared: tuple[str, ...] = ()
    if isinstance(set_class := getattr(perada.data, kind, None), type) and issubclass(set_class, OwnImages):
        shared = SHARED_BY_IMAGES + (SHARED_BY_TABLES if kind == site_kind == "ImageTable" else ())
    options = {key: options_of_recipe[key] for key in shared if key in options_of_recipe}
    if not shared and said.get("image_size"):  # a set of other images, which says nothing of files
        options["size"] = said["image_size"]
    options |= own
    if classes is not None:
        options["classes"] = list(classes)
    return {"class_path": site_kind, "init_args": options}


def server_recipe(name: str, folder: Path | None = None) -> ServerRecipe:
    """A recipe as a server has it, with its loggers if there is a ``folder``, in which those write.

    Raises:
        ValueError: If it does not say how many classes there are, or the public set would be clients' images.
    """
    text = whole(name).encode()
    content = _content(text, name)
    named = _named_classes((content.get("data") or {}).get("dataset"))
    cli = _parsed(content, "auto")
    data, division = cli.config["data"], cli.datamodule.division
    for option in ("public_fraction", "validation_fraction"):
        if data[option]:
            raise ValueError(
                f"{option}={data[option]} cannot be deployed: the server has none of the clients' images; give public, "
                "as the recipe `sites` does (perada cp sites federation.yaml)"
            )
    classes = len(named or ()) or data.num_classes or cli.model.num_classes
    if not classes:
        with suppress(FileNotFoundError):  # a set of one's own knows its classes from files, which are at the sites
            classes = division.dataset.num_classes
    if not classes:
        raise ValueError(
            "the recipe does not say which classes there are, and no client's images are read here; name them among "
            "the options of its image set, as in classes: [benign, malignant], or give data.num_classes. The recipe "
            "`sites` shows how (perada cp sites federation.yaml)"
        )
    public = _public_images(cli.datamodule)
    multilabel = bool(getattr(division.dataset, "multilabel", False))
    loggers = [] if folder is None else _loggers(content, folder)
    parsed = cli.model, cli.loop, cli.trainer, cli.datamodule
    return ServerRecipe(text, *parsed, public, None, classes, multilabel, named, loggers)


def _public_images(data: FederatedDataModule) -> Dataset[Any] | None:
    """The recipe's public images that can be read, as in a simulation: ``on_broken`` refuses or skips the others."""
    division = data.division
    if division is None or division.public is None:
        return None
    public = division.public_images(division.dataset, [])
    return without_broken(FederatedData([], public=public), data.on_broken, data.num_workers).public


def _loggers(content: dict[str, Any], folder: Path) -> list[Logger]:
    """The loggers of a recipe but for CSV files, which the run's folder has in any case; paths begin at the folder."""
    given = (content.get("trainer") or {}).get("logger")
    entries = given if isinstance(given, list) else [given]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--logger", type=Logger)
    found = []
    for entry in (entry for entry in entries if not isinstance(entry, bool | None)):
        kind, options = _class_of(entry)
        if kind != "CSVLogger":
            options = {**options, "save_dir": str(folder / (options.get("save_dir") or "."))}
            logger = {"class_path": entry if isinstance(entry, str) else entry["class_path"], "init_args": options}
            found.append(parser.instantiate_classes(parser.parse_object({"logger": logger})).logger)
    return found


def _class_of(entry: object) -> tuple[str, dict[str, Any]]:
    """The name of a class that a recipe names, without its module, and the options that it gives it."""
    given: dict[str, Any] = entry if isinstance(entry, dict) else {"class_path": entry}
    return str(given.get("class_path")).rpartition(".")[2], given.get("init_args") or {}


def _named_classes(dataset: object) -> tuple[str, ...] | None:
    """The classes that a recipe names: those that it gives its image set, or those that every copy of the set has."""
    kind, options = _class_of(dataset)
    if kind == "Scanners":  # whose classes are those of the set that they see
        return _named_classes(options.get("dataset"))
    names = options.get("classes") or getattr(getattr(perada.data, kind, None), "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) or None


def _content(text: bytes, source: str) -> dict[str, Any]:
    """What a recipe says, by full names; ``source`` is what messages call it.

    Raises:
        ValueError: If it names a file with options: a site approves the text, and what a file says may change.
    """
    content = full_names(parse_yaml(text, source))
    if (content.get("trainer") or {}).get("callbacks"):
        raise ValueError("callbacks cannot be deployed: no Trainer is there to call them; leave them out")
    data = content.get("data")
    own = {key: value for key, value in data.items() if key not in OF_ALL} if isinstance(data, dict) else data
    for option, word in _words(content | {"data": own}):
        try:
            with Path(word).expanduser().open("rb") as file:
                read = isinstance(yaml.safe_load(file), dict)
        except (OSError, ValueError, yaml.YAMLError):  # no file, no path, no text
            continue
        if read:  # for the option's value
            raise ValueError(
                f"the recipe names the file {word!r} for {option}, which its digest does not cover; write what the "
                "file says into the recipe"
            )
    return content


def _words(content: object) -> Iterator[tuple[str, str]]:
    """All strings of a recipe, and where they stand; what YAML's aliases repeat, once."""
    left, seen = [("", content)], set[int]()
    while left:
        option, value = left.pop()
        if isinstance(value, str):
            yield option, value
        elif isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            below = value.items() if isinstance(value, dict) else ((None, one) for one in value)
            left += [(option if key is None else f"{option}.{key}".removeprefix("."), one) for key, one in below]


def _parsed(content: dict[str, Any], accelerator: str) -> PeradaCLI:
    content = {key: value for key, value in content.items() if key not in ("ckpt_path", "weights_only")}
    content["trainer"] = {key: value for key, value in (content.get("trainer") or {}).items() if key != "logger"}
    if accelerator != "auto":
        content["trainer"]["accelerator"] = accelerator
    with Scratch() as folder:  # relative paths of files with options begin there
        file = folder / "recipe.yaml"
        with writing(file):
            file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return PeradaCLI(["--config", str(file), *(f"--trainer.{option}" for option in QUIET)], run=False)
