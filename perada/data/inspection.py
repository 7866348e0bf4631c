# SPDX-License-Identifier: Apache-2.0
"""Inspection of a source of images before training: how it is interpreted, and what is wrong with it.

All images that cannot be read are found before the first round, and rejected or skipped.

Shape suffixes: M clients, K classes.
"""

import hashlib
import io
import json
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm import tqdm

from perada.core.text import abbreviated, value_text
from perada.data.batches.datasets import (
    Resolve,
    ResolvedSubset,
    TensorFormat,
    check_same_format,
    declared_labels,
    image_and_label,
    isolated_randomness,
    length,
    location_of,
    read_item,
    resized_format,
    resolve_subset,
    stored_images,
    tensor_format,
)
from perada.data.batches.transforms import (
    WHOLE_SCALE,
    MissingImageError,
    UnreachableImageError,
    UnreadableImageError,
    decode,
    to_image,
)
from perada.data.batches.workers import WorkerProgress, explain_worker_deaths, worker_loader
from perada.data.federated import FederatedData
from perada.data.partitions.division import Division, positions
from perada.data.partitions.shares import Array
from perada.data.sets.base import ImageSet, split_of
from perada.data.sets.manifest import ImageFiles
from perada.data.training_checks import RunOptions, check_as_training_does, shares_of_values
from perada.system.files import write_atomic
from perada.tasks import Task, task_of_labels

OnBroken = Literal["raise", "skip"]
SKIPPED = "skipped because on_broken is skip"
"""End of the warning of images that cannot be read."""
_FEW_NUMBERS = 2**16
"""Size of tensors that are checked together with others, because the call would take longer than the check."""
_TENSORS_OF_GROUP = 1024
"""Number of tensors that are checked together, so that their copy is at most 256 MB in single precision."""
T = TypeVar("T")


class BrokenImagesError(ValueError):
    """Raised for images that cannot be read, unless they are to be skipped."""


@dataclass
class Inspection:
    """The results of an inspection.

    Duplicates (``leaks``, ``shared``, ``repeated``, ``contradictions``) are pairs of names of images whose pixels are
    equal.

    Attributes:
        clients: Names of the clients, or their numbers.
        classes: Names of the classes, or their numbers.
        train: Number of training images (M, K) of each client and class; with several labels, of those that have
            each.
        test: Number of test images (M, K) of each client and class.
        unknown_train: Number of training images (M, K) of each client and label for which it is unknown.
        unknown_test: The same of test images.
        images: Numbers of training and test images (M, 2) of each client.
        sizes: Width and height (N, 2) of each image that can be read.
        modes: Numbers of images by Pillow's mode, such as ``RGB`` or ``I;16``, or by number of channels.
        broken: Error of each file that cannot be read.
        leaks: Test images that are also training images.
        shared: Training images of one client that another client has, too.
        repeated: Training images that a client has more than once.
        contradictions: Images, of either split, that have other labels than an equal image.
        notes: Warnings and remarks.
        rejections: Errors with which training would begin.
        mask_values: Share of the pixels of each client's masks that have each value; empty without masks.
        several_labels: Whether an image may have several labels, or a mask of several classes.
    """

    clients: list[str]
    classes: list[str]
    train: Array
    test: Array
    unknown_train: Array
    unknown_test: Array
    images: Array
    sizes: Array
    modes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    leaks: list[tuple[str, str]] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    contradictions: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    mask_values: list[dict[int, float]] = field(default_factory=list)
    several_labels: bool = False

    @property
    def usable(self) -> bool:
        """Whether training can start: no image is broken or leaks, and labels and classes are accepted."""
        return not (self.broken or self.leaks or self.rejections)

    @property
    def single_client_classes(self) -> list[tuple[str, str]]:
        """Pairs of a class and the only client with training images of it; empty if there is one client only."""
        if len(self.clients) < 2:
            return []
        num_owners = (self.train > 0).sum(0)
        pairs = []
        for k in np.flatnonzero(num_owners == 1):
            owner = int(self.train[:, k].argmax())
            pairs.append((self.classes[k], self.clients[owner]))
        return pairs


