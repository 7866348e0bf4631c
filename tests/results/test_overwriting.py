# SPDX-License-Identifier: Apache-2.0
"""Files that perada did not write are never replaced, and files of its earlier runs are."""

import json
import re

import pytest
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import TensorDataset

import perada
from perada.results.formats import export_model
from perada.results.inference import Predictions
from perada.studies.report.page import write_page
from perada.studies.report.records import read_records

FOREIGN = ['{"name": "my run", "lr": 0.1}', "[1, 2]", "a note", '{"format": "mine"}']


@pytest.fixture(scope="module")
def run(tiny):
    settings = tiny.options | {"rounds": 1, "logger": False, "adapter": "full"}
    return tiny.finetune(**settings)


@pytest.fixture(scope="module")
def exportable_run():
    """A run of which single models can be exported."""
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = perada.FederatedData([TensorDataset(images, torch.arange(6) % 3)] * 2)
    settings = {"adapter": "lora", "pretrained": False, "rounds": 1, "local_steps": 1, "logger": False}
    settings |= {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
    return perada.finetune("test_resnet", data, algorithm="fedavg", **settings)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replace_by_link(path, target):
    """Move a file, and put a link to it in its place."""
    path.rename(target)
    path.symlink_to(target)


def check_rejected(write, file, content):
    """Writing is rejected because of a file, and changes nothing in its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    root = file.parents[1] if file.parent.name == "client_0" else file.parent
    before = contents(root)
    with pytest.raises(FileExistsError, match=rf"^'{re.escape(str(file))}' .*not replaced"):
        write()
    assert contents(root) == before


@pytest.mark.parametrize("content", FOREIGN)
def test_a_foreign_run_file_is_left(run, tmp_path, content):
    check_rejected(lambda: run.save(tmp_path / "a"), tmp_path / "a" / "run.json", content)
    check_rejected(lambda: run.export(tmp_path / "b"), tmp_path / "b" / "run.json", content)
    check_rejected(lambda: run.export(tmp_path / "c", client=0), tmp_path / "c" / "run.json", content)


@pytest.mark.parametrize("name", ["adapter_config.json", "global.safetensors", "personal_2.safetensors"])
def test_other_foreign_files_of_a_saved_run_are_left(run, tmp_path, name):
    check_rejected(lambda: run.save(tmp_path / "a"), tmp_path / "a" / name, "mine")


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json", "adapter_model.safetensors", "SHA256SUMS"])
def test_foreign_files_in_the_folder_of_an_adapter_are_left(run, tmp_path, name):
    check_rejected(lambda: run.export(tmp_path / "a"), tmp_path / "a" / "client_0" / name, "mine")


def test_earlier_runs_are_replaced_also_if_they_are_broken(run, tiny, tmp_path):
    folder = run.save(tmp_path / "saved")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMy words.\n")
    run.save(folder)
    assert "My words." in (folder / "README.md").read_text()
    text = (folder / "run.json").read_text()
    for broken in (
        text[:100],
        json.dumps(json.loads(text) | {"format": 1}),
        text.replace('"sha256": "', '"sha256": "0'),
    ):
        (folder / "run.json").write_text(broken)
        run.save(folder)
        perada.Run.load(folder, backbone=tiny.net())

    other = run.export(tmp_path / "exported", client=0)
    run.export(other, client=1)
    assert not (other / "run.json").exists()
    run.export(other)
    assert perada.Run.load(other, backbone=tiny.net()).num_clients == run.num_clients


def test_a_readme_without_a_run_gets_the_card(run, tmp_path):
    (tmp_path / "README.md").write_text("# My repository\n")
    run.save(tmp_path)
    assert "# My repository" in (tmp_path / "README.md").read_text()


def test_the_readme_and_model_of_other_projects_are_left(exportable_run, tmp_path):
    def write(folder):
        return lambda: export_model(exportable_run, None, "safetensors", folder)

    check_rejected(write(tmp_path / "a"), tmp_path / "a" / "README.md", "# My project\n")
    check_rejected(write(tmp_path / "b"), tmp_path / "b" / "model.safetensors", "mine")
    write(tmp_path / "c")()
    write(tmp_path / "c")()


def test_a_model_is_not_exported_over_the_readme_of_a_saved_run(exportable_run, tmp_path):
    folder = exportable_run.save(tmp_path / "run")
    before = contents(folder)
    with pytest.raises(FileExistsError, match=r"README\.md' is not the README"):
        export_model(exportable_run, None, "safetensors", folder)
    assert contents(folder) == before


def test_a_predicted_mask_does_not_replace_its_image(tmp_path):
    Image.new("L", (2, 2), 7).save(tmp_path / "b.png")
    before = contents(tmp_path)
    masks = Predictions(
        torch.zeros(2, 2, 2, 2),
        torch.ones(2, 2, 2, dtype=torch.int64),
        ("a", "b"),
        paths=("a.png", "b.png"),
        sources=(str(tmp_path / "b.png"),) * 2,
    )
    with pytest.raises(FileExistsError, match=r"b\.png' was not written"):
        masks.save_masks(tmp_path)
    assert contents(tmp_path) == before
    masks.save_masks(tmp_path / "masks")
    masks.save_masks(tmp_path / "masks")
    assert Image.open(tmp_path / "masks" / "b.png").getpixel((0, 0)) == 1
    replace_by_link(tmp_path / "masks" / "b.png", tmp_path / "elsewhere.png")
    with pytest.raises(FileExistsError, match=r"b.png' is a link"):
        masks.save_masks(tmp_path / "masks")


@pytest.mark.slow
def test_other_pages_and_their_files_are_left(run, tmp_path):
    records = read_records(run.save(tmp_path / "run"))
    page = write_page(tmp_path / "page", records)
    table = next(path for path in page.parent.iterdir() if path.suffix == ".csv")
    write_page(tmp_path / "page", records)
    check_rejected(lambda: write_page(tmp_path / "a", records), tmp_path / "a" / "index.html", "<html></html>")
    check_rejected(lambda: write_page(tmp_path / "b", records), tmp_path / "b" / table.name, "mine")
    replace_by_link(page, tmp_path / "elsewhere.html")
    with pytest.raises(FileExistsError, match=r"index.html' is a link"):
        write_page(tmp_path / "page", records)


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_a_run_folder_with_foreign_files_is_rejected_before_training(tiny, tmp_path, name):
    def train():
        logger = CSVLogger(tmp_path, name="", version="")
        options = tiny.options | {"rounds": 1, "logger": logger, "enable_checkpointing": False}
        tiny.finetune(**options)

    check_rejected(train, tmp_path / name, "trainer: {}\n")
    (tmp_path / name).unlink()
    train()
    train()
    assert (tmp_path / "config.yaml").read_text().startswith("# perada\n")
