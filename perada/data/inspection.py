# SPDX-License-Identifier: Apache-2.0
"""Inspection of a source of images before training: how it is interpreted, and what is wrong with it.

Shape suffixes: M clients, K classes.
"""

import hashlib
import io
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset
from tqdm import tqdm

from perada.core.text import abbreviated
from perada.data.batches.datasets import declared_labels, length, resolve_subset
from perada.data.batches.transforms import WHOLE_SCALE, decode, read_image, to_image
from perada.data.medical.facts import ClientHeaders, HeaderFacts, header_facts
from perada.data.medical.reading import Kind, medical_kind, split_number
from perada.data.partitions.division import Division, positions
from perada.data.partitions.shares import Array
from perada.data.sets.base import ImageSet, split_of
from perada.data.sets.manifest import ImageFiles
from perada.data.training_checks import RunOptions, check_as_training_does, shares_of_values
from perada.tasks import Task, task_of_labels


@dataclass
class Inspection:
    """The results of an inspection.

    Duplicates (``leaks``, ``shared``, ``repeated``, ``contradictions``) are pairs of names of images whose
    pixels are equal.

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
        headers: Headers of each client's medical images; empty if there are none.
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
    headers: list[ClientHeaders] = field(default_factory=list)

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
        problem: Why the image cannot be read; empty if it can.
        num_frames: Number of pictures in the file.
        brightest: Largest value of a grey image with integers of more than 8 bits, else 0.
        header_facts: Facts in the header of a medical image; None for others.
    """

    name: str
    digest: bytes = b""
    image_size: tuple[int, int] = (0, 0)
    mode: str = ""
    problem: str = ""
    num_frames: int = 1
    brightest: int = 0
    header_facts: HeaderFacts | None = None


def inspect_division(division: Division, run_options: RunOptions | None = None) -> Inspection:
    """Divide the images as a run would, and read all of them.

    Args:
        division: The images and how they are divided.
        run_options: Options of the run; None for the defaults.

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
    run_options = run_options or RunOptions(task=getattr(train_set, "task", None))
    task: Task = run_options.task or getattr(train_set, "task", None) or task_of_labels(labels_of_sets[0])
    nonempty_labels = [labels for labels in labels_of_sets if len(labels)]
    num_classes = data.num_classes or max(task.count_classes(labels) for labels in nonempty_labels) or 1
    train_facts = _read_all(train_set)
    test_facts = _read_all(test_set)
    readable = [facts for facts in train_facts + test_facts if not facts.problem]
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
        broken=[facts.problem for facts in train_facts + test_facts if facts.problem],
        notes=list(dict.fromkeys(messages)),
        several_labels=any(labels.ndim > 1 for labels in labels_of_sets),
    )
    full_scale = getattr(train_set, "full_scale", None) or WHOLE_SCALE
    inspection.notes += _notes_on_modes(readable, full_scale)
    unreadable_rows = {
        True: {position for position, facts in enumerate(train_facts) if facts.problem},
        False: {position for position, facts in enumerate(test_facts) if facts.problem},
    }
    findings = check_as_training_does(data, run_options, unreadable_rows)
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
    if any(facts.header_facts is not None for facts in train_facts + test_facts):
        for train_part, test_part in zip(data.train, test, strict=True):
            facts_of_client = [train_facts[row] for row in positions(train_part)]
            facts_of_client += [test_facts[row] for row in positions(test_part)]
            headers = [facts.header_facts for facts in facts_of_client if facts.header_facts is not None]
            inspection.headers.append(ClientHeaders.of_images(headers))
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
        if image.image_facts.problem:
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
        # An image has one label or a mask, and none of its classes is unknown.
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
        if copies and not facts.problem:
            pair = (facts.name, copies[0])
            if owner in owners_of_digest[facts.digest]:
                inspection.repeated.append(pair)
            else:
                inspection.shared.append(pair)
        copies.append(facts.name)
        owners_of_digest[facts.digest].add(owner)
    for facts in test_facts:
        if not facts.problem and facts.digest in names_of_digest:
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
        return _ImageFacts(path, problem=str(error))
    # A path names the frame; sets without files have the content only.
    source = path if os.path.exists(split_number(path).file) else io.BytesIO(content)
    kind = medical_kind(source)
    if kind is not None:
        return _read_medical_facts(image_set, path, source, kind)
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


def _read_medical_facts(image_set: ImageFiles, path: str, source: str | IO[bytes], kind: Kind) -> _ImageFacts:
    """Read a medical image of a set, which can be read."""
    decoded = read_image(source, "", image_set.mode, medical=image_set.reading_of(path)).contiguous()
    shape = tuple(decoded.shape)
    return _ImageFacts(
        name=path,
        digest=hashlib.sha256(f"{shape} ".encode() + decoded.numpy().tobytes()).digest(),
        image_size=(shape[2], shape[1]),
        mode=kind,
        header_facts=header_facts(source, kind),
    )


def _count_frames(picture: Image.Image) -> int:
    """Return the number of frames of an opened file, or 1 if its table of frames is damaged: only the first is read."""
    try:
        return int(getattr(picture, "n_frames", 1))
    except Exception:  # Pillow's plugins raise many types
        return 1
