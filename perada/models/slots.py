# SPDX-License-Identifier: Apache-2.0
"""Names of a model's trained tensors, sorted by what they are."""

from torch import nn

from perada.algorithms.base import Slot
from perada.core.states import parameter_keys, trained_keys
from perada.models.adapted import is_adapter_key


def make_slot(model: nn.Module, head: str) -> Slot:
    """Sort the names of a model's trained tensors."""
    keys = trained_keys(model)
    norms = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
    )
    parameters = parameter_keys(model)
    first = next(
        path.removesuffix(".base_layer").removesuffix(".original_module")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)
    )
    return Slot(
        keys,
        parameters,
        head=frozenset(key for key in parameters if key.startswith(f"{head}.")),
        norms=frozenset(key for key in keys if key.startswith(norms)),
        input=frozenset(key for key in keys if key.startswith(f"{first}.")),
        adapter=frozenset(key for key in keys if is_adapter_key(key)),
    )
