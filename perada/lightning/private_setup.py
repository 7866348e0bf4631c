# SPDX-License-Identifier: Apache-2.0
"""Private training in the federated loop: what is refused, the account of the run, the rounds' batches."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from perada.algorithms import Algorithm, ensemble_of
from perada.core.batches import one_of
from perada.core.rounds import sample_cohort
from perada.core.seeding import generator
from perada.core.states import State, expand, get_state
from perada.data import FederatedDataModule, Phase
from perada.lightning.module import FederatedClassifier
from perada.privacy import ClientPrivacy, calibrate
from perada.privacy.account import Account, Training
from perada.privacy.client_level import ClientLevel
from perada.privacy.client_level_refusals import check_client_level
from perada.privacy.clipping import check_precision
from perada.privacy.independence import check_clients_apart, check_one_image
from perada.privacy.probe import check_gradients, check_products
from perada.privacy.protection import Protection
from perada.privacy.rehearsal import check_unsent, rehearse
from perada.privacy.training import PrivateTraining

if TYPE_CHECKING:
    from perada.lightning.federated_loop import FederatedLoop

OF_CLIENTS = ("personal/", "global/", "train/")
"""Metrics that are computed on clients' images."""


def check_private(
    loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier
) -> None:
    """Refuse what would not be private.

    Raises:
        ValueError: If something is not, with the remedy.
    """
    distils = bool(loop.distillation.steps)
    if loop.client_privacy is not None:
        check_client_level(loop.algorithm, loop.server_rule, loop.weighting, distils)
        if loop.client_privacy.delta >= 1 / data.num_clients:
            rank_zero_warn(
                f"client_privacy: delta={loop.client_privacy.delta} is not below 1 / {data.num_clients}, the number of "
                "clients: it allows to show one client in full; give less"
            )
    if loop.privacy is None and loop.client_privacy is None:
        return
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            "privacy: precision='16-mixed' cannot be used: loss scales, and which steps are skipped, depend on "
            "clients' images, which no ledger counts; give precision='bf16-mixed'"
        )
    _check_selection(loop, trainer, data)
    for key, value in get_state(module.model).items():
        if value.is_floating_point():
            check_precision(key, value)
    if loop.algorithm.distills and distils:
        data.check_public_overlap()
    if loop.privacy is None:
        return
    if loop.weighting == "samples":
        raise ValueError(
            "privacy: weighting='samples' shows the clients' numbers of images without noise; choose "
            "weighting='uniform'"
        )
    if module.clip_norm is not None:
        raise ValueError(
            f"privacy: clip_norm={module.clip_norm} (of the FederatedClassifier) would clip once more, after the "
            "noise; leave it out: privacy.max_norm clips every image's gradient"
        )
    most = max(data.train_sizes)
    if loop.privacy.delta >= 1 / most:
        rank_zero_warn(
            f"privacy: delta={loop.privacy.delta} is not below 1 / {most}, the images of the largest client: it allows "
            "to show one image in full; give less"
        )


