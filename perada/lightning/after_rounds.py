# SPDX-License-Identifier: Apache-2.0
"""What follows the last round: the clients' own fine-tuning, where the algorithm ends so, and the last scores."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.data import FederatedDataModule
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import run_evaluation
from perada.lightning.shift_scores import score_shifts, scored_shifts
from perada.lightning.steps import federation_of, prepared, progress, warn_broken


def personalize(trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
    """Let every client fine-tune the global state, where the algorithm ends so and it was not done yet."""
    federation = federation_of(module)
    settings, protection = federation.settings, federation.protection
    tuning = settings.algorithm.personalization()
    if tuning is None or federation.tuned is not None or not federation.rounds_done:
        return False
    size = settings.clients_per_round or data.num_clients
    able = protection.affordable(range(data.num_clients), tuning=True)
    if len(able) < data.num_clients:
        missing = sorted({*range(data.num_clients)} - {*able})
        rank_zero_warn(f"privacy: client {', '.join(map(str, missing))} cannot afford the fine-tuning")
    ordered = sorted(able, key=lambda client: -data.train_sizes[client])
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    sampling = None if protection.images is None else protection.images.sampling(tuning=True)
    plans = [data.plan_for(group, federation.rounds_done, [tuning[1]]) for group in groups]
    with trainer.precision_plugin.forward_context():
        broken, failed = federation.personalize(
            progress(trainer, plans, "Fine-tune"), lambda plan: prepared(data, module, plan, sampling)
        )
    module.shifted = {}  # of the models before
    warn_broken("fine-tuning", broken, "it keeps the global adapter", failed)
    return True


def finish(
    trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, history: list[dict[str, float]]
) -> None:
    """Fine-tune also where training was stopped early, and score what came out where that was not done yet."""
    tuned = personalize(trainer, data, module)
    scored = not history or any(name.startswith("personal/") for name in history[-1])
    changed = tuned
    if tuned or not scored:
        changed |= score(trainer, data, module, history)
    if data.shifts_when != "test" and history and not scored_shifts(data, module):
        if score_shifts(trainer, data, module):
            module.add_shifted()
            _record(trainer, module, history)
            changed = True
    if changed:
        save_again(trainer)


def score(
    trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, history: list[dict[str, float]]
) -> bool:
    """Evaluate outside of Lightning's validation; return whether there was anything to evaluate.

    The scores are logged, and added to the last record of the history, if it has one.
    """
    module.on_validation_epoch_start()
    if not run_evaluation(trainer, data, module, module.validation_step):
        return False
    module.score()
    _record(trainer, module, history)
    return True


def _record(trainer: pl.Trainer, module: FederatedClassifier, history: list[dict[str, float]]) -> None:
    """Log the scores, and add them to the last record of the history, if it has one."""
    for record in history[-1:]:
        record |= module.scores
    round = history[-1]["round"] if history else 0
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": round, "round": round, **module.scores}, step=max(0, trainer.global_step - 1))


def save_again(trainer: pl.Trainer) -> None:
    """Write the newest checkpoint of each callback once more, with what came after the last round."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
            newest = callback.last_model_path or ("" if callback.monitor else callback.best_model_path)
            if newest:
                trainer.save_checkpoint(newest, callback.save_weights_only)
