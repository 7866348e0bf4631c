# SPDX-License-Identifier: Apache-2.0
"""What a client that joins gains: a few images of its own on the global adapter, against training alone on them."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

import perada
from benchmarks.experiments import CHOICE_SEED, SEEDS, mean_and_spread
from perada.algorithms import PerAda, Standalone
from perada.data import Digits, FashionMNIST, FederatedData, FederatedDataModule, ImageSet
from perada.results.run import Run

CLASSES = 10
ALPHA = 0.3
"""Concentration of the clients' classes."""
ALONE = "alone"
JOINS = "joins"


class Settings(NamedTuple):
    """How a newcomer is trained.

    Attributes:
        strength: λ, the pull towards the global adapter.
        lr: Learning rate.
    """

    strength: float
    lr: float


@dataclass(frozen=True)
class Size:
    """Numbers of a benchmark, full or quick."""

    seeds: tuple[int, ...] = SEEDS
    clients: int = 20
    images_of_client: int = 100
    rounds: int = 60
    newcomers: int = 3
    images_of_newcomer: tuple[int, ...] = (5, 20, 100)
    steps_of_newcomer: int = 100
    rates: tuple[float, ...] = (0.01, 0.03, 0.1)
    strengths: tuple[float, ...] = (0.0, 0.1, 1.0)
    on_digits: bool = False  # instead of Fashion-MNIST


FULL = Size()
QUICK = Size(
    seeds=SEEDS[:1],
    clients=3,
    images_of_client=20,
    rounds=1,
    newcomers=1,
    images_of_newcomer=(5,),
    steps_of_newcomer=2,
    rates=FULL.rates[:1],
    strengths=FULL.strengths[:1],
    on_digits=True,
)


@dataclass(frozen=True)
class Newcomer:
    """A client that joins: its training images, in a random order, and the images that it is scored on, by number."""

    train: list[int]
    scored: list[int]


@dataclass(frozen=True)
class World:
    """A finished run, the same without training, and the clients that join them.

    Attributes:
        run: The run.
        untrained: A run of the same model without rounds.
        newcomers: The clients that join.
        train: The set of the newcomers' training images.
        scored: The set of the images that newcomers are scored on.
    """

    run: Run
    untrained: Run
    newcomers: list[Newcomer]
    train: ImageSet
    scored: ImageSet


def few_shot(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the accuracy of clients that join with 5, 20 and 100 images; mean ± std over the seeds of runs."""
    warnings.simplefilter("ignore")
    size = QUICK if quick else FULL
    # Settings are chosen on training images that no client has, of a run that is not reported.
    choice = _make_world(CHOICE_SEED, device, size, on_test_images=False)
    worlds = [_make_world(seed, device, size, on_test_images=True) for seed in size.seeds]
    for num_images in size.images_of_newcomer:
        row: dict[str, Any] = {"images": num_images}
        for way in (ALONE, JOINS):
            score = partial(_scores, num_images=num_images, way=way, device=device, steps=size.steps_of_newcomer)
            candidates = _candidates(way, size)
            best = max(candidates, key=lambda settings: fmean(score(choice, settings)))
            row[way] = mean_and_spread([100 * fmean(score(world, best)) for world in worlds])
            row[f"{way}: λ, rate"] = f"{best.strength:g}, {best.lr:g}" if way == JOINS else f"{best.lr:g}"
        row["global adapter"] = mean_and_spread([100 * fmean(_scores_of_global_model(world)) for world in worlds])
        yield row


def _candidates(way: str, size: Size) -> list[Settings]:
    """Return the settings to choose from; a client that trains alone has no λ."""
    strengths = size.strengths if way == JOINS else (0.0,)
    return [Settings(strength, lr) for strength, lr in itertools.product(strengths, size.rates)]


def _make_world(seed: int, device: torch.device, size: Size, on_test_images: bool) -> World:
    """Train a run, and draw newcomers, who are scored on test images or on other training images."""
    train = _image_set(size, train=True)
    scored = _image_set(size, train=False) if on_test_images else train
    rng = np.random.default_rng(seed)
    train_pools = _pools(train, rng)
    # Images are taken from the pools: if both are the same, a newcomer is never scored on a training image.
    scored_pools = _pools(scored, rng) if on_test_images else train_pools

    clients = []
    for _ in range(size.clients):
        shares = rng.dirichlet([ALPHA] * CLASSES)
        clients.append(_take(train_pools, shares, size.images_of_client, rng))
    newcomers = []
    for _ in range(size.newcomers):
        shares = rng.dirichlet([ALPHA] * CLASSES)
        train_images = _take(train_pools, shares, 100, rng)
        newcomers.append(Newcomer(train_images, _take(scored_pools, shares, 200, rng)))

    data = FederatedDataModule(
        FederatedData([Subset(train, rows) for rows in clients], num_classes=CLASSES), image_size=32, batch_size=16
    )
    finetune = partial(
        perada.finetune,
        "test_resnet",
        data,
        algorithm="perada",
        algorithm_options={"distill": False},
        local_steps=5,
        lr_personal=0.03,
        lr_local=0.03,
        pretrained="perada:fashion_test_resnet" if size.on_digits else "perada:digits_test_resnet",
        seed=seed,
        accelerator=device.type,
        logger=False,
        enable_progress_bar=False,
    )
    run = finetune(rounds=size.rounds)
    return World(run, finetune(rounds=0), newcomers, train, scored)


def _image_set(size: Size, train: bool) -> ImageSet:
    return Digits(train=train) if size.on_digits else FashionMNIST(root=None, train=train)


def _pools(images: ImageSet, rng: np.random.Generator) -> list[list[int]]:
    """Return the images of each class, in a random order."""
    assert images.labels is not None
    labels = images.labels.numpy()
    return [list(rng.permutation(np.flatnonzero(labels == label))) for label in range(CLASSES)]


def _take(pools: list[list[int]], shares: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
    """Take images with random classes from the pools; those of a class without images are left out."""
    labels = [label for label in rng.choice(CLASSES, count, p=shares) if pools[label]]
    # The pool may become empty on the way.
    return [int(pools[label].pop()) for label in labels if pools[label]]


def _scores(
    world: World, settings: Settings, *, num_images: int, way: str, device: torch.device, steps: int
) -> list[float]:
    """Return the accuracy of each newcomer with its first ``num_images`` images."""
    accuracies = []
    for newcomer in world.newcomers:
        data = FederatedData(
            [Subset(world.train, newcomer.train[:num_images])],
            [Subset(world.scored, newcomer.scored)],
            num_classes=CLASSES,
        )
        joined = perada.personalize(
            world.untrained if way == ALONE else world.run,
            data,
            "newcomer",
            rounds=1,
            local_steps=steps,
            lr=settings.lr,
            algorithm=Standalone() if way == ALONE else PerAda(settings.strength),
            accelerator=device.type,
        )
        accuracies.append(joined.info["joined"][-1]["after"])
    return accuracies


def _scores_of_global_model(world: World) -> list[float]:
    """Return the accuracy of the global model on each newcomer's images."""
    model = world.run.global_model().cpu()
    accuracies = []
    for newcomer in world.newcomers:
        samples = [world.scored[row] for row in newcomer.scored]
        labels = torch.stack([label for _, label in samples])
        with torch.no_grad():
            logits = model(world.run.preprocessing.batch([image for image, _ in samples]))
        accuracies.append(float((logits.argmax(1) == labels).float().mean()))
    return accuracies
