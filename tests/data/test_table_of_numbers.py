# SPDX-License-Identifier: Apache-2.0
"""Tables and sets of Hugging Face with columns of numbers, from the file to a trained and saved run."""

import csv
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.cli import main
from perada.core.checks import OptionError
from perada.data import IID, Dirichlet, FederatedDataModule, HuggingFace, ImageTable
from perada.data.inspection import inspect_division
from perada.data.partitions.division import Division
from perada.tasks import Regression

AGES = [20.5, 31, 48, 55, 62, 70, 24, 37, 41, 59, 66, 78]
DOSES = [0.1, 0.2, 0.4, 0.3, 0.9, 0.7, 0.2, 0.1, 0.5, 0.6, 0.8, 1.1]
SPLITS = ["train"] * 8 + ["test"] * 4


def write(folder, ages=AGES):
    """Gray images whose brightness follows the age, and their table."""
    rows = []
    for number, (age, dose, split) in enumerate(zip(ages, DOSES, SPLITS, strict=True)):
        pixels = np.full((16, 16), 2 * AGES[number], dtype=np.uint8)
        pixels[:, number] = 0
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append([f"{number}.png", age, dose, split])
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "age", "dose", "split"], *rows])
    return str(folder / "table.csv")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def save(folder, ages=AGES, dtype="float32"):
    """The images and columns of :func:`write` as a dataset of Hugging Face, in a folder."""
    write(folder)
    parts = {}
    for split in ("train", "test"):
        rows = [row for row, name in enumerate(SPLITS) if name == split]
        columns = {
            "image": [str(folder / f"{row}.png") for row in rows],
            "age": [ages[row] for row in rows],
            "dose": [DOSES[row] for row in rows],
        }
        features = {
            "image": datasets.Image(),
            "age": datasets.Value(dtype),
            "dose": datasets.Value("float64"),
        }
        parts[split] = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    datasets.DatasetDict(parts).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "string"])
def test_numbers_of_hugging_face_are_the_labels(tmp_path, in_memory, dtype):
    ages = [str(age) for age in AGES] if dtype == "string" else AGES
    images = HuggingFace(save(tmp_path, ages, dtype), numbers=["age", "dose"], size=16, in_memory=in_memory)
    train = images.with_split(True)
    np.testing.assert_allclose(train.labels, np.stack([AGES[:8], DOSES[:8]], 1), rtol=1e-6)
    np.testing.assert_allclose(images.with_split(False).labels[:, 0], AGES[8:])
    assert train.labels.dtype == torch.float32
    assert list(train.classes) == ["age", "dose"]
    assert images.task == Regression()
    pixels, target = train[3]
    torch.testing.assert_close(target, torch.tensor([55.0, 0.3]))
    assert pixels.max() == 2 * AGES[3]


def test_a_table_and_hugging_face_give_the_same_run(tmp_path):
    """Both hold the same images and numbers, so that a run predicts the same."""
    predictions = []
    for images in (
        ImageTable(write(tmp_path), numbers="age", size=16),
        HuggingFace(save(tmp_path), numbers="age", size=16),
    ):
        data = FederatedDataModule(dataset=images, partition=IID(2), batch_size=4, task=Regression(standardize="all"))
        run = perada.finetune(
            "test_resnet", data, pretrained=False, algorithm="fedavg", adapter="full", rounds=1, local_steps=1, seed=0
        )
        assert run.info["classes"] == ["age"]
        predictions.append(run.predict([tmp_path / "9.png"], client=0).labels)
    torch.testing.assert_close(*predictions, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cell", "dtype", "message"),
    [
        (None, "float32", r"saved, row train\[2\]: age is empty; fill it in, or take the row out"),
        (float("nan"), "float32", r"row train\[2\]: age is 'nan', which is not a number; correct it, with a point for"),
        (float("inf"), "float64", r"row train\[2\]: age is 'inf', which is not a number"),
        ("3,5", "string", r"row train\[2\]: age is '3,5', which is not a number"),
    ],
)
def test_rows_of_hugging_face_without_a_number_are_named(tmp_path, cell, dtype, message):
    ages = [str(age) for age in AGES] if dtype == "string" else [*AGES]
    ages[2] = cell
    with pytest.raises(ValueError, match=message):
        _ = HuggingFace(save(tmp_path, ages, dtype), numbers="age", size=16).labels


def test_what_does_not_go_with_numbers_of_hugging_face_is_rejected(tmp_path):
    with pytest.raises(OptionError, match=r"numbers='age'.*mask='image'"):
        HuggingFace("x", numbers="age", mask="image")
    with pytest.raises(OptionError, match=r"label='dose'.*numbers='age'"):
        HuggingFace("x", numbers="age", label="dose")
    saved = save(tmp_path)
    with pytest.raises(ValueError, match=r"numbers: .*'aeg'.*'age'"):
        _ = HuggingFace(saved, numbers="aeg", size=16).labels
    with pytest.raises(OptionError, match=r"'old', 'young'.*numbers"):
        _ = HuggingFace(saved, numbers="age", classes=["old", "young"]).labels
    with pytest.raises(ValueError, match=r"'age'.*float32.*Reg"):
        _ = HuggingFace(saved, label="age", size=16).labels