class _ImageFacts(NamedTuple):
    """The facts about one image, or the error if it cannot be read.

    Attributes:
        name: Path of the file, or position in its set.
        digest: Hash of the decoded pixels, in the size of the file.
        image_size: Width and height.
        mode: Pillow's mode, or the number of channels.
        error: Why the image cannot be read; empty if it can.
        num_frames: Number of pictures in the file.
        brightest: Largest value of a grey image with integers of more than 8 bits, else 0.
    """

    name: str
    digest: bytes = b""
    image_size: tuple[int, int] = (0, 0)
    mode: str = ""
    error: str = ""
    num_frames: int = 1
    brightest: int = 0


def inspect_division(division: Division, options: RunOptions | None = None) -> Inspection:
    """Divide the images as a run would, and read all of them.

    Args:
        division: The images and how they are divided.
        options: Options of the run; None for the defaults.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If the set cannot be read or divided.
    """
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        data = division.share_out()
    # A partition may assign no test images.
    test = data.test or [Subset(division.dataset.with_split(False), [])] * len(data.train)
    # Both are subsets of the divided image set.
    train_set = cast(ImageSet, resolve_subset(data.train[0]).base)
    test_set = cast(ImageSet, resolve_subset(test[0]).base)
    labels_of_sets = [images.labels for images in (train_set, test_set) if images.labels is not None]
    # Tables know what their columns mean; of other sets, the labels show it.
    options = options or RunOptions(task=getattr(train_set, "task", None))
    task: Task = options.task or getattr(train_set, "task", None) or task_of_labels(labels_of_sets[0])
    nonempty_labels = [labels for labels in labels_of_sets if len(labels)]
    num_classes = data.num_classes or max(task.count_classes(labels) for labels in nonempty_labels) or 1
    train_facts = _read_all(train_set)
    test_facts = _read_all(test_set)
    readable = [facts for facts in train_facts + test_facts if not facts.error]
    messages = [" ".join(str(warning.message).split()) for warning in recorded_warnings]
    inspection = Inspection(
        clients=list(data.client_names or map(str, range(len(data.train)))),
        classes=list(data.classes or map(str, range(num_classes))),
        train=np.stack([_class_counts(dataset, task, num_classes) for dataset in data.train]),
        test=np.stack([_class_counts(dataset, task, num_classes) for dataset in test]),
        unknown_train=np.stack([_unknown_counts(dataset, task, num_classes) for dataset in data.train]),
        unknown_test=np.stack([_unknown_counts(dataset, task, num_classes) for dataset in test]),
        images=np.array([[length(dataset) for dataset in pair] for pair in zip(data.train, test, strict=True)]),
        sizes=np.array([facts.image_size for facts in readable], dtype=np.int64).reshape(-1, 2),
        modes=Counter(facts.mode for facts in readable),
        broken=[facts.error for facts in train_facts + test_facts if facts.error],
        notes=list(dict.fromkeys(messages)),
        several_labels=any(labels.ndim > 1 for labels in labels_of_sets),
    )
    full_scale = getattr(train_set, "full_scale", None) or WHOLE_SCALE
    inspection.notes += _notes_on_modes(readable, full_scale)
    unreadable_rows = {
        True: {position for position, facts in enumerate(train_facts) if facts.error},
        False: {position for position, facts in enumerate(test_facts) if facts.error},
    }
    findings = check_as_training_does(data, options, unreadable_rows)
    inspection.rejections = findings.rejections
    inspection.notes += [message for message in findings.warnings if message not in inspection.notes]
    if task.per_pixel:
        listed_values = getattr(train_set, "mask_values", None)
        for pair in zip(data.train, test, strict=True):
            inspection.mask_values.append(shares_of_values(pair, task.border_target, listed_values))
    owners = {}
    for client, dataset in enumerate(data.train):
        owners.update(dict.fromkeys(positions(dataset), client))
    _find_duplicates(inspection, train_facts, test_facts, owners)
    labelled_images: list[_LabelledImage] = []
    for images, facts in ((train_set, train_facts), (test_set, test_facts)):
        if images.labels is not None:
            labelled_images += map(_LabelledImage, facts, images.labels)
    inspection.contradictions = _find_contradictions(labelled_images, task)
    return inspection


