# SPDX-License-Identifier: Apache-2.0
"""Processor seconds until the first round: imports, then set-up and its checks. Each task runs in a new process.

``python -m benchmarks.start_up TASK`` measures one task in this process and prints a JSON object. Nothing but the
standard library is imported before the measurement begins.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FirstRoundError(Exception):
    """Ends a run when its first round begins."""


def start_up(device: "torch.device", repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the tasks of ``python -m benchmarks peers``; the median of the turns, by the total."""
    tasks = ["cnn"] if quick else ["cnn", "resnet", "residual", "vit_lora"]
    for task in tasks:
        turns = []
        for _ in range(repeats):
            command = [sys.executable, "-m", "benchmarks.start_up", task]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            turns.append(json.loads(output.splitlines()[-1]))
        turns.sort(key=lambda seconds: sum(seconds.values()))
        yield {"task": task} | turns[len(turns) // 2]


def measure(task_name: str) -> dict[str, float]:
    """Return the processor seconds of each part of a task's start on the CPU, with random images and weights."""
    warnings.simplefilter("ignore")
    start = time.process_time()
    import torch

    after_torch = time.process_time()
    import pytorch_lightning as pl
    from torch.utils.data import TensorDataset

    import perada
    from perada.data import FederatedData

    # Names of perada are imported when they are first used.
    finetune = perada.finetune
    after_imports = time.process_time()

    from benchmarks.peers.networks import build_network
    from benchmarks.peers.run_perada import adapter_options, backbone_of, image_size
    from benchmarks.peers.tasks import NUM_CLASSES, TASKS

    class StopAtFirstRound(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise FirstRoundError

    torch.set_num_threads(1)
    task = TASKS[task_name]
    random = torch.Generator().manual_seed(0)
    train = []
    for _ in range(task.clients):
        images = torch.randn(task.images, task.channels, task.side, task.side, generator=random)
        labels = torch.randint(0, NUM_CLASSES, (task.images,), generator=random)
        train.append(TensorDataset(images, labels))
    backbone = backbone_of(task, build_network(task).state_dict())
    before_set_up = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            finetune(
                backbone,
                FederatedData(train, num_classes=NUM_CLASSES),
                adapter=task.adapter,
                adapter_options=adapter_options(task),
                pretrained=False,
                image_size=image_size(task),
                algorithm=task.algorithm,
                rounds=1,
                batch_size=task.batch_size,
                callbacks=[StopAtFirstRound()],
                accelerator="cpu",
                default_root_dir=folder,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
            )
        except FirstRoundError:
            pass
    return {
        "importing torch": round(after_torch - start, 1),
        "other imports": round(after_imports - after_torch, 1),
        "set-up and checks": round(time.process_time() - before_set_up, 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
