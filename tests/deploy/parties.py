# SPDX-License-Identifier: Apache-2.0
"""A small recipe, its simulation, and the same recipe among sites in this process."""

import json
import time
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import pytorch_lightning as pl
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.data import FederatedDataModule
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.site.client import Client, single_client_data
from perada.deploy.site.file import Limits
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import SiteStore
from perada.deploy.sums.party import Party
from perada.deploy.transport import LocalTransport, Terms
from perada.federation import Evaluation, Training
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.server import Distillation
from perada.studies.deployment import LINK
from perada.tasks import Classification
from tests.methods import make_method
from tests.options import fields_among

SIZES = (9, 5, 14)
TEXT = b"a recipe"
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


OF_SECTIONS = {field.name for kind in (Training, Evaluation) for field in fields(kind)}


class Parties:
    """Makes the parties of one recipe.

    ``options`` are those of loop, module and data by their names. Those of training and evaluation may be among both.
    """

    def __init__(self, tiny, tmp_path, algorithm="fedavg", *, rounds=2, sizes=SIZES, engine="loop", every=1, **options):
        self.tiny, self.folder, self.algorithm, self.rounds, self.sizes = tiny, Path(tmp_path), algorithm, rounds, sizes
        self.engine = engine
        self.every = every
        self.options = options
        self.whole = tiny.data(sizes=sizes)
        self.names = [f"site{number}" for number in range(len(sizes))]

    def loop(self):
        flat = {"local_epochs": 2, "lr_personal": 0.1, "lr_local": 0.1, "momentum": 0.9, "engine": self.engine}
        flat |= {"cache_features": False} | self.options.get("module", {}) | self.options.get("loop", {})
        arguments = {"distillation": Distillation(steps=3, batch_size=4), "seed": 3} | self.options.get("loop", {})
        arguments = {name: value for name, value in arguments.items() if name not in OF_SECTIONS}
        arguments["training"] = Training(**fields_among(flat, Training))
        arguments["evaluation"] = Evaluation(**fields_among(flat, Evaluation))
        algorithm = self.algorithm
        return FederatedLoop(make_method(algorithm), **arguments)

    def module(self):
        arguments = {"adapter": "full"} | self.options.get("module", {})
        arguments = {name: value for name, value in arguments.items() if name not in OF_SECTIONS}
        return FederatedClassifier(self.options.get("net", self.tiny.net)(), **arguments)

    def data(self, data):
        return FederatedDataModule(data, batch_size=4, **{"num_classes": 3} | self.options.get("data", {}))

    def trainer(self, *callbacks):
        every = {"check_val_every_n_epoch": self.every, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
        return pl.Trainer(max_epochs=self.rounds, accelerator="cpu", callbacks=list(callbacks), **every, **QUIET)

    def simulated(self):
        """Loop and module after a run in one process."""
        loop = self.loop()
        module = self.module()
        self.trainer(loop).fit(module, datamodule=self.data(self.whole))
        return loop, module

    def recipe(self, place=None, **of_server):
        data = self.whole if place is None else single_client_data(self.whole, place)
        kind = ServerRecipe if of_server else Recipe
        arguments = {"public": self.whole.public} | of_server
        return kind(TEXT, self.module(), self.loop(), self.trainer(), self.data(data), **arguments)

    def worker(self, place, may_send=("sizes", "counts", "scores", "losses"), **limits):
        client = Client(self.recipe(place), Limits(**limits))
        book = SiteStore(self.folder / self.names[place])
        party = None
        if client.settings.secure_sums is not None:
            party = Party(self.names[place], self.identities[place], self.sites)
        return SiteWorker(book, {client.recipe.digest: client}, may_send, party=party)

    @cached_property
    def identities(self):
        """The sites' keys."""
        return [Ed25519PrivateKey.generate() for _ in self.names]

    @property
    def sites(self):
        """Their public keys by name."""
        return {name: key.public_key() for name, key in zip(self.names, self.identities, strict=True)}

    def workers(self, **options):
        return {name: self.worker(place, **options) for place, name in enumerate(self.names)}

    def coordinator(self, transport, resume=False, classes=None, loggers=(), **terms):
        terms = {"min_sites": len(self.sizes), "deadline": 60.0, "resume": resume} | terms
        data = self.options.get("data", {})
        recipe = self.recipe(
            public=self.whole.public,
            num_classes=data.get("num_classes", 3),
            classes=classes,
            loggers=loggers,
            task=data.get("task", Classification()),
        )
        return Coordinator(recipe, transport, self.folder / "server", Terms(**terms))

    def deployed(self, **terms):
        """Coordinator and workers after a run."""
        workers = self.workers()
        coordinator = self.coordinator(LocalTransport(workers), **terms)
        coordinator.run()
        return coordinator, workers


class Watched:
    """For a federation on this machine whose processes and runs can be looked at."""

    def online(self):
        """Number of SuperNodes that the SuperLink hears from."""
        listed = json.loads(self.flwr("supernode", "list", LINK, "--format", "json"))
        return sum(node["status"] == "online" for node in listed["nodes"])

    def runs(self):
        """States of Flower's runs by their id, such as ``finished:completed``."""
        listed = json.loads(self.flwr("list", LINK, "--format", "json"))["runs"]
        return {str(run["run-id"]): run["status"] for run in listed}

    def children(self, pid, name):
        """Ids of the processes of a program that descend from a process."""
        parents = {}
        words = {}
        for one in self.alive():
            with suppress(FileNotFoundError):  # it may end meanwhile
                parents[one] = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
                words[one] = Path(f"/proc/{one}/cmdline").read_text().split("\0")[:3]
        below = {pid}
        while more := {one for one, parent in parents.items() if parent in below} - below:
            below |= more
        return [one for one in below - {pid} if any(word.endswith(name) for word in words[one])]


class Supervisor:
    """Starts a site's SuperNode again until the SuperLink lets it in."""

    def __init__(self, federation, site):
        self.federation = federation
        self.site = site
        self.name = f"node-{site}"
        self.before = 0

    def let_in(self):
        """Whether it is in."""
        log = self.federation.log(self.name)
        processes = self.federation.processes
        if self.name not in processes or processes[self.name].poll() is not None:
            self.before = log.stat().st_size
            self.federation.start_node(self.site)
        time.sleep(1)
        return processes[self.name].poll() is None and b"SuperNode ID" in log.read_bytes()[self.before :]
