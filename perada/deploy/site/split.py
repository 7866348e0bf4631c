# SPDX-License-Identifier: Apache-2.0
"""How a site's images are divided into those trained on and tested on, and that it stays so when images come or go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Subset

from perada.core.files import write_atomic
from perada.data.datamodule import FederatedDataModule
from perada.data.partitions.division import identities_of
from perada.data.sets.manifest import OwnImages

SPLIT_FILE = "split.json"


class ImageSplit(NamedTuple):
    """How a site's images are divided."""

    images: OwnImages
    test: dict[str, bool]  # whether an image or its group, by its identity, is a test image
    changed: str  # what the site is told


def image_split(served: FederatedDataModule) -> ImageSplit | None:
    """How a client's images are divided; None if this is not perada's to say, or they are not images of one's own."""
    data = served.data
    assert data is not None
    images = data.train[0].dataset if isinstance(data.train[0], Subset) else None
    if not isinstance(images, OwnImages) or images.manifest.identities is None:
        return None
    test: dict[str, bool] = {}
    for side, part in [*((False, part) for part in data.train), *((True, part) for part in data.test)]:
        identities = identities_of(part)
        test |= dict.fromkeys([] if identities is None else identities.tolist(), side)
    return ImageSplit(images, test, changes(images.known, test))


def remember(folder: Path, split: ImageSplit) -> None:
    """Write the sides into a state folder, whose lock is held."""
    sides = remembered(folder) | {divided_by(split.images): split.test}
    parts = {
        name: {side: [key for key, test in found.items() if test == (side == "test")] for side in ("train", "test")}
        for name, found in sides.items()
    }
    write_atomic(folder / SPLIT_FILE, json.dumps(parts).encode(), private=True)


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


def divided_by(images: OwnImages) -> str:
    """By what the sides of images are remembered."""
    return f"test_share={images.test_share}, seed={images.seed}"


def remembered(folder: Path) -> dict[str, dict[str, bool]]:
    """The sides that were written, by share and seed; nothing if there are none, or this user may not read them.

    Raises:
        ValueError: If the file is not what :func:`remember` wrote.
    """
    path = folder / SPLIT_FILE
    try:
        found = json.loads(path.read_bytes())
        return {
            name: dict.fromkeys(part["train"], False) | dict.fromkeys(part["test"], True)
            for name, part in found.items()
        }
    except (FileNotFoundError, PermissionError):
        return {}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(
            f"{str(path)!r} is damaged; restore it from a copy, or remove it to have the images divided anew"
        ) from None
