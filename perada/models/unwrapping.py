# SPDX-License-Identifier: Apache-2.0
"""Remove PEFT's layers from a network without changing what it computes."""

import copy

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from perada.adapters.added import AddedLayer
from perada.adapters.dual_lora import DualLoraLayer
from perada.adapters.prompt import PromptLayer
from perada.models.lora_attention import LoraProjections, add_to_projections


def unwrapped(network: nn.Module) -> nn.Module:
    """Return a copy of a network that computes the same without PEFT's layers and compiled modules.

    Adapters that PEFT can merge are merged into the weights. Layers that perada's methods added become plain modules,
    and the trained head replaces the original one.
    """
    model = copy.deepcopy(network)
    add_to_projections(model)
    # By these attributes, PEFT and transformers recognise networks with adapters. The class of a transformers network
    # also has the second one.
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(model):
            delattr(model, name)
    # Inner modules first, since a layer of PEFT may be inside another one.
    for path, module in reversed(list(model.named_modules())):
        plain = _plain_module(module)
        if plain is not module and path:
            model.set_submodule(path, plain)
    return model


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped; None if the module is not such a wrapper.

    The wrapper's class is not used, since its import takes seconds.
    """
    return dict(module.named_children()).get("_orig_mod")


def _plain_module(module: nn.Module) -> nn.Module:
    """Return the replacement of a module; the module itself if it is not one of PEFT's."""
    if isinstance(module, nn.DataParallel):
        inner: nn.Module = module.module
        return inner
    original = compiled_module(module)
    if original is not None:
        return original
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    if isinstance(module, DualLoraLayer):
        branches = module.branches(module.active_adapters[0])
        return ParallelAdapter(module.base_layer, branches)
    if isinstance(module, PromptLayer):
        return module.plain()
    if isinstance(module, AddedLayer):
        adapter_name = module.active_adapters[0]
        layers = [getattr(module, part)[adapter_name] for part in module.parts]
        return SequentialAdapter(module.base_layer, nn.Sequential(*layers))
    if isinstance(module, LoraProjections):
        # The wrappers of the other weights, which are inside, were replaced before.
        module.merge(safe_merge=True)
        attention: nn.Module = module.base_layer
        return attention
    if isinstance(module, BaseTunerLayer):
        # The network may use the same weights in other places, which merging must not change.
        module.base_layer = copy.deepcopy(module.base_layer)
        module.merge(safe_merge=True)
        base: nn.Module = module.get_base_layer()
        return base
    return module


class SequentialAdapter(nn.Module):
    """A module with an adapter on its output ``x``: ``x + added(x)``.

    Args:
        base: The module.
        added: The adapter.
    """

    def __init__(self, base: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.perada_added = added
        if isinstance(base, nn.Conv2d):
            # Another residual adapter that is added after this module reads this attribute.
            self.out_channels = base.out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the module."""
        x = self.base_layer(x)
        added: Tensor = self.perada_added(x)
        return x + added


class ParallelAdapter(SequentialAdapter):
    """A module with an adapter on its input ``x``: ``module(x) + added(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the module."""
        out: Tensor = self.base_layer(x)
        added: Tensor = self.perada_added(x)
        return out + added
