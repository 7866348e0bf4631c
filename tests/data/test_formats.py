# SPDX-License-Identifier: Apache-2.0
"""Whatever Pillow opens is read as Pillow shows it in 8 bits, from a path and from an opened image."""

import io
import itertools
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, TiffImagePlugin

from perada.cli import main
from perada.data.batches.transforms import UnreadableImageError, decode, read_image, to_image
from perada.data.preprocessing import Preprocessing

pytestmark = [
    pytest.mark.filterwarnings("ignore:IM image format is deprecated"),
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data"),  # Pillow's, when a file is opened
    pytest.mark.filterwarnings("ignore:Truncated File Read"),
    pytest.mark.filterwarnings("ignore:Tag data larger than file"),
]

HEIGHT = 24
WIDTH = 32
Image.init()
FORMATS = sorted(set(Image.SAVE) - {"PDF", "WMF", "HDF5", "GRIB", "BUFR", "PALM"})  # which Pillow does not read back
MODES = ["1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]
DEEP_MODES = ["I;16", "I;16L", "I;16B", "I;16N"]


def pattern(mode):
    """An image whose pixels differ in every channel, and between any two orientations."""
    ramp = np.arange(HEIGHT * WIDTH, dtype=np.int64).reshape(HEIGHT, WIDTH)
    if mode in DEEP_MODES:
        order = ">u2" if mode == "I;16B" else "<u2"
        return Image.frombytes(mode, (WIDTH, HEIGHT), (ramp * 80).astype(order).tobytes())
    if mode == "I":
        return Image.fromarray((ramp * 80).astype(np.int32))
    if mode == "F":
        return Image.fromarray((ramp / ramp.max()).astype(np.float32))
    if mode == "1":
        return Image.fromarray((ramp % 5) == 0)
    channels = [(ramp * factor % 256).astype(np.uint8) for factor in (1, 3, 5, 7)]
    grey = Image.fromarray(channels[1])
    colour = Image.fromarray(np.dstack(channels[:3]))
    alpha = Image.fromarray(channels[3])
    if mode == "LA":
        return Image.merge("LA", [grey, alpha])
    if mode == "La":
        return Image.merge("LA", [grey, alpha]).convert("La")
    if mode in ("RGBA", "RGBa"):
        return Image.merge("RGBA", [*colour.split(), alpha]).convert(mode)
    if mode == "PA":
        return Image.merge("PA", [colour.quantize(16), alpha])
    if mode == "P":
        return colour.quantize(16)
    return grey if mode == "L" else colour.convert(mode)


def pillow_pixels(image):
    """An upright image (H, W, 3) as Pillow shows it, over white; grey values of more than 8 bits by arithmetic."""
    if image.mode[0] in "IF":
        white = 1.0 if image.mode == "F" else 65535.0
        grey = np.rint(np.asarray(image).astype(np.float64) * 255 / white)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.has_transparency_data:
        layers = np.asarray((image.convert("LA") if image.mode == "La" else image).convert("RGBA")).astype(np.float64)
        share = layers[..., 3:] / 255
        return layers[..., :3] * share + 255 * (1 - share)
    return np.asarray(image.convert("RGB")).astype(np.float64)


def preprocessing():
    """What a run on uint8 colour images of this size does, without normalising."""
    return Preprocessing("uint8", (3, HEIGHT, WIDTH), 3, (), (0.0,) * 3, (1.0,) * 3)


def differ(read, expected):
    """The largest difference of a tensor (3, H, W) from an array (H, W, 3)."""
    assert tuple(read.shape[1:]) == expected.shape[:2]
    return float(np.abs(read.permute(1, 2, 0).numpy() - expected).max())


def check_all_ways(path, expected, tolerance=1.0):
    """A path, an opened image, an item of a dataset and a batch of a run are all read alike."""
    read = read_image(path, "fix it", "RGB")
    assert read.dtype == torch.uint8
    assert differ(read, expected) <= tolerance
    with Image.open(path) as opened:
        assert torch.equal(decode(opened, "RGB"), read)
    with Image.open(path) as opened:
        item = to_image(opened)
    assert torch.equal(item.expand(3, -1, -1), read)
    grey = read_image(path, "fix it", "L")
    with Image.open(path) as opened:
        assert torch.equal(decode(opened, "L"), grey)
    assert grey.shape == (1, *expected.shape[:2])
    if expected.shape == (HEIGHT, WIDTH, 3):
        with Image.open(path) as opened:
            assert torch.equal(preprocessing().batch([opened]), preprocessing().batch([path]))


@pytest.mark.every(23)
@pytest.mark.parametrize("mode", MODES + DEEP_MODES)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "ICNS"])  # which has 1024 pixels at least
def test_every_mode_in_every_format(tmp_path, kind, mode):
    path = tmp_path / "image"
    image = pattern(mode)
    try:
        image.save(path, kind)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        pytest.skip("Pillow does not write this mode in this format")
    try:
        with Image.open(path) as opened:
            opened.load()
            expected = pillow_pixels(opened)
    except (OSError, NotImplementedError, AssertionError):
        pytest.skip("Pillow does not read what it wrote")
    if expected.max() > 256:  # SPIDER's values are floats without a scale
        with pytest.raises(UnreadableImageError, match=rf"^{path} .*full_scale"):
            read_image(path, "fix it")
        return
    check_all_ways(path, expected)


