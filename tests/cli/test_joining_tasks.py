# SPDX-License-Identifier: Apache-2.0
"""``perada clients add`` to runs that predict numbers or masks: from tables and folders."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.cli import main
from perada.data import IID, FederatedDataModule, ImageMasks, ImageTable
from perada.tasks import Regression
from tests.masks import squares

OPTIONS = {"pretrained": False, "algorithm": "ditto", "rounds": 1, "local_steps": 1, "logger": False}


def write_ages(folder, count, seed, header="file,age,weight"):
    """A table of images whose brightness is the age."""
    random = np.random.default_rng(seed)
    rows = [header]
    for number in range(count):
        age = int(random.integers(20, 80))
        pixels = np.full((32, 32, 3), 2 * age, dtype=np.uint8) + random.integers(0, 40, (32, 32, 3), dtype=np.uint8)
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{age},{age + 1}.5")
    (folder / "table.csv").write_text("\n".join(rows))
    return str(folder / "table.csv")


@pytest.fixture(scope="module")
def ages(tmp_path_factory):
    """A saved run that predicts ages."""
    folder = tmp_path_factory.mktemp("ages")
    table = ImageTable(write_ages(folder / "data", 16, 0), path="file", numbers="age", size=32)
    data = FederatedDataModule(dataset=table, partition=IID(2), task=Regression(mean=50, std=15), batch_size=4)
    return perada.finetune("test_resnet", data, adapter="head", **OPTIONS).save(folder / "run")


@pytest.mark.parametrize("header", ["file,age,weight", "file,years,weight"])
def test_numbers_of_a_table_are_those_of_the_run(ages, tmp_path, header, capsys):
    table = write_ages(tmp_path / "late", 12, 1, header)
    words = ["--client=late", "--images.path=file", "--rounds=1", "--lr=0", "--accelerator=cpu"]
    if "years" in header:
        words.append("--images.numbers=years")
    main(["clients", "add", str(ages), "--data", table, "--output", str(tmp_path / "new"), *words])
    run = perada.Run.load(tmp_path / "new")
    record = run.info["joined"][-1]
    test = ImageTable(table, path="file", numbers=header.split(",")[1], size=32).with_split(False)
    images = [image for image, _ in test]
    predicted = run.predict(torch.stack(images), client="late").labels.flatten()
    expected = (predicted - test.labels.flatten()).abs().mean()
    assert record["after"] == pytest.approx(float(expected), rel=1e-4)
    assert f"{record['after']:.4g} after on its own test images" in capsys.readouterr().out


def test_tables_without_the_numbers_are_rejected(ages, tmp_path):
    table = write_ages(tmp_path / "late", 6, 1, "file,years,weight")
    command = ["clients", "add", str(ages), "--client=late", "--images.path=file", "--data"]
    with pytest.raises(ValueError, match=r"age.*'file', 'years', 'weight'"):
        main([*command, table])
    with pytest.raises(ValueError, match=r"2 columns \(years, weight\).*age"):
        main([*command, table, "--images.numbers=[years,weight]"])
    with pytest.raises(ValueError, match=r"age.*column"):
        main(["clients", "add", str(ages), "--client=late", "--data", str(tmp_path / "late")])


def write_pairs(folder, count, seed, values=(0, 1, 2)):
    rows = ["path,mask"]
    for number, (image, mask) in enumerate(squares(count, seed)):
        for kind in ("images", "masks"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{number}.png")
        Image.fromarray(np.array(values, dtype=np.uint8)[mask.numpy()]).save(folder / "masks" / f"{number}.png")
        rows.append(f"images/{number}.png,masks/{number}.png")
    (folder / "table.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """A saved run that predicts masks."""
    pytest.importorskip("segmentation_models_pytorch")
    folder = tmp_path_factory.mktemp("masks")
    images = ImageMasks(str(write_pairs(folder / "data", 12, 0)), size=32, classes=["none", "red", "green"])
    data = FederatedDataModule(dataset=images, partition=IID(2), batch_size=4)
    return perada.finetune("smp:unet-resnet18", data, adapter="lora", **OPTIONS).save(folder / "run")


@pytest.mark.filterwarnings("ignore:client 'late'. its personal model is worse:UserWarning")
@pytest.mark.every(2)
@pytest.mark.parametrize("source", ["", "table.csv"])
def test_masks_of_a_folder_or_a_table_are_those_of_the_run(segmented, tmp_path, source, capsys):
    folder = write_pairs(tmp_path / "late", 8, 1)
    words = ["--client=late", "--rounds=1", "--accelerator=cpu", "--output", str(tmp_path / "new")]
    main(["clients", "add", str(segmented), "--data", str(folder / source), *words])
    joined = json.loads((tmp_path / "new" / "run.json").read_text())["info"]["joined"][-1]
    splits = [ImageMasks(str(folder), size=32, train=train) for train in (True, False)]
    assert joined["images"] == len(splits[0])
    run = perada.Run.load(tmp_path / "new")
    predicted = run.predict(torch.stack([image for image, _ in splits[1]]), client="late").labels
    scores = []
    for k in range(3):
        for mask, truth in zip(predicted == k, splits[1].labels == k, strict=True):
            if truth.any():
                scores.append((k, float(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))))
    means = [np.mean([score for k, score in scores if k == expected]) for expected in {k for k, _ in scores}]
    assert joined["after"] == pytest.approx(np.mean(means), abs=1e-4)
    assert "after on its own test images" in capsys.readouterr().out


def test_sources_without_masks_are_rejected(segmented, tmp_path):
    folder = write_pairs(tmp_path / "late", 6, 1)
    table = (folder / "table.csv").read_text().replace("path,mask", "path,outline")
    (folder / "table.csv").write_text(table)
    command = ["clients", "add", str(segmented), "--client=late", "--data"]
    with pytest.raises(ValueError, match=r"masks.*'path', 'outline'"):
        main([*command, str(folder / "table.csv")])
    with pytest.raises(ValueError, match="images and masks"):
        main([*command, str(folder / "images")])


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    """A saved run that predicts masks of two classes."""
    pytest.importorskip("segmentation_models_pytorch")
    folder = tmp_path_factory.mktemp("binary")
    images = ImageMasks(str(write_pairs(folder / "data", 8, 0, values=(0, 1, 1))), size=32)
    data = FederatedDataModule(dataset=images, partition=IID(2), batch_size=4)
    return perada.finetune("smp:unet-resnet18", data, adapter="lora", **OPTIONS).save(folder / "run")


@pytest.mark.filterwarnings("ignore:client 'late'. its personal model is worse:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("source", ["", "table.csv"])
def test_black_and_white_masks_are_those_of_a_run_with_two_classes(binary, tmp_path, source):
    states = []
    for foreground in (1, 255):
        folder = write_pairs(tmp_path / f"late_{foreground}", 6, 1, values=(0, foreground, foreground))
        output = tmp_path / f"new_{foreground}"
        words = ["--client=late", "--rounds=1", "--accelerator=cpu", "--output", str(output)]
        main(["clients", "add", str(binary), "--data", str(folder / source), *words])
        states.append(perada.Run.load(output).state("personal", "late"))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


def test_black_and_white_masks_are_rejected_for_a_run_with_three_classes(segmented, tmp_path):
    folder = write_pairs(tmp_path / "late", 6, 1, values=(0, 255, 255))
    with pytest.raises(ValueError, match=r"class 0, .*mask_values"):
        main(
            [
                "clients",
                "add",
                str(segmented),
                "--client=late",
                "--data",
                str(folder),
                "--output",
                str(tmp_path / "new"),
            ]
        )
