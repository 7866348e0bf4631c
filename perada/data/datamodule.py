# SPDX-License-Identifier: Apache-2.0
"""The Lightning datamodule: an epoch is a communication round, a batch is one local step of the round's clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perada.core.checks import OptionError, check_choice, check_integer, check_number, check_type
from perada.core.rounds import (
    CohortBatch,
    EvalBatch,
    ImageConfig,
    Phase,
    PrivateSampling,
    RoundPlan,
    Shares,
    make_plan,
    one_of,
    sample_cohort,
)
from perada.core.states import to_device_async
from perada.data.batches.datasets import length
from perada.data.batches.features import FeatureCache
from perada.data.batches.public import augment_public_images, public_indices
from perada.data.batches.samples import EvalBatches, MapStore, RoundBatches, Samples, Store, loader
from perada.data.batches.transforms import BatchT, Preparation
from perada.data.checked import Checked, check, first_image
from perada.data.federated import FederatedData
from perada.data.fingerprints import Fingerprint, fingerprint_of
from perada.data.inspection import OnBroken, without_broken
from perada.data.partitions import Partition
from perada.data.partitions.division import Division, hold_out
from perada.data.preprocessing import Preprocessing, preprocessing_of
from perada.data.sets.base import ImageSet
from perada.data.shifts import Condition, CorruptedStore, Shift, ShiftsWhen, as_shifts, conditions

EvaluateOn = Literal["test", "validation"]
Eligible = Callable[[Sequence[int]], Sequence[int]]
TYPES: dict[str, tuple[type, str]] = {
    "data": (FederatedData, "FederatedData(train=[...])"),
    "dataset": (ImageSet, "Digits()"),
    "partition": (Partition, "Dirichlet(20, 0.1)"),
    "public": (ImageSet, "Photographs()"),
    "shifts": (Mapping, "{'noise': 'gaussian_noise'}"),
}
"""What options may be, and an example."""


class FederatedDataModule(pl.LightningDataModule):
    """Serves rounds of local training, the clients' test data, and the server's public images.

    Either ``data`` holds the clients' datasets, or ``dataset`` is divided by ``partition``. Sets that are tensors are
    gathered by index, on the accelerator where they fit; others are read item by item.

    Args:
        data: The clients' datasets, in Python.
        dataset: The images that are divided among the clients.
        partition: How they are divided.
        public: Images for the server's distillation; labels are never read.
        public_fraction: Instead of ``public``: share of the training images that is taken from the clients for it.
        validation_fraction: Share of the training images that the server gets with labels, to stop distilling early.
        train_limit: Number of training images used, drawn at random; null for all.
        test_limit: Number of test images used, likewise.
        public_limit: Number of images of ``public`` used, likewise.
        client_validation: Share of every client's training images, at least one, that it does not train on.
        evaluate_on: Score the clients' ``test`` images, or in their place the ``validation`` ones so held out.
        seed: Seed of the partition, the limits and the shares. What is drawn in training comes from the run's seed.
        batch_size: Images in a client's batch, or full for all that the client has.
        eval_batch_size: Images in a batch of test data.
        num_workers: Processes that read images from files; the batches are the same for any number.
        image_size: Height and width to resize uint8 images to; null keeps them.
        crop_padding: Shift training images at random by up to so many pixels; 0 for not.
        flip: Mirror half of the training images.
        augment_public: Change the public images of distillation in the same way, anew in each step; teachers and
            student see the same images.
        num_classes: Number of classes; null for what the dataset says.
        device_cache_mb: Sets of tensors up to this size are kept on the accelerator, and features of their images.
        shifts: Shifted test sets by name: :class:`.Corruptions`, :class:`.LabelShift`, an image set with the same
            classes, whose test split is used, or short forms (docs/shifts.md). Not with ``evaluate_on: validation``.
        shifts_when: Score them at the ``end`` of training, at every ``evaluation``, or in a ``test``, as always.
        on_broken: Refuse images that cannot be read, with a list of all, before the first round; or skip them.

    Raises:
        ValueError: If an option is out of range or two exclude each other; the data are checked by ``setup``.
    """

    num_clients: int
    num_classes: int
    multilabel: bool
    train_sizes: tuple[int, ...]
    classes: list[str] | None
    client_names: list[str] | None
    prepare: Preparation
    """Makes a batch on its device ready for the model; those of the Trainer are so already."""

    def __init__(  # noqa: PLR0913  # one argument an option of recipes
        self,
        data: FederatedData | None = None,
        *,
        dataset: ImageSet | None = None,
        partition: Partition | None = None,
        public: ImageSet | None = None,
        public_fraction: float = 0.0,
        validation_fraction: float = 0.0,
        train_limit: int | None = None,
        test_limit: int | None = None,
        public_limit: int | None = None,
        client_validation: float = 0.0,
        evaluate_on: EvaluateOn = "test",
        seed: int = 0,
        batch_size: int | Literal["full"] = 64,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        image_size: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        augment_public: bool = False,
        num_classes: int | None = None,
        device_cache_mb: int = 2000,
        shifts: dict[str, Shift | ImageSet | list[str] | str] | None = None,
        shifts_when: ShiftsWhen = "end",
        on_broken: OnBroken = "refuse",
    ) -> None:
        super().__init__()
        for name, value in zip(TYPES, (data, dataset, partition, public, shifts), strict=True):
            check_type(name, value, *TYPES[name])
        given = (public, public_fraction, validation_fraction, train_limit, test_limit, public_limit)
        check_integer("seed", seed, 0, le=None)
        check_number("client_validation", client_validation, ge=0, lt=1, hint="a share of the training images")
        check_choice("evaluate_on", evaluate_on, get_args(EvaluateOn))
        if evaluate_on == "validation" and not client_validation:
            raise ValueError(
                "evaluate_on is 'validation' and client_validation is 0: say what share of their training images "
                "clients hold out, for example client_validation=0.2"
            )
        self.data, self.division = data, None
        if data is None:
            if dataset is None or partition is None:
                raise OptionError(
                    f"dataset={dataset} and partition={partition}: give both, for example Digits and Dirichlet, or "
                    "data=FederatedData(...)",
                    name="dataset",
                    value=dataset,
                )
            self.division = Division(dataset, partition, *given, seed=seed)
        elif dataset is not None or partition is not None or any(given):
            raise ValueError(
                "data is given together with options that divide a dataset; put the public set and all else into "
                "FederatedData, or give dataset and partition instead"
            )
        check_integer("batch_size", batch_size, also=["full"])
        check_integer("eval_batch_size", eval_batch_size)
        check_integer("image_size", image_size, le=2**16, optional=True)
        check_integer("num_classes", num_classes, optional=True)
        check_integer("num_workers", num_workers, 0)
        check_integer("crop_padding", crop_padding, 0)
        check_choice("flip", flip, [False, True])
        check_choice("augment_public", augment_public, [False, True])
        check_choice("shifts_when", shifts_when, get_args(ShiftsWhen))
        check_choice("on_broken", on_broken, get_args(OnBroken))
        self.client_validation, self.evaluate_on, self.seed = client_validation, evaluate_on, seed
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.image_size, self.device_cache_mb, self.on_broken = image_size, device_cache_mb, on_broken
        self.shifts, self.shifts_when = as_shifts(shifts or {}), shifts_when
        self.conditions: list[Condition] = []
        self.prepare = Preparation(None, image_size, crop_padding, flip, augment_public=augment_public)
        self._num_classes = num_classes
        self._record: dict[str, Any] = {}
        self._clients_per_round: int | None = None
        self._phases: Sequence[Phase] = [Phase()]
        self._private: PrivateSampling | None = None
        self._eligible: Eligible | None = None
        self._shares: Shares | None = None
        self._features: FeatureCache | None = None

    def prepare_data(self) -> None:
        """Fetch missing files if that was asked for."""
        if self.division is not None:
            self.division.download()
        for shift in self.shifts.values():
            if isinstance(shift, ImageSet):
                shift.download()

    def setup(self, stage: str = "fit") -> None:
        """Divide and check the data; once, however often it is called, as :attr:`checked` says."""
        _ = self.checked

    @cached_property
    def checked(self) -> Checked:
        """The data, divided and checked.

        Raises:
            FileNotFoundError: If a dataset's files are missing.
            ValueError: If the data cannot be divided as asked, or are not fit for training.
            TypeError: If images or labels are of a type that cannot be used.
        """
        given = self.data if self.division is None else self.division.share_out()
        assert given is not None
        on_test, validation = self.evaluate_on == "test", list[Dataset[Any]]()
        data = given if on_test else replace(given, test=[])
        data = without_broken(data, self.on_broken, self.num_workers)
        if self.client_validation:
            train, validation = hold_out(data.train, self.client_validation, self.seed)
            data = replace(data, train=train)
        self._record = self._recorded(data if on_test else replace(data, test=given.test), validation)
        data = data if on_test else replace(data, test=validation)
        found = check(data, self._num_classes, self.image_size)
        found.held_out = validation if on_test else []
        self.conditions = conditions(self.shifts, found, self.image_size) if on_test else []
        self.prepare.check_shape(found.image[0])
        if self.prepare.augment_public and found.public is not None:
            self.prepare.check_shape(first_image(found.public)[0])
        self.num_clients, self.train_sizes = len(data.train), found.train.sizes
        self.num_classes, self.multilabel = found.num_classes, found.multilabel
        self.classes = found.classes
        self.client_names = None if data.client_names is None else list(data.client_names)
        for store in (found.train, found.test):
            if isinstance(store, MapStore):
                store.client_names = self.client_names
        return found

    def _recorded(self, data: FederatedData, validation: Sequence[Dataset[Any]]) -> dict[str, Any]:
        """What ``partition.json`` holds: each client's positions in the dataset, or sizes where the data was given."""
        if self.division is not None:
            return self.division.record(data, validation)
        held = {"client_validation_sizes": [length(own) for own in validation]} if validation else {}
        return {
            "num_clients": len(data.train),
            "train_sizes": [length(own) for own in data.train],
            "test_sizes": [length(own) for own in data.test] or [0] * len(data.train),
            "public_size": 0 if data.public is None else length(data.public),
        } | held

    def configure_rounds(
        self,
        *,
        seed: int,
        clients_per_round: int | None,
        phases: Sequence[Phase],
        image: ImageConfig | None = None,
        private: PrivateSampling | None = None,
        eligible: Eligible | None = None,
    ) -> None:
        """Say how rounds go. Without it: seed 0, all clients, one epoch, no normalisation constants.

        Args:
            seed: The run's seed.
            clients_per_round: Clients C drawn in each round; None for all.
            phases: The stretches of local training in a round.
            image: What the backbone asks of images.
            private: How batches are drawn where training is private, with the streams of each phase.
            eligible: Gives those of the given clients that may still take part; None where all may.

        Raises:
            ValueError: If there are fewer clients than are to be drawn, or the images do not fit the backbone.
        """
        data, hint = self.checked, f"there are {self.num_clients} clients"
        check_integer("clients_per_round", clients_per_round, le=self.num_clients, optional=True, hint=hint)
        if not phases:
            raise ValueError("there are no phases of local training; give at least one")
        if image is not None:
            data.check_channels(image.input_size[0])
        self._clients_per_round, self._phases = clients_per_round, phases
        self._private, self._eligible, self._shares = private, eligible, None
        self.prepare = replace(self.prepare, image=image, seed=seed, secure=bool(private and private.secure))

    def plan(self, round: int) -> RoundPlan:
        """Draw a round's clients: a function of the run's seed, the round and who may take part (refused if none)."""
        return self.shares(round).plan

    def shares(self, round: int) -> Shares:
        """A round's clients and who trains them: drawn and divided once, when the round is first asked for."""
        if self._shares is None or self._shares.plan.round != round:
            count, at = len(self.checked.train.sizes), self.trainer
            drawn = sample_cohort(self.prepare.seed, round, count, self._clients_per_round, self._eligible)
            plan = self.plan_for(drawn, round)
            self._shares = Shares.of(plan) if at is None else Shares.of(plan, at.world_size, at.global_rank)
        return self._shares

    def plan_for(self, clients: Sequence[int], round: int, phases: Sequence[Phase] | None = None) -> RoundPlan:
        """Plan a round of the given clients, in the given phases or those of every round."""
        return make_plan(round, clients, self.checked.train.sizes, phases or self._phases, self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        """Serve this process's clients of the trainer's current round; ``len()`` is the round's number of steps."""
        return self.cohort_loader(self.shares(self.trainer.current_epoch if self.trainer is not None else 0).own)

    def trial_batch(self, clients: Sequence[int]) -> CohortBatch:
        """The first batch of some clients, prepared, for trials at set-up; drawn alike with and without privacy."""
        plan, store = self.plan_for(clients, 0), self.served(self.checked.train)
        batch = one_of(RoundBatches(store, plan, self.batch_size, self.prepare.seed)[0])
        for _, reason in batch.failed:
            raise ValueError(reason)
        return self.prepare(batch)

    def cohort_loader(self, plan: RoundPlan, private: PrivateSampling | None = None) -> DataLoader[Any]:
        """Serve the cohort batches of any plan. Outside the Trainer, pass each through :meth:`prepare`.

        Where training is private, an item is a dict with the batch of each stream; ``private`` then says how they are
        drawn, by default as :meth:`configure_rounds` was told.
        """
        store, private = self.served(self.checked.train), private or self._private
        batches = RoundBatches(store, plan, self.batch_size, self.prepare.seed, private)
        return loader(batches, store, self.num_workers)

    def val_dataloader(self) -> DataLoader[EvalBatch] | list[DataLoader[EvalBatch]]:
        """Serve the images that clients are evaluated on, each once; an empty list if there are none."""
        return [] if self.checked.test is None else self._in_order(self.served(self.checked.test))

    test_dataloader = predict_dataloader = val_dataloader

    def shift_loader(self, condition: Condition) -> DataLoader[EvalBatch]:
        """Serve the images of one of the ``conditions``, each once, corrupted where it asks for that.

        A batch names the client that each image belongs to; an image of another set belongs to none, and has a 0.
        """
        if not condition.kind:
            return self._in_order(self.served(condition.store))
        return self._in_order(CorruptedStore(condition, self.prepare.seed, self.image_size))

    @property
    def public_size(self) -> int:
        """Number of public images; 0 if there are none."""
        return sum(self.checked.public.sizes) if self.checked.public else 0

    @property
    def tokens(self) -> bool:
        """Whether samples are texts (L,) of int64 tokens, and no images."""
        return self.checked.image[1] == torch.int64

    @property
    def validation_size(self) -> int:
        """Number of labelled images on the server; 0 if there are none."""
        return sum(self.checked.server_validation.sizes) if self.checked.server_validation else 0

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Draw the public images of each step of a round's distillation: a stream of permutations of the set.

        Returns:
            Integers (steps, B), B at most ``public_size``; derived from the run's seed and the round. They are
            positions in the set, or with ``augment_public`` positions modulo ``public_size``.
        """
        return public_indices(self.public_size, round, steps, batch_size, self.prepare)

    def public_images(self, indices: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Read public images, prepared for the model, on ``device``. The same index always gives the same image."""
        store, size = self.checked.public, self.public_size
        assert store is not None
        positions = indices % size
        images, _ = self.served(store).take(torch.zeros_like(positions), positions, (self.prepare.seed, -2))
        return self.prepare(augment_public_images(to_device_async(images, device), indices, size, self.prepare))

    def validation_batches(self, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the server's labelled images, prepared, and their labels, on ``device``; nothing if there are none."""
        return self._labelled(self.checked.server_validation, device)

    def test_batches(self, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images that clients are evaluated on, prepared, and their labels, on ``device``; each once."""
        return self._labelled(self.checked.test, device)

    @property
    def preprocessing(self) -> Preprocessing:
        """What is done to images before the model sees them, but for random changes."""
        source = None if self.division is None else self.division.dataset
        return preprocessing_of(self.checked, self.prepare, getattr(source, "full_scale", None))

    def partition_dict(self) -> dict[str, Any]:
        """What ``partition.json`` holds."""
        self.setup()
        return self._record

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Names and hashes of the data, which a checkpoint holds so that a run resumes with the same data only."""
        return fingerprint_of(self.checked, self.client_names, self.evaluate_on)

    def transfer_batch_to_device(self, batch: BatchT, device: torch.device, dataloader_idx: int) -> BatchT:
        """Move a batch; who owns the images of test data stays with the host, which arranges the evaluation by it."""
        moved: BatchT = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved._replace(owner=batch.owner) if isinstance(batch, EvalBatch) else moved

    def on_after_batch_transfer(self, batch: BatchT, dataloader_idx: int) -> BatchT:
        """Prepare a batch once it is on the device."""
        return self.prepare(batch)

    def use_features(
        self, encode: Callable[[Tensor], Tensor] | None, size: int = 0, image: tuple[int, ...] = ()
    ) -> None:
        """From now on, serve features (F,) in place of the images that are always the same.

        ``encode`` makes features (B, F), of F = ``size``, of images (B, ...) as they are stored; None serves images
        again. ``image`` is the shape of the prepared images that features are of; others are served as they are.
        """
        limit = self.device_cache_mb * 10**6
        self._features = encode and FeatureCache(
            encode, size, limit, suits=lambda images: tuple(self.prepare(images).shape[1:]) == image
        )

    def _labelled(self, store: Store | None, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
        if store is not None:
            for x, y, _ in self._in_order(self.served(store)):
                yield self.prepare(to_device_async(x, device)), to_device_async(y, device)

    def _in_order(self, store: Samples) -> DataLoader[EvalBatch]:
        return loader(EvalBatches(store, self.eval_batch_size, self.prepare.seed), store, self.num_workers)

    def served(self, store: Store) -> Samples:
        """A set as it is read: on the trainer's accelerator, if it is small, and as features, if they are."""
        if isinstance(store, MapStore):
            return store
        if self.trainer is not None and self.trainer.strategy.root_device.type != "cpu":
            store.to(self.trainer.strategy.root_device, self.device_cache_mb * 10**6)
        augmented = store is self.checked.train and self.prepare.augments
        augmented |= store is self.checked.public and self.prepare.augment_public
        return store if self._features is None or augmented else self._features(store)
