# SPDX-License-Identifier: Apache-2.0
"""What a client that joins gains: a few images of its own on the global adapter, against training alone on them."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

import perada
from perada.algorithms import PerAda, Standalone
from perada.data import Digits, FashionMNIST, FederatedData, FederatedDataModule, ImageSet
from perada.results.run import Run

SEEDS, CHOICE = (0, 1, 2), 100
"""Of the runs that are reported, and of the one on which settings are chosen."""
NEWCOMERS, CLIENTS, OWN, ALPHA, CLASSES = 3, 20, 100, 0.3, 10
"""Clients that join each run; those of a run, their images, and the concentration of their classes."""
RATES, STRENGTHS = (0.01, 0.03, 0.1), (0.0, 0.1, 1.0)
Settings = tuple[float, float]
"""λ and learning rate."""


class _World(NamedTuple):
    """A finished run, one that is not trained, and the images of the clients that join them."""

    run: Run
    untrained: Run
    newcomers: list[tuple[list[int], list[int]]]  # training images, in a random order, and those that are scored
    train: ImageSet
    scored: ImageSet


def few_shot(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the accuracy of clients that join with 5, 20 and 100 images; mean ± std over the seeds of runs."""
    warnings.simplefilter("ignore")
    sizes = (5,) if quick else (5, 20, 100)
    rates, strengths = (RATES[:1], STRENGTHS[:1]) if quick else (RATES, STRENGTHS)
    choosing = _world(CHOICE, device, quick, test=False)
    worlds = [_world(seed, device, quick, test=True) for seed in (SEEDS[:1] if quick else SEEDS)]
    for size in sizes:
        ways: dict[str, list[Settings]] = {
            "alone": [(0.0, rate) for rate in rates],
            "joins": list(itertools.product(strengths, rates)),
        }
        row: dict[str, Any] = {"images": size}
        for way, settings in ways.items():
            score = partial(_score, size=size, way=way, device=device, quick=quick)
            best = max(settings, key=lambda one: fmean(score(choosing, one)))
            found = [score(world, best) for world in worlds]
            row[way] = _shown(found)
            row[f"{way}: λ, rate"] = f"{best[0]:g}, {best[1]:g}" if way == "joins" else f"{best[1]:g}"
        row["global adapter"] = _shown([_before(world) for world in worlds])
        yield row


def _world(seed: int, device: torch.device, quick: bool, test: bool) -> _World:
    """Train a run, and draw newcomers, who are scored on test images or on other training images."""
    train: ImageSet = Digits() if quick else FashionMNIST(root=None)
    scored: ImageSet = train if not test else Digits(train=False) if quick else FashionMNIST(root=None, train=False)
    rng = np.random.default_rng(seed)
    pools = [list(rng.permutation(np.flatnonzero(_labels(train) == label))) for label in range(CLASSES)]
    tests = pools if not test else [list(rng.permutation(np.flatnonzero(_labels(scored) == c))) for c in range(CLASSES)]

    def draw(source: list[list[int]], shares: Sequence[float], count: int) -> list[int]:
        classes = [c for c in rng.choice(CLASSES, count, p=shares) if source[c]]
        return [int(source[c].pop()) for c in classes if source[c]]

    clients = [
        draw(pools, rng.dirichlet([ALPHA] * CLASSES), 20 if quick else OWN) for _ in range(3 if quick else CLIENTS)
    ]
    newcomers = []
    for _ in range(1 if quick else NEWCOMERS):
        shares = rng.dirichlet([ALPHA] * CLASSES)
        newcomers.append((draw(pools, shares, 100), draw(tests, shares, 200)))
    data = FederatedDataModule(
        FederatedData([Subset(train, rows) for rows in clients], num_classes=CLASSES), image_size=32, batch_size=16
    )
    fit = partial(
        perada.finetune, "test_resnet", data, algorithm="perada_no_kd", local_steps=5, lr_personal=0.03, lr_local=0.03,
        pretrained="perada:fashion_test_resnet" if quick else "perada:digits_test_resnet", seed=seed,
        accelerator=device.type, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    return _World(fit(rounds=1 if quick else 60), fit(rounds=0), newcomers, train, scored)


def _labels(images: ImageSet) -> "np.ndarray[Any, Any]":
    assert images.labels is not None
    return images.labels.numpy()


def _score(world: _World, settings: Settings, *, size: int, way: str, device: torch.device, quick: bool) -> list[float]:
    """Accuracy of each newcomer with its first ``size`` images."""
    strength, rate = settings
    found = []
    for train, scored in world.newcomers:
        data = FederatedData([Subset(world.train, train[:size])], [Subset(world.scored, scored)], num_classes=CLASSES)
        algorithm = Standalone() if way == "alone" else PerAda(strength)
        joined = perada.personalize(
            world.untrained if way == "alone" else world.run, data, "newcomer", rounds=1,
            local_steps=2 if quick else 100, lr=rate, algorithm=algorithm, accelerator=device.type,
        )  # fmt: skip
        found.append(joined.info["joined"][-1]["after"])
    return found


def _before(world: _World) -> list[float]:
    """Accuracy of the global model on each newcomer's images."""
    model, found = world.run.global_model(), []
    for _, scored in world.newcomers:
        images, labels = zip(*(world.scored[row] for row in scored), strict=True)
        with torch.no_grad():
            logits = model.cpu()(world.run.preprocessing.batch(list(images)))
        found.append(float((logits.argmax(1) == torch.stack(labels)).float().mean()))
    return found


def _shown(scores: list[list[float]]) -> str:
    """Mean ± standard deviation over seeds, of the newcomers' mean, in %."""
    means = [100 * fmean(one) for one in scores]
    return f"{fmean(means):.1f} ± {stdev(means) if len(means) > 1 else 0:.1f}"
