# SPDX-License-Identifier: Apache-2.0
"""The network of a run: a backbone with its adapter, as the run's options name them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from perada.core.seeding import seeded
from perada.core.states import State, get_state, to_device, trained_keys
from perada.models.adapted import AdaptedModel, AdapterChoice, insert_adapter, reset_parameters
from perada.models.backbones import build_backbone
from perada.models.merging import Trained


@dataclass(frozen=True)
class ModelSpec:
    """A backbone with its adapter.

    It has what :func:`build_backbone` and :func:`~perada.models.adapted.insert_adapter` take. From the run's ``seed``
    the random initial values of head and adapter are derived.
    """

    backbone: str | nn.Module
    num_classes: int | None
    pretrained: bool | str = True
    image_size: int | None = None
    adapter: AdapterChoice = "residual"
    train_backbone: Trained = False
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def build(self, *index: int) -> AdaptedModel:
        """Build the backbone with its adapter; what is random is drawn from the ``index``-th stream for it."""
        with seeded(self.seed, "model", *index):
            backbone = build_backbone(
                self.backbone, self.num_classes, pretrained=self.pretrained, image_size=self.image_size
            )
            return insert_adapter(backbone, self.adapter, train_backbone=self.train_backbone, **self.adapter_options)

    def initial_state(self, adapted: AdaptedModel, index: int) -> State:
        """The ``index``-th random initialisation of what is trained; that of 0 is that of ``adapted``, which was built.

        Only what is random differs: the adapter and the head, which is drawn anew also where the weights came with one
        that fits, or all that is trained with ``pretrained=False``.
        """
        if index == 0:
            return get_state(adapted.model)
        model = self.build(index).model
        everything = self.pretrained is False and isinstance(self.backbone, nn.Module)
        with seeded(self.seed, "model", index):
            reset_parameters(model, "" if everything else f"{adapted.backbone.head}.")
        return to_device(get_state(model), next(adapted.model.parameters()).device)


def frozen_digest(model: nn.Module) -> str:
    """SHA-256 of all weights that are not trained, with their names, in hexadecimal digits."""
    trained, digest = set(trained_keys(model)), hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        if key not in trained:
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
