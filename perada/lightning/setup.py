# SPDX-License-Identifier: Apache-2.0
"""Set-up: all that is checked, in its order, and the privacy of a run, before the first round."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset

from perada.algorithms import Algorithm
from perada.algorithms.dry_run import no_counts
from perada.core.checks import OptionError
from perada.core.rounds import CohortBatch, sample_cohort
from perada.core.seeding import generator
from perada.core.speed import product_seconds
from perada.core.states import State, expand, get_state
from perada.data import Phase
from perada.data.batches.features import FeatureStore
from perada.federation.secure_sums import check_secure_sums
from perada.federation.settings import check_factors, check_rule, check_server_images
from perada.lightning.checks import (
    check_adapter,
    check_batch_norm,
    check_images,
    keep_clients_apart,
    names_sent,
    try_own,
    use_features,
)
from perada.lightning.module import FederatedClassifier
from perada.lightning.parts import Parts
from perada.models.weight_files import SHIPPED_SOURCES
from perada.privacy import Privacy
from perada.privacy.account import Account
from perada.privacy.accounting import check_delta_covers
from perada.privacy.client_level import ClientLevel
from perada.privacy.clipping import check_precision
from perada.privacy.probe import check_clients_apart, check_gradients, check_one_image, check_products
from perada.privacy.protection import Protection
from perada.privacy.rehearsal import Training, check_client_level, rehearse
from perada.results.run_file import DATA_INDEPENDENT_METRICS


def set_up_rounds(parts: Parts, stage: str, protection: Protection | None) -> Protection:
    """Check that model, data and algorithm fit one another, and tell the data how rounds go; return their privacy.

    ``stage`` is Lightning's, ``protection`` the privacy that an earlier set-up planned. A ValueError if something does
    not fit, or privacy that is asked for cannot be kept.
    """
    settings, trainer, data, clients = parts.settings, parts.trainer, parts.data, parts.data.num_clients
    settings.rule.check(max(1, (settings.clients_per_round or clients) // settings.algorithm.modes))
    if settings.rule.needs_factors:
        check_factors(settings, parts.module.tensor_names, names_sent(parts.module, settings.algorithm))
    check_rule(settings)
    check_secure_sums(
        settings, parts.module.tensor_names, settings.algorithm.initial(parts.module.initial_state), clients
    )
    try_own(parts)
    fresh = protection is None or stage == "fit"  # an evaluation before may have planned other rounds
    if fresh or protection is None:
        check_private(parts)
        rounds = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
        with parts.precision():
            protection = protect(parts, rounds)
    data.use_features(None)
    configure_rounds(parts, protection)
    tried = [0]  # whose first batch: where training is private, that of a whole pass
    if settings.private:
        cohort = sample_cohort(settings.seed, 0, clients, settings.clients_per_round)
        tried = cohort[: settings.clients_per_chunk or clients]
    batch = data.first_batch(tried)
    if settings.algorithm.needs_class_counts and batch.classes is None and stage == "fit":
        raise no_counts(settings.algorithm)
    check_first(parts, batch, stage == "fit")
    prefix = use_features(parts, batch.x[0, 0])
    if fresh and settings.privacy is not None and (prefix or stage != "fit"):  # else images were tried already
        with parts.precision():
            try_gradients(settings.privacy, parts.module, batch, features=prefix is not None)
    if prefix is not None and stage == "fit" and isinstance(data.samples_of(data.checked.train), FeatureStore):
        share = f"{prefix.share:.0%} of a forward pass"
        rank_zero_info(
            f"the frozen layers before everything trained, {share}, run once for each image (cache_features)"
        )
    check_server_images(settings, data.public_size, data.validation_size)
    if stage == "fit":
        if trainer.precision == "bf16-mixed" and trainer.strategy.root_device.type == "cpu":
            _tell_of_slow_bfloat16(*map(product_seconds, (torch.float32, torch.bfloat16)))
        if not data.val_dataloader():
            trainer.limit_val_batches = 0  # nothing to evaluate on; Lightning would warn of it
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # every round has its own clients and number of steps
    return protection


def _tell_of_slow_bfloat16(single: float, half: float) -> None:
    """Say that bfloat16 gains nothing, if a product that takes ``single`` seconds otherwise takes ``half`` in it."""
    if half > single:
        rank_zero_info(
            f"precision='bf16-mixed' is not faster on this processor: a product of matrices takes {1e3 * half:.1f} ms "
            f"in bfloat16 and {1e3 * single:.1f} ms in single precision; precision='32-true' is also more exact"
        )


def configure_rounds(parts: Parts, protection: Protection) -> None:
    """Tell the data how batches and clients are drawn: otherwise where training is private."""
    parts.data.configure_rounds(
        seed=parts.settings.seed,
        clients_per_round=parts.settings.clients_per_round,
        phases=parts.settings.phases,
        image=parts.adapted.backbone.image,
        private=None if protection.images is None else protection.images.sampling(),
        eligible=protection.affordable if protection.limited else None,
    )


def check_first(parts: Parts, batch: CohortBatch, fits: bool) -> None:
    """Send a round's first images through the model, which must pass, and each alone where it ``fits`` privately."""
    privacy, module = parts.settings.privacy, parts.module
    check_images(parts, batch.x)
    if not parts.settings.private:  # else a network that mixes images is refused
        keep_clients_apart(parts, batch.x)
    elif fits:
        with parts.precision():
            if privacy is not None:
                check_trained_norms(module)
                try_gradients(privacy, module, batch)
            check_products(parts.trainer.strategy.root_device)  # where it will train: now it may be elsewhere
            x, y, states = (
                parts.on_model_device(batch.x),
                parts.on_model_device(batch.y),
                perturbed_states(module, len(batch.clients)),
            )
            if privacy is not None:
                check_one_image(privacy, module.engine, states, x, y, batch.counts, module.multilabel)
            elif module.engine.kind == "folded" and len(batch.clients) > 1:
                check_clients_apart(module.engine, states, x)
    check_batch_norm(parts)
    check_adapter(parts, batch.x)


