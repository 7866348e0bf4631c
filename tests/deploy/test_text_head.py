# SPDX-License-Identifier: Apache-2.0
"""Sites whose head comes from class names: they approve the text tower and the templates with the recipe."""

import re

import pytest
import torch
import yaml
from transformers import CLIPModel

from benchmarks.image_text import save_image_text
from perada import Run
from perada.cli.deployed_recipes import server_recipe
from perada.cli.main import main
from tests.deploy.test_sites_recipe import CLASSES, copy_recipe, draw_images
from tests.rejections import raises_naming

TEMPLATES = ["a photo of the {}.", "a sketch of the {}."]


def text_recipe(tmp_path, **changes):
    """The recipe for sites, with a small CLIP and a head from class names."""
    save_image_text("clip", tmp_path / "clip")
    path = copy_recipe(tmp_path)
    recipe = yaml.safe_load(path.read_text())
    recipe["model"] = {
        "backbone": f"hf:{tmp_path / 'clip'}",
        "pretrained": True,
        "adapter": "lora",
        "text_head": {"templates": TEMPLATES, "train_logit_scale": True},
    }
    for name, value in changes.items():
        recipe["data"]["dataset"]["init_args"][name] = value
    path.write_text(yaml.safe_dump(recipe))
    return path


def site_file(tmp_path, name):
    """The file of a site, from what `deploy init` wrote."""
    site = yaml.safe_load((tmp_path / "federation" / "site" / "site.yaml").read_text())
    site["recipes"][0]["recipe"] = str(tmp_path / "federation" / "site" / "recipe.yaml")
    site["data"]["root"] = str(tmp_path / "sites" / name)
    site |= {"name": name, "state": f"state-{name}", "socket": f"{name}.sock"}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(site))
    return f"{name}.yaml"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_images(tmp_path)
    path = text_recipe(tmp_path)
    main(["deploy", "init", path.name, "federation", "--host", "localhost"])
    return path


def test_a_site_notices_another_text_tower(tmp_path, recipe, capsys):
    site = site_file(tmp_path, "north")
    capsys.readouterr()
    main(["deploy", "check", site])
    assert "recipe.yaml: approved" in capsys.readouterr().out
    network = CLIPModel.from_pretrained(tmp_path / "clip")
    with torch.no_grad():
        network.text_projection.weight[0] += 1
    network.save_pretrained(tmp_path / "clip")
    with raises_naming(ValueError, "recipe.yaml", "frozen weights"):
        main(["deploy", "check", site])


@pytest.mark.slow
def test_sites_train_and_export(tmp_path, recipe):
    files = [site_file(tmp_path, name) for name in ("north", "south")]
    main(["deploy", "run", recipe.name, "--local", *files, "--folder", "srv", "--min-sites", "2"])
    main(["deploy", "export", "srv", "--recipe", recipe.name, "--output", "global"])
    run = Run.load("global")
    assert run.info["text_head"]["class_names"] == CLASSES
    assert any(re.search(r"classifier\..*scale_offset", name) for name in run.state("global"))


def test_a_server_without_class_names_is_told_to_list_them(tmp_path):
    draw_images(tmp_path)
    path = text_recipe(tmp_path, classes=None)
    text = path.read_text().replace("data:\n", "data:\n  num_classes: 2\n", 1)
    path.write_text(text)
    recipe = server_recipe(str(path))
    with raises_naming(ValueError, "text_head", "class_names"):
        recipe.build(recipe.num_classes, recipe.task)
