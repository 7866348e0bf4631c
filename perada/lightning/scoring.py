# SPDX-License-Identifier: Apache-2.0
"""What a fit measures: each client's scores, those on shifted sets and after the last round, and the run's record."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from perada.algorithms.joining import algorithm_record
from perada.data import FederatedDataModule
from perada.data.preprocessing import Preprocessing
from perada.data.shifts import Condition
from perada.federation.evaluation import Evaluation, ShiftedEvaluation, sample_clients
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier
from perada.lightning.parts import Parts, warn_broken
from perada.results.report import LAST_ROUND, SHIFTS_FILE
from perada.results.run_file import RunFile, write_run

History = list[dict[str, float]]
DETAILS = ("test_images", "predictions", "global/local_test", "per_class")
"""What the module knows of its last evaluation besides scores."""
LONG_SCORING = 60.0
"""Seconds of scoring that a run says beforehand."""
FEW_MODELS = 10
"""Number of models that is proposed where all of them on all images take long."""


@dataclass
class ClientScores:
    """What is known of each client besides its last scores.

    Attributes:
        initial: Scores by name of the models before the first round, those of each client (M,).
        by_round: For each evaluation its ``round`` and each client's ``personal/local_test``.
        command: The command line of the run; empty where there was none.
    """

    initial: dict[str, list[float]] = field(default_factory=dict)
    by_round: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def begin(self, parts: Parts) -> None:
        """Score the initial models on their clients' images: two passes at most, once, before the first round."""
        if parts.federation.rounds_done or self.initial or parts.trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
            return
        evaluation = Evaluation(parts.federation, parts.module.metrics, [])
        if parts.evaluate(parts.data.val_dataloader(), parts.trainer.limit_val_batches, evaluation.step):
            self.initial = {name: _rounded(values) for name, values in evaluation.result()[1].items()}

    def write(self, parts: Parts, history: History) -> None:
        """Keep what each client scored, and write all there is so far into the run's folder, whatever loggers write."""
        scores = parts.module.per_client.get("personal/local_test")
        if scores is not None and history:  # in place of an earlier evaluation of the round
            kept = [own for own in self.by_round if own["round"] < history[-1]["round"]]
            self.by_round = [*kept, {"round": history[-1]["round"], "personal/local_test": _rounded(scores)}]
        folder = parts.folder()
        if folder is not None:
            content = RunFile(
                parts.data.num_clients,
                run_info(parts),
                metrics_of(parts, history, self),
                in_checkpoints=True,
                train_sizes=list(parts.data.train_sizes),
                command=[] if parts.settings.test_mode else self.command,
            )
            write_run(folder, content)


def _rounded(scores: torch.Tensor) -> list[float]:
    """Scores as they are written: more digits than any number of images gives."""
    return [round(value, 6) for value in scores.tolist()]


def metrics_of(parts: Parts, history: History, measured: ClientScores) -> dict[str, Any]:
    """``Run.metrics``: see :class:`perada.Run`."""
    module = parts.module
    clients: dict[str, list[Any]] = {name: scores.tolist() for name, scores in module.per_client.items()}
    if parts.federation.rounds_done:
        clients[LAST_ROUND] = list(parts.federation.last_rounds)
    found = {
        "rounds": history,
        "clients": clients | parts.federation.protection.epsilons(parts.data.num_clients),
        "shifts": module.shifted.get("kinds"),
        "initial": measured.initial,
        "by_round": measured.by_round,
        "partition": class_counts(parts),
        **module.details,
    }
    return {name: value for name, value in found.items() if value or name in ("rounds", "clients")}


def class_counts(parts: Parts) -> dict[str, list[list[int]]]:
    """Images (M, K) of each client and class, by ``train`` and ``test``; nothing of a private run's, which they are."""
    return {} if parts.settings.private else parts.data.checked.class_counts()


