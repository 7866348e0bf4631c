# SPDX-License-Identifier: Apache-2.0
"""PEFT methods of perada's own: importing this package registers them with PEFT.

One folder a method: ``config.py`` (what is saved), ``layer.py`` (what wraps a module) and ``model.py`` (where it goes).
A new method adds its folder and one row to ``METHODS``.
"""

if __name__ != "perada.adapters":
    raise ImportError(
        f"import perada.adapters, not {__name__!r}: the name 'adapters' belongs to another package on PyPI"
    )

from typing import cast

from peft import PeftConfig, PeftType, mapping
from peft.tuners.tuners_utils import BaseTuner

from .bottleneck import BottleneckConfig, BottleneckModel
from .residual import ResidualConfig, ResidualModel
from .selective import SelectiveConfig, SelectiveModel

__all__ = ["METHODS", "BottleneckConfig", "ResidualConfig", "SelectiveConfig"]

METHODS: dict[str, tuple[type[PeftConfig], type[BaseTuner]]] = {
    "PERADA_RESIDUAL": (ResidualConfig, ResidualModel),
    "PERADA_BOTTLENECK": (BottleneckConfig, BottleneckModel),
    "PERADA_SELECTIVE": (SelectiveConfig, SelectiveModel),
}
"""PEFT type (a plain string: PEFT's own enumeration is closed) of each method, with its config and tuner."""

for _name, (_config, _model) in METHODS.items():
    _type = cast(PeftType, _name)
    mapping.PEFT_TYPE_TO_CONFIG_MAPPING[_type] = _config
    mapping.PEFT_TYPE_TO_TUNER_MAPPING[_type] = _model
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[_type] = _model.prefix
