# SPDX-License-Identifier: Apache-2.0
"""The tasks: what is trained by whom, and how long. Nothing here needs perada."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

NUM_CLASSES = 10
PROX_STRENGTH = 1.0
"""λ of Ditto."""
FRAMEWORKS = ("perada", "pfl", "flower")
TASK_FILE = "task.pt"
RESULT_FILE = "training.pt"
State = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """One training task, the same for every framework.

    Attributes:
        description: What the table says of it.
        network: ``fedavg_cnn``, or timm's name of the network.
        adapter: What is trained: ``full`` for all weights, ``residual`` or ``lora``.
        algorithm: ``fedavg``, ``ditto`` or ``fedrep``.
        clients: Clients of the federation.
        clients_per_round: Clients that train in a round; None for all.
        images: Images of each client. All are seen once a round; by FedRep once for the head, then once for the body.
        batch_size: Images in a local step.
        side: Height and width of an image in pixels.
        channels: Channels of an image.
        lr: Learning rate of SGD.
        timed_rounds: Rounds that are timed in a turn, after one that warms up.
    """

    description: str
    network: str = "fedavg_cnn"
    adapter: Literal["full", "residual", "lora"] = "full"
    algorithm: Literal["fedavg", "ditto", "fedrep"] = "fedavg"
    clients: int = 100
    clients_per_round: int | None = None
    images: int = 20
    batch_size: int = 10
    side: int = 28
    channels: int = 1
    lr: float = 0.05
    timed_rounds: int = 4

    @property
    def steps(self) -> int:
        """Local steps of a client in a round."""
        passes = 2 if self.algorithm == "fedrep" else 1
        return passes * (self.images // self.batch_size)


FEDAVG_CNN = Task("FedAvgCNN, all weights, 100 clients × 20 images, batch 10")
RESNET = Task(
    "ResNet-18 at 32×32, all weights, 20 clients × 256 images, batch 64",
    network="resnet18",
    clients=20,
    images=256,
    batch_size=64,
    side=32,
    channels=3,
    lr=0.01,
    timed_rounds=2,
)
VIT = Task(
    "ViT-S/16 at 224×224, LoRA of rank 8, 8 clients × 16 images, batch 8",
    network="vit_small_patch16_224",
    adapter="lora",
    clients=8,
    images=16,
    batch_size=8,
    side=224,
    channels=3,
    timed_rounds=2,
)

TASKS = {
    "start_up": Task("Start-up: FedAvgCNN, 2 clients × 10 images, one step", clients=2, images=10, timed_rounds=1),
    "cnn": FEDAVG_CNN,
    "cnn_1000": replace(
        FEDAVG_CNN,
        description="FedAvgCNN, all weights, 100 of 1,000 clients × 20 images, batch 10",
        clients=1000,
        clients_per_round=100,
    ),
    "ditto": replace(
        FEDAVG_CNN, description="Ditto, FedAvgCNN, all weights, 100 clients × 20 images, batch 10", algorithm="ditto"
    ),
    "fedrep": replace(
        FEDAVG_CNN, description="FedRep, FedAvgCNN, all weights, 100 clients × 20 images, batch 10", algorithm="fedrep"
    ),
    "resnet": RESNET,
    "residual": replace(
        RESNET,
        description="ResNet-18 at 32×32, residual adapters, 20 clients × 256 images, batch 64",
        adapter="residual",
    ),
    "vit_lora": VIT,
}
"""By the name that ``--task`` takes."""


def quick_task(task: Task) -> Task:
    """Return a small form of a task, which only shows that it runs."""
    smaller = replace(task, clients=min(4, task.clients), timed_rounds=1, description=f"{task.description} (quick)")
    if task.clients_per_round is not None:
        smaller = replace(smaller, clients=8, clients_per_round=4)
    if task.network == "resnet18":
        smaller = replace(smaller, network="test_resnet", images=16, batch_size=8)
    if "vit" in task.network:
        smaller = replace(smaller, network="test_vit", side=160, images=8, batch_size=4)
    return smaller


def unsupported_reason(framework: str, task: Task) -> str:
    """Return why a framework cannot run a task; an empty string if it can."""
    if framework == "pfl" and task.algorithm != "fedavg":
        return "pfl has no personalised method"
    return ""


@dataclass(frozen=True)
class TaskData:
    """What all frameworks read from one file.

    Attributes:
        task: The task.
        images: Training images, (M, n, channels, side, side) in single precision.
        labels: Their classes, (M, n).
        test_images: Images that the trained models are scored on.
        test_labels: Their classes.
        initial_state: The network before the first round, by the names of :mod:`benchmarks.peers.networks`.
        cohorts: The clients of each round.
        batches: For each round the images of each step, (C, steps, B), in the order of the cohort.
    """

    task: Task
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    initial_state: State
    cohorts: list[list[int]]
    batches: list[Tensor]

    def client_batches(self, round_number: int, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return the images and labels of a client's local steps in a round."""
        row = self.cohorts[round_number].index(client)
        batches = []
        for indices in self.batches[round_number][row]:
            batches.append((self.images[client, indices], self.labels[client, indices]))
        return batches


def save_task_data(data: TaskData, file: Path) -> None:
    """Write what the frameworks read."""
    torch.save(vars(data) | {"task": vars(data.task)}, file)


def load_task_data(file: str | Path) -> TaskData:
    """Read what :func:`save_task_data` wrote."""
    content: dict[str, Any] = torch.load(file)
    return TaskData(**content | {"task": Task(**content["task"])})


@dataclass(frozen=True)
class Training:
    """What a framework's run returns. Times are those of ``time.monotonic``, which all processes share.

    Attributes:
        round_starts: When each round began.
        ended: When the last round ended.
        global_state: What was trained, averaged over the clients; of FedRep at least the body.
        personal_states: Personal models of the clients that are scored; empty without personalisation.
        versions: Versions of the packages that the figures depend on.
    """

    round_starts: list[float]
    ended: float
    global_state: State
    personal_states: dict[int, State]
    versions: dict[str, str]


SCORED_CLIENTS = 10
"""Clients of the last round whose personal models are scored."""


def scored_clients(data: TaskData, rounds: int) -> list[int]:
    """Return the clients whose personal models are scored, the same for every framework."""
    if data.task.algorithm == "fedavg":
        return []
    return sorted(data.cohorts[rounds - 1])[:SCORED_CLIENTS]
