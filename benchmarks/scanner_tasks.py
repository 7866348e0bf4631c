# SPDX-License-Identifier: Apache-2.0
"""Four methods on tasks without classes of images, at hospitals with different scanners: numbers, and masks."""

import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import perada
from benchmarks.experiments import CHOICE_SEED, SEEDS, Images, mean_and_spread
from benchmarks.machine import machine_facts
from perada.data import Digits, FashionMNIST, FederatedData, ImageSet
from perada.data.sets.scanners import DEVICES, scan
from perada.tasks import Regression, Segmentation, Task

SCANNERS = tuple(DEVICES)[:8]
"""Of the hospitals, one each."""
ROTATED_SIDE = 32
"""Height and width of the images of rotated digits, in pixels."""
DIGIT_SIDE = 24
"""Height and width of the digit in such an image."""
PICTURE_SIDE = 24
"""Height and width of the pictures into which digits are pasted."""
PASTED_SIDE = 12
"""Height and width of such a digit."""
MAX_ANGLE = 60
"""Angles in degrees are uniform between minus this and this."""
STD_OF_ANGLES = MAX_ANGLE / math.sqrt(3)
"""Standard deviation of the uniform distribution."""
PASTED_CLASSES = (0, 1)
"""Digits that are pasted. The class of their pixels is one more, since 0 is the background."""
OBJECTS_PER_PICTURE = 2
MIN_GREY = 40
"""Pixels of a pasted object that are at least as bright belong to its mask."""
GEOMETRIC = ("turned", "mirrored", "upside_down_negative")
"""Scanners that move pixels, one to one, and so those of masks."""
HELD_OUT = 5
"""One of so many training images is held out where the rate is chosen."""
LOG = Path("lightning_logs/scanner_tasks.jsonl")
"""Scores of finished runs. A command that is interrupted goes on from there, on the same commit."""


@dataclass(frozen=True)
class Method:
    """A method of federated learning.

    Attributes:
        name: Its name in the table.
        algorithm: Its name in perada.
        adapter: What it trains.
    """

    name: str
    algorithm: str
    adapter: str


METHODS = (
    Method("training alone", "standalone", "full"),
    Method("FedAvg", "fedavg", "residual"),
    Method("FedBN", "fedbn", "full"),
    Method("PerAda", "perada", "residual"),
)


@dataclass(frozen=True)
class Size:
    """Numbers of a benchmark, full or quick."""

    seeds: tuple[int, ...] = SEEDS
    num_rates: int = 3
    rounds: int = 10
    local_epochs: int = 2
    train_images: int = 60
    test_images: int = 40
    public_images: int = 160
    distillation_steps: int = 10
    pretraining_images: int = 2000
    pretraining_epochs: int = 4
    pretrained_on_digits: bool = False  # instead of Fashion-MNIST, which has to be installed


FULL = Size()
QUICK = Size(
    seeds=SEEDS[:1],
    num_rates=1,
    rounds=1,
    local_epochs=1,
    train_images=5,
    test_images=2,
    public_images=16,
    distillation_steps=1,
    pretraining_images=32,
    pretraining_epochs=1,
    pretrained_on_digits=True,
)


@dataclass(frozen=True, repr=False)
class AngleRegression(Regression):
    """Regression whose predictions are limited to the possible angles.

    Far from the training images, the outputs of a network have no limits.
    """

    def predictions(self, logits: Tensor) -> Tensor:
        """Return angles in degrees."""
        return super().predictions(logits).clamp(-MAX_ANGLE, MAX_ANGLE)


@dataclass(frozen=True)
class Experiment:
    """What the methods are compared on.

    Attributes:
        name: Name of the benchmark.
        task: The task.
        make_images: Makes a number of images from the set of digits and a random stream.
        backbone: Returns the pretrained network, by name or as a module.
        weights: Weights of a network that is given by name.
        adapter_options: Options of PerAda's adapter.
        side: Height and width of the images in pixels.
        rates: Learning rates to choose from.
        lower_is_better: Whether the score is an error.
        scale: Factor of scores in the table.
    """

    name: str
    task: Task
    make_images: Callable[[ImageSet, int, torch.Generator], Images]
    backbone: Callable[[Size], str | nn.Module]
    weights: bool | str
    adapter_options: dict[str, Any]
    side: int
    rates: tuple[float, float, float]
    lower_is_better: bool
    scale: float


