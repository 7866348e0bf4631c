# SPDX-License-Identifier: Apache-2.0
"""Set-up before the first round: all checks in order, the privacy of the run, and the batches of rounds."""

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from perada.algorithms.dry_run import no_counts
from perada.core.rounds import CohortBatch, sample_cohort
from perada.core.speed import product_seconds
from perada.data.batches.features import FeatureStore
from perada.engine.frozen_trunk import FrozenTrunk
from perada.federation.secure_sums import check_secure_sums
from perada.federation.settings import check_factors, check_rule, check_server_images
from perada.lightning.checks import (
    check_adapter,
    check_batch_norm,
    check_folding,
    check_images,
    dry_run_foreign_classes,
    names_sent,
    set_up_feature_cache,
)
from perada.lightning.parts import Parts
from perada.lightning.privacy_setup import (
    check_private,
    check_private_gradients,
    check_trained_norms,
    plan_privacy,
    states_near_initial,
)
from perada.privacy.model_checks import check_clients_apart, check_one_image, check_products
from perada.privacy.protection import Protection


def set_up_rounds(parts: Parts, stage: str, protection: Protection | None) -> Protection:
    """Check that model, data and algorithm are compatible, and configure the data for rounds.

    Args:
        parts: The run.
        stage: Lightning's stage: ``fit``, ``validate``, ``test`` or ``predict``.
        protection: The privacy that an earlier set-up planned, if there was one.

    Returns:
        The privacy of the run.

    Raises:
        ValueError: If something does not fit, or the requested privacy cannot be kept.
    """
    settings = parts.settings
    data = parts.data
    trains = stage == "fit"
    _check_algorithm_and_rule(parts)
    if trains:
        # An evaluation before the fit may have planned another number of rounds.
        protection = None
    plans_privacy = protection is None
    if protection is None:
        check_private(parts)
        with parts.precision():
            protection = plan_privacy(parts, _number_of_rounds(parts))
    # A former set-up may have cached features. The first batch must have images.
    data.use_features(None)
    configure_rounds(parts, protection)
    batch = _first_batch(parts)
    if settings.algorithm.needs_class_counts and batch.classes is None and trains:
        raise no_counts(settings.algorithm)
    check_first_batch(parts, batch, trains)
    trunk = set_up_feature_cache(parts, batch.x[0, 0])
    # Gradients of images were checked with the first batch where the run trains on images.
    needs_gradient_check = trunk is not None or not trains
    if plans_privacy and settings.privacy is not None and needs_gradient_check:
        with parts.precision():
            check_private_gradients(settings.privacy, parts.module, batch, features=trunk is not None)
    if trunk is not None and trains:
        _announce_cached_features(parts, trunk)
    check_server_images(settings, data.public_size, data.validation_size)
    if trains:
        _prepare_trainer(parts)
    return protection


