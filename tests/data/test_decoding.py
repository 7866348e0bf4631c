# SPDX-License-Identifier: Apache-2.0
"""Image files of every depth and mode become the uint8 values that arithmetic by hand gives."""

import io
import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from perada.cli.messages import one_line
from perada.data import ImageFolder
from perada.data.batches.transforms import UnreadableImageError, decode, read_image, to_image
from tests.rejections import rejects

SIDE = 6
RAMP = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)


def folder(tmp_path, image, name="x.png", **options):
    """A training set whose one image is written as a file."""
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        image.save(tmp_path / part / "a" / name, **options)
    return str(tmp_path)


def as_rgb(pixels):
    return pixels.expand(3, -1, -1).tolist()


@pytest.mark.parametrize(
    ("values", "name", "full_scale", "white"),
    [
        ((RAMP * 1800).astype(np.uint16), "x.png", None, 65535),
        ((RAMP * 100).astype(np.uint16), "x.png", 4095, 4095),
        ((RAMP * 100).astype(np.uint16), "x.tif", 4095, 4095),
        ((RAMP * 1800).astype(np.int32), "x.tif", None, 65535),
        ((RAMP / 36).astype(np.float32), "x.tif", None, 1),
        ((RAMP * 50.0).astype(np.float32), "x.tiff", 2000, 2000),
    ],
)
def test_deep_images_are_scaled(tmp_path, values, name, full_scale, white):
    root = folder(tmp_path, Image.fromarray(values), name)
    pixels = ImageFolder(root, size=SIDE, full_scale=full_scale)[0][0]
    expected = [[round(float(value) * 255 / white) for value in row] for row in values]
    assert pixels.tolist() == [expected] * 3
    if full_scale is None:
        assert to_image(Image.fromarray(values)).tolist() == [expected]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((2, 2), 5000, np.uint16), r"from 5000 to 5000, but must be from 0 to 4095: set full_scale"),
        (np.full((2, 2), -5, np.int32), "from -5 to -5"),
        (np.full((2, 2), np.nan, np.float32), "from nan to nan"),
    ],
)
def test_values_that_do_not_fit_the_scale_are_named(tmp_path, values, message):
    images = ImageFolder(folder(tmp_path, Image.fromarray(values), "deep.tif"), size=2, full_scale=4095)
    with pytest.raises(ValueError, match=rf"train/a/deep\.tif.*{message}"):
        images[0]
    with rejects("full_scale", 0):
        ImageFolder(str(tmp_path), full_scale=0)


def tiff(pixels, bits, sample_format, photometric, order="<"):
    """The bytes of an uncompressed TIFF of one strip, written tag by tag."""
    dtype = {1: "u", 2: "i", 3: "f"}[sample_format] + str(bits // 8)
    height, width = pixels.shape
    content = pixels.astype(order + dtype).tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, height)]
    tags += [(279, len(content)), (339, sample_format)]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    start = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return start + struct.pack(f"{order}I", 8 + len(content)) + content + directory


DEEP_TIFFS = [("<", 8, 1), (">", 8, 1), ("<", 16, 1), (">", 16, 1), ("<", 32, 3), (">", 32, 3), ("<", 16, 2)]
DEEP_TIFFS += [(">", 16, 2), ("<", 32, 1), ("<", 32, 2), (">", 32, 2)]


@pytest.mark.parametrize("full_scale", [None, 4000])
@pytest.mark.parametrize(("order", "bits", "sample_format"), DEEP_TIFFS)
@pytest.mark.parametrize("white_is_zero", [False, True])
def test_white_of_a_tiff_of_any_depth_is_white(tmp_path, white_is_zero, order, bits, sample_format, full_scale):
    white = {8: 255, 16: 65535, 32: 65535}[bits]
    if sample_format == 3:
        white = 1
    if full_scale and bits > 8:
        white = full_scale
    # The largest value of a signed sample may be below white.
    largest = min(white, 32767) if sample_format == 2 else white
    values = np.linspace(0, largest, SIDE * SIDE).reshape(SIDE, SIDE)
    if sample_format != 3:
        values = values.round()
    path = tmp_path / "x.tif"
    path.write_bytes(tiff(values, bits, sample_format, photometric=0 if white_is_zero else 1, order=order))
    shares = values / white
    if white_is_zero:
        shares = 1 - shares
    try:
        pixels = read_image(path, "fix it", full_scale=full_scale)
    except UnreadableImageError as error:
        # Pillow reads no such file, which is better than one with black and white exchanged.
        assert white_is_zero and "a variant of one that Pillow does not read" in str(error)
        return
    assert np.abs(pixels[0].numpy() - shares * 255).max() <= 0.501


