# SPDX-License-Identifier: Apache-2.0
"""A network that segments images with masks, trained over Flower, is to the bit that of the simulation."""

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")
pytest.importorskip("segmentation_models_pytorch")

from perada.cli import main
from perada.cli.flower import recipe_digest
from perada.deploy.server.progress import read_saved_run
from perada.studies import deployment
from perada.studies.deployment import SITES, run_demo
from tests.masks import squares

pytestmark = pytest.mark.slow
ROUNDS = 2
SIZE = 32
SCORES = [
    f"{model}_test{metric}" for model in ("personal/local", "global/global") for metric in ("", "_miou", "_accuracy")
]


def write_images(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        pixels = image.movedim(0, -1) if image.dim() == 3 else image
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")


def write_hospitals(folder):
    """Write images with masks of three hospitals, and public images."""
    for number, site in enumerate(SITES):
        for split, count, seed in (("train", 9 - number, number), ("test", 3 + number, 100 + number)):
            images, masks = squares(count, seed, brightness=20 * number, size=SIZE).tensors
            write_images(folder / "scans" / site / split / "images", images)
            write_images(folder / "scans" / site / split / "masks", masks)
    public_images, _ = squares(8, 7, brightness=10, size=SIZE).tensors
    write_images(folder / "public", public_images)


def masks_recipe(folder, rounds, secure_sums):
    """Return a recipe for the images below a folder."""
    recipe = {
        "seed_everything": 0,
        "trainer": {"max_epochs": rounds, "check_val_every_n_epoch": rounds, "accelerator": "cpu"},
        "model": {"backbone": "smp:unet-resnet18", "pretrained": False, "adapter": "lora"},
        "data": {
            "dataset": {
                "class_path": "ImageMasks",
                "init_args": {
                    "root": str(folder / "scans"),
                    "classes": ["background", "red", "green"],
                    "size": SIZE,
                },
            },
            "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
            "public": {
                "class_path": "UnlabelledFolder",
                "init_args": {"root": str(folder / "public"), "size": SIZE},
            },
            "image_size": SIZE,
            "batch_size": 4,
        },
        "federated": {"algorithm": "PerAda"},
        "training": {"engine": "loop", "cache_features": False},
        "evaluation": {"metric": ["dice", "miou", "accuracy"]},
        "distillation": {"steps": 3, "batch_size": 4},
    }
    if secure_sums:
        recipe["secure_sums"] = {"fraction_bits": 24}
    return yaml.safe_dump(recipe)


@pytest.mark.parametrize("secure_sums", [False, True], ids=["plain", "secure"])
def test_over_flower_it_is_the_simulation_to_the_bit(secure_sums, tmp_path, capfd, monkeypatch):
    write_hospitals(tmp_path)
    text = masks_recipe(tmp_path, ROUNDS, secure_sums)
    monkeypatch.setattr(deployment, "demo_recipe", lambda *_: text)
    assert run_demo(ROUNDS, recipe_digest, tmp_path / "server", secure_sums) == 0
    assert "has the status finished:completed" in capfd.readouterr().out
    saved_run = read_saved_run(tmp_path / "server")
    progress = saved_run.progress
    states = saved_run.states
    assert [sorted(record.answered) for record in progress.records] == [[*SITES]] * ROUNDS
    if secure_sums:
        assert [record.summed for record in progress.records] == [[*SITES]] * ROUNDS

    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(text)
    main(["fit", "--config", "recipe.yaml"])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    simulated = torch.load(checkpoint, weights_only=True)["perada"]
    expected = simulated["federation"]["global"]
    assert states["global"].keys() == expected.keys() != set()
    for key, value in expected.items():
        assert torch.equal(states["global"][key], value), key
    scores = progress.history[-1]
    expected_scores = simulated["metrics"]["rounds"][-1]
    tolerance = 1e-5 if secure_sums else 1e-6  # in secure sums, scores are rounded
    for name in SCORES:
        assert scores[name] == pytest.approx(expected_scores[name], abs=tolerance), name
