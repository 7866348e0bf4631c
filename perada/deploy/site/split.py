# SPDX-License-Identifier: Apache-2.0
"""The split of a site's images into training and test images, remembered: none changes sides as others come or go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Subset

from perada.core.files import write_atomic
from perada.data.batches.samples import length
from perada.data.datamodule import FederatedDataModule
from perada.data.partitions.division import identities_of
from perada.data.sets.manifest import OwnImages

SPLIT_FILE = "split.json"
_WORDS = ("train", "test")


class ImageSplit(NamedTuple):
    """How a site's images are divided."""

    images: OwnImages
    test: dict[str, bool]  # whether an image or its group, by its identity, is a test image
    changed: str  # what the site is told


def image_split(served: FederatedDataModule) -> ImageSplit | None:
    """How a client's images are divided; None if this is not perada's to say, or they are no images of one's own."""
    data = served.data
    assert data is not None
    images = data.train[0].dataset if isinstance(data.train[0], Subset) else None
    if not isinstance(images, OwnImages) or not images.divided:
        return None
    test: dict[str, bool] = {}
    for side, parts in ((False, data.train), (True, data.test)):
        for identities in (identities_of(part, np.arange(length(part))) for part in parts):
            test |= dict.fromkeys([] if identities is None else identities.tolist(), side)
    return ImageSplit(images, test, changes(images.known, test))


def remembered(folder: Path, images: OwnImages) -> dict[str, bool]:
    """The sides that were written for this share and seed; nothing if there are none, or this user may not read them.

    Raises:
        ValueError: If the file is not what :func:`remember` wrote.
    """
    found = _read(folder).get(_name(images), {})
    return {key: word == "test" for word in _WORDS for key in found.get(word, [])}


def remember(folder: Path, split: ImageSplit) -> None:
    """Write the sides into a state folder, whose lock is held."""
    words = {word: [key for key, test in split.test.items() if test == (word == "test")] for word in _WORDS}
    write_atomic(folder / SPLIT_FILE, json.dumps(_read(folder) | {_name(split.images): words}).encode(), private=True)


def changes(before: Mapping[str, bool], now: Mapping[str, bool]) -> str:
    """What a site is told of images, or groups, that came, went or changed sides; empty if none did.

    >>> changes({"a": True, "b": False}, {"a": True, "b": False, "c": False})
    '1 new, 0 gone since the last start; 2 are trained on and 1 tested on (before 1 and 1)'
    """
    if not before or before == now:
        return ""
    test, tested = sum(now.values()), sum(before.values())
    moved = sum(before.get(key, side) != side for key, side in now.items())
    others = f"; {moved} changed sides, so that neither is empty" if moved else ""
    return (
        f"{len(now.keys() - before.keys())} new, {len(before.keys() - now.keys())} gone since the last start; "
        f"{len(now) - test} are trained on and {test} tested on (before {len(before) - tested} and {tested}){others}"
    )


def _name(images: OwnImages) -> str:
    return f"test_share={images.test_share}, seed={images.seed}"


def _read(folder: Path) -> dict[str, dict[str, list[str]]]:
    path = folder / SPLIT_FILE
    try:
        found = json.loads(path.read_bytes())
        if all(isinstance(key, str) for part in found.values() for word in _WORDS for key in part[word]):
            return dict(found)
    except (FileNotFoundError, PermissionError):
        return {}
    except (ValueError, AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"{str(path)!r} is damaged; restore it from a copy, or remove it to have the images divided anew")
