# SPDX-License-Identifier: Apache-2.0
"""Insert adapters into backbones: choose layers, let PEFT wrap them, and classify the names of trained tensors."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import peft
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn

from perada.adapters import (
    AdapterTraits,
    AddingModel,
    BottleneckConfig,
    DualLoraConfig,
    PromptConfig,
    ResidualConfig,
    SelectiveConfig,
)
from perada.adapters.added import check_last_blocks, is_norm, modules_from_last_blocks, owner_name, plain_name
from perada.adapters.residual import block_convolutions
from perada.algorithms.base import TensorNames
from perada.core.checks import OptionError, invalid_option
from perada.core.rounds import ImageConfig
from perada.core.states import Merged, parameter_keys, trained_keys
from perada.core.text import quoted, value_text
from perada.models.factors import branch_prefixes, check_lora, lora_factors
from perada.models.merging import TrainBackbone, make_mergeable

IA3_SCALED = re.compile(r".*(attn\.qkv|attention\.[kv]_proj|attention\.(key|value))")
IA3_FEEDFORWARD = re.compile(r".*mlp\.fc2")
CONVOLUTIONS = AdapterTraits(adapts_convolutions=True)
CONTIGUOUS_CONVOLUTIONS = AdapterTraits(adapts_convolutions=True, channels_last=False)  # of PEFT 0.21
PEFT_TRAITS = {
    "LORA": CONVOLUTIONS,
    "LOHA": CONVOLUTIONS,
    "LOKR": CONVOLUTIONS,
    "IA3": AdapterTraits(adapts_convolutions=True, attention=IA3_SCALED, feedforward=IA3_FEEDFORWARD),
    "OFT": CONTIGUOUS_CONVOLUTIONS,
    "BOFT": CONTIGUOUS_CONVOLUTIONS,
    "HRA": CONTIGUOUS_CONVOLUTIONS,
    "LN_TUNING": AdapterTraits(adapts_norms=True),
    "ADALORA": AdapterTraits(
        unsupported=(
            "it reallocates ranks between layers by one optimiser's step count, which clients do not share; choose "
            "adapter='lora'"
        )
    ),
}
"""Traits of PEFT's own methods, by their ``peft_type``. Those of all others are the defaults."""


def traits_of(config: PeftConfig) -> AdapterTraits:
    """Return the traits of a configuration's method: those that its class states, or those that are known of PEFT's.

    A method of your own whose tuner is an :class:`.AddingModel` finds its layers itself.
    """
    stated = getattr(type(config), "traits", None)
    if isinstance(stated, AdapterTraits):
        return stated
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(cast(peft.PeftType, config.peft_type), object)
    if issubclass(tuner, AddingModel):
        return AdapterTraits(finds_targets=True)
    return PEFT_TRAITS.get(_method_of(config), AdapterTraits())


def fill_targets(backbone: "Backbone", config: PeftConfig, last_blocks: int | None) -> None:
    """Choose the layers to adapt, and write them into ``config.target_modules``.

    In a network of a known family these are the layers of its attention, or the main convolutions of its blocks; for
    IA3 those of its paper. In any other network they are all linear layers except the head, or all convolutions without
    groups except the first one, whichever have more parameters. LN tuning adapts all norms. Layers whose weights a
    network reads without calling them, such as ``qkv`` of BEiT, are left out, and so are layers that PEFT would take
    for the head by the end of their names, such as ``aux_head`` beside ``head``.

    Args:
        backbone: The backbone, without adapter.
        config: Configuration of a method of PEFT, or of ``dual_lora``, which is changed in place. For IA3, its
            ``feedforward_modules`` are set too.
        last_blocks: Number of blocks to adapt, counted from the end; None for all.

    Raises:
        ValueError: If the backbone has no layer that the method can adapt.
    """
    check_last_blocks(last_blocks)
    layers = _without_ends(_adaptable_modules(backbone, last_blocks), backbone.head_modules)
    linears = [path for path, layer in layers.items() if isinstance(layer, nn.Linear)]
    # PeftConfig itself declares neither field.
    untyped_config = cast(Any, config)
    traits = traits_of(config)
    if traits.adapts_norms:
        targets = [path for path, layer in layers.items() if is_norm(layer)]
    else:
        targets = [path for path in linears if traits.attention.fullmatch(path)]
        if traits.feedforward is not None:
            feedforward = [path for path in linears if traits.feedforward.fullmatch(path)]
            targets += feedforward
            if untyped_config.feedforward_modules is None:
                untyped_config.feedforward_modules = feedforward
        if not targets:
            targets = _default_layers(backbone.model, layers, linears, traits)
    if not targets:
        raise ValueError(_nothing_to_adapt(backbone, config))
    untyped_config.target_modules = _as_target_modules(backbone.model, targets)


