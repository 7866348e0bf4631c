# SPDX-License-Identifier: Apache-2.0
"""A PEFT tuner that adds no layer: it trains a selection of a network's own parameters in place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, cast

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from .added import AdapterConfig, check_last_blocks, modules_from_last_blocks, owner_name
from .traits import AdapterTraits


@dataclass
class SelectiveConfig(AdapterConfig):
    """Configuration that trains, saves and loads a selection of the network's own parameters under their own names.

    The buffers of a module that owns a selected parameter (the running statistics of a BatchNorm) are saved with it.

    Args:
        select: Any of ``"all"`` (every parameter), ``"bias"`` (every bias) and ``"norm"`` (every parameter of every
            normalisation layer).
        modules: Full names of modules whose parameters are all selected, such as the classification head.
        last_blocks: Number of blocks, counted from the end of the network, in which ``select`` applies, together with
            the layers after them; by default everywhere.
    """

    traits: ClassVar[AdapterTraits] = AdapterTraits(lists_head=True)

    select: list[str] = field(
        default_factory=list, metadata={"help": "Kinds of parameters to train: any of 'all', 'bias' and 'norm'."}
    )
    modules: list[str] = field(
        default_factory=list, metadata={"help": "Full names of modules to train in full, such as the head."}
    )
    last_blocks: int | None = field(
        default=None, metadata={"help": "Number of blocks in which to select, counted from the end of the network."}
    )

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError for an unknown word, or if nothing is selected."""
        super().__post_init__()
        self.peft_type = "PERADA_SELECTIVE"
        unknown = sorted(set(self.select) - {"all", "bias", "norm"})
        if unknown:
            raise ValueError(f"select must have no other items than 'all', 'bias' and 'norm', got {unknown!r}")
        if not self.select and not self.modules:
            raise ValueError("select and modules are both empty, so nothing would be trained; set one of them")
        check_last_blocks(self.last_blocks)


PEFT_PREFIX = "base_model.model."
"""Beginning of the names of the network's tensors in a PeftModel."""


@dataclass(frozen=True)
class SelectedParameters:
    """The selected parameters of one module.

    Attributes:
        path: Full name of the module, empty for the network itself.
        module: The module.
        parameter_names: Names of the parameters in the module, without those of its children.
    """

    path: str
    module: nn.Module
    parameter_names: tuple[str, ...]


def _select_parameters(model: nn.Module, config: SelectiveConfig) -> Iterator[SelectedParameters]:
    """Yield the selected parameters of each module that has any."""
    allowed = modules_from_last_blocks(model, config.last_blocks)
    for path, module in model.named_modules():
        in_named_module = any(f"{path}.".startswith(f"{name}.") for name in config.modules)
        # An earlier run's adapters are selected with the modules that they adapt, whose names they have changed.
        select = config.select if owner_name(path) in allowed else []
        is_selected_norm = "norm" in select and "Norm" in type(module).__name__
        all_selected = in_named_module or is_selected_norm or "all" in select
        names = []
        for name, parameter in module.named_parameters(recurse=False):
            # Such as "bias" and "in_proj_bias", but not a table of "relative_position_bias" with two axes.
            is_bias = parameter.ndim == 1 and f"_{name}".endswith("_bias")
            if all_selected or ("bias" in select and is_bias):
                names.append(name)
        if names:
            yield SelectedParameters(path, module, tuple(names))


def selected_names(model: nn.Module, config: SelectiveConfig) -> list[str]:
    """Return the names, in ``model.state_dict()``, of all tensors that belong to the selection.

    These are the selected parameters and the persistent buffers of the same modules.
    """
    names = []
    for selected in _select_parameters(model, config):
        persistent = set(selected.module.state_dict().keys())
        buffers = [name for name, _ in selected.module.named_buffers(recurse=False) if name in persistent]
        prefix = f"{selected.path}." if selected.path else ""
        names += [prefix + name for name in (*selected.parameter_names, *buffers)]
    return names


