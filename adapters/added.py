# SPDX-License-Identifier: Apache-2.0
"""What the methods share: checks of options, the blocks of a network, in order, and layers added behind a module."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar, cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

ConfigT = TypeVar("ConfigT", bound=PeftConfig)


BLOCK = re.compile(r"(.*\.)?(layer\d+\.\d+|blocks\.\d+(\.\d+)?|layers?\.\d+|s\d+\.b\d+|denseblock\d+\.denselayer\d+)")
"""ResNets of timm and torchvision, EfficientNets, ConvNeXts and ViTs of timm, networks of transformers 5 and 4, RegNets
and DenseNets."""
PART = re.compile(r".*layers\.\d+\.layer\.\d+")
"""What a block of a ResNet of transformers consists of."""


def plain_name(name: str) -> str:
    """The name that a module, or a tensor, of the network has without adapters."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the network's modules under the names they have without adapters, whether or not it holds some already."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if "modules_to_save" not in parts and not any(part.startswith("perada_") for part in parts):
            yield plain_name(name), module


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer that can be trained."""
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))


class AdapterConfig(PeftConfig):
    """Configuration of a method of perada's own."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT gives it no type


def check_dropout(rate: float) -> None:
    """Refuse, by a ValueError, a probability of the dropout that is none, or drops everything."""
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"dropout={rate!r} is not a probability: give a number from 0 to below 1")


def check_last_blocks(count: int | None) -> None:
    """Refuse, by a ValueError, a number of blocks that is none."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"last_blocks={count!r} is not a number of blocks: give 1 or more, or null for all")


def reached(model: nn.Module, last_blocks: int | None) -> frozenset[str]:
    """Names of the modules in the last so many blocks and of those behind them; of all modules for None.

    Modules are taken to run in the order in which the network defines them, as they do in the families of ``BLOCK``.

    Raises:
        ValueError: If the network has fewer blocks, or none that are known.
    """
    names = list(dict.fromkeys(name for name, _ in own_modules(model)))
    if last_blocks is None:
        return frozenset(names)
    candidates = [name for name in names if BLOCK.fullmatch(name) and not PART.fullmatch(name)]
    blocks = [name for name in candidates if not any(other.startswith(f"{name}.") for other in candidates)]
    if last_blocks > len(blocks):
        has = f"has {len(blocks)}" if blocks else "is of no family whose blocks are known"
        raise ValueError(
            f"last_blocks={last_blocks}, but {type(model).__name__} {has}: "
            + ("give fewer" if blocks else "leave it out, and name layers in target_modules where the adapter has that")
        )
    start = names.index(blocks[-last_blocks])
    outer = {name for name in names if blocks[-last_blocks].startswith(f"{name}.")}
    return frozenset(names[start:]) - outer


class AddedLayer(nn.Module, BaseTunerLayer, Generic[ConfigT]):
    """A module followed by one adapter for each active PEFT adapter name: ``x + last(... first(x))``.

    Each part is a dictionary of its own, keyed by adapter name: PEFT can then strip the name from the keys it saves.
    PEFT finds ``modules_to_save`` by the ends of names, so no dictionary's name ends as a module's may (``norm``).
    The module, ``base_layer``, stays as it is.
    """

    parts: ClassVar[tuple[str, ...]]
    """Names of the dictionaries, in the order of the forward pass."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: ConfigT) -> None:
        super().__init__()
        self.base_layer = base_layer
        for part in self.parts:
            setattr(self, part, nn.ModuleDict())
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    @abstractmethod
    def build(self, config: ConfigT) -> tuple[nn.Module, ...]:
        """Return a new module for each of ``parts``, initialised from torch's global random stream."""

    def update_layer(self, adapter_name: str, config: ConfigT) -> None:
        """Add an adapter."""
        for part, module in zip(self.parts, self.build(config), strict=True):
            getattr(self, part)[adapter_name] = module
        self._move_adapter_to_device_of_base_layer(adapter_name, next(self.base_layer.parameters()).device)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the module, in its own shape."""
        x = self.base_layer(x)
        if self.disable_adapters:
            return x
        for name in self.active_adapters:
            if name in getattr(self, self.parts[0]):
                hidden = x
                for part in self.parts:
                    hidden = getattr(self, part)[name](hidden)
                x = x + hidden
        return x


class AddingModel(BaseTuner, Generic[ConfigT]):
    """Put an adapter behind each targeted module."""

    method: ClassVar[str]  # what errors call it
    families: ClassVar[str]  # networks in which `targets` finds modules
    follows: ClassVar[str]  # modules that an adapter can follow

    @abstractmethod
    def targets(self, config: ConfigT) -> list[str]:
        """Return the modules to adapt where the user names none."""

    @abstractmethod
    def fits(self, target: nn.Module) -> bool:
        """Whether an adapter can follow ``target``."""

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        config = cast(Any, peft_config)
        if config.target_modules is None:
            config.target_modules = self.targets(config)
            if not config.target_modules:
                raise ValueError(
                    f"the {self.method} adapter fits {self.families}, not {type(self.model).__name__}: "
                    "choose another adapter, or name the modules in target_modules"
                )
        return peft_config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        *_: object,
        **__: object,
    ) -> None:
        if isinstance(target, AddedLayer):
            target.update_layer(adapter_name, peft_config)
            return
        if not self.fits(target):
            raise ValueError(
                f"the {self.method} adapter cannot follow {current_key!r}, a {type(target).__name__}: "
                f"let target_modules name {self.follows} only"
            )
        layer = cast(type[AddedLayer[Any]], self.tuner_layer_cls)(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)
