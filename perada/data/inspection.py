# SPDX-License-Identifier: Apache-2.0
"""What perada understands of a source of images, and what is wrong with it, before anything is trained.

Shape suffixes: M clients, K classes.
"""

import hashlib
import io
import os
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset
from tqdm import tqdm

from perada.core.text import some
from perada.data.batches.datasets import declared_labels, length, resolved
from perada.data.batches.transforms import WHOLE_SCALE, to_image
from perada.data.partitions.division import Division, positions
from perada.data.partitions.shares import Array
from perada.data.sets.base import ImageSet, split_of
from perada.data.sets.manifest import ImageFiles


@dataclass
class Inspection:
    """What was found; ``leaks`` and the like hold the names of two images that are the same to the last byte.

    Attributes:
        clients: Names of the clients, or their numbers.
        classes: Names of the classes, or their numbers.
        train: Training images (M, K) of each client and class; with several labels an image, those that have each.
        test: Test images (M, K), likewise.
        images: Training and test images (M, 2) of each client.
        sizes: Width and height (N, 2) of each image that can be read.
        modes: Numbers of images by Pillow's mode, such as ``RGB`` or ``I;16``, or by number of channels.
        broken: What is wrong with each file that cannot be read.
        leaks: Test images that are training images too.
        shared: Training images of one client that another one has too.
        repeated: Training images that a client has more than once.
        notes: What else was noticed.
        several_labels: Whether an image may have several labels.
    """

    clients: list[str]
    classes: list[str]
    train: Array
    test: Array
    images: Array
    sizes: Array
    modes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    leaks: list[tuple[str, str]] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    several_labels: bool = False

    @property
    def usable(self) -> bool:
        """Whether nothing must be fixed first."""
        return not (self.broken or self.leaks)

    @property
    def of_one_client(self) -> list[tuple[str, str]]:
        """Classes whose training images one client alone has, and this client; none where there is one client."""
        if len(self.clients) < 2:
            return []
        alone = np.flatnonzero((self.train > 0).sum(0) == 1)
        return [(self.classes[k], self.clients[int(self.train[:, k].argmax())]) for k in alone]


class _Seen(NamedTuple):
    """One image: its name, a hash of it, its width and height and its mode, or why it cannot be read."""

    name: str
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    error: str = ""
    frames: int = 1  # pictures in the file
    brightest: int = 0  # of grey images of more than 8 bits that are whole numbers


def inspect_division(division: Division) -> Inspection:
    """Divide the images as a run would, and read every one of them.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If the set cannot be read or divided.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = division.share_out()
    # A partition may give no test images.
    test = data.test or [Subset(division.dataset.with_split(False), [])] * len(data.train)
    sets: list[ImageSet] = [resolved(own[0])[0] for own in (data.train, test)]
    width = data.num_classes or 1 + max(int(part.labels.max()) for part in sets if part.labels is not None)
    seen: list[list[_Seen]] = []
    for part in sets:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            looked = pool.map(partial(_look, part), range(len(part)))
            seen.append(list(tqdm(looked, total=len(part), desc="reading", leave=False, disable=None)))
    fine = [one for one in chain(*seen) if not one.error]
    found = Inspection(
        clients=list(data.client_names or map(str, range(len(data.train)))),
        classes=list(data.classes or map(str, range(width))),
        train=np.stack([_counts(own, width) for own in data.train]),
        test=np.stack([_counts(own, width) for own in test]),
        images=np.array([list(map(length, both)) for both in zip(data.train, test, strict=True)]),
        sizes=np.array([one.size for one in fine], dtype=np.int64).reshape(-1, 2),
        modes=Counter(one.mode for one in fine),
        broken=[one.error for one in chain(*seen) if one.error],
        notes=list(dict.fromkeys(" ".join(str(one.message).split()) for one in caught)),
        several_labels=any(part.labels is not None and part.labels.ndim == 2 for part in sets),
    )
    found.notes += _of_files(fine, getattr(sets[0], "full_scale", None) or WHOLE_SCALE)
    _compare(found, *seen, {row: client for client, own in enumerate(data.train) for row in positions(own)})
    return found


def _counts(own: Dataset[Any], width: int) -> Array:
    """Images (K,) of each class."""
    labels = declared_labels(own)
    assert labels is not None
    counts: Array = (labels.bincount(minlength=width) if labels.ndim == 1 else labels.long().sum(0)).numpy()
    return counts


def _compare(found: Inspection, train: list[_Seen], test: list[_Seen], owners: dict[int, int]) -> None:
    """Find images that are the same to the last byte; ``owners`` are the clients of the training images."""
    known: dict[bytes, list[tuple[str, int | None]]] = defaultdict(list)  # names and owners of equal training images
    for row, one in enumerate(train):
        alike = known[one.digest]
        if alike and not one.error:
            same = owners.get(row) in {owner for _, owner in alike}
            (found.repeated if same else found.shared).append((one.name, alike[0][0]))
        alike.append((one.name, owners.get(row)))
    found.leaks = [(one.name, known[one.digest][0][0]) for one in test if not one.error and one.digest in known]


def _of_files(fine: list[_Seen], white: float) -> list[str]:
    """What to say of images of more than 8 bits, and of files with several pictures."""
    notes = []
    deep, several = [one.brightest for one in fine if one.brightest], [one.name for one in fine if one.frames > 1]
    if deep and 2 * max(deep) < white:
        fits = 2 ** max(deep).bit_length() - 1
        notes.append(
            f"the brightest pixel of the grey images of more than 8 bits ({len(deep)}) is {max(deep)}, and {white:g} "
            f"is white, so that they are dark: set full_scale to what is white, such as {fits}"
        )
    if several:
        notes.append(f"of files with several pictures ({some(several)}) the first is read")
    return notes


def _look(part: ImageSet, row: int) -> _Seen:
    """One image of a split."""
    if not isinstance(part, ImageFiles):
        item = part[row]
        image = to_image(item[0] if isinstance(item, tuple) else item)
        if image.ndim != 3:
            raise ValueError(
                f"{type(part).__name__} has no images, and only images can be looked at; give a set of images"
            )
        channels, height, width = image.shape
        content, mode = image.contiguous().view(torch.uint8).numpy().tobytes(), f"{channels} channel"
        digest = hashlib.sha256(content).digest()
        return _Seen(f"{split_of(part)}, image {row}", digest, (width, height), mode + "s" * (channels > 1))
    name = part.manifest.paths[row]
    try:
        part.read(name)
        content = part.content(name)
        with Image.open(io.BytesIO(content)) as picture:
            brightest = int(np.asarray(picture).max()) if picture.mode.startswith("I") else 0
            frames = getattr(picture, "n_frames", 1)
            return _Seen(name, hashlib.sha256(content).digest(), picture.size, picture.mode, "", frames, brightest)
    except (OSError, ValueError) as error:
        return _Seen(name, error=str(error))
