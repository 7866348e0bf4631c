# SPDX-License-Identifier: Apache-2.0
"""Image sets of Hugging Face ``datasets``: what is read from folders as that library writes them."""

import gc
import re

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from perada.cli import main
from perada.data import HuggingFace
from tests.recipes import recipe

NAMES = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PIXELS = (load_digits().images * 15).astype(np.uint8)
CLASSES = load_digits().target


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def part(rows, **columns):
    features = {"picture": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    content = {"picture": [Image.fromarray(PIXELS[row]) for row in rows], "label": CLASSES[list(rows)].tolist()}
    features |= {name: datasets.Value("string") for name in columns}
    return datasets.Dataset.from_dict(content | columns, features=datasets.Features(features))


@pytest.fixture
def saved_dataset(tmp_path):
    """90 training images of three hospitals and 30 test images."""
    client = ["north", "south", "west"]
    parts = {
        "train": part(range(90), client=client * 30, ward=["a", "b"] * 45),
        "test": part(range(90, 120), client=client * 10, ward=["c"] * 30),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "digits")
    return str(tmp_path / "digits")


def test_images_labels_and_columns_are_those_of_the_set(saved_dataset):
    train = HuggingFace(saved_dataset, size=8, gray=True)
    test = train.with_split(False)
    assert len(train) == 90
    assert len(test) == 30
    for images, first in ((train, 0), (test, 90)):
        for row in (0, 7, 29):
            pixels, label = images[row]
            assert torch.equal(pixels[0], torch.from_numpy(PIXELS[first + row]))
            assert int(label) == CLASSES[first + row]
    assert train.classes == tuple(NAMES)
    assert train.columns["client"].tolist() == ["north", "south", "west"] * 30
    assert "client" in train.columns
    assert train.group_column is None
    in_memory = HuggingFace(saved_dataset, size=8, gray=True, in_memory=True)
    assert torch.equal(in_memory.images[:, 0], torch.from_numpy(PIXELS[:90]))


def test_a_single_split_is_divided_and_groups_stay_whole(tmp_path):
    wards = [f"ward {row // 5}" for row in range(200)]
    part(range(200), ward=wards).save_to_disk(tmp_path / "one")
    train = HuggingFace(str(tmp_path / "one"), group="ward", test_share=0.25, seed=3)
    test = train.with_split(False)
    assert len(train) + len(test) == 200
    assert 25 <= len(test) <= 75
    assert not set(train.columns["group"]) & set(test.columns["group"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves the file open
def test_a_folder_of_images_with_metadata_is_read(tmp_path):
    folder = tmp_path / "scans"
    folder.mkdir()
    lines = ["file_name,finding"]
    for row in range(12):
        Image.fromarray(PIXELS[row]).save(folder / f"{row:02}.png")
        lines.append(f"{row:02}.png,{'even' if CLASSES[row] % 2 == 0 else 'odd'}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    images = HuggingFace(str(folder), label="finding", size=8, gray=True)
    len(images)
    gc.collect()  # a file that the library left open is closed here
    rows = [images[place] for place in range(len(images))]
    assert images.classes == ("even", "odd")
    for pixels, label in rows:
        same = [row for row in range(12) if np.array_equal(PIXELS[row], pixels[0].numpy())]
        assert int(label) == CLASSES[same[0]] % 2


def test_several_labels_an_image(tmp_path):
    kinds = {"image": datasets.Image(), "labels": datasets.Sequence(datasets.ClassLabel(names=["a", "b", "c", "d"]))}
    labels = [[0, 3], [], [1], [1, 3]] * 5
    content = {"image": [Image.fromarray(PIXELS[row]) for row in range(20)], "labels": labels}
    datasets.Dataset.from_dict(content, features=datasets.Features(kinds)).save_to_disk(tmp_path / "many")
    images = HuggingFace(str(tmp_path / "many"), size=8)
    assert images.classes == ("a", "b", "d")
    both = [images, images.with_split(False)]
    result = sorted(tuple(own[row][1].tolist()) for own in both for row in range(len(own)))
    assert result == sorted([(1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 1.0)] * 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "lable"}, "label: {} has no column 'lable'; did you mean 'label'?"),
        ({"image": "ward"}, "image: column 'ward' of {} contains"),
        ({"label": "picture"}, "label: column 'picture' of {} contains"),
        ({"client": "hospital"}, "client: {} has no column 'hospital'"),
        ({"splits": ["dev"]}, "splits: {} has no split 'dev'; it has train, test"),
        ({"splits": ["test", "train"], "name": "/nowhere/at-all"}, "the dataset '/nowhere/at-all' cannot be loaded"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_option(saved_dataset, options, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        len(HuggingFace(**{"name": saved_dataset} | options))
    assert message.format(saved_dataset) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_image_that_is_cut_short_is_named_by_its_row(tmp_path):
    file = tmp_path / "whole.png"
    Image.fromarray(PIXELS[0]).save(file)
    good = {"path": "a.png", "bytes": file.read_bytes()}
    content = {"image": [good, {"path": "b.png", "bytes": good["bytes"][:60]}] * 5, "label": [0, 1] * 5}
    kinds = {"image": datasets.Image(decode=False), "label": datasets.Value("int64")}
    dataset = datasets.Dataset.from_dict(content, features=datasets.Features(kinds)).cast_column(
        "image", datasets.Image()
    )
    dataset.save_to_disk(tmp_path / "cut")
    images = HuggingFace(str(tmp_path / "cut"))
    places = [(row, re.search(r"\[(\d+)\]", images.manifest.paths[row])) for row in range(len(images))]
    row, place = next((row, place) for row, place in places if int(place[1]) % 2)
    with pytest.raises(ValueError, match="take the row out") as error:
        images[row]
    assert str(error.value).startswith(f"{tmp_path / 'cut'}, train{place[0]}, ")


def test_inspected_trained_and_predicted_by_name(saved_dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["data", "inspect", f"hf:{saved_dataset}", "--client", "client"])
    output = capsys.readouterr().out
    assert "north" in output
    assert "nought" in output
    data = {
        "dataset": {"class_path": "HuggingFace", "init_args": {"name": saved_dataset, "size": 16}},
        "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
        "train_limit": None,
        "test_limit": None,
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe(data=data, federated={"algorithm": "FedAvg"})))
    main(["fit", "--config", "own.yaml"])
    main(["export", "lightning_logs/version_0", "--output", "out"])
    import perada

    run = perada.Run.load("out")
    assert run.info["clients"] == ["north", "south", "west"]
    assert run.info["classes"] == NAMES


def test_splits_whose_columns_are_of_different_kinds_are_rejected_in_one_line(tmp_path):
    parts = {"train": part(range(6), ward=["a"] * 6), "test": part(range(6, 9), ward=["b"] * 3)}
    parts["test"] = parts["test"].cast_column("label", datasets.ClassLabel(names=[*"0123456789x"]))
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "mixed")
    with pytest.raises(ValueError, match=r"^splits: train, test .*mixed"):
        len(HuggingFace(str(tmp_path / "mixed")))
    assert len(HuggingFace(str(tmp_path / "mixed"), splits=["test"], test_share=0.5)) > 0
