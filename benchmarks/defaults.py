# SPDX-License-Identifier: Apache-2.0
"""The rates that ``perada init`` writes, for all methods, on five kinds of clients.

All methods have the same rates, rounds and epochs. Scores are those of test images, over three seeds with a division of
the images each; the rates were chosen on held-out images of another one.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import perada
from benchmarks.experiments import SEEDS, mean_and_spread
from benchmarks.scanner_tasks import FULL as FULL_TASKS
from benchmarks.scanner_tasks import QUICK as QUICK_TASKS
from benchmarks.scanner_tasks import Experiment, hospitals, rotated_digits, segmented_digits
from perada.data import ByDomain, Digits, Dirichlet, FederatedData, FederatedDataModule, Photographs
from perada.data.sets.scanners import Scanners

METHODS = ("standalone", "fedavg", "fedbn", "ditto", "perada")
ROUNDS = 10


@dataclass(frozen=True)
class Setting:
    """Clients, and what they train.

    Attributes:
        data: Makes the data of a run; its arguments are whether the server needs public images, and the seed.
        backbone: Makes the network, or returns its name.
        pretrained: Weights of a network that is given by name.
        adapter: What is trained.
        options: Further options of :func:`perada.finetune`.
        factor: Factor of scores in the table.
    """

    data: Callable[[bool, int], FederatedDataModule | FederatedData]
    backbone: Callable[[], str | nn.Module]
    pretrained: str | bool
    adapter: str
    options: dict[str, Any] = field(default_factory=dict)
    factor: float = 100


def defaults(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give scores on own and on all images of each method."""
    warnings.simplefilter("ignore")
    seeds = SEEDS[:1] if quick else SEEDS
    for name, setting in _make_settings(quick).items():
        for method in METHODS:
            if method == "fedbn" and setting.adapter == "lora":
                continue  # adapters of a ViT have no normalisation layers to keep
            scores: dict[str, list[float]] = {}
            for seed in seeds:
                for column, score in _train_and_score(setting, method, seed, device, 1 if quick else ROUNDS).items():
                    scores.setdefault(column, []).append(score)
            row: dict[str, Any] = {"setting": name, "method": method}
            yield row | {column: mean_and_spread(values) for column, values in scores.items()}


def _make_settings(quick: bool) -> dict[str, Setting]:
    """Return the settings by name."""
    fashion_weights = "perada:fashion_test_resnet"
    return {
        "five devices": Setting(partial(_make_devices, quick), lambda: "test_resnet", fashion_weights, "residual"),
        "labels differ": Setting(partial(_make_labels, quick), lambda: "test_resnet", fashion_weights, "residual"),
        "labels differ, ViT": Setting(
            partial(_make_labels, quick), lambda: "test_vit", "perada:shapes_test_vit", "lora"
        ),
        "regression": _setting_of_task(rotated_digits(), quick, factor=1),
        "segmentation": _setting_of_task(segmented_digits(), quick, factor=100),
    }


def _make_devices(quick: bool, public: bool, seed: int) -> FederatedDataModule:
    """Return digits seen through five scanners, one a client; the server has parts of two photographs."""
    return FederatedDataModule(
        dataset=Scanners(Digits(), kinds=5, alpha=0.5),
        partition=ByDomain("scanner"),
        public=Photographs(count=500, size=32, gray=True) if public else None,
        batch_size=32,
        image_size=32,
        seed=seed,
        train_limit=100 if quick else None,
    )


def _make_labels(quick: bool, public: bool, seed: int) -> FederatedDataModule:
    """Return digits of twenty clients whose classes differ; the server has a tenth of the images, without labels."""
    return FederatedDataModule(
        dataset=Digits(),
        partition=Dirichlet(num_clients=20, alpha=0.3),
        public_fraction=0.1,
        batch_size=16,
        image_size=32,
        seed=seed,
        train_limit=200 if quick else None,
    )


def _setting_of_task(experiment: Experiment, quick: bool, factor: float) -> Setting:
    """Return a setting of the benchmarks of tasks."""
    size = QUICK_TASKS if quick else FULL_TASKS

    def data(public: bool, seed: int) -> FederatedData:
        return hospitals(experiment, size, on_test_images=True, draw=seed)

    return Setting(
        data=data,
        backbone=lambda: copy.deepcopy(experiment.backbone(size)),
        pretrained=experiment.weights,
        adapter="residual",
        options={
            "task": experiment.task,
            "batch_size": 16,
            "image_size": experiment.side,
            "adapter_options": experiment.adapter_options,
        },
        factor=factor,
    )


def _train_and_score(setting: Setting, method: str, seed: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Train a method, and return its scores by the columns of the table."""
    options = dict(setting.options)
    if method == "perada":
        options["distillation"] = {"steps": 20, "batch_size": 64, "lr": 1e-4}
    run = perada.finetune(
        setting.backbone(),
        setting.data(method == "perada", seed),
        algorithm=method,
        adapter=setting.adapter,
        pretrained=setting.pretrained,
        rounds=rounds,
        evaluation={"prediction": "both"},
        seed=seed,
        accelerator=device.type,
        check_val_every_n_epoch=rounds,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    last = run.metrics["rounds"][-1]
    scores = {}
    for model in ("personal", "both"):
        for images, title in (("local_test", "own images"), ("global_test", "all images")):
            name = f"{model}/{images}"
            if name in last:
                scores[f"{model}, {title}"] = setting.factor * last[name]
    return scores