def run_info(parts: Parts) -> dict[str, Any]:
    """The facts of ``Run.info``; without the seed where noise would follow from it."""
    data, federation = parts.data, parts.federation
    found = describe_run(
        parts.settings,
        parts.module,
        data,
        rounds=federation.rounds_done,
        num_clients=federation.num_clients,
        clients_per_round=parts.settings.clients_per_round,
        images=list(data.train_sizes),
        preprocessing=data.preprocessing,
        classes=data.classes,
        client_names=data.client_names,
        privacy=federation.protection.record(data.num_clients),
    )
    return found | ({"lora_ranks": list(parts.settings.lora_ranks)} if parts.settings.lora_ranks else {})


def describe_run(
    settings: Settings,
    module: FederatedClassifier,
    data: FederatedDataModule,
    *,
    rounds: int,
    num_clients: int,
    clients_per_round: int | None,
    images: list[int] | None,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    client_names: Sequence[str] | None,
    privacy: dict[str, Any] | None,
) -> dict[str, Any]:
    """The facts of ``Run.info``, of a simulation or of a deployment.

    Args:
        settings: How the rounds went.
        module: The network, built.
        data: Only its options are looked at, not its images.
        rounds: How many there were.
        num_clients: How many took part.
        clients_per_round: How many were drawn for a round; None for all.
        images: Training images of each client; None where that is not known.
        preprocessing: What is done to images.
        classes: Their names.
        client_names: Names of the clients.
        privacy: The record of :meth:`perada.privacy.protection.Protection.record`.
    """
    algorithm, prepared = settings.algorithm, data.prepare
    options = ("optimizer", "momentum", "weight_decay", "lr_schedule", "lr_gamma", "lr_every", "metric")
    training = {  # what a client does that joins later
        "algorithm": algorithm_record(algorithm),
        "phases": [asdict(phase) for phase in settings.phases],
        "rounds": rounds,
        "num_clients": num_clients,
        "clients_per_round": clients_per_round,
        **({} if images is None else {"images": images}),
        "batch_size": data.batch_size,
        "crop_padding": prepared.crop_padding,
        "flip": prepared.flip,
        **{f"lr_{role}": rate for role, rate in module.lr.items()},
        **{name: getattr(module, name) for name in options},
        "clip_norm": None if module.clip_norm == math.inf else module.clip_norm,
    }
    return {
        "backbone": module.backbone if isinstance(module.backbone, str) else None,
        **{name: getattr(module, name) for name in ("pretrained", "num_classes", "train_backbone", "adapter_options")},
        "image_size": module.image_size if data.image_size is None else data.image_size,
        "built_for": module.image_size,
        "preprocessing": preprocessing.record(),
        "adapter": module.adapter if isinstance(module.adapter, str) else None,
        "algorithm": algorithm.kind,
        "average": algorithm.average,
        "global_model": algorithm.global_model,
        "multilabel": module.multilabel,
        "classes": None if classes is None else list(classes),
        "clients": None if client_names is None else list(client_names),
        "seed": None if settings.test_mode else settings.seed,
        "training": training,
        "privacy": privacy,
    }


def scoring_notice(seconds: float, batches: int, models: int, everywhere: int) -> str | None:
    """Say how long it takes to score all models, where that is minutes.

    Args:
        seconds: What the first batch of images took.
        batches: Number of batches.
        models: Number of personal models; 0 where clients predict with the global one.
        everywhere: Number of those that are scored on all images, and not only on their clients' own.

    Returns:
        The message, with the options that make it shorter; None for less than :data:`LONG_SCORING` seconds.
    """
    total = seconds * batches
    if total < LONG_SCORING:
        return None
    remedy = "score less often with eval_every (--trainer.check_val_every_n_epoch)"
    if everywhere > FEW_MODELS:
        remedy = (
            f"score only some of them on all images with global_test_clients={FEW_MODELS} "
            f"(--model.global_test_clients={FEW_MODELS}), or {remedy}"
        )
    what = f"{models} personal models, {everywhere} of them on all test images" if models else "the global model"
    measured = f"{batches} batches, the first took {seconds:.1f} s"
    return f"scoring {what} takes about {_minutes(total)} each time ({measured}); {remedy}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{max(1, round(seconds / 60))} min"


