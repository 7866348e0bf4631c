# SPDX-License-Identifier: Apache-2.0
"""Trainers: what they may be asked for, and a strategy for several devices whose processes train their own clients."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from perada.core.checks import OptionError, check_choice, check_known
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.lightning.foreign_callbacks import check_callbacks

LOST = (
    "has lost another one, whose own message (or the system's, such as out of memory) says why; the job ends. Resume "
    "with ckpt_path=last, on any number of devices, or start again if no round was saved"
)


class LostRankError(ConnectionError):
    """Another process of the job is gone."""


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, which also says that a process it started is lost: Lightning would only kill this one."""

    started: Sequence[subprocess.Popen[bytes]] = ()

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self.started, self.procs = self.procs, []  # Lightning's observer has nothing to watch
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not any(process.poll() for process in self.started):
            time.sleep(0.5)
        time.sleep(2)  # what ended one process may be about to end this one, with a message of its own
        print(f"perada: error: process 0 {LOST}", file=sys.stderr, flush=True)
        self.kill(signal.SIGKILL)
        os._exit(1)

    def kill(self, signum: int | signal.Signals) -> None:
        """Send a signal to the processes that this one started."""
        for process in self.started:
            process.send_signal(signum)


class FederatedStrategy(DDPStrategy):
    """One process a device, by the name ``perada``; ``FederatedLoop`` shares the clients of a round out among them.

    Gradients stay where they are: clients are not replicas of one model, so it is not wrapped.
    Options are those of Lightning's DDPStrategy, such as ``process_group_backend`` and ``timeout``.
    """

    strategy_name = "perada"

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher) and self.cluster_environment is not None:
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def configure_ddp(self) -> None:
        """In the place of a wrapper: all processes start from the weights of rank 0."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)

    def on_exception(self, exception: BaseException) -> None:
        """Say in one line, by a LostRankError, what to do where another process is gone."""
        super().on_exception(exception)
        reason = " ".join(str(exception).split())
        broken = isinstance(exception, torch.distributed.DistError) or "gloo" in reason or "NCCL" in reason
        if not broken or not isinstance(exception, RuntimeError):
            return
        if self.launcher is not None:
            self.launcher.kill(signal.SIGTERM)
        who = f"process {self.global_rank} of {self.world_size}"
        raise LostRankError(f"{who} {LOST} ({reason[:200]})") from exception


def started_by_torchrun() -> bool:
    """Whether torchrun started this process, so that the number of processes is settled."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def device_defaults() -> dict[str, Any]:
    """``devices`` and ``num_nodes`` where none were asked for: one device, or as many as torchrun started processes."""
    if not started_by_torchrun():
        return {"devices": 1}
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": int(os.environ["WORLD_SIZE"]) // local}


WORDS = {"profiler": ("simple", "advanced", "pytorch", "xla"), "gradient_clip_algorithm": ("value", "norm")}
"""Options of a trainer that take a word, and the words."""


def check_devices(accelerator: object, devices: object) -> None:
    """Refuse an accelerator that is not here, and a number of devices that there cannot be.

    Objects of Lightning's classes are left to Lightning.

    Raises:
        ValueError: With the value and the remedy.
    """
    if isinstance(accelerator, str):
        names = ["auto", "gpu", *AcceleratorRegistry.available_accelerators()]
        check_choice("accelerator", accelerator, sorted(names))
        if accelerator != "auto" and not _is_here(accelerator):
            raise OptionError(
                f"accelerator={accelerator!r} cannot be used: torch finds no such device on this machine; give 'auto' "
                "or 'cpu', or see `perada doctor`",
                name="accelerator",
                value=accelerator,
            )
    count = _device_count(devices)
    if count is None:
        return
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not _is_here("gpu"))
    numbered = isinstance(devices, list) or (isinstance(devices, str) and "," in devices)
    if count < 1 or (numbered and on_cpu):
        raise OptionError(
            f"devices={devices!r} cannot be used; give a whole number of 1 or more, 'auto' for all, or, on GPUs, a "
            "list of their numbers, such as [0, 1]",
            name="devices",
            value=devices,
        )
    cuda = accelerator == "cuda" or (accelerator in ("auto", "gpu") and torch.cuda.is_available())
    here = torch.cuda.device_count() if cuda else count
    if count > here:
        raise OptionError(
            f"devices={devices!r} cannot be used: torch finds {here} GPUs; give fewer", name="devices", value=devices
        )


def check_words(options: Mapping[str, Any]) -> None:
    """Refuse words that a trainer's options do not take, which Lightning would in words that do not name the option.

    Raises:
        OptionError: With the value and the choice.
    """
    for name, choices in WORDS.items():
        value = options.get(name)
        if isinstance(value, str):
            check_choice(name, value, choices)
    for name in ("max_time", "val_check_interval"):
        value = options.get(name)
        if isinstance(value, str) and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip()):
            remedy = "give days, hours, minutes and seconds, such as 00:12:00:00 for half a day, or leave it out"
            raise OptionError(f"{name}={value!r} cannot be used; {remedy}", name=name, value=value, remedy=remedy)