def test_numbers_of_hugging_face_are_inspected(tmp_path, capsys):
    main(["data", "inspect", f"hf:{save(tmp_path)}", "--numbers=[age, dose]", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["classes"] == ["age", "dose"]
    assert record["train"] == [[8, 8]]
    assert record["test"] == [[4, 4]]


@pytest.mark.parametrize("in_memory", [False, True])
def test_columns_of_numbers_are_the_labels(tmp_path, in_memory):
    table = ImageTable(write(tmp_path), numbers=["age", "dose"], size=16, in_memory=in_memory)
    train = table.with_split(True)
    np.testing.assert_allclose(train.labels, np.stack([AGES[:8], DOSES[:8]], 1), rtol=1e-6)
    np.testing.assert_allclose(table.with_split(False).labels[:, 0], AGES[8:])
    assert list(train.classes) == ["age", "dose"]
    assert table.task == Regression()
    _, target = train[3]
    torch.testing.assert_close(target, torch.tensor([55.0, 0.3]))


def test_a_run_predicts_numbers_in_the_units_of_the_table(tmp_path):
    data = FederatedDataModule(
        dataset=ImageTable(write(tmp_path), numbers="age", size=16),
        partition=IID(2),
        batch_size=4,
        task=Regression(standardize="all"),
    )
    run = perada.finetune(
        "test_resnet", data, pretrained=False, algorithm="fedavg", adapter="full", rounds=1, local_steps=1, seed=0
    )
    mean = np.mean(AGES[:8])
    std = np.std(AGES[:8])
    assert run.info["task"]["init_args"]["mean"] == pytest.approx([mean])
    assert run.info["task"]["init_args"]["std"] == pytest.approx([std])
    loaded = perada.Run.load(run.save(tmp_path / "run"))
    predictions = loaded.predict([tmp_path / "9.png"], client=0)
    assert predictions.classes == ("age",)
    # A single step leaves predictions near the mean.
    assert predictions.labels.item() == pytest.approx(mean, abs=3 * std)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("", "row 4: age is empty; fill it in, or take the row out"),
        (
            "old",
            r"row 4: age .*'old'",
        ),
        ("3,5", r"row 4: age .*'3,5'"),
        ("nan", r"row 4: age .*'nan'"),
    ],
)
def test_rows_without_a_number_are_named(tmp_path, cell, message):
    table = ImageTable(write(tmp_path, [*AGES[:2], cell, *AGES[3:]]), numbers="age", size=16)
    with pytest.raises(ValueError, match=message):
        _ = table.labels


def test_what_does_not_go_with_numbers_is_rejected(tmp_path):
    table = write(tmp_path)
    with pytest.raises(OptionError, match=r"numbers='age'.*mask='dose'"):
        ImageTable(table, numbers="age", mask="dose")
    with pytest.raises(OptionError, match=r"label=\['age', 'dose'\].*numbers='age'"):
        ImageTable(table, numbers="age", label=["age", "dose"])
    with pytest.raises(OptionError, match=r"separator=';'.*mask='dose'"):
        ImageTable(table, mask="dose", separator=";")
    with pytest.raises(OptionError, match=r"'old', 'young'.*numbers"):
        _ = ImageTable(table, numbers="age", classes=["old", "young"]).labels
    for numbers in ("age", ["age", "dose"]):
        data = FederatedDataModule(
            dataset=ImageTable(table, numbers=numbers, size=16), partition=Dirichlet(2, alpha=0.5)
        )
        with pytest.raises(ValueError, match=r"Dirichlet.*numbers"):
            data.setup("fit")


def test_a_column_of_measurements_as_classes_proposes_the_task(tmp_path):
    ages = [age + 0.25 for age in AGES]
    with pytest.raises(ValueError, match=r"numbers: age.*Regression\)"):
        _ = ImageTable(write(tmp_path, ages), label="age", size=16).labels


def test_an_inspection_counts_images_and_not_numbers(tmp_path):
    """Doses are mostly below 1, and no image lacks one."""
    table = ImageTable(write(tmp_path), numbers=["age", "dose"], size=16)
    inspection = inspect_division(Division(table, IID(2)))
    assert inspection.classes == ["age", "dose"]
    assert inspection.train.tolist() == [[4, 4], [4, 4]]
    assert inspection.test.sum(0).tolist() == [4, 4]
    assert not inspection.unknown_train.any()
