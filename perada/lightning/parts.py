# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, and what is said of its rounds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.core.checks import OptionError
from perada.core.rounds import AnyBatch, PrivateSampling, one_of
from perada.data import CohortBatch, EvalBatch, FederatedDataModule, Phase, RoundPlan
from perada.federation.federation import Federation
from perada.federation.server import RoundReport
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier
from perada.models.adapted import AdaptedModel

T = TypeVar("T")


@dataclass(eq=False)
class Parts:
    """What a run is made of, once it is set up.

    Attributes:
        data: Who has which images.
        module: The network, built.
        settings: How the rounds go.
    """

    data: FederatedDataModule
    module: FederatedClassifier
    settings: Settings

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer that the module is with."""
        return self.module.trainer

    @property
    def federation(self) -> Federation:
        """The states of server and clients, once the first round has begun."""
        assert self.module.federation is not None
        return self.module.federation

    @property
    def adapted(self) -> AdaptedModel:
        """The backbone with its adapter."""
        assert self.module.adapted is not None
        return self.module.adapted

    def on_model_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the model's device."""
        return tensor.to(next(self.module.model.parameters()).device)

    def precision(self) -> AbstractContextManager[Any]:
        """In which passes have the trainer's precision."""
        return self.trainer.precision_plugin.forward_context()

    def rounds_left(self) -> bool:
        """Whether the trainer is to train more rounds."""
        limit = self.trainer.max_epochs
        return limit is None or not 0 <= limit <= self.federation.rounds_done

    def anyone_left(self, clients: Sequence[int]) -> bool:
        """Name those of ``clients`` whose ``max_epsilon`` has no room for another round; whether anyone is left."""
        protection, options = self.federation.protection, self.settings.privacy
        if not protection.limited:
            return True
        able = set(protection.affordable(range(self.federation.num_clients)))
        spent = [client for client in clients if client not in able]
        if spent and options is not None and options.max_epsilon is not None:
            limit = f"max_epsilon={options.max_epsilon} of its {options.ledger} ledger"
            who = f"client {', '.join(map(str, spent))}"
            rank_zero_warn(f"privacy: {who} cannot take part any more: another round would pass {limit}")
        return bool(able)

    def folder(self) -> Path | None:
        """The run's folder, where this process is the one that writes it; all processes ask, and rank 0 writes."""
        folder = run_folder(self.trainer)
        if folder is None or not self.trainer.is_global_zero:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def progress(self, steps: Iterable[T], description: str) -> Iterable[T]:
        """``steps`` under a progress bar, where the trainer shows one."""
        bar = self.trainer.progress_bar_callback
        return tqdm(steps, desc=description, leave=False, disable=not getattr(bar, "is_enabled", False))

    def prepared(self, plan: RoundPlan, private: PrivateSampling | None = None) -> Iterator[AnyBatch]:
        """The local steps of a plan, on the model's device."""
        for batch in self.data.cohort_loader(plan, private):
            yield self.data.prepare(move_data_to_device(batch, self.module.device))

    def compared(self, plan: RoundPlan) -> Iterator[CohortBatch]:
        """All training images of a plan's clients, each once, for those who compare the global models on them."""
        epoch, sizes = self.data.plan_for(plan.clients, plan.round, [Phase("compare", 1)]), self.data.train_sizes
        for batch in map(one_of, self.progress(self.prepared(epoch), f"Compare {plan.round + 1}")):
            left = [
                min(rows, sizes[client] - batch.step * rows)
                for client, rows in zip(batch.clients, batch.counts, strict=True)
            ]
            yield batch._replace(counts=tuple(left))  # what fills the last batch was compared already

    def evaluate(self, batches: Any, limit: float, step: Callable[[EvalBatch, int], None]) -> bool:  # noqa: ANN401  # a loader
        """Give batches to ``step``, outside of Lightning's loops; whether there were any within the ``limit``."""
        count = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
        with torch.no_grad(), self.precision():
            for index, batch in enumerate(islice(batches, count)):
                step(self.data.prepare(self.data.transfer_batch_to_device(batch, self.module.device, 0)), index)
        return bool(count)


def run_folder(trainer: pl.Trainer) -> Path | None:
    """The run's folder; ``None`` where it has none."""
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        return None
    return Path(trainer.log_dir) if trainer.log_dir else None


def warn_broken(when: str, clients: list[int], consequence: str, failed: dict[int, str]) -> None:
    """Name the clients whose training went wrong, and say what becomes of it; ``failed`` are why samples did."""
    for reason in failed.values():
        rank_zero_warn(f"{when}: {reason}; {consequence}")
    names = ", ".join(str(client) for client in clients if client not in failed)
    if names:
        rank_zero_warn(
            f"{when}: the loss of client {names} became NaN or infinite; {consequence}. Lower the learning rate "
            "(of the clients, or of the server's rule where all break) or check the images."
        )


def warn_report(round: int, report: RoundReport, settings: Settings) -> None:
    """Say what went wrong in a round.

    In a private run nothing is said of clients whose training failed, or whose images cannot be read: logs are read by
    others than the clients, and no ledger counts it. What is far, or diverged, follows from what clients sent.
    """
    if not settings.private:
        without = "its adapter stays as it was and the round continues without it"
        warn_broken(f"round {round + 1}", report.broken, without, report.failed)
    then = "If that is no accident, drop_outliers leaves it out, and robust server rules withstand it."
    if settings.drop_outliers:
        then = "It was left out, since drop_outliers is set."
    for client, times in report.server.outliers.items():
        what = f"client {client} sent a change {times:,.0f} times as long as the median of the round's"
        rank_zero_warn(f"round {round + 1}: {what}. {then}")
    if report.server.diverged:
        then = "the round continues with the clients' average. Lower its learning rate (distillation.lr)."
        rank_zero_warn(f"round {round + 1}: the distillation became NaN or infinite; {then}")
    if report.server.discarded:
        rank_zero_warn(
            f"round {round + 1}: what the server made of the clients' states became NaN or infinite; the global state "
            f"stays as it was. Check {settings.rule.kind} and the options of {settings.algorithm.kind}."
        )


class NothingLearnedError(ValueError):
    """A run in which every client failed in every round."""


def check_failures(rounds: Sequence[tuple[float, float]], limit: int | None, over: bool = False) -> None:
    """Refuse, by a ValueError, more failures than the limit in ``rounds``: how many clients were drawn, and failed.

    Also refuse, by a :class:`NothingLearnedError`, that a run is ``over`` in which every client failed in every round.
    """
    count = int(sum(failed for _, failed in rounds))
    if limit is not None and count > limit:
        raise OptionError(
            f"max_failures={limit}: clients failed {count} times in {len(rounds)} rounds, as the warnings say; fix "
            "what they name and resume (ckpt_path=last), or raise max_failures",
            name="max_failures",
            value=limit,
        )
    if over and rounds and all(drawn == failed for drawn, failed in rounds):
        raise NothingLearnedError(
            f"every client failed in all {len(rounds)} rounds, as the warnings say, so nothing was learned; fix the "
            "data, or lower the learning rates"
        )
