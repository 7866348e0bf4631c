# SPDX-License-Identifier: Apache-2.0
"""Adapters inserted into backbones: what is chosen, what is trained, and by which names."""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import peft
import torch
from peft import AdaLoraConfig, IA3Config, LNTuningConfig, LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn

from perada.adapters import AddingModel, BottleneckConfig, DualLoraConfig, PromptConfig, ResidualConfig, SelectiveConfig
from perada.adapters.added import check_last_blocks, is_norm, plain_name, reached
from perada.adapters.residual import block_convolutions
from perada.algorithms.base import TensorNames
from perada.core.checks import OptionError, invalid_option
from perada.core.rounds import ImageConfig
from perada.core.states import Merged, parameter_keys, trained_keys
from perada.models.factors import branches, check_lora, lora_factors
from perada.models.merging import Trained, let_merge

ATTENTION = re.compile(
    r".*(attn\.(qkv|proj)|attention\.[qkvo]_proj|attention\.(query|key|value)|attention\.output\.dense)"
)
IA3_SCALED = re.compile(r".*(attn\.qkv|attention\.[kv]_proj|attention\.(key|value))")
IA3_FEEDFORWARD = re.compile(r".*mlp\.fc2")
CONVOLUTIONS = {"LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "PERADA_DUAL_LORA"}
"""Methods of PEFT, and one of ours, that adapt convolutions too; the others know linear layers alone."""


def fill_targets(backbone: "Backbone", config: PeftConfig, last_blocks: int | None) -> None:
    """Choose the layers to adapt, and write them into ``config.target_modules``.

    In a network of a known family these are the layers of its attention, or the main convolutions of its blocks; IA3
    takes what its paper does. In any other network they are all linear layers but the head, or all convolutions without
    groups but the first: the kind that holds more of the parameters. LN tuning takes all norms. Layers whose weights a
    network reads instead of calling them, as BEiT does with ``qkv``, are left out where the size of images is known.

    A ValueError if there is no layer that the method adapts.
    """
    check_last_blocks(last_blocks)
    model = backbone.model
    name = backbone.name
    head = backbone.head
    within = reached(model, last_blocks) - _not_called(backbone)
    modules = [(path, module) for path, module in model.named_modules() if path in within and _usable(model, path)]
    linears = [path for path, module in modules if isinstance(module, nn.Linear) and path != head]
    every = dict(modules)
    known = [path for path in block_convolutions(model) if path in every and every[path].groups == 1]
    targets = [path for path in linears if ATTENTION.fullmatch(path)]
    if isinstance(config, LNTuningConfig):
        targets = [path for path, module in modules if is_norm(module)]
    elif isinstance(config, IA3Config):
        targets = [path for path in linears if IA3_SCALED.fullmatch(path)]
        feedforward = [path for path in linears if IA3_FEEDFORWARD.fullmatch(path)]
        targets += feedforward
        if config.feedforward_modules is None:
            config.feedforward_modules = feedforward
    convolves, norms = _method(config) in CONVOLUTIONS, isinstance(config, LNTuningConfig)
    if not targets and not norms:
        targets = (known or _main_layers(modules, linears)) if convolves else linears
    if not targets:
        what = "normalisation layers" if norms else "layers and convolutions" if convolves else "layers"
        raise ValueError(
            f"{type(config).__name__} adapts {'' if norms else 'linear '}{what}, and backbone {name!r} has none for it "
            f"besides the head: choose another adapter, such as {'bias_norm' if convolves else 'lora'!r} or 'full'"
        )
    vars(config)["target_modules"] = _unmistakable(model, targets)


def check_attention(model: nn.Module, name: str) -> None:
    """Refuse, by a ValueError, adapters in or around torch's own attention, which does not call its layers."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and (
            path.endswith(".base_layer") or any("base_layer" in part.split(".") for part, _ in module.named_modules())
        ):
            raise ValueError(
                f"an adapter cannot be put into {path.removesuffix('.base_layer')!r} of backbone {name!r}, an "
                "nn.MultiheadAttention: it reads its layers' weights instead of calling them; name other layers in "
                "target_modules, or choose 'bias_norm' or 'full'"
            )


def call_encoder_layers(model: nn.Module) -> None:
    """Make torch's own encoder layers call the layers in them that hold trained parameters, in place.

    In evaluation mode and without gradients ``nn.TransformerEncoderLayer`` takes a fast path, one fused kernel that
    reads the weights of its layers. PEFT's wrappers answer with the frozen weight, so that the adapter would be trained
    and then not be used. A layer that reports an unknown activation does not take that path (torch 2.3 to 2.14).
    """
    for module in model.modules():
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if trained and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if trained and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors are only understood by the fast path


def show_settings(model: nn.Module) -> None:
    """Make the wrappers of adapted convolutions answer for the settings of the layer that they wrap, in place.

    Some networks read them, such as those that compute the padding of TensorFlow from a layer's stride (MobileNet in
    transformers 5.23). PEFT's wrappers have none of these attributes.
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


