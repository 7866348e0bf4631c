# SPDX-License-Identifier: Apache-2.0
"""What the methods share that add layers behind a module."""

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

ConfigT = TypeVar("ConfigT", bound=PeftConfig)


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
