# SPDX-License-Identifier: Apache-2.0
"""The split of a site's images into training and test images, which stays the same when images are added or removed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Subset

from perada.data.datamodule import FederatedDataModule
from perada.data.partitions.division import identities_of
from perada.data.sets.manifest import OwnImages
from perada.system.files import write_atomic

SPLIT_FILE = "split.json"


class ImageSplit(NamedTuple):
    """How a site's images are split.

    Attributes:
        image_set: The images.
        is_test: Whether an image or its group, by its identity, is a test image.
        changed: What has changed since the last start, in words; "" if nothing has.
    """

    image_set: OwnImages
    is_test: dict[str, bool]
    changed: str


def image_split(served: FederatedDataModule) -> ImageSplit | None:
    """Return how a client's images are split; None if perada does not split them, or they are not own images."""
    data = served.data
    assert data is not None
    images = data.train[0].dataset if isinstance(data.train[0], Subset) else None
    if not isinstance(images, OwnImages) or images.manifest.identities is None:
        return None
    test: dict[str, bool] = {}
    for datasets, is_test in ((data.train, False), (data.test, True)):
        for dataset in datasets:
            identities = identities_of(dataset)
            if identities is not None:
                test |= dict.fromkeys(identities.tolist(), is_test)
    return ImageSplit(images, test, describe_changes(images.fixed_splits, test))


def save_split(folder: Path, split: ImageSplit) -> None:
    """Write a split to a state folder, which must be locked."""
    splits = load_splits(folder) | {split_key(split.image_set): split.is_test}
    content = {}
    for key, test in splits.items():
        content[key] = {
            "train": [identity for identity, is_test in test.items() if not is_test],
            "test": [identity for identity, is_test in test.items() if is_test],
        }
    write_atomic(folder / SPLIT_FILE, json.dumps(content).encode(), private=True)


def describe_changes(before: Mapping[str, bool], now: Mapping[str, bool]) -> str:
    """Describe which images, or groups, were added, removed or moved; "" if none were.

    Args:
        before: Whether each one was a test image at the last start; empty if there was none.
        now: Whether each one is a test image.

    >>> describe_changes({"a": True, "b": False}, {"a": True, "b": False, "c": False})
    '1 new, 0 missing since the last start; 2 for training and 1 for testing (before: 1 and 1)'
    """
    if not before or before == now:
        return ""
    num_test = sum(now.values())
    num_train = len(now) - num_test
    num_test_before = sum(before.values())
    num_train_before = len(before) - num_test_before
    num_moved = sum(before.get(key, is_test) != is_test for key, is_test in now.items())
    moved = f"; {num_moved} moved to the other side, so that neither is empty" if num_moved else ""
    return (
        f"{len(now.keys() - before.keys())} new, {len(before.keys() - now.keys())} missing since the last start; "
        f"{num_train} for training and {num_test} for testing (before: {num_train_before} and {num_test_before}){moved}"
    )


def split_key(image_set: OwnImages) -> str:
    """Return the key under which the split of images is saved."""
    return f"test_share={image_set.test_share}, seed={image_set.seed}"


def load_splits(folder: Path) -> dict[str, dict[str, bool]]:
    """Return the saved splits by their keys; none if none were saved, or this user may not read them.

    Raises:
        ValueError: If the file is not what :func:`save_split` wrote.
    """
    path = folder / SPLIT_FILE
    try:
        content = json.loads(path.read_bytes())
        return {
            key: dict.fromkeys(split["train"], False) | dict.fromkeys(split["test"], True)
            for key, split in content.items()
        }
    except (FileNotFoundError, PermissionError):
        return {}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(
            f"{str(path)!r} is damaged; restore it from a backup, or remove it to have the images split again"
        ) from None
