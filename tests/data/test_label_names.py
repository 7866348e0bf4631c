# SPDX-License-Identifier: Apache-2.0
"""Names of classes that are missing labels, numbers written in two ways, or measurements are found in every source."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from perada.data import ByDomain, FederatedData, FederatedDataModule, HuggingFace, ImageFolder, Images, ImageTable
from perada.data.sets.label_names import check_label_names, number_of


def from_table(root, labels, **options):
    """A table with a row for each label, at two clients."""
    rows = [["path", "label", "client"]]
    for number, label in enumerate(labels):
        Image.new("L", (4, 4), number).save(root / f"{number}.png")
        rows.append([f"{number}.png", label, "north" if number < len(labels) / 2 else "south"])
    with (root / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return ImageTable(str(root / "t.csv"), size=4, **options)


def from_parquet(root, labels, **options):
    """The same table as Parquet."""
    tables = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from_table(root, labels)
    content = {"path": [f"{number}.png" for number in range(len(labels))], "label": list(labels)}
    parquet.write_table(tables.table(content), root / "t.parquet")
    return ImageTable(str(root / "t.parquet"), size=4, **options)


def from_hugging_face(root, labels, **options):
    """The same labels as a set of Hugging Face."""
    datasets = pytest.importorskip("datasets")
    images = [Image.new("L", (4, 4), number) for number in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict({"image": images, "label": list(labels)}, features=features).save_to_disk(root / "set")
    return HuggingFace(str(root / "set"), size=4, **options)


def from_folders(root, labels, kind=Images, **options):
    """A folder for each label."""
    client = "north/" if kind is Images else ""
    for number, label in enumerate(labels):
        path = root / "mine" / f"{client}{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(path)
    return kind(str(root / "mine"), size=4, **options)


def from_class_folders(root, labels, **options):
    """A folder for each label, without clients."""
    return from_folders(root, labels, ImageFolder, **options)


SOURCES = (from_table, from_parquet, from_hugging_face, from_folders, from_class_folders)
WORDS = ("cat", "dog") * 4


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["NA", "None", "?"])
def test_missing_labels_are_no_class_unless_declared(tmp_path, source, name):
    labels = (*WORDS, name, name)
    with pytest.raises(ValueError, match=r"missing label.*classes: \["):
        _ = source(tmp_path, labels).labels
    declared = source(tmp_path, labels, classes=[name, "cat", "dog"])
    counts = sum(torch.bincount(declared.with_split(train).labels, minlength=3) for train in (True, False))
    assert counts.tolist() == [2, 4, 4]


@pytest.mark.parametrize(
    "name",
    [
        "N/A",
        "n/a",
        "na",
        "null",
        "NULL",
        "Null",
        "NaN",
        "nan",
        "-nan",
        "-",
        "--",
        "?",
        ".",
        "#N/A",
        "<NA>",
        "n.a.",
        " NA ",
        "#NV",
        "#DIV/0!",
        "<null>",
        r"\N",
    ],
)
def test_every_spelling_of_a_missing_label_is_found(name):
    with pytest.raises(ValueError, match="missing label"):
        check_label_names("t.csv", [*WORDS, name])


@pytest.mark.parametrize("name", ["none", "NONE", "nil", "Missing", "undefined"])
def test_words_that_may_be_classes_are_warned_of(name):
    with pytest.warns(UserWarning, match=f"class '{name}'"):
        check_label_names("t.csv", [*WORDS, name])


@pytest.mark.parametrize(
    ("north", "south"), [(("0", "1"), ("no", "yes")), (("benign", "malignant"), ("gutartig", "bösartig"))]
)
def test_a_client_whose_classes_have_other_names_is_warned_of(recwarn, north, south):
    clients = ["north"] * 4 + ["south"] * 4
    with pytest.warns(UserWarning, match=rf"client 'north'.*{north[0]}.*{south[0]}"):
        check_label_names("t.csv", [*north, *north, *south, *south], clients)
    recwarn.clear()
    check_label_names("t.csv", [*north, *north, *north[:1] * 2, *south], clients[:6] + ["north"] * 2)
    check_label_names("t.csv", [*north, *north, north[0], *south, south[0]], clients)
    check_label_names("t.csv", ["x"] * 4 + ["y"] * 4, clients)
    assert not recwarn


def test_minus_one_beside_numbers_from_zero_is_warned_of():
    with pytest.warns(UserWarning, match="class '-1'"):
        check_label_names("t.csv", ["0", "1", "-1"] * 3)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variants", [("1", "1.0", "01"), ("2", "2,0"), ("5", "+5")])
def test_one_number_written_in_two_ways_is_one_class(tmp_path, source, variants):
    labels = ("7", "7") + variants * 2
    assert len({float(name.replace(",", ".")) for name in variants}) == 1
    with pytest.raises(ValueError, match="same number"):
        _ = source(tmp_path, labels).labels
    classes = ["7", *variants]
    assert source(tmp_path, labels, classes=classes).classes == tuple(classes)


def test_clients_that_write_a_number_in_another_way_are_named(tmp_path):
    table = from_table(tmp_path, ["0", "1"] * 4 + ["0.0", "1.0"] * 4)
    with pytest.raises(ValueError, match=r"'0' at north, '0.0' at south"):
        FederatedDataModule(dataset=table, partition=ByDomain("client")).setup()


def test_a_site_is_told_of_the_number_that_the_recipe_has(tmp_path):
    with pytest.raises(ValueError, match=r"'1\.0'.*class '1'"):
        _ = from_table(tmp_path, ["0", "1.0"] * 4, classes=["0", "1"]).labels


@pytest.mark.parametrize("source", SOURCES)
def test_ages_with_decimal_commas_are_no_classes(tmp_path, source):
    ages = [f"{age},{age % 10}" for age in range(40, 49)]
    with pytest.raises(ValueError, match=r"different numbers.*'4\d,\d'.*Regression"):
        _ = source(tmp_path, ages).labels


def test_repeated_numbers_with_fractions_are_warned_of():
    with pytest.warns(UserWarning, match=r"2 different numbers.*8 images.*'1,5'"):
        check_label_names("t.csv", ["1,5", "2"] * 4)


@pytest.mark.parametrize(
    "names",
    [
        [str(number) for number in range(1, 11)],
        ["1a", "01a"],
        ["Na", "Cl"],
        ["1.2.3", "1.2.30"],
        ["no", "yes"],
        ["nano", "nadir"],
    ],
)
def test_other_names_are_classes(names):
    check_label_names("t.csv", names * 2)


@pytest.mark.parametrize("text", ["1", "01", "+1", "1.", "1,0", "1e0", "10E-1", "0.1e1"])
def test_numbers_are_those_of_python(text):
    assert number_of(text) == 1 == float(text.replace(",", "."))


@pytest.mark.parametrize("text", ["", "1.0.0", "one", "1,000,000", "0x1", "1 0", "nan", "inf"])
def test_other_words_are_no_numbers(text):
    assert number_of(text) is None


class Words:
    """Images with words as labels."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return torch.full((3, 4, 4), index, dtype=torch.uint8), self.words[index]


