# SPDX-License-Identifier: Apache-2.0
"""A client that joins a finished run: it trains a personal model, and nothing else in the run changes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.algorithms import Algorithm
from perada.algorithms.newcomers import joining
from perada.algorithms.records import algorithm_of
from perada.core.checks import check_choice, check_integer, check_number, check_type, invalid_option
from perada.core.rounds import Phase
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.datasets import resolve_subset
from perada.data.joining import joining_data
from perada.data.medical.reading import DEFAULT_READING
from perada.federation.options import Evaluation, Training
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.privacy_setup import check_pretraining
from perada.lightning.run_record import LOCAL_SCORE, RECORDED_OPTIONS
from perada.lightning.trainers import make_trainer
from perada.privacy import Privacy
from perada.results.client_names import check_new_name
from perada.results.report import unit_of
from perada.results.run import Run
from perada.tasks.base import make_task


def personalize(  # noqa: PLR0913  # each argument is an option of `perada clients add`
    run: Run,
    data: FederatedData,
    name: str | None = None,
    *,
    rounds: int | None = None,
    local_steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    algorithm: Algorithm | None = None,
    seed: int = 0,
    accelerator: str | None = None,
    progress: bool = False,
) -> Run:
    """Let a client join a finished run: it trains a personal model from the global state, as the run's clients did.

    The algorithm with its λ, the learning rates, the optimiser, the batch size and the local steps are those of the
    run. The global state and the other clients do not change. :func:`perada.algorithms.newcomers.joining` defines what
    is trained: PerAda's clients train v from w on loss + λ/2 ||v − w||². If the run has sample-level privacy, this
    training has it too: with the run's noise multiplier (or its target), clipping and δ, and an ε that depends on the
    client's number of images. Only the release ledger is limited, since nothing is sent.

    Args:
        run: The run. It is not changed. If its clients predict with both models, the new one does, too.
        data: The client's images: those of its only client, or of the one called ``name``. If it has names of classes,
            labels are matched with the run's by name. Images are preprocessed like the run's.
        name: The client's name in the run; by default its name in the data.
        rounds: Rounds of local training. Default: as many as a client of the run took part in on average, or one if
            clients had no personal models.
        local_steps: Local steps per round; by default those of the run.
        batch_size: Images per step; by default that of the run.
        lr: Learning rate; by default that of the run.
        algorithm: Algorithm to train with. Required if the run's is not one of perada's.
        seed: Seed of batches and dropout.
        accelerator: ``cpu``, ``gpu`` and so on; by default a GPU if there is one.
        progress: Show a progress bar.

    Returns:
        The run with one more client, the last. ``info["joined"][-1]`` records how it joined: its number, name, images
        and rounds, and the scores ``before`` and ``after`` on its test images (``None`` without any).

    Raises:
        ValueError: If the name is taken, the images or classes do not match the run, the run has several global
            states, or its privacy cannot be provided.

    >>> personalize(Run.load("my_run"), (train, test), "east").save("my_run")  # doctest: +SKIP
    """
    _check_arguments(run, data, name, rounds, local_steps, batch_size, lr, algorithm, progress)
    check_name_of_new_client(run, name)
    info = run.info
    training = info["training"]
    base = algorithm_of(training["algorithm"]) if algorithm is None else algorithm
    client_algorithm, phases = joining(base, tuple(Phase(**phase) for phase in training["phases"]))
    if local_steps is not None:
        phases = tuple(Phase(phase.name, steps=int(local_steps)) for phase in phases)
    if rounds is None:
        rounds = 1 if base.inference == "global" else _mean_participation(training)
    rounds = int(rounds)  # Lightning and files do not take NumPy's integers
    if info.get("privacy"):
        # Before joining_data copies the images into memory: copies do not show which set they are from.
        client, _ = data.find(name)
        check_pretraining(info["pretrained"], [data.train[client]], _privacy_options(info))
    task = make_task(info["task"])
    client_data = joining_data(data, name, run.preprocessing, info.get("classes"), info["num_classes"], task)
    assert client_data.client_names is not None
    (name,) = client_data.client_names
    check_name_of_new_client(run, name)
    datamodule = FederatedDataModule(
        client_data,
        batch_size=training["batch_size"] if batch_size is None else batch_size,
        image_size=run.preprocessing.last_size,
        num_classes=info["num_classes"],
        crop_padding=training["crop_padding"],
        flip=training["flip"],
        mixup=training["mixup"],
        cutmix=training["cutmix"],
        sampling=training["sampling"],
        task=task,
    )
    adapted = run.adapted()
    module = FederatedClassifier(adapted.backbone.name)
    # Otherwise the module would build a new network of that name.
    module.adapted = adapted
    # The run's global model is the server's, which does not change.
    client_algorithm.global_model = info.get("prediction") == "both" and base.global_model
    loop = FederatedLoop(
        client_algorithm,
        training=_recorded_training(run, lr),
        evaluation=_evaluation_options(info, with_both=client_algorithm.global_model),
        privacy=_release_privacy(info),
        seed=seed,
    )
    loop.phases = phases
    _make_trainer(loop, rounds, accelerator, progress).fit(module, datamodule=datamodule)

    client_run = loop.outcome(module)
    score_before: float | None = None
    after: float | None = None
    if datamodule.val_dataloader():
        score_before = _local_score(loop.client_scores.initial)
        after = _local_score(client_run.metrics["clients"])
    if score_before is not None and after is not None:
        test = datamodule.checked.test
        images = 0 if test is None else sum(test.sizes)
        _warn_if_worse(name, score_before, after, images, module)
    num_images = datamodule.train_sizes[0]
    steps_per_round = sum(phase.local_steps(num_images, datamodule.batch_size) for phase in phases)
    record = {
        "name": name,
        "images": num_images,
        "algorithm": base.kind,
        "rounds": rounds,
        "steps": rounds * steps_per_round,
        "before": score_before,
        "after": after,
    }
    joined = run.with_client(client_run, record)
    source = resolve_subset(data.train[data.find(name)[0]]).base
    reading = getattr(source, "medical", DEFAULT_READING)
    joined.info["preprocessing"] = run.preprocessing.with_client(name, reading).record()
    return joined


def _make_trainer(loop: FederatedLoop, rounds: int, accelerator: str | None, progress: bool) -> pl.Trainer:
    """Return a trainer on one device, which scores the client after the last round and logs nothing."""
    options: dict[str, Any] = {
        "check_val_every_n_epoch": rounds,
        "logger": False,
        "devices": 1,
        "num_nodes": 1,
        "enable_progress_bar": progress,
    }
    if accelerator is not None:
        options["accelerator"] = accelerator
    return make_trainer(loop, rounds, **options)


def _check_arguments(
    run: object,
    data: object,
    name: object,
    rounds: object,
    local_steps: object,
    batch_size: object,
    lr: object,
    algorithm: object,
    progress: object,
) -> None:
    """Raise an OptionError for an argument of :func:`personalize` that has a wrong type or is out of range."""
    if not isinstance(run, Run):
        raise invalid_option("run", run, "a Run", "load a saved one with Run.load(folder)")
    if not isinstance(data, FederatedData):
        raise invalid_option("data", data, "of type FederatedData", "for example FederatedData(train=[dataset])")
    check_type("name", name, str, "'south'")
    check_type("algorithm", algorithm, Algorithm, "PerAda()")
    check_choice("progress", progress, [True, False])
    check_integer("rounds", rounds, optional=True)
    check_integer("local_steps", local_steps, optional=True)
    check_integer("batch_size", batch_size, optional=True)
    check_number("lr", lr, ge=0, optional=True)


def check_name_of_new_client(run: Run, name: str | None) -> None:
    """Raise a ValueError if a name is empty, or is the name or the number of a client of the run."""
    if name is not None:
        check_new_name("name", name, run.info.get("clients"), run.num_clients)


def _mean_participation(training_record: Mapping[str, Any]) -> int:
    """Return the number of rounds that a client of the run took part in on average, rounded up."""
    num_clients: int = training_record["num_clients"]
    per_round: int = training_record["clients_per_round"] or num_clients
    rounds: int = training_record["rounds"]
    return max(1, math.ceil(rounds * per_round / num_clients))


def _recorded_training(run: Run, lr: float | None) -> Training:
    """Return the training options of the run, with both learning rates replaced by ``lr`` unless it is None."""
    record = run.info["training"]
    options = {name: record[name] for name in (*RECORDED_OPTIONS, "clip_norm")}
    if lr is not None:
        options |= {"lr_personal": lr, "lr_local": lr}
    return Training(**options)


def _evaluation_options(info: Mapping[str, Any], with_both: bool) -> Evaluation:
    """Return the evaluation options of the run, with predictions by both models of the client or by its own."""
    metric = info["training"]["metric"]
    if not with_both:
        return Evaluation(metric=metric)
    return Evaluation(metric=metric, prediction="both", personal_share=info.get("personal_share"))


def _privacy_options(info: Mapping[str, Any]) -> str:
    """Return the run's options that requested privacy, as :attr:`.Settings.privacy_options`."""
    sections = {"sample": "privacy", "client": "client_privacy"}
    return " and ".join(sections[level] for level in info["privacy"])