class SelectiveModel(BaseTuner):
    """Make the selected parameters of the network trainable, and save and load exactly those.

    The network's own tensors are the adapter, so there can be only one, which can neither be disabled nor deleted.
    """

    # No name has the prefix, and no layer is wrapped; PEFT requires both attributes.
    prefix = "perada_selective_"
    tuner_layer_cls = BaseTunerLayer

    def inject_adapter(self, model: nn.Module, adapter_name: str, *_: object, **__: object) -> None:
        """Freeze ``model`` except for the selected parameters.

        Raises:
            ValueError: If the model holds an adapter already, or lacks a module that the configuration names.
        """
        # PEFT adds the configuration to peft_config before this call.
        if len(self.peft_config) > 1:
            self._reject_action("hold a second adapter")
        config = cast(SelectiveConfig, self.peft_config[adapter_name])
        module_names = {name for name, _ in model.named_modules()}
        for name in config.modules:
            if name not in module_names:
                raise ValueError(f"modules={name!r} is not in {type(model).__name__}; use the full name of a module")
        model.requires_grad_(False)
        self.set_adapter(adapter_name, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make the selection trainable, or with ``inference_mode`` freeze it."""
        self.active_adapter = adapter_name
        self.set_requires_grad(adapter_name, not inference_mode)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Set whether the selected parameters require gradients."""
        adapter_name = adapter_names if isinstance(adapter_names, str) else adapter_names[0]
        config = cast(SelectiveConfig, self.peft_config[adapter_name])
        for selected in _select_parameters(self.model, config):
            for name in selected.parameter_names:
                selected.module.get_parameter(name).requires_grad_(requires_grad)

    def disable_adapter_layers(self) -> None:
        """Raise a ValueError: the network's former values are not kept."""
        self._reject_action("be disabled")

    def delete_adapter(self, adapter_name: str) -> None:
        """Raise a ValueError: the network's former values are not kept."""
        self._reject_action("be deleted")

    def _reject_action(self, action: str) -> NoReturn:
        """Raise a ValueError for an action that a network trained in place does not support."""
        raise ValueError(
            f"PERADA_SELECTIVE trains the network's own parameters in place and cannot {action}; build a new backbone"
        )

    def _create_and_replace(self, *_: object, **__: object) -> None:
        """Do nothing. PEFT requires the method, but no module is replaced."""

    # PEFT picks the tensors to save by the tuner's layers, strips the adapter's name from their keys, and maps saved
    # keys back in the same way. None of this works without layers, so that the three hooks for it are replaced. They
    # are internal to PEFT, see the bound on peft in pyproject.toml.

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        *_: object,
        **__: object,
    ) -> dict[str, Tensor]:
        """Return the selected tensors of the full state."""
        keys = _model_keys(model, cast(SelectiveConfig, config))
        return {key: state_dict[key] for key in keys}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Return ``key``, which never has the adapter's name."""
        return key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return ``state_dict`` under the model's names.

        Raises:
            ValueError: If it lacks a selected tensor.
        """
        keys = _model_keys(model, cast(SelectiveConfig, config))
        # The file may have been saved from a PeftModel and be loaded into a plain network, or the other way round.
        tensors = {key.removeprefix(PEFT_PREFIX): value for key, value in state_dict.items()}
        missing = [key for key in keys if key.removeprefix(PEFT_PREFIX) not in tensors]
        if missing:
            raise ValueError(
                f"the saved adapter lacks {len(missing)} of {len(keys)} tensors, {missing[0]!r} first; load it into "
                "the backbone it was made with"
            )
        return {key: tensors[key.removeprefix(PEFT_PREFIX)] for key in keys}


def _model_keys(model: nn.Module, config: SelectiveConfig) -> list[str]:
    """Return the selected names as in ``model.state_dict()``, for a PeftModel or a plain network."""
    if isinstance(model, PeftModel):
        return [PEFT_PREFIX + name for name in selected_names(model.get_base_model(), config)]
    return selected_names(model, config)
