# SPDX-License-Identifier: Apache-2.0
"""What options of tasks bring: weights and the focal loss for rare classes, and the loss over known labels only."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import perada
from benchmarks.experiments import CHOICE_SEED, SEEDS, Images, mean_and_spread
from perada.data import Digits, FederatedData
from perada.tasks import Classification, MultiLabel, Task

RATES = (0.03, 0.1, 0.3)
CLASSES = 10
CLIENTS = 8
SCORE_BY_METHOD = {"fedavg": "global/global_test", "perada": "personal/global_test"}
"""Score of each method on all test images: of the global model, and the mean over personal models."""
RARE_SHARE = 0.1
"""Share of the images of digits 5 to 9 that clients have."""
UNKNOWN_SHARE = 0.5
"""Share of labels that are unknown."""
ATTRIBUTES = {
    "even": (0, 2, 4, 6, 8),
    "above 4": (5, 6, 7, 8, 9),
    "prime": (2, 3, 5, 7),
    "multiple of 3": (0, 3, 6, 9),
    "with a loop": (0, 6, 8, 9),
}
"""Digits that have each label of the data with several labels per image."""
ALL_KNOWN = "all labels are known"
IGNORED = "left out of the loss"
AS_ABSENT = "taken as absent"
ONLY_COMPLETE = "their images are left out"
TREATMENTS = (ALL_KNOWN, IGNORED, AS_ABSENT, ONLY_COMPLETE)


@dataclass(frozen=True)
class Experiment:
    """Training images of all clients, and images that models are scored on.

    Attributes:
        train: Training images.
        scored: Other images, with known labels.
        num_classes: Number of classes or labels.
        metric: Name of the score.
    """

    train: Images
    scored: Images
    num_classes: int
    metric: str


@dataclass(frozen=True)
class Size:
    """Numbers of a benchmark, full or quick."""

    seeds: tuple[int, ...] = SEEDS
    rates: tuple[float, ...] = RATES
    rounds: int = 20
    local_steps: int = 5


QUICK = Size(seeds=SEEDS[:1], rates=RATES[1:2], rounds=1, local_steps=1)


def rare_classes(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the balanced accuracy of models if five of ten classes are rare, by loss; mean ± std over seeds."""
    losses: dict[str, Task] = {
        "cross-entropy": Classification(),
        "class_weights: balanced": Classification(class_weights="balanced"),
        "focal_gamma: 2": Classification(focal_gamma=2.0),
        "label_smoothing: 0.1": Classification(label_smoothing=0.1),
    }
    size = QUICK if quick else Size()
    warnings.simplefilter("ignore")
    for name, task in losses.items():
        row: dict[str, Any] = {"loss": name}
        for method in SCORE_BY_METHOD:
            row |= _tuned_scores(_skewed_digits, task, method, device, size)
        yield row


def unknown_labels(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the AUROC of models if half of all labels are unknown, by treatment; mean ± std over seeds."""
    size = QUICK if quick else Size()
    warnings.simplefilter("ignore")
    for treatment in TREATMENTS:
        make_experiment = partial(_labelled_digits, treatment)
        row: dict[str, Any] = {"unknown labels": treatment}
        for method in SCORE_BY_METHOD:
            row |= _tuned_scores(make_experiment, MultiLabel(), method, device, size)
        yield row


def _tuned_scores(
    make_experiment: Callable[[int, bool], Experiment], task: Task, method: str, device: torch.device, size: Size
) -> dict[str, str]:
    """Choose the learning rate on training images that no client has, and score runs with it on test images."""
    choice = make_experiment(CHOICE_SEED, False)
    best_rate = max(size.rates, key=lambda lr: _score(choice, task, method, lr, CHOICE_SEED, device, size))
    scores = []
    for seed in size.seeds:
        experiment = make_experiment(seed, True)
        scores.append(100 * _score(experiment, task, method, best_rate, seed, device, size))
    return {method: mean_and_spread(scores), f"{method}: rate": f"{best_rate:g}"}


def _score(
    experiment: Experiment, task: Task, method: str, lr: float, seed: int, device: torch.device, size: Size
) -> float:
    """Train, and return the score."""
    order = torch.randperm(len(experiment.train.images), generator=torch.Generator().manual_seed(seed))
    clients = []
    scored = []
    for rows in order.tensor_split(CLIENTS):
        clients.append(experiment.train.rows(rows).dataset)
        scored.append(experiment.scored.rows(slice(0)).dataset)
    # Models are scored on all test images, whoever owns them.
    scored[0] = experiment.scored.dataset
    run = perada.finetune(
        "test_resnet",
        FederatedData(clients, scored, num_classes=experiment.num_classes),
        task=task,
        algorithm=method,
        algorithm_options={"distill": False} if method == "perada" else None,
        rounds=size.rounds,
        local_steps=size.local_steps,
        batch_size=16,
        lr_local=lr,
        lr_personal=lr,
        image_size=32,
        pretrained="perada:fashion_test_resnet",
        evaluation={"metric": experiment.metric},
        seed=seed,
        accelerator=device.type,
        check_val_every_n_epoch=size.rounds,
        logger=False,
        enable_progress_bar=False,
    )
    return float(run.metrics["rounds"][-1][SCORE_BY_METHOD[method]])


def _split(seed: int, on_test_images: bool) -> tuple[Images, Images]:
    """Return training images of digits and images to score on: test images, or a fifth of the training images."""
    train = _digits(train=True)
    if on_test_images:
        return train, _digits(train=False)
    order = torch.randperm(len(train.images), generator=torch.Generator().manual_seed(seed))
    held_out = order[: len(order) // 5]
    rest = order[len(order) // 5 :]
    return train.rows(rest), train.rows(held_out)


def _digits(train: bool) -> Images:
    digits = Digits(train=train)
    assert digits.images is not None and digits.labels is not None  # the set fits into memory
    return Images(digits.images, digits.labels)


def _skewed_digits(seed: int, on_test_images: bool) -> Experiment:
    """Return digits of which 5 to 9 are rare in training."""
    train, scored = _split(seed, on_test_images)
    is_common = train.targets < CLASSES // 2
    is_drawn = torch.rand(len(train.targets), generator=torch.Generator().manual_seed(seed)) < RARE_SHARE
    return Experiment(train.rows((is_common | is_drawn).nonzero().flatten()), scored, CLASSES, "balanced_accuracy")


def _labelled_digits(treatment: str, seed: int, on_test_images: bool) -> Experiment:
    """Return digits with several labels, of which half are hidden in training unless all are known."""
    train, scored = (_with_attributes(images) for images in _split(seed, on_test_images))
    random = torch.Generator().manual_seed(seed)
    is_hidden = torch.rand(train.targets.shape, generator=random) < UNKNOWN_SHARE
    if treatment == ALL_KNOWN:
        is_hidden[:] = False
    if treatment == AS_ABSENT:
        train = Images(train.images, train.targets.where(~is_hidden, 0.0))
    else:
        train = Images(train.images, train.targets.where(~is_hidden, torch.nan))
    if treatment == ONLY_COMPLETE:
        train = train.rows((~is_hidden).all(1).nonzero().flatten())
    return Experiment(train, scored, len(ATTRIBUTES), "auroc")


def _with_attributes(digits: Images) -> Images:
    """Return digits with labels (N, 5) in place of classes."""
    columns = [torch.isin(digits.targets, torch.tensor(members)) for members in ATTRIBUTES.values()]
    return Images(digits.images, torch.stack(columns, 1).float())
