# SPDX-License-Identifier: Apache-2.0
"""Common parts of perada's PEFT methods: checks of options, blocks of a network, and adapters added after modules."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, ClassVar, Generic, TypeVar, cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from .traits import AdapterTraits

ConfigT = TypeVar("ConfigT", bound=PeftConfig)

BLOCK = re.compile(r"(.*\.)?(layer\d+\.\d+|blocks\.\d+(\.\d+)?|layers?\.\d+|s\d+\.b\d+|denseblock\d+\.denselayer\d+)")
"""Full name of a block in ResNets of timm and torchvision, in EfficientNets, ConvNeXts and ViTs of timm, in networks of
transformers 5 and 4, and in RegNets and DenseNets."""
BLOCK_PART = re.compile(r".*layers\.\d+\.layer\.\d+")
"""Full name of a part of a block in ResNets of transformers, which ``BLOCK`` matches too."""


def plain_name(name: str) -> str:
    """Return the name of a module or tensor in the network without adapters.

    PEFT moves what it wraps: into ``base_layer`` of a tuner's layer, or into ``original_module`` of the wrapper that
    ``modules_to_save`` creates.

    >>> plain_name("layer1.0.conv1.base_layer.weight"), plain_name("fc.original_module.bias")
    ('layer1.0.conv1.weight', 'fc.bias')
    """
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


FORMER_ADAPTERS = frozenset({"perada_added", "perada_enter", "perada_leave"})
"""Names of the modules with the layers of an earlier run's adapter, in a network that the run returned."""


def owner_name(name: str) -> str:
    """Return the plain name of the module of the network that a module belongs to.

    Modules of an earlier run's adapter belong to the module that it adapts.

    >>> owner_name("layer1.0.conv1.perada_added.0"), owner_name("layer1.0.conv1.base_layer")
    ('layer1.0.conv1', 'layer1.0.conv1')
    """
    parts = takewhile(lambda part: part not in FORMER_ADAPTERS, plain_name(name).split("."))
    return ".".join(parts)


def backbone_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the network itself under their plain names, whether or not it has adapters already.

    An adapted module comes up twice under one name: as PEFT's layer and as the module inside it.
    """
    for name, module in model.named_modules():
        parts = name.split(".")
        is_trained_copy = "modules_to_save" in parts
        is_in_adapter = any(part.startswith("perada_") for part in parts)
        if not is_trained_copy and not is_in_adapter:
            yield plain_name(name), module


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer with parameters."""
    # Norms are found by name, since some of timm and transformers derive from none of torch's classes.
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))


class AdapterConfig(PeftConfig):
    """Base class of the configurations of perada's methods, whose models find the modules to adapt themselves."""

    traits: ClassVar[AdapterTraits] = AdapterTraits(finds_targets=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT gives it no type


def check_dropout(rate: float) -> None:
    """Raise a ValueError unless a dropout rate is at least 0 and below 1."""
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"dropout must be a number >= 0 and < 1, got {rate!r}")


