# SPDX-License-Identifier: Apache-2.0
"""The backbone of a saved run, made again."""

from pathlib import Path
from typing import Any

from torch import nn

from perada.models.backbones import Backbone, build_backbone
from perada.results.export import BACKBONE_FILE, own_weights


def rebuilt(folder: Path, info: dict[str, Any], backbone: nn.Module | None) -> Backbone:
    """The backbone of the run in ``folder``, without adapter; ``backbone`` where it was one of the caller's own.

    Raises:
        FileNotFoundError: If its weights are missing.
        ValueError: If it was one of the caller's own, which was not given.
    """
    if info["backbone"] is None and backbone is None:
        raise ValueError(
            f"the run in {str(folder)!r} was made with a network of your own; pass one of the same class as backbone="
        )
    random = not info["pretrained"] or info["backbone"] is None
    if random and not (folder / BACKBONE_FILE).is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {BACKBONE_FILE}, the frozen weights that its adapters were trained on; copy "
            "the whole folder"
        )
    within = (folder / BACKBONE_FILE).is_file() and own_weights(info)
    pretrained = False if within else info["pretrained"]
    network = info["backbone"] if backbone is None else backbone
    size = info["built_for"] if "built_for" in info else info["image_size"]  # runs of before have one size
    return build_backbone(network, info["num_classes"], pretrained=pretrained, image_size=size)
