# SPDX-License-Identifier: Apache-2.0
"""Several devices: a strategy whose processes each train their own clients, and what must be alike in all of them."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from perada.core.ranks import Ranks
from perada.data import FederatedDataModule
from perada.federation.settings import Settings
from perada.lightning.checkpoint import training_options
from perada.lightning.module import FederatedClassifier


class LostRankError(ConnectionError):
    """Another process of the job is gone."""


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, which also says that a process it started is lost: Lightning would only kill this one."""

    trainer: pl.Trainer | None = None
    started: Sequence[subprocess.Popen[bytes]] = ()

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> object:
        """Start the other processes, then call ``function``."""
        self.trainer = trainer
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self.started, self.procs = self.procs, []  # Lightning's observer has nothing to watch
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not any(process.poll() for process in self.started):
            time.sleep(0.5)
        time.sleep(2)  # what ended one process may be about to end this one, with a message of its own
        print(f"perada: error: {_lost(self.trainer, 'process 0')}", file=sys.stderr, flush=True)
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
        module = self.lightning_module
        who = f"process {self.global_rank} of {self.world_size}"
        raise LostRankError(f"{_lost(module.trainer if module else None, who)} ({reason[:200]})") from exception


def _lost(trainer: pl.Trainer | None, who: str) -> str:
    """What happened, and how to resume from the last whole round."""
    happened = (
        f"{who} has lost another one, whose own message (or the system's, such as out of memory) says why; the job ends"
    )
    written = [
        path
        for callback in (trainer.checkpoint_callbacks if trainer else ())
        for path in (getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""))
        if path and Path(path).is_file()
    ]
    if not written:
        return f"{happened}. There is no checkpoint yet: start again"
    newest = max(written, key=lambda path: Path(path).stat().st_mtime_ns)
    return f"{happened}. Resume from {newest} with ckpt_path=last, on any number of devices"


def started_by_torchrun() -> bool:
    """Whether torchrun started this process, so that the number of processes is settled."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def device_defaults() -> dict[str, Any]:
    """``devices`` and ``num_nodes`` where none were asked for: one device, or as many as torchrun started processes."""
    if not started_by_torchrun():
        return {"devices": 1}
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": int(os.environ["WORLD_SIZE"]) // local}


def choose_strategy(strategy: object, devices: object, num_nodes: int) -> Any:  # noqa: ANN401  # what Trainer takes
    """The strategy asked for; where none was, perada's for more than one device.

    >>> choose_strategy("auto", 1, 1), choose_strategy("auto", 2, 1), choose_strategy("ddp", 2, 1)
    ('auto', 'perada', 'ddp')
    """
    if strategy not in (None, "auto"):
        return strategy
    count = len(devices) if isinstance(devices, list) else devices
    if count in ("auto", "-1", -1):
        count = torch.cuda.device_count()
    return "auto" if count in (0, 1, "1") and num_nodes == 1 else FederatedStrategy.strategy_name


def share_work(trainer: pl.Trainer) -> None:
    """Leave the batches as the datamodule gives them, and the logged values as they are on every process."""
    # Lightning would divide the steps of a round among the processes; the datamodule divides its clients.
    trainer._accelerator_connector.use_distributed_sampler = False
    trainer._signal_connector._sigterm_notifier_fn = partial(_note_sigterm, trainer)  # type: ignore[method-assign]  # of Lightning, whose own hangs
    # Every process logs the same values, those of all clients.
    warnings.filterwarnings("ignore", "It is recommended to use .* when logging on epoch level in distributed setting")


def _note_sigterm(trainer: pl.Trainer, signum: int, frame: object) -> None:
    """Let this process end after its step, and those that it started; the others notice that it is gone.

    Lightning's own handler sends a tensor to the others, wherever they are. In the middle of another exchange it is
    taken for a part of that, or neither ever ends.
    """
    if not trainer.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)
    trainer._signal_connector.received_sigterm = True


def options_here(
    settings: Settings, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, done: int
) -> dict[str, Any]:
    """Options that change what a run computes or how often its processes meet, in plain types.

    The run is resumed from a checkpoint with ``done`` rounds behind it, or begins with 0.
    """
    return training_options(settings, data, module) | {
        "number of rounds (max_epochs)": trainer.max_epochs,
        "number of rounds behind it": done,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
        "eval_batch_size": data.eval_batch_size,
        "global_test_clients": module.global_test_clients,
        "metric": module.metric,
        "privacy": repr((settings.privacy, settings.client_privacy)),
    }


def check_alike(ranks: Ranks, belongs: dict[str, Any]) -> None:
    """Refuse, by a ValueError that names the first difference, processes that are about to train different things."""
    for rank, other in enumerate(ranks.gather(belongs)):
        for name, value in belongs.items():
            if other.get(name) != value:
                raise ValueError(
                    f"process {rank} has another {name} than process {ranks.rank}: data and options must be the same "
                    "in all; draw what is random in your script from a fixed seed"
                )


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="Shares the clients of a round out among processes"
)
