# SPDX-License-Identifier: Apache-2.0
"""Evaluation of existing models at every client, without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from perada.core.checks import check_choice, check_integer
from perada.core.seeding import derive_seed
from perada.core.text import abbreviated, value_text
from perada.data import FederatedData, FederatedDataModule
from perada.evaluation.models import EvaluatedModel, RunModel, network_model, weights_model
from perada.evaluation.outputs import ClientOutputs, predict_client
from perada.evaluation.pooled import Integers, Summaries
from perada.evaluation.result import EvaluationResult
from perada.evaluation.rows import POOLED, ClientRows, ScoreRow
from perada.federation.options import Prediction
from perada.results.inference import check_device
from perada.results.models import Models
from perada.results.run import Run
from perada.scores.failed_outputs import REMEDY

WEIGHT_EXTENSIONS = (".safetensors", ".pt", ".pth")
"""Extensions of files of weights; all else is a run."""
Evaluable = Models | nn.Module | str | Path
"""A run, a network that maps prepared images to logits, the folder or checkpoint of a run, or a file of weights."""
ModelChoice = Evaluable | tuple[Evaluable, Prediction] | EvaluatedModel
"""A model, or a run with the models that clients predict with: ``personal``, ``global`` or ``both``."""


def evaluate(
    models: Mapping[str, ModelChoice],
    data: FederatedData | FederatedDataModule,
    *,
    backbone: str | nn.Module | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: bool = False,
) -> EvaluationResult:
    """Score models on the test images of every client, and of all clients together, without training.

    Each score has an interval of 95 %, and each pair of models their difference on the same images (docs/metrics.md).
    The models of a run predict for the clients of the same names; for a client whom the run does not know, its global
    model does.

    Args:
        models: The models by name: runs, networks, folders or checkpoints of runs, or files of weights. In place of a
            run, ``(run, "personal")``, ``"global"`` or ``"both"`` choose the models that clients predict with; by
            default these are those of the run's option ``evaluation.prediction``.
        data: The clients' images. Images of a group, such as a patient, are taken together in all intervals.
        backbone: Network of the files of weights; see :class:`perada.FederatedClassifier`.
        device: Device of the models.
        seed: Seed of the bootstrap.
        progress: Whether to show a progress bar of the clients.

    Returns:
        The scores. ``print`` shows them as tables, ``save`` writes them.

    Raises:
        FileNotFoundError: If a model or image does not exist.
        ValueError: If there are no models or no test images, or a model does not fit the data.

    >>> result = evaluate({"ours": "runs/ours", "vendor": "vendor.pt"}, data, backbone="resnet18")  # doctest: +SKIP
    >>> print(result)  # doctest: +SKIP
    """
    if not isinstance(data, FederatedData | FederatedDataModule):
        raise TypeError(f"data must be a FederatedData or a FederatedDataModule, got {value_text(data)}")
    if not isinstance(models, Mapping):
        raise TypeError(f"models must be a dictionary such as {{'ours': run}}, got {value_text(models)}")
    check_integer("seed", seed, 0, le=None)
    if not models:
        raise ValueError("models is empty; pass at least one, such as {'ours': run}")
    checked_device = check_device(device)
    datamodule = FederatedDataModule(data) if isinstance(data, FederatedData) else data
    datamodule.prepare_data()
    datamodule.setup()
    if not datamodule.test_size:
        raise ValueError("the data have no test images to evaluate models on; add some to each client")
    opened = {name: open_model(name, model, datamodule, backbone) for name, model in models.items()}
    outputs, notes = _predict_clients(opened, datamodule, checked_device, progress)
    summaries = summaries_for(list(opened), datamodule)
    rows: list[ScoreRow] = []
    for client, client_outputs in enumerate(outputs):
        seed_of_client = derive_seed(seed, "evaluation", client)
        rows += ClientRows(
            client_outputs, datamodule.task, summaries.class_names, summaries.scores, seed_of_client
        ).rows()
    total: Integers = np.sum([summaries.summarize(client_outputs) for client_outputs in outputs], axis=0)
    rows += summaries.rows(POOLED, total)
    return EvaluationResult(tuple(opened), tuple(rows), tuple(notes))


def open_model(
    name: str, model: ModelChoice, data: FederatedDataModule, backbone: str | nn.Module | None = None
) -> EvaluatedModel:
    """Open a model, and check that it fits the data.

    Args:
        name: Name of the model, for messages.
        model: The model.
        data: The data, divided and checked.
        backbone: Network of a file of weights.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If it does not fit the data.
        TypeError: If it is not a model.
    """
    prediction: Prediction | None = None
    chosen: object = model
    if isinstance(model, tuple) and len(model) == 2:
        chosen, prediction = model
        check_choice(f"models[{name!r}]: prediction", prediction, get_args(Prediction))
    if isinstance(chosen, EvaluatedModel):
        opened: EvaluatedModel = chosen
    elif isinstance(chosen, Models):
        opened = RunModel(chosen, prediction)
    elif isinstance(chosen, nn.Module):
        opened = network_model(chosen, data)
    elif not isinstance(chosen, str | Path):
        raise TypeError(f"models[{name!r}] must be a run, a network or a path, got {value_text(model)}")
    elif is_weights_file(chosen):
        opened = weights_model(str(chosen), backbone, data)
    else:
        opened = RunModel(Run.load(chosen), prediction)
    if prediction is not None and not isinstance(opened, RunModel):
        raise ValueError(f"models[{name!r}] is one network, so it cannot predict with {prediction!r}; leave that out")
    opened.check(name, data)
    return opened


def is_weights_file(model: str | Path) -> bool:
    """Return whether a path is that of a file of weights, and not of a run.

    >>> is_weights_file("vendor.safetensors"), is_weights_file("runs/ours")
    (True, False)
    """
    return Path(model).suffix.lower() in WEIGHT_EXTENSIONS and not Path(model).is_dir()


def client_names(data: FederatedDataModule) -> list[str]:
    """Return the names of the clients, or their numbers if they have none."""
    return [str(name) for name in data.client_names or range(data.num_clients)]


def summaries_for(models: list[str], data: FederatedDataModule) -> Summaries:
    """Return the layout of the summaries of clients.

    Args:
        models: Names of the models.
        data: The data.
    """
    names = data.classes or range(data.num_classes)
    return Summaries(tuple(models), data.task, tuple(str(name) for name in names))


def _predict_clients(
    models: Mapping[str, EvaluatedModel], data: FederatedDataModule, device: torch.device, progress: bool
) -> tuple[list[ClientOutputs], list[str]]:
    """Return what models predict for the images of each client, and notes for the reader."""
    names = client_names(data)
    summaries = summaries_for(list(models), data)
    unknown_clients: dict[str, list[str]] = {model: [] for model in models}
    failed: dict[str, list[str]] = {model: [] for model in models}
    outputs = []
    for client, name in enumerate(tqdm(names, disable=not progress, unit=" clients")):
        client_models = {}
        for model_name, model in models.items():
            own_name = None if data.client_names is None else name
            client_models[model_name] = model.for_client(client, own_name, device)
            if client_models[model_name].is_global:
                unknown_clients[model_name].append(name)
        client_outputs = predict_client(name, client_models, data, client, summaries.scores)
        for model_name, model_outputs in client_outputs.models.items():
            if model_outputs.num_failed:
                failed[model_name].append(name)
        outputs.append(client_outputs)
    notes = []
    for model_name in models:
        if unknown_clients[model_name]:
            clients = abbreviated(unknown_clients[model_name])
            notes.append(f"{model_name} does not know these clients, for which its global model predicts: {clients}")
        if failed[model_name]:
            clients = abbreviated(failed[model_name])
            notes.append(f"Outputs of {model_name} are NaN or infinite, so it has no scores, at {clients}; {REMEDY}")
    return outputs, notes
