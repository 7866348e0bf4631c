# SPDX-License-Identifier: Apache-2.0
"""The rate of the local adapters that :func:`perada.finetune` begins with, chosen on held-out images for each adapter.

FedAvg trains nothing but local adapters, with which PerAda trains its local ones, too.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import peft
import torch

import perada
from benchmarks.experiments import SEEDS, mean_and_spread
from perada.data import Digits, Dirichlet, FederatedDataModule
from perada.models.configurations import AdapterChoice

ROUNDS = 10
RATES = (0.01, 0.03, 0.1)
NUMBERS_OF_CLIENTS = (6, 20)
"""Six clients take more than three times as many steps in a round as twenty."""


@dataclass(frozen=True)
class Network:
    """A pretrained network, and the adapters that are tried in it by their names in the table."""

    backbone: str
    weights: str
    adapters: dict[str, AdapterChoice]


NETWORKS = (
    Network(
        "test_vit",
        "perada:shapes_test_vit",
        {
            "lora": "lora",
            "dual_lora": "dual_lora",
            "prompt": "prompt",
            "full": "full",
            "bottleneck": "bottleneck",
            "head": "head",
            "ia3": "ia3",
            "bias_norm": "bias_norm",
            "LoHaConfig": peft.LoHaConfig(target_modules=["qkv", "proj"]),
        },
    ),
    Network(
        "test_resnet",
        "perada:fashion_test_resnet",
        {
            "residual": "residual",
            "lora": "lora",
            "full": "full",
        },
    ),
)


def first_rates(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Train each adapter with each rate; yield scores on the clients' held-out images, ± over seeds and divisions."""
    warnings.simplefilter("ignore")
    for network in NETWORKS:
        names = list(network.adapters)[:2] if quick else list(network.adapters)
        for name in names:
            adapter = network.adapters[name]
            for rate in RATES[1:2] if quick else RATES:
                row: dict[str, Any] = {"network": network.backbone, "adapter": name, "lr_local": rate}
                for num_clients in NUMBERS_OF_CLIENTS[:1] if quick else NUMBERS_OF_CLIENTS:
                    scores = [
                        _score_on_held_out_images(network, adapter, rate, num_clients, seed, device, quick)
                        for seed in (SEEDS[:1] if quick else SEEDS)
                    ]
                    row[f"{num_clients} clients, %"] = mean_and_spread(scores)
                yield row


def _score_on_held_out_images(
    network: Network,
    adapter: AdapterChoice,
    rate: float,
    num_clients: int,
    seed: int,
    device: torch.device,
    quick: bool,
) -> float:
    """Train the shared model, and return its accuracy in % on all clients' held-out images."""
    data = FederatedDataModule(
        dataset=Digits(),
        partition=Dirichlet(num_clients=num_clients, alpha=0.3),
        batch_size=16,
        image_size=32,
        seed=seed,
        client_validation=0.25,
        evaluate_on="validation",
        train_limit=200 if quick else None,
    )
    rounds = 1 if quick else ROUNDS
    run = perada.finetune(
        network.backbone,
        data,
        algorithm="fedavg",
        adapter=adapter,
        pretrained=network.weights,
        rounds=rounds,
        training={"lr_local": rate, "momentum": 0.9},
        seed=seed,
        accelerator=device.type,
        check_val_every_n_epoch=rounds,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return 100 * float(run.metrics["rounds"][-1]["personal/global_test"])
