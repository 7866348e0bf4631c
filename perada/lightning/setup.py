# SPDX-License-Identifier: Apache-2.0
"""Set-up: all that is checked, in its order, before the first round of a :class:`.FederatedLoop`."""

import pytorch_lightning as pl

from perada.algorithms import ensemble_of
from perada.core.batches import CohortBatch
from perada.data import FederatedDataModule
from perada.federation.settings import Settings
from perada.lightning.checkpoint import write_whole
from perada.lightning.checks import (
    check_batch_norm,
    check_distillation,
    check_images,
    check_trainer,
    keep_clients_apart,
    try_own,
    use_features,
)
from perada.lightning.module import FederatedClassifier
from perada.lightning.private_setup import check_network, check_private, protect, trial_clients, try_gradients
from perada.lightning.strategies import share_work
from perada.privacy.protection import Protection


def set_up_trainer(trainer: pl.Trainer) -> None:
    """Check a trainer, and let it write whole checkpoints and share the clients out among its processes."""
    check_trainer(trainer)
    write_whole(trainer)
    if trainer.world_size > 1:
        share_work(trainer)


def set_up_rounds(
    settings: Settings,
    trainer: pl.Trainer,
    data: FederatedDataModule,
    module: FederatedClassifier,
    stage: str,
    protection: Protection | None,
) -> Protection:
    """Check that model, data and algorithm fit one another, and tell the data how rounds go.

    Args:
        settings: How the rounds go.
        trainer: The trainer.
        data: The clients' images.
        module: The model, built.
        stage: Lightning's, ``fit`` or another.
        protection: The privacy that an earlier set-up planned; ``None`` where there was none.

    Returns:
        The privacy of the rounds.

    Raises:
        ValueError: If something does not fit, or privacy that is asked for cannot be kept.
    """
    clients, algorithm = data.num_clients, settings.algorithm
    algorithm.check(module.slot, clients)
    settings.rule.check(max(1, (settings.clients_per_round or clients) // ensemble_of(algorithm).modes))
    try_own(settings, data, module)
    fresh = protection is None or stage == "fit"  # an evaluation before may have planned other rounds
    if fresh or protection is None:
        check_private(settings, trainer, data, module)
        rounds = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        with trainer.precision_plugin.forward_context():
            protection = protect(settings, rounds, data, module)
    _tell_data(settings, data, module, protection)
    batch = data.trial_batch(trial_clients(settings, clients))
    features = _try_batch(settings, trainer, data, module, batch, stage)
    if fresh and settings.privacy is not None and (features or stage != "fit"):  # else images were tried already
        with trainer.precision_plugin.forward_context():
            try_gradients(settings.privacy, module, batch, features)
    check_distillation(settings, data)
    check_batch_norm(data, module, settings.distillation if algorithm.distills else None)
    if stage == "fit":
        if not data.val_dataloader():
            trainer.limit_val_batches = 0  # nothing to evaluate on; Lightning would warn of it
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # every round has its own clients and number of steps
    return protection


def _tell_data(
    settings: Settings, data: FederatedDataModule, module: FederatedClassifier, protection: Protection
) -> None:
    """Say how batches and clients are drawn: otherwise where training is private."""
    assert module.adapted is not None
    data.use_features(None)
    data.configure_rounds(
        seed=settings.seed,
        clients_per_round=settings.clients_per_round,
        phases=settings.phases,
        image=module.adapted.backbone.image,
        private=None if protection.images is None else protection.images.sampling(),
        eligible=protection.affordable if protection.limited else None,
    )


def _try_batch(
    settings: Settings,
    trainer: pl.Trainer,
    data: FederatedDataModule,
    module: FederatedClassifier,
    batch: CohortBatch,
    stage: str,
) -> bool:
    """Send a round's first images through the model; return whether features are served from now on."""
    check_images(batch.x, data, module)
    if not settings.private:  # else a network that mixes images is refused
        keep_clients_apart(module, batch.x)
    if stage == "fit":
        with trainer.precision_plugin.forward_context():
            check_network(settings, trainer, module, batch)
    return use_features(batch.x[0, 0], trainer, data, module)