class ScoringClock:
    """Measures the first batch that a Trainer scores, and says once how long all of them take."""

    def __init__(self) -> None:
        self.told = False
        self._began = 0.0

    def begin(self, parts: Parts, batch_idx: int) -> None:
        """Take the time before a batch."""
        if batch_idx == 0 and not self.told:
            _synchronize(parts)
            self._began = time.perf_counter()

    def end(self, parts: Parts, batch_idx: int, batches: float) -> None:
        """Say after the first of so many batches how long all take, if that is minutes."""
        if batch_idx != 0 or self.told or not math.isfinite(batches):
            return
        self.told = True
        _synchronize(parts)
        seconds = time.perf_counter() - self._began
        clients = parts.data.num_clients
        personalized = parts.federation.personalized
        everywhere = len(sample_clients(clients, parts.module.global_test_clients, parts.module.seed))
        if personalized:
            notice = scoring_notice(seconds, int(batches), clients, everywhere)
        else:
            notice = scoring_notice(seconds, int(batches), models=0, everywhere=0)
        if notice is not None:
            rank_zero_info(notice)


def _synchronize(parts: Parts) -> None:
    """Wait for the accelerator: what runs there is not measured otherwise."""
    if parts.module.device.type == "cuda":
        torch.cuda.synchronize(parts.module.device)


def score_shifts(parts: Parts) -> bool:
    """Run all models on the shifted sets, and keep the scores in the module; return whether there was anything to run.

    The trainer's limit of test batches, or of validation batches in training, holds for each pass over the images.
    """
    data, module, trainer, federation = parts.data, parts.module, parts.trainer, parts.federation
    limit = trainer.limit_test_batches if trainer.state.fn == "test" else trainer.limit_val_batches
    if not data.conditions or not limit:
        return False
    began, found = time.perf_counter(), []
    everywhere = sample_clients(federation.num_clients, module.global_test_clients, module.seed)
    for number, condition in enumerate(parts.progress(data.conditions, "Shifts")):
        evaluation = ShiftedEvaluation(federation, module.metrics, everywhere, condition.others)
        parts.evaluate(data.shift_loader(condition), limit, evaluation.step)
        found.append((condition, evaluation.result()))
        expected = (time.perf_counter() - began) * len(data.conditions)
        if number == 0 and expected >= LONG_SCORING:
            rank_zero_info(
                f"scoring {len(data.conditions)} shifted test sets takes about {_minutes(expected)}; give fewer kinds "
                "or severities in data.shifts, or score fewer models on all images with global_test_clients"
            )
    module.shifted = _summary(found, parts.settings.algorithm.global_model)
    module.shifted |= {"of": _described(parts), "seconds": time.perf_counter() - began}
    folder = parts.folder()
    if folder is not None and module.shifted["kinds"]:
        (folder / SHIFTS_FILE).write_text(json.dumps(module.shifted["kinds"], indent=1) + "\n")
    return True


def restore_scores(parts: Parts, saved: dict[str, Any]) -> None:
    """Take over the scores of a checkpoint, but for those of shifts where the data has others by now."""
    module, metrics, shifted = parts.module, saved["metrics"], saved["shifted"]
    current = shifted.get("of") == _described(parts)
    others = {} if current else {**shifted.get("scores", {}), **shifted.get("per_client", {})}
    module.scores = {name: value for name, value in saved["scores"].items() if name not in others}
    module.per_client = {
        name: torch.tensor(values, dtype=torch.double)
        for name, values in metrics["clients"].items()
        if name not in others and name != LAST_ROUND and not name.startswith("privacy/")
    }
    module.details = {name: metrics[name] for name in DETAILS if name in metrics}
    module.shifted = shifted if current else {}


def _described(parts: Parts) -> dict[str, str]:
    return {name: repr(shift) for name, shift in parts.data.shifts.items()}


