# SPDX-License-Identifier: Apache-2.0
"""A recipe as both parties of a deployment have it: built without the data of the others."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor
from torch.utils.data import Dataset

from perada.algorithms import Broadcast, Stacks
from perada.core.checks import check_whole
from perada.core.states import State, send
from perada.data import FederatedDataModule
from perada.data.batches.public import augment_public_images, public_indices
from perada.data.batches.samples import make_store
from perada.data.batches.transforms import Preparation
from perada.deploy.sums.vector import Contents
from perada.federation.settings import Settings, Storage
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.strategies import check_trainer
from perada.privacy.client_level import ClientLevel
from perada.privacy.client_sums import change_of, example_of
from perada.server import Distillation
from perada.server.distill import PUBLIC_BATCH, TeacherBatches

REFUSED = {
    "precision='16-mixed'": "loss scales belong to all clients; give 'bf16-mixed'",
    "max_failures": "--min-sites says how many must answer; leave it out",
    "diagnostics": "they need what all clients have; leave them out",
    "shifts": "they are drawn from the test images of all clients; leave them out",
}
"""Options that cannot be used in a deployment, and why."""


def labels_digest(num_classes: int, multilabel: bool, classes: Sequence[str] | None) -> str:
    """A digest of the classes, in their order: sites of one federation have the same."""
    return hashlib.sha256(json.dumps([num_classes, multilabel, classes and list(classes)]).encode()).hexdigest()


@dataclass
class Recipe:
    """The objects that a recipe describes."""

    text: bytes  # of its file
    module: FederatedClassifier  # the network; build() builds it
    loop: FederatedLoop  # how rounds go
    trainer: pl.Trainer  # number of rounds, device, precision, how often models are scored
    data: FederatedDataModule  # a site's, of its one client; of the server's only options and public set are looked at
    public: Dataset[Any] | None = None  # public images, for algorithms that distil; a site has them with secure sums,
    # whose logits it adds up, and in private recipes, to compare them with its own images
    prepare: Preparation | None = None  # of the public images; None for that of the data

    def __post_init__(self) -> None:
        self.module.trainer = trainer = self.trainer
        check_trainer(trainer)
        scales = getattr(trainer.precision_plugin, "scaler", None) is not None
        given = (scales, self.loop.max_failures is not None, self.loop.diagnostics, self.data.shifts)
        for (option, reason), used in zip(REFUSED.items(), given, strict=True):
            if used:
                raise ValueError(f"{option} cannot be used in a deployment: {reason}")
        check_whole("devices", trainer.world_size, most=1, hint="a site and a server each train on one device")
        check_whole("max_epochs", trainer.max_epochs, hint="the number of rounds")

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.trainer.max_epochs or 0

    @property
    def device(self) -> torch.device:
        """Where models run."""
        return self.trainer.strategy.root_device

    def build(self, num_classes: int, multilabel: bool) -> None:
        """Build the network for data of so many classes. Features are not cached: both parties see images."""
        self.module.cache_features = False
        self.module.build(num_classes, multilabel, self.loop.seed, self.loop.algorithm.merges)
        self.module.to(self.device)

    @cached_property
    def digest(self) -> str:
        """What a site approves, of the recipe's file and of all weights not trained; the network is built."""
        parts = [hashlib.sha256(self.text).hexdigest(), self.module.frozen_digest]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def context(self) -> AbstractContextManager[Any]:
        """In which passes have the recipe's precision."""
        return self.trainer.precision_plugin.forward_context()

    def settings(self, **changes: Any) -> Settings:
        """How the rounds go, with ``changes``; noise comes from a cryptographic generator, whatever was asked for."""
        sections = {"privacy": self.loop.privacy, "client_privacy": self.loop.client_privacy}
        secure: dict[str, Any] = {name: own and replace(own, secure_rng=True) for name, own in sections.items()}
        return self.loop.settings_of(self.module, **{"storage": Storage("device")} | secure | changes)

    @cached_property
    def template(self) -> "Template":
        """Shapes of what travels."""
        state = self.loop.algorithm.initial(self.module.initial_state)
        received, opened, sent = self._round(state, 0)
        sending = state if self.loop.algorithm.compares else received
        return Template(state, sending, opened, sent)

    def public_images(self) -> "PublicImages":
        """The public images as the network wants them, which is built."""
        assert self.module.adapted is not None
        prepare = self.prepare or self.data.prepare
        return PublicImages(
            self.public, replace(prepare, image=self.module.adapted.backbone.image, seed=self.loop.seed)
        )

    @property
    def noisy(self) -> bool:
        """Whether sites add noise to what they send, so that secure sums protect each of them as a whole."""
        return self.loop.client_privacy is not None and self.loop.secure_sums is not None

    def level(self, sites: int) -> ClientLevel | None:
        """The privacy of whole sites, of which so many are in a round or more, where it is asked for.

        Raises:
            ValueError: If it cannot be kept.
        """
        options, loop = self.settings().client_privacy, self.loop
        if options is None:
            return None
        if self.noisy:
            if options.clipping == "adaptive" and options.count_noise is None:
                raise ValueError(
                    "client_privacy: clipping='adaptive' with secure_sums needs count_noise in a deployment: sites do "
                    "not know beforehand how many there are; give it, or clipping='fixed'"
                )
            change_of(self.template.sent, self.template.sending)
        return ClientLevel(options, loop.seed, sites, self.rounds, sums=loop.secure_sums)

    def contents(self, round: int, images: "PublicImages") -> "Contents":
        """What a site adds to the secure sum of a round."""
        loop, sent = self.loop, self.sent(round)
        assert loop.secure_sums is not None
        if self.noisy and loop.client_privacy is not None:
            sent = example_of(sent, loop.client_privacy.clipping == "adaptive")
        shown = loop.privacy is None and loop.client_privacy is None
        rows = self.teacher_batches(round, images).size if self.distils(round) else 0
        logits = (rows, self.module.num_classes or 0) if rows else (0, 0)
        return Contents(
            loop.secure_sums,
            sent,
            logits,
            tuple(sorted(self.template.opened)) if shown else (),
            loop.weighting == "uniform",
            self.noisy,
        )

    def contents_of_scores(self) -> Contents:
        """What a site adds to a secure sum of scores: by metric its own score and the square, and counts."""
        assert self.loop.secure_sums is not None
        own = [f"{kind}/{metric.name}" for metric in self.module.metrics for kind in ("own", "square")]
        counts = [f"{model}/{what}" for model in ("own", "global") for what in ("right", "all")]
        return Contents(self.loop.secure_sums, {}, numbers=(*own, *counts))

    def distils(self, round: int) -> bool:
        """Whether the server distils after a round, for which sites in secure sums add up logits."""
        loop = self.loop
        asked = loop.algorithm.distills and not loop.algorithm.own_teachers
        return asked and loop.client_privacy is None and loop.distillation.active(round)

    def teacher_batches(self, round: int, images: "PublicImages") -> TeacherBatches:
        """Batches of public images on which sites run their models, to add up the logits."""
        options = self.loop.distillation
        indices = images.public_indices(round, options.steps, options.batch_size)
        return TeacherBatches.of_steps(indices, options, self.module.engine)

    def sent(self, round: int) -> State:
        """An example of what a client sends in a round. Odd rounds may have other names than even ones."""
        return self._round(self.template.initial, round)[2]

    def _round(self, state: State, round: int) -> tuple[State, Stacks, State]:
        """What a client receives, opens, (1, ...) by role, and sends."""
        algorithm, slot = self.loop.algorithm, self.module.slot
        losses = torch.zeros(1, algorithm.modes, device=next(iter(state.values())).device)
        given = Broadcast(state, slot, round, (0,), 1, self.loop.seed, losses if algorithm.compares else None)
        received = algorithm.broadcast(given)
        kept = first_kept(algorithm.kept(state, slot))
        opened = algorithm.open(kept, received, slot)
        sent = algorithm.close(opened, kept, received, slot)[1]
        first, last = ({key: value[0] for key, value in stack.items()} for stack in (received, sent))
        return first, opened, last


