# SPDX-License-Identifier: Apache-2.0
"""A recipe at one party of a deployment, built without the data of the other parties."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor
from torch.utils.data import Dataset

from perada.algorithms import Broadcast, Stacks
from perada.core.checks import check_integer
from perada.core.states import State, device_of, to_device_async
from perada.data import FederatedDataModule
from perada.data.batches.public import augment_public_images, public_indices
from perada.data.batches.samples import PUBLIC_SET, make_store
from perada.data.batches.transforms import Preparation
from perada.deploy.scores import count_summands, summand_names
from perada.deploy.sums.vector import Contents
from perada.deploy.transport import MAX_MESSAGE_BYTES
from perada.federation.settings import Settings, Storage
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.trainer_setup import check_trainer
from perada.privacy.client_level import ClientLevel
from perada.privacy.client_sums import exact_change, example_contribution
from perada.server import Distillation
from perada.server.distill import PUBLIC_BATCH, TeacherBatches
from perada.tasks import Classification, Task

UNSUPPORTED_OPTIONS = {
    "precision='16-mixed'": "the loss scale is shared by all clients; use 'bf16-mixed'",
    "max_failures": "--min-sites sets how many sites must answer; leave it out",
    "diagnostics": "they need data from all clients in one place; leave them out",
    "a task with options that are computed from all labels": (
        "the labels of a site never leave it; give numbers instead of 'balanced' or 'all'"
    ),
    "shifts": "they are drawn from the test images of all clients; leave them out",
}
"""Options that cannot be used in a deployment, and why."""


def labels_digest(num_classes: int, task: Task, classes: Sequence[str] | None) -> str:
    """Return a digest of the task, the classes and their order, which must be the same at all sites of a run."""
    content = [num_classes, task.record(), classes and list(classes)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Recipe:
    """The objects that a recipe describes.

    Args:
        text: Content of the recipe's file.
        module: Module of the network, which :meth:`build` builds.
        loop: Loop with the algorithm and the options of rounds.
        trainer: Trainer with the number of rounds, the device, the precision, and how often models are scored.
        data: Data of a site, which is a single client. The server uses only the options and the public set.
        public: Public images, for algorithms that distil. A site has them with secure sums, to add up logits, and in
            private recipes, to compare them with its own images.
        prepare: Preparation of the public images; None for that of the data.

    Raises:
        ValueError: If an option cannot be used in a deployment.
    """

    text: bytes
    module: FederatedClassifier
    loop: FederatedLoop
    trainer: pl.Trainer
    data: FederatedDataModule
    public: Dataset[Any] | None = None
    prepare: Preparation | None = None

    def __post_init__(self) -> None:
        trainer = self.trainer
        task = self.data.chosen_task
        self.module.trainer = trainer
        check_trainer(trainer)
        is_used = {
            "precision='16-mixed'": getattr(trainer.precision_plugin, "scaler", None) is not None,
            "max_failures": self.loop.max_failures is not None,
            "diagnostics": bool(self.loop.evaluation.diagnostics),
            "a task with options that are computed from all labels": task is not None and task.uses_all_targets,
            "shifts": bool(self.data.shifts),
        }
        for option, reason in UNSUPPORTED_OPTIONS.items():
            if is_used[option]:
                raise ValueError(f"{option} cannot be used in a deployment: {reason}")
        check_integer("devices", trainer.world_size, le=1, hint="a site and a server each train on one device")
        check_integer("max_epochs", trainer.max_epochs, hint="it is the number of rounds")

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.trainer.max_epochs or 0

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.trainer.strategy.root_device

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the classes, if they are known; at a site after the set-up of its data."""
        # Data that are not set up have no such attribute.
        return getattr(self.data, "classes", None)

    def build(self, num_classes: int, task: Task) -> None:
        """Build the network, without caching features: server and sites must compute the same bits from images."""
        self.module.build(
            num_classes,
            task,
            self.loop.seed,
            classes=self.class_names,
            merges=self.loop.algorithm.merges_into_backbone,
            training=replace(self.loop.training, cache_features=False),
            evaluation=self.loop.evaluation,
        )
        self.module.to(self.device)

    @cached_property
    def digest(self) -> str:
        """Digest of the recipe's file and of all frozen weights, by which a site approves a recipe."""
        parts = [hashlib.sha256(self.text).hexdigest(), self.module.frozen_digest]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes run in the recipe's precision."""
        return self.trainer.precision_plugin.forward_context()

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of the rounds.

        Noise is always drawn from a cryptographic generator, since the server has the run's seed.

        Args:
            changes: Settings that replace those of the recipe.
        """
        options: dict[str, Any] = {"storage": Storage("device")}
        for name, section in (("privacy", self.loop.privacy), ("client_privacy", self.loop.client_privacy)):
            options[name] = None if section is None else replace(section, secure_rng=True)
        return self.loop.settings_of(self.module, **(options | changes))

    @cached_property
    def template(self) -> "Template":
        """Examples of the states that are exchanged in the first round."""
        initial = self.loop.algorithm.initial(self.module.initial_state)
        example = self._example_round(initial, 0)
        received = initial if self.loop.algorithm.compares_models else example.received
        return Template(initial, received, example.opened, example.sent)

    def public_images(self) -> "PublicImages":
        """Return the public images, prepared for the network, which must be built."""
        assert self.module.adapted is not None
        preparation = replace(
            self.prepare or self.data.prepare,
            image_config=self.module.adapted.backbone.image_config,
            seed=self.loop.seed,
        )
        return PublicImages(self.public, preparation)

    @property
    def noisy(self) -> bool:
        """Whether sites add noise to what they send, so that secure sums protect each of them as a whole."""
        return self.loop.client_privacy is not None and self.loop.secure_sums is not None

    def level(self, sites: int) -> ClientLevel | None:
        """Return the client-level privacy, whose clients are the sites; None if the recipe has none.

        Args:
            sites: Smallest number of sites in a round.

        Raises:
            ValueError: If the privacy guarantee cannot be met.
        """
        loop = self.loop
        options = self.settings().client_privacy
        if options is None:
            return None
        if self.noisy:
            if options.clipping == "adaptive" and options.count_noise is None:
                raise ValueError(
                    "client_privacy: clipping='adaptive' with secure_sums requires count_noise in a deployment, "
                    "because sites do not know in advance how many there are; set it, or use clipping='fixed'"
                )
            # This raises an error for tensors that cannot be summed; the result is not needed.
            exact_change(self.template.sent, self.template.received)
        return ClientLevel(options, loop.seed, sites, self.rounds, secure_sums=loop.secure_sums)

    def contents(self, round: int, public_images: "PublicImages") -> "Contents":
        """Return the layout of a site's contribution to the secure sum of a round.

        Raises:
            ValueError: If it is larger than a message can be.
        """
        loop = self.loop
        assert loop.secure_sums is not None
        example = self.sent(round)
        if self.noisy and loop.client_privacy is not None:
            example = example_contribution(example, loop.client_privacy.clipping == "adaptive")
        logits: tuple[int, ...] = (0, 0)
        if self.distils(round):
            logits = (self.teacher_batches(round, public_images).size, *self._shape_of_distilled_logits(public_images))
        is_private = loop.privacy is not None or loop.client_privacy is not None
        contents = Contents(
            secure_sums=loop.secure_sums,
            example=example,
            logits=logits,
            metric_names=() if is_private else tuple(sorted(self.template.opened)),
            equal=loop.weighting == "uniform",
            noisy=self.noisy,
        )
        _check_message_size(contents)
        return contents

    def _shape_of_distilled_logits(self, public_images: "PublicImages") -> tuple[int, ...]:
        """Return the shape (..., K) of the logits of a public image that are distilled."""
        task = self.module.task
        pixels = public_images.image_size if task.per_pixel else ()
        logits = torch.empty(*pixels, self.module.num_classes or 0, device="meta")
        return tuple(task.distilled(logits).shape)

    def contents_of_scores(self) -> Contents:
        """Return the layout of a site's contribution to a secure sum of scores."""
        assert self.loop.secure_sums is not None
        names = summand_names(self.module.metrics, self.num_summands, self.predicts_with_both)
        return Contents(self.loop.secure_sums, {}, metric_names=tuple(names))

    @cached_property
    def num_summands(self) -> dict[str, int]:
        """Number of sums of each metric that is computed from sums over images, by name."""
        return count_summands(self.module.metrics, self.module.task, self.module.num_classes or 0)

    @property
    def predicts_with_both(self) -> bool:
        """Whether sites predict with both models, too, as soon as they have a personal one beside the global one."""
        return self.loop.evaluation.prediction == "both" and self.loop.algorithm.global_model

    @property
    def max_pixels(self) -> float:
        """Largest number of pixels of an image; infinite if the recipe does not set a size."""
        image_size = self.data.image_size
        return math.inf if image_size is None else float(image_size) ** 2

    def distils(self, round: int) -> bool:
        """Return whether the server distils after a round. With secure sums, sites then also sum their logits."""
        loop = self.loop
        has_ensemble = loop.algorithm.uses_distillation and not loop.algorithm.builds_teachers
        return has_ensemble and loop.client_privacy is None and loop.distillation.active(round)

    def teacher_batches(self, round: int, public_images: "PublicImages") -> TeacherBatches:
        """Return the batches of public images on which sites compute the logits to be summed."""
        options = self.loop.distillation
        indices = public_images.public_indices(round, options.steps, options.batch_size)
        return TeacherBatches.of_steps(indices, options, self.module.engine)

    def sent(self, round: int) -> State:
        """Return an example of the state that a client sends in a round, since names may differ between rounds."""
        return self._example_round(self.template.initial, round).sent

    def _example_round(self, state: State, round: int) -> "_ExampleRound":
        """Return an example of the states of one client in a round.

        Args:
            state: The global state.
            round: Number of the round.
        """
        algorithm = self.loop.algorithm
        tensor_names = self.module.tensor_names
        losses = None
        if algorithm.compares_models:
            losses = torch.zeros(1, algorithm.modes, device=device_of(state))
        received = algorithm.broadcast(Broadcast(state, tensor_names, round, (0,), 1, self.loop.seed, losses))
        client_state = initial_stacks(algorithm.initial_client_state(state, tensor_names))
        opened = algorithm.begin_round(client_state, received, tensor_names)
        # The first result, the states that the client keeps, is not exchanged.
        sent = algorithm.end_round(opened, client_state, received, tensor_names)[1]
        return _ExampleRound(received=_first_row(received), opened=opened, sent=_first_row(sent))


