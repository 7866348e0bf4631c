# SPDX-License-Identifier: Apache-2.0
"""What is refused at set-up, because rounds cannot do it or data and model do not fit."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from perada.algorithms import Algorithm
from perada.algorithms.trial import is_own, try_rounds
from perada.core.checks import check_choice, check_number, check_whole
from perada.data import FederatedDataModule
from perada.engine.engine import check_fold
from perada.federation.diagnostics import Diagnostic, choose, obstacles
from perada.federation.federation import Federation
from perada.federation.settings import Settings, check_rule
from perada.lightning.module import FederatedClassifier
from perada.lightning.strategies import FederatedStrategy, started_by_torchrun
from perada.server import Distillation, ServerRule, client_weights
from perada.server.aggregate import Weighting


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse, by a ValueError, a trainer that is set to what federated rounds cannot do."""
    if trainer.world_size > 1 and not isinstance(trainer.strategy, FederatedStrategy):
        raise ValueError(
            f"strategy={type(trainer.strategy).__name__} cannot be used on {trainer.world_size} devices: clients are "
            "not replicas of one model; give strategy='perada'"
        )
    if started_by_torchrun() and trainer.world_size != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes} cannot be used: torchrun started "
            f"{os.environ['WORLD_SIZE']} processes; leave both out"
        )
    check_precision(trainer.precision)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ValueError(
                f"{type(callback).__name__} cannot be used: it trains steps on trial, which belong to no round and, in "
                "private training, to no ledger; set batch_size and the learning rates yourself"
            )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} cannot be used: a batch is one local step of "
            "every client; give a larger batch_size"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} cannot be used: it does not know the clients; give "
            "clip_norm to the FederatedClassifier, which clips each client's gradient"
        )
    if trainer.val_check_interval not in (None, 1.0) or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval} cannot be used: models are there only between rounds; "
            "give check_val_every_n_epoch, the number of rounds between two evaluations"
        )
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        raise ValueError(
            f"max_steps={trainer.max_steps} cannot be used: it would stop within a round; give max_epochs, the number "
            "of rounds"
        )


def check_precision(precision: object) -> None:
    """Refuse, by a ValueError, a precision that rounds do not support, also where it would be replaced on a CPU."""
    if str(precision) not in ("None", "32", "32-true", "bf16-mixed", "16-mixed", "16"):
        raise ValueError(
            f"precision={precision!r} cannot be used: it casts whole models; give 'bf16-mixed', '16-mixed' or '32-true'"
        )


def check_rounds(
    clients_per_round: object, local_epochs: object, local_steps: object, seed: object, resume_allow: object
) -> None:
    """Refuse, by a ValueError, options of the rounds that are out of range or of another type."""
    check_whole("clients_per_round", clients_per_round, optional=True)
    check_whole("local_steps", local_steps, optional=True)
    check_number("local_epochs", local_epochs, above=0, optional=True)
    check_whole("seed", seed, 0, most=None)
    if resume_allow is not None and not isinstance(resume_allow, list | tuple):
        raise ValueError(f"resume_allow={resume_allow!r} cannot be used; give a list of options, such as ['lr_local']")


def check_weighting(weighting: Weighting, rule: ServerRule) -> None:
    """Refuse, by a ValueError, an unknown weighting, and weights where the server's rule has none."""
    client_weights(weighting, [1])
    if weighting == "samples" and not rule.weighted:
        raise ValueError(
            f"weighting='samples' cannot be used with {type(rule).__name__}, which has no weights; choose "
            "weighting='uniform'"
        )


def check_robust(max_failures: object, refuse_far: object, client_privacy: object) -> None:
    """Refuse, by a ValueError, what is not a limit of failures, and leaving out clients whom privacy counts."""
    check_whole("max_failures", max_failures, 0, optional=True, hint="no limit by default")
    check_choice("refuse_far", refuse_far, [False, True])
    if refuse_far and client_privacy is not None:
        raise ValueError(
            "refuse_far=True cannot be used with client_privacy, whose account is of a mean of all clients' updates, "
            "each clipped to one norm; leave it out"
        )


def keep_clients_apart(module: FederatedClassifier, x: Tensor) -> None:
    """Take the loop where folding the clients' real images ``x`` (C, B, ...) would change what a client computes.

    Raises:
        ValueError: If so, and ``engine="folded"`` was asked for.
    """
    if module.engine.kind == "loop" or module.folds:
        return
    channels_last = module.engine.memory_format is torch.channels_last
    why = check_fold(module.model, x.to(next(module.model.parameters()).device), channels_last)
    module.folds = why is None
    if why is None:
        return
    assert module.adapted is not None
    what = f"backbone {module.adapted.backbone.name!r}: {why}"
    if module.engine_name == "folded":
        raise ValueError(f"engine='folded' cannot run {what}; use engine='loop' or 'auto'")
    warnings.warn(f"engine='auto' takes the loop over clients for {what}", stacklevel=2)
    module.take_loop()