@dataclass(frozen=True)
class _LabelledImage:
    """An image that was read, with its label.

    Attributes:
        image_facts: What the file showed.
        label: The label, a vector of labels, or a mask.
    """

    image_facts: _ImageFacts
    label: torch.Tensor


def _find_contradictions(labelled_images: Sequence[_LabelledImage], task: Task) -> list[tuple[str, str]]:
    """Return pairs of names of images whose pixels are equal, but whose known labels are not."""
    first_of_digest: dict[bytes, _LabelledImage] = {}
    pairs = []
    for image in labelled_images:
        if image.image_facts.error:
            continue
        first = first_of_digest.setdefault(image.image_facts.digest, image)
        if torch.equal(first.label, image.label):
            continue
        both_known = task.known(first.label.unsqueeze(0)) & task.known(image.label.unsqueeze(0))
        if bool(((first.label != image.label) & both_known[0]).any()):
            pairs.append((image.image_facts.name, first.image_facts.name))
    return pairs


def _read_all(image_set: ImageSet) -> list[_ImageFacts]:
    """Read all images of a set with a thread per processor, and show the progress."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(partial(_read_facts, image_set), range(len(image_set)))
        return list(tqdm(results, total=len(image_set), desc="reading", leave=False, disable=None))


def _class_counts(dataset: Dataset[Any], task: Task, num_classes: int) -> Array:
    """Count the images (K,) of each class, or with several labels or masks, the images that have each."""
    labels = declared_labels(dataset)
    assert isinstance(labels, torch.Tensor)
    if not task.has_classes:
        # Every image has every number.
        return np.full(num_classes, len(labels))
    array: Array = task.class_counts(labels, num_classes).numpy()
    return array


def _unknown_counts(dataset: Dataset[Any], task: Task, num_classes: int) -> Array:
    """Count the images (K,) whose label is unknown, which happens only with several labels."""
    labels = declared_labels(dataset)
    assert isinstance(labels, torch.Tensor)
    if labels.ndim != 2:
        return np.zeros(num_classes, dtype=np.int64)
    array: Array = (~task.known(labels)).sum(0).numpy()
    return array


def _find_duplicates(
    inspection: Inspection,
    train_facts: list[_ImageFacts],
    test_facts: list[_ImageFacts],
    owners: Mapping[int, int],
) -> None:
    """Add images whose pixels are equal to an inspection.

    Args:
        inspection: Its duplicates are filled in.
        train_facts: All images of the training split.
        test_facts: All images of the test split.
        owners: Client of each training image by position. Images that no client has are missing.
    """
    names_of_digest: dict[bytes, list[str]] = defaultdict(list)
    owners_of_digest: dict[bytes, set[int | None]] = defaultdict(set)
    for position, facts in enumerate(train_facts):
        owner = owners.get(position)
        copies = names_of_digest[facts.digest]
        if copies and not facts.error:
            pair = (facts.name, copies[0])
            if owner in owners_of_digest[facts.digest]:
                inspection.repeated.append(pair)
            else:
                inspection.shared.append(pair)
        copies.append(facts.name)
        owners_of_digest[facts.digest].add(owner)
    for facts in test_facts:
        if not facts.error and facts.digest in names_of_digest:
            inspection.leaks.append((facts.name, names_of_digest[facts.digest][0]))


def _notes_on_modes(image_facts: list[_ImageFacts], white: float) -> list[str]:
    """Return remarks on dark grey images, and on files with several pictures."""
    notes = []
    brightest_pixels = [facts.brightest for facts in image_facts if facts.brightest]
    if brightest_pixels and 2 * max(brightest_pixels) < white:
        brightest = max(brightest_pixels)
        proposed_full_scale = 2 ** brightest.bit_length() - 1
        notes.append(
            f"the brightest pixel of the {len(brightest_pixels)} grey images of more than 8 bits is {brightest}, but "
            f"white is {white:g}, so they are dark: set full_scale to the value of white, such as {proposed_full_scale}"
        )
    multi_frame = [facts.name for facts in image_facts if facts.num_frames > 1]
    if multi_frame:
        notes.append(f"only the first picture of files with several ({abbreviated(multi_frame)}) is read")
    return notes


def _read_facts(image_set: ImageSet, row: int) -> _ImageFacts:
    """Read an image of a set."""
    if not isinstance(image_set, ImageFiles):
        item = image_set[row]
        image = to_image(item[0] if isinstance(item, tuple) else item)
        if image.ndim != 3:
            raise ValueError(
                f"{type(image_set).__name__} has no images, and only images can be inspected; use a set of images"
            )
        channels, height, width = image.shape
        pixels = image.contiguous().view(torch.uint8).numpy().tobytes()
        return _ImageFacts(
            name=f"{split_of(image_set)}, image {row}",
            digest=hashlib.sha256(pixels).digest(),
            image_size=(width, height),
            mode="1 channel" if channels == 1 else f"{channels} channels",
        )
    path = image_set.manifest.paths[row]
    try:
        image_set.read(path)
        content = image_set.content(path)
    except (OSError, ValueError) as error:
        return _ImageFacts(path, error=str(error))
    with Image.open(io.BytesIO(content)) as picture:
        decoded = decode(picture, image_set.mode, image_set.full_scale).contiguous()
        shape = tuple(decoded.shape)
        brightest = 0
        if picture.mode.startswith("I"):
            brightest = int(np.asarray(picture).max())
        return _ImageFacts(
            name=path,
            digest=hashlib.sha256(f"{shape} ".encode() + decoded.numpy().tobytes()).digest(),
            image_size=picture.size,
            mode=picture.mode,
            num_frames=_count_frames(picture),
            brightest=brightest,
        )


def _count_frames(picture: Image.Image) -> int:
    """Return the number of frames of an opened file, or 1 if its table of frames is damaged: only the first is read."""
    try:
        return int(getattr(picture, "n_frames", 1))
    except Exception:  # Pillow's plugins raise many types
        return 1


def without_broken(
    data: FederatedData,
    on_broken: OnBroken,
    workers: int,
    resolve: Resolve = resolve_subset,
    image_size: int | None = None,
) -> FederatedData:
    """Read every image of the clients and the server once, and reject or skip those that cannot be read.

    Files are read with a thread per processor. The result is cached until a file changes (its size or a time stamp), in
    ``perada`` in the user's cache folder. Items of other datasets are read by ``workers`` processes.

    Args:
        data: The data.
        on_broken: Whether to reject or to skip images that cannot be read.
        workers: Number of processes that read items.
        resolve: Finds the dataset behind a Subset.
        image_size: Height and width that uint8 images are resized to; None keeps them.

    Raises:
        BrokenImagesError: If images cannot be read and ``on_broken`` is "raise". The message lists all of them.
        ValueError: If images of a dataset cannot be batched together.
        TypeError: If something is not a map-style dataset.
    """
    check_datasets(data)
    parts = data.parts()
    # Clients often have Subsets of one dataset, whose items are read once. Each entry is a dataset and its rows in it.
    bases = [_resolve_named(name, dataset, resolve) for name, dataset in parts]
    problems_of_base = _find_problems([name for name, _ in parts], bases, workers, image_size)
    if not any(problems_of_base.values()):
        return data

    datasets: list[Dataset[Any]] = []
    messages = []
    for (name, dataset), (base, rows) in zip(parts, bases, strict=True):
        problems = problems_of_base[id(base)]
        if not problems:
            datasets.append(dataset)
            continue
        readable = []
        for index, row in enumerate(rows.tolist()):
            if row in problems:
                messages.append(f"{name}: {problems[row]}")
            else:
                readable.append(index)
        # The problems may be in rows that this dataset does not have.
        if len(readable) < len(rows):
            dataset = Subset(dataset, readable)
        datasets.append(dataset)
    if not messages:
        return data
    noun = "image" if len(messages) == 1 else "images"
    summary = f"{len(messages)} {noun} cannot be read ({'; '.join(messages)})"
    if on_broken == "raise":
        raise BrokenImagesError(f"{summary}: fix or remove them, or skip them with on_broken: skip (--data.on_broken)")
    warnings.warn(f"{summary}: {SKIPPED}", stacklevel=2)
    return data.with_datasets(datasets)


def _find_problems(
    names: Sequence[str], bases: Sequence[ResolvedSubset], workers: int, image_size: int | None
) -> dict[int, dict[int, str]]:
    """Return a description of each row that cannot be read, by row, for each dataset by its id.

    Args:
        names: Names of the clients' and the server's datasets.
        bases: The dataset behind each of them, and its rows.
        workers: Number of processes that read items.
        image_size: Height and width that uint8 images are resized to; None keeps them.
    """
    rows_of_base: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
    owners_of_base: dict[int, dict[str, np.ndarray[Any, Any]]] = defaultdict(dict)
    for name, (base, rows) in zip(names, bases, strict=True):
        rows_of_base[id(base)].append(rows)
        owners_of_base[id(base)][name] = rows
    problems_of_base = _finite_bases({id(base): base for base, _ in bases}.values())
    unread: dict[int, _Unread] = {}
    for base, _ in bases:
        if id(base) in problems_of_base or id(base) in unread:
            continue
        problems = _find_broken(base, rows_of_base[id(base)])
        if problems is None:
            unread[id(base)] = _Unread(base, _unique_rows(rows_of_base[id(base)]), owners_of_base[id(base)])
        else:
            problems_of_base[id(base)] = problems
    problems_of_unread = _find_broken_items(list(unread.values()), workers, image_size)
    problems_of_base.update(zip(unread, problems_of_unread, strict=True))
    return problems_of_base


def _resolve_named(name: str, dataset: Dataset[Any], resolve: Resolve) -> ResolvedSubset:
    """Resolve a dataset; an error begins with the dataset's name."""
    try:
        return resolve(dataset)
    except (IndexError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_datasets(data: FederatedData) -> None:
    """Check that all datasets are map-style datasets, before any is opened.

    Raises:
        TypeError: If a client's or the server's dataset is a DataLoader, a dict of datasets or a stream, or the
            clients' datasets are not in a list.
    """
    for name, datasets in (("train", data.train), ("test", data.test)):
        if isinstance(datasets, Sequence) and not isinstance(datasets, str):
            continue
        remedy = ""
        if isinstance(datasets, Mapping):
            remedy = f"; pass {name}=[*datasets.values()] and client_names=[*datasets]"
        elif name == "test" and datasets is None:
            remedy = "; pass test=[] for no evaluation"
        raise TypeError(
            f"FederatedData.{name} must be a list with one dataset per client, got {value_text(datasets)}{remedy}"
        )
    # Whether a dataset can be used depends only on its type, and many clients have datasets of few types.
    usable_types: set[type] = set()
    for name, dataset in data.parts():
        base: Any = dataset
        while type(base) is Subset:
            base = base.dataset
        if type(base) in usable_types:
            continue
        problem = ""
        if isinstance(base, DataLoader):
            problem = "which yields batches instead of items: pass its .dataset"
        elif isinstance(base, Mapping):
            problem = f"with the keys {', '.join(map(repr, base))}, not a dataset: pass one of its entries"
        elif isinstance(base, IterableDataset) or not {"__len__", "__getitem__"} <= {*dir(type(base))}:
            problem = (
                "whose items cannot be indexed: pass a dataset with len() and [index], such as a list of its items"
            )
        if problem:
            kind = "a dict" if isinstance(base, Mapping) else value_text(dataset)
            raise TypeError(f"{name} is {kind}, {problem}")
        usable_types.add(type(base))


def _finite_bases(bases: Iterable[Dataset[Any]]) -> dict[int, dict[int, str]]:
    """Return no problems, by id, for each dataset in memory whose images are all finite.

    Many small tensors are checked together, as every client may have its own. The others are left to
    :func:`_find_broken`.
    """
    finite: dict[int, dict[int, str]] = {}
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for base in bases:
        images = stored_images(base)
        if images is None:
            continue
        if not images.is_floating_point():
            finite[id(base)] = {}
        elif images.numel() <= _FEW_NUMBERS:
            groups[images.dtype, images.device].append((id(base), images.reshape(-1)))
    for group in groups.values():
        for start in range(0, len(group), _TENSORS_OF_GROUP):
            members = group[start : start + _TENSORS_OF_GROUP]
            if torch.cat([images for _, images in members]).isfinite().all():
                finite |= {base_id: {} for base_id, _ in members}
    return finite


def _find_broken(base: Dataset[Any], rows_of_datasets: list[np.ndarray[Any, Any]]) -> dict[int, str] | None:
    """Return a description of each row of a dataset that cannot be read, by row; None if its items must be read.

    Args:
        base: The dataset.
        rows_of_datasets: The rows that each client's or the server's dataset has of it.
    """
    if isinstance(base, ImageFiles) and not base.in_memory:
        return _find_broken_files(base, _unique_rows(rows_of_datasets))
    images = stored_images(base)
    if images is None:
        return None
    # Checked before any work for each row.
    if not images.is_floating_point() or bool(images.isfinite().all()):
        return {}
    is_finite = images.flatten(1).isfinite().all(1).tolist()
    return {row: f"image {row} has NaN or infinity" for row in _unique_rows(rows_of_datasets) if not is_finite[row]}


@dataclass(frozen=True)
class _Unread:
    """A dataset whose items must be read.

    Attributes:
        base: The dataset.
        row_indices: Its rows that are used.
        rows_of_owner: The rows of each owner, by its name. Clients may share a dataset.
    """

    base: Dataset[Any]
    row_indices: list[int]
    rows_of_owner: dict[str, np.ndarray[Any, Any]]

    @cached_property
    def _first_owners(self) -> dict[int, str]:
        """The name of the first owner of each row."""
        owners: dict[int, str] = {}
        for name, rows in self.rows_of_owner.items():
            for row in rows.tolist():
                owners.setdefault(row, name)
        return owners

    def owner_of(self, row: int) -> str:
        """Return the name of the first owner of a row."""
        return self._first_owners[row]


def _find_broken_items(datasets: Sequence[_Unread], workers: int, image_size: int | None) -> list[dict[int, str]]:
    """Read rows of datasets, and return a description of each that cannot be read, by row, for each dataset.

    Args:
        datasets: The datasets. The same processes read all of them.
        workers: Number of processes that read items.
        image_size: Height and width that uint8 images are resized to; None keeps them.

    Raises:
        ValueError: If the images of a dataset's items have different shapes or types.
    """
    places = [(number, row) for number, dataset in enumerate(datasets) for row in dataset.row_indices]
    if not places:
        return [{} for _ in datasets]
    progress = None
    if workers:
        progress = WorkerProgress(workers, partial(_describe_sample, datasets))
    with isolated_randomness(), explain_worker_deaths():
        # Workers call the function that collates a batch, here a single row.
        read_row = partial(_read_row, datasets, progress)
        readings = [*_show_progress(worker_loader(places, workers, progress, collate_fn=read_row), len(places))]
    expected_formats: dict[int, TensorFormat] = {}
    problems: list[dict[int, str]] = [{} for _ in datasets]
    for (number, row), reading in zip(places, readings, strict=True):
        if reading.problem:
            problems[number][row] = reading.problem
        if reading.format is not None:
            image_format = resized_format(reading.format, image_size)
            expected = expected_formats.setdefault(number, image_format)
            dataset = datasets[number]
            if image_format != expected:
                sample = f"{dataset.owner_of(row)}, sample {row}{location_of(dataset.base, row)}"
                check_same_format(sample, image_format, expected)
    return problems


def _unique_rows(rows_of_datasets: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    """Return the rows that are in any of the arrays, ascending."""
    row_indices: list[int] = np.unique(np.concatenate(rows_of_datasets)).tolist()
    return row_indices


def _find_broken_files(image_set: ImageFiles, row_indices: list[int]) -> dict[int, str]:
    """Return a description of each file that cannot be read, by row. The result is cached until a file changes."""
    paths = {row: os.path.abspath(image_set.manifest.paths[row]) for row in row_indices}
    cache = _cache_file(image_set, paths.values())
    if cache is not None:
        with suppress(OSError, ValueError):  # the files have not been read in their present state
            cached_problems = json.loads(cache.read_text(encoding="utf-8"))
            return {row: str(cached_problems[path]) for row, path in paths.items() if path in cached_problems}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = _show_progress(pool.map(partial(_problem_of_file, image_set), row_indices), len(row_indices))
        errors = {row: error for row, error in zip(row_indices, results, strict=True) if error is not None}
    # A list of problems ends with one remedy for all.
    problems = {row: error.problem for row, error in errors.items()}
    # A missing file has no state to compare later, and one that the disk failed to deliver may be intact next time.
    is_certain = all(type(error) is UnreadableImageError for error in errors.values())
    if cache is not None and is_certain:
        with suppress(OSError):  # without a cache the next run reads the files again
            cache.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({paths[row]: problem for row, problem in problems.items()})
            write_atomic(cache, content.encode(), durable=False)
    return problems


def _cache_file(image_set: ImageFiles, paths: Iterable[str]) -> Path | None:
    """Return the cache file for these files in their present state; None if one of them has no state."""
    digest = hashlib.sha256(repr((type(image_set).__name__, image_set.mode, image_set.full_scale)).encode())
    try:
        for path in paths:
            state = os.stat(path)
            # The time of the last status change reveals a file that was replaced with its former modification time.
            times = f"{state.st_mtime_ns}\0{state.st_ctime_ns}"
            digest.update(f"\0{path}\0{state.st_size}\0{times}".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "perada" / "read" / f"{digest.hexdigest()[:32]}.json"


def _problem_of_file(image_set: ImageFiles, row: int) -> UnreadableImageError | MissingImageError | None:
    """Read a file and return the error, if there is one."""
    try:
        image_set.read(image_set.manifest.paths[row])
    except (UnreadableImageError, MissingImageError) as error:
        return error
    except OSError as error:  # a source that reads its own files
        return UnreachableImageError(f"{image_set.manifest.paths[row]} could not be read ({error})")
    return None


def _show_progress(results: Iterable[T], total: int) -> Iterable[T]:
    """Show the progress of a pass over all images."""
    return tqdm(results, total=total, desc="Read all images once", leave=False, disable=None)


def _describe_sample(datasets: Sequence[_Unread], number: int, row: int) -> str:
    """Name a sample of one of the datasets."""
    dataset = datasets[number]
    return f"sample {row}{location_of(dataset.base, row)} of {dataset.owner_of(row)}"


class _Reading(NamedTuple):
    """What is known of an item after it was read once.

    Attributes:
        problem: Why it cannot be used; an empty string if it can.
        format: Shape and type of its image; None if it is not an image.
    """

    problem: str
    format: TensorFormat | None = None


def _read_row(datasets: Sequence[_Unread], progress: WorkerProgress | None, place: tuple[int, int]) -> _Reading:
    """Read an item, given the number of its dataset and its row, in a worker if there are workers."""
    number, row = place
    dataset = datasets[number]
    if progress is None:
        return _read_once(dataset.base, dataset.owner_of(row), row)
    progress.begin(number, row)
    reading = _read_once(dataset.base, dataset.owner_of(row), row)
    progress.end()
    return reading


def _read_once(dataset: Dataset[Any], name: str, row: int) -> _Reading:
    """Read an item, and find what is wrong with it."""
    try:
        item = read_item(dataset, row, name)
    except (UnreadableImageError, MissingImageError) as error:
        return _Reading(error.problem)
    # The checks of the data report items that are not images.
    with suppress(TypeError, IndexError):
        stored, _ = image_and_label(item, labelled=False)
        try:
            image = to_image(stored)  # reads the pixels of a PIL image that was only opened
        except UnreadableImageError as error:
            return _Reading(f"sample {row} cannot be read ({' '.join(error.problem.split())})")
        if image.is_floating_point() and not image.isfinite().all():
            return _Reading(f"sample {row} is an image with NaN or infinity")
        # Several images in one item are not an item, which the checks of the data report.
        if image.ndim <= 3:
            return _Reading("", tensor_format(image, 0))
    return _Reading("")
