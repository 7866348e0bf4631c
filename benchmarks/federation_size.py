# SPDX-License-Identifier: Apache-2.0
"""What the number of clients costs: memory, start and round of 100 to 100,000 clients, 20 of them a round."""

import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import Subset, TensorDataset

import perada
from benchmarks.timing import alone, clock, status
from perada.data import FederatedData

IMAGES, OWN, SAMPLED = 20_000, 20, 20
"""Images of 32×32 in all, of each client (clients share images), and clients a round."""


def federation_size(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure runs with the clients on disk; ratios are to the run of 100 clients."""
    cases = [("test_resnet", (100, 10_000, 100_000)), ("resnet18", (100, 10_000))]
    for backbone, sizes in [("test_resnet", (100, 1_000))] if quick else cases:
        first: dict[str, float] = {}
        for clients in sizes:
            found = alone(_run, backbone, clients, 3 if quick else 2 + repeats, str(device))
            first = first or found
            yield {
                "backbone": backbone,
                "clients": clients,
                "peak MB": round(found["peak"]),
                "peak / that of 100": round(found["peak"] / first["peak"], 3),
                "seconds to the first step": round(found["start"], 1),
                "seconds a round": round(found["round"], 3),
                "round / that of 100": round(found["round"] / first["round"], 3),
            }


class _Clock(pl.Callback):
    """Notes when rounds begin and end; checkpoints are written between them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.times.append(clock(self.device))


def _run(backbone: str, clients: int, rounds: int, device: str) -> dict[str, float]:
    """Train; give the peak memory of this process (of the GPU, if it trains there) in MB, and seconds."""
    warnings.simplefilter("ignore")
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=random)
    base = TensorDataset(images, torch.arange(IMAGES) % 10)
    starts = torch.randint(0, IMAGES - OWN, (clients,), generator=random).tolist()
    began, times = time.perf_counter(), _Clock(torch.device(device))
    data = FederatedData([Subset(base, range(start, start + OWN)) for start in starts])
    with tempfile.TemporaryDirectory() as folder:
        perada.finetune(
            backbone,
            data,
            pretrained=False,
            algorithm="perada_no_kd",
            rounds=rounds,
            clients_per_round=SAMPLED,
            client_store="disk",
            default_root_dir=folder,
            accelerator="gpu" if device == "cuda" else "cpu",
            enable_progress_bar=False,
            callbacks=[times],
        )
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else status("VmHWM")
    seconds = [after - before for before, after in zip(times.times[1:], times.times[2:], strict=False)]
    return {"peak": peak, "start": times.times[0] - began, "round": statistics.median(seconds or [float("nan")])}
