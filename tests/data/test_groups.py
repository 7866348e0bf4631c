# SPDX-License-Identifier: Apache-2.0
"""Groups of images, such as patients: whose they are, and on which side of the test split."""

import warnings

import pytest
from PIL import Image

from perada.data import ImageMasks, Images, ImageTable
from tests.rejections import rejects


def write_images(folder, paths, mode="RGB"):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (4, 4)).save(folder / path)
    return str(folder)


PATIENTS = ["a/train/x/1_1.jpg", "a/train/y/2_1.jpg", "a/test/x/3_1.jpg", "a/test/y/3_2.jpg"]
PATIENTS += ["b/train/x/3_1.jpg", "b/train/y/3_2.jpg", "b/test/x/1_1.jpg", "b/test/y/2_1.jpg"]


def two_hospitals(tmp_path, kind, extra=(), **options):
    """Two hospitals that number their patients from 1, as folders, as a table or as folders with masks."""
    paths = [*PATIENTS, *extra]
    if kind == "masks":
        names = [path.replace("_", "/").split("/") for path in paths]
        places = [(f"{client}/{split}", f"{group}/{label}{row}") for client, split, label, group, row in names]
        write_images(tmp_path, [f"{top}/images/{below}" for top, below in places])
        write_images(tmp_path, [f"{top}/masks/{below}" for top, below in places], "L")
        return ImageMasks(str(tmp_path), **options)
    root = write_images(tmp_path, paths)
    if kind == "folders":
        return Images(root, layout="{client}/{split}/{class}/{group}_*", **options)
    rows = ["path,label,client,split,group"]
    for path in paths:
        client, split, label, name = path.split("/")
        rows.append(f"{path},{label},{client},{split},{name.partition('_')[0]}")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    return ImageTable(str(tmp_path / "table.csv"), **options)


@pytest.mark.parametrize("kind", ["folders", "table", "masks"])
def test_patients_are_numbered_by_each_hospital(tmp_path, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = two_hospitals(tmp_path, kind, shared_groups=False)
        assert len(images) == len(images.with_split(False)) == 4
    with pytest.raises(ValueError, match="groups 1, 2, 3"):
        len(two_hospitals(tmp_path, kind, shared_groups=True))
    extra = two_hospitals(tmp_path, kind, extra=["b/test/x/3_9.jpg"], shared_groups=False)
    with pytest.raises(ValueError, match=r"group .*3"):
        len(extra)
    with rejects("shared_groups", "yes"):
        two_hospitals(tmp_path, kind, shared_groups="yes")


@pytest.mark.parametrize("kind", ["folders", "table"])
def test_a_name_that_is_divided_between_hospitals_is_mentioned(tmp_path, kind):
    with pytest.warns(UserWarning, match=r"1, 2, 3, .*shared_groups"):
        assert len(two_hospitals(tmp_path, kind)) == 4