def rotation_angle(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the mean absolute error in degrees of the predicted angle of rotated digits; mean ± std over seeds."""
    yield from _rows(rotated_digits(), device, quick)


def rotated_digits() -> Experiment:
    """Return the prediction of the angle of rotated digits."""
    return Experiment(
        name="rotation_angle",
        task=AngleRegression("huber", mean=0.0, std=STD_OF_ANGLES),
        make_images=_rotated_digits,
        backbone=lambda size: "test_resnet",
        weights="perada:fashion_test_resnet",
        adapter_options={},
        side=ROTATED_SIDE,
        rates=(0.01, 0.03, 0.1),
        lower_is_better=True,
        scale=1,
    )


def segmentation(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the Dice coefficient in % of the masks of digits pasted into pictures; mean ± std over seeds."""
    yield from _rows(segmented_digits(), device, quick)


def segmented_digits() -> Experiment:
    """Return the segmentation of digits that are pasted into pictures."""
    return Experiment(
        name="segmentation",
        task=Segmentation("both", include_background=False),
        make_images=_pasted_digits,
        backbone=_pretrained_unet,
        weights=False,
        adapter_options={"target_modules": ADAPTED_LAYERS},
        side=PICTURE_SIDE,
        rates=(0.03, 0.1, 0.3),
        lower_is_better=False,
        scale=100,
    )


def _rows(experiment: Experiment, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Give a row for each method, with the rate that was best on training images that hospitals hold out."""
    warnings.simplefilter("ignore")
    size = QUICK if quick else FULL
    log = RunLog(None if quick else LOG, machine_facts(device.type)["commit"])
    comparison = _Comparison(experiment, size, device, log)
    for method in METHODS:
        best_rate = comparison.best_rate(method)
        runs = [comparison.scores(method, best_rate, seed) for seed in size.seeds]
        row = {"method": method.name}
        for name in runs[0]:
            values = [run[name] for run in runs]
            # The megabytes sent are the same for all seeds.
            row[name] = f"{values[0]:.2f}" if len(set(values)) == 1 else mean_and_spread(values)
        yield row | {"rate": f"{best_rate:g}"}


@dataclass(frozen=True)
class _Comparison:
    """Runs of an experiment's methods, whose scores are logged.

    Attributes:
        experiment: What the methods are compared on.
        size: Numbers of the benchmark.
        device: Where the runs train.
        log: Scores of finished runs.
    """

    experiment: Experiment
    size: Size
    device: torch.device
    log: "RunLog"

    def best_rate(self, method: Method) -> float:
        """Return the learning rate with the best mean of both scores on training images that hospitals hold out."""
        rates = self.experiment.rates[: self.size.num_rates]
        best_rate = rates[0]
        best_quality = -math.inf
        for rate in rates:
            scores = self.scores(method, rate, CHOICE_SEED)
            mean = fmean([scores["own images"], scores["all hospitals' images"]])
            quality = -mean if self.experiment.lower_is_better else mean
            # Comparisons with the NaN of a run that has diverged are false.
            if quality > best_quality:
                best_rate = rate
                best_quality = quality
        return best_rate

    def scores(self, method: Method, rate: float, seed: int) -> dict[str, float]:
        """Return the scores of a run as the table shows them, from the log if they are there."""
        name = f"{self.experiment.name}/{method.algorithm}/{rate:g}/{seed}"
        return self.log.scores(name, lambda: self._train(method, rate, seed))

    def _train(self, method: Method, rate: float, seed: int) -> dict[str, float]:
        """Train, and return the scores after the last round."""
        experiment = self.experiment
        size = self.size
        options: dict[str, Any] = {}
        if method.adapter == "residual":
            options["adapter_options"] = experiment.adapter_options
        if method.algorithm == "perada":
            options["distillation"] = {"steps": size.distillation_steps, "batch_size": 64}
        run = perada.finetune(
            copy.deepcopy(experiment.backbone(size)),
            hospitals(experiment, size, on_test_images=seed != CHOICE_SEED),
            task=experiment.task,
            algorithm=method.algorithm,
            adapter=method.adapter,
            pretrained=experiment.weights,
            rounds=size.rounds,
            local_epochs=size.local_epochs,
            batch_size=16,
            lr_local=rate,
            lr_personal=rate,
            training={"momentum": 0.9, "lr_schedule": "cosine"},
            image_size=experiment.side,
            seed=seed,
            accelerator=self.device.type,
            check_val_every_n_epoch=size.rounds,
            logger=False,
            enable_progress_bar=False,
            **options,
        )
        last = run.metrics["rounds"][-1]
        scores = {
            "own images": experiment.scale * last["personal/local_test"],
            "all hospitals' images": experiment.scale * last["personal/global_test"],
        }
        if "global/global_test" in last:
            scores["global model"] = experiment.scale * last["global/global_test"]
        scores["MB sent"] = last["comm/up_mb"] / len(SCANNERS)
        return scores


class RunLog:
    """Scores of finished runs, in a file of JSON lines.

    Args:
        path: The file; None for none.
        commit: Commit of the program. Scores of other commits are not used.
    """

    def __init__(self, path: Path | None, commit: str) -> None:
        self.path = path
        self.commit = commit

    def scores(self, name: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the scores of a run, from the file if they are there."""
        if self.path is None:
            return run()
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        for record in map(json.loads, lines):
            if record["run"] == name and record["commit"] == self.commit:
                scores: dict[str, float] = record["scores"]
                return scores
        scores = run()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            print(json.dumps({"run": name, "commit": self.commit, "scores": scores}), file=file)
        return scores


def hospitals(experiment: Experiment, size: Size, on_test_images: bool, draw: int = 0) -> FederatedData:
    """Return the images of all hospitals, each of its own scanner, and public images of all scanners.

    A hospital is scored on its test images, or on a fifth of its training images, which are then not trained on. Each
    draw has other images.
    """
    train = []
    scored = []
    first_seed = draw * (len(SCANNERS) + 1)
    for number, scanner in enumerate(SCANNERS):
        random = torch.Generator().manual_seed(first_seed + number)
        images = _scanned(experiment.make_images(Digits(train=True), size.train_images, random), scanner)
        test = _scanned(experiment.make_images(Digits(train=False), size.test_images, random), scanner)
        if not on_test_images:
            is_held_out = torch.arange(size.train_images) % HELD_OUT == 0
            test = images.rows(is_held_out)
            images = images.rows(~is_held_out)
        train.append(images.dataset)
        scored.append(test.dataset)
    random = torch.Generator().manual_seed(first_seed + len(SCANNERS))
    public = experiment.make_images(Digits(train=True), size.public_images, random)
    parts = []
    for number, scanner in enumerate(SCANNERS):
        parts.append(_scanned(public.rows(slice(number, None, len(SCANNERS))), scanner).images)
    num_classes = 1 if isinstance(experiment.task, Regression) else 1 + len(PASTED_CLASSES)
    return FederatedData(train, scored, public=TensorDataset(torch.cat(parts)), num_classes=num_classes)


def _scanned(images: Images, scanner: str) -> Images:
    """Return the images as a scanner sees them, with masks that are moved like their pixels."""
    targets = images.targets
    if targets.ndim > 1 and scanner in GEOMETRIC:
        # The class of a pixel is neither inverted nor interpolated.
        moved = scan(targets.unsqueeze(1), scanner.removesuffix("_negative"), [0] * len(targets))
        targets = moved.squeeze(1)
    return Images(scan(images.images, scanner, range(len(targets))), targets)


def _rotated_digits(digits: ImageSet, count: int, random: torch.Generator) -> Images:
    """Return digits of all classes, each rotated by its target, in degrees counter-clockwise."""
    assert digits.images is not None  # the set fits into memory
    rows = torch.randperm(len(digits), generator=random)[:count]
    angles = MAX_ANGLE * (2 * torch.rand(count, generator=random) - 1)
    enlarged = F.interpolate(digits.images[rows].float(), size=DIGIT_SIDE, mode="bilinear", antialias=True)
    border = (ROTATED_SIDE - DIGIT_SIDE) // 2
    framed = F.pad(enlarged, (border,) * 4)
    radians = angles.deg2rad()
    zeros = torch.zeros_like(radians)
    # The grid holds where each pixel comes from, so it is rotated the other way. Its second axis points down.
    first_row = torch.stack([radians.cos(), -radians.sin(), zeros], 1)
    second_row = torch.stack([radians.sin(), radians.cos(), zeros], 1)
    grid = F.affine_grid(torch.stack([first_row, second_row], 1), list(framed.shape), align_corners=False)
    rotated = F.grid_sample(framed, grid, align_corners=False)
    return Images(rotated.round().clamp(0, 255).to(torch.uint8), angles)


def _pasted_digits(digits: ImageSet, count: int, random: torch.Generator) -> Images:
    """Return pictures with two digits each, and their masks."""
    assert digits.images is not None and digits.labels is not None  # the set fits into memory
    is_pasted = torch.isin(digits.labels, torch.tensor(PASTED_CLASSES))
    return _pasted(digits.images[is_pasted], digits.labels[is_pasted] + 1, count, random)


def _pasted(objects: Tensor, classes: Tensor, count: int, random: torch.Generator) -> Images:
    """Paste objects (N, 1, H, W) at random places of dark pictures, the later over the earlier."""
    pictures = torch.zeros(count, 1, PICTURE_SIDE, PICTURE_SIDE)
    masks = torch.zeros(count, PICTURE_SIDE, PICTURE_SIDE, dtype=torch.uint8)
    for picture, mask in zip(pictures, masks, strict=True):
        for row in torch.randint(len(objects), (OBJECTS_PER_PICTURE,), generator=random).tolist():
            top, left = torch.randint(PICTURE_SIDE - PASTED_SIDE + 1, (2,), generator=random).tolist()
            place = (slice(top, top + PASTED_SIDE), slice(left, left + PASTED_SIDE))
            pixels = F.interpolate(objects[row : row + 1].float(), size=PASTED_SIDE, mode="bilinear", antialias=True)
            is_object = pixels[0, 0] >= MIN_GREY
            picture[0][place] = pixels[0, 0].where(is_object, picture[0][place])
            mask[place] = mask[place].where(~is_object, classes[row].to(torch.uint8))
    return Images(pictures.round().clamp(0, 255).to(torch.uint8), masks)


class UNet(nn.Module):
    """A U-Net of three levels with BatchNorm: images (B, 1, H, W) to logits (B, K, H, W)."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.encoder = _block(1, width)
        self.middle = _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.middle_decoder = _block(6 * width, 2 * width)
        self.decoder = _block(3 * width, width)
        self.out = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of each pixel."""
        high = self.encoder(images)
        middle = self.middle(F.max_pool2d(high, 2))
        low = self.bottom(F.max_pool2d(middle, 2))
        middle = self.middle_decoder(torch.cat([middle, F.interpolate(low, scale_factor=2.0)], 1))
        logits: Tensor = self.out(self.decoder(torch.cat([high, F.interpolate(middle, scale_factor=2.0)], 1)))
        return logits


ADAPTED_LAYERS = r"(encoder|middle|bottom|middle_decoder|decoder)\.[03]"
"""Convolutions of the U-Net that get adapters: all but the last."""


def _block(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


@cache
def _pretrained_unet(size: Size) -> nn.Module:
    """Train a U-Net on garments of Fashion-MNIST pasted into pictures, without scanners, and give it a new last layer.

    The garments stand for the public images, such as ImageNet's, on which backbones are pretrained.
    """
    garments: ImageSet = Digits() if size.pretrained_on_digits else FashionMNIST(root=None)
    assert garments.images is not None and garments.labels is not None  # the set fits into memory
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    pictures = _pasted(garments.images, garments.labels + 1, size.pretraining_images, random)
    network = UNet(num_classes=11)
    task = Segmentation("both")
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    batches_per_epoch = math.ceil(size.pretraining_images / 32)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.pretraining_epochs * batches_per_epoch)
    for _ in range(size.pretraining_epochs):
        for rows in torch.randperm(size.pretraining_images, generator=random).split(32):
            logits = network(_normalized(pictures.images[rows])).movedim(1, -1)
            loss = task.loss(logits, pictures.targets[rows]).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    network.out = nn.Conv2d(network.out.in_channels, 1 + len(PASTED_CLASSES), 1)
    return network


def _normalized(images: Tensor) -> Tensor:
    """Scale uint8 images to [-1, 1], as perada does for a network that is given as a module."""
    return images / 127.5 - 1
