# SPDX-License-Identifier: Apache-2.0
"""A network without PEFT's layers, which computes the same."""

import copy

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from perada.adapters.added import AddedLayer
from perada.adapters.dual_lora import DualLoraLayer
from perada.adapters.prompt import PromptLayer


def unwrapped(network: nn.Module) -> nn.Module:
    """A copy of a network without PEFT's layers, which computes the same.

    What PEFT can merge is merged into the weights; layers behind modules become plain ones; a trained head takes the
    place of the original.
    """
    model = copy.deepcopy(network)
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(model):  # transformers has the second as an attribute of the class too
            delattr(model, name)
    for path, module in reversed(list(model.named_modules())):  # what is inside first
        plain = _plain(module)
        if plain is not module and path:
            model.set_submodule(path, plain)
    return model


def _plain(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.DataParallel):  # a part that several GPUs share
        inner: nn.Module = module.module
        return inner
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    if isinstance(module, DualLoraLayer):
        return Beside(module.base_layer, module.branches(module.active_adapters[0]))
    if isinstance(module, PromptLayer):
        return module.plain()
    if isinstance(module, AddedLayer):
        name = module.active_adapters[0]
        return Followed(module.base_layer, nn.Sequential(*(getattr(module, part)[name] for part in module.parts)))
    if isinstance(module, BaseTunerLayer):
        module.base_layer = copy.deepcopy(module.base_layer)  # the network may use its weights in other places too
        module.merge(safe_merge=True)
        base: nn.Module = module.get_base_layer()
        return base
    return module


class Followed(nn.Module):
    """A module and what an adapter had added behind it: ``x + added(x)``, x being the module's output."""

    def __init__(self, base: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.perada_added = base, added
        if isinstance(base, nn.Conv2d):
            self.out_channels = base.out_channels  # for adapters that follow this

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output with what was added to it."""
        x = self.base_layer(x)
        added: Tensor = self.perada_added(x)
        return x + added


class Beside(Followed):
    """A module, plus what is made of its own input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output with what was added to it."""
        out: Tensor = self.base_layer(x)
        added: Tensor = self.perada_added(x)
        return out + added
