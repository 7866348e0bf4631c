# SPDX-License-Identifier: Apache-2.0
"""PEFT methods of perada's own: importing this package registers them with PEFT.

One file a method: its configuration (what is saved), its layer (what wraps a module) and its tuner (where it goes).
A new method adds its file, and registers itself below.
"""

if __name__ != "perada.adapters":
    raise ImportError(
        f"import perada.adapters, not {__name__!r}: the name 'adapters' belongs to another package on PyPI"
    )

from typing import cast

from peft import PeftConfig, PeftType, mapping
from peft.tuners.tuners_utils import BaseTuner

from .added import AddedLayer, AddingModel
from .bottleneck import BottleneckConfig, BottleneckModel
from .dual_lora import DualLoraConfig, DualLoraModel
from .prompt import PromptConfig, PromptModel
from .residual import ResidualConfig, ResidualModel
from .selective import SelectiveConfig, SelectiveModel

__all__ = [
    "AddedLayer",
    "AddingModel",
    "BottleneckConfig",
    "DualLoraConfig",
    "PromptConfig",
    "ResidualConfig",
    "SelectiveConfig",
    "register",
]


def register(name: str, config: type[PeftConfig], model: type[BaseTuner]) -> None:
    """Register a method with PEFT, whose configurations then are adapters like any other.

    Args:
        name: The ``peft_type`` that its configurations give themselves, a plain string: PEFT's enumeration is closed.
        config: The class of its configuration.
        model: The tuner, with a ``prefix`` that begins the names of all that it adds to a layer.

    Raises:
        ValueError: If the name belongs to another method.
    """
    kind = cast(PeftType, name)
    if mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(kind, config).__qualname__ != config.__qualname__:
        raise ValueError(
            f"name={name!r} is taken by {mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind].__name__}; give another"
        )
    mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind] = config
    mapping.PEFT_TYPE_TO_TUNER_MAPPING[kind] = model
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[kind] = model.prefix


register("PERADA_RESIDUAL", ResidualConfig, ResidualModel)
register("PERADA_BOTTLENECK", BottleneckConfig, BottleneckModel)
register("PERADA_DUAL_LORA", DualLoraConfig, DualLoraModel)
register("PERADA_PROMPT", PromptConfig, PromptModel)
register("PERADA_SELECTIVE", SelectiveConfig, SelectiveModel)