def _adaptable_modules(backbone: "Backbone", last_blocks: int | None) -> dict[str, nn.Module]:
    """Return the modules that an adapter could wrap, by name.

    Args:
        backbone: The backbone, without adapter.
        last_blocks: Number of blocks to adapt, counted from the end; None for all.
    """
    model = backbone.model
    allowed = modules_from_last_blocks(model, last_blocks) - _uncalled_layers(backbone)
    modules = {}
    for path, module in model.named_modules():
        is_in_head = any(f"{path}.".startswith(f"{name}.") for name in backbone.head_modules)
        if path in allowed and not is_in_head and not _is_in_torch_attention(model, path):
            modules[path] = module
    return modules


def _without_ends(layers: dict[str, nn.Module], head_modules: list[str]) -> dict[str, nn.Module]:
    """Leave out layers in modules that PEFT would take for the head, unless no layer remains.

    PEFT cannot load an adapter of such a layer: it finds the head by the end of its name.
    """
    remaining = {}
    for path, layer in layers.items():
        parts = path.split(".")
        paths_to_layer = [".".join(parts[: end + 1]) for end in range(len(parts))]
        if not any(outer.endswith(name) for outer in paths_to_layer for name in head_modules):
            remaining[path] = layer
    return remaining or layers


def _default_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    linears: list[str],
    traits: AdapterTraits,
) -> list[str]:
    """Return the names of the layers to adapt in a network that is not a transformer of a known family.

    Args:
        model: The network.
        layers: Its modules that an adapter could wrap, by name.
        linears: Names of the linear layers among them, without the head.
        traits: Traits of the method.
    """
    if not traits.adapts_convolutions:
        return linears
    convolutions = []
    for path in block_convolutions(model):
        layer = layers.get(path)
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            convolutions.append(path)
    return convolutions or _larger_kind(layers, linears)


def _larger_kind(layers: Mapping[str, nn.Module], linears: list[str]) -> list[str]:
    """Return the linear layers or the ungrouped convolutions except the first, whichever have more parameters."""
    convolutions = [path for path, layer in layers.items() if isinstance(layer, nn.Conv2d)]
    ungrouped = [path for path in convolutions[1:] if layers[path].groups == 1]

    def count_parameters(paths: list[str]) -> int:
        return sum(parameter.numel() for path in paths for parameter in layers[path].parameters())

    if not linears and not ungrouped:
        # The first convolution is the only layer.
        return convolutions[:1]
    if count_parameters(linears) >= count_parameters(ungrouped):
        return linears
    return ungrouped


def _nothing_to_adapt(backbone: "Backbone", config: PeftConfig) -> str:
    """Return the text of the error for a backbone without layers that a method can adapt."""
    alternative = "lora"
    traits = traits_of(config)
    if traits.adapts_norms:
        kinds = "normalisation layers"
    elif traits.adapts_convolutions:
        kinds = "linear layers and convolutions"
        alternative = "bias_norm"
    else:
        kinds = "linear layers"
    return (
        f"{type(config).__name__} adapts {kinds}, but backbone {backbone.name!r} has none except the head; choose a "
        f"different adapter, such as {alternative!r} or 'full'"
    )


def check_attention(model: nn.Module, name: str) -> None:
    """Raise a ValueError for adapters in or around torch's attention, which reads weights without calling layers."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        is_adapted = path.endswith(".base_layer")
        has_adapted_layer = any("base_layer" in inner.split(".") for inner, _ in module.named_modules())
        if is_adapted or has_adapted_layer:
            raise ValueError(
                f"an adapter cannot be inserted into {path.removesuffix('.base_layer')!r} of backbone {name!r}, an "
                "nn.MultiheadAttention, which reads its layers' weights instead of calling them; name other layers in "
                "target_modules, or choose 'bias_norm' or 'full'"
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


def _is_in_torch_attention(model: nn.Module, path: str) -> bool:
    """Return whether a layer is inside ``nn.MultiheadAttention``, which reads weights without calling its layers."""
    parts = path.split(".")
    for end in range(len(parts)):
        ancestor = model.get_submodule(".".join(parts[:end]))
        if isinstance(ancestor, nn.MultiheadAttention):
            return True
    return False


def _uncalled_layers(backbone: "Backbone") -> set[str]:
    """Return the names of the layers that a pass in evaluation mode does not call.

    The result is empty if no image fits the network. For a network that the caller built, images of several sizes are
    tried.
    """
    layers = {}
    for path, module in backbone.model.named_modules():
        is_layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        if is_layer and "forward" not in vars(module):
            layers[path] = module
    model = backbone.model.eval()
    for shape in _probable_image_shapes(backbone):
        try:
            image = _blank_image(model, shape)
            with torch.no_grad(), recorded_calls(layers) as called:
                model(image)
        except Exception:  # layers raise errors of any kind
            # For example because the image is too small, which is reported later, for the real images.
            continue
        return layers.keys() - called
    return set()


def _probable_image_shapes(backbone: "Backbone") -> list[tuple[int, int, int]]:
    """Return shapes (channels, height, width) of images that may fit a network, the most probable first."""
    if backbone.image is not None:
        return [backbone.image.input_size]
    model = backbone.model
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions:
        return []
    channels = convolutions[0].in_channels
    # timm keeps the size that a network was built for and that of its weights here, and transformers the size.
    sizes: list[object] = [getattr(getattr(model, "patch_embed", None), "img_size", None)]
    timm_config = getattr(model, "pretrained_cfg", None)
    if isinstance(timm_config, Mapping):
        sizes.append(tuple(timm_config.get("input_size") or ())[1:])
    sizes.append(getattr(getattr(model, "config", None), "image_size", None))
    shapes = []
    for size in [*sizes, 224, 64, 32, 28]:
        if isinstance(size, int):
            shapes.append((channels, size, size))
        elif isinstance(size, tuple | list) and len(size) == 2:
            shapes.append((channels, int(size[0]), int(size[1])))
    return list(dict.fromkeys(shapes))


def _blank_image(model: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    """Return a batch of one image of zeros, on the device of a network and in the dtype of its weights."""
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return torch.zeros(1, *shape, device=weight.device, dtype=weight.dtype)


@contextmanager
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yield a set to which the names of modules are added as they are called within the ``with`` statement.

    Meanwhile, their ``forward`` is replaced. Hooks cannot be used, since some networks (such as torch's encoder layers)
    take another path if there are hooks.
    """
    called: set[str] = set()

    def recording(name: str, forward: Callable[..., object]) -> Callable[..., object]:
        def record_and_run(*args: object, **kwargs: object) -> object:
            called.add(name)
            return forward(*args, **kwargs)

        return record_and_run

    original_attributes = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        # An attribute of the instance hides the method of its class, and can be deleted again.
        vars(module)["forward"] = recording(name, module.forward)
    try:
        yield called
    finally:
        for name, module in modules.items():
            del vars(module)["forward"]
            if original_attributes[name] is not None:
                vars(module)["forward"] = original_attributes[name]


