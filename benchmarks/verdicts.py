# SPDX-License-Identifier: Apache-2.0
"""The advice of ``perada compare`` where the right answer is known.

``advice_aa`` compares a method with itself: all rows are runs of one method under different seeds, so that whatever is
called better is called so by chance. In half of its rows the scores of single clients are exchanged between these runs.

``advice_known`` compares training alone, FedAvg and Ditto, which predicts with its personal model and with both, on
clients for which the best one is known by construction.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Algorithm, Ditto
from perada.data import Digits, FederatedData, FederatedDataModule
from perada.data.sets.scanners import Scanners
from perada.results.run import Run
from perada.studies.compare.comparison import EVERYONE, OWN, Comparison
from perada.studies.compare.results import Record

IMAGE_SIZE = 8
CLIENTS = 6
CLASSES = 10
SEEDS_OF_COMPARISON = 3
METHODS = ("standalone", "fedavg", "ditto")
ALONE = "standalone"
ONE_MODEL = "fedavg"
PERSONAL = "ditto, personal model"
BOTH = "ditto, both models"


@dataclass(frozen=True)
class Size:
    """Numbers of a benchmark, full or quick."""

    draws: int
    runs_of_method: int
    comparisons: int
    rounds: int


FULL = Size(draws=20, runs_of_method=60, comparisons=400, rounds=6)
QUICK = Size(draws=1, runs_of_method=8, comparisons=4, rounds=1)


@dataclass(frozen=True)
class Client:
    """Images (N, 1, S, S) and classes (N,) of a client, for training and for testing."""

    train: TensorDataset
    test: TensorDataset


@dataclass(frozen=True)
class Setting:
    """Clients for which the best row is known.

    Attributes:
        make: Makes the clients of a draw.
        criterion: What rows are compared by.
        best: Names of the rows that may be recommended.
        worse: Names of the rows that must not be called better than these.
    """

    make: Callable[[torch.Generator], list[Client]]
    criterion: str
    best: frozenset[str]
    worse: frozenset[str]


@cache
def _read_digits() -> tuple[Tensor, Tensor]:
    """Return all digits, (N, 1, S, S) as uint8, and their classes (N,)."""
    images = []
    labels = []
    for train in (True, False):
        scanned = Scanners(Digits(), kinds=["plain"], size=IMAGE_SIZE, train=train)
        for image, label in scanned:
            images.append(torch.as_tensor(image))
            labels.append(int(label))
    return torch.stack(images), torch.tensor(labels)


def _make_client(images: Tensor, labels: Tensor, num_train: int, num_test: int) -> Client:
    """Divide the images of a client, in their order."""
    end = num_train + num_test
    return Client(
        TensorDataset(images[:num_train], labels[:num_train]),
        TensorDataset(images[num_train:end], labels[num_train:end]),
    )


def alike(generator: torch.Generator) -> list[Client]:
    """Few images of one distribution at each client: the more are trained on together, the better."""
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=generator)
    clients = []
    for rows in order[: CLIENTS * 140].split(140):
        clients.append(_make_client(images[rows], labels[rows], num_train=20, num_test=120))
    return clients


def devices(generator: torch.Generator) -> list[Client]:
    """Each client sees the digits in another way, with few images."""
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=generator)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda pixels: pixels,
        lambda pixels: 255 - pixels,
        lambda pixels: pixels.rot90(1, (-2, -1)),
        lambda pixels: pixels.flip(-1),
        lambda pixels: pixels.flip(-2),
        lambda pixels: pixels // 4,
    ]
    clients = []
    for rows, change in zip(order[: CLIENTS * 240].split(240), changes, strict=True):
        clients.append(_make_client(change(images[rows]), labels[rows], num_train=120, num_test=120))
    return clients


def labels_apart(generator: torch.Generator) -> list[Client]:
    """Each client has images of two classes, and other clients have other ones."""
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=generator)
    classes = torch.randperm(CLASSES, generator=generator).tolist()
    clients = []
    for client in range(CLASSES // 2):
        is_of_client = (labels[order] == classes[2 * client]) | (labels[order] == classes[2 * client + 1])
        rows = order[is_of_client][:240]
        clients.append(_make_client(images[rows], labels[rows], num_train=120, num_test=120))
    return clients


def labels_renamed(generator: torch.Generator) -> list[Client]:
    """Each client numbers the classes in another order: nothing can be learned from another client's labels."""
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=generator)
    clients = []
    for rows in order[: CLIENTS * 240].split(240):
        renamed = torch.randperm(CLASSES, generator=generator)[labels[rows]]
        clients.append(_make_client(images[rows], renamed, num_train=120, num_test=120))
    return clients


