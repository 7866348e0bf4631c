# SPDX-License-Identifier: Apache-2.0
"""What is refused at set-up, because rounds cannot do it or data and model do not fit."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from perada.algorithms import Algorithm
from perada.algorithms.dry_run import dry_run_rounds, example_sent, is_own
from perada.core.checks import OptionError
from perada.core.seeding import generator
from perada.core.text import abbreviated
from perada.data import FederatedDataModule
from perada.engine.fold_check import check_fold
from perada.engine.frozen_trunk import FrozenTrunk
from perada.federation.diagnostics import Diagnostic, choose_diagnostics, obstacles
from perada.federation.settings import Settings, check_distilled_batch_norm, without_factors
from perada.lightning.module import FederatedClassifier
from perada.lightning.parts import Parts
from perada.models.usage import check_usage

LEAST_SHARE = 0.1
"""Share of a forward pass that the frozen part must be, unless features are asked for."""


def keep_clients_apart(parts: Parts, x: Tensor) -> None:
    """Take the loop where folding the clients' real images ``x`` (C, B, ...) would change what a client computes.

    A ValueError where folding was asked for.
    """
    module = parts.module
    if module.engine.kind == "loop" or module.folds:
        return
    channels_last = module.engine.memory_format is torch.channels_last
    why = check_fold(module.model, parts.on_model_device(x), channels_last)
    module.folds = why is None
    if why is None:
        return
    what = f"backbone {parts.adapted.backbone.name!r}: {why}"
    if module.engine_name == "folded":
        raise OptionError(
            f"engine='folded' cannot run {what}; use engine='loop' or 'auto'", name="engine", value="folded"
        )
    warnings.warn(f"engine='auto' takes the loop over clients for {what}", stacklevel=2)
    module.engine = module.make_engine("loop")


def check_adapter(parts: Parts, x: Tensor) -> None:
    """Refuse, by a ValueError, a network that does not use what is trained in it, tried on images (C, B, ...).

    It is tried once for each module. Where training is private, images without anything of a client's take their place.
    """
    module, adapted = parts.module, parts.adapted
    if module.uses_adapter:
        return
    if parts.settings.private:
        noise = torch.randn(x.shape[2:], generator=generator(0, "check adapter"))
        images = torch.stack([noise, noise.flip(-1)]).to(x.dtype)
    else:
        images = x.flatten(0, 1)
    channels_last = module.engine.memory_format is torch.channels_last
    usage = check_usage(adapted, parts.on_model_device(images), channels_last=channels_last)
    name = adapted.backbone.name
    if usage.problem is not None:
        raise ValueError(
            f"the adapter ({type(adapted.config).__name__}) cannot be used with backbone {name!r}: {usage.problem}"
        )
    if usage.unused:
        rank_zero_warn(
            f"backbone {name!r} does not use {abbreviated(usage.unused, 4)}, which are to be trained and will not "
            "change; "
            "ignore this, or choose an adapter that leaves them out"
        )
    if usage.merging is not None:
        rank_zero_warn(usage.merging)
    module.uses_adapter = True


def check_images(parts: Parts, x: Tensor) -> None:
    """Send the first of clients' prepared training images (C, B, ...) through the model, and one of each other set.

    A ValueError if one does not pass, or what comes out are not the logits of the classes.
    """
    data, first = parts.data, torch.tensor([0])
    tried = {"images": x[0, :1]}
    for token in data.checked.extreme_tokens() if data.tokens else ():
        tried[f"texts with token {token}"] = torch.full_like(x[0, :1], token)
    if data.public_size:
        tried["public images"] = data.public_images(first)
    for condition in data.conditions:
        if not (condition.kind or condition.others):  # else they are the clients' own
            tried[f"images of the shift {condition.shift!r}"] = data.prepare(condition.store.take(first, first)[0])
    for name, image in tried.items():
        _check_image(parts, name, parts.on_model_device(image))
    _warn_of_range(parts, x)


def _warn_of_range(parts: Parts, x: Tensor) -> None:
    """Warn where real images, as the model gets them, look as if nobody had normalised them."""
    backbone, module = parts.adapted.backbone, parts.module
    own = isinstance(module.backbone, nn.Module)
    if backbone.image is None or module.pretrained is False or own or not x.is_floating_point():
        return
    if float(x.min()) >= 0 and float(x.max()) <= 1 and any(backbone.image.mean):
        rank_zero_warn(
            f"images have values from 0 to 1 and reach backbone {backbone.name!r}, but its weights expect mean "
            f"{backbone.image.mean} and standard deviation {backbone.image.std}: give uint8 images, or normalise them"
        )


def _check_image(parts: Parts, name: str, x: Tensor) -> None:
    model, adapted, classes = parts.module.model, parts.adapted, parts.data.num_classes
    backbone = f"backbone {adapted.backbone.name!r}"
    what = f"{name} of shape {tuple(x.shape[1:])} and type {x.dtype} do not fit {backbone}"
    try:
        with torch.no_grad():
            logits = model.eval()(x)
    except Exception as error:  # every layer refuses in its own way
        reason = " ".join(str(error).split())[:200]
        if _runs_without_adapter(parts, x):
            raise ValueError(
                f"the adapter ({type(adapted.config).__name__}) does not run on {backbone}, which runs without it: "
                f"{reason}; choose another adapter, or set channels_last: false"
            ) from error
        formats = {value.dtype for value in model.parameters() if value.is_floating_point()}
        if x.dtype == torch.float32 and formats == {torch.float64}:
            raise ValueError(
                f"{backbone} has weights in float64, and the {name} are {x.dtype} ({reason}); convert the network by "
                "network.float(), or give images in float64"
            ) from error
        remedy = "images of the shape and type it takes (image_size resizes uint8 ones)"
        if parts.data.tokens:
            remedy = "texts of the length that it takes, and tokens that it knows"
        raise ValueError(f"{what}: {reason}; give {remedy}") from error
    if tuple(logits.shape) != (1, classes):
        raise ValueError(
            f"{what}: what comes out has shape {tuple(logits.shape)} instead of (1, {classes}); choose another backbone"
        )


def _runs_without_adapter(parts: Parts, x: Tensor) -> bool:
    """Whether the images fit the backbone, so that the adapter is at fault."""
    try:
        with torch.no_grad(), parts.adapted.peft_model.disable_adapter():
            parts.module.model(x)
    except Exception:  # whatever a layer does; some adapters cannot be taken away
        return False
    return True


def check_batch_norm(parts: Parts) -> None:
    """Refuse, by a ValueError, batches of one image for a BatchNorm that is trained: statistics need at least two."""
    if not any(key.endswith("running_var") for key in parts.module.tensor_names.keys):
        return
    data = parts.data
    smallest = min(range(data.num_clients), key=lambda client: data.train_sizes[client])
    causes = {
        "batch_size is 1": data.batch_size == 1,
        f"client {smallest} has 1 training image": data.train_sizes[smallest] == 1,
    }
    for cause in (cause for cause, holds in causes.items() if holds):
        raise ValueError(
            f"{cause}, and the adapter trains BatchNorm layers, which need at least 2 images in a batch; give more, or "
            "choose an adapter without them (head, lora) or a backbone with LayerNorm"
        )
    check_distilled_batch_norm(parts.settings, parts.module.tensor_names, data.public_size)


def with_diagnostics(
    settings: Settings, asked: bool | Sequence[Diagnostic], data: FederatedDataModule, module: FederatedClassifier
) -> Settings:
    """The settings, with the diagnostics to be measured; a ValueError for one that is named and cannot be."""
    if not asked:
        return settings
    algorithm, tensor_names = settings.algorithm, module.tensor_names
    sent = tensor_names.keys if algorithm.global_model else names_sent(module, algorithm)
    lack = without_factors(algorithm, tensor_names, sent)
    found = obstacles(settings, bool(data.public_size), bool(data.val_dataloader()), lack)
    chosen = choose_diagnostics(asked, found)
    if asked is True:
        for reason in dict.fromkeys(found.values()):
            names = [
                name for name in found if found[name] == reason and (tensor_names.factors or name != "lora_residual")
            ]
            if names:
                rank_zero_info(f"diagnostics: without {', '.join(names)}: {reason}")
    return replace(settings, diagnostics=chosen)


def names_sent(module: FederatedClassifier, algorithm: Algorithm) -> Collection[str]:
    """What a client sends in the first round; nothing is looked up where there are no factors of LoRA."""
    if not module.tensor_names.factors:
        return ()
    return example_sent(algorithm, module.tensor_names, algorithm.initial(module.initial_state)).keys()


def try_own(parts: Parts) -> None:
    """Try what somebody else has written; of an ensemble of models only the rule is tried."""
    settings, data, module = parts.settings, parts.data, parts.module
    algorithm, rule = settings.algorithm, settings.rule
    if is_own(algorithm) or is_own(rule):
        tried = Algorithm() if algorithm.is_ensemble else algorithm
        clients = settings.clients_per_round or data.num_clients
        sizes = settings.phases, data.num_clients, clients, data.num_classes, settings.training.multilabel
        dry_run_rounds(tried, rule, module.tensor_names, module.initial_state(0), *sizes)


def use_features(parts: Parts, image: Tensor) -> FrozenTrunk | None:
    """Serve features where that pays, or is asked for, which may end in a ValueError; return their frozen part, if so.

    It is looked for with a prepared image (channels, height, width).
    """
    data, module = parts.data, parts.module
    if module.cache_features is False:
        return None
    prefix = module.engine.find_trunk(parts.on_model_device(image), 0.0 if module.cache_features else LEAST_SHARE)
    if prefix is None and module.cache_features:
        raise OptionError(
            "cache_features=True, and the model has no frozen part before all that is trained; leave cache_features "
            "out, or choose an adapter that has one (head, lora)",
            name="cache_features",
            value=True,
        )

    def encode(images: Tensor) -> Tensor:
        with parts.precision():
            return module.engine.features(data.prepare(images.to(module.device)))

    if prefix is not None:
        data.use_features(encode, prefix.size, tuple(prefix.image))
    return prefix
