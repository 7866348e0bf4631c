# SPDX-License-Identifier: Apache-2.0
"""Insert adapters into backbones: let PEFT wrap the layers, and classify the names of trained tensors."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import peft
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn

from perada.adapters.added import modules_from_last_blocks, owner_name, plain_name
from perada.algorithms.base import TensorNames
from perada.core.checks import OptionError
from perada.core.states import Merged, parameter_keys, trained_keys
from perada.models.backbone import Backbone
from perada.models.configurations import AdapterChoice, configure_adapter
from perada.models.factors import branch_prefixes, lora_factors
from perada.models.lora_attention import NOT_IN_ATTENTION, LoraAttention, LoraProjections, add_to_projections
from perada.models.merging import TrainBackbone, make_mergeable
from perada.models.targets import traits_of


def check_attention(model: nn.Module, config: PeftConfig, name: str) -> None:
    """Raise a ValueError for adapters in or around torch's attention that would have no effect there.

    The attention reads weights without calling the layers that have them.

    Args:
        model: The network with its adapter, after :func:`.add_to_projections`.
        config: Configuration of the adapter.
        name: Name of the network.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        attention = plain_name(path)
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, LoraAttention | LoraProjections):
            for option in NOT_IN_ATTENTION:
                if getattr(config, option, None):
                    raise OptionError(
                        f"{option}={getattr(config, option)!r} has no effect in {attention!r} of backbone {name!r}, an "
                        "nn.MultiheadAttention; leave the option out, or name other layers in target_modules",
                        name=option,
                        value=getattr(config, option),
                    )
            continue
        is_adapted = path.endswith(".base_layer")
        has_adapted_layer = any("base_layer" in inner.split(".") for inner, _ in module.named_modules())
        if is_adapted or has_adapted_layer:
            raise ValueError(
                f"an adapter cannot be inserted into {attention!r} of backbone {name!r} in this way: an "
                "nn.MultiheadAttention reads its layers' weights instead of calling them; choose LoRA and name the "
                "attention itself in target_modules (or its 'q_proj_weight' and so on in target_parameters, if "
                "keys have another size), name other layers, or choose 'bias_norm' or 'full'"
            )


def call_encoder_layers(model: nn.Module) -> None:
    """Make torch's encoder layers call their layers if these have trained parameters; changes the model in place.

    In evaluation mode and without gradients, ``nn.TransformerEncoderLayer`` takes a fast path: one fused kernel that
    reads the weights of its layers. From PEFT's wrappers it would read the frozen weight, so that a trained adapter
    would not be used. A layer that reports an unknown activation does not take this path (torch 2.3 to 2.14).
    """
    for module in model.modules():
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if is_trained and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if is_trained and isinstance(module, nn.TransformerEncoder):
            # Nested tensors are supported only by the fast path.
            module.use_nested_tensor = False


def copy_convolution_attributes(model: nn.Module) -> None:
    """Copy the attributes of adapted convolutions to their wrappers, which PEFT does not do.

    Some networks read them: MobileNet in transformers 5.23 computes TensorFlow's padding from a layer's stride.
    """
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer = module.get_base_layer()
        if not isinstance(layer, nn.modules.conv._ConvNd):
            continue
        for name in names:
            if not hasattr(module, name):
                setattr(module, name, getattr(layer, name))


@dataclass
class AdaptedModel:
    """A backbone with its adapter in place.

    Attributes:
        backbone: The backbone.
        peft_model: PEFT's wrapper, which is needed only to save and load. Its adapter is called "default".
        config: Configuration of the adapter.
        beside: Names of trained tensors that PEFT does not save: those of the backbone, if it is trained too.
    """

    backbone: Backbone
    peft_model: PeftModel
    config: PeftConfig
    beside: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The network without PEFT's wrapper. States have the tensor names of this network everywhere in perada."""
        return self.peft_model.get_base_model()

    @property
    def channels_last(self) -> bool:
        """Whether the adapter's convolutions support the channels-last memory format. Some of PEFT 0.21 do not."""
        uses_dora = getattr(self.config, "use_dora", False)
        return not uses_dora and traits_of(self.config).channels_last


