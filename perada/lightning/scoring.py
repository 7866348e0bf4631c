# SPDX-License-Identifier: Apache-2.0
"""Scores of a fit in addition to Lightning's validation: on shifted sets, and after the last round."""

import json
import math
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from perada.core.rounds import Phase, PrivateSampling, RoundPlan
from perada.data.shifts import Condition
from perada.federation.evaluation import ClientScores, ModelScores, ShiftedEvaluation
from perada.lightning.results import ShiftScores
from perada.lightning.round_warnings import warn_of_failed_clients, warn_of_failed_outputs
from perada.lightning.run_context import RunContext
from perada.lightning.run_record import History
from perada.lightning.trainer_attributes import is_dev_run
from perada.lightning.typical_images import prepare_both_models
from perada.results.report import LAST_ROUND, SHIFTS_FILE
from perada.scores.failed_outputs import failed_of_records

DETAILS = ("test_images", "predictions", "global/local_test", "per_class")
"""Metrics of a checkpoint that the module keeps from its last evaluation in addition to scores."""
LONG_SCORING = 60.0
"""Scoring time in seconds above which a run announces it."""
FEW_MODELS = 10
"""Number of models to propose where scoring all of them on all images takes long."""


def scoring_notice(seconds: float, num_batches: int, models: int, everywhere: int) -> str | None:
    """Return a message on how long it takes to score all models, if that is long.

    Args:
        seconds: Duration of the first batch of images.
        num_batches: Number of batches.
        models: Number of personal models; 0 if clients predict with the global one.
        everywhere: Number of personal models that are scored on all images, and not only on those of their client.

    Returns:
        The message, which names the options that reduce the time; None for less than :data:`LONG_SCORING` seconds.
    """
    total = seconds * num_batches
    if total < LONG_SCORING:
        return None
    remedy = "score less often with check_val_every_n_epoch (--trainer.check_val_every_n_epoch)"
    if everywhere > FEW_MODELS:
        remedy = (
            f"score only some of them on all images with global_test_clients={FEW_MODELS} "
            f"(--evaluation.global_test_clients={FEW_MODELS}), or {remedy}"
        )
    subject = "the global model"
    if models:
        subject = f"{models} personal models, {everywhere} of them on all test images"
    measured = f"{num_batches} batches, the first took {seconds:.1f} s"
    return f"scoring {subject} takes about {_format_duration(total)} each time ({measured}); {remedy}"


def _format_duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{max(1, round(seconds / 60))} min"


class ScoringClock:
    """Times the first batch that a Trainer scores, and announces once how long all of them take.

    Attributes:
        announced: Whether the first batch was timed, so that nothing is left to do.
    """

    def __init__(self) -> None:
        self.announced = False
        self._started_at = 0.0

    def start(self, context: RunContext, batch_idx: int) -> None:
        """Start the clock before the first batch."""
        if batch_idx == 0 and not self.announced:
            _wait_for_accelerator(context)
            self._started_at = time.perf_counter()

    def stop(self, context: RunContext, batch_idx: int, num_batches: float) -> None:
        """Stop the clock after the first batch, and log how long all ``num_batches`` will take, if that is long."""
        if batch_idx != 0 or self.announced or not math.isfinite(num_batches):
            return
        self.announced = True
        _wait_for_accelerator(context)
        seconds = time.perf_counter() - self._started_at
        models = 0
        everywhere = 0
        if context.federation.personalized:
            models = context.data.num_clients
            everywhere = len(context.module.everywhere)
        notice = scoring_notice(seconds, int(num_batches), models, everywhere)
        if notice is not None:
            rank_zero_info(notice)


def _wait_for_accelerator(context: RunContext) -> None:
    """Wait for the accelerator, whose kernels run asynchronously and would be missing from the measured time."""
    if context.module.device.type == "cuda":
        torch.cuda.synchronize(context.module.device)


class _ConditionScores(NamedTuple):
    """Scores on one shifted set.

    Attributes:
        condition: The shifted set.
        by_metric: The scores by metric.
        typical_shares: :attr:`.ShiftedEvaluation.typical_shares`.
    """

    condition: Condition
    by_metric: dict[str, ModelScores]
    typical_shares: torch.Tensor | None


