# SPDX-License-Identifier: Apache-2.0
"""Datasets of the clients and the server."""

import warnings
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from perada.core.checks import checked_names
from perada.core.text import abbreviated, case_variants, look_alike


def warn_of_look_alikes(what: str, client_names: Iterable[Any]) -> None:
    """Warn about names that look the same or differ in case; ``what`` is their plural noun, such as ``classes``."""
    texts = [str(name) for name in client_names]
    for group in case_variants(texts):
        warnings.warn(
            f"the {what} {' and '.join(map(ascii, group))} are different {what}, but differ only in capitals and "
            "spaces. Spell them the same if they are meant to be one",
            stacklevel=3,
        )
    for group in look_alike(texts):
        warnings.warn(
            f"the {what} {' and '.join(map(ascii, group))} look the same but are different {what}: they differ only in "
            "invisible characters, spaces, Unicode normalisation or look-alike letters. Rename them if they are meant "
            "to be one",
            stacklevel=3,
        )


def _as_list(datasets: Sequence[Dataset[Any]]) -> Sequence[Dataset[Any]]:
    """Return the datasets of an iterator, a view of a dictionary or an array as a list, and anything else unchanged."""
    is_array_of_objects = isinstance(datasets, np.ndarray) and datasets.dtype == object
    if isinstance(datasets, Iterator | ValuesView) or is_array_of_objects:
        return list(datasets)
    return datasets


@dataclass
class FederatedData:
    """One dataset per client, and the data of the server.

    Args:
        train: One map-style dataset per client with items (image, label). Images are uint8 (Ch, H, W) or (H, W), PIL
            images, or floating-point values prepared for the model; texts are int64 tokens (L,). Labels are classes, or
            float vectors (K,) for several labels. Items may be dicts instead, with ``image``, ``img`` or
            ``pixel_values`` and ``label`` or ``labels``. Labels may be words, which are numbered in sorted order over
            all clients.
        test: One dataset per client, or an empty list for no evaluation. A client's test set may be empty.
        public: Images without labels, for the server. The second part of items (image, anything) is ignored.
        server_validation: Labelled data on the server, to stop the distillation early.
        num_classes: Number of classes; None infers it from the labels.
        classes: Names of the classes, in the order of their numbers; None uses labels that are words.
        client_names: Names of the clients, in the order of ``train``.

    >>> import torch
    >>> part = torch.utils.data.TensorDataset(torch.rand(4, 1, 8, 8), torch.arange(4) % 2)
    >>> len(FederatedData(train=[part, part], test=[part, part], client_names=["north", "south"]).train)
    2
    """

    train: Sequence[Dataset[Any]]
    test: Sequence[Dataset[Any]] = field(default_factory=list)
    public: Dataset[Any] | None = None
    server_validation: Dataset[Any] | None = None
    num_classes: int | None = None
    classes: Sequence[str] | None = None
    client_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self.train = _as_list(self.train)
        self.test = _as_list(self.test)
        self.classes = checked_names("FederatedData: classes", self.classes)
        self.client_names = checked_names("FederatedData: client_names", self.client_names)
        warn_of_look_alikes("classes", self.classes or ())
        warn_of_look_alikes("clients", self.client_names or ())

    def find(self, name: str | None) -> tuple[int, str]:
        """Return the index and name of the client with a name. A single client matches any name, and takes it.

        Returns:
            The client's position in ``train``, and its name.

        Raises:
            ValueError: If there is no such client, or it has no name.
        """
        names = list(self.client_names or ())
        if len(self.train) == 1:
            if name:
                return 0, name
            if not names:
                raise ValueError("the client has no name; pass one (name=, --client)")
            return 0, names[0]
        if name in names:
            return names.index(name), name
        problem = "no client was chosen" if name is None else f"{name!r} is not one of them"
        remedy = "name them"
        if names:
            remedy = f"choose one of {abbreviated(names)}, or pass the images of a single client"
        raise ValueError(f"the data have {len(self.train)} clients, but {problem}; {remedy}")

    def parts(self) -> list[tuple[str, Dataset[Any]]]:
        """Return all datasets with their names in messages, in the order of the fields."""
        parts = [(f"client {client}: the training set", dataset) for client, dataset in enumerate(self.train)]
        parts += [(f"client {client}: the test set", dataset) for client, dataset in enumerate(self.test)]
        if self.public is not None:
            parts.append(("the public set", self.public))
        if self.server_validation is not None:
            parts.append(("the server's validation set", self.server_validation))
        return parts

    def with_datasets(self, datasets: Iterable[Dataset[Any]]) -> "FederatedData":
        """Return a copy with other datasets, given in the order of :meth:`parts`."""
        remaining = iter(datasets)
        train = [next(remaining) for _ in self.train]
        test = [next(remaining) for _ in self.test]
        public = None if self.public is None else next(remaining)
        validation = None if self.server_validation is None else next(remaining)
        return replace(self, train=train, test=test, public=public, server_validation=validation)
