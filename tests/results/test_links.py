# SPDX-License-Identifier: Apache-2.0
"""Folders of a stranger, whose links lead out of them: nothing outside is read, moved or overwritten."""

import csv
import json
import shutil

import pytest
import torch

import perada
from benchmarks.faults.job import Job
from perada.results.clients import forget
from perada.results.inference import Predictions
from perada.results.overwriting import check_exported_model


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    job = Job(rounds=1)
    run = job.train(folder, logger=False)
    return run.export(folder / "saved"), job.network


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original[0], tmp_path / "saved"), original[1]()


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "diary").write_text("secret")
    return folder


def unchanged(outside):
    return {path.name: path.read_text() for path in outside.iterdir()} == {"diary": "secret"}


@pytest.mark.parametrize("name", [".perada-saved", ".perada-saving"])
def test_files_are_not_moved_from_elsewhere(saved, outside, name):
    """Reading the run moved all that was in ``outside`` into its folder."""
    folder, own = saved
    (folder / name).symlink_to(outside)
    for read in (lambda: perada.Run.load(folder, backbone=own), lambda: forget(folder, 0)):
        with pytest.raises(ValueError, match=rf"{name}' is a link to '.*outside'"):
            read()
    assert unchanged(outside)
    assert not (folder / "diary").exists()


def test_files_are_not_moved_to_elsewhere(saved, outside):
    folder, own = saved
    run = perada.Run.load(folder, backbone=own)
    shutil.rmtree(folder / "client_0")
    (folder / "client_0").symlink_to(outside)
    with pytest.raises(ValueError, match=r"client_0' is a link to '.*outside'"):
        run.export(folder)
    assert unchanged(outside)
    (folder / "client_0").unlink()
    assert perada.Run.load(folder, backbone=own).num_clients == 3  # what was saved is put in place now


@pytest.mark.parametrize("name", ["client_0", "client_0/adapter_model.safetensors", "run.json"])
def test_what_is_elsewhere_is_not_read(saved, outside, name):
    folder, own = saved
    shutil.move(folder / name, outside / "moved")
    (folder / name).symlink_to(outside / "moved")
    with pytest.raises(ValueError, match=rf"{name}' is a link to '.*moved'"):
        perada.Run.load(folder, backbone=own)


@pytest.mark.parametrize("writer", ["save", "export"])
def test_a_run_file_that_is_a_link_is_neither_read_nor_replaced(saved, outside, writer):
    """Even if the target is the file of a run: nothing outside the folder is read to find that out."""
    folder, own = saved
    run = perada.Run.load(folder, backbone=own)
    shutil.move(folder / "run.json", outside / "run.json")
    content = (outside / "run.json").read_bytes()
    (folder / "run.json").symlink_to(outside / "run.json")
    with pytest.raises(FileExistsError, match=r"run\.json' is a link"):
        getattr(run, writer)(folder)
    assert (folder / "run.json").is_symlink()
    assert (outside / "run.json").read_bytes() == content


def test_digests_that_are_a_link_do_not_make_a_folder_an_adapters(saved, outside):
    folder, own = saved
    run = perada.Run.load(folder, backbone=own)
    (folder / "run.json").unlink()
    for sums in sorted(folder.rglob("SHA256SUMS")):
        shutil.move(sums, outside / sums.parent.name)
        sums.symlink_to(outside / sums.parent.name)
    with pytest.raises(FileExistsError, match="not replaced"):
        run.export(folder)


def test_a_readme_that_is_a_link_is_not_read_before_a_model_is_exported(tmp_path, outside):
    folder = tmp_path / "model"
    folder.mkdir()
    readme = "# ONNX model of a run of perada\n"
    (outside / "README.md").write_text(readme)
    (folder / "README.md").symlink_to(outside / "README.md")
    with pytest.raises(FileExistsError, match=r"README\.md' is a link"):
        check_exported_model(folder, "model.onnx")
    assert (outside / "README.md").read_text() == readme


def test_a_snapshot_of_the_hub_links_to_its_blobs(saved, tmp_path):
    folder, own = saved
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        place = snapshot / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, blobs / str(number))
        place.symlink_to(blobs / str(number))
    assert perada.Run.load(snapshot, backbone=own).num_clients == 3


def test_a_card_that_is_a_link_is_not_copied(saved, outside):
    folder, own = saved
    run = perada.Run.load(folder, backbone=own)
    (folder / "client_0" / "README.md").unlink()
    (folder / "client_0" / "README.md").symlink_to(outside / "diary")
    run.export(folder)
    assert "secret" not in (folder / "client_0" / "README.md").read_text()
    assert not (folder / "client_0" / "README.md").is_symlink()
    assert json.loads((folder / "run.json").read_text())["num_clients"] == 3
    assert unchanged(outside)


def test_predictions_hold_no_formula(tmp_path):
    probabilities = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    fields = {"probabilities": probabilities, "labels": torch.tensor([0, 1]), "classes": ("=cmd()", "cat")}
    result = Predictions(**fields, paths=("=1+1.png", "a.png"))
    rows = list(csv.reader(result.to_csv(tmp_path / "out.csv").read_text().splitlines()))
    assert [row[:2] for row in rows[1:]] == [["./=1+1.png", "'=cmd()"], ["a.png", "cat"]]
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)
