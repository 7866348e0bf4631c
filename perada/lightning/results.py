# SPDX-License-Identifier: Apache-2.0
"""What a fit measured, for the :class:`~perada.results.run.Run` and for ``run.json`` in the run's folder."""

import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch

from perada.algorithms import Algorithm
from perada.algorithms.joining import algorithm_record
from perada.data import EvalBatch, FederatedDataModule
from perada.federation.evaluation import Evaluation
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_folder import run_folder
from perada.lightning.steps import federation_of
from perada.results.restore import restoring
from perada.results.run_file import write_fitted

History = list[dict[str, float]]
Step = Callable[[EvalBatch, int], None]
"""Takes a batch of test images, and its index in the evaluation."""


class Measured:
    """What is known of each client besides its last scores.

    Attributes:
        initial: Scores by name of the models before the first round, those of each client (M,).
        by_round: For each evaluation its ``round`` and each client's ``personal/local_test``.
        command: The command line of the run; empty where there was none.
    """

    def __init__(self) -> None:
        self.initial: dict[str, list[float]] = {}
        self.by_round: list[dict[str, Any]] = []
        self.command: list[str] = []

    def begin(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> None:
        """Score the initial models on their clients' images: two passes at most, once, before the first round."""
        if federation_of(module).rounds_done or self.initial or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
            return
        evaluation = Evaluation(federation_of(module), module.metrics, [])
        if run_evaluation(trainer, data, module, evaluation.step):
            self.initial = {name: rounded(values.tolist()) for name, values in evaluation.result()[1].items()}

    def _note(self, module: FederatedClassifier, history: History) -> None:
        """Keep what each client scored in the evaluation that is done, in place of an earlier one of the round."""
        scores = module.per_client.get("personal/local_test")
        if scores is None or not history:
            return
        round = history[-1]["round"]
        kept = [own for own in self.by_round if own["round"] < round]
        self.by_round = [*kept, {"round": round, "personal/local_test": rounded(scores.tolist())}]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"initial": self.initial, "by_round": self.by_round}

    @restoring()
    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Continue where a checkpoint ended, and return its ``details``; nothing where clients were added."""
        self.initial, self.by_round = state.get("initial", {}), state.get("by_round", [])
        details: dict[str, Any] = state.get("details", {})
        return details

    def write(
        self,
        trainer: pl.Trainer,
        data: FederatedDataModule,
        module: FederatedClassifier,
        algorithm: Algorithm,
        history: History,
    ) -> None:
        """Take note of an evaluation, and write all there is so far into the run's folder, whatever loggers write."""
        self._note(module, history)
        folder, federation = run_folder(trainer), federation_of(module)  # all processes ask, rank 0 writes
        if folder is None or not trainer.is_global_zero:
            return
        secret = federation.protection.test_mode  # the noise follows from the seed
        info = run_info(module, data, algorithm, None if secret else federation.settings.seed)
        content = {
            "num_clients": data.num_clients,
            "train_sizes": list(data.train_sizes),
            "command": [] if secret else self.command,
            "info": info,
            "metrics": metrics_of(module, data, history, self),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_fitted(folder, content)


def rounded(values: list[float]) -> list[float]:
    """Scores as they are written: more digits than any number of images gives."""
    return [round(value, 6) for value in values]


def run_evaluation(trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, step: Step) -> bool:
    """Give the batches that clients are evaluated on to ``step``, outside of Lightning's validation.

    Returns:
        Whether there were any, within the trainer's limit.
    """
    batches, limit = data.val_dataloader(), trainer.limit_val_batches
    count = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        for index, batch in enumerate(islice(batches, count)):
            step(data.prepare(data.transfer_batch_to_device(batch, module.device, 0)), index)
    return bool(count)


def metrics_of(
    module: FederatedClassifier, data: FederatedDataModule, history: History, measured: Measured
) -> dict[str, Any]:
    """``Run.metrics``: see :class:`perada.Run`."""
    clients = {name: scores.tolist() for name, scores in module.per_client.items()}
    found = {
        "rounds": history,
        "clients": clients | federation_of(module).protection.epsilons(data.num_clients),
        "per_class": {name: scores.tolist() for name, scores in module.per_class.items()},
        "shifts": module.shifted.get("kinds"),
        "initial": measured.initial,
        "by_round": measured.by_round,
        "partition": class_counts(module, data),
        **module.details,
    }
    return {name: value for name, value in found.items() if value or name in ("rounds", "clients")}


def class_counts(module: FederatedClassifier, data: FederatedDataModule) -> dict[str, list[list[int]]]:
    """Images (M, K) of each client and class, by ``train`` and ``test``; nothing of a private run's, which they are."""
    return {} if federation_of(module).protection.private else data.class_counts()


def run_info(
    module: FederatedClassifier, data: FederatedDataModule, algorithm: Algorithm, seed: int | None
) -> dict[str, Any]:
    """The facts of ``Run.info``; ``seed`` is None where noise would follow from it."""
    assert module.federation is not None
    return {
        "backbone": module.backbone if isinstance(module.backbone, str) else None,
        "pretrained": module.pretrained,
        "num_classes": module.num_classes,
        "image_size": module.image_size if data.image_size is None else data.image_size,
        "built_for": module.image_size,
        "preprocessing": data.preprocessing.record(),
        "train_backbone": module.train_backbone,
        "adapter": module.adapter if isinstance(module.adapter, str) else None,
        "adapter_options": module.adapter_options,
        "algorithm": algorithm.kind,
        "average": algorithm.average,
        "global_model": algorithm.global_model,
        "multilabel": module.multilabel,
        "classes": data.classes,
        "clients": data.client_names,
        "seed": seed,
        "training": _training(module, data, algorithm),
        "privacy": module.federation.protection.record(data.num_clients),
    }


def _training(module: FederatedClassifier, data: FederatedDataModule, algorithm: Algorithm) -> dict[str, Any]:
    """How the clients trained: what a client does that joins later."""
    assert module.federation is not None
    settings, (padding, flip) = module.federation.settings, data.augmentation
    options = ("optimizer", "momentum", "weight_decay", "lr_schedule", "lr_gamma", "lr_every", "metric")
    return {
        "algorithm": algorithm_record(algorithm),
        "phases": [asdict(phase) for phase in settings.phases],
        "rounds": module.federation.rounds_done,
        "num_clients": module.federation.num_clients,
        "clients_per_round": settings.clients_per_round,
        "images": list(data.train_sizes),
        "batch_size": data.batch_size,
        "crop_padding": padding,
        "flip": flip,
        **{f"lr_{role}": rate for role, rate in module.lr.items()},
        **{name: getattr(module, name) for name in options},
        "clip_norm": None if module.clip_norm == math.inf else module.clip_norm,
    }
