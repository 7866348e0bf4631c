# SPDX-License-Identifier: Apache-2.0
"""Checks of a trainer, and changes to it, before federated rounds."""

import os
import re
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.core.checks import OptionError, check_choice, check_integer, invalid_option
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.lightning.foreign_callbacks import check_callbacks
from perada.lightning.strategies import FederatedStrategy, started_by_torchrun
from perada.lightning.trainer_attributes import callbacks_of, is_dev_run

WORD_OPTIONS = {"profiler": ("simple", "advanced", "pytorch", "xla"), "gradient_clip_algorithm": ("value", "norm")}
"""Options of a trainer that take one of several strings."""
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "32", "bf16", "16", "64-true", "64", "bf16-true", "16-true")
"""Precisions that Lightning knows, of which :data:`UNSUPPORTED_TRAINER_OPTIONS` rejects some with a reason."""
ALL_DEVICES = ("auto", "-1", -1, None)
"""Values of ``devices`` for all devices of the machine."""


MIN_PROCESSES = 2
"""Number of processes that a CPU of any number of cores may run, so that a run on several can be tried anywhere."""


def check_devices(accelerator: object, devices: object) -> None:
    """Reject an accelerator that this machine lacks, and a number of devices that is impossible.

    Objects of Lightning's classes are left to Lightning.

    Raises:
        OptionError: With the value and the remedy.
    """
    if isinstance(accelerator, str):
        _check_accelerator(accelerator)
    if devices in ALL_DEVICES:
        return
    count = _device_count(devices)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not _is_available("gpu"))
    has_indices = isinstance(devices, list) or (isinstance(devices, str) and "," in devices)
    if count is None or count < 1 or (has_indices and on_cpu):
        requirement = "an integer >= 1, 'auto' for all or, on GPUs, a list of indices such as [0, 1]"
        raise invalid_option("devices", devices, requirement)
    most = max(MIN_PROCESSES, available_cores())
    if on_cpu and count > most:
        raise OptionError(
            f"devices={devices!r} exceeds the {available_cores()} cores that this process may use, and each device is "
            f"a process; request at most {most}",
            name="devices",
            value=devices,
        )
    on_cuda = accelerator == "cuda" or (accelerator in ("auto", "gpu") and torch.cuda.is_available())
    if on_cuda and count > torch.cuda.device_count():
        raise OptionError(
            f"devices={devices!r} exceeds the {torch.cuda.device_count()} GPUs that torch finds; request fewer",
            name="devices",
            value=devices,
        )


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_accelerator(accelerator: str) -> None:
    """Reject an accelerator that is unknown, or that this machine lacks."""
    names = ["auto", "gpu", *AcceleratorRegistry.available_accelerators()]
    check_choice("accelerator", accelerator, sorted(names))
    if accelerator != "auto" and not _is_available(accelerator):
        raise OptionError(
            f"accelerator={accelerator!r} is not available: torch finds no such device on this machine; set 'auto' or "
            "'cpu', or see `perada doctor`",
            name="accelerator",
            value=accelerator,
        )


def _is_available(accelerator: str) -> bool:
    """Return whether this machine has an accelerator."""
    if accelerator == "gpu":
        return torch.cuda.is_available() or torch.backends.mps.is_available()
    is_available: bool = AcceleratorRegistry[accelerator]["accelerator"].is_available()
    return is_available


def _device_count(devices: object) -> int | None:
    """Return the number of devices that an option requests as a number, a list of indices or a string of either.

    None for a value that is neither.
    """
    if isinstance(devices, list):
        is_valid = all(isinstance(index, int) and index >= 0 for index in devices)
        return len(devices) if is_valid else None
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, str) and re.fullmatch(r"\d+(,\d+)*,?", devices.replace(" ", "")):
        if "," not in devices:
            return int(devices)
        return len([index for index in devices.split(",") if index.strip()])
    return None


def check_words(options: Mapping[str, Any]) -> None:
    """Reject invalid strings in a trainer's options; Lightning's messages do not name the option.

    Raises:
        OptionError: With the value and the choice.
    """
    for name, choices in WORD_OPTIONS.items():
        value = options.get(name)
        if isinstance(value, str):
            check_choice(name, value, choices)
    for name in ("max_time", "val_check_interval"):
        value = options.get(name)
        if isinstance(value, str) and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip()):
            requirement = "days, hours, minutes and seconds, such as 00:12:00:00 for half a day, or None"
            raise invalid_option(name, value, requirement)
    precision = options.get("precision")
    if isinstance(precision, str | int) and str(precision) not in PRECISIONS:
        raise invalid_option("precision", precision, "'32-true', 'bf16-mixed' or '16-mixed'")


def check_objects(options: Mapping[str, Any], callbacks: Sequence[object]) -> None:
    """Reject objects of wrong types among a trainer's options, on which Lightning fails without naming the option.

    Args:
        options: The trainer's options.
        callbacks: Its callbacks.

    Raises:
        OptionError: With the value and what is expected.
    """
    for callback in callbacks:
        if not isinstance(callback, pl.Callback):
            raise invalid_option("callbacks", callback, "a Callback or a list of them")
    loggers = options.get("logger")
    if not isinstance(loggers, list | tuple):
        loggers = [loggers]
    for logger in loggers:
        if not isinstance(logger, Logger | bool | None):
            raise invalid_option("logger", logger, "True, False, a Logger or a list of them", "True writes CSV files")
    folder = options.get("default_root_dir")
    if not isinstance(folder, str | os.PathLike | None):
        raise invalid_option("default_root_dir", folder, "the path of a folder")