def is_adapter_key(key: str) -> bool:
    """Return whether a name in an adapted model belongs to the adapter, not to the backbone or a copy of its modules.

    >>> [is_adapter_key(key) for key in ("conv.lora_A.default.weight", "fc.modules_to_save.default.bias")]
    [True, False]
    """
    parts = key.split(".")
    return "default" in parts and "modules_to_save" not in parts


def plain_names(adapted: AdaptedModel) -> dict[str, str]:
    """Return the names of the backbone's tensors in the model, by their names without adapter."""
    keys = [key for key in adapted.model.state_dict() if "default" not in key.split(".")]
    return {plain_name(key): key for key in keys}


def insert_adapter(
    backbone: Backbone,
    adapter: AdapterChoice = "residual",
    *,
    train_backbone: TrainBackbone = False,
    **options: object,
) -> AdaptedModel:
    """Insert an adapter into a backbone, in place, and make the adapter and the classification head trainable.

    New weights are drawn from torch's global generator.

    Args:
        backbone: A backbone without adapter.
        adapter: One of ``ADAPTERS``, or any PEFT configuration of a method that changes layers.
        train_backbone: Whether the backbone's parameters are trained in addition to the adapter. With ``"merged"``, the
            weights that LoRA adapts are part of states but not trained (:class:`~perada.core.states.Merged`).
        **options: Fields of the named method's configuration, such as ``r`` of ``"lora"``.

    Returns:
        The adapted model, in which exactly the trained parameters require gradients.

    Raises:
        ValueError: If the adapter or an option is unknown, if the adapter does not fit the backbone, or if it trains
            tensors that PEFT would not save. The backbone may then be partly adapted and must not be used.
        TypeError: If ``adapter`` is neither a name nor a PEFT configuration.
    """
    if hasattr(backbone.model, "peft_config"):
        raise OptionError(
            f"backbone {backbone.name!r} already holds an adapter; build a fresh one with build_backbone",
            name="backbone",
            value=backbone.name,
        )
    config = configure_adapter(backbone, adapter, options)
    method = adapter if isinstance(adapter, str) else type(adapter).__name__
    peft_model = _wrap_or_explain(backbone, config, method)
    add_to_projections(backbone.model)
    check_attention(backbone.model, config, backbone.name)
    call_encoder_layers(backbone.model)
    copy_convolution_attributes(backbone.model)
    adapted = AdaptedModel(backbone, peft_model, config)
    if not parameter_keys(backbone.model):
        # Only a head from class names may have no parameters.
        raise OptionError(
            f"adapter {method!r} trains nothing in backbone {backbone.name!r}, whose head from class names is fixed; "
            "set train_logit_scale or train_features in text_head, or choose an adapter such as 'lora'",
            name="adapter",
            value=method,
        )
    if train_backbone is True:
        _train_backbone(adapted, options, method)
        return replace(adapted, beside=_unsaved_keys(adapted))

    unsaved = _unsaved_keys(adapted)
    if unsaved:
        raise OptionError(
            f"adapter {method!r} would train {unsaved[0]!r} ({len(unsaved)} such tensors) in {backbone.name!r}, but "
            "PEFT would not save it; add its module to modules_to_save, or choose 'bias_norm' or 'full'",
            name="adapter",
            value=method,
        )
    if train_backbone == "merged":
        make_mergeable(adapted.model)
        return replace(adapted, beside=_unsaved_keys(adapted))
    return adapted


def _train_backbone(adapted: AdaptedModel, options: Mapping[str, object], adapter_name: str) -> None:
    """Make the backbone's parameters trainable; only those of the last blocks if the adapter is restricted to them."""
    if traits_of(adapted.config).lists_head:
        raise OptionError(
            f"adapter {adapter_name!r} does not support train_backbone=True: it selects which weights of the backbone "
            "are trained; choose adapter='full' to train all of the backbone",
            name="train_backbone",
            value=True,
        )
    # Configurations of PEFT's methods have no such field, so it is read from the options first.
    last_blocks = options.get("last_blocks", getattr(adapted.config, "last_blocks", None))
    trained_modules = modules_from_last_blocks(adapted.model, cast(int | None, last_blocks))
    for name, parameter in adapted.model.named_parameters():
        module_name = owner_name(name.rpartition(".")[0])
        # PEFT keeps the original of each of modules_to_save, which never runs.
        if "original_module" in name.split("."):
            parameter.requires_grad_(False)
        elif module_name in trained_modules:
            parameter.requires_grad_(True)
    # Encoder layers without an adapter now have trained parameters too.
    call_encoder_layers(adapted.model)


