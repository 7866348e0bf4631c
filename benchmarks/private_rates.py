# SPDX-License-Identifier: Apache-2.0
"""Rates with which private runs should begin: scores on images that small clients hold out."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from perada.data.sets.arrays import Digits

CLIENTS = 5
ALPHA = 0.5
"""How much the clients' labels differ (Dirichlet)."""
ROUNDS = 15
SIDE = 32


@dataclass(frozen=True)
class Rates:
    """Options of local training.

    Attributes:
        local: Learning rate of the local adapters.
        personal: Learning rate of the personal adapters.
        momentum: Momentum of SGD.
    """

    local: float
    personal: float
    momentum: float


RATES = (Rates(0.01, 0.01, 0.0), Rates(0.1, 0.03, 0.9), Rates(0.3, 0.1, 0.0), Rates(1.0, 0.3, 0.0))
ADAPTERS: dict[str, dict[str, Any]] = {
    "head": {},
    "residual": {"norm": "group", "last_blocks": 3, "train_norms": False},
}


def private_rates(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Train PerAda's adapters with ε 8 for each image on digits, with several rates."""
    for adapter in ("head",) if quick else ADAPTERS:
        for rates in RATES[:1] if quick else RATES:
            for seed in (0,) if quick else (0, 1):
                scores = _scores(adapter, rates, seed, device, rounds=1 if quick else ROUNDS)
                row = {"adapter": adapter, "lr_local": rates.local, "lr_personal": rates.personal}
                yield row | {"momentum": rates.momentum, "seed": seed} | scores


def _scores(adapter: str, rates: Rates, seed: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Return the scores of a run in %, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = perada.finetune(
            "test_resnet",
            _federation(seed),
            pretrained="perada:fashion_test_resnet",
            adapter=adapter,
            adapter_options=ADAPTERS[adapter],
            rounds=rounds,
            batch_size=32,
            lr_local=rates.local,
            lr_personal=rates.personal,
            training={"momentum": rates.momentum},
            weighting="uniform",
            distillation={"steps": 0},
            privacy={"target_epsilon": 8, "delta": 1e-5, "max_norm": 1.0},
            seed=seed,
            accelerator=device.type,
            logger=False,
            enable_progress_bar=False,
            check_val_every_n_epoch=rounds,
        )
    last_round = run.metrics["rounds"][-1]
    names = {"own": "personal/local_test", "all": "personal/global_test", "global, all": "global/global_test"}
    return {title: round(100 * last_round[name], 1) for title, name in names.items()}


def _federation(seed: int) -> FederatedData:
    """Divide the training images of scikit-learn's digits; a client holds out a quarter of its own."""
    random = np.random.default_rng(seed)
    digits = Digits()
    assert digits.images is not None and digits.labels is not None
    images = interpolate(digits.images.float(), SIDE, mode="bilinear").round().to(torch.uint8)
    labels = torch.as_tensor(digits.labels)
    owners = np.zeros(len(labels), dtype=int)
    for label in range(10):
        rows = random.permutation(np.flatnonzero(labels.numpy() == label))
        shares = random.dirichlet([ALPHA] * CLIENTS)
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for client, rows_of_client in enumerate(np.split(rows, cuts)):
            owners[rows_of_client] = client
    train = []
    held_out = []
    for client in range(CLIENTS):
        rows = random.permutation(np.flatnonzero(owners == client))
        num_held_out = len(rows) // 4
        held_out.append(TensorDataset(images[rows[:num_held_out]], labels[rows[:num_held_out]]))
        train.append(TensorDataset(images[rows[num_held_out:]], labels[rows[num_held_out:]]))
    return FederatedData(train, held_out)