def _release_privacy(info: Mapping[str, Any]) -> Privacy | None:
    """Return the run's sample-level privacy, with its limit applied to the release ledger; None if it has none."""
    privacy = info.get("privacy") or {}
    sample_level = privacy.get("sample")
    if sample_level is None:
        return None
    # The server's ledger stays empty: a client that joins sends nothing.
    return replace(Privacy(**sample_level["options"]), ledger="release")


def _local_score(scores_by_metric: Mapping[str, Sequence[float]]) -> float | None:
    """Return the score of the only client on its test images; None if it was not scored."""
    if LOCAL_SCORE not in scores_by_metric:
        return None
    return scores_by_metric[LOCAL_SCORE][0]


def _warn_if_worse(name: str, score_before: float, after: float, num_images: int, module: FederatedClassifier) -> None:
    """Warn if the client's model is worse after training than before.

    Args:
        name: Name of the client.
        score_before: Score of the model before training.
        after: Score of the model after training.
        num_images: Number of test images that the model is scored on.
        module: The module that was trained, whose first metric the scores are.
    """
    is_worse = after > score_before if module.metrics[0].lower_is_better else after < score_before
    unit = unit_of(module.task.record())
    # The scores before training are rounded when they are recorded, so equal scores may differ a little.
    if is_worse and not math.isclose(after, score_before, abs_tol=1e-4):
        rank_zero_warn(
            f"client {name!r}: its personal model is worse than the global model on its {num_images} test images, "
            f"{unit.text(after)} after {unit.text(score_before)}; use the global model for it, or train less or with "
            "different options (rounds, local_steps, lr)"
        )
