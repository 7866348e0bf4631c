# SPDX-License-Identifier: Apache-2.0
"""Checks at set-up that model, data and algorithm are compatible, most of them on the run's first images."""

import hashlib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from perada.algorithms import Algorithm
from perada.algorithms.dry_run import is_foreign
from perada.algorithms.dry_run_results import dry_run_rounds
from perada.core.checks import OptionError
from perada.core.seeding import generator
from perada.core.text import abbreviated, dtype_name
from perada.data import FederatedDataModule
from perada.data.batches.features import current_shared_features
from perada.engine.fold_check import check_fold
from perada.engine.frozen_trunk import FrozenTrunk, KeptFeatures
from perada.engine.recomputation_check import check_recomputation
from perada.federation.diagnostics import Diagnostic, choose_diagnostics, obstacles
from perada.federation.settings import Settings, without_factors
from perada.federation.setup_checks import names_sent
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_context import RunContext
from perada.models.adapted import AdaptedModel
from perada.models.usage import check_usage

MIN_TRUNK_SHARE = 0.1
"""Share of a forward pass above which caching the features of the frozen trunk pays off."""


def check_folding(context: RunContext, images: Tensor) -> None:
    """Fall back to the loop over clients if folding would change what a client computes.

    Folding runs all clients as one batch, and a network may mix the images of a batch.

    Args:
        context: The run.
        images: Prepared training images of some clients (C, B, ...).

    Raises:
        OptionError: If ``engine='folded'`` was requested, and the model cannot be folded.
    """
    module = context.module
    if module.engine.kind == "loop" or context.passed.folding:
        return
    channels_last = module.engine.memory_format is torch.channels_last
    problem = check_fold(module.model, context.on_model_device(images), channels_last)
    if problem is None:
        context.passed.folding = True
        return
    subject = f"backbone {context.adapted.backbone.name!r}: {problem}"
    engine_name = module.training_options.engine
    if engine_name != "auto":
        raise OptionError(
            f"engine={engine_name!r} cannot run {subject}; use engine='loop' or 'auto'",
            name="engine",
            value=engine_name,
        )
    warnings.warn(f"engine='auto' falls back to the per-client loop for {subject}", stacklevel=2)
    module.use_loop_engine()


def check_adapter(context: RunContext, images: Tensor) -> None:
    """Check once per run that the network uses the trained parameters.

    Args:
        context: The run.
        images: Prepared training images of some clients (C, B, ...). A private run is checked on noise instead.

    Raises:
        ValueError: If it does not use the adapter.
    """
    module = context.module
    adapted = context.adapted
    if context.passed.adapter:
        return
    if context.settings.private:
        # Whether an image leads to a warning would show something about it.
        noise = torch.randn(images.shape[2:], generator=generator(0, "check adapter"))
        images = torch.stack([noise, noise.flip(-1)]).to(images.dtype)
    else:
        images = images.flatten(0, 1)
    channels_last = module.engine.memory_format is torch.channels_last
    usage = check_usage(adapted, context.on_model_device(images), channels_last=channels_last)
    name = adapted.backbone.name
    if usage.problem is not None:
        raise ValueError(
            f"the adapter ({type(adapted.config).__name__}) does not fit backbone {name!r}: {usage.problem}"
        )
    if usage.unused:
        rank_zero_warn(
            f"backbone {name!r} does not use {abbreviated(usage.unused, 4)}, so these trained parameters will not "
            "change; ignore this, or choose an adapter that leaves them out"
        )
    if usage.merging is not None:
        rank_zero_warn(usage.merging)
    context.passed.adapter = True


def check_checkpointing(context: RunContext, images: Tensor) -> None:
    """Check once per run that gradient checkpointing, if it is on, changes no gradient.

    Args:
        context: The run.
        images: Prepared training images of some clients (C, B, ...). A private run is checked on noise instead.

    Raises:
        OptionError: If the network's blocks compute something else when they run again.
    """
    engine = context.module.engine
    if not engine.is_recomputing or context.passed.recomputation:
        return
    if context.settings.private:
        images = torch.randn(1, 2, *images.shape[2:], generator=generator(0, "check checkpointing")).to(images.dtype)
    reason = check_recomputation(engine, context.on_model_device(images))
    if reason is not None:
        raise OptionError(
            f"checkpointing=True cannot recompute the blocks of backbone {context.adapted.backbone.name!r}: {reason}; "
            "have the blocks draw from torch's random streams only, keep nothing between passes and leave their inputs "
            "as they are, or set training.checkpointing to false",
            name="checkpointing",
            value=True,
        )
    context.passed.recomputation = True