def _summary(found: list[tuple[Condition, dict[str, tuple[torch.Tensor, float]]]], shared: bool) -> dict[str, Any]:
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
            clients = torch.stack([results[metric][0] for _, results in passes]).nanmean(0)
            if not clients.isnan().all():
                mean, spread = _mean_and_std(clients)
                per_client[f"personal/{shift}{ending}"] = clients
                scores |= {f"personal/{shift}{ending}": mean, f"personal/{shift}{ending}_std": spread}
            if shared:
                scores[f"global/{shift}{ending}"] = fmean(results[metric][1] for _, results in passes)
        for condition, results in passes if passes[0][0].kind else ():
            personal, of_global = results[first]
            curve = kinds.setdefault(shift, {}).setdefault(condition.kind, {"severity": []})
            curve["severity"].append(condition.severity)
            mean, spread = _mean_and_std(personal)
            values = {"personal": mean, "personal_std": spread, "global": of_global}
            for name, value in values.items():
                if value == value:
                    curve.setdefault(name, []).append(value)
    return {"scores": scores, "per_client": per_client, "kinds": kinds}


def _mean_and_std(values: torch.Tensor) -> tuple[float, float]:
    """Over the clients that have a score; NaN where none has."""
    known = values[~values.isnan()]
    return float(known.mean()), float(known.std(correction=0)) if len(known) else math.nan


def personalize(parts: Parts) -> bool:
    """Let every client fine-tune the global state, where the algorithm ends so and it was not done yet."""
    federation, data, clients = parts.federation, parts.data, range(parts.data.num_clients)
    tuning, protection = parts.settings.algorithm.personalization(), federation.protection
    if tuning is None or federation.tuned is not None or not federation.rounds_done:
        return False
    able = protection.affordable(clients, tuning=True)
    missing = sorted({*clients} - {*able})
    if missing:
        rank_zero_warn(f"privacy: client {', '.join(map(str, missing))} cannot afford the fine-tuning")
    ordered, size = sorted(able, key=lambda client: -data.train_sizes[client]), parts.settings.clients_per_round
    size = size or len(clients)
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    sampling = None if protection.images is None else protection.images.sampling(tuning=True)
    plans = [data.plan_for(group, federation.rounds_done, [tuning[1]]) for group in groups]
    with parts.precision():
        shown = parts.progress(plans, "Fine-tune")
        broken, failed = federation.personalize(shown, lambda plan: parts.prepared(plan, sampling))
    parts.module.shifted = {}  # of the models before
    if not parts.settings.private:  # in a private run no log says whose training failed
        warn_broken("fine-tuning", broken, "it keeps the global adapter", failed)
    return True


def finish(parts: Parts, history: History) -> None:
    """Fine-tune also where training was stopped early, and score what came out where that was not done yet.

    The scores are logged, and added to the last record of the history, if it has one; the newest checkpoint of each
    callback is written once more.
    """
    module, tuned = parts.module, personalize(parts)
    scored = not history or any(name.startswith("personal/") for name in history[-1])
    found = False
    if tuned or not scored:
        module.on_validation_epoch_start()
        found = parts.evaluate(parts.data.val_dataloader(), parts.trainer.limit_val_batches, module.validation_step)
        if found:
            module.score()
    if parts.data.shifts_when != "test" and history and module.shifted.get("of") != _described(parts):
        if score_shifts(parts):
            module.add_shifted()
            found = True
    if found:
        for record in history[-1:]:
            record |= module.scores
        round = history[-1]["round"] if history else 0
        for logger in parts.trainer.loggers:
            values = {"epoch": round, "round": round, **module.scores}
            logger.log_metrics(values, step=max(0, parts.trainer.global_step - 1))
    if tuned or found:
        for callback in parts.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not parts.trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
                newest = callback.last_model_path or ("" if callback.monitor else callback.best_model_path)
                if newest:
                    parts.trainer.save_checkpoint(newest, callback.save_weights_only)