@dataclass
class ServerRecipe(Recipe):
    """A recipe as a server has it: no client's image is read."""

    num_classes: int = 0
    multilabel: bool = False  # whether images have several labels
    classes: Sequence[str] | None = None  # their names; None lets the first site that joins say them
    loggers: Sequence[Logger] = ()  # get the metrics of each round, beside metrics.csv in the run's folder


class PublicImages:
    """The images that a server without clients' data has: ``public`` ones, whose labels are never read, or none."""

    def __init__(self, public: Dataset[object] | None, preparation: Preparation) -> None:
        self._preparation = preparation
        shown = [] if public is None else [public]
        self._public = make_store(shown, labelled=False, size=preparation.image_size)
        self.public_size = sum(self._public.sizes)

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Indices (steps, B) of public images, as :meth:`perada.data.FederatedDataModule.public_indices`."""
        return public_indices(self.public_size, round, steps, batch_size, self._preparation)

    def used(self, options: Distillation, round: int) -> Tensor:
        """Positions (N,) of the images that a round uses, in ascending order."""
        indices = self.public_indices(round, options.steps, options.batch_size)
        positions: Tensor = (indices % self.public_size).unique()
        return positions

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Public images, prepared for the model, on ``device``."""
        images = send(self._taken(indices % self.public_size), device)
        return self._preparation(augment_public_images(images, indices, self.public_size, self._preparation))

    def digest(self, positions: Tensor) -> str:
        """SHA-256 of public images before they are augmented and prepared, in hexadecimal digits."""
        found = hashlib.sha256()
        for part in positions.split(PUBLIC_BATCH):
            found.update(self._taken(part).contiguous().numpy().tobytes())
        return found.hexdigest()

    def _taken(self, positions: Tensor) -> Tensor:
        images: Tensor = self._public.take(torch.zeros_like(positions), positions, (self._preparation.seed, -2))[0]
        return images

    def validation_batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Nothing: labelled images of a server's own are not read."""
        yield from ()


@dataclass(frozen=True)
class Template:
    """Examples of what travels, without a client axis but for ``opened``."""

    initial: State  # the first global state
    sending: State  # what a client is sent: its own state or, where it compares them, all global models
    opened: Stacks  # what a client trains, (1, ...) by role
    sent: State  # what it sends in the first round


def first_kept(kept: Stacks) -> Stacks:
    """What one client keeps before its first round, (1, ...) by role, laid out as a store gives it."""
    return {
        role: {key: value.unsqueeze(0).clone(memory_format=torch.contiguous_format) for key, value in state.items()}
        for role, state in kept.items()
    }
