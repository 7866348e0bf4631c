# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a run: compared with a checkpoint's before loading, and among the processes of a job."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from perada.core.checks import OptionError, check_known, invalid_option
from perada.core.ranks import Ranks
from perada.data import FederatedDataModule
from perada.data.fingerprints import difference_in_content, difference_in_names
from perada.federation.options import Training
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_context import RunContext
from perada.results.restore import CHECKPOINT_KEY
from perada.server import Distillation, ServerRule

COMPUTATION = ("engine", "clients_per_chunk", "channels_last", "cache_features", "torch_compile", "checkpointing")
"""Options of training that control how it is computed; results are the same up to rounding.

Only the number of steps in logs differs, which counts cohort batches: smaller chunks of clients make more of them.
"""
ALLOW_CLIENTS = "clients"
"""What ``resume_allow`` must contain for more clients."""
ALLOW_IMAGES = "images"
"""What ``resume_allow`` must contain for other images or labels of the same clients."""
CLIENT_FIELDS = ("number of clients", "clients' numbers of images", "partition of the data")
"""Fields that may differ between a checkpoint and a run that resumes from it with more clients."""
PLAIN_ROUND_OPTIONS = ("clients_per_round", "weighting", "drop_outliers")
"""Options of the loop, and of its Settings, that a fingerprint has as they are."""
OPTION_NAMES = (
    *[f"training.{field.name}" for field in fields(Training) if field.name not in COMPUTATION],
    "precision",
    "batch_size",
    "sampling",
    "image_size",
    "augmentation",
    "mixing",
    "task",
    *PLAIN_ROUND_OPTIONS,
    "algorithm",
    "server_rule",
    "secure_sums",
    *[f"distillation.{field.name}" for field in fields(Distillation)],
)
"""Names of all options of a fingerprint, which ``resume_allow`` may contain."""


@dataclass(frozen=True)
class RunFingerprint:
    """The record of a run in a checkpoint, in plain types.

    Attributes:
        belongs: What all runs that may load the checkpoint have in common.
        options: Options that change what rounds compute, by the names that users give them. They are compared where
            training resumes.
    """

    belongs: dict[str, Any]
    options: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return {"belongs": self.belongs, "options": self.options}


@dataclass(frozen=True)
class EarlyFingerprint(RunFingerprint):
    """The part of a fingerprint that is known before anything is set up.

    Attributes:
        model: The options ``backbone`` and ``adapter``, which a checkpoint has in its ``info``.
        partition: Data set and partition, as ``partition.json`` has them; empty where the clients' data are given.
    """

    model: dict[str, Any]
    partition: dict[str, str]


def early_fingerprint(loop: Any, module: FederatedClassifier, data: FederatedDataModule) -> EarlyFingerprint:  # noqa: ANN401  # a FederatedLoop, which imports this
    """Return the part of a run's fingerprint that is known before set-up."""
    belongs: dict[str, Any] = {"algorithm": loop.algorithm.kind, "server rule": loop.server_rule.kind}
    if not loop.test_mode:
        belongs["seed"] = loop.seed
    if data.data is not None:
        belongs["number of clients"] = len(data.data.train)
    partition: dict[str, str] = {}
    if data.division is not None:
        partition["dataset"] = repr(data.division.dataset)
        partition["partition"] = repr(data.division.partition)
    return EarlyFingerprint(
        belongs=belongs,
        options=_training_options(loop.training) | _data_options(data) | _round_options(loop, loop.server_rule),
        model={"backbone": module.backbone, "adapter": module.adapter},
        partition=partition,
    )


