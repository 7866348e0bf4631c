# SPDX-License-Identifier: Apache-2.0
"""Build the network of a run from its options."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from perada.core.seeding import seeded
from perada.core.states import State, add_to_digest, get_state, to_device, trained_keys
from perada.models.adapted import AdaptedModel, insert_adapter, reset_parameters
from perada.models.backbones import build_backbone
from perada.models.configurations import AdapterChoice
from perada.models.merging import TrainBackbone
from perada.models.text_head import TextHead, ZeroShot


@dataclass(frozen=True)
class ModelSpec:
    """The options of a backbone with its adapter.

    Attributes:
        backbone: See :func:`~perada.models.backbones.build_backbone`, as for the next three.
        num_classes: See there.
        pretrained: See there.
        image_size: See there.
        adapter: See :func:`~perada.models.adapted.insert_adapter`, as for the next two.
        train_backbone: See there.
        adapter_options: See there.
        seed: Seed of the run, from which random initial values of head and adapter are derived.
        per_pixel: See ``backbone``.
        text_head: See ``backbone``.
    """

    backbone: str | nn.Module
    num_classes: int | None
    pretrained: bool | str = True
    image_size: int | None = None
    adapter: AdapterChoice = "residual"
    train_backbone: TrainBackbone = False
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    per_pixel: bool = False
    text_head: TextHead | None = None

    def build(self, *index: int) -> AdaptedModel:
        """Build the backbone with its adapter.

        Args:
            *index: Number of the random initialisation; without one, that of the run.
        """
        with seeded(self.seed, "model", *index):
            backbone = build_backbone(
                self.backbone,
                self.num_classes,
                pretrained=self.pretrained,
                image_size=self.image_size,
                per_pixel=self.per_pixel,
                text_head=self.text_head,
            )
            return insert_adapter(backbone, self.adapter, train_backbone=self.train_backbone, **self.adapter_options)

    def initial_state(self, adapted: AdaptedModel, index: int) -> State:
        """Return a random initialisation of the trained tensors.

        Only random values differ between initialisations: those of the adapter and of the head, which is reinitialised
        even if the pretrained weights include one. If the caller passed a network with ``pretrained=False``, all of it
        is reinitialised.

        Args:
            adapted: The model that :meth:`build` returned.
            index: Number of the initialisation; 0 is that of ``adapted``.
        """
        if index == 0:
            return get_state(adapted.model)
        model = self.build(index).model
        # A network given by name is initialised in each build, but that of the caller is copied with its values.
        is_random_copy = self.pretrained is False and isinstance(self.backbone, nn.Module)
        with seeded(self.seed, "model", index):
            if is_random_copy:
                reset_parameters(model, "")
            else:
                for module in adapted.backbone.head_modules:
                    reset_parameters(model, f"{module}.")
        device = next(adapted.model.parameters()).device
        return to_device(get_state(model), device)


def frozen_digest(model: nn.Module) -> str:
    """Return the SHA-256 (hexadecimal) of the names and values of all tensors that are not trained.

    The features of class names are left out, since their last digits depend on the machine that computes them. What
    they are computed from is included.
    """
    left_out = set(trained_keys(model))
    for path, module in model.named_modules():
        if isinstance(module, ZeroShot):
            left_out.add(f"{path}.text_features")
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        if key not in left_out:
            add_to_digest(digest, key, value)
    return digest.hexdigest()
