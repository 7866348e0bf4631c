# SPDX-License-Identifier: Apache-2.0
"""Image towers of networks in OpenCLIP's format, such as BiomedCLIP, by folder or by name on the Hub."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perada.core.checks import OptionError, installed
from perada.core.rounds import ImageConfig
from perada.models.backbone import Backbone
from perada.models.image_text import HEAD, OPEN_CLIP_PREFIX, check_prompt_length, text_classifier, weights_of_text
from perada.models.text_head import TextHead, TextTower
from perada.models.weight_files import cached_file, no_weights

CONFIG_FILE = "open_clip_config.json"
"""File by which OpenCLIP describes a network."""
CHANNELS = 3
"""Channels of the images of OpenCLIP's networks."""


class OpenClipClassifier(nn.Module):
    """The image tower of a network of OpenCLIP, and a classifier.

    Names of its tensors are those of the network, so that PEFT reads its adapters into the whole network, too.

    Args:
        visual: The image tower.
        classifier: Maps the features (B, D) of images to logits (B, K).
    """

    def __init__(self, visual: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.visual = visual
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, height, width) to logits (B, K)."""
        logits: Tensor = self.classifier(image_features(self.visual, x))
        return logits


def image_features(visual: nn.Module, x: Tensor) -> Tensor:
    """Return the features (B, D) of images."""
    output = visual(x)
    # The tower of a CoCa also returns the features of patches.
    features: Tensor = output[0] if isinstance(output, tuple) else output
    return features


def build_open_clip(
    name: str,
    num_classes: int | None,
    pretrained: bool | str,
    image_size: int | None,
    in_chans: int,
    text_head: TextHead | None,
) -> Backbone:
    """Build the image tower of a network of OpenCLIP, with a linear head or one from the names of the classes.

    Args:
        name: ``"open_clip:"`` and a folder with ``open_clip_config.json``, or the name of such a repository on the Hub.
        num_classes: Number of classes K; None for one.
        pretrained: Whether to load the weights; a string is a folder that replaces the one in the name.
        image_size: Height and width of the images in pixels; None for that of the weights. Positions are interpolated.
        in_chans: Channels of the images, which must be 3.
        text_head: Options of a head from class names; None for a linear head.

    Raises:
        ModuleNotFoundError: If open_clip_torch is not installed.
        OptionError: If the network does not accept the images.
        FileNotFoundError: If there are no weights.
    """
    open_clip = installed("open_clip", f"backbone={name!r}", "open-clip")
    if in_chans != CHANNELS:
        raise OptionError(
            f"in_chans={in_chans}, but backbone {name!r} takes images with {CHANNELS} channels; convert them",
            name="in_chans",
            value=in_chans,
        )
    source = pretrained if isinstance(pretrained, str) else name.removeprefix(OPEN_CLIP_PREFIX)
    has_weights = pretrained is not False
    if Path(source).is_dir():
        location = f"local-dir:{source}"
    else:
        cached_file(name, source, (CONFIG_FILE,))
        location = f"hf-hub:{source}"
    try:
        with _without_root_handler():
            network = open_clip.create_model(
                location,
                load_weights=has_weights,
                require_pretrained=has_weights,
                pretrained_text=False,
                force_image_size=image_size,
            ).eval()
    except Exception as error:  # OpenCLIP, downloads and torch raise errors of any kind
        raise no_weights(name, f"{type(error).__name__}: {error}") from error
    preprocessing = open_clip.get_model_preprocess_cfg(network)
    height, width = _height_and_width(preprocessing["size"] if image_size is None else image_size)
    num_features = _count_features(name, network.visual, height, width)
    if text_head is None:
        classifier: nn.Module = nn.Linear(num_features, num_classes or 1)
    else:
        tower = _text_tower(open_clip, name, network, location) if has_weights else None
        names = text_head.class_names or ()
        classifier = text_classifier(network, text_head, num_classes or len(names), num_features, tower)
    model = OpenClipClassifier(network.visual, classifier)
    mean = tuple(float(value) for value in preprocessing["mean"])
    std = tuple(float(value) for value in preprocessing["std"])
    return Backbone(model, name, HEAD, ImageConfig((CHANNELS, height, width), mean, std))


def _height_and_width(size: Any) -> tuple[int, int]:  # noqa: ANN401  # JSON of a file: a number, or a list of two
    """Return the height and width of images."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


def _count_features(name: str, visual: nn.Module, height: int, width: int) -> int:
    """Return the number of features of an image; raise an OptionError if the tower does not accept its size."""
    try:
        with torch.no_grad():
            features = image_features(visual, torch.zeros(1, CHANNELS, height, width))
    except Exception as error:  # layers raise errors of any kind
        reason = " ".join(str(error).split()).removesuffix(".")
        raise OptionError(
            f"image_size={height}, but the weights of backbone {name!r} are for another size ({reason}); leave "
            "image_size out",
            name="image_size",
            value=height,
        ) from error
    return features.shape[-1]


def _text_tower(open_clip: Any, name: str, network: Any, location: str) -> TextTower:  # noqa: ANN401  # OpenCLIP ships no types
    """Return the text tower of a network with its tokenizer.

    Raises:
        FileNotFoundError: If the tokenizer cannot be read.
    """
    try:
        with _without_root_handler():
            tokenizer = open_clip.get_tokenizer(location)
    except Exception as error:  # OpenCLIP and transformers raise errors of any kind
        raise no_weights(name, f"its tokenizer cannot be read: {error}") from error
    longest = tokenizer.context_length

    def tokenize(texts: list[str]) -> tuple[Tensor, ...]:
        # Longer prompts would be cut without a word. The last column is padding unless a prompt is longer still.
        for text, tokens in zip(texts, tokenizer(texts, context_length=2 * longest), strict=True):
            is_token = tokens != tokens[-1]
            check_prompt_length(text, int(is_token.sum()), longest)
        return (tokenizer(texts),)

    return TextTower(weights_of_text(network), tokenize, network.encode_text)


@contextmanager
def _without_root_handler() -> Iterator[None]:
    """Keep OpenCLIP, which logs by the root logger, from adding a handler that prints the messages of all libraries."""
    root = logging.getLogger()
    handler = logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
