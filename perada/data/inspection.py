# SPDX-License-Identifier: Apache-2.0
"""What perada understands of a source of images, and what is wrong with it, before anything is trained.

Shape suffixes: M clients, K classes.
"""

import hashlib
import io
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset
from tqdm import tqdm

from perada.core.text import some
from perada.data.batches.transforms import WHOLE_SCALE, to_image
from perada.data.partitions.division import Division, positions
from perada.data.partitions.shares import Array
from perada.data.sets.base import ImageSet
from perada.data.sets.manifest import ImageFiles


@dataclass
class Inspection:
    """What was found.

    Attributes:
        clients: Names of the clients, or their numbers.
        classes: Names of the classes, or their numbers.
        train: Training images (M, K) of each client and class; with several labels an image, those that have each.
        test: Test images (M, K), likewise.
        images: Training and test images (M, 2) of each client.
        sizes: Width and height (N, 2) of each image that can be read.
        modes: Numbers of images by Pillow's mode, such as ``RGB`` or ``I;16``, or by number of channels.
        broken: What is wrong with each file that cannot be read.
        leaks: Test images that are training images too, to the last byte: the names of both.
        shared: Training images of one client that another one has too, likewise.
        repeated: Training images that a client has more than once, likewise.
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
    """One image: a hash of it, its width and height and its mode, or why it cannot be read."""

    digest: bytes
    size: tuple[int, int] | None = None
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
    count = len(data.train)
    rows_of = [
        list(map(positions, own)) or [[]] * count for own in (data.train, data.test)
    ]  # there may be no test rows
    sets = [cast(ImageSet, cast(Subset[Any], own[0]).dataset) for own in (data.train, data.test) if own]
    sets += [division.dataset.with_split(False)] * (len(sets) < 2)
    clients = list(data.client_names or map(str, range(count)))
    width = data.num_classes or 1 + max(int(part.labels.max()) for part in sets if part.labels is not None)
    tables = [
        np.stack([_counts(part, rows, width) for rows in clients_of])
        for part, clients_of in zip(sets, rows_of, strict=True)
    ]
    images = np.array([[len(own) for own in clients_of] for clients_of in rows_of]).T
    classes = list(data.classes or map(str, range(width)))
    found = Inspection(clients, classes, tables[0], tables[1], images, np.empty((0, 2), np.int64))
    found.several_labels = any(part.labels is not None and part.labels.ndim == 2 for part in sets)
    found.notes = list(dict.fromkeys(" ".join(str(one.message).split()) for one in caught))
    owners = [_owners(clients_of, len(part)) for part, clients_of in zip(sets, rows_of, strict=True)]
    _read(found, sets, owners)
    return found


def _counts(part: ImageSet, rows: list[int], width: int) -> Array:
    """Images (K,) of each class among the rows."""
    assert part.labels is not None
    labels = part.labels.numpy()[np.asarray(rows, dtype=np.int64)]
    return np.bincount(labels, minlength=width) if labels.ndim == 1 else labels.sum(0).astype(np.int64)


def _owners(clients: list[list[int]], size: int) -> Array:
    """The client (N,) of each image; -1 where it is nobody's."""
    owners = np.full(size, -1)
    for client, rows in enumerate(clients):
        owners[rows] = client
    return owners


def _read(found: Inspection, sets: list[ImageSet], owners: list[Array]) -> None:
    """Look at every image of the training and the test split."""
    sizes = []
    deep: list[int] = []
    several: list[str] = []
    known: dict[bytes, list[tuple[int, int, str]]] = defaultdict(list)  # split, owner and name of equal images
    for split, (part, of) in enumerate(zip(sets, owners, strict=True)):
        names = part.manifest.paths if isinstance(part, ImageFiles) else None
        for row, seen in enumerate(_look(part)):
            if seen.size is None:
                found.broken.append(seen.error)
                continue
            sizes.append(seen.size)
            found.modes[seen.mode] += 1
            deep += [seen.brightest] * bool(seen.brightest)
            several += [names[row]] if names and seen.frames > 1 else []
            name = names[row] if names else f"{'training' if split == 0 else 'test'} image {row}"
            known[seen.digest].append((split, int(of[row]), name))
    found.notes += _of_files(deep, getattr(sets[0], "full_scale", None), several)
    found.sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    for alike in known.values():
        train = [one for one in alike if one[0] == 0]
        found.leaks += [(one[2], train[0][2]) for one in alike if one[0] == 1 and train]
        for place, one in enumerate(train[1:], 1):
            same = any(other[1] == one[1] for other in train[:place])
            (found.repeated if same else found.shared).append((one[2], train[0][2]))


def _of_files(deep: list[int], full_scale: float | None, several: list[str]) -> list[str]:
    """What to say of images of more than 8 bits, and of files with several pictures."""
    notes = []
    white = WHOLE_SCALE if full_scale is None else full_scale
    if deep and 2 * max(deep) < white:
        fits = 2 ** max(deep).bit_length() - 1
        notes.append(
            f"the brightest pixel of the grey images of more than 8 bits ({len(deep)}) is {max(deep)}, and {white:g} "
            f"is white, so that they are dark: set full_scale to what is white, such as {fits}"
        )
    if several:
        notes.append(f"of files with several pictures ({some(several)}) the first is read")
    return notes


def _look(part: ImageSet) -> Iterable[_Seen]:
    """Every image of a split, in order."""
    look = partial(_look_at_file, part) if isinstance(part, ImageFiles) else partial(_look_at_item, part)
    names: Iterable[Any] = part.manifest.paths if isinstance(part, ImageFiles) else range(len(part))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from tqdm(pool.map(look, names), total=len(part), desc="reading", leave=False, disable=None)


def _look_at_file(part: ImageFiles, path: str) -> _Seen:
    try:
        part.read(path)
        content = part.content(path)
        with Image.open(io.BytesIO(content)) as image:
            brightest = int(np.asarray(image).max()) if image.mode.startswith("I") else 0
            return _Seen(_digest(content), image.size, image.mode, "", getattr(image, "n_frames", 1), brightest)
    except (OSError, ValueError) as error:
        return _Seen(b"", error=str(error))


def _look_at_item(part: ImageSet, row: int) -> _Seen:
    item = part[row]
    image = to_image(item[0] if isinstance(item, tuple) else item)
    if image.ndim != 3:
        raise ValueError(f"{type(part).__name__} has no images, and only images can be looked at; give a set of images")
    content = image.contiguous().view(torch.uint8).numpy().tobytes()
    channels, height, width = image.shape
    return _Seen(_digest(content), (width, height), f"{channels} channel{'s' * (channels > 1)}")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
