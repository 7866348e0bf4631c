# SPDX-License-Identifier: Apache-2.0
"""Training a selection of a network's own parameters, in place, as a PEFT tuner that adds no layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from .added import AdapterConfig, check_last_blocks, reached


@dataclass
class SelectiveConfig(AdapterConfig):
    """Train, save and load a selection of the network's own parameters, in place and under their own names.

    The buffers of a module that owns a selected parameter (the running statistics of a BatchNorm) are saved with it.

    Args:
        select: Any of ``"all"`` (every parameter), ``"bias"`` (every bias) and ``"norm"`` (every parameter of every
            normalisation layer).
        modules: Full names of modules whose parameters are all selected, such as the classification head.
        last_blocks: Select by ``select`` only in the last so many blocks of the network and in what follows them; by
            default everywhere.
    """

    select: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    last_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError for an unknown word, or if nothing is selected."""
        super().__post_init__()
        self.peft_type = "PERADA_SELECTIVE"
        unknown = sorted(set(self.select) - {"all", "bias", "norm"})
        if unknown:
            raise ValueError(f"select={unknown!r} is unknown: choose from 'all', 'bias' and 'norm'")
        if not self.select and not self.modules:
            raise ValueError("select and modules are both empty, so nothing would be trained: fill in one of them")
        check_last_blocks(self.last_blocks)


PEFT_PREFIX = "base_model.model."


def _owned(model: nn.Module, config: SelectiveConfig) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield (path, module, names of its own selected parameters) for each module that owns one."""
    within = reached(model, config.last_blocks)
    for path, module in model.named_modules():
        named = any(f"{path}.".startswith(f"{name}.") for name in config.modules)
        select = config.select if path in within else []
        norm = "norm" in select and "Norm" in type(module).__name__
        own = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if named
            or norm
            or "all" in select
            or ("bias" in select and parameter.ndim == 1 and f"_{name}".endswith("_bias"))
        ]
        if own:
            yield path, module, own


def selected_names(model: nn.Module, config: SelectiveConfig) -> list[str]:
    """Return the names, in ``model.state_dict()``, of all tensors that belong to the selection."""
    names = []
    for path, module, own in _owned(model, config):
        kept = set(module.state_dict().keys())
        own = own + [name for name, _ in module.named_buffers(recurse=False) if name in kept]
        names += [f"{path}.{name}" if path else name for name in own]
    return names


class SelectiveModel(BaseTuner):
    """Make the selected parameters of the network trainable, and save and load exactly those.

    The network holds one such adapter at a time, since its own tensors are the adapter.
    """

    prefix = "perada_selective_"
    tuner_layer_cls = BaseTunerLayer

    def inject_adapter(self, model: nn.Module, adapter_name: str, *_: object, **__: object) -> None:
        """Freeze ``model`` but for the selected parameters.

        Raises:
            ValueError: If the model holds an adapter already, or lacks a module that the selection names.
        """
        if len(self.peft_config) > 1:
            self._refuse("hold a second adapter")
        config = cast(SelectiveConfig, self.peft_config[adapter_name])
        for name in config.modules:
            if name not in dict(model.named_modules()):
                raise ValueError(f"modules={name!r} is not in {type(model).__name__}: give the full name of a module")
        model.requires_grad_(False)
        self.set_adapter(adapter_name, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make the selection trainable, or with ``inference_mode`` freeze it."""
        self.active_adapter = adapter_name
        self.set_requires_grad(adapter_name, not inference_mode)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Let the selected parameters require gradients, or not."""
        name = adapter_names if isinstance(adapter_names, str) else adapter_names[0]
        for _, module, own in _owned(self.model, cast(SelectiveConfig, self.peft_config[name])):
            for parameter in own:
                module.get_parameter(parameter).requires_grad_(requires_grad)

    def disable_adapter_layers(self) -> None:
        """Raise a ValueError: the network's former values are not kept."""
        self._refuse("be disabled")

    def delete_adapter(self, adapter_name: str) -> None:
        """Raise a ValueError: the network's former values are not kept."""
        self._refuse("be deleted")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"PERADA_SELECTIVE trains the network's own parameters in place and cannot {what}: build the backbone anew"
        )

    def _create_and_replace(self, *_: object, **__: object) -> None:
        """Do nothing: no module is replaced."""

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
        """Pick the selected tensors out of the whole state."""
        return {key: state_dict[key] for key in _full_keys(model, cast(SelectiveConfig, config))}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Return ``key``, which never holds the adapter's name."""
        return key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return ``state_dict`` under the model's names; raise a ValueError if it lacks a selected tensor."""
        keys = _full_keys(model, cast(SelectiveConfig, config))
        found = {key.removeprefix(PEFT_PREFIX): value for key, value in state_dict.items()}
        missing = [key for key in keys if key.removeprefix(PEFT_PREFIX) not in found]
        if missing:
            raise ValueError(
                f"the saved adapter lacks {len(missing)} of {len(keys)} tensors, {missing[0]!r} first: "
                "load it into the backbone it was made with"
            )
        return {key: found[key.removeprefix(PEFT_PREFIX)] for key in keys}


def _full_keys(model: nn.Module, config: SelectiveConfig) -> list[str]:
    """Return the selected names as ``model.state_dict()`` has them, be ``model`` a PeftModel or a plain network."""
    if isinstance(model, PeftModel):
        return [PEFT_PREFIX + name for name in selected_names(model.get_base_model(), config)]
    return selected_names(model, config)