def _is_here(accelerator: str) -> bool:
    if accelerator == "gpu":
        return torch.cuda.is_available() or torch.backends.mps.is_available()
    here: bool = AcceleratorRegistry[accelerator]["accelerator"].is_available()
    return here


def _device_count(devices: object) -> int | None:
    """How many devices are asked for; None for all of them, and -1 for what says nothing of the kind."""
    if devices in ("auto", "-1", -1, None):
        return None
    if isinstance(devices, list):
        return len(devices) if all(isinstance(one, int) and one >= 0 for one in devices) else -1
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, str) and re.fullmatch(r"\d+(,\d+)*,?", devices.replace(" ", "")):
        numbers = [number for number in devices.split(",") if number.strip()]
        return len(numbers) if "," in devices else int(devices)
    return -1


def choose_strategy(strategy: object, devices: object, num_nodes: int) -> Any:  # noqa: ANN401  # what Trainer takes
    """The strategy asked for; where none was, perada's for more than one device.

    >>> choose_strategy("auto", 1, 1), choose_strategy("auto", 2, 1), choose_strategy("ddp", 2, 1)
    ('auto', 'perada', 'ddp')
    """
    if strategy not in (None, "auto"):
        if isinstance(strategy, str):
            check_known("strategy", strategy, StrategyRegistry.available_strategies())
        return strategy
    count = len(devices) if isinstance(devices, list) else devices
    if count in ("auto", "-1", -1):
        count = torch.cuda.device_count()
    return "auto" if count in (0, 1, "1") and num_nodes == 1 else FederatedStrategy.strategy_name


UNSUPPORTED_TRAINER_OPTIONS = {
    "accumulate_grad_batches": (("1",), "a batch is one local step of every client; give a larger batch_size"),
    "gradient_clip_val": (
        ("None", "0", "0.0"),
        "it does not know the clients; give clip_norm to the FederatedClassifier, which clips each client's gradient",
    ),
    "val_check_interval": (
        ("None", "1.0"),
        "models are there only between rounds; give check_val_every_n_epoch, the rounds between two evaluations",
    ),
    "max_steps": (("-1",), "it would stop within a round; give max_epochs, the number of rounds"),
    "precision": (
        ("32-true", "bf16-mixed", "16-mixed"),
        "it casts whole models; give 'bf16-mixed', '16-mixed' or '32-true'",
    ),
}
"""Options of a trainer that rounds have no use for: the values that they may have, and why no other."""


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse, by a ValueError, a trainer that is set to what federated rounds cannot do."""
    if trainer.world_size > 1 and not isinstance(trainer.strategy, FederatedStrategy):
        given, devices = type(trainer.strategy).__name__, trainer.world_size
        why = "clients are not replicas of one model; give strategy='perada'"
        raise OptionError(f"strategy={given} cannot be used on {devices} devices: {why}", name="strategy", value=given)
    if started_by_torchrun() and trainer.world_size != int(os.environ["WORLD_SIZE"]):
        given, started = f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes}", os.environ["WORLD_SIZE"]
        raise ValueError(f"{given} cannot be used: torchrun started {started} processes; leave both out")
    check_callbacks(trainer)
    for name, (allowed, why) in UNSUPPORTED_TRAINER_OPTIONS.items():
        value = getattr(trainer, name)
        if str(value) not in allowed and not (name == "max_steps" and trainer.fast_dev_run):  # type: ignore[attr-defined]  # set by Lightning
            raise OptionError(f"{name}={value!r} cannot be used: {why}", name=name, value=value)


def scaling_of(trainer: pl.Trainer) -> torch.amp.GradScaler | None:
    """The loss scaler of the trainer's precision, None without one; a copy, since a checkpoint changes its options."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return copy(scaler) if scaler is not None and scaler.is_enabled() else None


def set_up_trainer(trainer: pl.Trainer, loop: type[pl.Callback]) -> None:
    """Check a trainer with one ``loop``, and let it write whole checkpoints and share the clients out among processes.

    Each process gets the batches as the datamodule gives them, and logs the same values, those of all clients.
    """
    if sum(isinstance(callback, loop) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]  # set by Lightning
        raise ValueError(f"the Trainer has several {loop.__name__}s among its callbacks; give it one")
    check_trainer(trainer)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not a way of the caller's own
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    if trainer.world_size > 1:
        # Lightning would divide the steps of a round among the processes; the datamodule divides its clients.
        trainer._accelerator_connector.use_distributed_sampler = False
        trainer._signal_connector._sigterm_notifier_fn = partial(_note_sigterm, trainer)  # type: ignore[method-assign]  # of Lightning, whose own hangs
        said = "It is recommended to use .* when logging on epoch level in distributed setting"
        warnings.filterwarnings("ignore", said)


def _note_sigterm(trainer: pl.Trainer, signum: int, frame: object) -> None:
    """Let this process end after its step, and those that it started; the others notice that it is gone.

    Lightning's own handler sends a tensor to the others, wherever they are. In the middle of another exchange it is
    taken for a part of that, or neither ever ends.
    """
    if not trainer.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)
    trainer._signal_connector.received_sigterm = True


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="Shares the clients of a round out among processes"
)
