# SPDX-License-Identifier: Apache-2.0
"""A recipe of images with masks at a server and at its sites, from `init` to predicted masks; without Flower."""

import csv
import re
from hashlib import sha256

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.main import main
from perada.deploy.flower.app import write_app
from perada.deploy.site.file import read_site
from perada.tasks import Segmentation
from tests.masks import squares

CLASSES = ["background", "red", "green"]
SIZE = 32


def draw(folder, images):
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        pixels = image.movedim(0, -1) if image.dim() == 3 else image
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")


def scans(folder, seed, count=10):
    """Images with masks whose values are 0, 100 and 200."""
    images, masks = squares(count, seed).tensors
    draw(folder / "images", images)
    draw(folder / "masks", masks * 100)
    return folder


def recipe_file(tmp_path, **dataset):
    """The recipe's file."""
    draw(tmp_path / "public", squares(4, 9).tensors[0])
    dataset = {"class_path": "ImageMasks", "init_args": {"root": "nowhere", "mask_values": [0, 100, 200]}} | dataset
    dataset["init_args"] |= {"classes": CLASSES, "size": SIZE}
    public = {"class_path": "UnlabelledFolder", "init_args": {"root": str(tmp_path / "public"), "size": SIZE}}
    recipe = {
        "trainer": {"max_epochs": 1},
        "model": {"backbone": "smp:unet-resnet18", "pretrained": False, "adapter": "lora"},
        "data": {
            "dataset": dataset,
            "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
            "public": public,
            "image_size": SIZE,
            "batch_size": 8,
        },
        "federated": {"algorithm": "PerAda"},
        "evaluation": {"metric": ["dice", "miou"]},
        "distillation": {"steps": 1, "batch_size": 4},
    }
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def site(path, folder, **data):
    content = {"name": folder.name, "recipes": [{"recipe": str(path)}], "data": data, "state": f"state-{folder.name}"}
    file = path.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def masks_of(recipe):
    """Training and test masks of a site by their content."""
    recipe.data.setup()
    masks = set()
    for store in (recipe.data.checked.train, recipe.data.checked.test):
        (dataset,) = store.datasets
        for row in range(len(dataset)):
            _, mask = dataset[row]
            masks.add(mask.to(torch.uint8).numpy().tobytes())
    return masks


@pytest.mark.parametrize("kind", ["folders", "table"])
def test_server_and_sites_agree_on_the_task_and_the_classes_of_masks(kind, tmp_path):
    pytest.importorskip("segmentation_models_pytorch")
    folder = scans(tmp_path / "north", 1)
    data = {"root": str(folder)}
    path = recipe_file(tmp_path)
    if kind == "table":
        with (folder / "list.csv").open("w", newline="") as file:
            rows = [[f"images/{number}.png", f"masks/{number}.png"] for number in range(10)]
            csv.writer(file).writerows([["path", "outline"], *rows])
        data = {"table": str(folder / "list.csv")}
        options = {"table": "nowhere.csv", "mask": "outline", "mask_values": [0, 100, 200]}
        path = recipe_file(tmp_path, class_path="ImageTable", init_args=options)
    server = server_recipe(str(path))
    assert (server.num_classes, server.task, server.classes) == (3, Segmentation(), tuple(CLASSES))
    recipe = site_recipe(path, read_site(site(path, folder, **data)))
    assert masks_of(recipe) == {mask.numpy().tobytes() for mask in squares(10, 1).tensors[1]}
    assert (recipe.data.num_classes, recipe.data.task) == (3, Segmentation())


def test_the_site_file_of_masks_names_no_layout(tmp_path):
    for name, layout in (("Images", "{class}/*"), ("ImageMasks", None)):
        write_app(tmp_path / name, "scans", f"data: {{dataset: {{class_path: {name}}}}}\n", "ab" * 32, "localhost")
        content = yaml.safe_load((tmp_path / name / "site" / "site.yaml").read_text())
        assert content["data"].get("layout") == layout


@pytest.mark.parametrize(
    ("recipe", "uses_secure_sums"),
    [
        ("secure_sums: {min_sites: 3}\n", True),
        ("secure_sums: {}\n", True),
        ("'secure_sums':\n  min_sites: 3\n", True),
        ("secure_sums: null\n", False),
        ("federated: {drop_outliers: true}  # secure_sums would hide what this reads\n", False),
        ("trainer: {default_root_dir: secure_sums}\n", False),
    ],
)
def test_the_site_file_has_secure_sums_if_the_recipe_has_them(tmp_path, recipe, uses_secure_sums):
    write_app(tmp_path / "federation", "scans", recipe, "ab" * 32, "localhost")
    content = yaml.safe_load((tmp_path / "federation" / "site" / "site.yaml").read_text())
    assert ("secure_sums" in content) == uses_secure_sums


@pytest.mark.slow
def test_it_goes_from_init_to_predicted_masks(tmp_path, monkeypatch, capsys):
    pytest.importorskip("segmentation_models_pytorch")
    monkeypatch.chdir(tmp_path)
    path = recipe_file(tmp_path)
    main(["deploy", "init", "federation.yaml", "federation", "--host", "localhost"])
    digest = re.search("digest ([0-9a-f]{64})", capsys.readouterr().out)[1]
    files = [str(site(path, scans(tmp_path / name, seed), root=name)) for seed, name in enumerate(("north", "south"))]
    for file in files:
        content = yaml.safe_load((tmp_path / file).read_text())
        content["recipes"][0] |= {"digest": digest, "sha256": sha256(path.read_bytes()).hexdigest()}
        (tmp_path / file).write_text(yaml.safe_dump(content | {"may_send": ["counts"]}))
    main(["deploy", "run", "federation.yaml", "--local", *files, "--folder", "srv", "--min-sites", "2"])
    main(["deploy", "status", "srv"])
    assert "%" in capsys.readouterr().out
    main(["deploy", "export", files[0], "--output", "models"])
    main(["deploy", "export", "srv", "--recipe", "federation.yaml", "--output", "global"])
    for folder, client in (("models", ["--client", "north"]), ("global", [])):
        options = ["--images", "south/images", *client, "--output", f"{folder}-masks", "--device", "cpu"]
        main(["predict", folder, *options])
        predicted = sorted((tmp_path / f"{folder}-masks").rglob("*.png"))
        assert len(predicted) == 10
        assert set(np.unique(np.array(Image.open(predicted[0])))) <= {0, 1, 2}