def run_fingerprint(context: RunContext) -> RunFingerprint:
    """Return the fingerprint of a run that is set up."""
    settings = context.settings
    data = context.data
    module = context.module
    partition_json = json.dumps(data.partition_dict(), sort_keys=True)
    partition = hashlib.sha256(partition_json.encode()).hexdigest()[:16]
    seed: int | str = settings.seed
    if settings.test_mode:
        seed = disguise_seed(settings.seed, salt=partition)
    model = module.model.state_dict()
    belongs = {
        "backbone": context.adapted.backbone.name,
        "adapter": type(context.adapted.config).__name__,
        "algorithm": settings.algorithm.kind,
        "server rule": settings.rule.kind,
        "seed": seed,
        "number of classes": data.num_classes,
        "number of clients": data.num_clients,
        "clients' numbers of images": list(data.train_sizes),
        "partition of the data": partition,
        "trained tensors": {key: list(model[key].shape) for key in module.tensor_names.keys},
        "frozen weights": module.frozen_digest,
    }
    precision = {"precision": str(module.trainer.precision)}
    training = _training_options(module.training_options)
    options = training | precision | _data_options(data) | _round_options(settings, settings.rule)
    return RunFingerprint(belongs, options)


def _training_options(training: Training) -> dict[str, Any]:
    """Return the options of local training that change what rounds compute."""
    options = asdict(training)
    for name in COMPUTATION:
        del options[name]
    return {f"training.{name}": value for name, value in options.items()}


def _data_options(data: FederatedDataModule) -> dict[str, Any]:
    """Return the options of the data module that change what rounds compute."""
    return {
        "batch_size": data.batch_size,
        "sampling": data.sampling,
        "image_size": data.image_size,
        "augmentation": [data.prepare.crop_padding, data.prepare.flip, data.prepare.augment_public],
        "mixing": [data.prepare.mixing.mixup, data.prepare.mixing.cutmix],
        "task": repr(data.chosen_task),
    }


def _round_options(source: Any, rule: ServerRule) -> dict[str, Any]:  # noqa: ANN401  # a FederatedLoop, or its Settings
    """Return the options of the loop that change what rounds compute; a loop and its Settings have the same."""
    options: dict[str, Any] = {name: getattr(source, name) for name in PLAIN_ROUND_OPTIONS}
    options["algorithm"] = repr(source.algorithm)
    options["server_rule"] = repr(rule)
    options["secure_sums"] = repr(source.secure_sums)
    for name, value in asdict(source.distillation).items():
        options[f"distillation.{name}"] = value
    return options


@cache
def disguise_seed(seed: int, salt: str) -> str:
    """Return a digest of a secret seed for comparison; each guess of a seed costs 50 ms."""
    return hashlib.scrypt(str(seed).encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=16).hex()


def cross_rank_fingerprint(context: RunContext, rounds_done: int) -> dict[str, Any]:
    """Return the values that must be equal in all processes of a job, by name and in plain types."""
    fingerprint = run_fingerprint(context)
    trainer = context.trainer
    return {
        **fingerprint.belongs,
        **fingerprint.options,
        "number of rounds (max_epochs)": trainer.max_epochs,
        "number of completed rounds": rounds_done,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
        "eval_batch_size": context.data.eval_batch_size,
        "global_test_clients": context.module.evaluation.global_test_clients,
        "metric": context.module.evaluation.metric,
        "privacy": repr((context.settings.privacy, context.settings.client_privacy)),
    }


def check_ranks_agree(ranks: Ranks, fingerprint: dict[str, Any]) -> None:
    """Raise a ValueError naming the first difference between the processes of a job. A collective.

    Processes that trained different things would wait for one another forever.

    Args:
        ranks: The processes.
        fingerprint: Fingerprint of this process. An entry ``data`` is the data module's fingerprint.
    """
    for rank, other in enumerate(ranks.gather(fingerprint)):
        for name, value in fingerprint.items():
            if name == "data":
                # Datasets that return other images each time are compared by names and labels only.
                other_data = other.get(name, {})
                differs = bool(difference_in_names(other_data, value) or difference_in_content(other_data, value))
            else:
                differs = other.get(name) != value
            if differs:
                subject = f"process {rank} differs from process {ranks.rank} in its {name}"
                raise ValueError(
                    f"{subject}: data and options must be equal in all processes; use a fixed seed for random draws "
                    "in your script"
                )