def check_private(parts: Parts) -> None:
    """Refuse, by a ValueError with the remedy, what would not be private."""
    settings, trainer, data, module = parts.settings, parts.trainer, parts.data, parts.module
    distils, images = bool(settings.distillation.steps), settings.privacy is not None
    if settings.client_privacy is not None:
        check_client_level(settings.algorithm, settings.rule, settings.weighting, distils)
        check_delta_covers("client_privacy", settings.client_privacy.delta, data.num_clients, "clients")
    if not settings.private:
        return
    name, scaler = type(settings.algorithm).__name__, getattr(trainer.precision_plugin, "scaler", None)
    held_out, samples = data.evaluate_on == "validation", images and settings.weighting == "samples"
    reasons = {
        "texts cannot be used: networks are tried at set-up on images that are changed, which tokens cannot be; leave "
        "privacy and client_privacy out": data.tokens,
        "precision='16-mixed' cannot be used: loss scales, and which steps are skipped, depend on clients' images, "
        "which no ledger counts; give precision='bf16-mixed'": scaler is not None,
        f"{name} compares models on the clients' training images, which no ledger counts; choose "
        "assignment='permutation' and keeps='ensemble'": settings.algorithm.compares_models,
        "evaluate_on='validation' scores models on images held out of the clients' private ones, to choose by, which "
        "no ledger counts; set evaluate_on='test', and choose settings on public data": held_out,
        "weighting='samples' shows the clients' numbers of images without noise; choose 'uniform'": samples,
        f"clip_norm={module.clip_norm} (of the FederatedClassifier) would clip once more, after the noise; leave it "
        "out: privacy.max_norm clips every image's gradient": images and module.clip_norm is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise OptionError(f"privacy: {reason}", name="privacy")
    _check_server_has_no_client_images(parts)
    _check_pretraining(parts)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not monitor.startswith(DATA_INDEPENDENT_METRICS):
            raise OptionError(
                f"privacy: {type(callback).__name__} chooses by {monitor!r}, which may depend on clients' private "
                "images in a way that no ledger counts; train for a fixed number of rounds and keep the last "
                "checkpoint",
                name="privacy",
            )
    for key, value in get_state(module.model).items():
        if value.is_floating_point():
            check_precision(key, value)
    if settings.privacy is not None:
        largest = max(range(data.num_clients), key=lambda client: data.train_sizes[client])
        what = f"training images of client {largest}, the largest"
        check_delta_covers("privacy", settings.privacy.delta, data.train_sizes[largest], what)


def _check_server_has_no_client_images(parts: Parts) -> None:
    """Refuse, by a ValueError, to hand clients' images to the server, whatever it would do with them.

    Distillation, server rules that look at predictions, and diagnostics all read the server's images, and a rule of
    somebody's own may do so too. So what the server has is looked at, and not who reads it.
    """
    division = parts.data.division
    for option in ("public_fraction", "validation_fraction"):
        share = 0.0 if division is None else getattr(division, option)
        if share:
            labels = " with their labels" if option == "validation_fraction" else ""
            raise OptionError(
                f"{option}={share} cannot be used in a private run: it would hand a share of the clients' own images "
                f"to the server{labels}, without clipping, noise or a ledger. Set it to 0, and give images of another "
                "source (data.public), or do without distillation (distillation.steps=0)",
                name=option,
                value=share,
            )
    parts.data.checked.check_overlap()


def _check_pretraining(parts: Parts) -> None:
    """Refuse, by a ValueError, weights of perada's own that were trained on the images that clients have."""
    data = parts.data
    clients = [] if data.data is None else data.data.train
    check_pretraining(parts.module.pretrained, clients if data.division is None else [data.division.dataset])


def check_pretraining(pretrained: bool | str, datasets: Iterable[Dataset[Any]]) -> None:
    """Refuse, by a ValueError, weights of perada's own that were trained on the images of these datasets.

    The frozen backbone then holds what the ledgers promise to hide. Of weights from elsewhere nobody knows it here.
    """
    trained_on = SHIPPED_SOURCES.get(str(pretrained))
    if trained_on is None:
        return
    if any(type(source).__name__ == trained_on for dataset in datasets for source in _sources(dataset)):
        raise OptionError(
            f"privacy: pretrained={pretrained!r} was trained on the images of {trained_on}, which are the clients' "
            "here, and no ledger counts that; give weights that were trained on other images",
            name="pretrained",
            value=pretrained,
        )


def _sources(dataset: Dataset[Any]) -> Iterator[object]:
    """Yield a dataset and those that it is made of: of a Subset, of several together, of a wrapper, of Scanners."""
    left: list[object] = [dataset]
    seen = set[int]()
    while left:
        source = left.pop()
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        yield source
        left.append(getattr(source, "dataset", None))
        several = getattr(source, "datasets", None)
        left += several if isinstance(several, list | tuple) else []


def check_trained_norms(module: FederatedClassifier) -> None:
    """Refuse, by a ValueError, BatchNorm in what is privately trained."""
    trained = [key.removesuffix(".running_var") for key in module.tensor_names.keys if key.endswith("running_var")]
    if trained:
        raise OptionError(
            f"privacy: {trained[0]!r} and {len(trained) - 1} more are BatchNorm layers in what is trained: an image's "
            "gradient then depends on the others of its batch. Choose lora, bottleneck or head, a residual adapter "
            "with norm='group' and train_norms=False (adapter_options), or a backbone with LayerNorm or GroupNorm",
            name="privacy",
        )


def try_gradients(privacy: Privacy, module: FederatedClassifier, batch: CohortBatch, features: bool = False) -> None:
    """Refuse, by a ValueError, a model without private gradients of images (2, 2, ...) made of one, or of features."""
    x = batch.x[0, 0].to(next(module.model.parameters()).device)
    images = torch.stack([x, 1 - x.flip(-1), 2 * x, x.flip(-1)])
    images = module.engine.features(images) if features else images
    y = batch.y[0, 0].to(x.device)
    x, y = images.view(2, 2, *images.shape[1:]), y.expand(2, 2, *y.shape)
    check_gradients(privacy, module.engine, perturbed_states(module, 2), x, y, module.multilabel)


def perturbed_states(module: FederatedClassifier, clients: int) -> State:
    """States (C, ...) near the initial one, all of whose parameters take part."""
    source = generator(0, "probe")
    states = {key: value.clone() for key, value in expand(get_state(module.model), clients).items()}
    for key in module.tensor_names.parameters:
        noise = torch.randn(states[key].shape, generator=source, dtype=states[key].dtype)
        states[key] = (states[key] + 0.02 * noise.to(states[key].device)).requires_grad_()
    return states


def protect(parts: Parts, rounds: int | None) -> Protection:
    """Set up the privacy of so many ``rounds``, ``None`` where that is open; a ValueError if it cannot be kept."""
    settings, data, module = parts.settings, parts.data, parts.module
    clients, algorithm = data.num_clients, settings.algorithm

    def planned(start: int) -> list[int]:
        per_round = settings.clients_per_round
        cohorts = (sample_cohort(settings.seed, r, clients, per_round) for r in range(start, rounds or 0))
        drawn = Counter(client for cohort in cohorts for client in cohort)
        return [drawn[client] for client in range(clients)]

    images = None
    if settings.privacy is not None:
        initial = algorithm.initial(module.initial_state)

        def training(algorithm: Algorithm, phases: tuple[Phase, ...]) -> Training:
            return rehearse(algorithm, module.tensor_names, initial, phases, clients, rounds)

        tuning = algorithm.personalization()
        images = Account(
            settings.privacy,
            data.train_sizes,
            data.batch_size,
            training(algorithm, settings.phases),
            None if tuning is None else training(tuning[0], (tuning[1],)),
            None if rounds is None else planned,
        )
    level = None
    if settings.client_privacy is not None:
        most = max(planned(0)) if settings.client_privacy.target_epsilon is not None else 0
        together = settings.clients_per_round or clients
        level = ClientLevel(settings.client_privacy, settings.seed, together, most, planned, settings.secure_sums)
    return Protection(images, level)
