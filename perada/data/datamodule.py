# SPDX-License-Identifier: Apache-2.0
"""The Lightning datamodule: an epoch is a communication round, a batch is one local step of the round's clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError, check_choice, check_integer, check_number, check_type, use_plain_numbers
from perada.core.rounds import (
    CohortBatch,
    EvalBatch,
    ImageConfig,
    Phase,
    PrivateSampling,
    RoundPlan,
    Sampling,
    Shares,
    make_plan,
    one_of,
    sample_cohort,
)
from perada.core.states import to_device_async
from perada.data.batches.datasets import Resolve, SubsetResolver
from perada.data.batches.features import FeatureCache
from perada.data.batches.loaders import BatchLoader, WorkerPools, loader
from perada.data.batches.mixing import Mixing
from perada.data.batches.public import augment_public_images, public_indices
from perada.data.batches.round_batches import EvalBatches, RoundBatches
from perada.data.batches.samples import MapStore, Samples, Store
from perada.data.batches.transforms import BatchT, Preparation
from perada.data.broken_images import OnBroken, without_broken
from perada.data.checked import CheckedData, check, first_image_format
from perada.data.federated import FederatedData
from perada.data.final_size import read_at_size, read_clients_at_size, read_shifts_at_size
from perada.data.fingerprints import Fingerprint, fingerprint_of
from perada.data.medical.reading import DEFAULT_READING, MedicalReading
from perada.data.partitions import Partition
from perada.data.partitions.division import Division, groups_of_images, hold_out
from perada.data.preprocessing import Preprocessing, first_image_set, preprocessing_of
from perada.data.sets.base import ImageSet
from perada.data.shifts import Condition, CorruptedStore, Shift, ShiftsWhen, as_shifts, check_movements, conditions
from perada.data.training_checks import RunOptions
from perada.system.garbage import collection_paused
from perada.tasks import Task

EvaluateOn = Literal["test", "validation"]
Eligible = Callable[[Sequence[int]], Sequence[int]]
"""Returns those of the given clients that may take part in a round."""
BYTES_PER_MB = 10**6
PUBLIC_STREAM = -2
"""Index of the public set in the keys of what datasets draw at random. Rounds count from 0, test sets have -1."""
EXAMPLES_STREAM = -3
"""The same of training images that are not trained on, but compared with others."""


class FederatedDataModule(pl.LightningDataModule):
    """Serves rounds of local training, the clients' test data, and the server's public images.

    Either ``data`` holds the clients' datasets, or ``dataset`` is divided by ``partition``. Sets that are tensors are
    gathered by index, on the accelerator if they fit; others are read item by item.

    Args:
        data: The clients' datasets (Python only).
        dataset: Images to divide among the clients.
        partition: How to divide them.
        public: Images for the server's distillation; labels are never read.
        public_fraction: Instead of ``public``: share of the training images that the clients give up for it.
        validation_fraction: Share of the training images that the server gets with labels, to stop distilling early.
        train_limit: Number of training images to use, drawn at random; null for all.
        test_limit: Number of test images to use, drawn at random; null for all.
        public_limit: Number of images of ``public`` to use, drawn at random; null for all.
        client_validation: Share of every client's training images, at least one, that it holds out of training.
        client_validation_seed: Seed with which these images are drawn, so that settings can be scored on several draws;
            by default ``seed``, which the division of the data depends on too.
        evaluate_on: Evaluate on the clients' ``test`` images, or instead on the ``validation`` images that they hold
            out.
        seed: Seed of the partition, the limits and the shares, and of image sets whose own ``seed`` is null. Draws
            during training depend on the run's seed.
        batch_size: Images in a client's batch, or full for all images of the client.
        eval_batch_size: Images in a batch of test data.
        num_workers: Processes that read images from files. The batches are the same for any number.
        image_size: Height and width to resize uint8 images to; null keeps them. Files are resized to it once, whatever
            the ``size`` of their set.
        crop_padding: Shift training images at random by up to this many pixels; 0 disables it.
        flip: Mirror training images at random, with probability 0.5.
        mixup: Mix each training image with another one of the client: α of λ ~ Beta(α, α), such as 0.2; 0 for none
            (docs/data.md).
        cutmix: Replace a rectangle of each training image by that of another one of the client: α of the share
            λ ~ Beta(α, α), such as 1.0; 0 for none.
        sampling: How the images of a client's steps are drawn: ``uniform``, each once before any is repeated; or
            ``balanced``, with replacement and each of the client's classes equally likely.
        augment_public: Augment the public images of distillation in the same way, redrawn in each step. Teachers and
            student see the same images.
        num_classes: Number of classes; null for that of the dataset.
        task: What is learnt from the labels (docs/tasks.md), with its options: :class:`.Classification`,
            :class:`.MultiLabel`, :class:`.Segmentation`, :class:`.Regression` or a custom class. By default chosen from
            the labels: one class, or several labels per image.
        device_cache_mb: Keep sets of tensors up to this size on the accelerator, and cached features of their images.
        shifts: Shifted test sets by name: :class:`.Corruptions`, :class:`.LabelShift`, an image set with the same
            classes, whose test split is used, or short forms (docs/shifts.md). Not with ``evaluate_on: validation``.
        shifts_when: Evaluate on shifted test sets at the ``end`` of training, at every ``evaluation``, or only in a
            ``test`` run, which always does.
        on_broken: Raise an error before the first round that lists all images that cannot be read, or skip them.

    Raises:
        ValueError: If an option is out of range or two exclude each other. The data are checked by ``setup``.

    >>> part = torch.utils.data.TensorDataset(torch.rand(4, 1, 8, 8), torch.arange(4) % 2)
    >>> FederatedDataModule(FederatedData(train=[part, part]), batch_size=2).batch_size
    2
    """

    num_clients: int
    num_classes: int
    task: Task
    train_sizes: tuple[int, ...]
    classes: list[str] | None
    client_names: list[str] | None
    prepare: Preparation
    """Prepares a batch for the model on the batch's device. The Trainer's batches are prepared already."""

    def __init__(  # noqa: PLR0913  # each argument is an option of recipes
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
        client_validation_seed: int | None = None,
        evaluate_on: EvaluateOn = "test",
        seed: int = 0,
        batch_size: int | Literal["full"] = 64,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        image_size: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        sampling: Sampling = "uniform",
        augment_public: bool = False,
        num_classes: int | None = None,
        task: Task | None = None,
        device_cache_mb: int = 2000,
        shifts: dict[str, Shift | ImageSet | list[str] | str] | None = None,
        shifts_when: ShiftsWhen = "end",
        on_broken: OnBroken = "raise",
    ) -> None:
        super().__init__()
        _check_types(data, dataset, partition, public, task, shifts, image_size)
        data = read_clients_at_size(data, image_size)
        check_integer("seed", seed, 0, le=None)
        self._held_out_seed = _find_held_out_seed(client_validation, client_validation_seed, evaluate_on, default=seed)
        self.data = data
        self.division: Division | None = None
        if data is None:
            if dataset is None or partition is None:
                missing = [name for name, value in (("dataset", dataset), ("partition", partition)) if value is None]
                raise OptionError(
                    f"{' and '.join(missing)} must be set: pass a dataset and a partition, for example Digits() and "
                    "Dirichlet(), or data=FederatedData(...)",
                    name="dataset",
                    value=dataset,
                )
            public_images = None if public is None else public.with_seed(seed)
            self.division = Division(
                read_at_size(dataset.with_seed(seed), image_size),
                partition,
                public=read_at_size(public_images, image_size),
                public_fraction=public_fraction,
                validation_fraction=validation_fraction,
                train_limit=train_limit,
                test_limit=test_limit,
                public_limit=public_limit,
                seed=seed,
            )
        # `is not None`, since the truth of a set is its length, for which its files would be read.
        elif (
            public_fraction
            or validation_fraction
            or any(option is not None for option in (dataset, partition, public, train_limit, test_limit, public_limit))
        ):
            raise ValueError(
                "data cannot be combined with options that divide a dataset; put the public set and everything else "
                "into FederatedData, or set dataset and partition instead"
            )
        self.client_validation = client_validation
        self.evaluate_on = evaluate_on
        self.seed = seed
        self.batch_size = batch_size
        self.sampling: Sampling = sampling
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.image_size = image_size
        self.device_cache_mb = device_cache_mb
        self.on_broken = on_broken
        self.shifts_when = shifts_when
        self._num_classes = num_classes
        use_plain_numbers(self)
        self.chosen_task = task
        """The option ``task``; None where the task is chosen from the labels."""
        self._check_options(crop_padding, flip, augment_public)
        self.shifts = as_shifts(read_shifts_at_size(shifts or {}, image_size))
        self.conditions: list[Condition] = []
        self.prepare = Preparation(
            None, image_size, crop_padding, flip, augment_public=augment_public, mixing=Mixing(mixup, cutmix)
        )
        if task is not None:
            # A task that is given is checked before the data are read.
            self._check_movements(task)
        self._record: dict[str, Any] = {}
        self._clients_per_round: int | None = None
        self._phases: Sequence[Phase] = [Phase()]
        self._private: PrivateSampling | None = None
        self._eligible: Eligible | None = None
        self._shares: Shares | None = None
        self._features: FeatureCache | None = None
        self._pools = WorkerPools()
        self.clients_per_chunk: int | None = None
        """Number of clients that train together; None for all of a round. Chosen at the set-up of a run."""
        self.network_outputs: int | None = None
        """Number of outputs of the caller's own network, if known. It may have classes that no label shows."""
        self.chunks_at_a_time = 1
        """Number of such chunks of clients that take their steps in turns. Chosen at the set-up of a run."""

    def _check_options(self, crop_padding: int, flip: bool, augment_public: bool) -> None:
        """Raise an OptionError for an option that is out of range."""
        check_integer("batch_size", self.batch_size, also=["full"])
        check_integer("eval_batch_size", self.eval_batch_size)
        check_integer("num_classes", self._num_classes, optional=True)
        check_integer("num_workers", self.num_workers, 0)
        check_integer("crop_padding", crop_padding, 0, le=2**10)
        check_number("device_cache_mb", self.device_cache_mb, ge=0, hint="0 keeps all images in the memory of the host")
        check_choice("sampling", self.sampling, get_args(Sampling))
        check_choice("flip", flip, [False, True])
        check_choice("augment_public", augment_public, [False, True])
        check_choice("shifts_when", self.shifts_when, get_args(ShiftsWhen))
        check_choice("on_broken", self.on_broken, get_args(OnBroken))

    @property
    def run_options(self) -> RunOptions:
        """The options that decide whether the data can be used."""
        return RunOptions(task=self.chosen_task, num_classes=self._num_classes, image_size=self.image_size)

    def prepare_data(self) -> None:
        """Download missing files of the datasets that allow it."""
        if self.division is not None:
            self.division.download()
        for shift in self.shifts.values():
            if isinstance(shift, ImageSet):
                shift.download()

    def teardown(self, stage: str = "fit") -> None:
        """End the processes that read images."""
        self._pools.close()

    def setup(self, stage: str = "fit") -> None:
        """Divide and check the data. Does so only once, however often it is called."""
        _ = self.checked

    @cached_property
    def checked(self) -> CheckedData:
        """The data, divided and checked.

        Raises:
            FileNotFoundError: If a dataset's files are missing.
            ValueError: If the data cannot be divided as configured, or do not fit the task.
            TypeError: If images or labels have an unsupported type.
        """
        with collection_paused():
            return self._check_data()

    def _check_data(self) -> CheckedData:
        """Divide and check the data; see :attr:`checked`."""
        if self.division is not None:
            divided = self.division.share_out()
        else:
            assert self.data is not None
            divided = self.data
        resolve = SubsetResolver()
        evaluates_test = self.evaluate_on == "test"
        # Test images that are not used are not read either.
        data = divided if evaluates_test else replace(divided, test=[])
        data = without_broken(data, self.on_broken, self.num_workers, resolve, self.image_size)
        held_out: list[Dataset[Any]] = []
        if self.client_validation:
            train, held_out = hold_out(data.train, self.client_validation, self._held_out_seed)
            data = replace(data, train=train)
        if evaluates_test:
            self._record = self._partition_record(data, held_out, resolve)
        else:
            # The record has all parts of the division, also the test images that are not used.
            self._record = self._partition_record(replace(data, test=divided.test), held_out, resolve)
            data = replace(data, test=held_out)
        self._test_sets = data.test
        checked = check(
            data, self._num_classes, self.image_size, resolve, self.chosen_task, network_outputs=self.network_outputs
        )
        if evaluates_test:
            checked.held_out = held_out
            self.conditions = conditions(self.shifts, checked, self.image_size)
        else:
            self.conditions = []
        shape, _ = checked.image_format
        self.prepare.check_shape(shape)
        if self.prepare.augment_public and checked.public is not None:
            public_shape, _ = first_image_format(checked.public)
            self.prepare.check_shape(public_shape)
        self.num_clients = len(data.train)
        self.train_sizes = checked.train.sizes
        self.num_classes = checked.num_classes
        self.task = checked.task
        self.prepare = replace(
            self.prepare, task=self.task, num_classes=self.num_classes, prepared_size=checked.prepared_size
        )
        if self.sampling == "balanced":
            self._check_balanced_sampling(checked)
        self._check_movements(self.task)
        if self.prepare.mixing.mixes:
            # A task whose targets cannot be mixed is rejected here, and not in the first step.
            blank = self.task.blank_targets((1, 1), self.num_classes, torch.device("cpu"))
            self.task.mix(blank, blank, torch.ones(1, 1), self.num_classes)
        self.classes = checked.classes
        self.client_names = None if data.client_names is None else list(data.client_names)
        self._check_windows(self._medical_reading(checked))
        for store in (checked.train, checked.test):
            if isinstance(store, MapStore):
                store.client_names = self.client_names
        return checked

    def _check_windows(self, reading: MedicalReading) -> None:
        """Raise an OptionError if the saved run would have no window for a client, whose name a partition has drawn."""
        for client in self.client_names or [str(number) for number in range(self.num_clients)]:
            reading.of_client(client)

    def _medical_reading(self, checked: CheckedData) -> MedicalReading:
        """Return how the clients' medical images are decoded."""
        source = first_image_set(checked) if self.division is None else self.division.dataset
        reading: MedicalReading = getattr(source, "medical", DEFAULT_READING)
        return reading

    def _check_movements(self, task: Task) -> None:
        """Raise an OptionError if images are changed in ways that make their targets wrong."""
        task.check_augmentation(self.prepare.augmentations)
        if self.division is not None:
            task.check_moved_images(self.division.dataset.movements, "the clients' images")
        check_movements(self.shifts, task)

    def _check_balanced_sampling(self, checked: CheckedData) -> None:
        """Raise an OptionError if the images of a client cannot be drawn by class."""
        problem = ""
        remedy = "set sampling='uniform'"
        if not checked.task.exclusive:
            problem = f"the data have {checked.task.labels_per_image}"
        elif any(labels is None for labels in checked.train.client_labels()):
            problem = "the labels are not all known before training"
            remedy += ", or use data that declare their labels (targets=)"
        if problem:
            raise OptionError(
                f"sampling='balanced' needs the class of each training image, but {problem}; {remedy}",
                name="sampling",
                value=self.sampling,
            )

    def _partition_record(
        self, data: FederatedData, held_out: Sequence[Dataset[Any]], resolve: Resolve
    ) -> dict[str, Any]:
        """Return the content of ``partition.json``: each client's positions in the dataset, or sizes without one."""
        if self.division is not None:
            return self.division.record(data, held_out, resolve)
        record: dict[str, Any] = {
            "num_clients": len(data.train),
            "train_sizes": _count_items(data.train, resolve),
            "test_sizes": _count_items(data.test, resolve) or [0] * len(data.train),
            "public_size": 0 if data.public is None else len(resolve(data.public).rows),
        }
        if held_out:
            record["client_validation_sizes"] = _count_items(held_out, resolve)
        return record

    def configure_rounds(
        self,
        *,
        seed: int,
        clients_per_round: int | None,
        phases: Sequence[Phase],
        image_config: ImageConfig | None = None,
        private: PrivateSampling | None = None,
        eligible: Eligible | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Configure the rounds. The defaults are seed 0, all clients, one epoch, and no normalisation constants.

        Args:
            seed: The run's seed.
            clients_per_round: Clients C drawn in each round; None for all.
            phases: The phases of local training in a round.
            image_config: Image size and normalisation of the backbone.
            private: How batches are drawn in private training, with the streams of each phase.
            eligible: Returns those of the given clients that may still take part; None if all may.
            dtype: Type that floating-point images are converted to; None keeps theirs.

        Raises:
            ValueError: If there are fewer clients than are to be drawn, or the images do not fit the backbone.
        """
        checked = self.checked  # sets num_clients
        check_integer(
            "clients_per_round",
            clients_per_round,
            le=self.num_clients,
            optional=True,
            hint=f"there are {self.num_clients} clients",
        )
        if not phases:
            raise ValueError("there are no phases of local training; pass at least one")
        if image_config is not None:
            checked.check_channels(image_config.input_size[0])
        self._clients_per_round = clients_per_round
        self._phases = phases
        self._private = private
        self._eligible = eligible
        self._shares = None
        secure = private is not None and private.secure
        self.prepare = replace(self.prepare, image_config=image_config, seed=seed, secure=secure, dtype=dtype)

    def plan(self, round: int) -> RoundPlan:
        """Draw a round's clients, as a function of the run's seed, the round and the eligible clients.

        Raises:
            ValueError: If no client is eligible.
        """
        return self.shares(round).plan

    def shares(self, round: int) -> Shares:
        """Return a round's clients and the rank that trains each of them.

        The last round is cached: eligibility may change during a round, but its clients must not.
        """
        if self._shares is None or self._shares.plan.round != round:
            num_clients = len(self.checked.train.sizes)
            cohort = sample_cohort(self.prepare.seed, round, num_clients, self._clients_per_round, self._eligible)
            plan = self.plan_for(cohort, round)
            if self.trainer is None:
                self._shares = Shares.of(plan)
            else:
                self._shares = Shares.of(plan, self.trainer.world_size, self.trainer.global_rank)
        return self._shares

    def plan_for(self, clients: Sequence[int], round: int, phases: Sequence[Phase] | None = None) -> RoundPlan:
        """Plan a round of the given clients. The phases are those of every round by default."""
        return make_plan(
            round,
            clients,
            self.checked.train.sizes,
            phases or self._phases,
            self.batch_size,
            self.clients_per_chunk,
            self.chunks_at_a_time,
        )

    def train_dataloader(self) -> BatchLoader:
        """Serve this rank's clients of the trainer's current round; ``len()`` is the round's number of steps."""
        round = 0 if self.trainer is None else self.trainer.current_epoch
        return self.cohort_loader(self.shares(round).local_plan)

    def first_batch(self, clients: Sequence[int]) -> CohortBatch:
        """Return the first training batch of the given clients, prepared, for dry runs at set-up.

        The batch is the same with and without privacy: a Poisson sample might be empty.
        """
        plan = self.plan_for(clients, 0)
        store = self.samples_of(self.checked.train)
        batch = one_of(RoundBatches(store, plan, self.batch_size, self.prepare.seed)[0])
        for _, reason in batch.failed:
            raise ValueError(reason)
        return self.prepare(batch)

    def cohort_loader(
        self, plan: RoundPlan, private: PrivateSampling | None = None, *, each_image_once: bool = False
    ) -> BatchLoader:
        """Serve the cohort batches of a plan. Outside the Trainer, pass each batch to :meth:`prepare`.

        Args:
            plan: The clients and their numbers of steps.
            private: How batches are drawn in private training, in which an item is a dict with the batch of each
                stream. The default is that of :meth:`configure_rounds`.
            each_image_once: Whether a pass has each image once, whatever the option ``sampling``.
        """
        store = self.samples_of(self.checked.train)
        sampling = "uniform" if each_image_once else self.sampling
        batches = RoundBatches(store, plan, self.batch_size, self.prepare.seed, private or self._private, sampling)
        return self._pools.loader(batches, store, self.num_workers)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Serve the images that clients are evaluated on, each once; an empty list if there are none."""
        if self.checked.test is None:
            return []
        return self._evaluation_loader(self.samples_of(self.checked.test))

    test_dataloader = predict_dataloader = val_dataloader

    def examples(self, client: int, limit: int, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training images (B, ...) of a client, prepared without augmentation, and their labels, on ``device``.

        Images that cannot be read are left out, since they fail the client's training instead.

        Args:
            client: The client.
            limit: Number of images, evenly spaced in the training set, if it has more.
            device: Device of the batches.
        """
        return self.examples_in(self.samples_of(self.checked.train), client, limit, device)

    def examples_in(
        self, store: Samples, client: int, limit: int, device: torch.device | str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what :meth:`examples` yields, from a store of training images."""
        size = store.sizes[client]
        count = min(size, limit)
        indices = torch.arange(count) * size // count
        for batch_indices in indices.split(self.eval_batch_size):
            owners = torch.full_like(batch_indices, client)
            images, labels, failed = store.read(owners, batch_indices, (self.prepare.seed, EXAMPLES_STREAM))
            assert labels is not None
            is_readable = [position not in failed for position in range(len(images))]
            if any(is_readable):
                targets = self.prepare.prepare_targets(to_device_async(labels[is_readable], device), images)
                yield self.prepare(to_device_async(images[is_readable], device)), targets

    def shift_loader(self, condition: Condition) -> BatchLoader:
        """Serve the images of one of the ``conditions``, each once, corrupted if it has a corruption.

        A batch has the client that each image belongs to, which is 0 for images of another set.
        """
        if not condition.corruption:
            return self._evaluation_loader(self.samples_of(condition.store))
        return self._evaluation_loader(CorruptedStore(condition, self.prepare.seed, self.image_size))

    @property
    def public_size(self) -> int:
        """Number of public images; 0 if there are none."""
        return sum(self.checked.public.sizes) if self.checked.public else 0

    @property
    def test_size(self) -> int:
        """Number of images that clients are evaluated on; 0 if there are none."""
        return sum(self.checked.test.sizes) if self.checked.test else 0

    @property
    def tokens(self) -> bool:
        """Whether samples are texts (L,) of int64 tokens instead of images."""
        _, dtype = self.checked.image_format
        return dtype == torch.int64

    @property
    def validation_size(self) -> int:
        """Number of labelled images on the server; 0 if there are none."""
        return sum(self.checked.server_validation.sizes) if self.checked.server_validation else 0

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Draw the public images for the steps of a round's distillation, as a stream of permutations.

        Returns:
            Indices (steps, B), with B at most ``public_size``, derived from the run's seed and the round. They are
            positions in the set, or with ``augment_public`` positions modulo ``public_size``.
        """
        return public_indices(self.public_size, round, steps, batch_size, self.prepare)

    def public_images(self, indices: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Read public images (B, ...), prepared for the model, to ``device``.

        An index always gives the same image, even if the dataset draws at random.
        """
        store = self.checked.public
        assert store is not None
        positions = indices % self.public_size
        owners = torch.zeros_like(positions)
        images, _ = self.samples_of(store).take(owners, positions, (self.prepare.seed, PUBLIC_STREAM))
        augmented = augment_public_images(to_device_async(images, device), indices, self.public_size, self.prepare)
        return self.prepare(augmented)

    def pictures(self, part: Literal["test", "public"], positions: Tensor) -> Tensor:
        """Read images (B, ...) to show them, prepared for the model, also where features are served in their place.

        Args:
            part: The clients' test images, or the server's public images.
            positions: Positions (B,) in the test batches, or in the public set.
        """
        store = self.checked.test if part == "test" else self.checked.public
        assert store is not None
        batches = EvalBatches(store, self.eval_batch_size, self.prepare.seed)
        key = (self.prepare.seed, -1 if part == "test" else PUBLIC_STREAM)
        images, _ = store.take(batches.owners[positions], batches.indices[positions], key)
        return self.prepare(images)

    def test_groups(self, client: int) -> NDArray[Any]:
        """Return the group (N,) of each image that a client is evaluated on, such as its patient.

        An image is a group by itself unless its image set has a group column.
        """
        self.setup()
        return groups_of_images(self._test_sets[client])

    def test_batches_of(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images (B, ...) that a client is evaluated on as they are stored, and their labels, prepared.

        Batches do not depend on the images of other clients.
        """
        assert self.checked.test is not None
        store = self.checked.test.select([client])
        batches = EvalBatches(store, self.eval_batch_size, self.prepare.seed)
        for x, y, _ in loader(batches, store, self.num_workers):
            yield x, self.prepare.prepare_targets(y, x)

    def validation_batches(self, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the server's labelled images, prepared, and their labels, on ``device``; nothing if there are none."""
        return self._read_labelled_images(self.checked.server_validation, device)

    def test_batches(self, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images that clients are evaluated on, prepared, and their labels, on ``device``; each once."""
        return self._read_labelled_images(self.checked.test, device)

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of the images before the model sees them, without augmentation."""
        source = first_image_set(self.checked) if self.division is None else self.division.dataset
        full_scale = getattr(source, "full_scale", None)
        return preprocessing_of(self.checked, self.prepare, full_scale, self._medical_reading(self.checked))

    def partition_dict(self) -> dict[str, Any]:
        """Return the content of ``partition.json``."""
        self.setup()
        return self._record

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Names and hashes of the data in a checkpoint, so that a run is resumed only with the same data."""
        return fingerprint_of(self.checked, self.client_names, self.evaluate_on)

    def transfer_batch_to_device(self, batch: BatchT, device: torch.device, dataloader_idx: int) -> BatchT:
        """Move a batch to the device, except the owners of test images.

        The host needs the owners to arrange the evaluation, and would wait for the device to get them back.
        """
        moved: BatchT = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if isinstance(batch, EvalBatch):
            return moved._replace(owner=batch.owner)
        return moved

    def on_after_batch_transfer(self, batch: BatchT, dataloader_idx: int) -> BatchT:
        """Prepare a batch on the device."""
        return self.prepare(batch)

    def use_features(
        self, encode: Callable[[Tensor], Tensor] | None, num_features: int = 0, image_shape: tuple[int, ...] = ()
    ) -> None:
        """Serve features (F,) from now on instead of images that are not augmented.

        Args:
            encode: Computes features (B, F) of images (B, ...) as they are stored; None serves images again.
            num_features: Number of features F of an image.
            image_shape: Shape of the prepared images that ``encode`` supports. Other images are served as they are.
        """
        if encode is None:
            self._features = None
            return
        self._features = FeatureCache(
            encode,
            self.prepare.prepare_targets,
            num_features,
            limit_bytes=self.device_cache_mb * BYTES_PER_MB,
            supports=lambda images: tuple(self.prepare(images).shape[1:]) == image_shape,
        )

    def _read_labelled_images(
        self, labelled_store: Store | None, device: torch.device | str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if labelled_store is not None:
            for x, y, _ in self._evaluation_loader(self.samples_of(labelled_store)):
                targets = self.prepare.prepare_targets(to_device_async(y, device), x)
                yield self.prepare(to_device_async(x, device)), targets

    def _evaluation_loader(self, store: Samples) -> BatchLoader:
        batches = EvalBatches(store, self.eval_batch_size, self.prepare.seed)
        return self._pools.loader(batches, store, self.num_workers)

    def samples_of(self, store: Store) -> Samples:
        """Return a store's samples: on the trainer's accelerator if they are small, and as features if these are used.

        Augmented images have no features, since they change from round to round. Nor have those that worker processes
        read.
        """
        if isinstance(store, MapStore):
            if self.num_workers or not store.is_repeatable:
                return store
        elif self.trainer is not None and self.trainer.strategy.root_device.type != "cpu":
            store.to(self.trainer.strategy.root_device, self.device_cache_mb * BYTES_PER_MB)
        is_augmented = store is self.checked.train and (self.prepare.augments or self.prepare.mixing.mixes)
        is_augmented |= store is self.checked.public and self.prepare.augment_public
        if self._features is None or is_augmented:
            return store
        return self._features(store)


def _check_types(
    data: object, dataset: object, partition: object, public: object, task: object, shifts: object, image_size: object
) -> None:
    """Raise an OptionError for an option of the data module that has a wrong type."""
    check_integer("image_size", image_size, le=2**16, optional=True)
    types: dict[str, tuple[object, type, str]] = {
        "data": (data, FederatedData, "FederatedData(train=[...])"),
        "dataset": (dataset, ImageSet, "Digits()"),
        "partition": (partition, Partition, "Dirichlet(20, 0.1)"),
        "public": (public, ImageSet, "Photographs()"),
        "task": (task, Task, "Classification()"),
        "shifts": (shifts, Mapping, "{'noise': 'gaussian_noise'}"),
    }
    for name, (value, kind, example) in types.items():
        check_type(name, value, kind, example)


def _find_held_out_seed(
    client_validation: float, client_validation_seed: int | None, evaluate_on: EvaluateOn, default: int
) -> int:
    """Return the seed with which held-out images are drawn.

    Raises:
        ValueError: If options of held-out images are out of range or do not fit one another.
    """
    check_number("client_validation", client_validation, ge=0, lt=1, hint="it is a share of the training images")
    check_integer("client_validation_seed", client_validation_seed, 0, le=None, optional=True)
    if client_validation_seed is not None and not client_validation:
        raise OptionError(
            f"client_validation_seed={client_validation_seed} has no effect without client_validation, the share of "
            "their training images that clients hold out; set it, for example client_validation=0.2",
            name="client_validation_seed",
            value=client_validation_seed,
        )
    check_choice("evaluate_on", evaluate_on, get_args(EvaluateOn))
    if evaluate_on == "validation" and not client_validation:
        raise ValueError(
            "evaluate_on='validation' needs client_validation, the share of their training images that clients hold "
            "out, got 0; set it, for example client_validation=0.2"
        )
    return default if client_validation_seed is None else client_validation_seed


def _count_items(datasets: Sequence[Dataset[Any]], resolve: Resolve) -> list[int]:
    """Return the number of items of each dataset."""
    return [len(resolve(dataset).rows) for dataset in datasets]