def one_large(generator: torch.Generator) -> list[Client]:
    """One client has most of the images, which are of one distribution: the others gain from it."""
    images, labels = _read_digits()
    order = torch.randperm(len(labels), generator=generator)
    sizes = [(600, 120), *[(20, 120)] * (CLIENTS - 1)]
    clients = []
    start = 0
    for num_train, num_test in sizes:
        rows = order[start : start + num_train + num_test]
        start += num_train + num_test
        clients.append(_make_client(images[rows], labels[rows], num_train, num_test))
    return clients


SETTINGS: Mapping[str, Setting] = {
    "clients alike, few images": Setting(
        alike, OWN, best=frozenset({ONE_MODEL, BOTH, PERSONAL}), worse=frozenset({ALONE})
    ),
    "other devices, own images": Setting(
        devices, OWN, best=frozenset({ALONE, PERSONAL, BOTH}), worse=frozenset({ONE_MODEL})
    ),
    "other devices, all images": Setting(
        devices, EVERYONE, best=frozenset({ONE_MODEL, BOTH}), worse=frozenset({ALONE, PERSONAL})
    ),
    "labels apart, own images": Setting(
        labels_apart, OWN, best=frozenset({ALONE, PERSONAL, BOTH}), worse=frozenset({ONE_MODEL})
    ),
    "labels apart, all images": Setting(
        labels_apart, EVERYONE, best=frozenset({ONE_MODEL, BOTH}), worse=frozenset({ALONE, PERSONAL})
    ),
    "labels renamed, own images": Setting(
        labels_renamed, OWN, best=frozenset({ALONE, PERSONAL}), worse=frozenset({ONE_MODEL})
    ),
    "one large client, own images": Setting(
        one_large, OWN, best=frozenset({ONE_MODEL, BOTH, PERSONAL}), worse=frozenset({ALONE})
    ),
}
"""Settings in which the best rows are known. Rows that are in neither set may be either."""


def _make_network() -> nn.Module:
    """Return a small network, which is the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (IMAGE_SIZE // 2) ** 2, CLASSES),
        )


def _train_method(clients: list[Client], method: str, seed: int, rounds: int, device: torch.device) -> Run:
    """Train a method on some clients."""
    data = FederatedDataModule(
        data=FederatedData(
            train=[client.train for client in clients],
            test=[client.test for client in clients],
            num_classes=CLASSES,
        ),
        batch_size=20,
    )
    algorithm: Algorithm | str = method
    if method == "ditto":
        algorithm = Ditto(prox_strength=0.1)
    return perada.finetune(
        _make_network(),
        data,
        algorithm=algorithm,
        adapter="full",
        rounds=rounds,
        lr_personal=0.01,
        lr_local=0.01,
        training={"momentum": 0.9, "local_epochs": 2},
        evaluation={"prediction": "both"},
        seed=seed,
        check_val_every_n_epoch=rounds,
        accelerator=device.type,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _make_record(run: Run, label: str, seed: int) -> Record:
    """Return what ``perada compare`` would write of a run."""
    clients = run.metrics["clients"]
    scores = {name: values for name, values in clients.items() if name.startswith(("personal/", "both/"))}
    return {
        "stage": "run",
        "label": label,
        "seed": seed,
        "variant": [],
        "clients": scores,
        "client_test_images": run.metrics["test_images"],
        "mb_sent": 0.0 if label == ALONE else 1.0,
    }


def advice_known(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Count how often the advice is right where the best row is known by construction."""
    warnings.simplefilter("ignore")
    size = QUICK if quick else FULL
    comparisons: dict[tuple[object, int], Comparison] = {}
    for name, setting in SETTINGS.items():
        counts = {"right": 0, "cannot be told": 0, "wrong": 0}
        for draw in range(size.draws):
            key = (setting.make, draw)  # two settings may have the same clients
            if key not in comparisons:
                comparisons[key] = _compare_methods(setting, draw, size, device)
            counts[_judge_advice(setting, comparisons[key])] += 1
        yield {"setting": name, "best": ", ".join(sorted(setting.best)), **counts}


