# SPDX-License-Identifier: Apache-2.0
"""A task through perada, as a user runs it."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.peers.networks import build_network
from benchmarks.peers.tasks import NUM_CLASSES, PROX_STRENGTH, State, Task, TaskData, Training, scored_clients
from perada.data import FederatedData

SEED = 0
"""Of perada's cohorts and batches, which :mod:`benchmarks.peers.prepare` gives to the peers."""
RENAMED = {
    ".modules_to_save.default": "",
    ".perada_residual_normalise.default": ".norm",
    ".perada_residual_project.default": ".project",
}
"""Parts of perada's names for residual adapters, and what stands there in :mod:`benchmarks.peers.networks`."""


class _RoundClock(pl.Callback):
    """Records when rounds begin, and when the last one ended."""

    def __init__(self) -> None:
        self.round_starts: list[float] = []
        self.ended = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.round_starts.append(time.monotonic())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended = time.monotonic()


def run(data: TaskData, rounds: int, threads: int, folder: Path) -> Training:
    """Train with :func:`perada.finetune`.

    Args:
        data: The task and its data.
        rounds: Rounds to train for.
        threads: Threads of torch.
        folder: Where files may be written.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    clock = _RoundClock()
    result = finetune(data, rounds, folder, clock)
    task = data.task
    personal_states = {}
    for client in scored_clients(data, rounds):
        personal_states[client] = plain_state(task, result.state("personal", client))
    return Training(
        round_starts=clock.round_starts,
        ended=clock.ended,
        global_state=plain_state(task, result.state("global")),
        personal_states=personal_states,
        versions={"pytorch-lightning": pl.__version__, "torch": str(torch.__version__)},
    )


def finetune(data: TaskData, rounds: int, folder: Path, callback: pl.Callback) -> perada.Run:
    """Call :func:`perada.finetune` for a task.

    Args:
        data: The task and its data.
        rounds: Rounds to train for.
        folder: Where files may be written.
        callback: What observes the run.
    """
    task = data.task
    train = [TensorDataset(images, labels) for images, labels in zip(data.images, data.labels, strict=True)]
    return perada.finetune(
        backbone_of(task, data.initial_state),
        FederatedData(train, num_classes=NUM_CLASSES),
        adapter=task.adapter,
        adapter_options=adapter_options(task),
        pretrained=False,
        image_size=image_size(task),
        algorithm=task.algorithm,
        algorithm_options={"prox_strength": PROX_STRENGTH} if task.algorithm == "ditto" else None,
        rounds=rounds,
        clients_per_round=task.clients_per_round,
        batch_size=task.batch_size,
        lr_local=task.lr,
        lr_personal=task.lr,
        seed=SEED,
        callbacks=[callback],
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def backbone_of(task: Task, initial_state: State) -> str | nn.Module:
    """Return what perada is given as the backbone: timm's name, or the network with its initial weights."""
    if task.network != "fedavg_cnn":
        return task.network
    network = build_network(task)
    network.load_state_dict(initial_state)
    return network


def adapter_options(task: Task) -> dict[str, Any]:
    """Return options of the adapter. Without dropout, the losses of all frameworks can be compared."""
    return {"dropout": 0.0} if task.adapter == "residual" else {}


def image_size(task: Task) -> int | None:
    """Return the side that a ViT is built for."""
    return task.side if "vit" in task.network else None


def plain_state(task: Task, state: State) -> State:
    """Return a state of perada's by the names of :mod:`benchmarks.peers.networks`."""
    if task.adapter != "residual":
        return dict(state)
    plain = {}
    for name, value in state.items():
        if ".original_module." in name:  # PEFT's copy of a trained norm as it began
            continue
        for part, plain_part in RENAMED.items():
            name = name.replace(part, plain_part)
        plain[name] = value
    return plain