def score_shifts(context: RunContext) -> bool:
    """Score all models on the shifted test sets, and keep the scores in the run's results. A collective.

    The trainer's limit of test batches, or of validation batches during training, applies to each shifted set.

    Returns:
        Whether there was a shifted set to score.
    """
    data = context.data
    module = context.module
    trainer = context.trainer
    limit = trainer.limit_test_batches if trainer.state.fn == "test" else trainer.limit_val_batches
    if not data.conditions or not limit:
        return False
    started_at = time.perf_counter()
    condition_scores: list[_ConditionScores] = []
    for condition in context.progress_bar(data.conditions, "Shifts"):
        evaluation = ShiftedEvaluation(
            context.federation, module.metrics, module.everywhere, condition.of_other_clients, module.both
        )
        context.evaluate(data.shift_loader(condition), limit, evaluation.step)
        by_metric = evaluation.result()
        condition_scores.append(_ConditionScores(condition, by_metric, evaluation.typical_shares))
        if len(condition_scores) == 1:
            _announce_long_shifts(time.perf_counter() - started_at, len(data.conditions))
    shifted = _combine_scores(
        condition_scores,
        has_global_model=context.settings.algorithm.global_model,
        shifts=_shift_reprs(context),
        seconds=time.perf_counter() - started_at,
    )
    context.results.shifted = shifted
    folder = context.folder()
    if folder is not None and shifted.kinds:
        (folder / SHIFTS_FILE).write_text(json.dumps(shifted.kinds, indent=1) + "\n")
    return True


def _announce_long_shifts(seconds_of_first: float, count: int) -> None:
    """Log how long all shifted sets will take, estimated from the first one, if that is long."""
    expected = seconds_of_first * count
    if expected >= LONG_SCORING:
        rank_zero_info(
            f"scoring {count} shifted test sets takes about {_format_duration(expected)}; reduce the kinds or "
            "severities in data.shifts, or score fewer models on all images with global_test_clients"
        )


def restore_scores(context: RunContext, saved: dict[str, Any]) -> None:
    """Restore the scores of a checkpoint, without those on shifted sets if the data now has other shifts."""
    results = context.results
    metrics = saved["metrics"]
    results.shifted = ShiftScores.from_state_dict(saved["shifted"])
    outdated: set[str] = set()
    if results.shifted is not None and results.shifted.repr_of_shift != _shift_reprs(context):
        outdated = {*results.shifted.scores, *results.shifted.per_client}
        results.shifted = None
    results.scores = {name: value for name, value in saved["scores"].items() if name not in outdated}
    results.per_client = {}
    for name, values in metrics["clients"].items():
        # The last rounds and the ledgers' ε are a part of the federation's state.
        is_score = name != LAST_ROUND and not name.startswith("privacy/")
        if is_score and name not in outdated:
            results.per_client[name] = torch.tensor(values, dtype=torch.double)
    results.details = {name: metrics[name] for name in DETAILS if name in metrics}
    results.failed_outputs = failed_of_records(metrics.get("failed_outputs", []))


def _shift_reprs(context: RunContext) -> dict[str, str]:
    """Return the values that identify the shifts of the data in a checkpoint."""
    return {name: repr(shift) for name, shift in context.data.shifts.items()}


