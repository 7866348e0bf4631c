# SPDX-License-Identifier: Apache-2.0
"""The recipe for real sites, from `init` to the exported model, as docs/deploy.md uses it; in small, without Flower."""

import re

import numpy as np
import pytest
import yaml
from PIL import Image

from perada import Run
from perada.cli.deployed_recipes import server_recipe
from perada.cli.main import main
from perada.cli.recipes import find_recipe

CLASSES = ["benign", "malignant"]


def draw(folder, numbers, light):
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        pixels = np.random.default_rng([number, light]).integers(light - 40, light + 40, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def copy_recipe(tmp_path):
    """A copy of the recipe for images of 32 pixels and one round, edited as the page says."""
    main(["cp", "sites", str(tmp_path / "federation.yaml")])
    path = tmp_path / "federation.yaml"
    text = path.read_text().replace("/srv/public", str(tmp_path / "public")).replace("224", "32")
    for option, value in (("max_epochs", 1), ("num_workers", 0), ("steps", 1), ("batch_size", 8)):
        text = re.sub(rf"( {option}): \d+", rf"\1: {value}", text)
    path.write_text(text)
    draw(tmp_path / "public", range(12), 120)
    return path


def test_the_server_reads_it_without_a_clients_image(tmp_path):
    recipe = server_recipe(str(copy_recipe(tmp_path)))
    assert recipe.classes == tuple(CLASSES) and len(recipe.public) == 12
    (shipped,) = find_recipe("sites")
    data = yaml.safe_load(shipped.read_text())["data"]
    assert data["public"]["init_args"]["root"].startswith("/")  # Flower chooses where the server's process begins


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fashion_mnist_small", r"set data.public, as in the recipe `sites` \(perada cp sites"),
        ("images/perada", r"does not specify the classes.*classes: \[benign, malignant\].*as in the recipe `sites`"),
    ],
)
def test_recipes_that_a_server_cannot_read_name_one_that_it_can(name, remedy):
    with pytest.raises(ValueError, match=remedy):
        server_recipe(name)


@pytest.mark.slow
def test_it_goes_from_init_to_a_model_that_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy_recipe(tmp_path)
    main(["deploy", "init", "federation.yaml", "federation", "--host", "localhost"])
    digest = re.search("digest ([0-9a-f]{64})", capsys.readouterr().out)[1]
    files = []
    for place, name in enumerate(("st-marys", "north")):
        for label, light in zip(CLASSES, (60, 180), strict=True):
            draw(tmp_path / "images" / name / label, range(20 * place, 20 * place + 8), light)
        site = yaml.safe_load((tmp_path / "federation" / "site" / "site.yaml").read_text())
        assert site["recipes"][0]["digest"] == digest
        site["recipes"][0]["recipe"] = str(tmp_path / "federation" / "site" / "recipe.yaml")
        site["data"]["root"] = str(tmp_path / "images" / name)
        site |= {"name": name, "state": f"state-{name}", "socket": f"{name}.sock"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(site))
        files.append(f"{name}.yaml")
    main(["deploy", "check", files[0]])
    assert "federation.yaml" not in (said := capsys.readouterr().out) and "recipe.yaml: approved" in said
    main(["deploy", "run", "federation.yaml", "--local", *files, "--folder", "srv", "--min-sites", "2"])
    main(["deploy", "export", files[0], "--output", "models"])
    main(["deploy", "export", "srv", "--recipe", "federation.yaml", "--output", "global"])
    for folder, client in (("models", ["--client", "st-marys"]), ("global", [])):
        main(["predict", folder, "--images", "images/north", *client, "--output", f"{folder}.csv", "--device", "cpu"])
        assert len((tmp_path / f"{folder}.csv").read_text().splitlines()) == 17
        assert Run.load(folder).info["classes"] == CLASSES
