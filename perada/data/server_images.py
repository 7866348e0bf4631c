# SPDX-License-Identifier: Apache-2.0
"""The server's images: the public ones that it distils on, and the labelled ones that it may stop by."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

import pytorch_lightning as pl
import torch
from torch import Tensor

from perada.data.federated import Checked
from perada.data.loaders import EvalBatches, loader
from perada.data.overlap import check_overlap
from perada.data.preparation import BatchT
from perada.data.store import MapStore, Samples, TensorStore
from perada.rounds import batch_indices
from perada.states import send


class ServerImages(pl.LightningDataModule):
    """The part of the datamodule that the server reads."""

    eval_batch_size: int
    num_workers: int

    @property
    @abstractmethod
    def _ready(self) -> Checked:
        """The checked data."""

    @property
    @abstractmethod
    def _seed(self) -> int:
        """The run's seed."""

    @abstractmethod
    def _served(self, store: TensorStore | MapStore) -> Samples:
        """A set as it is read."""

    @abstractmethod
    def prepare(self, batch: BatchT) -> BatchT:
        """Make a batch ready for the model."""

    @property
    def public_size(self) -> int:
        """Number of public images; 0 if there are none."""
        store = self._ready.public
        return 0 if store is None else store.sizes[0]

    @property
    def validation_size(self) -> int:
        """Number of labelled images on the server; 0 if there are none."""
        store = self._ready.server_validation
        return 0 if store is None else store.sizes[0]

    def check_public_overlap(self) -> None:
        """Compare the server's images with all that clients train on; images in files are all read for it.

        Raises:
            ValueError: If one is in both, with both places.
        """
        for name, store in (("public", self._ready.public), ("server_validation", self._ready.server_validation)):
            if store is not None:
                check_overlap(self._ready.train, store, name)

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Positions in the public set for the steps of a round's distillation: a stream of permutations.

        Returns:
            Integers (steps, B), B at most ``public_size``; derived from the run's seed and the round.
        """
        return batch_indices(self.public_size, batch_size, steps, self._seed, "public", round)

    def public_images(self, indices: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Read public images, prepared for the model, on ``device``. The same position always gives the same image."""
        store = self._ready.public
        assert store is not None
        images, _ = self._served(store).take(torch.zeros_like(indices), indices, (self._seed, -2))
        return self.prepare(send(images, device))

    def validation_batches(self, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the server's labelled images, prepared, and their labels, on ``device``; nothing if there are none."""
        if self._ready.server_validation is not None:
            store = self._served(self._ready.server_validation)
            for x, y, _ in loader(EvalBatches(store, self.eval_batch_size, self._seed), store, self.num_workers):
                yield self.prepare(send(x, device)), send(y, device)
