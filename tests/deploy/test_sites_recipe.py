# SPDX-License-Identifier: Apache-2.0
"""The recipes for real sites, from `init` to the exported model, as docs/deploy.md uses them; small, without Flower."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from perada import Run
from perada.cli.deployed_recipes import server_recipe
from perada.cli.main import main
from perada.cli.recipes import find_recipe
from perada.studies.dicom_sites import main as dicom_sites
from perada.studies.dicom_sites import write_dicom_sites

CLASSES = ["benign", "malignant"]


def draw(folder, numbers, light):
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        pixels = np.random.default_rng([number, light]).integers(light - 40, light + 40, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def copy_recipe(tmp_path, name="sites"):
    """A copy of a recipe for images of 32 pixels and one round, edited as the page says."""
    main(["cp", name, str(tmp_path / "federation.yaml")])
    path = tmp_path / "federation.yaml"
    text = path.read_text().replace("224", "32").replace("size: 64", "size: 32")
    for public in ("/srv/public", "dicom/public"):
        text = text.replace(public, str(tmp_path / "public"))
    for option, value in (("max_epochs", 1), ("num_workers", 0), ("steps", 1), ("batch_size", 8)):
        text = re.sub(rf"( {option}): \d+", rf"\1: {value}", text)
    path.write_text(text)
    return path


def draw_images(tmp_path):
    """PNG files of two sites and of the server."""
    draw(tmp_path / "public", range(12), 120)
    for place, name in enumerate(("north", "south")):
        for label, light in zip(CLASSES, (60, 180), strict=True):
            draw(tmp_path / "sites" / name / label, range(20 * place, 20 * place + 8), light)


def write_dicom(tmp_path):
    """DICOM files of three sites and of the server."""
    pytest.importorskip("pydicom", reason="needs the extra medical")
    write_dicom_sites(tmp_path, 3)


def test_the_server_reads_it_without_a_clients_image(tmp_path):
    draw_images(tmp_path)
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


def test_generated_files_are_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("pydicom", reason="needs the extra medical")
    dicom_sites(["dicom", "--patients", "3"])
    assert len([*Path("dicom", "sites").rglob("*.dcm")]) == 36
    main([
        "fit", "--config", "sites_dicom", "--model.backbone", "test_resnet", "--model.pretrained", "false",
        "--model.adapter_options", "null", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu",
        "--trainer.default_root_dir", "out", "--distillation.steps", "1", "--evaluation.prediction", "personal",
    ])  # fmt: skip
    (record,) = Path("out").rglob("run.json")
    info = json.loads(record.read_text())["info"]
    assert info["clients"] == ["north", "south", "west"]
    assert info["preprocessing"]["medical"]["window"] == "lung"
    with pytest.raises(SystemExit):
        dicom_sites(["dicom"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), [("sites", draw_images), ("sites_dicom", write_dicom)])
def test_it_goes_from_init_to_a_model_that_predicts(tmp_path, monkeypatch, capsys, name, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    copy_recipe(tmp_path, name)
    main(["deploy", "init", "federation.yaml", "federation", "--host", "localhost"])
    digest = re.search("digest ([0-9a-f]{64})", capsys.readouterr().out)[1]
    files = []
    sites = sorted(folder.name for folder in (tmp_path / "sites").iterdir())
    for site_name in sites:
        site = yaml.safe_load((tmp_path / "federation" / "site" / "site.yaml").read_text())
        assert site["recipes"][0]["digest"] == digest
        site["recipes"][0]["recipe"] = str(tmp_path / "federation" / "site" / "recipe.yaml")
        site["data"]["root"] = str(tmp_path / "sites" / site_name)
        site |= {"name": site_name, "state": f"state-{site_name}", "socket": f"{site_name}.sock"}
        (tmp_path / f"{site_name}.yaml").write_text(yaml.safe_dump(site))
        files.append(f"{site_name}.yaml")
    main(["deploy", "check", files[0]])
    assert "federation.yaml" not in (said := capsys.readouterr().out) and "recipe.yaml: approved" in said
    main(["deploy", "run", "federation.yaml", "--local", *files, "--folder", "srv", "--min-sites", str(len(sites))])
    main(["deploy", "export", files[0], "--output", "models"])
    main(["deploy", "export", "srv", "--recipe", "federation.yaml", "--output", "global"])
    num_images = len([path for path in (tmp_path / "sites" / "south").rglob("*.*") if path.is_file()])
    for folder, client in (("models", ["--client", sites[0]]), ("global", [])):
        main(["predict", folder, "--images", "sites/south", *client, "--output", f"{folder}.csv", "--device", "cpu"])
        assert len((tmp_path / f"{folder}.csv").read_text().splitlines()) == num_images + 1
        assert Run.load(folder).info["classes"] == CLASSES