def check_last_blocks(count: int | None) -> None:
    """Raise a ValueError if a number of blocks is neither a positive integer nor None."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"last_blocks must be an integer >= 1 or None, got {count!r}; None stands for all blocks")


def modules_from_last_blocks(model: nn.Module, last_blocks: int | None) -> frozenset[str]:
    """Return the plain names of all modules from the first of the last blocks on.

    Modules are assumed to run in the order in which the network defines them, as they do in the families of ``BLOCK``.

    Args:
        model: The network, with or without adapters.
        last_blocks: Number of blocks, counted from the end; None for all modules of the network.

    Raises:
        ValueError: If the network has fewer blocks, or none that are known.
    """
    names = list(dict.fromkeys(name for name, _ in backbone_modules(model)))
    if last_blocks is None:
        return frozenset(names)
    candidates = [name for name in names if BLOCK.fullmatch(name) and not BLOCK_PART.fullmatch(name)]
    # A stage may match too, such as "layers.0" around "layers.0.blocks.1": blocks are the innermost matches.
    blocks = [name for name in candidates if not any(other.startswith(f"{name}.") for other in candidates)]
    if not blocks:
        raise ValueError(
            f"last_blocks={last_blocks}, but {type(model).__name__} belongs to no family whose blocks are known; "
            "leave last_blocks out, and name layers in target_modules if the adapter has that option"
        )
    if last_blocks > len(blocks):
        raise ValueError(
            f"last_blocks={last_blocks}, but {type(model).__name__} only has {len(blocks)} blocks; set a smaller number"
        )
    first_block = blocks[-last_blocks]
    modules = frozenset(names[names.index(first_block) :])
    # Stages that contain the block may be defined before it; they also contain earlier blocks.
    ancestors = {name for name in names if first_block.startswith(f"{name}.")}
    return modules - ancestors


class AddedLayer(nn.Module, BaseTunerLayer, Generic[ConfigT]):
    """A module followed by one adapter per active adapter name: ``x + last(... first(x))``, x being its output.

    The module itself, ``base_layer``, is not changed, so there is nothing to merge.

    Args:
        base_layer: The module to adapt.
        adapter_name: PEFT's name for the adapter.
        config: Configuration of the method.
    """

    # PEFT strips the adapter's name from a key only where it comes last or second to last. So each layer of the adapter
    # has its own flat dictionary, {adapter name: layer}, instead of one dictionary of nn.Sequential for all.
    # PEFT also matches modules_to_save by the ends of names: no dictionary's name may end like that of a module, such
    # as "norm".
    parts: ClassVar[tuple[str, ...]]
    """Names of the dictionaries, one for each layer of the adapter, in the order of the forward pass."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: ConfigT) -> None:
        super().__init__()
        self.base_layer = base_layer
        for part in self.parts:
            setattr(self, part, nn.ModuleDict())
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    @abstractmethod
    def build(self, config: ConfigT) -> tuple[nn.Module, ...]:
        """Return a new layer for each of ``parts``, initialised from torch's global random stream."""

    def update_layer(self, adapter_name: str, config: ConfigT) -> None:
        """Add an adapter."""
        layers = self.build(config)
        for part, layer in zip(self.parts, layers, strict=True):
            getattr(self, part)[adapter_name] = layer
        # PEFT infers the device from base_layer.weight, which a block of layers does not have.
        device = next(self.base_layer.parameters()).device
        self._move_adapter_to_device_of_base_layer(adapter_name, device)
        # Adapters that are not active, and those in inference mode, do not require gradients.
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the module, in its original shape."""
        x = self.base_layer(x)
        if self.disable_adapters:
            return x
        for adapter_name in self.active_adapters:
            # An active adapter may have other targets than this module.
            if adapter_name not in getattr(self, self.parts[0]):
                continue
            added = x
            for part in self.parts:
                added = getattr(self, part)[adapter_name](added)
            x = x + added
        return x


class AddingModel(BaseTuner, Generic[ConfigT]):
    """Base class of tuners that put an :class:`AddedLayer` after each targeted module.

    A subclass sets PEFT's ``prefix`` and ``tuner_layer_cls``, and the texts below, which complete its errors.
    """

    method: ClassVar[str]
    """Name of the method."""
    families: ClassVar[str]
    """Networks in which :meth:`targets` finds modules."""
    follows: ClassVar[str]
    """Modules after which an adapter can be added."""

    @abstractmethod
    def targets(self, config: ConfigT) -> list[str]:
        """Return the modules to adapt if the configuration names none."""

    @abstractmethod
    def fits(self, target: nn.Module) -> bool:
        """Return whether an adapter can be added after ``target``."""

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the targets if the configuration names none.

        PEFT looks them up by ``model_config["model_type"]``, which networks of timm do not have.
        """
        config = cast(Any, peft_config)
        if config.target_modules is None:
            config.target_modules = self.targets(config)
            if not config.target_modules:
                raise ValueError(
                    f"the {self.method} adapter fits {self.families}, not {type(self.model).__name__}; choose a "
                    "different adapter, such as 'lora', or name the modules in target_modules"
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
        parameter_name: str | None = None,
    ) -> None:
        """Wrap a targeted module, or add another adapter to an already wrapped one."""
        if isinstance(target, AddedLayer):
            target.update_layer(adapter_name, peft_config)
            return
        if not self.fits(target):
            raise ValueError(
                f"the {self.method} adapter cannot follow {current_key!r}, a {type(target).__name__}; let "
                f"target_modules name only {self.follows}"
            )
        layer_cls = cast(type[AddedLayer[Any]], self.tuner_layer_cls)
        new_module = layer_cls(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            # An additional adapter is not trainable until it is activated.
            new_module.requires_grad_(False)
        self._replace_module(parent, target_name, new_module, target)
