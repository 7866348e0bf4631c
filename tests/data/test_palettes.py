# SPDX-License-Identifier: Apache-2.0
"""Palettes that are swapped between sites are rejected, and others that differ are warned of."""

import numpy as np
import pytest
from PIL import Image

from perada.data import HuggingFace, ImageMasks, ImageTable
from perada.data.sets.palettes import check_palettes, palette_of

SIZE = 4
BLACK = [0, 0, 0]
RED = [200, 0, 0]
GREEN = [0, 200, 0]
BLUE = [0, 0, 200]


def mask_with(palette, pixels=(0, 1, 2)):
    """A mask of the values with a palette."""
    mask = Image.fromarray(np.resize(np.array(pixels, np.uint8), (SIZE, SIZE)))
    mask.putpalette([channel for colour in palette for channel in colour])
    return mask


def write(root, site, palette, pixels=(0, 1, 2), count=3):
    """Pairs of a site."""
    for kind in ("images", "masks"):
        (root / site / kind).mkdir(parents=True)
    for number in range(count):
        Image.new("L", (SIZE, SIZE), number + len(site)).save(root / site / "images" / f"{number}.png")
        mask_with(palette, pixels).save(root / site / "masks" / f"{number}.png")


def from_folder(root, **options):
    """All masks of the folder."""
    images = ImageMasks(str(root), size=SIZE, **options)
    return [images.with_split(train).labels for train in (True, False)]


def from_table(root, **options):
    """All masks of the folder, in a table."""
    masks = sorted(str(path) for path in root.glob("*/masks/*"))
    rows = [f"{mask.replace('/masks/', '/images/')},{mask}" for mask in masks]
    (root / "t.csv").write_text("path,mask\n" + "\n".join(rows))
    images = ImageTable(str(root / "t.csv"), mask="mask", size=SIZE, **options)
    return [images.with_split(train).labels for train in (True, False)]


def from_hugging_face(root, **options):
    """All masks of the folder, in a set of Hugging Face."""
    datasets = pytest.importorskip("datasets")
    masks = sorted(root.glob("*/masks/*"))
    images = [str(mask).replace("/masks/", "/images/") for mask in masks]
    content = {"image": images, "mask": [str(mask) for mask in masks]}
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image()})
    datasets.Dataset.from_dict(content, features=features).save_to_disk(root / "set")
    loaded = HuggingFace(str(root / "set"), mask="mask", size=SIZE, **options)
    return [loaded.with_split(train).labels for train in (True, False)]


@pytest.mark.parametrize("read", [from_folder, from_table, from_hugging_face])
def test_swapped_palettes_are_rejected_unless_the_values_are_declared(tmp_path, read):
    write(tmp_path, "north", [BLACK, RED, GREEN])
    write(tmp_path, "southern", [BLACK, GREEN, RED])
    with pytest.raises(ValueError, match=r"#\w+ is [12] in .* [12] in .*mask_values"):
        read(tmp_path)
    with pytest.warns(UserWarning, match="swapped palettes"):
        masks = read(tmp_path, mask_values=[0, 1, 2])
    assert sum(len(each) for each in masks) == 6


def test_other_colours_are_warned_of(tmp_path):
    write(tmp_path, "north", [BLACK, RED, GREEN])
    write(tmp_path, "southern", [BLACK, BLUE, GREEN])
    with pytest.warns(UserWarning, match=r"1 is #c80000 in .*/north/.*#0000c8 in .*/southern/"):
        from_folder(tmp_path)


def test_colours_of_values_that_are_not_used_do_not_count(tmp_path):
    write(tmp_path, "north", [BLACK, RED, GREEN], pixels=(0, 1))
    write(tmp_path, "southern", [BLACK, RED, BLUE, RED], pixels=(0, 1))
    from_folder(tmp_path)


def test_colours_that_two_values_share_do_not_count():
    check_palettes({"a": {0: (0, 0, 0), 2: (1, 1, 1)}, "b": {0: (0, 0, 0)}}, values_are_declared=False)


def test_a_palette_is_that_of_pillow(tmp_path):
    mask_with([BLACK, RED, GREEN]).save(tmp_path / "mask.png")
    palette = palette_of(str(tmp_path / "mask.png"))
    with Image.open(tmp_path / "mask.png") as opened:
        colours = np.array(opened.convert("RGB")).reshape(-1, 3)
        values = np.array(opened).reshape(-1)
    assert [list(palette[value]) for value in values] == colours.tolist()
    Image.new("L", (SIZE, SIZE)).save(tmp_path / "grey.png")
    assert palette_of(str(tmp_path / "grey.png")) is None
