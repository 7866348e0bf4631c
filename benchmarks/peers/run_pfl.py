# SPDX-License-Identifier: Apache-2.0
"""A task through pfl-research: FedAvg in one process, one client after another.

It has no personalised method: its ``PersonalizedNNAlgorithm`` scores a model after fine-tuning, and keeps none.
"""

import itertools
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.networks import build_network, train_mode, trained_state
from benchmarks.peers.tasks import TaskData, Training


class _Network(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a local step."""
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Score nothing: pfl scores in the first round, whatever its frequency, and the others do not."""
        return {"images": Weighted(0, len(x))}


class _RoundClock(TrainingProcessCallback):
    """Records when rounds begin and end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.times.append(time.monotonic())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.times.append(time.monotonic())
        return False, Metrics()


def run(data: TaskData, rounds: int, threads: int, folder: Path) -> Training:
    """Train with pfl's ``FederatedAveraging``; the arguments are those of :func:`benchmarks.peers.run_perada.run`."""
    torch.set_num_threads(threads)
    task = data.task
    network = build_network(task)
    network.load_state_dict(data.initial_state)
    train_mode(network)
    module = _Network(network)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(trained, lr=1.0),  # the mean of the clients' changes is added as it is
    )
    clock = _RoundClock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=task.clients_per_round or task.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=_federated_dataset(data), val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return Training(
        round_starts=clock.times[:-1],
        ended=clock.times[-1],
        global_state=trained_state(network),
        personal_states={},
        versions={"pfl": version("pfl"), "torch": str(torch.__version__)},
    )


def _federated_dataset(data: TaskData) -> FederatedDataset:
    """Return the clients of all rounds in their order, each with its images in the order of its batches."""

    def visits() -> Iterator[tuple[int, int]]:
        for round_number, cohort in enumerate(data.cohorts):
            for client in cohort:
                yield round_number, client

    def images_in_order(visit: tuple[int, int]) -> Dataset:
        round_number, client = visit
        row = data.cohorts[round_number].index(client)
        order = data.batches[round_number][row].flatten()
        return Dataset((data.images[client, order], data.labels[client, order]), user_id=str(client))

    sampler = itertools.cycle(visits())
    return FederatedDataset(images_in_order, lambda: next(sampler))