def test_most_tiffs_with_white_as_zero_are_read(tmp_path):
    path = tmp_path / "x.tif"
    for order, bits, sample_format in [("<", 8, 1), (">", 8, 1), ("<", 16, 1), ("<", 32, 3), (">", 32, 3)]:
        path.write_bytes(tiff(np.zeros((2, 3)), bits, sample_format, photometric=0, order=order))
        assert read_image(path, "fix it").unique().tolist() == [255]


@pytest.mark.parametrize("tag", [1, 3, 6])
def test_white_as_zero_of_a_rotated_tiff(tmp_path, tag):
    values = np.arange(6, dtype=np.uint16).reshape(2, 3) * 10000
    Image.fromarray(values).save(tmp_path / "x.tif", tiffinfo={262: 0, 274: tag})
    turns = {1: 0, 3: 2, 6: 3}[tag]
    expected = np.rot90((65535 - values.astype(np.float64)) * 255 / 65535, turns)
    assert np.abs(read_image(tmp_path / "x.tif", "fix it")[0].numpy() - expected).max() <= 0.501


def test_negative_values_of_eight_bits_are_rejected(tmp_path):
    path = tmp_path / "x.tif"
    path.write_bytes(tiff(np.array([[-5, 100]]), 8, 2, photometric=1))
    with pytest.raises(UnreadableImageError, match="from -5 to 100"):
        read_image(path, "fix it")
    path.write_bytes(tiff(np.array([[5, 100]]), 8, 2, photometric=1))
    assert read_image(path, "fix it").tolist() == [[[5, 100]]]


def test_transparency_is_laid_over_white(tmp_path):
    colour = np.array([10, 100, 200])
    alpha = RAMP * 7
    layers = np.dstack([np.broadcast_to(colour, (SIDE, SIDE, 3)), alpha]).astype(np.uint8)
    pixels = ImageFolder(folder(tmp_path, Image.fromarray(layers)), size=SIDE)[0][0].permute(1, 2, 0).numpy()
    share = alpha[..., None] / 255
    expected = colour * share + 255 * (1 - share)
    assert np.abs(pixels - expected).max() <= 1
    grey = Image.merge("LA", [Image.new("L", (2, 2), 0), Image.new("L", (2, 2), 51)])
    assert decode(grey, "L").unique().tolist() == [204]  # 255 · (1 - 0.2)


def test_palettes_and_other_modes_have_their_colours(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 8, 7, 60, 50, 40])
    palette.putdata([1, 0])
    file = io.BytesIO()
    palette.save(file, "png", transparency=0)
    for image, right in ((palette, [9, 8, 7]), (Image.open(file), [255] * 3)):
        assert decode(image)[:, 0].T.tolist() == [[60, 50, 40], right]
    assert decode(Image.new("CMYK", (1, 1), (0, 255, 255, 0))).flatten().tolist() == [255, 0, 0]
    assert decode(Image.new("1", (1, 1), 1)).tolist() == [[[255]]]
    assert decode(Image.new("RGB", (1, 1), (100, 100, 100)), "L").tolist() == [[[100]]]


@pytest.mark.parametrize(("tag", "turn"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_photographs_stand_upright(tmp_path, tag, turn):
    """Tag 6 says that the camera was turned: what it stored is shown turned clockwise."""
    exif = Image.Exif()
    exif[0x0112] = tag
    stored = (RAMP * 7).astype(np.uint8)
    images = ImageFolder(folder(tmp_path, Image.fromarray(stored), exif=exif), size=SIDE)
    assert images[0][0].tolist() == [np.rot90(stored, turn).tolist()] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_file_is_one_line_with_its_path(tmp_path, workers):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    root = folder(tmp_path, Image.fromarray(noise))
    path = tmp_path / "train" / "a" / "x.png"
    path.write_bytes(path.read_bytes()[:-1000])
    loader = DataLoader(ImageFolder(root, size=8), num_workers=workers)
    with pytest.raises(ValueError, match="is not a readable image") as error:
        list(loader)
    line = one_line(error.value)
    assert str(error.value) == line
    assert re.fullmatch(rf"{path} is not a readable image \(.+\): fix it or take it out of the folder", line)
    path.unlink()
    with pytest.raises(FileNotFoundError) as missing:
        list(loader)
    assert str(missing.value) == f"{path} does not exist: fix it or take it out of the folder"


def test_grey_images_of_eight_bits_are_as_they_were():
    grey = Image.fromarray(RAMP.astype(np.uint8))
    assert torch.equal(decode(grey), torch.from_numpy(RAMP.astype(np.uint8))[None])
    assert as_rgb(decode(grey)) == decode(grey, "RGB").tolist()
