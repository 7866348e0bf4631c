# SPDX-License-Identifier: Apache-2.0
"""Whether images are served as features of a frozen part of the model, computed once."""

import pytorch_lightning as pl
from torch import Tensor

from perada.data import FederatedDataModule
from perada.module import FederatedClassifier
from perada.rounds import one_of

LEAST_SHARE = 0.1
"""Share of a forward pass that the frozen part must be, unless features are asked for."""


def use_features(trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Serve features where that pays, or is asked for.

    Raises:
        ValueError: If it is asked for and no frozen part comes before what is trained.
    """
    if module.cache_features is False:
        return
    batch = one_of(data.prepare(next(iter(data.cohort_loader(data.plan_for([0], 0))))))
    image = batch.x[0, 0].to(next(module.model.parameters()).device)
    prefix = module.engine.find_prefix(image, 0.0 if module.cache_features else LEAST_SHARE)
    if prefix is None:
        if module.cache_features:
            raise ValueError(
                "cache_features=True, and the model has no frozen part that everything trained comes after; leave "
                "cache_features out, or choose an adapter that has (head, lora)"
            )
        return

    def encode(images: Tensor) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return module.engine.features(data.prepare(images.to(module.device)))

    data.use_features(encode, prefix.size, tuple(prefix.image))