def _usable(model: nn.Module, path: str) -> bool:
    """Whether a layer is called, which torch's attention does not do with those in it."""
    parts = path.split(".")
    owners = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return not any(isinstance(owner, nn.MultiheadAttention) for owner in owners)


def _not_called(backbone: "Backbone") -> set[str]:
    """Names of the layers that a pass in evaluation mode does not call; none where no image is known, or it fails."""
    if backbone.image is None:
        return set()
    layers = {
        path: module
        for path, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and "forward" not in module.__dict__
    }
    called: set[str] = set()
    for path, layer in layers.items():
        # Not a hook: a network may take another path where there are any.
        layer.__dict__["forward"] = partial(_noted, called, path, layer.forward)
    try:
        with torch.no_grad():
            backbone.model.eval()(torch.zeros(1, *backbone.image.input_size))
    except Exception:  # such as an image that is too small, which is reported with the images at hand
        return set()
    finally:
        for layer in layers.values():
            del layer.__dict__["forward"]
    return layers.keys() - called


def _noted(called: set[str], path: str, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Note that a layer is called, and run it."""
    called.add(path)
    return forward(*args, **kwargs)


def _main_layers(modules: list[tuple[str, nn.Module]], linears: list[str]) -> list[str]:
    """Linear layers, or convolutions without groups but the first: the kind that holds more of the parameters."""
    every = dict(modules)
    convolutions = [path for path, module in modules if isinstance(module, nn.Conv2d)]
    mixing = [path for path in convolutions[1:] if every[path].groups == 1]

    def size(paths: list[str]) -> int:
        return sum(parameter.numel() for path in paths for parameter in every[path].parameters())

    if not linears and not mixing:
        return convolutions[:1]
    return linears if size(linears) >= size(mixing) else mixing


def _unmistakable(model: nn.Module, targets: list[str]) -> list[str] | str:
    """The names, or an expression for them where PEFT, which compares the ends of names, would find others too."""
    chosen, ends = set(targets), tuple(f".{path}" for path in targets)
    if any(path.endswith(ends) for path, _ in model.named_modules() if path not in chosen):
        return "|".join(map(re.escape, targets))
    return targets


def _method(config: PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


AdapterChoice = str | PeftConfig
"""What can be asked for as an adapter: one of ``ADAPTERS`` or a PEFT configuration."""

METHODS: dict[str, type[PeftConfig]] = {
    "residual": ResidualConfig,
    "bottleneck": BottleneckConfig,
    "prompt": PromptConfig,
    "lora": LoraConfig,
    "dual_lora": DualLoraConfig,
    "ia3": IA3Config,
}
SELECTIONS: dict[str, list[str]] = {"head": [], "bias_norm": ["bias", "norm"], "full": ["all"]}
ADAPTERS = [*METHODS, *SELECTIONS]
INTERNAL = {field.name for field in fields(PeftConfig)}


@dataclass
class Backbone:
    """A frozen image classifier: ``model`` maps images (B, channels, height, width) to logits (B, K).

    ``name`` is the timm name, ``hf:`` and the transformers name, or the class name, ``head`` the full name of the
    classification head in the model. ``image`` is None for a network of the caller's own.
    """

    model: nn.Module
    name: str
    head: str
    image: ImageConfig | None


@dataclass
class AdaptedModel:
    """A backbone with its adapter in place.

    Only saving and loading need ``peft_model``, where the adapter is called "default", and its ``config``. ``beside``
    are trained tensors that PEFT does not save: the backbone's own, where it is trained too.
    """

    backbone: Backbone
    peft_model: PeftModel
    config: PeftConfig
    beside: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The network itself, whose names are the names of states everywhere in perada."""
        return self.peft_model.get_base_model()

    @property
    def channels_last(self) -> bool:
        """Whether the adapter's convolutions run in that memory format, which some of PEFT 0.21 do not."""
        dora = isinstance(self.config, LoraConfig) and self.config.use_dora
        return not dora and _method(self.config) not in {"BOFT", "OFT", "HRA"}


def is_adapter_key(key: str) -> bool:
    """Whether a name in an adapted model is of what the adapter added, rather than of the backbone or a copy of it.

    >>> [is_adapter_key(key) for key in ("conv.lora_A.default.weight", "fc.modules_to_save.default.bias")]
    [True, False]
    """
    parts = key.split(".")
    return "default" in parts and "modules_to_save" not in parts


def plain_names(adapted: AdaptedModel) -> dict[str, str]:
    """The tensors of the backbone by the names that they have without adapter, ``{plain name: name in the model}``."""
    keys = [key for key in adapted.model.state_dict() if "default" not in key.split(".")]
    return {plain_name(key): key for key in keys}


def insert_adapter(
    backbone: Backbone, adapter: AdapterChoice = "residual", *, train_backbone: Trained = False, **options: object
) -> AdaptedModel:
    """Put an adapter into ``backbone``, in place, and let it and the classification head require gradients.

    New weights are drawn from torch's global random stream.

    Args:
        backbone: A backbone without adapter.
        adapter: One of ``ADAPTERS``, or any PEFT configuration of a method that changes layers.
        train_backbone: Train the backbone's own parameters beside the adapter's; ``"merged"`` puts the weights that
            LoRA adapts into states, untrained (:class:`~perada.core.states.Merged`).
        **options: Fields of the named method's configuration, such as ``r`` of ``"lora"``.

    Returns:
        The adapted model. ``requires_grad`` is true in it for what is trained, and for nothing else.

    Raises:
        ValueError: If the adapter or an option is unknown, fits nothing in the backbone, or trains what PEFT would not
            save. The backbone may then be half adapted: build it anew. (A TypeError if it is no adapter at all.)
    """
    if hasattr(backbone.model, "peft_config"):
        raise OptionError(
            f"backbone {backbone.name!r} already holds an adapter: build a fresh one with build_backbone",
            name="backbone",
            value=backbone.name,
        )
    config = _configure(backbone, adapter, options)
    method = adapter if isinstance(adapter, str) else type(adapter).__name__
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # LN tuning copies any layer; BOFT is slower without an extension that PEFT compiles.
            warnings.filterwarnings("ignore", "Unsupported layer type .*Norm|Failed to load the CUDA ext", UserWarning)
            peft_model = _wrapped(backbone, config)
    except NoMatchingPeftModuleError as error:
        raise OptionError(
            f"adapter {method!r} finds nothing to adapt in backbone {backbone.name!r}: target_modules="
            f"{vars(config)['target_modules']!r} names none of its modules: name layers as model.named_modules() does",
            name="adapter",
            value=method,
        ) from error
    except Exception as error:  # every method of PEFT refuses in its own way
        reason = " ".join(str(error).split())
        reason = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
        raise OptionError(
            f"adapter {method!r} does not fit backbone {backbone.name!r}: {reason}", name="adapter", value=method
        ) from error
    check_attention(backbone.model, backbone.name)
    call_encoder_layers(backbone.model)
    show_settings(backbone.model)
    adapted = AdaptedModel(backbone, peft_model, config)
    if train_backbone is not True and (lost := _not_saved(adapted)):
        raise OptionError(
            f"adapter {method!r} would train {lost[0]!r} ({len(lost)} such tensors) in {backbone.name!r}, but PEFT "
            "would not save it: put its module into modules_to_save, or choose 'bias_norm' or 'full'",
            name="adapter",
            value=method,
        )
    if train_backbone == "merged":
        let_merge(adapted.model)
        return replace(adapted, beside=_not_saved(adapted))
    if not train_backbone:
        return adapted
    if isinstance(config, SelectiveConfig):
        raise OptionError(
            f"train_backbone=True cannot be used with adapter {method!r}: choose 'full' to train all of it",
            name="train_backbone",
            value=True,
        )
    last_blocks = options.get("last_blocks", getattr(config, "last_blocks", None))
    within = reached(adapted.model, cast(int | None, last_blocks))
    for name, parameter in adapted.model.named_parameters():
        if "original_module" in name.split("."):  # PEFT's copy, which is not run
            parameter.requires_grad_(False)
        elif plain_name(name).rpartition(".")[0] in within:
            parameter.requires_grad_(True)
    call_encoder_layers(adapted.model)
    return replace(adapted, beside=_not_saved(adapted))


def _configure(backbone: Backbone, adapter: AdapterChoice, options: dict[str, object]) -> PeftConfig:
    """Return the configuration to insert, with targets and head filled in."""
    if isinstance(adapter, PeftConfig):
        if options:
            raise ValueError(f"options {sorted(options)} come with a PeftConfig: set them in the configuration itself")
        config = copy.deepcopy(adapter)
        config.base_model_name_or_path = None  # of the model that it was saved with
        config.inference_mode = False
    elif not isinstance(adapter, str):
        raise TypeError(f"adapter is a {type(adapter).__name__}: give a name of {ADAPTERS} or a PeftConfig")
    elif adapter not in ADAPTERS:
        raise OptionError(
            f"adapter {adapter!r} is unknown: choose one of {ADAPTERS} or give a PeftConfig",
            name="adapter",
            value=adapter,
        )
    else:
        config = _named(adapter, options, backbone.head)
    if config.is_prompt_learning or not (isinstance(config, SelectiveConfig) or hasattr(config, "modules_to_save")):
        raise ValueError(
            f"{type(config).__name__} cannot train a classification head beside it: choose one of {ADAPTERS}"
        )
    if isinstance(config, AdaLoraConfig):
        raise ValueError(
            "AdaLoraConfig cannot be used: it moves ranks between layers by a count of one optimiser's steps, which "
            "clients do not share; choose 'lora'"
        )
    check_lora(config)
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(cast(peft.PeftType, config.peft_type), object)
    placed = issubclass(tuner, AddingModel) and not isinstance(config, DualLoraConfig)  # by the method itself
    if getattr(config, "target_modules", "unset") is None and not placed:
        fill_targets(backbone, config, cast(int | None, options.get("last_blocks")))
    if isinstance(config, IA3Config) and config.feedforward_modules is None:
        config.feedforward_modules = []
    if not isinstance(config, SelectiveConfig):
        saved = cast(list[str] | None, vars(config)["modules_to_save"])
        vars(config)["modules_to_save"] = list(dict.fromkeys([backbone.head, *(saved or [])]))
    return config


def _named(adapter: str, options: dict[str, object], head: str) -> PeftConfig:
    """The configuration of a named method, whose options are checked."""
    hints = get_type_hints(METHODS[adapter]) if adapter in METHODS else {}
    known = (hints.keys() - INTERNAL) | (set() if adapter == "head" else {"last_blocks"})
    for name, value in sorted(options.items()):
        if name not in known:
            choice = ", ".join(sorted(known)) or "none"
            raise OptionError(
                f"adapter {adapter!r} has no option {name!r}: its options are {choice}; leave it out of "
                "adapter_options (another recipe may have set it), or choose an adapter that has it",
                name="adapter",
                value=adapter,
            )
        if name in hints.keys() - {"last_blocks"} and not _is_of(value, hints[name]):
            what = str(hints[name]).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            raise invalid_option(f"adapter_options: {name}", value, f"of type {what} for adapter {adapter!r}")
    last_blocks = cast(int | None, options.get("last_blocks"))
    if last_blocks is not None and options.get("target_modules") is not None:
        raise ValueError("last_blocks and target_modules both say which layers to adapt: give one of them")
    if adapter in METHODS:
        fields_of_config = {name: _integral(options[name], hints[name]) for name in options if name in hints}
        if "last_blocks" in fields_of_config:
            fields_of_config["last_blocks"] = last_blocks  # checked by the configuration itself
        return METHODS[adapter](**cast(dict[str, Any], fields_of_config))
    return SelectiveConfig(select=list(SELECTIONS[adapter]), modules=[head], last_blocks=last_blocks)


def _integral(value: object, hint: object) -> object:
    """A number without a fraction as an ``int``, where that is the only number that an option takes."""
    kinds = get_args(hint) or (hint,)
    return int(value) if isinstance(value, float) and int in kinds and float not in kinds else value


def _is_of(value: object, hint: Any) -> bool:  # noqa: ANN401  # an annotation
    """Whether a value is of a type; any sequence or set will do for a list, what is in it is not looked at."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(one) for one in get_args(hint))
    if hint is int and isinstance(value, float):
        return value.is_integer()
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin in (list, set, tuple):
        return isinstance(value, list | set | tuple)
    return value is None if hint is None else not isinstance(origin, type) or isinstance(value, origin)


def _wrapped(backbone: Backbone, config: PeftConfig) -> PeftModel:
    """Let PEFT wrap the backbone's layers and its head.

    PEFT finds modules to save by the ends of their names, so for a head called ``out`` it would take every ``dropout``,
    its own among them. Such a head is wrapped here.
    """
    head = backbone.head
    if isinstance(config, SelectiveConfig) or not _is_end_of_others(backbone.model, head, config):
        return cast(PeftModel, peft.get_peft_model(backbone.model, config))
    saved: list[str] = vars(config)["modules_to_save"]
    others = [name for name in saved if name != head]
    vars(config)["modules_to_save"] = others or None
    peft_model = cast(PeftModel, peft.get_peft_model(backbone.model, config))
    vars(config)["modules_to_save"] = saved
    layer = backbone.model.get_submodule(head)
    wrapper = layer if isinstance(layer, ModulesToSaveWrapper) else ModulesToSaveWrapper(layer, "default")
    wrapper.set_adapter("default")
    backbone.model.set_submodule(head, wrapper)
    return peft_model


def _is_end_of_others(model: nn.Module, head: str, config: PeftConfig) -> bool:
    """Whether names of other modules, of the model or of PEFT's layers, end in the name of the head."""
    tuner: Any = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[cast(peft.PeftType, config.peft_type)]
    kinds = tuner.tuner_layer_cls if isinstance(tuner.tuner_layer_cls, tuple) else (tuner.tuner_layer_cls,)
    names = [name for kind in kinds for name in (*kind.adapter_layer_names, *kind.other_param_names)]
    names += [name for name, _ in model.named_modules() if name != head and not name.startswith(f"{head}.")]
    return any(name.endswith(head) or f".{head}." in f".{name}." for name in names)


def saved_tensors(adapted: AdaptedModel) -> dict[str, Tensor]:
    """What PEFT saves, by its own names."""
    with warnings.catch_warnings():  # PEFT 0.21 takes the biases of lora_bias for broken matrices
        warnings.filterwarnings("ignore", "Adapter .* have invalid shape", UserWarning)
        return cast(dict[str, Tensor], peft.get_peft_model_state_dict(adapted.peft_model, save_embedding_layers=False))


def _not_saved(adapted: AdaptedModel) -> tuple[str, ...]:
    """Names of trained tensors, and of buffers of modules that own one, that PEFT would not save."""
    pointers = {tensor.data_ptr() for tensor in saved_tensors(adapted).values()}
    state = adapted.model.state_dict()
    return tuple(key for key in trained_keys(adapted.model) if state[key].data_ptr() not in pointers)


def reset_parameters(model: nn.Module, within: str) -> None:
    """Draw anew, from torch's global random stream, the trained layers of the backbone whose names start so."""
    for path, module in model.named_modules():
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        reset = getattr(module, "reset_parameters", None)
        if trained and callable(reset) and f"{path}.".startswith(within) and not is_adapter_key(f"{path}."):
            reset()


def find_tensor_names(model: nn.Module, head: str) -> TensorNames:
    """Sort the names of a model's trained tensors."""
    keys = trained_keys(model)
    norms = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
    )
    parameters = parameter_keys(model)
    first = next(
        path.removesuffix(".base_layer").removesuffix(".original_module")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)
    )
    shared, private = branches(model)
    return TensorNames(
        keys,
        parameters,
        head=frozenset(key for key in parameters if key.startswith(f"{head}.")),
        norms=frozenset(key for key in keys if key.startswith(norms)),
        input=frozenset(key for key in keys if key.startswith(f"{first}.")),
        adapter=frozenset(key for key in keys if is_adapter_key(key)),
        factors=lora_factors(model),
        shared=frozenset(key for key in keys if key.startswith(shared)),
        private=frozenset(key for key in keys if key.startswith(private)),
        merged=frozenset(key for key, value in model.named_parameters() if isinstance(value, Merged)),
    )
