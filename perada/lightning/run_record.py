# SPDX-License-Identifier: Apache-2.0
"""The record of a run: ``run.json``, and ``info`` and ``metrics`` of checkpoints and of ``perada.Run``."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from perada.algorithms.records import algorithm_record
from perada.data import FederatedDataModule
from perada.data.preprocessing import Preprocessing
from perada.federation.evaluation import EvaluationPass
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_context import RunContext
from perada.lightning.trainer_attributes import is_dev_run
from perada.results.report import LAST_ROUND
from perada.results.run_file import RunFile, write_run

History = list[dict[str, float]]
"""The metrics of each round by name, with its number ``round`` and its last optimiser ``step``."""
RECORDED_OPTIONS = (
    "lr_personal",
    "lr_local",
    "optimizer",
    "momentum",
    "weight_decay",
    "lr_schedule",
    "lr_gamma",
    "lr_every",
)
"""Options of training that a run records under their own names, in addition to ``clip_norm``."""
LOCAL_SCORE = "personal/local_test"
"""Name of the scores of personal models on their clients' test images."""


@dataclass
class EarlierScores:
    """Scores of each client besides its last ones.

    Attributes:
        initial: By name, each client's scores (M,) of the models before the first round.
        by_round: For each evaluation its ``round`` and each client's ``personal/local_test``.
    """

    initial: dict[str, list[float]] = field(default_factory=dict)
    by_round: list[dict[str, Any]] = field(default_factory=list)

    def score_initial_models(self, context: RunContext) -> None:
        """Score the models on their clients' images before the first round, with at most two passes over the images.

        Does nothing in a run that is resumed.
        """
        if context.federation.rounds_done or self.initial or is_dev_run(context.trainer):
            return
        evaluation = EvaluationPass(context.federation, context.module.metrics, everywhere=[])
        has_images = context.evaluate(context.data.val_dataloader(), context.trainer.limit_val_batches, evaluation.step)
        if not has_images:
            return
        _, per_client = evaluation.result()
        if not evaluation.failed_outputs():
            # Otherwise readers of the scores could only average those of the other clients.
            self.initial = {name: scores.tolist() for name, scores in per_client.items()}

    def record(self, context: RunContext, history: History) -> None:
        """Record the clients' scores of the last round, if they were scored."""
        scores = context.results.per_client.get(LOCAL_SCORE)
        if scores is not None and history:
            round = history[-1]["round"]
            # A round is scored twice where training ends early or clients are fine-tuned: the later scores count.
            earlier = [record for record in self.by_round if record["round"] < round]
            self.by_round = [*earlier, {"round": round, LOCAL_SCORE: scores.tolist()}]


def write_run_file(context: RunContext, history: History, client_scores: EarlierScores, command: list[str]) -> None:
    """Write ``run.json`` into the run's folder, whichever loggers write into it; nothing without one.

    Args:
        context: The run.
        history: The metrics of its rounds.
        client_scores: The clients' scores besides the last ones.
        command: The command line of the run; empty without one.
    """
    folder = context.folder()
    if folder is None:
        return
    content = RunFile(
        context.data.num_clients,
        run_info(context),
        run_metrics(context, history, client_scores),
        layout="checkpoints",
        train_sizes=list(context.data.train_sizes),
        # The command line may contain the seed, which is secret in the test mode of privacy.
        command=[] if context.settings.test_mode else command,
    )
    write_run(folder, content)


def run_metrics(context: RunContext, history: History, client_scores: EarlierScores) -> dict[str, Any]:
    """Return what becomes :attr:`perada.Run.metrics`, without entries that are empty."""
    results = context.results
    client_metrics: dict[str, list[Any]] = {name: scores.tolist() for name, scores in results.per_client.items()}
    if context.federation.rounds_done:
        client_metrics[LAST_ROUND] = list(context.federation.last_rounds)
    client_metrics |= context.federation.protection.epsilons(context.data.num_clients)
    metrics = {
        "rounds": history,
        "clients": client_metrics,
        "shifts": None if results.shifted is None else results.shifted.kinds,
        "initial": client_scores.initial,
        "by_round": client_scores.by_round,
        "partition": class_counts(context),
        "failed_outputs": [entry.record() for entry in results.failed_outputs],
        **results.details,
    }
    always = ("rounds", "clients")
    return {name: value for name, value in metrics.items() if value or name in always}


def class_counts(context: RunContext) -> dict[str, list[list[int]]]:
    """Return the number of images (M, K) of each client and class, by ``train`` and ``test``.

    Empty for a private run: class counts depend on the images, and no ledger accounts for them.
    """
    if context.settings.private:
        return {}
    return context.data.checked.class_counts()


