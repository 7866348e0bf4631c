# SPDX-License-Identifier: Apache-2.0
"""What ``perada choose`` takes for small federations of which the best method is known by construction.

Each federation is written as folders of images, and the two commands of a new user are run: ``perada init`` and
``perada choose``.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch.utils.data import TensorDataset

from benchmarks.verdicts import ALONE, BOTH, ONE_MODEL, PERSONAL, SETTINGS, Client
from perada.studies.choose.candidates import SHARED_ONLY
from perada.studies.compare.comparison import EVERYONE, OWN

DRAWS = 2
"""Draws of each kind of clients. A kind with a setting for own and one for all images has a draw for each."""
BUDGET = "3m"
ROUNDS = 10
SMALL_NETWORK = (
    "--model.backbone=test_resnet",
    "--model.pretrained=perada:fashion_test_resnet",
    "--data.dataset.size=32",
    "--data.image_size=32",
    "--data.batch_size=16",
)
"""The network whose weights come with perada, as in docs/getting-started.md."""
GOALS = {OWN: "own", EVERYONE: "all"}


def choice_known(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Run a search on each federation, and yield whether it takes a method that is known to be among the best."""
    searched: dict[str, int] = {}
    for name, setting in SETTINGS.items():
        kind = setting.make.__name__
        has_two_settings = sum(other.make is setting.make for other in SETTINGS.values()) == 2
        num_draws = 1 if has_two_settings or quick else DRAWS
        for _ in range(num_draws):
            draw = searched.get(kind, 0)
            searched[kind] = draw + 1
            clients = setting.make(torch.Generator().manual_seed(draw))
            chosen = _choose(clients, GOALS[setting.criterion], device, quick)
            outcome = "wrong" if chosen.row in setting.worse else "right"
            yield {"federation": f"{name}, draw {draw}", "taken": chosen.text, "outcome": outcome}
        if quick:
            return


@dataclass(frozen=True)
class Choice:
    """What was taken.

    Attributes:
        row: The row of ``benchmarks.verdicts`` that predicts in the same way.
        text: The algorithm, and the models that predict.
    """

    row: str
    text: str

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any]) -> "Choice":
        """Read ``best.yaml``."""
        algorithm = recipe["federated"]["algorithm"]
        class_name = str(algorithm["class_path"]).split(".")[-1]
        if class_name.lower() == ALONE:
            return cls(ALONE, class_name)
        if class_name.lower() in SHARED_ONLY:
            return cls(ONE_MODEL, class_name)
        if recipe["evaluation"]["prediction"] == "both":
            return cls(BOTH, f"{class_name}, both models")
        return cls(PERSONAL, f"{class_name}, personal model")


def _choose(clients: list[Client], goal: str, device: torch.device, quick: bool) -> Choice:
    """Run both commands for some clients."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, client in enumerate(clients):
            _write_images(folder / "images" / f"site{number}" / "train", client.train)
            _write_images(folder / "images" / f"site{number}" / "test", client.test)
        rounds = "2" if quick else str(ROUNDS)
        run_perada(folder, ["init", "--images", "images", "--yes", "--rounds", rounds])
        budget = "2m" if quick else BUDGET
        seeds = ["--seeds", "0"] if quick else []
        options = ["--budget", budget, "--goal", goal, *seeds, f"--trainer.accelerator={device.type}", *SMALL_NETWORK]
        run_perada(folder, ["choose", "recipe.yaml", *options])
        return Choice.from_recipe(yaml.safe_load((folder / "choice" / "best.yaml").read_text(encoding="utf-8")))


def _write_images(folder: Path, images: TensorDataset) -> None:
    """Write images (N, 1, S, S) as files, in a folder for each class."""
    for number, (pixels, label) in enumerate(images):
        path = folder / str(int(label)) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(path)


def run_perada(folder: Path, words: list[str]) -> None:
    """Run a command in a folder.

    Raises:
        RuntimeError: If it fails, with what it printed.
    """
    command = [sys.executable, "-c", "from perada.cli import entry_point; entry_point()", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"perada {words[0]} failed:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