class _ExampleRound(NamedTuple):
    """States of one client in a round.

    Attributes:
        received: State that it receives.
        opened: States that it trains, (1, ...) by role.
        sent: State that it sends.
    """

    received: State
    opened: Stacks
    sent: State


@dataclass
class ServerRecipe(Recipe):
    """A recipe at the server, which never reads a client's image.

    Args:
        num_classes: Number of classes.
        task: What the network predicts.
        classes: Names of the classes; None for those of the first site that joins.
        loggers: Loggers of the metrics of each round, in addition to ``metrics.csv`` in the run's folder.
    """

    num_classes: int = 0
    task: Task = field(default_factory=Classification)
    classes: Sequence[str] | None = None
    loggers: Sequence[Logger] = ()

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the classes, if the recipe has them."""
        return self.classes


class PublicImages:
    """The public images of a deployment, whose labels are never read.

    Args:
        public: Public data set; None for no images.
        preparation: How images are prepared for the network.

    Attributes:
        public_size: Number of images.
    """

    def __init__(self, public: Dataset[object] | None, preparation: Preparation) -> None:
        self._preparation = preparation
        datasets = [] if public is None else [public]
        self._public = make_store(datasets, labelled=False, size=preparation.image_size, owner=PUBLIC_SET)
        self.public_size = sum(self._public.sizes)

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Return indices (steps, B) like :meth:`perada.data.FederatedDataModule.public_indices`."""
        return public_indices(self.public_size, round, steps, batch_size, self._preparation)

    def used(self, distillation: Distillation, round: int) -> Tensor:
        """Return the positions (N,) of the images that a round uses, in ascending order."""
        indices = self.public_indices(round, distillation.steps, distillation.batch_size)
        positions: Tensor = (indices % self.public_size).unique()
        return positions

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Return public images, augmented and prepared for the network, on a device."""
        images = to_device_async(self._raw_images(indices % self.public_size), device)
        return self._preparation(augment_public_images(images, indices, self.public_size, self._preparation))

    @property
    def image_size(self) -> tuple[int, ...]:
        """Height and width of the prepared images."""
        prepared = self.public_images(torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
        return tuple(prepared.shape[-2:])

    def digest(self, positions: Tensor) -> str:
        """Return the SHA-256 of public images before they are augmented and prepared, in hexadecimal digits."""
        sha256 = hashlib.sha256()
        for part in positions.split(PUBLIC_BATCH):
            sha256.update(self._raw_images(part).contiguous().numpy().tobytes())
        return sha256.hexdigest()

    def _raw_images(self, positions: Tensor) -> Tensor:
        """Return the public images at some positions as they are stored, with random draws derived from the seed."""
        images: Tensor = self._public.take(torch.zeros_like(positions), positions, (self._preparation.seed, -2))[0]
        return images

    def validation_batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nothing, since a deployed server has no labelled images."""
        yield from ()