class _Unsupported(NamedTuple):
    """The values of an option that rounds support, as strings, and why no others."""

    allowed: tuple[str, ...]
    reason: str


UNSUPPORTED_TRAINER_OPTIONS = {
    "accumulate_grad_batches": _Unsupported(
        ("1",), "a batch is one local step of every client; set a larger batch_size"
    ),
    "gradient_clip_val": _Unsupported(
        ("None", "0", "0.0"),
        "it would ignore the division into clients; set training.clip_norm, which clips each client's gradient",
    ),
    "val_check_interval": _Unsupported(
        ("None", "1.0"),
        "models are complete only between rounds; set check_val_every_n_epoch, the rounds between two evaluations",
    ),
    "max_steps": _Unsupported(("-1",), "it would stop within a round; set max_epochs, the number of rounds"),
    "precision": _Unsupported(
        ("32-true", "bf16-mixed", "16-mixed"),
        "it casts all weights; set 'bf16-mixed', '16-mixed' or '32-true'",
    ),
}
"""Options of a trainer that federated rounds support only for some values."""


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise a ValueError if a trainer has options or callbacks that federated rounds do not support.

    Raises:
        ValueError: With the value, the reason and the remedy.
    """
    if trainer.world_size > 1 and not isinstance(trainer.strategy, FederatedStrategy):
        strategy = type(trainer.strategy).__name__
        raise OptionError(
            f"strategy={strategy} is not supported on {trainer.world_size} devices: clients are not replicas of one "
            "model; set strategy='perada'",
            name="strategy",
            value=strategy,
        )
    if started_by_torchrun() and trainer.world_size != int(os.environ["WORLD_SIZE"]):
        options = f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes}"
        raise ValueError(
            f"{options} do not match the {os.environ['WORLD_SIZE']} processes that torchrun started; leave both out"
        )
    check_callbacks(trainer)
    # Lightning accepts 0, and divides by it after the first round.
    check_integer(
        "check_val_every_n_epoch",
        trainer.check_val_every_n_epoch,
        1,
        optional=True,
        hint="set limit_val_batches=0 for no evaluation",
    )
    for name, unsupported in UNSUPPORTED_TRAINER_OPTIONS.items():
        value = getattr(trainer, name)
        # fast_dev_run sets max_steps.
        is_set_by_dev_run = name == "max_steps" and is_dev_run(trainer)
        if str(value) not in unsupported.allowed and not is_set_by_dev_run:
            raise OptionError(f"{name}={value!r} is not supported: {unsupported.reason}", name=name, value=value)


def loss_scaler(trainer: pl.Trainer) -> torch.amp.GradScaler | None:
    """Return a copy of the loss scaler of the trainer's precision; None without one.

    A copy, since loading a checkpoint changes the options of the trainer's.
    """
    scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return copy(scaler)


def set_up_trainer(trainer: pl.Trainer, loop: type[pl.Callback]) -> None:
    """Check a trainer, and configure it for atomic checkpoints and separate clients per process.

    Each process gets the batches as the data module gives them, and logs the same values, those of all clients.

    Args:
        trainer: The trainer.
        loop: The class of the loop, of which there must be one.

    Raises:
        ValueError: If the trainer has several loops, or options that rounds do not support.
    """
    if sum(isinstance(callback, loop) for callback in callbacks_of(trainer)) > 1:
        raise ValueError(f"the Trainer has several {loop.__name__}s among its callbacks; pass only one")
    check_trainer(trainer)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # Lightning's default, not the caller's choice
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        # Lightning's own handler would save in the middle of a round.
        handler = partial(_requeue_job, trainer)
        trainer._signal_connector._slurm_sigusr_handler_fn = handler  # type: ignore[method-assign]  # a method of Lightning's, which has no option for it
    if trainer.world_size > 1:
        # Lightning would divide the steps of a round among the processes; the data module divides its clients.
        trainer._accelerator_connector.use_distributed_sampler = False
        trainer._signal_connector._sigterm_notifier_fn = partial(_note_sigterm, trainer)  # type: ignore[method-assign]  # Lightning's hangs, see there
        # Lightning advises sync_dist=True, which would average values that are equal in all processes.
        warnings.filterwarnings(
            "ignore", "It is recommended to use .* when logging on epoch level in distributed setting"
        )


def _requeue_job(trainer: pl.Trainer, signum: int, frame: object) -> None:
    """Requeue the Slurm job of this run, which ends it. It goes on from the checkpoint of its last complete round.

    Lightning's own handler (2.6.6) first writes a checkpoint, for which all processes communicate. They are in the
    middle of a round, each of them elsewhere and maybe in another collective.
    """
    if not trainer.is_global_zero:
        return
    job_id = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    answer = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = " ".join(answer.stderr.split())
        rank_zero_warn(f"Slurm job {job_id} could not be requeued ({reason}); resume the run with --ckpt_path last")


def _note_sigterm(trainer: pl.Trainer, signum: int, frame: object) -> None:
    """End this process and those that it started after the current step; the others then lose their connection to it.

    Lightning's own handler (2.6.6) broadcasts to the other processes at once. In the middle of another collective they
    take this for a part of it, or none of them ever ends.
    """
    if not trainer.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)
    trainer._signal_connector.received_sigterm = True
