# SPDX-License-Identifier: Apache-2.0
"""Choose the layers of a backbone that an adapter changes."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import peft
import torch
from peft import PeftConfig
from torch import Tensor, nn

from perada.adapters import (
    AdapterTraits,
    AddingModel,
)
from perada.adapters.added import check_last_blocks, is_norm, modules_from_last_blocks
from perada.adapters.residual import block_convolutions
from perada.models.backbone import Backbone
from perada.models.lora_attention import adapts_attention, is_packed

IA3_SCALED = re.compile(r".*(attn\.qkv|attention\.[kv]_proj|self_attn\.[kv]_proj|attention\.(key|value))")
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
    return PEFT_TRAITS.get(method_of(config), AdapterTraits())


def fill_targets(backbone: Backbone, config: PeftConfig, last_blocks: int | None) -> None:
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
        attentions = [path for path, layer in layers.items() if adapts_attention(config) and is_packed(layer)]
        targets = [path for path in linears if traits.attention.fullmatch(path)]
        if traits.feedforward is not None:
            feedforward = [path for path in linears if traits.feedforward.fullmatch(path)]
            targets += feedforward
            if untyped_config.feedforward_modules is None:
                untyped_config.feedforward_modules = feedforward
        if not targets:
            targets = _default_layers(backbone.model, layers, [*linears, *attentions], traits)
        elif attentions:
            targets += attentions
    if not targets:
        raise ValueError(_nothing_to_adapt(backbone, config))
    untyped_config.target_modules = _as_target_modules(backbone.model, targets)


def _adaptable_modules(backbone: Backbone, last_blocks: int | None) -> dict[str, nn.Module]:
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
        linears: Names of the linear layers among them, without the head, and of torch's attentions.
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


def _nothing_to_adapt(backbone: Backbone, config: PeftConfig) -> str:
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


def _is_in_torch_attention(model: nn.Module, path: str) -> bool:
    """Return whether a layer is inside ``nn.MultiheadAttention``, which reads weights without calling its layers."""
    parts = path.split(".")
    for end in range(len(parts)):
        ancestor = model.get_submodule(".".join(parts[:end]))
        if isinstance(ancestor, nn.MultiheadAttention):
            return True
    return False


def _uncalled_layers(backbone: Backbone) -> set[str]:
    """Return the names of the layers that a pass in evaluation mode does not call.

    The result is empty if no image fits the network. For a network that the caller built, images of several sizes are
    tried.
    """
    layers = {}
    for path, module in backbone.model.named_modules():
        is_layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.MultiheadAttention)
        if is_layer and "forward" not in vars(module):
            layers[path] = module
    model = backbone.model.eval()
    for shape in _probable_image_shapes(backbone):
        try:
            image = _blank_image(model, shape)
            with torch.no_grad(), _without_fused_encoders(), recorded_calls(layers) as called:
                model(image)
        except Exception:  # layers raise errors of any kind
            # For example because the image is too small, which is reported later, for the real images.
            continue
        return layers.keys() - called
    return set()


@contextmanager
def _without_fused_encoders() -> Iterator[None]:
    """Have torch's encoder layers call their layers meanwhile, as they do once there are adapters in them."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _probable_image_shapes(backbone: Backbone) -> list[tuple[int, int, int]]:
    """Return shapes (channels, height, width) of images that may fit a network, the most probable first."""
    if backbone.image_config is not None:
        return [backbone.image_config.input_size]
    model = backbone.model
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions:
        return []
    channels = convolutions[0].in_channels
    # timm keeps the size that a network was built for and that of its weights here, and transformers the size.
    image_sizes: list[object] = [getattr(getattr(model, "patch_embed", None), "img_size", None)]
    timm_config = getattr(model, "pretrained_cfg", None)
    if isinstance(timm_config, Mapping):
        image_sizes.append(tuple(timm_config.get("input_size") or ())[1:])
    image_sizes.append(getattr(getattr(model, "config", None), "image_size", None))
    shapes = []
    for size in [*image_sizes, 224, 64, 32, 28]:
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


def method_of(config: PeftConfig) -> str:
    """Return the name of a configuration's method."""
    # A member of an enum for PEFT's methods, and a string for perada's.
    return str(getattr(config.peft_type, "value", config.peft_type))
