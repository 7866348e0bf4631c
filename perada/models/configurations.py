# SPDX-License-Identifier: Apache-2.0
"""Configurations of adapters, from names and options or as users pass them."""

import copy
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from peft import IA3Config, LoraConfig, PeftConfig

from perada.adapters import (
    BottleneckConfig,
    DualLoraConfig,
    PromptConfig,
    ResidualConfig,
    SelectiveConfig,
)
from perada.core.checks import OptionError, invalid_option
from perada.core.text import quoted, value_text
from perada.models.backbone import Backbone
from perada.models.factors import check_lora
from perada.models.targets import fill_targets, traits_of

AdapterChoice = str | PeftConfig
"""An adapter as users specify it: one of ``ADAPTERS``, or a PEFT configuration."""
METHODS: dict[str, type[PeftConfig]] = {
    "residual": ResidualConfig,
    "bottleneck": BottleneckConfig,
    "prompt": PromptConfig,
    "lora": LoraConfig,
    "dual_lora": DualLoraConfig,
    "ia3": IA3Config,
}
SELECTIONS: dict[str, list[str]] = {"head": [], "bias_norm": ["bias", "norm"], "full": ["all"]}
"""Adapters that train parameters of the backbone itself, with the ``select`` of their SelectiveConfig."""
ADAPTERS = [*METHODS, *SELECTIONS]
PEFT_FIELDS = {field.name for field in fields(PeftConfig)}
"""Fields of every configuration that perada sets itself."""


def configure_adapter(backbone: Backbone, adapter: AdapterChoice, options: dict[str, object]) -> PeftConfig:
    """Return the adapter's configuration with its target modules and the head set; see :func:`insert_adapter`."""
    if isinstance(adapter, PeftConfig):
        if options:
            raise ValueError(
                f"adapter_options {quoted(sorted(options))} must be left out with a PeftConfig; set them in the "
                "configuration itself"
            )
        config = copy.deepcopy(adapter)
        # A configuration that was loaded names the model it was saved with, and is for inference.
        config.base_model_name_or_path = None
        config.inference_mode = False
    elif not isinstance(adapter, str):
        raise TypeError(f"adapter must be one of {', '.join(ADAPTERS)} or a PeftConfig, got {value_text(adapter)}")
    elif adapter not in ADAPTERS:
        raise OptionError(
            f"adapter {adapter!r} is unknown; choose one of {', '.join(ADAPTERS)} or pass a PeftConfig",
            name="adapter",
            value=adapter,
        )
    else:
        config = _config_by_name(adapter, options, backbone.head_modules)
    _check_supported(config)

    traits = traits_of(config)
    # PeftConfig itself declares none of these fields.
    untyped_config = cast(Any, config)
    names_parameters = bool(getattr(config, "target_parameters", None))
    chooses_layers = getattr(config, "target_modules", "no such field") is None and not names_parameters
    if chooses_layers and not traits.finds_targets:
        fill_targets(backbone, config, cast(int | None, options.get("last_blocks")))
    if traits.feedforward is not None and untyped_config.feedforward_modules is None:
        untyped_config.feedforward_modules = []
    if not traits.lists_head:
        modules_to_save = [*backbone.head_modules, *(untyped_config.modules_to_save or [])]
        untyped_config.modules_to_save = list(dict.fromkeys(modules_to_save))
    return config


def _check_supported(config: PeftConfig) -> None:
    """Raise a ValueError if clients cannot be trained with a PEFT method or with its options."""
    traits = traits_of(config)
    trains_head = traits.lists_head or hasattr(config, "modules_to_save")
    if config.is_prompt_learning or not trains_head:
        raise ValueError(
            f"{type(config).__name__} cannot train a classification head in addition to the adapter; choose one of "
            f"{ADAPTERS}"
        )
    if traits.unsupported:
        raise ValueError(f"{type(config).__name__} is not supported: {traits.unsupported}")
    check_lora(config)


def _config_by_name(adapter: str, options: dict[str, object], head_modules: list[str]) -> PeftConfig:
    """Return the configuration of a named method, after checking its options."""
    hints: dict[str, Any] = {}
    if adapter in METHODS:
        type_of_name = get_type_hints(METHODS[adapter])
        hints = {field.name: type_of_name[field.name] for field in fields(METHODS[adapter])}
    known_options = hints.keys() - PEFT_FIELDS
    if adapter != "head":
        known_options = known_options | {"last_blocks"}
    for name, value in sorted(options.items()):
        if name not in known_options:
            choice = ", ".join(sorted(known_options)) or "none"
            raise OptionError(
                f"adapter {adapter!r} has no option {name!r} (its options: {choice}); remove it from adapter_options "
                "(a different recipe may have set it), or choose an adapter that has it",
                name="adapter",
                value=adapter,
            )
        # last_blocks is checked elsewhere, since it is also an option of methods without such a field.
        if name in hints and name != "last_blocks" and not _has_type(value, hints[name]):
            type_name = str(hints[name]).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            raise invalid_option(f"adapter_options: {name}", value, f"of type {type_name} for adapter {adapter!r}")
    last_blocks = cast(int | None, options.get("last_blocks"))
    if last_blocks is not None and options.get("target_modules") is not None:
        raise ValueError("last_blocks and target_modules both specify which layers to adapt; set only one of them")
    if adapter in SELECTIONS:
        return SelectiveConfig(select=list(SELECTIONS[adapter]), modules=head_modules, last_blocks=last_blocks)
    config_fields: dict[str, Any] = {}
    for name, value in options.items():
        if name == "last_blocks" and name in hints:
            config_fields[name] = value
        elif name in hints:
            config_fields[name] = _as_integer(value, hints[name])
    return METHODS[adapter](**config_fields)


def _as_integer(value: object, hint: object) -> object:
    """Return a float as an ``int`` if the option takes integers but not floats, since YAML files may have 8.0."""
    kinds = get_args(hint) or (hint,)
    if isinstance(value, float) and int in kinds and float not in kinds:
        return int(value)
    return value


def _has_type(value: object, hint: object) -> bool:
    """Return whether a value has the type of an option.

    For a list, any sequence or set is accepted with any items. For an integer, a float without a fraction is accepted.

    Args:
        value: The value.
        hint: Annotation of the option.
    """
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(_has_type(value, member) for member in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(choice) for choice in get_args(hint))
    if hint is None:
        return value is None
    if hint is int and isinstance(value, float):
        return value.is_integer()
    if hint is int or hint is float:
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin in (list, set, tuple):
        return isinstance(value, list | set | tuple)
    if not isinstance(origin, type):
        # An annotation that was not resolved accepts anything.
        return True
    return isinstance(value, origin)
