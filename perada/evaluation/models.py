# SPDX-License-Identifier: Apache-2.0
"""Models to evaluate: those of a run, and networks from elsewhere."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from perada.core.rounds import ImageConfig
from perada.core.text import abbreviated
from perada.data import FederatedDataModule
from perada.data.preprocessing import Preprocessing, preprocessing_of
from perada.federation.options import Prediction
from perada.models.backbones import IMAGE, build_backbone
from perada.models.weight_files import load_classifier, weights_file
from perada.results.models import Models, make_predictor, preprocessing_for
from perada.results.predictors import NetworkPredictor, Predictor
from perada.tasks import Task
from perada.tasks.base import make_task


@dataclass(frozen=True)
class ClientModel:
    """A model as it predicts for one client.

    Attributes:
        predictor: Predicts batches.
        preprocessing: Prepares images for it.
        task: What it predicts.
        is_global: Whether the global model stands in for that of a client whom the run does not know.
    """

    predictor: Predictor
    preprocessing: Preprocessing
    task: Task
    is_global: bool = False


class EvaluatedModel(ABC):
    """A model to evaluate."""

    @abstractmethod
    def for_client(self, client: int | None, name: str | None, device: torch.device) -> ClientModel:
        """Return the model as it predicts for a client.

        Args:
            client: Number of the client in the data; None if there is no such number.
            name: Name of the client; None if clients have no names.
            device: Device of the passes.
        """

    @abstractmethod
    def check(self, name: str, data: FederatedDataModule) -> None:
        """Check that the model predicts the classes or numbers of the data.

        Args:
            name: Name of the model in messages.
            data: The data.

        Raises:
            ValueError: If it does not.
        """


@dataclass(frozen=True)
class RunModel(EvaluatedModel):
    """The models of a run: for each client its own.

    Attributes:
        run: The run.
        prediction: Models with which a client predicts; None for those of the run's option.
    """

    run: Models
    prediction: Prediction | None = None

    def for_client(self, client: int | None, name: str | None, device: torch.device) -> ClientModel:
        """Return the model of the client, or the global one if the run has none of the client."""
        run = self.run
        task = make_task(run.info["task"])
        number = self._number_in_run(client, name)
        if number is not None:
            predictor = make_predictor(run, number, self.prediction, device)
            return ClientModel(predictor, preprocessing_for(run, number), task)
        preprocessing = run.preprocessing
        return ClientModel(make_predictor(run, None, None, device), preprocessing, task, is_global=True)

    def _number_in_run(self, client: int | None, name: str | None) -> int | None:
        """Return the number of a client of the data in the run; None if the run has no model of it."""
        run = self.run
        if "adapter_of" in run.info:
            # A single adapter, which predicts for all.
            return 0
        names = run.info.get("clients")
        if names:
            if name not in names:
                return None
            number = list(names).index(name)
        elif client is not None and client < run.num_clients:
            number = client
        else:
            return None
        absent = {*run.info.get("forgotten", ()), *run.info.get("elsewhere", ())}
        return None if number in absent else number

    def check(self, name: str, data: FederatedDataModule) -> None:
        """Compare task and classes with those of the data."""
        info = self.run.info
        _check_task(name, make_task(info["task"]), data.task)
        _check_outputs(name, info["num_classes"], data.num_classes)
        run_classes: Sequence[str] | None = info.get("classes")
        if run_classes and data.classes and list(run_classes) != list(data.classes):
            raise ValueError(
                f"{name} predicts {abbreviated(run_classes)}, but the data have {abbreviated(data.classes)}; list the "
                "classes of the data in the order of the run (`classes` of the image set)"
            )
        numbers = [self._number_in_run(client, _name_of(data, client)) for client in range(data.num_clients)]
        if self.prediction not in (None, "global") and None in numbers:
            client = numbers.index(None)
            raise ValueError(
                f"{name} has no model of client {_name_of(data, client) or client}, so it cannot predict with "
                f"prediction={self.prediction!r} there; leave it out for the global model, or give clients the names "
                "that they have in the run"
            )


@dataclass(frozen=True)
class NetworkModel(EvaluatedModel):
    """One network for all clients.

    Attributes:
        network: Maps images to logits.
        preprocessing: Prepares images for it.
        task: What it predicts.
        num_outputs: Number of its outputs; None if it is not known.
    """

    network: nn.Module
    preprocessing: Preprocessing
    task: Task
    num_outputs: int | None = None

    def for_client(self, client: int | None, name: str | None, device: torch.device) -> ClientModel:
        """Return the network."""
        return ClientModel(NetworkPredictor(self.network, self.task, device), self.preprocessing, self.task)

    def check(self, name: str, data: FederatedDataModule) -> None:
        """Compare task and outputs with those of the data."""
        _check_task(name, self.task, data.task)
        if self.num_outputs is not None:
            _check_outputs(name, self.num_outputs, data.num_classes)


def network_model(network: nn.Module, data: FederatedDataModule) -> NetworkModel:
    """Return a network that maps prepared images to logits. A network of a run says how they are prepared.

    Args:
        network: The network, in evaluation mode.
        data: The data, whose preprocessing it takes otherwise.
    """
    return NetworkModel(network, _make_preprocessing(data, getattr(network, IMAGE, None)), data.task)


def weights_model(source: str, backbone: str | nn.Module | None, data: FederatedDataModule) -> NetworkModel:
    """Return the network of a file of weights, such as a state dict of a vendor, or what ``perada export`` wrote.

    Args:
        source: A ``.safetensors``, ``.pt`` or ``.pth`` file, with the trained head. If perada exported it, its own
            preprocessing is in its metadata; otherwise images are prepared as for the backbone.
        backbone: The network; see :func:`~perada.models.backbones.build_backbone`.
        data: The data.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there is no backbone, or the file is not one of its weights.
    """
    if backbone is None:
        raise ValueError(f"{source!r} is a file of weights, whose network is not known; set the backbone")
    path = weights_file(source)
    built = build_backbone(
        backbone,
        data.num_classes,
        pretrained=False,
        image_size=data.image_size,
        per_pixel=data.task.per_pixel,
    )
    load_classifier(built.model, path, built.head)
    metadata = _metadata_of(path)
    preprocessing = _make_preprocessing(data, built.image_config)
    if "preprocessing" in metadata:
        preprocessing = Preprocessing.from_record(json.loads(metadata["preprocessing"]))
    task = data.task
    if "task" in metadata:
        task = make_task(json.loads(metadata["task"]))
    return NetworkModel(built.model.eval(), preprocessing, task, data.num_classes)


def _metadata_of(path: str) -> dict[str, str]:
    """Return the metadata that ``perada export`` writes into a file of safetensors; nothing for other files."""
    if not path.endswith(".safetensors"):
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError:
        return {}


def _make_preprocessing(data: FederatedDataModule, image_config: ImageConfig | None) -> Preprocessing:
    """Return how the images of the data are prepared for a network of this format."""
    prepare = replace(data.prepare, image_config=image_config)
    recorded = data.preprocessing
    return preprocessing_of(data.checked, prepare, recorded.full_scale, recorded.medical)


def _name_of(data: FederatedDataModule, client: int) -> str | None:
    """Return the name of a client of the data; None if clients have no names."""
    return None if data.client_names is None else data.client_names[client]


def _check_task(name: str, task: Task, task_of_data: Task) -> None:
    """Raise a ValueError if a model predicts something else than the labels of the data."""
    if type(task).__name__ != type(task_of_data).__name__:
        raise ValueError(
            f"{name} was trained for {task}, but the data are for {task_of_data}; set the task of the data"
        )


def _check_outputs(name: str, num_outputs: Any, num_classes: int) -> None:  # noqa: ANN401  # it comes from a file, and may be anything
    """Raise a ValueError if a model has another number of outputs than the data have classes."""
    if num_outputs != num_classes:
        raise ValueError(
            f"{name} has {num_outputs} outputs, but the data have {num_classes} classes or numbers; evaluate it on "
            "data with its classes"
        )
