# SPDX-License-Identifier: Apache-2.0
"""Datasets of the clients and the server."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import Dataset

from perada.core.text import abbreviated, case_variants, look_alike


def warn_of_look_alikes(what: str, names: Iterable[Any]) -> None:
    """Warn of names that a reader cannot tell apart, or only by case; ``what`` are ``classes`` or the like."""
    texts = [str(name) for name in names]
    for group in case_variants(texts):
        warnings.warn(
            f"the {what} {' and '.join(map(ascii, group))} are different {what}, and differ only in capitals and "
            "spaces. Write them alike if they are meant to be one",
            stacklevel=3,
        )
    for group in look_alike(texts):
        warnings.warn(
            f"the {what} {' and '.join(map(ascii, group))} look the same and are different {what}: they differ only "
            "in invisible characters, spaces, Unicode normalisation or look-alike letters. Rename them if they are "
            "meant to be one",
            stacklevel=3,
        )


@dataclass
class FederatedData:
    """One dataset per client, and what the server has.

    Args:
        train: One map-style dataset per client, items (image, label). Images are uint8 (Ch, H, W) or (H, W), PIL, or
            floating point that is ready for the model; texts are int64 tokens (L,). Labels are classes, or float
            vectors (K,) for several labels. Items may be dicts instead, with ``image``, ``img`` or ``pixel_values`` and
            ``label`` or ``labels``, and labels words, which are numbered in sorted order over all clients.
        test: One per client, or an empty list for no evaluation. A client's test set may be empty.
        public: Images without labels, for the server. Of items (image, anything) the second part is never looked at.
        server_validation: Labelled data on the server, for an optional early stop of the distillation.
        num_classes: Inferred from the labels when None.
        classes: Names of the classes, in the order of their numbers; None takes labels that are words.
        client_names: Names of the clients, in the order of ``train``.
    """

    train: Sequence[Dataset[Any]]
    test: Sequence[Dataset[Any]] = field(default_factory=list)
    public: Dataset[Any] | None = None
    server_validation: Dataset[Any] | None = None
    num_classes: int | None = None
    classes: Sequence[str] | None = None
    client_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("classes", "client_names"):
            names = getattr(self, name)
            if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
                raise TypeError(
                    f"FederatedData: {name}={names!r} cannot be used; give a list of names, or leave it out"
                )
        warn_of_look_alikes("classes", self.classes or ())
        warn_of_look_alikes("clients", self.client_names or ())

    def find(self, name: str | None) -> tuple[int, str]:
        """The place and the name of one client: of the only one, whatever it is called then, or of that name.

        Raises:
            ValueError: If there is no such client, or it has no name.
        """
        names = list(map(str, self.client_names or ()))
        if len(self.train) == 1:
            if not (name or names):
                raise ValueError("the client has no name; give one (name=, --client)")
            return 0, name or names[0]
        if name in names:
            return names.index(name), name
        which = "none is named" if name is None else f"{name!r} is none of them"
        known = f"name one of {abbreviated(names)}, or give the images of one alone" if names else "name them"
        raise ValueError(f"the data are of {len(self.train)} clients, and {which}; {known}")

    def parts(self) -> list[tuple[str, Dataset[Any]]]:
        """All datasets, in the order of the fields, and what messages call each."""
        parts = [(f"client {client}: the training set", one) for client, one in enumerate(self.train)]
        parts += [(f"client {client}: the test set", one) for client, one in enumerate(self.test)]
        server = ("the public set", self.public), ("the server's validation set", self.server_validation)
        return parts + [(who, one) for who, one in server if one is not None]

    def with_datasets(self, made: Iterable[Dataset[Any]]) -> "FederatedData":
        """The same with other datasets, in the order of the fields."""
        left = iter(made)
        train, test = ([next(left) for _ in sets] for sets in (self.train, self.test))
        public, validation = (None if one is None else next(left) for one in (self.public, self.server_validation))
        return replace(self, train=train, test=test, public=public, server_validation=validation)
