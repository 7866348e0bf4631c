# SPDX-License-Identifier: Apache-2.0
"""Scores after the last round and on shifted test sets."""

import json
import math
import time
from itertools import groupby, islice
from statistics import fmean
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.data import FederatedDataModule
from perada.data.shifts import Condition
from perada.federation.evaluation import sample_clients
from perada.federation.shifted import ShiftedEvaluation, ShiftedScores
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import run_evaluation
from perada.lightning.run_folder import run_folder
from perada.lightning.steps import federation_of, prepared, progress, warn_broken
from perada.results.report import SHIFTS_FILE
from perada.results.restore import restoring


def score_shifts(trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
    """Run all models on the shifted sets, and keep the scores in the module; return whether there was anything to run.

    The trainer's limit of test batches, or of validation batches in training, holds for each pass over the images.
    """
    limit = trainer.limit_test_batches if trainer.state.fn == "test" else trainer.limit_val_batches
    if not data.conditions or not limit:
        return False
    began, found = time.perf_counter(), []
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        for condition in progress(trainer, data.conditions, "Shifts"):
            found.append((condition, _scores(data, module, condition, limit)))
    module.shifted = _summary(found, federation_of(module).settings.algorithm.global_model)
    module.shifted |= {"of": _described(data), "seconds": time.perf_counter() - began}
    folder = run_folder(trainer)  # all processes ask, rank 0 writes
    if folder is not None and module.shifted["kinds"] and trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SHIFTS_FILE).write_text(json.dumps(module.shifted["kinds"], indent=1) + "\n")
    return True


def scored_shifts(data: FederatedDataModule, module: FederatedClassifier) -> bool:
    """Whether the module holds scores of the shifts that the data has."""
    return module.shifted.get("of") == _described(data)


@restoring()
def restore_shifts(data: FederatedDataModule, module: FederatedClassifier, shifted: dict[str, Any]) -> None:
    """Take over the scores of a checkpoint, or forget them where the data has other shifts by now."""
    module.shifted = shifted
    if not scored_shifts(data, module):
        module.shifted = {}
        for kind in ("scores", "per_client"):
            known = getattr(module, kind)
            setattr(module, kind, {name: known[name] for name in known if name not in shifted.get(kind, {})})


def _described(data: FederatedDataModule) -> dict[str, str]:
    return {name: repr(shift) for name, shift in data.shifts.items()}


def _scores(
    data: FederatedDataModule, module: FederatedClassifier, condition: Condition, limit: float
) -> dict[str, ShiftedScores]:
    federation = federation_of(module)
    everywhere = sample_clients(federation.num_clients, module.global_test_clients, module.seed)
    evaluation = ShiftedEvaluation(federation, module.metrics, everywhere, condition.others)
    batches = data.shift_loader(condition)
    count = int(len(batches) * limit) if isinstance(limit, float) else limit
    for index, batch in enumerate(islice(batches, count)):
        evaluation.step(data.prepare(data.transfer_batch_to_device(batch, module.device, 0)), index)
    return evaluation.result()


def _summary(found: list[tuple[Condition, dict[str, ShiftedScores]]], shared: bool) -> dict[str, Any]:
    """Scores by name, those of each client, and those of each kind of corruption, in plain types and tensors.

    The score of corruptions is the mean over their kinds and severities, of each client and of the global model. The
    first metric has the plain names, and kinds are scored by it alone.
    """
    scores: dict[str, float] = {}
    per_client: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for shift, own in groupby(found, lambda pair: pair[0].shift):
        passes = list(own)
        first, *others = passes[0][1]
        for metric in (first, *others):
            ending = "" if metric == first else f"_{metric}"
            clients = torch.stack([results[metric].personal for _, results in passes]).nanmean(0)
            if not clients.isnan().all():
                mean, spread = _mean_and_std(clients)
                per_client[f"personal/{shift}{ending}"] = clients
                scores |= {f"personal/{shift}{ending}": mean, f"personal/{shift}{ending}_std": spread}
            if shared:
                scores[f"global/{shift}{ending}"] = fmean(results[metric].shared for _, results in passes)
        for condition, results in passes if passes[0][0].kind else ():
            result = results[first]
            curve = kinds.setdefault(shift, {}).setdefault(condition.kind, {"severity": []})
            curve["severity"].append(condition.severity)
            mean, spread = _mean_and_std(result.personal)
            values = {"personal": mean, "personal_std": spread, "global": result.shared}
            for name, value in values.items():
                if value == value:
                    curve.setdefault(name, []).append(value)
    return {"scores": scores, "per_client": per_client, "kinds": kinds}


def _mean_and_std(values: torch.Tensor) -> tuple[float, float]:
    """Over the clients that have a score; NaN where none has."""
    known = values[~values.isnan()]
    return float(known.mean()), float(known.std(correction=0)) if len(known) else math.nan


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