def _as_target_modules(model: nn.Module, targets: list[str]) -> list[str] | str:
    """Return a value of ``target_modules`` that matches exactly the given modules.

    PEFT compares the ends of names, so names are replaced by a regular expression if they would match other modules.
    """
    endings = tuple(f".{path}" for path in targets)
    for path, _ in model.named_modules():
        if path.endswith(endings) and path not in targets:
            return "|".join(map(re.escape, targets))
    return targets


def _method_of(config: PeftConfig) -> str:
    """Return the name of a configuration's method."""
    # A member of an enum for PEFT's methods, and a string for perada's.
    return str(getattr(config.peft_type, "value", config.peft_type))


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


@dataclass
class Backbone:
    """A frozen image classifier.

    Attributes:
        model: The network, which maps images (B, channels, height, width) to logits (B, K).
        name: Its timm name, ``hf:`` and its transformers name, or its class name.
        head: Full name of the classification head in the model.
        image: Format of its images; None for a network that the caller built.
        decoder: Full name of a decoder without pretrained weights, which is trained as a part of the head.
    """

    model: nn.Module
    name: str
    head: str
    image: ImageConfig | None
    decoder: str | None = None

    @property
    def head_modules(self) -> list[str]:
        """Full names of the modules that are trained in full: the head, and the decoder if there is one."""
        if self.decoder is None:
            return [self.head]
        return [self.head, self.decoder]


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
    config = _configure_adapter(backbone, adapter, options)
    method = adapter if isinstance(adapter, str) else type(adapter).__name__
    peft_model = _wrap_or_explain(backbone, config, method)
    check_attention(backbone.model, backbone.name)
    call_encoder_layers(backbone.model)
    copy_convolution_attributes(backbone.model)
    adapted = AdaptedModel(backbone, peft_model, config)
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


def _train_backbone(adapted: AdaptedModel, options: Mapping[str, object], method: str) -> None:
    """Make the backbone's parameters trainable; only those of the last blocks if the adapter is restricted to them."""
    if traits_of(adapted.config).lists_head:
        raise OptionError(
            f"adapter {method!r} does not support train_backbone=True: it selects which weights of the backbone are "
            "trained; choose adapter='full' to train all of the backbone",
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


def _configure_adapter(backbone: Backbone, adapter: AdapterChoice, options: dict[str, object]) -> PeftConfig:
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
    if getattr(config, "target_modules", "no such field") is None and not traits.finds_targets:
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


def _has_type(value: object, hint: Any) -> bool:  # noqa: ANN401  # an annotation
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


def _wrap_or_explain(backbone: Backbone, config: PeftConfig, method: str) -> PeftModel:
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
            f"adapter {method!r} finds nothing to adapt in backbone {backbone.name!r}: "
            f"target_modules={vars(config)['target_modules']!r} matches none of its modules; use names as in "
            "model.named_modules()",
            name="adapter",
            value=method,
        ) from error
    except Exception as error:  # PEFT's methods raise errors of any kind
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise OptionError(
            f"adapter {method!r} does not fit backbone {backbone.name!r}: {reason}", name="adapter", value=method
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