def check_images(x: Tensor, data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Send the first of clients' prepared training images (C, B, ...) through the model, and one of each other set.

    A ValueError if one does not pass, or what comes out are not the logits of the classes.
    """
    first = x[0, :1]
    _check_image("images", first, data, module)
    if data.tokens:
        for token in data.extreme_tokens():
            _check_image(f"texts with token {token}", torch.full_like(first, token), data, module)
    if data.public_size:
        _check_image("public images", data.public_images(torch.tensor([0])), data, module)
    for condition in data.conditions:
        if not (condition.kind or condition.others):  # else they are the clients' own
            images, _ = condition.store.take(torch.tensor([0]), torch.tensor([0]))
            _check_image(f"images of the shift {condition.shift!r}", data.prepare(images), data, module)
    _warn_of_range(x, module)


def _warn_of_range(x: Tensor, module: FederatedClassifier) -> None:
    """Warn where real images, as the model gets them, look as if nobody had normalised them."""
    assert module.adapted is not None
    image, own = module.adapted.backbone.image, isinstance(module.backbone, nn.Module)
    if image is None or module.pretrained is False or own or not x.is_floating_point():
        return
    if float(x.min()) >= 0 and float(x.max()) <= 1 and any(image.mean):
        mean, std = (tuple(round(value, 3) for value in values) for values in (image.mean, image.std))
        rank_zero_warn(
            f"images have values from 0 to 1 and reach backbone {module.adapted.backbone.name!r} as they are, but its "
            f"weights expect mean {mean} and standard deviation {std}: give uint8 images, which are normalised, or "
            "normalise them yourself"
        )


def _check_image(name: str, x: Tensor, data: FederatedDataModule, module: FederatedClassifier) -> None:
    x = x.to(next(module.model.parameters()).device)
    assert module.adapted is not None
    what = (
        f"{name} of shape {tuple(x.shape[1:])} and type {x.dtype} do not fit backbone {module.adapted.backbone.name!r}"
    )
    try:
        with torch.no_grad():
            logits = module.model.eval()(x)
    except Exception as error:  # every layer refuses in its own way
        reason = " ".join(str(error).split())[:200]
        if _runs_without_adapter(module, x):
            remedy = (
                "another adapter" if module.channels_last is not True else "another one, or set channels_last: false"
            )
            raise ValueError(
                f"the adapter ({type(module.adapted.config).__name__}) does not run on backbone "
                f"{module.adapted.backbone.name!r}, which runs without it: {reason}; choose {remedy}"
            ) from error
        remedy = "images of the shape and type it takes (image_size resizes uint8 ones)"
        if data.tokens:
            remedy = "texts of the length that it takes, and tokens that it knows"
        raise ValueError(f"{what}: {reason}; give {remedy}") from error
    if tuple(logits.shape) != (1, data.num_classes):
        raise ValueError(
            f"{what}: what comes out has shape {tuple(logits.shape)} instead of (1, {data.num_classes}); choose "
            "another backbone"
        )


def _runs_without_adapter(module: FederatedClassifier, x: Tensor) -> bool:
    """Whether the images fit the backbone, so that the adapter is at fault."""
    assert module.adapted is not None
    try:
        with torch.no_grad(), module.adapted.peft_model.disable_adapter():
            module.model(x)
    except Exception:  # whatever a layer does; some adapters cannot be taken away
        return False
    return True


def check_batch_norm(data: FederatedDataModule, module: FederatedClassifier, distillation: Distillation | None) -> None:
    """Refuse, by a ValueError, batches of one image for a BatchNorm that is trained: statistics need at least two."""
    if not any(key.endswith("running_var") for key in module.slot.keys):
        return
    smallest = min(range(data.num_clients), key=lambda client: data.train_sizes[client])
    what = "batch_size is 1" if data.batch_size == 1 else ""
    if not what and data.train_sizes[smallest] == 1:
        besides = f" besides what client_validation={data.holdout[0]:g} holds out" if data.holdout[0] else ""
        what = f"client {smallest} has 1 training image{besides}"
    if not what and distillation and distillation.steps and distillation.student_mode == "train":
        what = "the public set has 1 image" if data.public_size == 1 else ""
        what = what or ("distillation: batch_size is 1" if distillation.batch_size == 1 else "")
    if what:
        raise ValueError(
            f"{what}, and the adapter trains BatchNorm layers, which need at least 2 images in a batch; give more, or "
            "choose an adapter without them (head, lora) or a backbone with LayerNorm"
        )


def check_distillation(settings: Settings, data: FederatedDataModule) -> None:
    """Refuse, by a ValueError, what needs public images or a validation set where the server has none."""
    algorithm, distillation = settings.algorithm, settings.distillation
    check_rule(settings, data.public_size, data.validation_size)
    if algorithm.distills and distillation.steps and not data.public_size:
        raise ValueError(
            f"{type(algorithm).__name__} distils {distillation.steps} steps a round, but the data has no "
            "public set; give one (public=...) or set the number of distillation steps to 0"
        )
    if algorithm.distills and distillation.validate_every and not data.validation_size:
        raise ValueError(
            f"distillation: validate_every={distillation.validate_every} needs labelled images on the server, "
            "and the data has none; give server_validation (or validation_fraction), or set validate_every to 0"
        )


def with_diagnostics(settings: Settings, asked: bool | Sequence[Diagnostic], data: FederatedDataModule) -> Settings:
    """The settings, with the diagnostics to be measured; a ValueError for one that is named and cannot be."""
    if not asked:
        return settings
    found = obstacles(settings, bool(data.public_size), bool(data.val_dataloader()))
    chosen = choose(asked, found)
    if asked is True:
        for reason in dict.fromkeys(found.values()):
            names = ", ".join(name for name in found if found[name] == reason)
            rank_zero_info(f"diagnostics: without {names}: {reason}")
    return replace(settings, diagnostics=chosen)


def try_own(settings: Settings, data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Try what somebody else has written; of an ensemble of models only the rule is tried."""
    algorithm, rule = settings.algorithm, settings.rule
    if is_own(algorithm) or is_own(rule):
        tried = Algorithm() if algorithm.is_ensemble else algorithm
        clients = settings.clients_per_round or data.num_clients
        sizes = settings.phases, data.num_clients, clients, data.num_classes
        try_rounds(tried, rule, module.slot, module.initial_state(0), *sizes)


LEAST_SHARE = 0.1
"""Share of a forward pass that the frozen part must be, unless features are asked for."""


def use_features(image: Tensor, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
    """Serve features where that pays, or is asked for; return whether they are served.

    The frozen part is looked for with a prepared image (channels, height, width). A ValueError if features are asked
    for and no frozen part comes before what is trained.
    """
    if module.cache_features is False:
        return False
    image = image.to(next(module.model.parameters()).device)
    prefix = module.engine.find_prefix(image, 0.0 if module.cache_features else LEAST_SHARE)
    if prefix is None:
        if module.cache_features:
            raise ValueError(
                "cache_features=True, and the model has no frozen part that everything trained comes after; leave "
                "cache_features out, or choose an adapter that has (head, lora)"
            )
        return False

    def encode(images: Tensor) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return module.engine.features(data.prepare(images.to(module.device)))

    data.use_features(encode, prefix.size, tuple(prefix.image))
    return True


def check_fresh(
    fitted: bool,
    own: tuple[FederatedClassifier | None, FederatedDataModule | None],
    given: tuple[FederatedClassifier, FederatedDataModule],
) -> None:
    """Refuse, by a ValueError, a loop's second fit, and ``given`` objects of another run than its ``own``."""
    (module, data), another = own, given[0] is not own[0]
    if fitted:
        raise ValueError(
            "this FederatedLoop has been fitted: its rounds would begin once more, and with them the noise and the "
            "ledgers of a private run; make a new FederatedLoop and FederatedClassifier, and resume from a "
            "checkpoint (ckpt_path)"
        )
    if given[0].federation is not None and another:
        raise ValueError(
            "the FederatedClassifier was trained by another FederatedLoop, whose adapters it holds; make a new one"
        )
    if module is not None and (another or given[1] is not data):
        raise ValueError(
            f"this FederatedLoop belongs to another {'FederatedClassifier' if another else 'FederatedDataModule'}, "
            "with which it was used before; make a new one"
        )


def check_alone(trainer: pl.Trainer, kind: type[pl.Callback]) -> None:
    """Refuse, by a ValueError, a trainer with several callbacks of a kind."""
    if sum(isinstance(callback, kind) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]  # set by Lightning
        raise ValueError(f"the Trainer has several {kind.__name__}s among its callbacks; give it one")


def check_not_evaluated(module: FederatedClassifier, resumed: bool) -> None:
    """Refuse, by a ValueError, to begin again with a module that a checkpoint was loaded into for an evaluation."""
    if module.federation is not None and module.federation.rounds_done and not resumed:
        raise ValueError(
            f"the FederatedClassifier holds {module.federation.rounds_done} rounds of a checkpoint that was "
            "evaluated, and fit would begin again at the first; give the checkpoint to fit too (ckpt_path), or "
            "make new objects"
        )


def check_next(round: int, federation: Federation, data: FederatedDataModule) -> None:
    """Refuse, by a ValueError, a round that does not follow the last, or data that a private run did not plan."""
    if round != federation.rounds_done:
        raise ValueError(
            f"round {round} cannot be trained after {federation.rounds_done} rounds: the Trainer has counted "
            "epochs of something else; make a new Trainer"
        )
    if federation.protection.images is not None:
        federation.protection.images.account.check_data(data.train_sizes, data.batch_size)