@pytest.mark.every(4)
@pytest.mark.parametrize("mode", MODES + DEEP_MODES)
def test_every_mode_in_memory(mode):
    image = pattern(mode)
    for colours, channels in (("RGB", 3), ("L", 1)):
        assert decode(image, colours).shape == (channels, HEIGHT, WIDTH)
    assert differ(decode(image, "RGB"), pillow_pixels(image)) <= 1


def png(depth, colour, row, transparency, palette=None):
    """A PNG file of one row, whose samples have ``depth`` bits."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    width = len(row) * 8 // (depth * samples)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))]
    if palette is not None:
        parts.append(chunk(b"PLTE", palette))
    parts += [chunk(b"tRNS", transparency), chunk(b"IDAT", zlib.compress(b"\0" + row)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PALETTE = bytes([9, 8, 7, 60, 50, 40, 200, 100, 0, 1, 2, 3])


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("content", "pixels"),
    [
        (png(1, 0, b"\x40", struct.pack(">H", 1)), [0, 255, 0, 0, 0, 0, 0, 0]),
        (png(1, 0, b"\x40", struct.pack(">H", 0)), [255] * 8),
        (png(8, 0, bytes([10, 20]), struct.pack(">H", 20)), [10, 255]),
        (png(16, 0, struct.pack(">HH", 1000, 60000), struct.pack(">H", 1000)), [255, round(60000 * 255 / 65535)]),
        (png(16, 0, struct.pack(">HH", 1000, 60000), struct.pack(">H", 60000)), [4, 255]),
        (png(16, 0, struct.pack(">HH", 0, 65535), struct.pack(">H", 0)), [255, 255]),
        (png(8, 2, bytes([10, 20, 30, 40, 50, 60]), struct.pack(">HHH", 10, 20, 30)), [[255] * 3, [40, 50, 60]]),
        (png(8, 3, bytes([0, 1]), bytes([0]), PALETTE), [[255] * 3, [60, 50, 40]]),
        (png(8, 3, bytes([0, 1]), bytes([255, 0]), PALETTE), [[9, 8, 7], [255] * 3]),
        (png(8, 3, bytes([1, 2]), bytes([255, 102, 51]), PALETTE), [[177, 173, 169], [244, 224, 204]]),
        (png(4, 3, b"\x01", bytes([255, 0]), PALETTE), [[9, 8, 7], [255] * 3]),
        (png(2, 3, b"\x1b", bytes([0, 255, 0]), PALETTE), [[255] * 3, [60, 50, 40], [255] * 3, [1, 2, 3]]),
        (png(1, 3, b"\x40", bytes([0]), PALETTE[:6]), [[255] * 3, [60, 50, 40], *[[255] * 3] * 6]),
    ],
)
def test_every_kind_of_transparent_colour(tmp_path, content, pixels):
    (path := tmp_path / "image.png").write_bytes(content)
    expected = np.array([pixels]).reshape(1, len(pixels), -1) * np.ones((1, 1, 3))
    check_all_ways(path, expected)


def test_a_transparent_value_beyond_white_is_no_error(tmp_path):
    """Cameras of 12 bits mark what they did not see with the largest number of 16 bits."""
    path = tmp_path / "image.png"
    path.write_bytes(png(16, 0, struct.pack(">HH", 4095, 65535), struct.pack(">H", 65535)))
    assert read_image(path, "fix it", full_scale=4095).tolist() == [[[255, 255]]]


TURNED = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, 3),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 1),
}
SHORT = 3
LONG = 4
ASCII = 2
RATIONAL = 5
ORIENTATION = 0x0112
RESOLUTION = 0x011A
WIDTH_TAG = 0x0100
EXIF_POINTER = 0x8769
GPS_POINTER = 0x8825


def exif(order, orientation, *others):
    """EXIF data whose entries are (tag, type, count, four bytes of value), however wrong these are."""
    value = struct.pack(f"{order}HH", orientation, 0)
    entries = sorted([(ORIENTATION, SHORT, 1, value), *others])
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    return head + b"".join(struct.pack(f"{order}HHI", *entry[:3]) + entry[3] for entry in entries) + bytes(4)


DAMAGE = {
    "none": [],
    "text in a rational": [(RESOLUTION, ASCII, 4, b"abc\0")],
    "text in a number": [(WIDTH_TAG, ASCII, 4, b"abc\0")],
    "a value beyond the end": [(RESOLUTION, RATIONAL, 1, b"\xff\xff\xff\x00")],
    "a pointer that is a text": [(EXIF_POINTER, ASCII, 4, b"abc\0")],
    "a pointer beyond the end": [(EXIF_POINTER, LONG, 1, b"\xff\xff\xff\x00")],
    "places as texts": [(GPS_POINTER, ASCII, 4, b"abc\0")],
    "an unknown type": [(RESOLUTION, 99, 1, b"abc\0")],
    "more values than there are": [(RESOLUTION, SHORT, 2**16, b"abc\0")],
}
COLOURS = np.asarray(pattern("RGB"))


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_orientation_with_damaged_fields(tmp_path, kind, damage):
    path = tmp_path / "image"
    options = {"lossless": True} if kind == "WEBP" else {}
    start = b"Exif\0\0" if kind == "JPEG" else b""
    for orientation, order in itertools.product([*TURNED, 0, 9], "<>"):
        metadata = start + exif(order, orientation, *DAMAGE[damage])
        Image.fromarray(COLOURS).save(path, kind, exif=metadata, **options)
        with Image.open(path) as opened:
            stored = np.asarray(opened.convert("RGB")).astype(np.float64)
        check_all_ways(path, TURNED.get(orientation, TURNED[1])(stored))


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["MPO", "AVIF"])
@pytest.mark.parametrize("orientation", TURNED)
def test_orientations_of_other_formats(tmp_path, kind, orientation):
    if kind not in Image.SAVE:
        pytest.skip("Pillow was built without it")
    path = tmp_path / "image"
    image = Image.fromarray(np.repeat(np.repeat(COLOURS, 4, 0), 4, 1))
    options = {"append_images": [image], "save_all": True} if kind == "MPO" else {}
    start = b"Exif\0\0" if kind == "MPO" else b""
    image.save(path, kind, exif=start + exif("<", orientation), quality=95, **options)
    with Image.open(path) as opened:
        stored = np.asarray(opened.convert("RGB")).astype(np.float64)
    upright = TURNED[orientation](stored)
    check_all_ways(path, upright)


def tiff(path, mode, compression=None, **texts):
    """Write a TIFF whose tags of these numbers are texts, and give its pixels as they are stored."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in texts.items():
        number = int(tag.removeprefix("tag"))
        if isinstance(value, str):
            tags.tagtype[number] = ASCII
        tags[number] = value
    pattern(mode).save(path, tiffinfo=tags, compression=compression)
    return pillow_pixels(pattern(mode))


