# SPDX-License-Identifier: Apache-2.0
"""The images that a server without clients' data has."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.rounds import batch_indices
from perada.core.states import send
from perada.data.batches.samples import Store, make_store
from perada.data.batches.transforms import Preparation


class ServerImages:
    """The images that a server without clients' data has.

    Args:
        public: Images for distillation, labels are never read; None for none.
        preparation: How images become ready for the model; its seed is the run's.
    """

    def __init__(self, public: Dataset[object] | None, preparation: Preparation) -> None:
        self.preparation = preparation
        self.public: Store | None = None
        if public is not None:
            self.public = make_store([public], labelled=False, size=preparation.image_size)

    @property
    def public_size(self) -> int:
        """Number of public images; 0 if there are none."""
        return 0 if self.public is None else self.public.sizes[0]

    def public_indices(self, round: int, steps: int, batch_size: int | str) -> Tensor:
        """Positions (steps, B) in the public set, as :meth:`perada.data.FederatedDataModule.public_indices`."""
        return batch_indices(self.public_size, batch_size, steps, self.preparation.seed, "public", round)  # type: ignore[arg-type]  # "full" is the only text

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Public images, prepared for the model, on ``device``."""
        assert self.public is not None
        images, _ = self.public.take(torch.zeros_like(indices), indices, (self.preparation.seed, -2))
        return self.preparation(send(images, device))

    def validation_batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Nothing: labelled images of a server's own are not read."""
        yield from ()