def check_first_images(context: RunContext, images: Tensor) -> None:
    """Run one image of each set through the model.

    Args:
        context: The run.
        images: Prepared training images of some clients (C, B, ...).

    Raises:
        ValueError: If an image does not fit the model, or the output is not one logit for each class.
    """
    data = context.data
    first = torch.tensor([0])
    examples = {"images": images[0, :1]}
    if data.tokens:
        for token in data.checked.extreme_tokens():
            examples[f"texts with token {token}"] = torch.full_like(images[0, :1], token)
    if data.public_size:
        examples["public images"] = data.public_images(first)
    for condition in data.conditions:
        # Corruptions and label shifts are made of the clients' own test images.
        is_other_set = not (condition.corruption or condition.of_other_clients)
        if is_other_set:
            image, _ = condition.store.take(first, first)
            examples[f"images of the shift {condition.shift!r}"] = data.prepare(image)
    for name, image in examples.items():
        _check_image(context, name, context.on_model_device(image))
    _warn_if_not_normalized(context, images)


def _warn_if_not_normalized(context: RunContext, images: Tensor) -> None:
    """Warn if pretrained weights receive floating-point images with values from 0 to 1."""
    backbone = context.adapted.backbone
    is_users_network = isinstance(context.module.backbone, nn.Module)
    is_pretrained = context.module.pretrained is not False and not is_users_network
    if backbone.image_config is None or not is_pretrained or not images.is_floating_point():
        return
    if float(images.min()) >= 0 and float(images.max()) <= 1 and any(backbone.image_config.mean):
        rank_zero_warn(
            f"images have values from 0 to 1, but the weights of backbone {backbone.name!r} expect mean "
            f"{backbone.image_config.mean} and standard deviation {backbone.image_config.std}; pass uint8 images, or "
            "normalise them"
        )


def _check_image(context: RunContext, name: str, image: Tensor) -> None:
    """Raise a ValueError if an image (1, ...) does not pass through the model, or the output is not (1, K, ...)."""
    expected_shape: tuple[int, ...] = (1, context.data.num_classes)
    if context.module.task.per_pixel:
        expected_shape = (*expected_shape, *image.shape[-2:])
    backbone = f"backbone {context.adapted.backbone.name!r}"
    mismatch = f"{name} of shape {tuple(image.shape[1:])} and type {dtype_name(image.dtype)} do not fit {backbone}"
    try:
        with torch.no_grad():
            logits = context.module.model.eval()(image)
    except Exception as error:  # layers raise errors of any kind
        reason = " ".join(str(error).split())[:200]
        raise _explain_failed_image(context, name, image, mismatch, reason) from error
    if tuple(logits.shape) != expected_shape:
        raise ValueError(
            f"{mismatch}: the output has shape {tuple(logits.shape)} instead of {expected_shape}; "
            "choose a different backbone"
        )


def _explain_failed_image(context: RunContext, name: str, image: Tensor, mismatch: str, reason: str) -> ValueError:
    """Return the error for an image that does not pass through the model, with its cause as far as known."""
    adapted = context.adapted
    backbone = f"backbone {adapted.backbone.name!r}"
    if _runs_without_adapter(adapted, context.module.model, image):
        return ValueError(
            f"the adapter ({type(adapted.config).__name__}) fails on {backbone}, which runs without it: {reason}; "
            "choose a different adapter, or set channels_last: false"
        )
    formats = {value.dtype for value in context.module.model.parameters() if value.is_floating_point()}
    if image.is_floating_point() and formats and image.dtype not in formats:
        weights_type = dtype_name(formats.pop())
        image_type = dtype_name(image.dtype)
        remedy = f"convert the images, with image.to(torch.{weights_type})"
        if image.dtype == torch.float32:
            remedy = "convert the network with network.float(), or pass float64 images"
        return ValueError(f"{backbone} has {weights_type} weights, but the {name} are {image_type}; {remedy}")
    channels = _channels_of(adapted.peft_model)
    if channels is not None and image.ndim != 4:
        return ValueError(f"{mismatch}, which has convolutions; pass images of shape (channels, height, width)")
    if image.ndim == 4 and channels not in (None, image.shape[1]):
        remedy = f"convert them to {channels} channels, or pass a network for {image.shape[1]}"
        if image.shape[-1] == channels:
            remedy = "their channels seem to come last: pass image.permute(2, 0, 1)"
        elif image.shape[1] == 1:
            remedy = (
                "convert grey images with image.convert('RGB') of a PIL image, or image.expand(3, -1, -1) of a tensor"
            )
        return ValueError(
            f"{mismatch}, whose first convolution takes {channels} channels instead of {image.shape[1]}; {remedy}"
        )
    remedy = "pass images of the shape and type that it expects (image_size resizes uint8 images)"
    if context.data.tokens:
        remedy = "pass texts of the length that it expects, with tokens from its vocabulary"
    return ValueError(f"{mismatch}: {reason}; {remedy}")