@dataclass(frozen=True)
class Template:
    """Examples of states; only ``opened`` has a client axis.

    Attributes:
        initial: First global state.
        received: State that the server sends to a client or, if clients compare global models, all of them.
        opened: States (1, ...) that a client trains, by role.
        sent: State that a client sends in the first round.
    """

    initial: State
    received: State
    opened: Stacks
    sent: State


def initial_stacks(client_state: Stacks) -> Stacks:
    """Return the states that a client keeps before its first round as stacks (1, ...), by role.

    Tensors are contiguous like those of a store, since rounding depends on strides.
    """
    stacks: Stacks = {}
    for role, state in client_state.items():
        stacks[role] = {}
        for key, value in state.items():
            stacks[role][key] = value.unsqueeze(0).clone(memory_format=torch.contiguous_format)
    return stacks


def _first_row(stack: State) -> State:
    """Return the state of the first client of a stack."""
    return {key: value[0] for key, value in stack.items()}


def _check_message_size(contents: Contents) -> None:
    """Raise a ValueError if a site's contribution to a secure sum is larger than a message can be."""
    num_bytes = 8 * contents.size
    if num_bytes <= MAX_MESSAGE_BYTES:
        return
    logits_bytes = 8 * math.prod(contents.logits)
    raise ValueError(
        f"secure_sums: each site would send {num_bytes / 1e9:.2f} GB per round, {logits_bytes / 1e9:.2f} GB of them "
        f"logits of {contents.logits[0]:,} public images, but a message has at most {MAX_MESSAGE_BYTES / 1e9:.2f} GB; "
        "lower the distillation's steps or batch_size or the data's image_size, or raise the task's distill_stride"
    )