def _compare_methods(setting: Setting, draw: int, size: Size, device: torch.device) -> Comparison:
    """Compare the methods on a draw of a setting's clients, with three seeds."""
    clients = setting.make(torch.Generator().manual_seed(draw))
    records = []
    for seed in range(SEEDS_OF_COMPARISON):
        for method in METHODS:
            run = _train_method(clients, method, 1000 * draw + seed, size.rounds, device)
            records.append(_make_record(run, method, seed))
    return Comparison(records)


def _judge_advice(setting: Setting, comparison: Comparison) -> str:
    """Return whether the advice is right.

    It is right if a row that may be recommended is best and is better than all that must not be; wrong if a row that
    must not be recommended is better than all that may be.
    """
    best = comparison.best(setting.criterion).name
    differences = comparison.differences(setting.criterion)
    significant = {entry.second for entry in differences if entry.is_significant}
    if best in setting.worse:
        return "wrong" if setting.best <= significant else "cannot be told"
    is_right = best in setting.best and setting.worse <= significant
    return "right" if is_right else "cannot be told"


def advice_aa(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Count how often a method is called better than itself under other seeds."""
    warnings.simplefilter("ignore")
    size = QUICK if quick else FULL
    clients = devices(torch.Generator().manual_seed(0))
    for method in ("fedavg", "ditto"):
        records = []
        for seed in range(size.runs_of_method):
            records.append(_make_record(_train_method(clients, method, seed, size.rounds, device), method, seed))
        for num_rows in (2, 4):
            for exchange in (False, True):
                yield {
                    "method": method,
                    "rows": num_rows,
                    "clients": "exchanged" if exchange else "kept",
                    "comparisons": size.comparisons,
                    "called better": _count_told_apart(records, num_rows, size.comparisons, exchange),
                }


def _count_told_apart(records: list[Record], num_rows: int, num_comparisons: int, exchange: bool) -> int:
    """Count the comparisons of equal rows in which one is called better than another by any score.

    Args:
        records: Records of runs of one method with different seeds, which are drawn without replacement.
        num_rows: Rows of a comparison, each with three of the runs, or as many as there are.
        num_comparisons: Number of comparisons.
        exchange: Whether to exchange the scores of single clients between the rows.
    """
    generator = torch.Generator().manual_seed(num_rows)
    num_seeds = min(SEEDS_OF_COMPARISON, len(records) // num_rows)
    num_told_apart = 0
    for _ in range(num_comparisons):
        drawn = torch.randperm(len(records), generator=generator).tolist()
        rows = []
        for row in range(num_rows):
            for seed in range(num_seeds):
                record = records[drawn[row * num_seeds + seed]]
                rows.append(record | {"label": f"row {row}", "seed": seed, "mb_sent": 1.0})
        if exchange:
            rows = _exchange_clients(rows, num_rows, num_seeds, generator)
        comparison = Comparison(rows)
        # With one seed nothing is called better.
        if num_seeds > 1 and any(_has_significant(comparison, criterion) for criterion in comparison.criteria):
            num_told_apart += 1
    return num_told_apart


def _has_significant(comparison: Comparison, criterion: str) -> bool:
    return any(entry.is_significant for entry in comparison.differences(criterion))


def _exchange_clients(rows: list[Record], num_rows: int, num_seeds: int, generator: torch.Generator) -> list[Record]:
    """Exchange the scores of single clients between the rows at random, with each seed."""
    exchanged = copy.deepcopy(rows)
    for seed in range(num_seeds):
        of_seed = [row * num_seeds + seed for row in range(num_rows)]
        for client in range(len(rows[0]["client_test_images"])):
            sources = torch.randperm(num_rows, generator=generator).tolist()
            for target, source in enumerate(sources):
                for name in rows[0]["clients"]:
                    value = rows[of_seed[source]]["clients"][name][client]
                    exchanged[of_seed[target]]["clients"][name][client] = value
    return exchanged
