# SPDX-License-Identifier: Apache-2.0
"""`perada data inspect` finds what was put into a folder, a table or a recipe."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perada.cli import main
from perada.cli.data import format_inspection
from perada.data import Digits, Dirichlet, Images, ImageTable
from perada.data.inspection import Inspection, inspect_division
from perada.data.partitions import ByDomain
from perada.data.partitions.division import Division

from .miniatures import HOSPITALS, write_hospitals, write_jpeg, write_table


def rows_of(printed):
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in printed.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in cells}


def test_a_folder_is_shown_with_its_counts(tmp_path, capsys):
    write_hospitals(tmp_path / "mine", each=10)
    main(["data", "inspect", str(tmp_path / "mine"), "--test_share=0.2", "--output", str(tmp_path / "new" / "x.png")])
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert rows["client"] == ["benign", "malignant", "normal", "images"]
    for hospital in HOSPITALS:
        *parts, whole = [tuple(map(int, cell.split(" / "))) for cell in rows[hospital]]
        assert [sum(part) for part in parts] == [10] * 3 and min(map(min, parts)) > 0
        assert whole == tuple(map(sum, zip(*parts, strict=True)))
    assert [sum(map(int, cell.split(" / "))) for cell in rows["all"]] == [40] * 3 + [120]
    assert "Size in pixels: width 6, height 4" in printed
    assert "Colour modes (Pillow): 120 RGB" in printed
    assert printed.splitlines()[-2] == "The images can be used."
    with Image.open(tmp_path / "new" / "x.png") as figure:
        assert figure.size[0] > 100


def inspected(capsys, *words):
    """What ``perada data inspect --json`` prints."""
    main(["data", "inspect", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_warning_about_a_folder_with_masks_is_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for folder in ("north/images", "north/masks", "south/images", "south/masks", "east/images"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 255, (12, 10, 3), np.uint8)
            if folder.endswith("masks"):
                pixels = 255 * random.integers(0, 2, (12, 10), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "mine" / folder / f"{number}.png")
    # A warning beside the page would be an error in tests.
    main(["data", "inspect", "mine"])
    assert capsys.readouterr().out.count("in folders without masks beside them") == 1


@pytest.mark.parametrize(
    ("folders", "foreground"), [(("images", "masks"), 1), (("images", "masks"), 255), (("scans", "outlines"), 1)]
)
def test_a_folder_with_masks_is_read_as_init_and_recipes_read_it(tmp_path, monkeypatch, capsys, folders, foreground):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    with_foreground = {"north": 0, "south": 0}
    for hospital in with_foreground:
        for number in range(8):
            mask = np.zeros((12, 10), np.uint8)
            if random.random() < 0.5:
                mask[2:9, 3:7] = foreground
                with_foreground[hospital] += 1
            for kind, pixels in zip(folders, (random.integers(0, 255, (12, 10, 3), np.uint8), mask), strict=True):
                path = tmp_path / "mine" / hospital / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    assert 0 < sum(with_foreground.values()) < 16
    words = []
    if folders[0] != "images":
        words = [f"--images={folders[0]}", f"--masks={folders[1]}"]
    record = inspected(capsys, "mine", *words)
    counts = np.array(record["train"]) + np.array(record["test"])
    assert record["clients"] == list(with_foreground)
    assert counts.tolist() == [[8, with_foreground[name]] for name in record["clients"]]
    assert record["usable"] and record["several_labels"]
    main(["data", "inspect", "mine", *words])
    assert ("mask_values=[0, 255] is assumed" in capsys.readouterr().err) == (foreground == 255)
    if not words:
        main(["init", "--yes", "--images=mine", "--algorithm=fedavg"])
        capsys.readouterr()
        of_recipe = inspected(capsys, "--config=recipe.yaml")
        # The shares of the masks' values are those of resized masks.
        compared = record.keys() - {"notes", "mask_values"}
        assert {name: of_recipe[name] for name in compared} == {name: record[name] for name in compared}


def test_classes_called_images_and_masks_elsewhere_are_no_masks(tmp_path, capsys):
    for client, name in (("a", "images"), ("b", "masks")):
        path = tmp_path / client / name / "0.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (4, 4), len(name)).save(path)
    assert inspected(capsys, str(tmp_path))["classes"] == ["images", "masks"]


@pytest.fixture
def damaged_folder(tmp_path):
    """Two clients with every fault; the test split is the folder's own."""
    for number, path in enumerate(
        ("train/a/x/0.png", "train/a/x/1.png", "train/a/y/2.png", "train/b/x/3.png", "test/a/x/4.png", "test/a/y/5.png")
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4 + number, 9 - number), number).save(tmp_path / path)
    Image.fromarray(np.full((3, 20), 40_000, np.uint16)).save(tmp_path / "train/b/x/6.png")
    for source, copy in (("a/x/0", "a/x/7"), ("a/x/1", "b/x/8")):
        shutil.copy(tmp_path / f"train/{source}.png", tmp_path / f"train/{copy}.png")
    shutil.copy(tmp_path / "train/b/x/3.png", tmp_path / "test/a/x/9.png")
    (tmp_path / "train/a/y/10.png").write_bytes((tmp_path / "train/a/y/2.png").read_bytes()[:-30])
    (tmp_path / "stray.png").write_bytes(b"")
    return tmp_path


