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
from benchmarks.timing import in_new_process, status
from perada.data import FederatedData

CLIENTS = 100
"""Of the long run."""
SAMPLED = 5
"""Clients of a round."""
IMAGES = 1_000
IMAGES_OF_CLIENT = 10


def growth(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure one long run at some of its rounds, and short runs of more and more clients, on the CPU."""
    yield from in_new_process(_rounds, (5, 10) if quick else (10, 100, 500, 1_000))
    for clients in (100,) if quick else (1_000, 10_000):
        yield in_new_process(_clients, clients)


class _GrowthRecorder(pl.Callback):
    """Records after some rounds what has grown.

    Args:
        rounds: Numbers of rounds done.
        folder: The run's folder.
    """

    def __init__(self, rounds: tuple[int, ...], folder: Path) -> None:
        self.rounds = rounds
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # At the start of a round, since only then the checkpoint of the round before has been written.
        self.times.append(time.perf_counter())
        if trainer.current_epoch not in self.rounds:
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


def _train(clients: int, rounds: int, folder: str, recorder: pl.Callback, **options: Any) -> perada.Run:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    images = TensorDataset(torch.randn(IMAGES, 1, 4, 4), torch.arange(IMAGES) % 3)
    starts = torch.randint(0, IMAGES - IMAGES_OF_CLIENT, (clients,)).tolist()
    parts = [Subset(images, range(start, start + IMAGES_OF_CLIENT)) for start in starts]
    return perada.finetune(
        _network(),
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
        callbacks=[recorder],
        **options,
    )


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def _rounds(rounds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train one round more than the last of ``rounds``."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = _GrowthRecorder(rounds, Path(folder))
        _train(CLIENTS, rounds[-1] + 1, folder, recorder)
    return recorder.rows


def _clients(clients: int) -> dict[str, Any]:
    """Train two rounds in which each client may take part, write a checkpoint and the run, and load one client."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = _GrowthRecorder((1,), Path(folder))
        run = _train(clients, 2, folder, recorder, evaluation={"global_test_clients": 0})
        row = recorder.rows[0] | {"clients": clients}
        for name, write in (("Run.save", run.save), ("Run.export", run.export)):
            target = Path(folder) / name
            started_at = time.perf_counter()
            write(target)
            row[f"{name}, s"] = round(time.perf_counter() - started_at, 1)
            files = [path for path in target.rglob("*") if path.is_file()]
            row[f"files of {name}"] = len(files)
            row[f"MB of {name}"] = round(sum(path.stat().st_blocks * 512 for path in files) / 1e6, 1)
        started_at = time.perf_counter()
        perada.Run.load(Path(folder) / "Run.save", backbone=_network()).personal(clients - 1)
        row["Run.load and one client, s"] = round(time.perf_counter() - started_at, 2)
        return row