def _wrap_or_explain(backbone: Backbone, config: PeftConfig, adapter_name: str) -> PeftModel:
    """Let PEFT insert an adapter, and raise its errors as OptionErrors."""
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 reads an attribute that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # LN tuning warns about layers that it supports, and BOFT about an extension without which it is slower.
            warnings.filterwarnings("ignore", "Unsupported layer type .*Norm|Failed to load the CUDA ext", UserWarning)
            return _wrap_backbone(backbone, config)
    except NoMatchingPeftModuleError as error:
        raise OptionError(
            f"adapter {adapter_name!r} finds nothing to adapt in backbone {backbone.name!r}: "
            f"target_modules={vars(config)['target_modules']!r} matches none of its modules; use names as in "
            "model.named_modules()",
            name="adapter",
            value=adapter_name,
        ) from error
    except Exception as error:  # PEFT's methods raise errors of any kind
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        if "same embed for query/key/value" in reason:
            reason += " name its 'q_proj_weight', 'k_proj_weight' and 'v_proj_weight' in target_parameters"
        elif not isinstance(error, OptionError) and ";" not in reason:
            # PEFT gives reasons without remedies, unlike perada's own adapters, which separate them by a semicolon.
            reason = reason.removesuffix(".")
            reason += "; change its options, name other layers in target_modules, or choose a different adapter"
        raise OptionError(
            f"adapter {adapter_name!r} does not fit backbone {backbone.name!r}: {reason}",
            name="adapter",
            value=adapter_name,
        ) from error


def _wrap_backbone(backbone: Backbone, config: PeftConfig) -> PeftModel:
    """Let PEFT wrap the backbone's layers and its head.

    PEFT finds ``modules_to_save`` by the ends of their names. For a head called ``out``, it would also wrap every
    module called ``dropout``, including those of its own layers. Such a head is wrapped here instead.
    """
    head = backbone.head
    if traits_of(config).lists_head or not _is_end_of_other_names(backbone.model, head, config):
        return cast(PeftModel, peft.get_peft_model(backbone.model, config))
    untyped_config = cast(Any, config)
    modules_to_save: list[str] = untyped_config.modules_to_save
    without_head = [name for name in modules_to_save if name != head]
    untyped_config.modules_to_save = without_head or None
    peft_model = cast(PeftModel, peft.get_peft_model(backbone.model, config))
    # Saved configurations must list the head.
    untyped_config.modules_to_save = modules_to_save
    wrapper = backbone.model.get_submodule(head)
    # One of the other names may have matched the head too.
    if not isinstance(wrapper, ModulesToSaveWrapper):
        wrapper = ModulesToSaveWrapper(wrapper, "default")
    wrapper.set_adapter("default")
    backbone.model.set_submodule(head, wrapper)
    return peft_model


def _is_end_of_other_names(model: nn.Module, head: str, config: PeftConfig) -> bool:
    """Return whether PEFT would take other modules, of the model or of its own layers, for the head."""
    tuner: Any = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[cast(peft.PeftType, config.peft_type)]
    layer_classes = tuner.tuner_layer_cls
    if not isinstance(layer_classes, tuple):
        layer_classes = (layer_classes,)
    names: list[str] = []
    for layer_class in layer_classes:
        names += [*layer_class.adapter_layer_names, *layer_class.other_param_names]
    for name, _ in model.named_modules():
        if name != head and not name.startswith(f"{head}."):
            names.append(name)
    return any(name.endswith(head) or f".{head}." in f".{name}." for name in names)


def _taken_for_saved(adapted: AdaptedModel) -> dict[str, str]:
    """Return the modules that PEFT would wrap like those of ``modules_to_save``, because their names end alike.

    Returns:
        The name in ``modules_to_save`` by the full name of each such module.
    """
    names = getattr(adapted.config, "modules_to_save", None) or []
    taken = {}
    for path, _ in adapted.model.named_modules():
        is_saved = any(f"{path}.".startswith(f"{name}.") for name in names)
        for name in names:
            if path.endswith(name) and not is_saved:
                taken[path] = name
    return taken