def _channels_of(model: nn.Module) -> int | None:
    """Return the number of channels that the first convolution of a network takes; None without convolutions."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            return layer.in_channels
    return None


def _runs_without_adapter(adapted: AdaptedModel, model: nn.Module, image: Tensor) -> bool:
    """Return whether an image passes through the backbone without the adapter, which then is the cause of the error."""
    try:
        with torch.no_grad(), adapted.peft_model.disable_adapter():
            model(image)
    except Exception:  # of any layer, or of an adapter that cannot be disabled
        return False
    return True


def check_batch_norm(context: RunContext) -> None:
    """Raise a ValueError if trained BatchNorm layers would see batches of one image; statistics need at least two."""
    if not any(key.endswith("running_var") for key in context.module.tensor_names.keys):
        return
    data = context.data
    smallest = min(range(data.num_clients), key=lambda client: data.train_sizes[client])
    cause = None
    if data.batch_size == 1:
        cause = "batch_size is 1"
    elif data.train_sizes[smallest] == 1:
        cause = f"client {smallest} has 1 training image"
        if data.client_validation:
            cause += f", since client_validation={data.client_validation} holds out the others"
    if cause is not None:
        raise ValueError(
            f"{cause}, but the adapter trains BatchNorm layers, which require at least 2 images per batch; use more "
            "images, an adapter without BatchNorm (head, lora) or a backbone with LayerNorm"
        )


def with_diagnostics(
    settings: Settings,
    requested: bool | Sequence[Diagnostic],
    data: FederatedDataModule,
    module: FederatedClassifier,
) -> Settings:
    """Return the settings with the diagnostics to measure.

    Raises:
        ValueError: If a diagnostic is requested by name and cannot be measured.
    """
    if not requested:
        return settings
    algorithm = settings.algorithm
    tensor_names = module.tensor_names
    if algorithm.global_model:
        sent: Collection[str] = tensor_names.keys
    else:
        sent = names_sent(algorithm, tensor_names, algorithm.initial(module.initial_state))
    lora_obstacle = without_factors(algorithm, tensor_names, sent)
    reasons = obstacles(settings, bool(data.public_size), bool(data.val_dataloader()), lora_obstacle)
    diagnostics = choose_diagnostics(requested, reasons)
    if requested is True:
        _announce_skipped(reasons, has_lora=bool(tensor_names.factors))
    return replace(settings, diagnostics=diagnostics)


def _announce_skipped(reasons: dict[Diagnostic, str], has_lora: bool) -> None:
    """Log which diagnostics are skipped, grouped by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        # Nobody without LoRA expects its residual.
        if has_lora or name != "lora_residual":
            names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        rank_zero_info(f"diagnostics: skipping {', '.join(names)}: {reason}")


def dry_run_foreign_classes(context: RunContext) -> None:
    """Dry-run two rounds on made-up gradients if the algorithm or the server rule is not one of perada's.

    Perada's are covered by its tests. If the algorithm trains an ensemble of models, only the rule is run.

    Raises:
        ValueError: If a method fails, or returns states that do not fit.
    """
    settings = context.settings
    data = context.data
    algorithm = settings.algorithm
    if not (is_foreign(algorithm) or is_foreign(settings.rule)):
        return
    dry_run_rounds(
        Algorithm() if algorithm.is_ensemble else algorithm,
        settings.rule,
        context.module.tensor_names,
        context.module.initial_state(0),
        settings.phases,
        num_clients=data.num_clients,
        clients_per_round=settings.clients_per_round or data.num_clients,
        num_classes=data.num_classes,
        task=settings.training.task,
    )


def set_up_feature_cache(context: RunContext, image: Tensor) -> FrozenTrunk | None:
    """Have the data serve features of the frozen trunk in place of images, where that pays off or is requested.

    Args:
        context: The run.
        image: A prepared image (channels, height, width), to find the trunk with.

    Returns:
        The trunk; None if images are served.

    Raises:
        OptionError: If ``cache_features=True``, and there is no frozen trunk.
    """
    data = context.data
    module = context.module
    requested = module.training_options.cache_features
    if requested is False:
        return None
    min_share = 0.0 if requested else MIN_TRUNK_SHARE
    trunk = module.engine.find_trunk(context.on_model_device(image), min_share)
    if trunk is None:
        if requested:
            raise OptionError(
                "cache_features=True requires frozen layers before all trained ones, but this model has none; leave "
                "cache_features out, or choose an adapter that leaves some (head, lora)",
                name="cache_features",
                value=True,
            )
        return None

    shared = current_shared_features()

    def encode(images: Tensor) -> Tensor:
        prepared = data.prepare(images.to(module.device))
        if shared is None:
            with context.precision():
                return module.engine.features(prepared)

        def compute() -> KeptFeatures:
            with context.precision():
                return trunk.keep(module.engine.features(prepared))

        key = _key_of_features(context, trunk, prepared)
        return trunk.take(shared.get_or_compute(key, compute))

    data.use_features(encode, trunk.size, tuple(trunk.image))
    return trunk


def _key_of_features(context: RunContext, trunk: FrozenTrunk, images: Tensor) -> str:
    """Return a digest of everything on which the features of images depend, to the last bit.

    Args:
        context: The run.
        trunk: Its frozen layers.
        images: Prepared images (B, ...).
    """
    module = context.module
    facts = (
        module.backbone,
        module.frozen_digest,
        trunk.needed,
        images.dtype,
        tuple(images.shape),
        images.device,
        context.trainer.precision,
        module.training_options.channels_last,
        torch.get_num_threads(),
    )
    digest = hashlib.sha256(repr(facts).encode())
    digest.update(images.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
