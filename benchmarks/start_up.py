# SPDX-License-Identifier: Apache-2.0
"""Processor seconds until the first round: imports, then set-up and its checks. Each task runs in a new process.

``python -m benchmarks.start_up TASK`` measures one task in this process and prints a JSON object. Nothing but the
standard library is imported before the measurement begins, except :mod:`benchmarks.sessions`.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sessions import offline_environment

if TYPE_CHECKING:
    import torch


class FirstRoundError(Exception):
    """Ends a run when its first round begins."""


def start_up(device: "torch.device", repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the tasks of ``python -m benchmarks peers``; the median of the turns, by the total."""
    tasks = ["cnn"] if quick else ["cnn", "resnet", "residual", "vit_lora"]
    # Python writes compiled sources, as it does by default: the first process compiles them and is not counted.
    _measure_in_new_process(tasks[0])
    for task in tasks:
        turns = [_measure_in_new_process(task) for _ in range(repeats)]
        turns.sort(key=lambda seconds: sum(seconds.values()))
        yield {"task": task} | turns[len(turns) // 2]


def _measure_in_new_process(task: str) -> dict[str, float]:
    """Return what :func:`measure` returns in a new process."""
    environment = offline_environment(PYTHONDONTWRITEBYTECODE="")
    command = [sys.executable, "-m", "benchmarks.start_up", task]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    seconds: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return seconds


def measure(task_name: str) -> dict[str, float]:
    """Return the processor seconds of each part of a task's start on the CPU, with random images and weights."""
    warnings.simplefilter("ignore")
    start = time.process_time()
    import torch

    after_torch = time.process_time()
    import pytorch_lightning as pl

    after_lightning = time.process_time()
    import perada

    # Names of perada are imported when they are first used.
    _ = perada.finetune
    after_imports = time.process_time()

    from benchmarks.peers.prepare import prepare
    from benchmarks.peers.run_perada import finetune
    from benchmarks.peers.tasks import TASKS

    class StopAtFirstRound(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise FirstRoundError

    torch.set_num_threads(1)
    data = prepare(TASKS[task_name], rounds=1)
    before_set_up = time.process_time()
    with tempfile.TemporaryDirectory() as folder, suppress(FirstRoundError):
        finetune(data, 1, Path(folder), StopAtFirstRound())
    return {
        "importing torch": round(after_torch - start, 1),
        "importing Lightning": round(after_lightning - after_torch, 1),
        "importing perada, PEFT, timm": round(after_imports - after_lightning, 1),
        "set-up and checks": round(time.process_time() - before_set_up, 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