def _check_selection(loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule) -> None:
    """Refuse to choose by clients' images, which no ledger counts."""
    name = type(loop.algorithm).__name__
    if ensemble_of(loop.algorithm).compares:
        raise ValueError(
            f"privacy: {name} compares models on the clients' training images (assignment='loss' or keeps='best'), "
            "which no ledger counts; choose assignment='permutation' and keeps='ensemble'"
        )
    if data.evaluates_on == "validation":
        raise ValueError(
            "privacy: evaluate_on='validation' scores models on images held out of the clients' private ones, to "
            "choose by, which no ledger counts; set evaluate_on='test', and choose settings on public data"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning
        monitor = getattr(callback, "monitor", None)
        watches = isinstance(callback, EarlyStopping | ModelCheckpoint) and isinstance(monitor, str)
        if watches and str(monitor).startswith(OF_CLIENTS):
            raise ValueError(
                f"privacy: {type(callback).__name__} chooses by {monitor!r}, a score on clients' private images, which "
                "no ledger counts; train for a fixed number of rounds and keep the last checkpoint"
            )


def check_network(
    loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier
) -> None:
    """Refuse a network in which images, or clients, do not stand alone, by trying the first batch of a round.

    Raises:
        ValueError: If so.
    """
    if loop.privacy is None and loop.client_privacy is None:
        return
    size = module.clients_per_chunk or data.num_clients
    cohort = sample_cohort(loop.seed, 0, data.num_clients, loop.clients_per_round)[:size]
    if loop.privacy is not None:
        _check_batch_norm(module)
        x, y, states = _probe(data, module)
        check_gradients(loop.privacy, module.engine, states, x, y, module.multilabel)
    batch = one_of(data.prepare(next(iter(data.cohort_loader(data.plan_for(cohort, 0))))))
    check_products(trainer.strategy.root_device)  # where it will train: now it may be elsewhere
    device = next(module.model.parameters()).device
    x, y, states = batch.x.to(device), batch.y.to(device), _near(module, len(cohort))
    if loop.privacy is not None:
        check_one_image(loop.privacy, module.engine, states, x, y, batch.counts, module.multilabel)
    elif module.engine.kind == "folded" and len(cohort) > 1:
        check_clients_apart(module.engine, states, x)


def _check_batch_norm(module: FederatedClassifier) -> None:
    trained = [key.removesuffix(".running_var") for key in module.slot.keys if key.endswith("running_var")]
    if trained:
        raise ValueError(
            f"privacy: {trained[0]!r} and {len(trained) - 1} more are BatchNorm layers in what is trained: an image's "
            "gradient then depends on the others of its batch. Choose a residual adapter with norm='group' and "
            "train_norms=False (adapter_options), which leaves the network's own frozen statistics, lora, bottleneck "
            "or head, or a backbone with LayerNorm or GroupNorm"
        )


def _probe(data: FederatedDataModule, module: FederatedClassifier) -> tuple[Tensor, Tensor, State]:
    """Images (2, 2, ...) made of a client's first one, their labels, and states (2, ...) near the initial one."""
    batch = one_of(data.prepare(next(iter(data.cohort_loader(data.plan_for([0], 0))))))
    x = batch.x[0, 0].to(next(module.model.parameters()).device)
    images = torch.stack([x, 1 - x.flip(-1), 2 * x, x.flip(-1)]).view(2, 2, *x.shape)
    y = batch.y[0, 0].to(x.device)
    return images, y.expand(2, 2, *y.shape), _near(module, 2)


def _near(module: FederatedClassifier, clients: int) -> State:
    """States (C, ...) near the initial one, all of whose parameters take part."""
    source = generator(0, "probe")
    states = {key: value.clone() for key, value in expand(get_state(module.model), clients).items()}
    for key in module.slot.parameters:
        noise = torch.randn(states[key].shape, generator=source, dtype=states[key].dtype)
        states[key] = (states[key] + 0.02 * noise.to(states[key].device)).requires_grad_()
    return states


def protect(
    loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier
) -> Protection:
    """Set up the privacy of a run.

    Raises:
        ValueError: If what is asked for cannot be kept.
    """
    if loop.privacy is None and loop.client_privacy is None:
        return Protection()
    rounds = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
    clients = data.num_clients

    def planned(start: int) -> list[int]:
        cohorts = (sample_cohort(loop.seed, r, clients, loop.clients_per_round) for r in range(start, rounds or 0))
        drawn = Counter(client for cohort in cohorts for client in cohort)
        return [drawn[client] for client in range(clients)]

    images = None
    if loop.privacy is not None:
        initial = ensemble_of(loop.algorithm).initial(module.initial_state)

        def training(algorithm: Algorithm, phases: tuple[Phase, ...]) -> Training:
            queries = rehearse(algorithm, module.slot, initial, phases, clients)
            check_unsent(algorithm, module.slot, initial, phases, queries, clients, rounds)
            return Training(phases, queries, algorithm.unsent)

        tuning = loop.algorithm.personalization()
        account = Account(
            loop.privacy,
            data.train_sizes,
            data.batch_size,
            training(loop.algorithm, loop.phases),
            None if tuning is None else training(tuning[0], (tuning[1],)),
            None if rounds is None else planned,
        )
        x, y, states = _probe(data, module)  # once more, where features may by now stand in the place of images
        check_gradients(loop.privacy, module.engine, states, x, y, module.multilabel)
        images = PrivateTraining(account, module.engine, module.multilabel, loop.seed)
    return Protection(
        images, None if loop.client_privacy is None else _client_level(loop, loop.client_privacy, planned)
    )


def _client_level(
    loop: "FederatedLoop", options: ClientPrivacy, planned: Callable[[int], Sequence[int]]
) -> ClientLevel:
    """Privacy of whole clients; with a target, the noise that the client who takes part most often needs."""
    noise = options.noise_multiplier
    if noise is None:
        assert options.target_epsilon is not None
        if not max(planned(0)):
            raise ValueError(
                f"client_privacy: target_epsilon={options.target_epsilon} needs a number of rounds to be calibrated "
                "for; give max_epochs (rounds), or noise_multiplier"
            )
        noise = calibrate(options.target_epsilon, options.delta, 1.0, max(planned(0)), options.accountant)
    level = ClientLevel(options, noise, loop.seed, planned)
    level.check(loop.clients_per_round or loop.num_clients)
    return level


def configure_rounds(loop: "FederatedLoop", data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Say how rounds go: drawn batches and clients are others where training is private."""
    protection = loop.protection
    images = None if protection is None else protection.images
    assert module.adapted is not None
    data.configure_rounds(
        seed=loop.seed,
        clients_per_round=loop.clients_per_round,
        phases=loop.phases,
        image=module.adapted.backbone.image,
        private=None if images is None else images.sampling(),
        eligible=None if protection is None or not protection.limited else protection.affordable,
    )


def warn_spent(loop: "FederatedLoop", clients: Sequence[int]) -> bool:
    """Name those of ``clients`` whose ``max_epsilon`` has no room for another round, and say whether anyone is left."""
    assert loop.protection is not None
    if not loop.protection.limited:
        return True
    able = set(loop.protection.affordable(range(loop.num_clients)))
    spent = [client for client in clients if client not in able]
    if spent and loop.privacy is not None and loop.privacy.max_epsilon is not None:
        rank_zero_warn(
            f"privacy: client {', '.join(map(str, spent))} cannot take part any more: another round would pass "
            f"max_epsilon={loop.privacy.max_epsilon} of its {loop.privacy.ledger} ledger"
        )
    return bool(able)