@pytest.mark.every(9)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16", "1", "F", "CMYK", "LAB"])
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_tiff_of_every_orientation(tmp_path, mode, compression):
    for orientation, turn in TURNED.items():
        path = tmp_path / f"{orientation}.tif"
        check_all_ways(path, turn(tiff(path, mode, compression, tag274=orientation)))


@pytest.mark.parametrize(
    "texts",
    [
        {"tag274": "6"},  # no number, and so no orientation
        {"tag700": "<x:xmpmeta/>"},  # Pillow searches bytes in it, when the pixels are there
        {"tag274": 6, "tag700": "<x:xmpmeta/>"},
        {"tag274": 6, "tag34855": "two hundred"},
        {"tag274": 6, "tag34665": "a text instead of a place"},
        {"tag34853": "a text instead of a place"},
    ],
)
def test_tiff_with_texts_in_numeric_tags(tmp_path, texts):
    path = tmp_path / "image.tif"
    stored = tiff(path, "RGB", **texts)
    check_all_ways(path, TURNED[6](stored) if texts.get("tag274") == 6 else stored)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("depth", [8, 16, 32])
def test_tiff_of_either_byte_order(tmp_path, order, depth):
    values = np.arange(12).reshape(3, 4) * (20 if depth == 8 else 5000)
    pixels = values.astype(f"{order}u{depth // 8}").tobytes()
    kinds = [(256, SHORT, 4), (257, SHORT, 3), (258, SHORT, depth), (259, SHORT, 1), (262, SHORT, 1)]
    kinds += [(273, LONG, 8), (277, SHORT, 1), (278, SHORT, 3), (279, LONG, len(pixels)), (339, SHORT, 1)]
    if depth == 32:
        kinds[-1] = (339, SHORT, 2)  # Pillow reads signed numbers of 32 bits
    entries = b""
    for tag, kind, value in kinds:
        packed = struct.pack(f"{order}HH", value, 0) if kind == SHORT else struct.pack(f"{order}I", value)
        entries += struct.pack(f"{order}HHI", tag, kind, 1) + packed
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(pixels))
    content = start + pixels + struct.pack(f"{order}H", len(kinds)) + entries + bytes(4)
    (path := tmp_path / "image.tif").write_bytes(content)
    white = 255 if depth == 8 else 65535
    expected = np.rint(values * 255 / white)[..., None] * np.ones((1, 1, 3))
    check_all_ways(path, expected, tolerance=0)


