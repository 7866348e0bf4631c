# SPDX-License-Identifier: Apache-2.0
"""Tables with unknown labels, as those of CheXpert: blank cells and -1, against plain counts of the written rows."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from perada.cli import main
from perada.cli.init import compose_recipe
from perada.core.checks import OptionError
from perada.data import ByDomain, CheXpert, FederatedDataModule, ImageTable

from .miniatures import FINDINGS, write_chexpert, write_jpeg, write_table

CELLS = ("1.0", "0.0", "-1.0", "")
COLUMNS = ["edema", "fracture"]
NUMBERS = {"1.0": 1.0, "0.0": 0.0, "-1.0": -1.0, "": -1.0}
"""Label of each cell if all unknown ones are ignored."""


def write_rows(folder):
    """Write a table of two clients in which every pair of cells occurs in both splits, and return its rows."""
    rows = []
    for number in range(64):
        write_jpeg(folder / f"{number}.jpg", 3 * number)
        cells = {"edema": CELLS[number % 4], "fracture": CELLS[number // 4 % 4]}
        split = "test" if number >= 48 else "train"
        rows.append({"path": f"{number}.jpg", "client": f"site{number % 2}", "split": split, **cells})
    write_table(folder / "t.csv", rows)
    return rows


def expected_labels(rows, split, numbers_of_columns):
    return [[numbers_of_columns[name][row[name]] for name in COLUMNS] for row in rows if row["split"] == split]


@pytest.mark.parametrize("blank", ["unknown", "absent"])
@pytest.mark.parametrize(
    ("unknown", "values"),
    [
        ("ignore", (-1, -1)),
        ("zeros", (0, 0)),
        ("ones", (1, 1)),
        ({"edema": "ones", "fracture": "ignore"}, (1, -1)),
    ],
)
def test_each_policy_replaces_unknown_labels_of_training_images_only(tmp_path, unknown, values, blank):
    rows = write_rows(tmp_path)
    images = ImageTable(str(tmp_path / "t.csv"), label=COLUMNS, size=4, unknown=unknown, blank=blank)
    scored = NUMBERS | ({"": 0.0} if blank == "absent" else {})
    trained = {}
    for name, value in zip(COLUMNS, values, strict=True):
        trained[name] = {cell: value if number == -1 else number for cell, number in scored.items()}
    assert images.classes == tuple(COLUMNS)
    assert images.labels.dtype == torch.float32
    assert images.labels.tolist() == expected_labels(rows, "train", trained)
    assert images.with_split(False).labels.tolist() == expected_labels(rows, "test", dict.fromkeys(COLUMNS, scored))


@pytest.mark.parametrize("cell", ["", " ", "-1", "-1.0", "nan", "NaN"])
def test_unknown_labels_are_rejected_with_the_remedy(tmp_path, cell):
    rows = write_rows(tmp_path)
    for row in rows:
        row |= {"edema": "0", "fracture": "1"}
    rows[1]["fracture"] = rows[5]["fracture"] = cell
    write_table(tmp_path / "t.csv", rows)
    remedy = "fill them in, or set unknown to ignore, zeros or ones"
    if not cell.strip():
        remedy += ", or blank to absent if a blank cell means that the label is absent"
    with pytest.raises(ValueError, match=rf"rows 3, 7: .*fracture.*{remedy}$"):
        ImageTable(str(tmp_path / "t.csv"), label=COLUMNS).read_manifest()
    with pytest.raises(ValueError, match="fracture are unknown"):
        ImageTable(str(tmp_path / "t.csv"), label=COLUMNS, unknown={"edema": "ignore"}).read_manifest()
    manifest = ImageTable(str(tmp_path / "t.csv"), label=COLUMNS, unknown={"fracture": "ignore"}).read_manifest()
    assert manifest.labels[[0, 1, 5]].tolist() == [[0, 1], [0, -1], [0, -1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unknown": "zero"}, r"unknown .*got 'zero'"),
        ({"unknown": {"edema": 0}}, r"unknown .*got 0"),
        ({"unknown": {"Edema": "ones"}}, "'Edema', which is not in label"),
        ({"blank": "zeros"}, r"blank .*got 'zeros'"),
        ({"label": "edema", "unknown": "ones"}, r"unknown='ones' .*label"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(OptionError, match=message):
        ImageTable("t.csv", **({"label": COLUMNS} | options))


def test_unknown_labels_do_not_count_as_present_where_images_are_held_out(tmp_path):
    """Of a label that only the first image has, and that is unknown elsewhere, the training split keeps that image."""
    for number in range(20):
        write_jpeg(tmp_path / f"{number}.jpg", 10 * number)
    rows = [{"path": f"{n}.jpg", "a": n % 2, "b": 1 if n == 0 else -1} for n in range(20)]
    write_table(tmp_path / "t.csv", rows)
    for seed in range(20):
        images = ImageTable(str(tmp_path / "t.csv"), label=["a", "b"], unknown="ignore", test_share=0.5, seed=seed)
        assert f"{tmp_path}/0.jpg" in images.manifest.paths


@pytest.mark.parametrize("unknown", ["ignore", "zeros", "ones"])
def test_chexpert_has_each_policy_for_the_same_categories(tmp_path, unknown):
    train_rows, _ = write_chexpert(tmp_path / "CheXpert-v1.0-small")
    images = CheXpert(str(tmp_path), unknown=unknown, merge_below=6)
    value = {"ignore": -1, "zeros": 0, "ones": 1}[unknown]
    numbers = {"": 0, "0.0": 0, "1.0": 1, "-1.0": value}
    assert images.labels.tolist() == [[numbers[row[name]] for name in FINDINGS] for row in train_rows]
    default = CheXpert(str(tmp_path), merge_below=6)
    assert images.columns["category"].tolist() == default.columns["category"].tolist()


def count_unknown(rows, client, name):
    """Return the cell of the table that `perada data inspect` prints."""
    counts = Counter(row["split"] for row in rows if client in (row["client"], "all") and row[name] in ("", "-1.0"))
    return f"{counts['train']} / {counts['test']}"


def test_the_inspection_counts_unknown_labels(tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["data", "inspect", "t.csv", "--label=[edema, fracture]", "--unknown=ignore"]
    main(words)
    printed = capsys.readouterr().out
    known_table, unknown_table = printed.split("Each cell: training images / test images.\n")
    assert unknown_table.index("whose label is unknown") > 0
    for client in ("site0", "site1", "all"):
        (line,) = [line for line in unknown_table.splitlines() if line.startswith(f"| {client}")]
        cells = [cell.strip() for cell in line.split("|")[2:4]]
        assert cells == [count_unknown(rows, client, name) for name in COLUMNS]
    present = [sum(row[name] == "1.0" for row in rows if row["split"] == "train") for name in COLUMNS]
    (line,) = [line for line in known_table.splitlines() if line.startswith("| all")]
    assert [int(cell.split("/")[0]) for cell in line.split("|")[2:4]] == present

    main([*words, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["usable"] and record["clients"] == ["site0", "site1"]
    for part in ("train", "test"):
        assert record[f"unknown_{part}"] == [
            [
                sum(row["client"] == client and row["split"] == part and NUMBERS[row[name]] == -1 for row in rows)
                for name in COLUMNS
            ]
            for client in record["clients"]
        ]


def test_a_label_that_is_mostly_unknown_is_warned_of(tmp_path):
    rows = write_rows(tmp_path)
    for row in rows[:20]:
        row["fracture"] = ""
    write_table(tmp_path / "t.csv", rows)
    num_unknown = sum(row["fracture"] in ("", "-1.0") for row in rows if row["split"] == "train")
    assert num_unknown > 24 >= sum(row["edema"] in ("", "-1.0") for row in rows if row["split"] == "train")
    images = ImageTable(str(tmp_path / "t.csv"), label=COLUMNS, size=4, unknown="ignore")
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4)
    with pytest.warns(
        UserWarning,
        match=rf"48 training images: fracture \({num_unknown}\).*blank=absent",
    ):
        data.setup()


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        (CELLS, {"blank": "absent", "unknown": "ignore"}),
        (("1", "0", "", ""), {"unknown": "ignore"}),
        (("1", "0", "-1", "1"), {"unknown": "ignore"}),
        (("1", "0", "0", "1"), {}),
    ],
)
def test_first_recipes_name_the_policy(tmp_path, monkeypatch, cells, options):
    rows = write_rows(tmp_path)
    for row in rows:
        for name in COLUMNS:
            row[name] = cells[CELLS.index(row[name])]
        row["notes"] = ""
    write_table(tmp_path / "t.csv", rows)
    monkeypatch.chdir(tmp_path)
    text = compose_recipe("t.csv", "fedavg", "3", "")
    dataset = yaml.safe_load(text)["data"]["dataset"]
    assert dataset["init_args"] == {"table": "t.csv", "label": COLUMNS} | options
    assert ("# unknown: ignore leaves" in text) == ("unknown" in options)
    assert ("# blank: absent counts" in text) == ("blank" in options)
    Path("mine.yaml").write_text(text)
    assert len(ImageTable(**dataset["init_args"])) == 48
