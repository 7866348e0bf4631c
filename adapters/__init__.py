# SPDX-License-Identifier: Apache-2.0
"""perada's PEFT methods. Importing this package registers them with PEFT.

Each method has one file, with the three classes of a tuner of PEFT: its configuration, its layer (what wraps a module)
and its model (which modules are wrapped). It is registered at the end of this file.
"""

# These files import one another relatively, so they could also be imported as a top-level package, but "adapters" on
# PyPI is another project.
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
from .traits import AdapterTraits

__all__ = [
    "AdapterTraits",
    "AddedLayer",
    "AddingModel",
    "BottleneckConfig",
    "DualLoraConfig",
    "PromptConfig",
    "ResidualConfig",
    "SelectiveConfig",
    "register",
]


def register(name: str, config_class: type[PeftConfig], model: type[BaseTuner]) -> None:
    """Register a method with PEFT, so that its configurations can be used like those of PEFT's built-in methods.

    Args:
        name: The method's ``peft_type``, which its configurations set.
        config_class: The configuration class.
        model: The tuner. Its ``prefix`` begins the names of all that it adds to a layer.

    Raises:
        ValueError: If another method has the name.
    """
    # peft.utils.register_peft_method accepts members of PeftType only, an enum that cannot be extended. The members are
    # strings, so a plain string is found in PEFT's dictionaries as well.
    peft_type = cast(PeftType, name)
    registered = mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)
    # Classes are compared by name, since a module that is loaded again defines its class anew.
    if registered is not None and registered.__qualname__ != config_class.__qualname__:
        raise ValueError(f"name={name!r} is already used by {registered.__name__}; choose a different name")
    mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_class
    mapping.PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[peft_type] = model.prefix


register("PERADA_RESIDUAL", ResidualConfig, ResidualModel)
register("PERADA_BOTTLENECK", BottleneckConfig, BottleneckModel)
register("PERADA_DUAL_LORA", DualLoraConfig, DualLoraModel)
register("PERADA_PROMPT", PromptConfig, PromptModel)
register("PERADA_SELECTIVE", SelectiveConfig, SelectiveModel)