def test_every_fault_is_found(damaged_folder):
    images = Images(str(damaged_folder), layout="{split}/{client}/{class}/*", size=8)
    result = inspect_division(Division(images, ByDomain("client")))
    assert (result.clients, result.classes) == (["a", "b"], ["x", "y"])
    assert (result.train.tolist(), result.test.tolist()) == ([[3, 2], [3, 0]], [[2, 1], [0, 0]])
    assert result.images.tolist() == [[5, 3], [3, 0]]
    (broken,) = result.broken
    assert broken.startswith(f"{damaged_folder}/train/a/y/10.png is not a readable image")
    path = f"{damaged_folder}/{{}}.png".format
    assert result.leaks == [(path("test/a/x/9"), path("train/b/x/3"))]
    assert result.shared == [(path("train/b/x/8"), path("train/a/x/1"))]
    assert result.repeated == [(path("train/a/x/7"), path("train/a/x/0"))]
    assert result.single_client_classes == [("y", "a")]
    assert result.modes == {"L": 9, "I;16": 1}
    assert sorted(result.sizes[:, 0].tolist()) == [4, 4, 5, 5, 6, 7, 7, 8, 9, 20]
    assert "1 of 12 images" in result.notes[0]
    assert not result.usable
    text = format_inspection(result)
    assert "Only one client has it (1):\n- class y: a" in text
    assert "- fewer than 5 training images of the class: y\n- fewer than 10 training images: a, b\n" in text
    assert "- no test images: b" in text
    assert text.endswith("The images cannot be used until these problems are fixed.")


