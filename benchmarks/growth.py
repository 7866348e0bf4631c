# SPDX-License-Identifier: Apache-2.0
"""What grows with rounds and with clients: memory, open files, checkpoints, tables, and the seconds to write them."""

import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import perada
from benchmarks.timing import alone, status
from perada.data import FederatedData

CLIENTS, SAMPLED, IMAGES, OWN = 100, 5, 1_000, 10
"""Clients of the long run, of each of its rounds, images in all, and of each client."""


def growth(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure one long run at some of its rounds, and short runs of more and more clients, on the CPU."""
    yield from alone(_rounds, (5, 10) if quick else (10, 100, 500, 1_000))
    for clients in (100,) if quick else (1_000, 10_000):
        yield alone(_clients, clients)


class _Watch(pl.Callback):
    """Notes at the end of some rounds what has grown."""

    def __init__(self, rounds: tuple[int, ...], folder: Path) -> None:
        self.rounds, self.folder, self.rows, self.times = rounds, folder, list[dict[str, Any]](), list[float]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.times.append(time.perf_counter())
        if trainer.current_epoch not in self.rounds:  # as many rounds and their checkpoints have ended
            return
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        seconds = [after - before for before, after in itertools.pairwise(self.times[-11:])]
        self.rows.append(
            {
                "rounds": trainer.current_epoch,
                "clients": CLIENTS,
                "resident MB": round(status("VmRSS")),
                "open files": len(list(Path("/proc/self/fd").iterdir())),
                "checkpoint KB": _size(files, "last.ckpt"),
                "metrics.csv KB": _size(files, "metrics.csv"),
                "files": len(files),
                "seconds a round": round(statistics.median(seconds), 3),
            }
        )


def _size(files: list[Path], name: str) -> int:
    return sum(round(path.stat().st_size / 1e3) for path in files if path.name == name)


def _train(clients: int, rounds: int, folder: str, watch: pl.Callback, **options: Any) -> perada.Run:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    images = TensorDataset(torch.randn(IMAGES, 1, 4, 4), torch.arange(IMAGES) % 3)
    starts = torch.randint(0, IMAGES - OWN, (clients,)).tolist()
    parts = [Subset(images, range(start, start + OWN)) for start in starts]
    return perada.finetune(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)),
        FederatedData(parts),
        adapter="full",
        algorithm="ditto",
        rounds=rounds,
        clients_per_round=SAMPLED,
        local_steps=1,
        client_store="disk",
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[watch],
        **options,
    )


def _rounds(rounds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train one round more than the last of ``rounds``."""
    with tempfile.TemporaryDirectory() as folder:
        watch = _Watch(rounds, Path(folder))
        _train(CLIENTS, rounds[-1] + 1, folder, watch)
    return watch.rows


def _clients(clients: int) -> dict[str, Any]:
    """Train two rounds in which each client may take part, and write a checkpoint and the run."""
    with tempfile.TemporaryDirectory() as folder:
        watch = _Watch((1,), Path(folder))
        run = _train(clients, 2, folder, watch, evaluation={"global_test_clients": 0})
        began = time.perf_counter()
        run.save(Path(folder) / "saved")
        return watch.rows[0] | {"clients": clients, "Run.save, s": round(time.perf_counter() - began, 1)}
