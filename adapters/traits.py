# SPDX-License-Identifier: Apache-2.0
"""What a federation must know of a PEFT method that its configuration does not say."""

import re
from dataclasses import dataclass

# Layers of known families of transformers: timm, transformers 5, its CLIP and SigLIP, transformers 4.
ATTENTION = re.compile(
    r".*(attn\.(qkv|proj)|attention\.[qkvo]_proj|self_attn\.([qkv]|out)_proj|attention\.(query|key|value)"
    r"|attention\.output\.dense)"
)


@dataclass(frozen=True)
class AdapterTraits:
    """Traits of a method. A configuration class of your own states them as its class attribute ``traits``.

    Attributes:
        finds_targets: Whether the method's model chooses the layers to adapt itself if ``target_modules`` is None.
        adapts_norms: Whether it adapts normalisation layers instead of linear layers.
        adapts_convolutions: Whether it adapts convolutions, too.
        attention: Names of the linear layers that it adapts by default in transformers of known families.
        feedforward: Names of further layers that it adapts there, which it lists as ``feedforward_modules``; None if it
            has no such field.
        lists_head: Whether the configuration lists the classification head among the modules that it trains, instead of
            in ``modules_to_save``. It then selects which of the network's own parameters are trained.
        channels_last: Whether its convolutions support the channels-last memory format.
        unsupported: Why clients cannot be trained with the method, and what to choose instead; empty if they can.

    >>> AdapterTraits(finds_targets=True).adapts_convolutions
    False
    """

    finds_targets: bool = False
    adapts_norms: bool = False
    adapts_convolutions: bool = False
    attention: re.Pattern[str] = ATTENTION
    feedforward: re.Pattern[str] | None = None
    lists_head: bool = False
    channels_last: bool = True
    unsupported: str = ""