def test_the_exit_status_says_whether_it_can_be_used(damaged_folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", str(damaged_folder), "--layout", "{split}/{client}/{class}/*"])
    assert ended.value.code == 1
    assert "Cannot be read (1):" in capsys.readouterr().out


def test_a_table_and_a_recipe_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        write_jpeg(tmp_path / f"{number}.jpg", 30 * number)
    write_table(
        tmp_path / "t.csv",
        [{"path": f"{n}.jpg", "p": n % 2, "q": 1, "split": "test" if n > 3 else "train"} for n in range(6)],
    )
    main(["data", "inspect", "t.csv", '--label=["p", "q"]'])
    rows = rows_of(capsys.readouterr().out)
    assert rows["client"] == ["p", "q", "images"]
    assert rows["0"] == rows["all"] == ["2 / 1", "4 / 2", "4 / 2"]
    recipe = ["--data.dataset=ImageTable", "--data.dataset.table=t.csv", "--data.dataset.label=[p, q]"]
    with_partition = [*recipe, "--data.partition=IID", "--data.partition.num_clients=2", "--data.public_fraction=0"]
    main(["data", "inspect", "--config", "images", *with_partition, "--output=x.png"])
    rows = rows_of(capsys.readouterr().out)
    assert (rows["all"], rows["1"][-1]) == (["2 / 1", "4 / 2", "4 / 2"], "2 / 1")
    assert (tmp_path / "x.png").is_file()


def test_dark_images_of_12_bits_and_stacks_of_pictures_are_worth_knowing(tmp_path):
    for client in "ab":
        (tmp_path / client / "x").mkdir(parents=True)
        for number in range(4):
            pixels = np.full((6, 6), 4000 + 10 * number, np.uint16)
            Image.fromarray(pixels).save(tmp_path / client / "x" / f"{number}.png")
    pages = [Image.new("L", (6, 6), shade) for shade in (1, 2)]
    pages[0].save(tmp_path / "a" / "x" / "stack.tif", save_all=True, append_images=pages[1:])
    for white, dark in ((None, True), (4095, False)):
        division = Division(Images(str(tmp_path), size=8, full_scale=white), ByDomain("client"))
        text = format_inspection(inspect_division(division))
        assert (
            "bits is 4030, but white is 65535, so they are dark: set full_scale to the value of white, such "
            "as 4095" in text
        ) == dark
        assert f"- only the first picture of files with several ({tmp_path}/a/x/stack.tif) is read" in text
    assert "- all images are of the class x: a run requires at least two classes" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "none",
            r"'.*none' does not exist; pass one of: folder of images, table \(\.csv, \.tsv, \.parquet\), or hf:NAME",
        ),
        ("t.txt", r"t\.txt' is not a table"),
        (
            "saved",
            r"saved has no images: it was written by datasets: read it with the class HuggingFace, or as hf:",
        ),
    ],
)
def test_what_is_no_source_is_named(tmp_path, source, message):
    (tmp_path / "t.txt").write_text("path\tlabel\n")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    options = ["--path=x"] * (source != "saved")
    with pytest.raises(FileNotFoundError, match=message):
        main(["data", "inspect", str(tmp_path / source), *options])
    with pytest.raises(ValueError, match=r"--output: .*'eps'"):
        main(["data", "inspect", str(tmp_path), "--output=x.foo"])


def test_a_set_of_tensors_is_shown_too():
    """A quarter of the digits' clients: sizes and channels as scikit-learn has them."""
    result = inspect_division(Division(Digits(), Dirichlet(5, 1.0)))
    assert (result.train.sum(), result.test.sum(), result.modes) == (1438, 359, {"1 channel": 1797})
    assert result.sizes.min() == result.sizes.max() == 8
    assert result.train.sum(0).tolist() == np.bincount(Digits().labels).tolist()


def test_long_lists_are_cut():
    many = [f"client{n}" for n in range(30)]
    result = Inspection(
        many, [f"class{n}" for n in range(20)], np.ones((30, 20), int), np.zeros((30, 20), int),
        np.zeros((30, 20), int), np.zeros((30, 20), int), np.full((30, 2), 20), np.ones((1, 2), int),
        broken=[f"file{n}\x1b[2J is broken" for n in range(12)],
    )  # fmt: skip
    text = format_inspection(result)
    assert "… 10 more" in text
    assert "… 8 more" in text
    assert "Cannot be read (12):\n- file0?[2J is broken" in text
    assert "- … 2 more" in text
    assert "client20" not in text
    assert "class12" not in text


def test_one_label_of_many_tables(tmp_path):
    """What a table says is the same by hand and by the inspection."""
    for number in range(8):
        write_jpeg(tmp_path / f"{number}.jpg", 30 * number)
    write_table(tmp_path / "t.csv", [{"path": f"{n}.jpg", "label": "ab"[n % 2], "client": n // 4} for n in range(8)])
    images = ImageTable(str(tmp_path / "t.csv"), test_share=0.5, size=4)
    result = inspect_division(Division(images, ByDomain("client")))
    assert (result.train + result.test).tolist() == [[2, 2], [2, 2]]
    assert result.clients == ["0", "1"]


def test_equal_pixels_with_different_labels_are_named(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    for client in ("a", "b"):
        for label in ("x", "y"):
            (tmp_path / client / label).mkdir(parents=True)
    for number, (client, label) in enumerate([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]):
        Image.fromarray(pixels[number]).save(tmp_path / client / label / "own.png")
        Image.fromarray(pixels[number] // 2).save(tmp_path / client / label / "other.png")
    # Another format and another label, and another format only.
    Image.fromarray(pixels[0]).save(tmp_path / "b" / "y" / "copy.bmp")
    Image.fromarray(pixels[1]).save(tmp_path / "b" / "y" / "harmless.bmp")
    inspection = inspect_division(
        Division(Images(str(tmp_path), layout="{client}/{class}/*", size=4), ByDomain("client"))
    )
    names = {
        frozenset(Path(name).relative_to(tmp_path).as_posix() for name in pair) for pair in inspection.contradictions
    }
    assert names == {frozenset({"a/x/own.png", "b/y/copy.bmp"})}
    assert "Equal images have different labels" in format_inspection(inspection)
