# SPDX-License-Identifier: Apache-2.0
"""A strategy for several devices, each of whose processes trains its own clients."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from perada.core.checks import check_known

LOST = (
    "lost another process; see that process's message (or the system's, such as out of memory) for the cause. The job "
    "ends; resume with ckpt_path=last, on any number of devices, or start again if no round was saved"
)
"""Message after the name of a process when another process has ended."""


class LostRankError(ConnectionError):
    """Raised when another process of the job has ended."""


class _WatchingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a message when one of its processes is lost.

    Lightning (2.6.6) watches them too, and kills this process without a word.
    """

    children: Sequence[subprocess.Popen[bytes]] = ()

    def _call_children_scripts(self) -> None:
        """Start the other processes, and a thread that watches them."""
        super()._call_children_scripts()
        self.children = self.procs
        self.procs = []  # so that Lightning's observer has nothing to watch
        threading.Thread(target=self._watch_children, daemon=True).start()

    def _watch_children(self) -> None:
        """Wait until a child process fails, then end the whole job."""
        while not any(process.poll() for process in self.children):
            time.sleep(0.5)
        # What ended that process, such as a lost connection, may be about to end this one with a better message.
        time.sleep(2)
        print(f"perada: error: process 0 {LOST}", file=sys.stderr, flush=True)
        self.kill(signal.SIGKILL)
        # The main thread may wait in a collective, which no exception reaches.
        os._exit(1)

    def kill(self, signum: int | signal.Signals) -> None:
        """Send a signal to the child processes."""
        for process in self.children:
            process.send_signal(signum)


class FederatedStrategy(DDPStrategy):
    """One process for each device, by the name ``perada``; ``FederatedLoop`` divides the clients of a round among them.

    The module is not wrapped in DistributedDataParallel: clients are not replicas of one model, so gradients stay in
    their process. The options are those of Lightning's DDPStrategy, such as ``process_group_backend`` and ``timeout``.
    """

    strategy_name = "perada"

    def _configure_launcher(self) -> None:
        """Replace Lightning's launcher of processes by one that watches them."""
        super()._configure_launcher()
        # Under torchrun, or with processes that are started by hand, there is no launcher.
        if isinstance(self._launcher, _SubprocessScriptLauncher) and self.cluster_environment is not None:
            self._launcher = _WatchingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def configure_ddp(self) -> None:
        """Send the weights of rank 0 to all processes, which the wrapper would do."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)

    def on_exception(self, exception: BaseException) -> None:
        """Raise a LostRankError with a remedy if the exception stems from the loss of another process."""
        super().on_exception(exception)
        if not isinstance(exception, RuntimeError):
            return
        reason = " ".join(str(exception).split())
        # Not every backend has a class for a broken connection: gloo raises a plain RuntimeError.
        is_lost_connection = isinstance(exception, torch.distributed.DistError) or "gloo" in reason or "NCCL" in reason
        if not is_lost_connection:
            return
        if self.launcher is not None:
            self.launcher.kill(signal.SIGTERM)
        process = f"process {self.global_rank} of {self.world_size}"
        raise LostRankError(f"{process} {LOST} ({reason[:200]})") from exception


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process, which fixes the number of processes."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def device_defaults() -> dict[str, Any]:
    """Return the default ``devices`` and ``num_nodes``: one device, or one per process that torchrun started."""
    if not started_by_torchrun():
        return {"devices": 1}
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}


def choose_strategy(strategy: object, devices: object, num_nodes: int) -> Any:  # noqa: ANN401  # what Trainer takes
    """Return the requested strategy or, by default, perada's if there is more than one device.

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
    is_single_device = count in (0, 1, "1") and num_nodes == 1
    return "auto" if is_single_device else FederatedStrategy.strategy_name


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="Divides the clients of a round among processes"
)
