# SPDX-License-Identifier: Apache-2.0
"""What the number of clients costs: memory, start and round of 100 to 100,000 clients, 20 of them a round."""

import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import Subset, TensorDataset

import perada
from benchmarks.timing import clock, in_new_process, status
from perada.data import FederatedData

IMAGES = 20_000
"""Images of 32×32 in all; clients share them."""
IMAGES_OF_CLIENT = 20
SAMPLED = 20
"""Clients of a round."""


def federation_size(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure runs with the clients on disk; ratios are to the run of 100 clients."""
    cases: list[tuple[str, tuple[int, ...]]]
    if quick:
        cases = [("test_resnet", (100, 1_000))]
        rounds = 3
    else:
        cases = [("test_resnet", (100, 10_000, 100_000)), ("resnet18", (100, 10_000))]
        rounds = 2 + repeats
    for backbone, client_counts in cases:
        reference: Cost | None = None
        for clients in client_counts:
            cost = in_new_process(_run, backbone, clients, rounds, str(device))
            if reference is None:
                reference = cost
            yield {
                "backbone": backbone,
                "clients": clients,
                "peak MB": round(cost.peak_mb),
                "peak / that of 100": round(cost.peak_mb / reference.peak_mb, 3),
                "seconds to the first step": round(cost.start_seconds, 1),
                "seconds a round": round(cost.round_seconds, 3),
                "round / that of 100": round(cost.round_seconds / reference.round_seconds, 3),
            }


@dataclass(frozen=True)
class Cost:
    """What a run took: peak memory of the process, or of the GPU if it trains there, and seconds."""

    peak_mb: float
    start_seconds: float
    round_seconds: float


class _RoundClock(pl.Callback):
    """Records when rounds begin. Checkpoints are written between them, so they count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.times.append(clock(self.device))


def _run(backbone: str, clients: int, rounds: int, device: str) -> Cost:
    """Train, and return the cost."""
    warnings.simplefilter("ignore")
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=random)
    base = TensorDataset(images, torch.arange(IMAGES) % 10)
    starts = torch.randint(0, IMAGES - IMAGES_OF_CLIENT, (clients,), generator=random).tolist()
    started_at = time.perf_counter()
    round_clock = _RoundClock(torch.device(device))
    data = FederatedData([Subset(base, range(start, start + IMAGES_OF_CLIENT)) for start in starts])
    with tempfile.TemporaryDirectory() as folder:
        perada.finetune(
            backbone,
            data,
            pretrained=False,
            algorithm="perada",
            algorithm_options={"distill": False},
            rounds=rounds,
            clients_per_round=SAMPLED,
            client_store="disk",
            default_root_dir=folder,
            accelerator="gpu" if device == "cuda" else "cpu",
            enable_progress_bar=False,
            callbacks=[round_clock],
        )
    times = round_clock.times
    # The first round is to warm up.
    seconds = [after - before for before, after in itertools.pairwise(times[1:])]
    return Cost(
        peak_mb=torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else status("VmHWM"),
        start_seconds=times[0] - started_at,
        round_seconds=statistics.median(seconds) if seconds else float("nan"),
    )
