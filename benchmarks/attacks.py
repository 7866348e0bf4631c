# SPDX-License-Identifier: Apache-2.0
"""The global model's accuracy when some clients are hostile, by server rule.

FedAvg on scikit-learn's digits: 20 clients, Dirichlet 1, all in each round, 15 rounds of one epoch, a network of one
hidden layer that starts at random. The hostile clients train as others do, and then send w + the change named: 100
times theirs, theirs reversed and ten times as long, noise ten times as long, all ones. Or they train on wrong labels.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.experiments import mean_and_spread
from perada.algorithms import FedAvg, Stacks, TensorNames
from perada.algorithms.base import Broadcast
from perada.core.seeding import generator
from perada.core.states import State
from perada.data import Digits, Dirichlet, FederatedDataModule
from perada.server import FLTrust, GeometricMedian, Krum, Median, NormClipping, ServerRule, TrimmedMean
from perada.server.aggregate import Mean

CLIENTS = 20
CLASSES = 10
ATTACKS = ("none", "scaled", "reversed", "noise", "constant", "labels")
RULES: dict[str, ServerRule] = {
    "mean": Mean(),
    "median": Median(),
    "trimmed mean 0.4": TrimmedMean(0.4),
    "multi-Krum 0.4": Krum(0.4),
    "geometric median": GeometricMedian(),
    "norm clipping": NormClipping(),
    "norm clipping, median": NormClipping(aggregate=Median()),
    "FLTrust": FLTrust(),
    "FLTrust, no labels": FLTrust(labels=False),
}


class Attacked(FedAvg):
    """FedAvg in which the first clients are hostile.

    Args:
        attack: Which of ``ATTACKS``.
        hostile: Number of hostile clients.
    """

    def __init__(self, attack: str, hostile: int) -> None:
        super().__init__()
        self.attack = attack
        self.hostile = hostile
        self._clients: tuple[int, ...] = ()
        self._round = 0

    def broadcast(self, sending: Broadcast) -> State:
        """Store which clients the rows of the round are of."""
        self._clients = sending.clients
        self._round = sending.round
        return super().broadcast(sending)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Change the updates of the hostile clients."""
        client_state, update = super().end_round(trained, client_state, received, tensor_names)
        update = {key: value.clone() for key, value in update.items()}
        for row, client in enumerate(self._clients):
            if client < self.hostile:
                for key in tensor_names.parameters:
                    start = received[key][row]
                    change = update[key][row] - start
                    update[key][row] = start + self._hostile_change(change, client, key)
        return client_state, update

    def _hostile_change(self, change: Tensor, client: int, key: str) -> Tensor:
        """Return what a hostile client sends in place of its change; with wrong labels its training did the harm."""
        if self.attack == "scaled":
            return 100 * change
        if self.attack == "reversed":
            return -10 * change
        if self.attack == "noise":
            random = torch.randn(change.shape, generator=generator(0, f"attack {key}", self._round, client))
            return 10 * change.norm() * random / random.norm()
        if self.attack == "constant":
            return torch.ones_like(change)
        return change


def attacks(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Accuracy in %, mean ± standard deviation over three seeds, for 1 to 8 hostile clients of 20."""
    seeds = 1 if quick else 3
    for attack in ATTACKS[:2] if quick else ATTACKS:
        for hostile in (0,) if attack == "none" else (2, 8):
            row: dict[str, Any] = {"attack": attack, "hostile": f"{100 * hostile // CLIENTS} %"}
            for name, rule in RULES.items():
                rounds = 2 if quick else 15
                percents = []
                for seed in range(seeds):
                    percents.append(100 * _accuracy(rule, attack, hostile, seed, device, rounds))
                row[name] = mean_and_spread(percents)
            yield row


def _accuracy(rule: ServerRule, attack: str, hostile: int, seed: int, device: torch.device, rounds: int) -> float:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    mislabelled = hostile if attack == "labels" else 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*times the round's median")
        run = perada.finetune(
            network,
            _data(mislabelled),
            adapter="full",
            algorithm=Attacked(attack, hostile),
            server_rule=rule,
            rounds=rounds,
            check_val_every_n_epoch=rounds,
            lr_local=0.1,
            batch_size=16,
            seed=seed,
            accelerator=device.type,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    accuracy: float = run.metrics["rounds"][-1]["global/global_test"]
    return accuracy


def _data(mislabelled: int) -> perada.FederatedData:
    """Return the clients' digits, and a tenth of all for the server.

    Args:
        mislabelled: Number of clients, the first ones, whose labels y are 9 − y.
    """
    module = FederatedDataModule(dataset=Digits(), partition=Dirichlet(CLIENTS, alpha=1.0), public_fraction=0.1)
    module.setup("fit")
    rows = module.partition_dict()
    train = [_subset(Digits(), client_rows) for client_rows in rows["train"]]
    test = [_subset(Digits(train=False), client_rows) for client_rows in rows["test"]]
    for client in range(mislabelled):
        images, labels = train[client].tensors
        train[client] = TensorDataset(images, CLASSES - 1 - labels)
    of_server = _subset(Digits(), rows["public"])
    unlabelled = TensorDataset(of_server.tensors[0])
    return perada.FederatedData(train, test, unlabelled, of_server, CLASSES)


def _subset(data: Digits, rows: list[int]) -> TensorDataset:
    """Return some of the images with their labels."""
    assert data.images is not None
    assert data.labels is not None
    return TensorDataset(data.images[rows], data.labels[rows])
