# SPDX-License-Identifier: Apache-2.0
"""Set-up of predictions with both models of a client: the statistics of its training images."""

from dataclasses import replace
from functools import partial

from pytorch_lightning.utilities.rank_zero import rank_zero_info

from perada.core.states import State
from perada.federation.both_models import (
    BothModels,
    has_both_models,
    personal_share_of,
    statistics_for,
    typical_images_of,
    without_both_models,
)
from perada.federation.evaluation import shared_logits
from perada.federation.typical_images import MAX_EXAMPLES, TypicalImages
from perada.lightning.run_context import RunContext


def announce_unused_prediction(context: RunContext) -> None:
    """Log that the option ``prediction`` has no effect on a run, if that is so."""
    no_effect = without_both_models(context.settings, context.module.evaluation.prediction)
    if no_effect is not None:
        rank_zero_info(no_effect)


def prepare_both_models(context: RunContext) -> None:
    """Set the module's prediction with both models for the current states, if the run has one.

    What is typical of a client follows from its images and the frozen layers, and is computed once. The weights of the
    personal models change with the global model. Checkpoints hold neither.
    """
    module = context.module
    if module.evaluation.prediction != "both" or not has_both_models(context.settings):
        return
    with context.precision():
        typical = module.both or _compare_training_images(context)
        module.both = replace(typical, personal_shares=_personal_shares(context))


def states_of_both(context: RunContext) -> dict[int, State]:
    """Return what each client needs to predict with both models; empty before an evaluation that has them."""
    both_models = context.module.both
    if both_models is None:
        return {}
    return {client: both_models.state(client) for client in both_models.typical_images}


def _compare_training_images(context: RunContext) -> BothModels:
    """Return the prediction with both models, as yet without weights of the personal ones."""
    data = context.data
    task = context.settings.training.task
    device = context.module.device
    statistics = statistics_for(context.module.engine, data.examples(0, MAX_EXAMPLES, device))
    typical_images: dict[int, TypicalImages] = {}
    for client in context.progress_bar(range(data.num_clients), "Typical images"):
        examples = data.examples(client, MAX_EXAMPLES, device)
        typical_images[client] = typical_images_of(statistics, examples, task, data.num_classes)
    return BothModels(task, statistics, typical_images, personal_shares={})


def _personal_shares(context: RunContext) -> dict[int, float]:
    """Return the weight of each client's personal model."""
    data = context.data
    task = context.settings.training.task
    fixed_share = context.module.evaluation.personal_share
    if fixed_share is not None:
        return dict.fromkeys(range(data.num_clients), fixed_share)
    predict = partial(shared_logits, context.federation)
    personal_shares: dict[int, float] = {}
    for client in range(data.num_clients):
        examples = data.examples(client, MAX_EXAMPLES, context.module.device)
        personal_shares[client] = personal_share_of(examples, predict, task)
    return personal_shares