def run_info(context: RunContext) -> dict[str, Any]:
    """Return what becomes :attr:`perada.Run.info`."""
    data = context.data
    facts = RunFacts(
        rounds=context.federation.rounds_done,
        num_clients=context.federation.num_clients,
        clients_per_round=context.settings.clients_per_round,
        num_images=list(data.train_sizes),
        preprocessing=data.preprocessing,
        classes=data.classes,
        client_names=data.client_names,
        privacy=context.federation.protection.record(data.num_clients),
    )
    info = describe_run(context.settings, context.module, data, facts)
    info["training"]["public_images"] = data.public_size
    if context.settings.lora_ranks:
        info["lora_ranks"] = list(context.settings.lora_ranks)
    return info


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about a run that a simulation and a deployment obtain in different ways.

    Attributes:
        rounds: Number of rounds that are done.
        num_clients: Number of clients.
        clients_per_round: Number of clients drawn for a round; None for all.
        num_images: Number of training images of each client; None if unknown.
        preprocessing: How images are prepared.
        classes: Names of the classes.
        client_names: Names of the clients.
        privacy: The record of :meth:`perada.privacy.protection.Protection.record`.
    """

    rounds: int
    num_clients: int
    clients_per_round: int | None
    num_images: list[int] | None
    preprocessing: Preprocessing
    classes: Sequence[str] | None
    client_names: Sequence[str] | None
    privacy: dict[str, Any] | None


def describe_run(
    settings: Settings,
    module: FederatedClassifier,
    data: FederatedDataModule,
    facts: RunFacts,
) -> dict[str, Any]:
    """Return what becomes :attr:`perada.Run.info`, of a simulation or of a deployment.

    Args:
        settings: Settings of the rounds.
        module: The module, whose network is built.
        data: Only its options are read, not its images.
        facts: Facts that differ between a simulation and a deployment.
    """
    algorithm = settings.algorithm
    return {
        "backbone": module.backbone if isinstance(module.backbone, str) else None,
        "pretrained": module.pretrained,
        "num_classes": module.num_classes,
        "train_backbone": module.train_backbone,
        "text_head": None if module.text_head is None else asdict(module.text_head),
        "adapter_options": module.adapter_options,
        "image_size": module.image_size if data.image_size is None else data.image_size,
        "built_for": module.image_size,
        "preprocessing": facts.preprocessing.record(),
        "adapter": module.adapter if isinstance(module.adapter, str) else None,
        "algorithm": algorithm.kind,
        "average": algorithm.average,
        "global_model": algorithm.global_model,
        "prediction": module.evaluation.prediction,
        "personal_share": module.evaluation.personal_share,
        "task": module.task.record(),
        "classes": None if facts.classes is None else list(facts.classes),
        "clients": None if facts.client_names is None else list(facts.client_names),
        # In the test mode of privacy the noise is derived from the seed, with which anyone could subtract it.
        "seed": None if settings.test_mode else settings.seed,
        "training": _describe_training(settings, module, data, facts),
        "versions": {"perada": version("perada"), "torch": str(torch.__version__)},
        "privacy": facts.privacy,
    }


def _describe_training(
    settings: Settings,
    module: FederatedClassifier,
    data: FederatedDataModule,
    facts: RunFacts,
) -> dict[str, Any]:
    """Return how clients trained, for clients that join later."""
    training_record: dict[str, Any] = {
        "algorithm": algorithm_record(settings.algorithm),
        "phases": [asdict(phase) for phase in settings.phases],
        "rounds": facts.rounds,
        "num_clients": facts.num_clients,
        "clients_per_round": facts.clients_per_round,
    }
    if facts.num_images is not None:
        training_record["images"] = facts.num_images
    training_record["batch_size"] = data.batch_size
    training_record["crop_padding"] = data.prepare.crop_padding
    training_record["flip"] = data.prepare.flip
    training_record["mixup"] = data.prepare.mixing.mixup
    training_record["cutmix"] = data.prepare.mixing.cutmix
    training_record["sampling"] = data.sampling
    for option in RECORDED_OPTIONS:
        training_record[option] = getattr(module.training_options, option)
    training_record["distillation_steps"] = settings.distillation.steps if settings.algorithm.uses_distillation else 0
    training_record["metric"] = module.evaluation.metric
    # JSON has no infinity.
    clip_norm = module.training_options.clip_norm
    training_record["clip_norm"] = None if clip_norm == math.inf else clip_norm
    return training_record
