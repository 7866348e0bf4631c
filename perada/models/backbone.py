# SPDX-License-Identifier: Apache-2.0
"""A frozen network with the names of its parts."""

from dataclasses import dataclass

from torch import nn

from perada.core.rounds import ImageConfig


@dataclass
class Backbone:
    """A frozen image classifier.

    Attributes:
        model: The network, which maps images (B, channels, height, width) to logits (B, K).
        name: Its timm name, ``hf:`` and its transformers name, ``open_clip:`` and its OpenCLIP name, or its class name.
        head: Full name of the classification head in the model.
        image_config: Format of its images; None for a network that the caller built.
        decoder: Full name of a decoder without pretrained weights, which is trained as a part of the head.
    """

    model: nn.Module
    name: str
    head: str
    image_config: ImageConfig | None
    decoder: str | None = None

    @property
    def head_modules(self) -> list[str]:
        """Full names of the modules that are trained in full: the head, and the decoder if there is one."""
        if self.decoder is None:
            return [self.head]
        return [self.head, self.decoder]
