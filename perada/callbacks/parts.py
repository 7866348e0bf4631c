# SPDX-License-Identifier: Apache-2.0
"""The parts of a run as the federated loop sees them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.callbacks.checkpoint import RoundCheckpoint
from perada.data import CohortBatch, FederatedDataModule, Phase, RoundPlan
from perada.federation import Federation
from perada.module import FederatedClassifier
from perada.rounds import AnyBatch, PrivateSampling, one_of
from perada.store import Storage

if TYPE_CHECKING:
    from perada.callbacks.federated_loop import FederatedLoop

T = TypeVar("T")


def warn_broken(when: str, clients: list[int], consequence: str) -> None:
    """Name the clients whose training went wrong, and say what becomes of it."""
    names = ", ".join(map(str, clients))
    rank_zero_warn(
        f"{when}: the loss of client {names} became NaN or infinite; {consequence}. Lower the learning rate "
        "(of the clients, or of the server's rule where all break) or check the images."
    )


def prepared(
    data: FederatedDataModule, module: FederatedClassifier, plan: RoundPlan, private: PrivateSampling | None = None
) -> Iterator[AnyBatch]:
    """The local steps of a plan, on the model's device."""
    for batch in data.cohort_loader(plan, private):
        yield data.prepare(move_data_to_device(batch, module.device))


def compared(
    trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, plan: RoundPlan
) -> Iterator[CohortBatch]:
    """All training images of a plan's clients, each once, for those who compare the global models on them."""
    epoch, sizes = data.plan_for(plan.clients, plan.round, [Phase("compare", 1)]), data.train_sizes
    for batch in map(one_of, progress(trainer, prepared(data, module, epoch), f"Compare {plan.round}")):
        left = [
            min(rows, sizes[client] - batch.step * rows)
            for client, rows in zip(batch.clients, batch.counts, strict=True)
        ]
        yield batch._replace(counts=tuple(left))  # what fills the last batch was compared already


def progress(trainer: pl.Trainer, steps: Iterable[T], description: str) -> Iterable[T]:
    """``steps`` under a progress bar, where the trainer shows one."""
    bar = trainer.progress_bar_callback
    return tqdm(steps, desc=description, leave=False, disable=not getattr(bar, "is_enabled", False))


def rounds_left(trainer: pl.Trainer, done: int) -> bool:
    """Whether the trainer is to train more than ``done`` rounds."""
    limit = trainer.max_epochs
    return limit is None or not 0 <= limit <= done


def run_folder(trainer: pl.Trainer) -> Path | None:
    """The run's folder; ``None`` where it has none."""
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        return None
    return Path(trainer.log_dir) if trainer.log_dir else None


def log_history(trainer: pl.Trainer, history: list[dict[str, float]]) -> None:
    """Give CSV files the rounds before a resumed one too, so that the run's folder holds them all."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            for record in history:
                values = {name: value for name, value in record.items() if name not in ("round", "step")}
                logger.log_metrics({"epoch": record["round"], **values}, step=int(record["step"]) - 1)


def storage(loop: "FederatedLoop", trainer: pl.Trainer) -> Storage:
    """Where a run holds its clients' states: their files, if any, are in its folder.

    Files that only older checkpoints name are deleted where all that writes checkpoints replaces its own.
    """
    limit, size, folder = trainer.max_epochs, loop.clients_per_round or loop.num_clients, run_folder(trainer)
    return replace(
        loop.client_store,
        folder=None if folder is None else folder / "clients",
        prune=all(isinstance(callback, RoundCheckpoint) for callback in trainer.checkpoint_callbacks),
        clients=loop.num_clients if limit is None or limit < 0 else min(loop.num_clients, limit * size),
    )


def federation_of(module: FederatedClassifier) -> Federation:
    """The states of server and clients, once the first round has begun."""
    assert module.federation is not None
    return module.federation


def parts(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[FederatedDataModule, FederatedClassifier]:
    """The datamodule and the module, checked.

    Raises:
        TypeError: If either is not perada's.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"FederatedLoop needs a FederatedDataModule, not {type(data).__name__}; pass it as datamodule=")
    if not isinstance(module, FederatedClassifier):
        raise TypeError(f"FederatedLoop needs a FederatedClassifier, not {type(module).__name__}")
    return data, module
