# SPDX-License-Identifier: Apache-2.0
"""`perada data inspect` rejects what training rejects, and shows the values of the clients' masks side by side."""

import json

import numpy as np
import pytest
from PIL import Image

from perada.cli import main

SIZE = 8


def write_masks(folder, *values, count=5, kind=np.uint8, extension="png"):
    """Pairs of a client, whose masks have rows of the values."""
    random = np.random.default_rng([*folder.name.encode()])
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        pixels = np.resize(np.array(values, dtype=kind), (SIZE, SIZE)).T
        Image.fromarray(random.integers(0, 255, (SIZE, SIZE, 3), np.uint8)).save(folder / "images" / f"{number}.png")
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / "masks" / f"{number}.{extension}")


def inspected(capsys, *words):
    """Exit status and output of ``perada data inspect``."""
    status = 0
    try:
        main(["data", "inspect", *map(str, words)])
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("north", "south", "message"),
    [
        ((0, 1), (0, 255), r"the training masks of client 1 ('south') have only class 0 and 255"),
        ((0,), (0,), "that count have the class 0"),
        ((255,), (255,), "all pixels of the training masks are ignored"),
        ((0, 7), (0, 7), "mask_values=[0, 7]"),
    ],
)
def test_masks_that_training_rejects_are_rejected(tmp_path, capsys, north, south, message):
    write_masks(tmp_path / "north", *north)
    write_masks(tmp_path / "south", *south)
    status, printed = inspected(capsys, tmp_path)
    assert status == 1
    assert "Rejected by training (1):" in printed
    assert message in printed
    assert printed.rstrip().endswith("The images cannot be used until these problems are fixed.")


def test_negative_values_are_rejected_with_the_file(tmp_path, capsys):
    write_masks(tmp_path / "north", 0, 1, kind=np.int32, extension="tif")
    write_masks(tmp_path / "south", 0, -100, kind=np.int32, extension="tif")
    status, printed = inspected(capsys, tmp_path)
    assert status == 1
    assert "has the class -100, outside 0..1" in printed
    assert "ignore_index" in printed


def test_values_are_shown_side_by_side(tmp_path, capsys):
    write_masks(tmp_path / "north", 0, 0, 0, 255)
    write_masks(tmp_path / "south", 0, 255, 255, 255)
    status, printed = inspected(capsys, tmp_path)
    assert status == 0
    assert "- north: 0 (75 %), 255 (25 %)" in printed
    assert "- south: 0 (25 %), 255 (75 %)" in printed
    _, printed = inspected(capsys, tmp_path, "--json")
    record = json.loads(printed)
    assert record["mask_values"][0] == pytest.approx({"0": 0.75, "255": 0.25})
    assert record["rejections"] == []


def test_the_options_of_a_recipe_decide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_masks(tmp_path / "mine" / "north", 0, 1, 2)
    write_masks(tmp_path / "mine" / "south", 0, 1, 2)
    words = ["--config=images", "--data.dataset=ImageMasks", "--data.dataset.root=mine", "--data.partition=ByDomain"]
    words += ["--data.partition.column=client", "--data.public_fraction=0.0"]
    status, _ = inspected(capsys, *words)
    assert status == 0
    status, printed = inspected(capsys, *words, "--data.task=Segmentation", "--data.task.ignore_index=1")
    assert status == 1
    assert "ignore_index=1 is one of the 3 classes" in printed
    status, printed = inspected(capsys, *words, "--data.num_classes=2")
    assert status == 1
    assert "has the class 2, outside 0..1" in printed


def test_one_patient_a_hospital_can_be_used(tmp_path, capsys):
    for hospital in ("north", "south"):
        write_masks(tmp_path / hospital, 0, 1)
        for kind in ("images", "masks"):
            folder = tmp_path / hospital / kind
            files = list(folder.iterdir())
            (folder / "p1").mkdir()
            for file in files:
                file.rename(folder / "p1" / file.name)
    status, printed = inspected(capsys, tmp_path)
    assert status == 0
    assert "no test images: north, south" in printed


def test_a_single_class_is_rejected(tmp_path, capsys):
    for client in "ab":
        (tmp_path / client / "x").mkdir(parents=True)
        for number in range(5):
            Image.new("L", (4, 4), 10 * number + (client == "b")).save(tmp_path / client / "x" / f"{number}.png")
    status, printed = inspected(capsys, tmp_path)
    assert status == 1
    assert "all images are of one class (x)" in printed
    status, _ = inspected(capsys, tmp_path, "--classes=[x, y]")
    assert status == 0