def _check_algorithm_and_rule(parts: Parts) -> None:
    """Check algorithm, server rule and secure sums against the names of the trained tensors."""
    settings = parts.settings
    tensor_names = parts.module.tensor_names
    num_clients = parts.data.num_clients
    per_round = settings.clients_per_round or num_clients
    # Each of several global models is aggregated from its share of a round's clients.
    settings.rule.check(max(1, per_round // settings.algorithm.modes))
    if settings.rule.needs_factors:
        check_factors(settings, tensor_names, names_sent(parts.module, settings.algorithm))
    check_rule(settings)
    initial = settings.algorithm.initial(parts.module.initial_state)
    check_secure_sums(settings, tensor_names, initial, num_clients)
    dry_run_foreign_classes(parts)


def _number_of_rounds(parts: Parts) -> int | None:
    """Return the trainer's number of rounds; None if it is open."""
    rounds = parts.trainer.max_epochs
    if rounds is None or rounds < 0:
        return None
    return rounds


def configure_rounds(parts: Parts, protection: Protection) -> None:
    """Configure how the data draws clients and batches, which differs if training is private."""
    images = protection.images
    parts.data.configure_rounds(
        seed=parts.settings.seed,
        clients_per_round=parts.settings.clients_per_round,
        phases=parts.settings.phases,
        image=parts.adapted.backbone.image,
        private=None if images is None else images.sampling(),
        eligible=protection.affordable if protection.limited else None,
    )


def _first_batch(parts: Parts) -> CohortBatch:
    """Return the first batch of client 0 or, where training is private, of all clients of a forward pass."""
    settings = parts.settings
    if not settings.private:
        return parts.data.first_batch([0])
    # Whether clients are kept apart is checked with as many as are folded in a round.
    cohort = sample_cohort(settings.seed, 0, parts.data.num_clients, settings.clients_per_round)
    return parts.data.first_batch(cohort[: settings.clients_per_chunk or parts.data.num_clients])


def check_first_batch(parts: Parts, batch: CohortBatch, trains: bool) -> None:
    """Run a round's first images through the model and, for private training, check each image's influence.

    Args:
        parts: The run.
        batch: The first local step of some clients.
        trains: Whether the run trains, and does not only evaluate.

    Raises:
        ValueError: If an image does not pass, or private training would not be private.
    """
    check_images(parts, batch.x)
    if not parts.settings.private:
        check_folding(parts, batch.x)
    elif trains:
        # In place of falling back to the loop, a network that mixes images is rejected.
        with parts.precision():
            _check_images_apart(parts, batch)
    check_batch_norm(parts)
    check_adapter(parts, batch.x)


def _check_images_apart(parts: Parts, batch: CohortBatch) -> None:
    """Raise a ValueError if one image influences the gradients of others, or one client those of others."""
    privacy = parts.settings.privacy
    module = parts.module
    if privacy is not None:
        check_trained_norms(module)
        check_private_gradients(privacy, module, batch)
    # On the device that it will train on: at set-up the model may be elsewhere.
    check_products(parts.trainer.strategy.root_device)
    x = parts.on_model_device(batch.x)
    y = parts.on_model_device(batch.y)
    states = states_near_initial(module, len(batch.clients))
    if privacy is not None:
        check_one_image(privacy, module.engine, states, x, y, batch.counts, module.multilabel)
    elif module.engine.kind == "folded" and len(batch.clients) > 1:
        check_clients_apart(module.engine, states, x)


def _announce_cached_features(parts: Parts, trunk: FrozenTrunk) -> None:
    """Log that features of the frozen trunk are cached, if they fit into the cache."""
    if isinstance(parts.data.samples_of(parts.data.checked.train), FeatureStore):
        rank_zero_info(
            f"caching features: the frozen layers before all trained ones ({trunk.share:.0%} of a forward pass) run "
            "once per image (cache_features)"
        )


def _prepare_trainer(parts: Parts) -> None:
    """Configure the trainer for rounds, and warn of a precision that is not faster."""
    trainer = parts.trainer
    if trainer.precision == "bf16-mixed" and trainer.strategy.root_device.type == "cpu":
        announce_slow_bfloat16(product_seconds(torch.float32), product_seconds(torch.bfloat16))
    if not parts.data.val_dataloader():
        trainer.limit_val_batches = 0  # or Lightning would warn that there is nothing to validate on
    # Every round has its own clients and number of steps.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # Lightning sets it without declaring it


def announce_slow_bfloat16(single_seconds: float, half_seconds: float) -> None:
    """Log that bfloat16 is not faster than single precision, with the time of a matrix product in each."""
    if half_seconds > single_seconds:
        rank_zero_info(
            f"precision='bf16-mixed' is not faster on this processor: a matrix product takes {1e3 * half_seconds:.1f} "
            f"ms in bfloat16 and {1e3 * single_seconds:.1f} ms in single precision; precision='32-true' is also more "
            "exact"
        )