@pytest.mark.parametrize(("first", "second"), [("1", "1.0"), ("cat", "NA")])
def test_words_of_datasets_are_checked_too(first, second):
    parts = [Words([first, "dog"]), Words([second, "dog"])]
    with pytest.raises(ValueError, match=r"'1.0' at client 1|'NA'"):
        FederatedDataModule(FederatedData(parts)).setup()
    data = FederatedDataModule(FederatedData(parts, classes=[first, second, "dog"]))
    data.setup()
    assert data.num_classes == 3


def test_columns_of_zeros_and_ones_have_declared_names(tmp_path):
    for number in range(6):
        Image.new("L", (4, 4), number).save(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{number % 2},{(number // 2) % 2}" for number in range(6)]
    (tmp_path / "t.csv").write_text("path,NA,none\n" + "\n".join(rows))
    table = ImageTable(str(tmp_path / "t.csv"), label=["NA", "none"], size=4)
    assert table.classes == ("NA", "none")


def test_words_in_lists_are_checked(tmp_path):
    with pytest.raises(ValueError, match="'None', which marks a missing label"):
        _ = from_table(tmp_path, ["a|b", "a", "None", "b"], separator="|").labels


def test_integers_are_no_words():
    labels = torch.tensor([0, 1, 1, 0])
    part = TensorDataset(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), labels)
    data = FederatedDataModule(FederatedData([part]))
    data.setup()
    assert data.num_classes == len(np.unique(labels))
