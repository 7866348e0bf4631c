# SPDX-License-Identifier: Apache-2.0
"""A site's data: those of one client of a federation, and their split into training and test images, remembered."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from perada.core.files import write_atomic
from perada.data.batches.samples import MapStore, Rows, Samples
from perada.data.datamodule import FederatedDataModule
from perada.data.federated import FederatedData
from perada.data.partitions.division import identities_of
from perada.data.sets.manifest import OwnImages


def only(data: FederatedData, place: int) -> FederatedData:
    """The data of the client at ``place`` alone, without what the server has."""
    names = None if data.client_names is None else [data.client_names[place]]
    test = [data.test[place]] if len(data.test) else []
    return replace(data, train=[data.train[place]], test=test, public=None, server_validation=None, client_names=names)


def numbered(store: Samples, number: int) -> Samples:
    """A store of one client, which has the ``number`` that it has in the federation."""
    if not isinstance(store, MapStore):
        return _Numbered(store, number)
    made = MapStore([], store.labelled, store.size)  # what its datasets draw depends on the number
    made.datasets, made.num_classes = {number: store.datasets[0]}, store.num_classes  # type: ignore[assignment]  # looked up only
    made.sizes = {number: store.sizes[0]}  # type: ignore[assignment]  # likewise
    return made


class _Numbered(Samples):
    def __init__(self, store: Samples, number: int) -> None:
        self.store, self.on_device = store, store.on_device
        self.sizes = {number: store.sizes[0]}  # type: ignore[assignment]  # looked up only

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        return self.store.read(torch.zeros_like(owners), indices, key)


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
    if not isinstance(images, OwnImages) or not images.divided:
        return None
    test: dict[str, bool] = {}
    for side, part in [*((False, part) for part in data.train), *((True, part) for part in data.test)]:
        identities = identities_of(part)
        test |= dict.fromkeys([] if identities is None else identities.tolist(), side)
    return ImageSplit(images, test, changes(images.known, test))


def remembered(folder: Path, images: OwnImages) -> dict[str, bool]:
    """The sides that were written for this share and seed; nothing if there are none, or this user may not read them.

    Raises:
        ValueError: If the file is not what :func:`remember` wrote.
    """
    return _read(folder).get(_name(images), {})


def remember(folder: Path, split: ImageSplit) -> None:
    """Write the sides into a state folder, whose lock is held."""
    sides = _read(folder) | {_name(split.images): split.test}
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


def _name(images: OwnImages) -> str:
    return f"test_share={images.test_share}, seed={images.seed}"


def _read(folder: Path) -> dict[str, dict[str, bool]]:
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
