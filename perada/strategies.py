# SPDX-License-Identifier: Apache-2.0
"""Several devices: a Lightning strategy whose processes each train their own clients."""

import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry


class LostRankError(ConnectionError):
    """Another process of the job is gone."""


class FederatedStrategy(DDPStrategy):
    """One process a device, by the name ``perada``; ``FederatedLoop`` shares the clients of a round out among them.

    Gradients stay where they are: clients are not replicas of one model, so it is not wrapped.
    Options are those of Lightning's DDPStrategy, such as ``process_group_backend`` and ``timeout``.
    """

    strategy_name = "perada"

    def configure_ddp(self) -> None:
        """In the place of a wrapper: all processes start from the weights of rank 0."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)

    def on_exception(self, exception: BaseException) -> None:
        """Say in one line what to do where another process is gone.

        Raises:
            LostRankError: If it is.
        """
        super().on_exception(exception)
        reason = " ".join(str(exception).split())
        broken = isinstance(exception, torch.distributed.DistError) or "gloo" in reason or "NCCL" in reason
        if not broken or not isinstance(exception, RuntimeError):
            return
        launcher = self.launcher
        if launcher is not None:
            launcher.kill(signal.SIGTERM)  # processes that this one started
        module = self.lightning_module
        raise LostRankError(
            f"process {self.global_rank} of {self.world_size} has lost another one, whose own message (or the "
            f"system's, such as out of memory) says why; {_remedy(module.trainer if module else None)} ({reason[:200]})"
        ) from exception


def _remedy(trainer: pl.Trainer | None) -> str:
    """How to go on from the last whole round."""
    written = [
        path
        for callback in (trainer.checkpoint_callbacks if trainer else ())
        for path in (getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""))
        if path and Path(path).is_file()
    ]
    if not written:
        return "no round was over yet: start again"
    newest = max(written, key=lambda path: Path(path).stat().st_mtime_ns)
    return f"go on from {newest} with ckpt_path=last, on any number of devices"


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


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="Shares the clients of a round out among processes"
)
