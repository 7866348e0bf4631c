# SPDX-License-Identifier: Apache-2.0
"""The parties of a deployment as recipes and files describe them: a site's worker, and the server."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import yaml
from torch.utils.data import Dataset

from perada.cli.keys import full_names
from perada.cli.runs import PeradaCLI, make_cli
from perada.cli.words import whole
from perada.data import FederatedDataModule
from perada.data.one_client import only
from perada.deploy.asking import Terms
from perada.deploy.client import Client
from perada.deploy.coordinator import Coordinator
from perada.deploy.recipe import Recipe
from perada.deploy.site_file import SiteFile
from perada.deploy.state import Book
from perada.deploy.transport import Transport
from perada.deploy.worker import SiteWorker

OF_ALL: tuple[str, ...] = (
    "public",
    "public_fraction",
    "validation_fraction",
    "train_limit",
    "test_limit",
    "public_limit",
)
OF_ALL += ("dataset", "partition", "seed", "shifts", "shifts_when")
"""Options of a recipe's data that say what all clients and the server have."""
NOWHERE = {"class_path": "IID", "init_args": {"num_clients": 1}}
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "devices=1", "num_nodes=1")


def worker_of(given: SiteFile) -> SiteWorker:
    """The worker of a site.

    Raises:
        ValueError: If a recipe is not the one that was approved, or cannot be used with the site's data.
    """
    clients = {}
    for path, approved in given.recipes.items():
        client = Client(site_recipe(path, given), given.max_epsilon)
        if client.recipe.digest != approved:
            raise ValueError(
                f"{str(path)!r} has the digest {client.recipe.digest}, and the site approves {approved or 'none'}; "
                "`perada deploy check` shows what it would do; to approve it, write the digest into the site's file"
            )
        clients[approved] = client
    log = logging.getLogger(f"perada.site.{given.name}")
    return SiteWorker(Book(given.state), clients, given.may_send, given.max_rounds, log)


def make_coordinator(name: str, transport: Transport, folder: Path, terms: Terms, resume: bool = False) -> Coordinator:
    """The server of a recipe that is named as `perada fit` names it."""
    recipe, public, classes, multilabel = server_recipe(name)
    options: dict[str, Any] = {"public": public, "num_classes": classes, "multilabel": multilabel, "resume": resume}
    return Coordinator(recipe, transport, folder, terms, **options)


def site_recipe(path: Path, given: SiteFile) -> Recipe:
    """A recipe with the data of a site in the place of its own."""
    text = path.read_bytes()
    content = full_names(yaml.safe_load(text))
    kept = {key: value for key, value in (content.get("data") or {}).items() if key not in OF_ALL}
    own, place = dict(given.data), int(given.data.get("client", 0))
    own.pop("client", None)
    if "dataset" not in own:
        size = {"size": kept["image_size"]} if kept.get("image_size") else {}
        kind = "ImageTable" if "table" in own else "Images"
        own = {"dataset": {"class_path": kind, "init_args": size | own}, "partition": NOWHERE}
    cli = _parsed(content | {"data": kept | own}, given.accelerator)
    division = cli.datamodule._division
    division.download()
    data = only(division.share_out()[0], place)
    options = {key: value for key, value in vars(cli.config["data"]).items() if key not in (*OF_ALL, "data")}
    served = FederatedDataModule(data, **options, seed=cli.config["data"].seed)
    return Recipe(text, cli.model, cli.loop, cli.trainer, served)


def server_recipe(name: str) -> tuple[Recipe, Dataset[Any] | None, int, bool]:
    """A recipe as a server has it: no client's image is read.

    Returns:
        The recipe, its public set, the number of classes, and whether images have several labels.

    Raises:
        ValueError: If it does not say how many classes there are, or the public set would be clients' images.
    """
    text = whole(name).encode()
    cli = _parsed(full_names(yaml.safe_load(text)), "auto", logs=True)
    data, division = cli.config["data"], cli.datamodule._division
    for option in ("public_fraction", "validation_fraction"):
        if data[option]:
            raise ValueError(
                f"{option}={data[option]} cannot be deployed: the server has none of the clients' images; give public"
            )
    classes = data.num_classes or cli.model.num_classes or division.dataset.num_classes
    if not classes:
        raise ValueError("the recipe does not say how many classes there are; give data.num_classes")
    public = None if division.public is None else division._public(division.dataset, [])
    multilabel = bool(getattr(division.dataset, "multilabel", False))
    return Recipe(text, cli.model, cli.loop, cli.trainer, cli.datamodule), public, classes, multilabel


def _parsed(content: dict[str, Any], accelerator: str, logs: bool = False) -> PeradaCLI:
    """What a recipe describes; its own loggers, if it names some, only with ``logs``."""
    content = {key: value for key, value in content.items() if key not in ("ckpt_path", "weights_only")}
    content["trainer"] = {**(content.get("trainer") or {})}
    if accelerator != "auto":
        content["trainer"]["accelerator"] = accelerator
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(content, file, sort_keys=False)
        file.flush()
        named = logs and content["trainer"].get("logger") not in (None, True, False)
        quiet = [option for option in QUIET if not (named and option.startswith("logger"))]
        return make_cli(["--config", file.name, *(f"--trainer.{option}" for option in quiet)], run=False)