def check_resume_allow(allowed: object) -> None:
    """Raise an OptionError unless ``resume_allow`` is a list of names that mean something in it."""
    if not isinstance(allowed, list | tuple):
        raise invalid_option("resume_allow", allowed, "a list such as ['training.lr_local']")
    for name in allowed:
        if isinstance(name, str) and name.removeprefix("training.") in COMPUTATION:
            raise OptionError(
                f"resume_allow={name!r} is not needed: the results do not depend on this option, which may always "
                "change; leave it out",
                name="resume_allow",
                value=name,
            )
        check_known("resume_allow", name, (ALLOW_CLIENTS, ALLOW_IMAGES, *OPTION_NAMES))


def early_difference(path: Path, fingerprint: EarlyFingerprint, allowed: Sequence[str], trains: bool) -> str | None:
    """Describe why a checkpoint belongs to a different run, from what is known before set-up.

    Args:
        path: The checkpoint.
        fingerprint: The run's.
        allowed: The run's ``resume_allow``.
        trains: Whether training resumes, so that options are compared.

    Returns:
        The message; None if it may belong to the run. What cannot be read here is left to :func:`check_same_run`.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)[CHECKPOINT_KEY]
        for name, value in fingerprint.model.items():
            saved_value = saved["info"][name]
            # A network or a configuration of the caller's own is compared at set-up.
            if isinstance(value, str) and isinstance(saved_value, str) and value != saved_value:
                return _other_run_message(f"its {name} {_describe_difference(saved_value, value)}", trains)
        partition_file = path.parent.parent / "partition.json"
        if partition_file.is_file() and ALLOW_CLIENTS not in allowed:
            saved_partition = json.loads(partition_file.read_text(encoding="utf-8"))
            for name, option in fingerprint.partition.items():
                if saved_partition.get(name, option) != option:
                    return _other_run_message(
                        f"its {name} {_describe_difference(saved_partition[name], option)}", trains
                    )
        ignored = [*CLIENT_FIELDS] if ALLOW_CLIENTS in allowed else []
        # A text is the mark of a secret seed, of a run in the test mode of privacy.
        if isinstance(saved["belongs"]["seed"], str):
            ignored.append("seed")
        difference = _difference_in_fields(saved["belongs"], fingerprint.belongs, ignored, trains)
        if difference is None and trains:
            difference = _difference_in_options(saved["options"], fingerprint.options, allowed)
        return difference
    except Exception:  # the file may contain anything
        return None


def check_same_run(saved: dict[str, Any], context: RunContext, trains: bool, allowed: Sequence[str]) -> None:
    """Raise a ValueError if a checkpoint belongs to a different run.

    Args:
        saved: The checkpoint's content.
        context: The run, which is set up.
        trains: Whether training resumes, so that options are compared. An evaluation in the test mode of privacy
            need not know the seed.
        allowed: The run's ``resume_allow``: options that may differ, ``clients`` for more clients, and ``images`` for
            other images of the same clients.
    """
    fingerprint = run_fingerprint(context)
    num_clients = fingerprint.belongs["number of clients"]
    has_more_clients = ALLOW_CLIENTS in allowed and saved["belongs"]["number of clients"] != num_clients
    ignored: Sequence[str] = ()
    if has_more_clients:
        # Which images the former clients have is compared where they get their new numbers, in remap_clients.
        ignored = CLIENT_FIELDS
    elif context.settings.test_mode and not trains:
        ignored = ("seed",)
    belongs = fingerprint.belongs
    if not has_more_clients:
        # Names before numbers of images: clients in another order usually differ in both. What comes before them, such
        # as the backbone, explains more.
        names = list(belongs)
        position = names.index("clients' numbers of images")
        _check_fields(saved, {name: belongs[name] for name in names[:position]}, ignored, trains)
        _check_names(saved["data"], context.data.fingerprint, trains)
    _check_fields(saved, belongs, ignored, trains)
    if not has_more_clients:
        _check_content(saved["data"], context, trains, allowed)
    if trains:
        difference = _difference_in_options(saved["options"], fingerprint.options, allowed)
        if difference is not None:
            raise ValueError(difference)


def _check_fields(saved: dict[str, Any], belongs: dict[str, Any], ignored: Sequence[str], trains: bool) -> None:
    """Raise a ValueError if a checkpoint differs from the run in a field that must match."""
    difference = _difference_in_fields(saved["belongs"], belongs, ignored, trains)
    if difference is not None:
        raise ValueError(difference)


def _check_names(saved_data: dict[str, Any], current_data: dict[str, Any], trains: bool) -> None:
    """Raise a ValueError if clients or classes have different names or a different order.

    Their states and their noise are stored by number.
    """
    difference = difference_in_names(saved_data, current_data)
    if difference is None:
        return
    if trains:
        raise ValueError(f"the checkpoint belongs to a different run: {difference}")
    raise ValueError(_other_run_message(difference, trains))


def _check_content(saved_data: dict[str, Any], context: RunContext, trains: bool, allowed: Sequence[str]) -> None:
    """Raise a ValueError if images or labels differ from those that the run was trained on, unless that is allowed."""
    difference = difference_in_content(saved_data, context.data.fingerprint)
    resumes_private_run = trains and context.settings.private
    if difference is None or (ALLOW_IMAGES in allowed and not resumes_private_run):
        return
    if not trains:
        raise ValueError(_other_run_message(difference, trains))
    if resumes_private_run:
        raise ValueError(
            f"the checkpoint belongs to a private run on different data: {difference}; its noise and its ledgers "
            "cover the original images; resume with these in the original order, or start a new run"
        )
    raise ValueError(
        f"the checkpoint belongs to a run on different data: {difference}; resume with the original data in the "
        f"original order, or accept the change with resume_allow=[{ALLOW_IMAGES!r}] "
        f"(--federated.resume_allow=[{ALLOW_IMAGES}])"
    )


def _difference_in_fields(
    saved_fields: dict[str, Any],
    belongs: dict[str, Any],
    ignored: Sequence[str],
    trains: bool,
) -> str | None:
    """Return the message on the first field of ``belongs`` in which a checkpoint differs; None if there is none."""
    for name, value in belongs.items():
        saved_value = saved_fields.get(name)
        if saved_value != value and name not in ignored:
            return _other_run_message(f"its {name} {_describe_difference(saved_value, value)}", trains)
    return None


def _difference_in_options(
    saved_options: dict[str, Any], options: dict[str, Any], allowed: Sequence[str]
) -> str | None:
    """Return the message on the first option in which a checkpoint differs; None if there is none."""
    for name, value in options.items():
        saved_value = saved_options.get(name)
        if saved_value != value and name not in allowed:
            return (
                f"the checkpoint belongs to a run with {name}={_shorten_repr(saved_value)}, but this run has "
                f"{_shorten_repr(value)}; resume with the original value, or accept the change with "
                f"resume_allow=[{name!r}] (--federated.resume_allow=[{name}])"
            )
    return None


def _other_run_message(difference: str, trains: bool) -> str:
    """Return the text of the error for a checkpoint that belongs to a different run."""
    remedy = "resume with the configuration that wrote it"
    if not trains:
        remedy += "; other test images belong in data.shifts (docs/shifts.md)"
    return f"the checkpoint belongs to a different run: {difference}; {remedy}"


def _describe_difference(saved_value: object, value: object) -> str:
    """Describe how two values differ; for dictionaries, only the first difference."""
    if isinstance(saved_value, dict) and isinstance(value, dict):
        for key in saved_value | value:
            if saved_value.get(key) != value.get(key):
                return f"have {key!r} of shape {saved_value.get(key)}, here {value.get(key)}"
    return f"is {_shorten_repr(saved_value)}, here {_shorten_repr(value)}"


def _shorten_repr(value: object, limit: int = 80) -> str:
    """Return the ``repr`` of a value on one line, truncated to ``limit`` characters."""
    text = " ".join(repr(value).split())
    if len(text) <= limit:
        return text
    return f"{text[: limit - 3]}..."
