# SPDX-License-Identifier: Apache-2.0
"""Set-up of predictions with both models of a client: checks, and the statistics of its training images."""

from dataclasses import replace

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from perada.core.checks import OptionError
from perada.core.states import State
from perada.federation.both_models import BothModels, personal_share
from perada.federation.evaluation import shared_logits
from perada.federation.typical_images import MAX_EXAMPLES, ImageStatistics, TypicalImages
from perada.lightning.run_context import RunContext


def check_prediction(context: RunContext) -> None:
    """Check that the run supports the option ``prediction``.

    Raises:
        OptionError: If clients predict with both models, and training is private, or the task cannot mix predictions.
    """
    settings = context.settings
    if context.module.evaluation.prediction != "both":
        return
    if settings.private:
        raise OptionError(
            f"prediction='both' is not supported with {settings.privacy_options}: it compares images with the training "
            "images, which no ledger accounts for; choose prediction='personal' or 'global'",
            name="prediction",
            value="both",
        )
    logits = torch.zeros(1, context.data.num_classes)
    settings.training.task.mixture(logits, logits, torch.tensor(0.5))
    if not has_both_models(context):
        rank_zero_info(
            f"evaluation: prediction='both' has no effect with {settings.algorithm.kind}, whose clients have only one "
            "model to predict with"
        )


def has_both_models(context: RunContext) -> bool:
    """Return whether clients have personal models, at least after a final fine-tuning, and there is a global one."""
    settings = context.settings
    return settings.has_personal_models and settings.algorithm.global_model


def prepare_both_models(context: RunContext) -> None:
    """Set the module's prediction with both models for the current states, if the run has one.

    What is typical of a client follows from its images and the frozen layers, and is computed once. The weights of the
    personal models change with the global model. Checkpoints hold neither.
    """
    module = context.module
    if module.evaluation.prediction != "both" or not has_both_models(context):
        return
    with context.precision():
        typical = module.both or _compare_training_images(context)
        module.both = replace(typical, personal_shares=_personal_shares(context))


def states_of_both(context: RunContext) -> dict[int, State]:
    """Return what each client needs to predict with both models; empty before an evaluation that has them."""
    both = context.module.both
    if both is None:
        return {}
    return {client: both.state(client) for client in both.typical_images}


def _compare_training_images(context: RunContext) -> BothModels:
    """Return the prediction with both models, as yet without weights of the personal ones."""
    data = context.data
    statistics: ImageStatistics | None = None
    typical_images: dict[int, TypicalImages] = {}
    for client in context.progress_bar(range(data.num_clients), "Typical images"):
        statistics_of_batches: list[torch.Tensor] = []
        for x, _ in data.examples(client, MAX_EXAMPLES, context.module.device):
            if statistics is None:
                statistics = ImageStatistics.of(context.module.engine, x[0])
            statistics_of_batches.append(statistics(x))
        typical_images[client] = TypicalImages.of(torch.cat(statistics_of_batches))
    assert statistics is not None
    return BothModels(context.settings.training.task, statistics, typical_images, personal_shares={})


def _personal_shares(context: RunContext) -> dict[int, float]:
    """Return the weight of each client's personal model."""
    data = context.data
    task = context.settings.training.task
    fixed_share = context.module.evaluation.personal_share
    if fixed_share is not None:
        return dict.fromkeys(range(data.num_clients), fixed_share)
    personal_shares: dict[int, float] = {}
    for client in range(data.num_clients):
        error_rates: list[torch.Tensor] = []
        for x, targets in data.examples(client, MAX_EXAMPLES, context.module.device):
            logits = shared_logits(context.federation, x)
            error_rates.append(task.error_rates(logits, targets).double().cpu())
        personal_shares[client] = personal_share(float(torch.cat(error_rates).mean()))
    return personal_shares