def _combine_scores(
    condition_scores: Sequence[_ConditionScores], has_global_model: bool, shifts: dict[str, str], seconds: float
) -> ShiftScores:
    """Combine the scores on all shifted sets.

    The score on corruptions is the mean over their kinds and severities. Names of the first metric have no suffix, and
    scores of single kinds are those of the first metric.

    Args:
        condition_scores: Scores on each set.
        has_global_model: Whether there is a global model.
        shifts: Values that identify the shifts.
        seconds: Time that scoring took.
    """
    results_of_shifts: dict[str, list[_ConditionScores]] = {}
    for result in condition_scores:
        results_of_shifts.setdefault(result.condition.shift, []).append(result)
    scores: dict[str, float] = {}
    per_client: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for shift, shift_results in results_of_shifts.items():
        metrics = list(shift_results[0].by_metric)
        for metric in metrics:
            name = shift if metric == metrics[0] else f"{shift}_{metric}"
            scores_of_sets = [result.by_metric[metric] for result in shift_results]
            predictions = {
                "personal": [scores_of_set.personal for scores_of_set in scores_of_sets],
                "both": [scores_of_set.both for scores_of_set in scores_of_sets if scores_of_set.both is not None],
            }
            for kind_of_prediction, client_scores_of_sets in predictions.items():
                if not client_scores_of_sets:
                    continue
                client_scores = _mean_over_sets(client_scores_of_sets)
                if client_scores.has_failed.any() or not client_scores.scores.isnan().all():
                    mean, std = _mean_and_std(client_scores)
                    per_client[f"{kind_of_prediction}/{name}"] = client_scores.scores
                    scores[f"{kind_of_prediction}/{name}"] = mean
                    scores[f"{kind_of_prediction}/{name}_std"] = std
            if has_global_model:
                scores[f"global/{name}"] = fmean(scores_of_set.global_score for scores_of_set in scores_of_sets)
        shares_of_sets = [result.typical_shares for result in shift_results if result.typical_shares is not None]
        if shares_of_sets:
            typical_shares = torch.stack(shares_of_sets).nanmean(0)
            if not typical_shares.isnan().all():
                per_client[f"typical/{shift}"] = typical_shares
                scores[f"typical/{shift}"] = float(typical_shares.nanmean())
        if shift_results[0].condition.corruption:
            kinds[shift] = _severity_curves(shift_results, metrics[0])
    return ShiftScores(scores, per_client, kinds, shifts, seconds)


def _severity_curves(condition_scores: Sequence[_ConditionScores], metric: str) -> dict[str, dict[str, list[float]]]:
    """Return the scores of each kind of corruption in the order of its severities, without scores that are NaN.

    A curve is left out as a whole: a curve of the other severities would look complete.
    """
    curves: dict[str, dict[str, list[float]]] = {}
    for result in condition_scores:
        scores = result.by_metric[metric]
        mean, std = _mean_and_std(scores.personal)
        values = {"personal": mean, "personal_std": std, "global": scores.global_score}
        if scores.both is not None:
            mean_of_both, std_of_both = _mean_and_std(scores.both)
            values["both"] = mean_of_both
            values["both_std"] = std_of_both
        if result.typical_shares is not None:
            values["typical"] = float(result.typical_shares.nanmean())
        curve = curves.setdefault(result.condition.corruption, {"severity": []})
        curve["severity"].append(result.condition.severity)
        for name, value in values.items():
            curve.setdefault(name, []).append(value)
    complete_curves: dict[str, dict[str, list[float]]] = {}
    for kind, curve in curves.items():
        complete_curves[kind] = {name: values for name, values in curve.items() if not any(map(math.isnan, values))}
    return complete_curves


def _mean_over_sets(client_scores_of_sets: Sequence[ClientScores]) -> ClientScores:
    """Return the clients' mean scores over several shifted sets."""
    failed = torch.stack([client_scores.has_failed for client_scores in client_scores_of_sets]).any(0)
    means = torch.stack([client_scores.scores for client_scores in client_scores_of_sets]).nanmean(0)
    # A mean over only the sets on which the outputs are finite would mislead.
    return ClientScores(means.masked_fill(failed, math.nan), failed)


def _mean_and_std(client_scores: ClientScores) -> tuple[float, float]:
    """Return mean and standard deviation over the clients that have a score; NaN if none has, or one has failed."""
    scores = client_scores.scores[~client_scores.scores.isnan()].double()
    if len(scores) == 0 or client_scores.has_failed.any():
        return math.nan, math.nan
    return float(scores.mean()), float(scores.std(correction=0))


