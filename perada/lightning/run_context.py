# SPDX-License-Identifier: Apache-2.0
"""Data, module and settings of a run, and the helpers that its steps share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.core.rounds import AnyBatch, PrivateSampling, one_of
from perada.data import CohortBatch, EvalBatch, FederatedDataModule, Phase, RoundPlan
from perada.federation.federation import Federation
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import EvaluationResults
from perada.lightning.trainer_attributes import is_dev_run
from perada.models.adapted import AdaptedModel

T = TypeVar("T")


@dataclass
class PassedChecks:
    """Expensive network checks that a run has passed, which a repeated set-up skips.

    Attributes:
        folding: Clients that are folded into one batch get the same results as they would on their own.
        adapter: The network uses what is trained in it.
        recomputation: Blocks that run again in the backward pass compute the same.
    """

    folding: bool = False
    adapter: bool = False
    recomputation: bool = False


@dataclass(eq=False)
class RunContext:
    """The components of a run, once it is set up.

    Attributes:
        data: The data module, set up.
        module: The module, whose network is built.
        settings: Settings of the rounds.
        passed: Checks that former set-ups of the run have passed. Those of this one are added.
    """

    data: FederatedDataModule
    module: FederatedClassifier
    settings: Settings
    passed: PassedChecks = field(default_factory=PassedChecks)

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer that runs the module."""
        return self.module.trainer

    @property
    def federation(self) -> Federation:
        """The states of server and clients, which exist once the first round has begun."""
        assert self.module.federation is not None
        return self.module.federation

    @property
    def results(self) -> EvaluationResults:
        """Results of the last evaluation."""
        return self.module.results

    @property
    def adapted(self) -> AdaptedModel:
        """The backbone with its adapter."""
        assert self.module.adapted is not None
        return self.module.adapted

    def on_model_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the model's device. At set-up that may not be the trainer's device yet."""
        return tensor.to(next(self.module.model.parameters()).device)

    def precision(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes run in the trainer's precision."""
        return self.trainer.precision_plugin.forward_context()

    def has_rounds_left(self) -> bool:
        """Whether the trainer's ``max_epochs`` allows another round."""
        limit = self.trainer.max_epochs
        if limit is None or limit < 0:
            return True
        return self.federation.rounds_done < limit

    def can_afford_round(self, participants: Sequence[int]) -> bool:
        """Whether the privacy budget of any client of the federation allows another round.

        Warns of those of the ``participants`` whose ``max_epsilon`` does not.
        """
        protection = self.federation.protection
        if not protection.limited:
            return True
        able = set(protection.affordable(range(self.federation.num_clients)))
        exhausted = [client for client in participants if client not in able]
        options = self.settings.privacy
        if exhausted and options is not None and options.max_epsilon is not None:
            rank_zero_warn(
                f"privacy: client {', '.join(map(str, exhausted))} can no longer take part: another round would "
                f"exceed max_epsilon={options.max_epsilon} of its {options.ledger} ledger"
            )
        return bool(able)

    def folder(self) -> Path | None:
        """Return the run's folder on rank 0, which writes it; None on other ranks or without a folder. A collective."""
        folder = log_folder(self.trainer)
        if folder is None or not self.trainer.is_global_zero:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def progress_bar(self, steps: Iterable[T], description: str) -> Iterable[T]:
        """Iterate over ``steps`` under a progress bar, if the trainer displays one."""
        bar = self.trainer.progress_bar_callback
        return tqdm(steps, desc=description, leave=False, disable=not getattr(bar, "is_enabled", False))

    def local_steps(
        self, plan: RoundPlan, private: PrivateSampling | None = None, *, each_image_once: bool = False
    ) -> Iterator[AnyBatch]:
        """Yield the local steps of a plan on the model's device, with prepared images.

        Args:
            plan: The plan.
            private: How batches are drawn in private training.
            each_image_once: Whether a pass has each image once and unmixed, whatever the options ``sampling``,
                ``mixup`` and ``cutmix``.
        """
        prepare = self.data.prepare.without_mixing() if each_image_once else self.data.prepare
        for batch in self.data.cohort_loader(plan, private, each_image_once=each_image_once):
            yield prepare(move_data_to_device(batch, self.module.device))

    def every_training_image(self, plan: RoundPlan) -> Iterator[CohortBatch]:
        """Yield each training image of a plan's clients once, for comparing the global models on them."""
        sizes = self.data.train_sizes
        full_pass = self.data.plan_for(plan.clients, plan.round, [Phase("compare", 1)])
        batches = self.progress_bar(self.local_steps(full_pass, each_image_once=True), f"Compare {plan.round + 1}")
        for batch in map(one_of, batches):
            # A client's last batch is filled up with images that were compared already.
            counts = [
                min(count, sizes[client] - batch.step * count)
                for client, count in zip(batch.clients, batch.counts, strict=True)
            ]
            yield batch._replace(counts=tuple(counts))

    def evaluate(self, loader: Any, limit: float, step: Callable[[EvalBatch, int], None]) -> bool:  # noqa: ANN401  # a loader
        """Pass batches to ``step`` outside of Lightning's loops.

        Args:
            loader: A loader with a length.
            limit: Number of batches, or a share of them if it is a float, as in Lightning's ``limit_val_batches``.
            step: Is given each batch, prepared, and its index.

        Returns:
            Whether there were any batches within the limit.
        """
        count = int(len(loader) * limit) if isinstance(limit, float) else min(len(loader), limit)
        with torch.no_grad(), self.precision():
            for index, batch in enumerate(islice(loader, count)):
                on_device = self.data.transfer_batch_to_device(batch, self.module.device, 0)
                step(self.data.prepare(on_device), index)
        return bool(count)


def log_folder(trainer: pl.Trainer) -> Path | None:
    """Return the folder of the trainer's first logger; None without one.

    A collective: Lightning broadcasts ``log_dir`` from rank 0.
    """
    if not trainer.loggers or is_dev_run(trainer):
        return None
    return Path(trainer.log_dir) if trainer.log_dir else None