@pytest.mark.parametrize(
    "kind", [kind for kind in ("GIF", "TIFF", "WEBP", "PNG", "MPO", "AVIF") if kind in Image.SAVE_ALL]
)
def test_of_several_frames_the_first_is_read(tmp_path, kind):
    first = pattern("RGB")
    second = Image.new("RGB", (WIDTH, HEIGHT), (0, 200, 0))
    path = tmp_path / "image"
    options = {"lossless": True} if kind == "WEBP" else {}
    first.save(path, kind, save_all=True, append_images=[second], **options)
    with Image.open(path) as opened:
        expected = pillow_pixels(opened)
    assert expected.std() > 20  # which the second frame has not
    check_all_ways(path, expected)


def test_orientation_said_by_xmp_alone(tmp_path):
    from PIL import PngImagePlugin

    path = tmp_path / "image.png"
    notes = PngImagePlugin.PngInfo()
    notes.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    Image.fromarray(COLOURS).save(path, pnginfo=notes)
    check_all_ways(path, TURNED[6](COLOURS).astype(np.float64), tolerance=0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no known image format"),
        (b"not an image at all", "no known image format"),
        (png(8, 0, bytes(64), b"\0\0")[:60], "truncated|broken|tRNS|not enough"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, reason):
    (path := tmp_path / "image.png").write_bytes(content)
    with pytest.raises(UnreadableImageError, match=rf"^{path} .*\(.*({reason}).*\)"):
        read_image(path, "fix it")


def test_an_opened_image_that_is_broken_is_named(tmp_path):
    path = tmp_path / "image.png"
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    path.write_bytes(file.getvalue()[:400])
    with Image.open(path) as opened, pytest.raises(UnreadableImageError, match=rf"^{path} is not a readable image"):
        preprocessing().batch([opened])
    negative = Image.fromarray(np.full((HEIGHT, WIDTH), -5, np.int32))
    with pytest.raises(UnreadableImageError, match=r"mode I.*\(32, 24\).*-5 to -5"):
        preprocessing().batch([negative])


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_inspection_reads_photographs_with_damaged_fields(tmp_path, damage, capsys):
    for name in ("cat", "dog"):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            metadata = b"Exif\0\0" + exif(">", 6, *DAMAGE[damage])
            Image.fromarray(pixels).save(folder / f"{name}{number}.jpg", quality=90 + number, exif=metadata)
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"nothing")
    with pytest.raises(SystemExit):  # for the broken one alone
        main(["data", "inspect", str(tmp_path), "--layout={class}/*"])
    printed = capsys.readouterr().out
    assert "Cannot be read (1)" in printed or printed.count("cat/broken.jpg is not a readable image") == 1
    assert "6 RGB" in printed