def fine_tune_clients(context: RunContext) -> bool:
    """Fine-tune the final global state for every client, if the algorithm ends that way. A collective.

    Returns:
        Whether the clients were fine-tuned by this call.
    """
    federation = context.federation
    tuning = context.settings.algorithm.personalization()
    if tuning is None or federation.tuned is not None or not federation.rounds_done:
        return False
    _, phase = tuning
    clients = range(context.data.num_clients)
    able = federation.protection.affordable(clients, tuning=True)
    excluded = sorted({*clients} - {*able})
    if excluded:
        rank_zero_warn(f"privacy: client {', '.join(map(str, excluded))} cannot afford the fine-tuning")
    plans = _fine_tuning_plans(context, able, phase)
    sampling: PrivateSampling | None = None
    images = federation.protection.image_account
    if images is not None:
        sampling = images.sampling(is_tuning=True)
    with context.precision():
        broken, failed = federation.personalize(
            context.progress_bar(plans, "Fine-tune"), lambda plan: context.local_steps(plan, sampling)
        )
    # The scores are those of the models before the fine-tuning.
    context.results.shifted = None
    # Which client's training failed depends on its images, so no log of a private run may name it.
    if not context.settings.private:
        warn_of_failed_clients("fine-tuning", broken, "it keeps the global adapter", failed)
    return True


def _fine_tuning_plans(context: RunContext, clients: Sequence[int], phase: Phase) -> list[RoundPlan]:
    """Return the plans of groups of clients that fine-tune together, as many at a time as in a round."""
    # A group trains for as many steps as its largest client needs, so clients of similar sizes are grouped.
    ordered = sorted(clients, key=lambda client: -context.data.train_sizes[client])
    group_size = context.settings.clients_per_round or context.data.num_clients
    plans = []
    for start in range(0, len(ordered), group_size):
        group = ordered[start : start + group_size]
        plans.append(context.data.plan_for(group, context.federation.rounds_done, [phase]))
    return plans


def finish(context: RunContext, history: History) -> None:
    """Run the final steps that training skipped because it was stopped early. A collective.

    Clients are fine-tuned and models are scored unless that was done before. New scores are logged and added to the
    last record of the history, if there is one. The newest checkpoint of each callback is written again to include
    them.
    """
    tuned = fine_tune_clients(context)
    scored = _score_last_round(context, history, tuned)
    if scored:
        _log_scores(context, history)
    if tuned or scored:
        _rewrite_newest_checkpoints(context.trainer)


def _score_last_round(context: RunContext, history: History, tuned: bool) -> bool:
    """Score models that have changed since they were scored; return whether there are new scores."""
    module = context.module
    has_new_scores = False
    is_scored = not history or any(name.startswith("personal/") for name in history[-1])
    needs_scores = tuned or not is_scored
    shifted = context.results.shifted
    are_outdated = shifted is None or shifted.repr_of_shift != _shift_reprs(context)
    has_shifts = bool(context.data.conditions) and context.data.shifts_when != "test"
    needs_shifts = has_shifts and bool(history) and are_outdated
    # A resumed run that stopped at once has not compared any images yet.
    if needs_scores or needs_shifts or module.both is None:
        prepare_both_models(context)
    if needs_scores:
        module.on_validation_epoch_start()
        has_new_scores = context.evaluate(
            context.data.val_dataloader(), context.trainer.limit_val_batches, module.validation_step
        )
        if has_new_scores:
            module.score()
            warn_of_failed_outputs(context)
    if needs_shifts and score_shifts(context):
        context.results.include_shifted()
        has_new_scores = True
    return has_new_scores


def _log_scores(context: RunContext, history: History) -> None:
    """Add the module's scores to the last round, in the history and in the loggers."""
    scores = context.results.scores
    round: float = 0
    if history:
        history[-1] |= scores
        round = history[-1]["round"]
    # Loggers count steps from 0: this is the row of the last optimiser step.
    step = max(0, context.trainer.global_step - 1)
    for logger in context.trainer.loggers:
        logger.log_metrics({"epoch": round, "round": round, **scores}, step=step)


def _rewrite_newest_checkpoints(trainer: pl.Trainer) -> None:
    """Write the newest checkpoint of each callback again, with the current models and scores."""
    if is_dev_run(trainer):
        return
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        newest = callback.last_model_path
        # If a callback monitors nothing, its best checkpoint is the newest one. A checkpoint that was selected by a
        # metric is left as it was then.
        if not newest and not callback.monitor:
            newest = callback.best_model_path
        if newest:
            trainer.save_checkpoint(newest, callback.save_weights_only)