def warn_of_ends(adapted: AdaptedModel) -> None:
    """Warn if PEFT cannot load an exported adapter, because a name of ``modules_to_save`` is the end of another.

    PEFT cannot wrap layers of its adapters, and would draw adapters inside of a wrapped module anew.
    """
    modules = dict(adapted.model.named_modules())
    for path, name in _taken_for_saved(adapted).items():
        module = modules[path]
        grandparent = modules.get(path.rpartition(".")[0].rpartition(".")[0])
        has_adapter = any(isinstance(inner, BaseTunerLayer) for inner in module.modules())
        if has_adapter or isinstance(module, nn.ModuleDict) or isinstance(grandparent, BaseTunerLayer):
            warnings.warn(
                f"PEFT cannot load the exported adapters without perada, since it takes {path!r} of backbone "
                f"{adapted.backbone.name!r} for {name!r}, the end of that name: load them with perada.Run.load or, "
                f"for the next run, rename the module {name!r} or name other layers in target_modules",
                stacklevel=4,
            )
            return


def tensors_taken_for_saved(adapted: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors of modules that PEFT takes for one of ``modules_to_save`` by the end of their names.

    PEFT expects them in an adapter's folder, by these names. They share memory with the model.
    """
    tensors = {}
    for path in _taken_for_saved(adapted):
        for key, value in adapted.model.get_submodule(path).state_dict().items():
            tensors[f"base_model.model.{path}.{key}"] = value
    return tensors


def saved_tensors(adapted: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors that PEFT saves, by PEFT's names; they share memory with the model."""
    with warnings.catch_warnings():
        # PEFT 0.21 warns about the shapes of the biases of lora_bias.
        warnings.filterwarnings("ignore", "Adapter .* have invalid shape", UserWarning)
        # Without save_embedding_layers=False, PEFT would request the backbone's configuration from the Hub.
        return cast(dict[str, Tensor], peft.get_peft_model_state_dict(adapted.peft_model, save_embedding_layers=False))


def _unsaved_keys(adapted: AdaptedModel) -> tuple[str, ...]:
    """Return the names of the tensors in states that PEFT would not save."""
    # PEFT renames tensors, so they are identified by their memory.
    saved_pointers = {tensor.data_ptr() for tensor in saved_tensors(adapted).values()}
    state = adapted.model.state_dict()
    return tuple(key for key in trained_keys(adapted.model) if state[key].data_ptr() not in saved_pointers)


def reset_parameters(model: nn.Module, prefix: str) -> None:
    """Reinitialise the trained layers of the backbone whose names begin with ``prefix``, in place.

    Values are drawn from torch's global generator. Layers of the adapter are left as they are.
    """
    for path, module in model.named_modules():
        path_with_dot = f"{path}."
        if not path_with_dot.startswith(prefix) or is_adapter_key(path_with_dot):
            continue
        is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        reset = getattr(module, "reset_parameters", None)
        if is_trained and callable(reset):
            reset()


def find_tensor_names(model: nn.Module, *head_modules: str) -> TensorNames:
    """Return the names of a model's trained tensors, by kind.

    Args:
        model: The network of an adapted model.
        *head_modules: Full names of its head, and of its decoder if it has one.
    """
    keys = trained_keys(model)
    parameters = parameter_keys(model)
    norms = []
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            norms.append(f"{path}.")
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
            layers.append(path)
    # The first layer, or the layer of PEFT that wraps it: the names of all its tensors begin with this one.
    input_layer = layers[0].removesuffix(".base_layer").removesuffix(".original_module")
    branches = branch_prefixes(model)

    def starting_with(*prefixes: str) -> frozenset[str]:
        return frozenset(key for key in keys if key.startswith(prefixes))

    return TensorNames(
        keys,
        parameters,
        head=starting_with(*(f"{module}." for module in head_modules)),
        norms=starting_with(*norms),
        input=starting_with(f"{input_layer}."),
        adapter=frozenset(key for key in keys if is_adapter_key(key)),
        factors=lora_factors(model),
        shared=starting_with(*branches.shared),
        private=starting_with(*branches.private),
        merged=frozenset(key for key, value in model.named_parameters() if isinstance(value, Merged)),
    )
