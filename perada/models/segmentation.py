# SPDX-License-Identifier: Apache-2.0
"""Segmentation networks of segmentation_models_pytorch, by name."""

import warnings

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from perada.core.checks import OptionError, installed
from perada.core.rounds import ImageConfig
from perada.core.text import near_names
from perada.models.backbone import Backbone
from perada.models.weight_files import load_weights, no_weights

SEGMENTATION_PREFIX = "smp:"
"""Prefix of the names of these networks."""
HEAD = "segmentation_head.0"
"""Full name of the convolution whose outputs are the logits, in all architectures."""
DECODER = "decoder"
"""Full name of the decoder, of which no pretrained weights are published."""
DEFAULT_SIZE = 224
"""Height and width of the images of dry runs, if none is given. The networks accept any multiple of 32."""


def build_segmentation_network(
    name: str, num_classes: int | None, pretrained: bool | str, image_size: int | None, in_chans: int
) -> Backbone:
    """Build a network with an encoder that may be pretrained on ImageNet, and a new decoder.

    Args:
        name: ``"smp:"``, the architecture, a hyphen and the encoder, such as ``"smp:unet-resnet18"``.
        num_classes: Number of classes K; None for one.
        pretrained: Whether the encoder has the published ImageNet weights; a string is a file of the weights of the
            entire network.
        image_size: Height and width of the images in pixels; None if any.
        in_chans: Channels of the images.

    Raises:
        ModuleNotFoundError: If segmentation_models_pytorch is not installed.
        OptionError: If the architecture or the encoder is unknown.
        FileNotFoundError: If there are no weights.
    """
    smp = installed("segmentation_models_pytorch", f"backbone={name!r}", "segmentation")
    architecture, _, encoder = name.removeprefix(SEGMENTATION_PREFIX).partition("-")
    architectures = list(smp.MODEL_ARCHITECTURES_MAPPING)
    encoders = smp.encoders.get_encoder_names()
    _check_choice(name, "architecture", architecture, architectures)
    # Encoders of timm have the prefix "tu-", of which there are hundreds.
    if not encoder.startswith("tu-"):
        _check_choice(name, "encoder", encoder, encoders)
    try:
        with warnings.catch_warnings():
            # Some of its encoders have a new name in timm.
            warnings.filterwarnings("ignore", "Mapping deprecated model name", UserWarning)
            model: nn.Module = smp.create_model(
                architecture,
                encoder,
                encoder_weights="imagenet" if pretrained is True else None,
                in_channels=in_chans,
                classes=num_classes or 1,
            )
    except Exception as error:  # downloads fail in many ways, and architectures reject encoders by several types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if pretrained is True:
            raise no_weights(name, reason) from error
        raise OptionError(
            f"backbone {name!r} cannot be built: {reason.removesuffix('.')}; choose another encoder, such as resnet18",
            name="backbone",
            value=name,
        ) from error
    if isinstance(pretrained, str):
        load_weights(model, pretrained, HEAD)
    size = image_size or DEFAULT_SIZE
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    if pretrained is True:
        # A file on the Hub, like the weights.
        parameters = smp.encoders.get_preprocessing_params(encoder)
        mean = tuple(parameters["mean"] or (0.0, 0.0, 0.0))
        std = tuple(parameters["std"] or (1.0, 1.0, 1.0))
    if in_chans != 3:
        mean = (0.5,) * in_chans
        std = (0.5,) * in_chans
    return Backbone(model, name, HEAD, ImageConfig((in_chans, size, size), mean, std), decoder=DECODER)


def _check_choice(name: str, kind: str, value: str, choices: list[str]) -> None:
    """Raise an OptionError if the architecture or the encoder in a name is unknown."""
    if value in choices:
        return
    similar = near_names(value, choices, limit=3)
    hint = f"did you mean {', '.join(similar)}?" if similar else f"choose one of {', '.join(choices[:12])}"
    raise OptionError(
        f"backbone {name!r} has the unknown {kind} {value!r}; {hint} (names are 'smp:ARCHITECTURE-ENCODER')",
        name="backbone",
        value=name,
    )
