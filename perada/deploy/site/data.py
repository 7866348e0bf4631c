# SPDX-License-Identifier: Apache-2.0
"""A site's data: those of one client of a federation, and their split into training and test images, remembered."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from perada.core.batches import AnyBatch, CohortBatch, EvalBatch, one_of
from perada.core.files import write_atomic
from perada.core.rounds import Phase, PrivateSampling, RoundPlan, active_steps, make_plan
from perada.core.states import send
from perada.data.batches.samples import MapStore, RoundBatches, Rows, Samples, loader
from perada.data.datamodule import FederatedDataModule
from perada.data.federated import FederatedData
from perada.data.partitions.division import identities_of
from perada.data.sets.manifest import OwnImages


def only(data: FederatedData, place: int) -> FederatedData:
    """The data of the client at ``place`` alone, without what the server has."""
    names = None if data.client_names is None else [data.client_names[place]]
    test = [data.test[place]] if len(data.test) else []
    return replace(data, train=[data.train[place]], test=test, public=None, server_validation=None, client_names=names)


class OneClient:
    """Serves the local steps of one client, which has the ``number`` that it has in the federation.

    Batches, augmentation and what datasets draw follow from the number, so they are those of a simulation.

    Args:
        data: The client's data, alone; its rounds are configured.
        number: Of the client.
    """

    def __init__(self, data: FederatedDataModule, number: int) -> None:
        data.setup()
        self.data, self.number, self.size = data, number, data.train_sizes[0]

    @property
    def tests(self) -> int:
        """Number of test images."""
        store = self.data.checked.test
        return 0 if store is None else store.sizes[0]

    def plan(self, round: int, phases: Sequence[Phase], lengths: Sequence[int] = ()) -> RoundPlan:
        """The client's part of a round, in which phases are as long as ``lengths`` say, at least.

        A ValueError if they are of another number of phases.
        """
        plan = make_plan(round, [self.number], {self.number: self.size}, phases, self.data.batch_size)  # type: ignore[arg-type]  # looked up only
        if not lengths:
            return plan
        longest = tuple(max(own, given) for own, given in zip(plan.lengths, lengths, strict=True))
        return replace(plan, lengths=longest)

    def batches(
        self, plan: RoundPlan, device: torch.device, private: PrivateSampling | None = None
    ) -> Iterator[AnyBatch]:
        """The prepared local steps of a plan."""
        store = self._numbered()
        whole = RoundBatches(store, plan, self.data.batch_size, self.data.preparation.seed, private)
        # Others may take more steps: nothing is done then, and a site may say any number.
        own = Subset(whole, [place for place, (*_, active) in enumerate(active_steps(plan)) if active])
        for batch in loader(own, store, self.data.num_workers):
            yield self.data.prepare(_moved(batch, device))  # type: ignore[type-var]  # either kind

    def comparison(self, round: int, device: torch.device) -> Iterator[CohortBatch]:
        """All training images, each once, for a client that compares global models on them."""
        plan = self.plan(round, [Phase("compare", 1)])
        for batch in map(one_of, self.batches(plan, device)):
            left = self.size - batch.step * batch.counts[0]  # what fills the last batch was compared already
            yield batch._replace(counts=(min(batch.counts[0], left),))

    def test_batches(self, device: torch.device) -> Iterator[EvalBatch]:
        """The prepared images that the client is evaluated on, each once."""
        batches: Iterable[EvalBatch] = self.data.val_dataloader()  # type: ignore[assignment]  # or an empty list
        for batch in batches:
            yield self.data.prepare(batch._replace(x=send(batch.x, device), y=send(batch.y, device)))

    def _numbered(self) -> Samples:
        store = self.data.served(self.data.checked.train)
        if isinstance(store, MapStore):  # what its datasets draw depends on the number
            numbered = MapStore([], store.labelled, store.size)
            numbered.datasets, numbered.num_classes = {self.number: store.datasets[0]}, store.num_classes  # type: ignore[assignment]  # looked up only
            numbered.sizes = {self.number: self.size}  # type: ignore[assignment]  # likewise
            return numbered
        return _Numbered(store, self.number)


class _Numbered(Samples):
    """A store of one client, which has another number."""

    def __init__(self, store: Samples, number: int) -> None:
        self.store, self.on_device = store, store.on_device
        self.sizes = {number: store.sizes[0]}  # type: ignore[assignment]  # looked up only

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """As the store's."""
        return self.store.read(torch.zeros_like(owners), indices, key)


def _moved(batch: AnyBatch, device: torch.device) -> AnyBatch:
    if isinstance(batch, dict):
        return {name: one._replace(x=send(one.x, device), y=send(one.y, device)) for name, one in batch.items()}
    return batch._replace(x=send(batch.x, device), y=send(batch.y, device))


SPLIT_FILE = "split.json"
_WORDS = ("train", "test")


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
    for side, parts in ((False, data.train), (True, data.test)):
        for identities in map(identities_of, parts):
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
