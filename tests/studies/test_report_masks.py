# SPDX-License-Identifier: Apache-2.0
"""Pictures of test images and their masks in a report, from the files of ``perada predict --config``."""

import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from perada.cli import main
from perada.studies.report.page import with_pictures
from perada.studies.report.pictures import find_examples, read_example
from perada.studies.report.records import read_records
from tests.masks import squares


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe of two hospitals with images and masks."""
    pytest.importorskip("segmentation_models_pytorch")
    folder = tmp_path_factory.mktemp("recipe")
    for place, client in enumerate(("north", "south")):
        for number, (image, mask) in enumerate(squares(6, place)):
            split = "test" if number < 3 else "train"
            for kind, pixels in (("images", image.permute(1, 2, 0)), ("masks", mask)):
                path = folder / "scans" / client / split / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.numpy()).save(path)
    options = {"root": str(folder / "scans"), "size": 32, "classes": ["none", "red", "green"]}
    content = {
        "model": {"backbone": "smp:unet-resnet18", "pretrained": False, "adapter": "lora"},
        "data": {
            "dataset": {"class_path": "ImageMasks", "init_args": options},
            "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
            "batch_size": 3,
        },
        "federated": {"algorithm": "fedper"},
        "training": {"local_steps": 1},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    }
    (folder / "recipe.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def predicted(recipe):
    """The folders of the run and of its predictions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(recipe)
        main(["fit", "--config", "recipe.yaml"])
        run = recipe / "lightning_logs" / "version_0"
        main(["predict", "--config", "recipe.yaml", "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    return run, recipe / "lightning_logs" / "version_1"


def test_pictures_are_the_test_images(recipe, predicted):
    _, folder = predicted
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        client = ["north", "south"][int(row["client"])]
        stored = recipe / "scans" / client / "test"
        name = f"{int(row['image']) % 3}.png"
        picture = np.array(Image.open(folder / row["picture"])).astype(int)
        assert np.abs(picture - np.array(Image.open(stored / "images" / name)).astype(int)).max() <= 1
        assert np.array_equal(Image.open(folder / row["label"]), Image.open(stored / "masks" / name))


def test_a_page_shows_images_with_true_and_predicted_masks(predicted, tmp_path):
    run, folder = predicted
    main(["report", str(run), "--pictures", str(folder), "--output", str(tmp_path / "page")])
    text = (tmp_path / "page" / "index.html").read_text()
    assert (tmp_path / "page" / "masks.png").stat().st_size > 1000
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    row = rows[4]
    mask = np.array(Image.open(folder / row["personal"]))
    share = (mask == np.array(Image.open(folder / row["label"]))).mean()
    assert "Share this page only with those who may see them" in text
    assert f"south, image 4: client&#39;s own model {100 * share:.1f} %" in text
    assert "image 5" not in text  # at most two of a client
    assert "true mask" in text
    main(["report", str(run), "--output", str(tmp_path / "without")])
    assert not (tmp_path / "without" / "masks.png").exists()
    assert "true mask" not in (tmp_path / "without" / "index.html").read_text()


def test_files_are_checked_by_their_headers_and_read_later(predicted):
    _, folder = predicted
    for files in find_examples(folder, 2):
        example = read_example(folder, files)
        for path, pixels in ((files.picture, example.picture), (files.label, example.label)):
            assert np.array_equal(pixels, Image.open(path))
        assert list(example.predictions) == list(files.predictions)


def test_pictures_are_checked_without_the_import_of_numpy(predicted):
    _, folder = predicted
    script = (
        "import sys\nfrom pathlib import Path\nfrom perada.studies.report.pictures import find_examples\n"
        "assert len(find_examples(Path(sys.argv[1]), 2)) == 4\nprint({'numpy', 'PIL'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def remove_label(folder):
    next((folder / "predictions" / "label").iterdir()).unlink()


def crop_label(folder):
    path = folder / "predictions" / "label" / "000000.png"
    Image.open(path).crop((0, 0, 9, 7)).save(path)


def replace_label_by_text(folder):
    (folder / "predictions" / "label" / "000000.png").write_text("not a picture, but long enough for a header")


def damage_label(folder):
    """A header that is intact, before pixels that are not."""
    path = folder / "predictions" / "label" / "000000.png"
    content = bytearray(path.read_bytes())
    start = content.index(b"IDAT") + 4
    content[start : start + 12] = bytes(12)
    path.write_bytes(content)


def truncate_picture(folder):
    table = (folder / "predictions.csv").read_text().splitlines()
    path = folder / dict(zip(table[0].split(","), table[1].split(","), strict=True))["picture"]
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"IDAT") + 8])


def misspell_client(folder):
    table = folder / "predictions.csv"
    table.write_text(table.read_text().replace("\n0,0,", "\n0,north,", 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_label, r"--pictures=.*: the file predictions/label/000000\.png of predictions\.csv is missing; write"),
        (crop_label, r"label/000000\.png has 7 × 9 pixels, but its image 32 × 32; write the predictions again"),
        (replace_label_by_text, r"label/000000\.png is not a PNG file; write the predictions again"),
        (damage_label, r"--pictures=.*: predictions/label/000000\.png cannot be read \(.+\); write the predictions"),
        (truncate_picture, r"--pictures=.*\.png cannot be read \(.+\); write the predictions again"),
        (misspell_client, r"client .*got 'north'"),
    ],
)
def test_damaged_pictures_are_rejected_before_anything_is_printed(predicted, tmp_path, capsys, damage, message):
    run, folder = predicted
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    capsys.readouterr()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(["report", str(run), "--pictures", str(tmp_path / "copy"), "--output", str(tmp_path / "page")])
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "page").exists()


def test_pictures_that_cannot_be_shown_are_rejected(predicted, tmp_path, capsys):
    run, folder = predicted
    (record,) = read_records(run)
    capsys.readouterr()
    with pytest.raises(FileNotFoundError, match=r"predictions\.csv.*perada predict --config"):
        main(["report", str(run), "--pictures", str(tmp_path), "--output", str(tmp_path / "page")])
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "page").exists()
    with pytest.raises(ValueError, match=r"--pictures needs a single run"):
        main(["report", str(run), str(run), "--pictures", str(folder), "--output", str(tmp_path / "page")])
    with pytest.raises(ValueError, match=r"--pictures needs --output"):
        main(["report", str(run), "--pictures", str(folder)])
    with pytest.raises(ValueError, match=r"client 1, .* 1"):
        find_examples(folder, 1)
    table = (folder / "predictions.csv").read_text()
    (tmp_path / "predictions.csv").write_text(table.replace("predictions/label", "../label"))
    shutil.copytree(folder / "predictions", tmp_path / "predictions")
    with pytest.raises(ValueError, match=r"\.\./label/000000\.png, .*outside"):
        find_examples(tmp_path, 2)
    (tmp_path / "predictions.csv").write_text("image,client,label,personal\n0,0,1,1\n")
    with pytest.raises(ValueError, match=r"predictions\.csv .*masks"):
        find_examples(tmp_path, 2)
    record.info["privacy"] = {"client": {}}
    with pytest.raises(ValueError, match=r"private .*--scores=true"):
        with_pictures([record], None, folder)
