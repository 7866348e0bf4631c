# SPDX-License-Identifier: Apache-2.0
"""The parts of a run as the federated loop sees them."""

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pytorch_lightning as pl
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.algorithms import Algorithm
from perada.core.batches import AnyBatch, one_of
from perada.core.rounds import PrivateSampling
from perada.data import CohortBatch, FederatedDataModule, Phase, RoundPlan
from perada.federation.federation import Federation
from perada.federation.round_report import RoundReport
from perada.lightning.checkpoint import REMEDY
from perada.lightning.module import FederatedClassifier
from perada.server import ServerRule

T = TypeVar("T")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def explain(_: object, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
    """Have an error of the disk say where the run is and how to resume; those of writes do not even have a path.

    A program that SIGTERM ends says so by its status, as shells give it; Lightning leaves it at 0.
    """
    if isinstance(exception, SIGTERMException):
        exception.code = 128 + signal.SIGTERM
        return
    if not isinstance(exception, OSError) or exception.errno not in _OF_THE_DISK:
        return
    if exception.strerror == os.strerror(exception.errno):  # else somebody has explained it
        exception.strerror += f"; {REMEDY}"
        folders = (getattr(logger, "log_dir", None) for logger in trainer.loggers)
        exception.filename = exception.filename or next(filter(None, folders), trainer.default_root_dir)


def warn_broken(when: str, clients: list[int], consequence: str, failed: dict[int, str]) -> None:
    """Name the clients whose training went wrong, and say what becomes of it; ``failed`` are why samples did.

    In a private run a client trains on without such a sample, so that who trains does not depend on it.
    """
    for client, reason in failed.items():
        rank_zero_warn(f"{when}: {reason}; {consequence if client in clients else 'it is in no batch'}")
    names = ", ".join(str(client) for client in clients if client not in failed)
    if names:
        rank_zero_warn(
            f"{when}: the loss of client {names} became NaN or infinite; {consequence}. Lower the learning rate "
            "(of the clients, or of the server's rule where all break) or check the images."
        )


def warn_report(round: int, report: RoundReport, rule: ServerRule, algorithm: Algorithm, refused: bool = False) -> None:
    """Say what went wrong in a round; clients whose updates are far are ``refused`` or not."""
    without = "its adapter stays as it was and the round continues without it"
    warn_broken(f"round {round}", report.broken, without, report.failed)
    then = (
        "It was left out, since refuse_far is set."
        if refused
        else "If that is no accident, refuse_far leaves it out, and the server rules median, krum, geometric_median, "
        "norm_clipping and fltrust withstand it."
    )
    for client, times in report.far.items():
        rank_zero_warn(
            f"round {round}: client {client} sent a change {times:,.0f} times as long as the median of the round's. "
            f"{then}"
        )
    if report.diverged:
        rank_zero_warn(
            f"round {round}: the distillation became NaN or infinite; the round continues with the clients' average. "
            "Lower its learning rate (lr_server)."
        )
    if report.broken_server:
        rank_zero_warn(
            f"round {round}: what the server made of the clients' states became NaN or infinite; the global state "
            f"stays as it was. Check {rule.kind} and the options of {algorithm.kind}."
        )


class NothingLearnedError(ValueError):
    """A run in which every client failed in every round."""


class Failures:
    """How many clients were drawn in each round, and how many of them failed.

    ``history`` are the rounds before, ``limit`` how many failures are too many: then a ValueError ends the run.
    """

    def __init__(self, limit: int | None, history: Sequence[dict[str, float]] = ()) -> None:
        self.limit = limit
        self.rounds = [(record.get("clients/drawn", 1), record.get("clients/failed", 0)) for record in history]

    def add(self, drawn: int, failed: int) -> None:
        """Count those of a round."""
        self.rounds.append((drawn, failed))
        count = int(sum(failed for _, failed in self.rounds))
        if self.limit is not None and count > self.limit:
            raise ValueError(
                f"max_failures={self.limit}: clients failed {count} times in {len(self.rounds)} rounds, as the "
                "warnings say; fix what they name and resume (ckpt_path=last), or raise max_failures"
            )

    def check_any_result(self) -> None:
        """Refuse, by a :class:`NothingLearnedError`, to end a run well in which every client failed in every round."""
        if self.rounds and all(drawn == failed for drawn, failed in self.rounds):
            raise NothingLearnedError(
                f"every client failed in all {len(self.rounds)} rounds, as the warnings say, so nothing was "
                "learned; fix the data, or lower the learning rates"
            )


def exhausted(trainer: pl.Trainer, federation: Federation) -> bool:
    """Whether no client can afford another round; that is said where rounds are left."""
    done, protection = federation.rounds_done, federation.protection
    if not protection.limited or protection.affordable(range(federation.num_clients)):
        return False
    if rounds_left(trainer, done):
        rank_zero_warn(
            f"privacy: after {done} rounds no client can afford another, and nothing more is trained; raise the limit "
            "(max_epsilon or target_epsilon) to train on"
        )
    return True


def anyone_left(federation: Federation, clients: Sequence[int]) -> bool:
    """Name those of ``clients`` whose ``max_epsilon`` has no room for another round; return whether anyone is left."""
    protection, options = federation.protection, federation.settings.privacy
    if not protection.limited:
        return True
    able = set(protection.affordable(range(federation.num_clients)))
    spent = [client for client in clients if client not in able]
    if spent and options is not None and options.max_epsilon is not None:
        rank_zero_warn(
            f"privacy: client {', '.join(map(str, spent))} cannot take part any more: another round would pass "
            f"max_epsilon={options.max_epsilon} of its {options.ledger} ledger"
        )
    return bool(able)


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


def federation_of(module: FederatedClassifier) -> Federation:
    """The states of server and clients, once the first round has begun."""
    assert module.federation is not None
    return module.federation


def parts(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[FederatedDataModule, FederatedClassifier]:
    """The datamodule and the module; a TypeError if either is not perada's."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"FederatedLoop needs a FederatedDataModule, not {type(data).__name__}; pass it as datamodule=")
    if not isinstance(module, FederatedClassifier):
        raise TypeError(f"FederatedLoop needs a FederatedClassifier, not {type(module).__name__}")
    return data, module
