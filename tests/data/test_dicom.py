# SPDX-License-Identifier: Apache-2.0
"""DICOM files become the grey levels and colours that formulas by hand, Pillow and DCMTK give."""

import io
import tracemalloc

import numpy as np
import pytest

from perada.data.batches.transforms import read_image
from perada.data.medical.dicom import decode_dicom
from perada.data.medical.windows import PRESETS, GreyWindow, check_window
from tests.data.dicom_files import (
    TEST_FILES,
    dataset,
    dcmtk,
    linear,
    modality,
    needs_dcmtk,
    pydicom,
    save,
    table,
    write,
)
from tests.rejections import rejects

SIDE = 12
RAMP = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
HALF_LEVEL = 0.505
"""Largest difference from a rounded level; DCMTK's 16 bits are cut off, which adds up to 1/257."""


def stored_values(bits_stored, is_signed):
    """Values from the smallest to the largest, and the type that holds them."""
    low = -(2 ** (bits_stored - 1)) if is_signed else 0
    values = np.linspace(low, low + 2**bits_stored - 1, SIDE * SIDE).round().astype(np.int64).reshape(SIDE, SIDE)
    kind = "i" if is_signed else "u"
    return values.astype(f"{kind}{1 if bits_stored <= 8 else 2}")


TRANSFORMS = {
    "none": {},
    "rescale": {"RescaleSlope": "2", "RescaleIntercept": "-1024"},
    "table": {"ModalityLUTSequence": True},
}
WINDOWS = {
    "linear": ({"WindowCenter": "40", "WindowWidth": "400"}, ["+Wi", "1"]),
    "sigmoid": ({"WindowCenter": "40", "WindowWidth": "400", "VOILUTFunction": "SIGMOID"}, ["+Wi", "1"]),
    "table": ({"VOILUTSequence": True}, ["+Wl", "1"]),
    "none": ({}, ["+Wm"]),
}


@needs_dcmtk
@pytest.mark.every_value
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("bits_stored", "is_signed"), [(8, False), (10, False), (12, False), (12, True), (16, True)])
def test_grey_levels_are_those_of_dcmtk(tmp_path, bits_stored, is_signed, transform, window, photometric):
    values = stored_values(bits_stored, is_signed)
    elements = {"BitsStored": bits_stored, "PhotometricInterpretation": photometric}
    elements |= TRANSFORMS[transform]
    window_elements, options = WINDOWS[window]
    elements |= window_elements
    if "ModalityLUTSequence" in elements:
        # A curve, so that the order of the steps matters.
        entries = (np.linspace(0, 1, 200) ** 2 * 1500).astype(int).tolist()
        elements["ModalityLUTSequence"] = table(int(values.min()), entries, bits=12)
    if "VOILUTSequence" in elements:
        if transform == "table" and is_signed:
            pytest.skip("DCMTK takes the first value of the VOI table of such files for a signed one")
        elements["VOILUTSequence"] = table(0, (np.linspace(0, 1, 256) ** 0.5 * 4095).astype(int).tolist(), bits=12)
    if window == "none" and bits_stored <= 8:
        options = []
    path = write(tmp_path / "x.dcm", values, **elements)
    levels = decode_dicom(path, None, "file")
    if window == "none" and bits_stored <= 8 and transform == "none":
        # DCMTK divides inverted values of 8 bits by 256 instead of 255.
        difference = 1 if photometric == "MONOCHROME1" else 0
        assert np.abs(levels - dcmtk(path, depth=8)).max() <= difference
        return
    expected = dcmtk(path, *options)
    # DCMTK shifts the 12 bits of a table to 16 instead of scaling them.
    shift = 65535 / 65520 if "table" in (window, transform if window == "none" and bits_stored <= 8 else "") else 1
    if shift != 1 and photometric == "MONOCHROME1":
        expected = 255 - (255 - expected) * shift
    else:
        expected = expected * shift
    assert np.abs(levels - expected).max() <= HALF_LEVEL


OPTIONS_OF_DCMTK = {
    "CT_small.dcm": ["+Wm"],
    "MR_small.dcm": ["+Wi", "1"],
    "MR_small_RLE.dcm": ["+Wi", "1"],
    "MR_small_bigendian.dcm": ["+Wi", "1"],
    "MR_small_implicit.dcm": ["+Wi", "1"],
    "MR_small_padded.dcm": ["+Wi", "1"],
    "MR_small_jpeg_ls_lossless.dcm": ["+Wi", "1"],
    "JPEGLSNearLossless_16.dcm": ["+Wm"],
    "examples_overlay.dcm": ["+Wi", "1"],
    "rtdose_rle_1frame.dcm": ["+Wm"],
    "dicomdirtests/77654033/CT2/17106": ["+Wi", "1"],
    "dicomdirtests/98892001/CT5N/2062": ["+Wi", "1"],
    "dicomdirtests/98892003/MR700/4678": ["+Wi", "1"],
}
COLOUR_FILES = [
    "ExplVR_BigEnd.dcm",
    "SC_rgb_small_odd.dcm",
    "SC_rgb_small_odd_big_endian.dcm",
    "SC_rgb_rle.dcm",
    "SC_rgb_rle_16bit.dcm",
    "SC_rgb_rle_32bit.dcm",
    "SC_rgb_dcmtk_+eb+cr.dcm",
    "SC_rgb_dcmtk_+eb+cy+n1.dcm",
    "SC_rgb_dcmtk_+eb+cy+np.dcm",
    "SC_rgb_dcmtk_+eb+cy+s4.dcm",
    "SC_jpeg_no_color_transform.dcm",
    "SC_rgb_jpeg_gdcm.dcm",
    "SC_rgb_jpeg_lossy_gdcm.dcm",
    "SC_rgb_jls_lossy_line.dcm",
    "SC_rgb_jls_lossy_sample.dcm",
    "examples_palette.dcm",
    "examples_rgb_color.dcm",
    "examples_ybr_color.dcm",
]


def copied(tmp_path, name):
    """A copy of a file of pydicom, beside which DCMTK's picture can be written."""
    path = tmp_path / "copy.dcm"
    path.write_bytes((TEST_FILES / name).read_bytes())
    return path


@needs_dcmtk
@pytest.mark.parametrize("name", OPTIONS_OF_DCMTK)
def test_grey_files_of_pydicom_are_as_dcmtk_shows_them(tmp_path, name):
    path = copied(tmp_path, name)
    levels = decode_dicom(path, 1, "file")
    assert np.abs(levels - dcmtk(path, *OPTIONS_OF_DCMTK[name])).max() <= HALF_LEVEL


@needs_dcmtk
@pytest.mark.parametrize("name", COLOUR_FILES)
def test_colour_files_of_pydicom_are_as_dcmtk_shows_them(tmp_path, name):
    path = copied(tmp_path, name)
    assert (decode_dicom(path, 1, "file") == dcmtk(path)).all()


@needs_dcmtk
def test_colours_of_half_the_width_differ_by_rounding(tmp_path):
    path = copied(tmp_path, "SC_ybr_full_422_uncompressed.dcm")
    assert np.abs(decode_dicom(path, 1, "file") - dcmtk(path)).max() <= 1


@needs_dcmtk
def test_a_slope_with_a_fraction_differs_by_what_dcmtk_rounds(tmp_path):
    path = copied(tmp_path, "dicomdirtests/77654033/CR1/6154")
    header = pydicom.dcmread(path)
    # DCMTK rounds rescaled values to integers: half a unit, in grey levels.
    unit = 255 / (header.WindowWidth - 1)
    assert np.abs(decode_dicom(path, 1, "file") - dcmtk(path, "+Wi", "1")).max() <= HALF_LEVEL + unit


@pytest.mark.parametrize("name", ["JPEG2000.dcm", "MR_small_jp2klossless.dcm", "693_J2KI.dcm", "examples_jpeg2k.dcm"])
def test_jpeg_2000_has_the_values_that_pillow_decodes(name):
    header = pydicom.dcmread(TEST_FILES / name)
    decoder = pydicom.pixels.get_decoder(header.file_meta.TransferSyntaxUID)
    decoded, _ = decoder.as_array(header, index=0, decoding_plugin="pillow")
    if decoded.ndim == 3:
        assert (decode_dicom(TEST_FILES / name, 1, "file") == decoded).all()
        return
    values = modality(decoded, float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0)))
    assert np.abs(decode_dicom(TEST_FILES / name, 1, (40, 400)) - linear(values, 40, 400)).max() <= 0.5


def test_byte_orders_and_compressions_of_one_image_are_equal():
    files = ["rtdose.dcm", "rtdose_expb.dcm", "rtdose_rle.dcm"]
    first, *others = [[decode_dicom(TEST_FILES / name, frame, "auto") for frame in (1, 7, 15)] for name in files]
    for other in others:
        assert np.array_equal(first, other)
    little, big = (decode_dicom(TEST_FILES / f"liver{name}1frame.dcm", 1, "file") for name in ("_", "_expb_"))
    assert (little == big).all() and set(np.unique(little)) == {0, 255}


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("centre", "width"), [(40, 400), (-600.5, 1500), (10, 2)])
def test_functions_of_windows_are_those_of_the_standard(function, centre, width):
    values = np.linspace(-1200, 900, 211)
    expected = {
        "LINEAR": lambda value: linear(value, centre, width) / 255,
        "LINEAR_EXACT": lambda value: min(1.0, max(0.0, (value - centre) / width + 0.5)),
        "SIGMOID": lambda value: 1 / (1 + np.exp(np.clip(-4 * (value - centre) / width, -600, 600))),
    }[function]
    found = GreyWindow(centre, width, function).apply(values)
    assert np.allclose(found, [float(np.squeeze(expected(value))) for value in values], atol=1e-12)


def test_a_window_of_the_width_1_is_a_threshold():
    assert GreyWindow(100, 1).apply(np.array([99.0, 99.5, 100.0])).tolist() == [0, 0, 1]


def test_monochrome1_is_inverted_after_the_window(tmp_path):
    path = write(tmp_path / "x.dcm", RAMP.astype(np.uint16), PhotometricInterpretation="MONOCHROME1")
    # Inverted before, the window would show the other end of the values.
    assert np.abs(decode_dicom(path, None, (20, 30)) - (255 - linear(RAMP, 20, 30))).max() <= 0.5


@pytest.mark.parametrize(
    ("place", "expected"), [("file", linear(RAMP, 60, 50)), ("file:2", linear(RAMP, 100, 20))], ids=["first", "second"]
)
def test_one_of_several_windows_is_chosen(tmp_path, place, expected):
    path = write(tmp_path / "x.dcm", RAMP.astype(np.uint16), WindowCenter=["60", "100"], WindowWidth=["50", "20"])
    assert np.abs(decode_dicom(path, None, place) - expected).max() <= 0.5


def test_presets_and_percentiles(tmp_path):
    values = (RAMP * 10 - 700).astype(np.int16)
    path = write(tmp_path / "x.dcm", values, RescaleSlope="1", RescaleIntercept="-5")
    centre, width = PRESETS["lung"]
    assert np.abs(decode_dicom(path, None, "lung") - linear(values - 5, centre, width)).max() <= 0.5
    low, high = np.percentile(values, [0.5, 99.5])
    expected = np.clip((values - low) / (high - low), 0, 1) * 255
    assert np.abs(decode_dicom(path, None, "auto") - expected).max() <= 0.5


def test_bits_that_are_not_used_are_ignored(tmp_path):
    values = (RAMP * 7).astype(np.uint16)
    # Overlays of former editions are in the bits above; with a high bit of 13, two bits below are free.
    path = write(tmp_path / "above.dcm", values | 0xF000, BitsStored=12)
    below = write(tmp_path / "below.dcm", (values << 2) | 0xC003, BitsStored=12, HighBit=13)
    for file in (path, below):
        assert np.abs(decode_dicom(file, None, (500, 1001)) - linear(values, 500, 1001)).max() <= 0.5


def test_signs_are_extended_from_the_bits_that_are_used(tmp_path):
    values = (RAMP - 70).astype(np.int16)
    path = write(tmp_path / "x.dcm", values & 0x0FFF, BitsStored=12, PixelRepresentation=1)
    assert np.abs(decode_dicom(path, None, (0, 100)) - linear(values, 0, 100)).max() <= 0.5


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_padding_is_black_and_does_not_widen_the_range(tmp_path, photometric):
    values = (RAMP + 1000).astype(np.int16)
    values[:2] = -2000
    values[2:4] = -1999
    elements = {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1999, "PhotometricInterpretation": photometric}
    levels = decode_dicom(write(tmp_path / "x.dcm", values, **elements), None, "file")
    assert (levels[:4] == 0).all()
    low, high = values[4:].min(), values[4:].max()
    expected = (values[4:] - low) / (high - low) * 255
    if photometric == "MONOCHROME1":
        expected = 255 - expected
    assert np.abs(levels[4:] - expected).max() <= 0.5


def test_enhanced_files_have_a_window_and_a_slope_for_each_frame(tmp_path):
    frames = np.stack([RAMP, RAMP, RAMP]).astype(np.uint16)
    made = dataset(frames)
    groups = []
    for slope, centre in ((1, 50), (2, 100), (3, 150)):
        group = pydicom.Dataset()
        rescale = pydicom.Dataset()
        rescale.RescaleSlope, rescale.RescaleIntercept = str(slope), "0"
        window = pydicom.Dataset()
        window.WindowCenter, window.WindowWidth = str(centre), "80"
        group.PixelValueTransformationSequence = [rescale]
        group.FrameVOILUTSequence = [window]
        groups.append(group)
    shared = pydicom.Dataset()
    shared.FrameVOILUTSequence = groups[0].FrameVOILUTSequence
    del groups[0].FrameVOILUTSequence
    made.PerFrameFunctionalGroupsSequence = groups
    made.SharedFunctionalGroupsSequence = [shared]
    path = save(tmp_path / "x.dcm", made)
    for number in (1, 2, 3):
        expected = linear(RAMP * number, 50 * number, 80)
        assert np.abs(decode_dicom(path, number, "file") - expected).max() <= 0.5
    # The one in the middle, of which nothing else was asked.
    assert (decode_dicom(path, None, "file") == decode_dicom(path, 2, "file")).all()


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_each_of_many_frames_is_its_own(tmp_path, syntax, dtype):
    frames = np.random.default_rng(0).integers(0, 100, (5, 6, 7)).astype(dtype)
    stored = frames
    if syntax.endswith(".2.2"):
        stored = frames.byteswap() if dtype == np.int16 else frames
    made = dataset(stored)
    made.file_meta.TransferSyntaxUID = syntax
    path = save(tmp_path / "x.dcm", made)
    for number in range(1, 6):
        expected = linear(frames[number - 1], 50, 101)
        assert np.abs(decode_dicom(path, number, (50, 101)) - expected).max() <= 0.5
        # Those of a stream, too.
        assert (
            decode_dicom(io.BytesIO(path.read_bytes()), number, (50, 101)) == decode_dicom(path, number, (50, 101))
        ).all()


def test_a_frame_is_read_without_the_others(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (1000, 64, 64)).astype(np.uint8)
    path = write(tmp_path / "x.dcm", frames)
    decode_dicom(path, 1, "file")
    tracemalloc.start()
    try:
        assert (decode_dicom(path, 700, "file") == frames[699]).all()
        assert tracemalloc.get_traced_memory()[1] < frames.nbytes / 4
    finally:
        tracemalloc.stop()


def test_planes_of_colours(tmp_path):
    pixels = np.stack([RAMP, RAMP + 50, 255 - RAMP], -1).astype(np.uint8)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    made = dataset(pixels, PlanarConfiguration=1)
    made.PixelData = planes.tobytes()
    assert (decode_dicom(save(tmp_path / "x.dcm", made), None, "file") == pixels).all()


SEGMENTS = [0, 3, 0, 500, 9000, 1, 100, 60_000, 1, 53, 256, 0, 1, 65_535, 2, 2, 0, 0]
"""Three values, lines of 100 and 53 entries, one value, and a copy of the first two segments."""


@pytest.mark.parametrize("num_entries", [256, 200])
def test_palettes_in_segments(tmp_path, num_entries):
    made = dataset((RAMP % num_entries).astype(np.uint8), PhotometricInterpretation="PALETTE COLOR")
    for place, kind in enumerate(("Red", "Green", "Blue")):
        setattr(made, f"{kind}PaletteColorLookupTableDescriptor", [num_entries, 0, 16])
        words = np.array(SEGMENTS, np.uint16)
        words[2] = 1000 * place
        setattr(made, f"Segmented{kind}PaletteColorLookupTableData", words.tobytes())
    path = save(tmp_path / "x.dcm", made)
    expected = pydicom.pixels.apply_color_lut(made.pixel_array, pydicom.dcmread(path)) // 256
    assert (decode_dicom(path, None, "file") == expected).all()


def test_files_without_preamble_and_without_header(tmp_path):
    made = dataset(RAMP.astype(np.uint8))
    header = made.file_meta
    bare = tmp_path / "1.2.840.113619.2.5"
    del made.file_meta
    pydicom.dcmwrite(bare, made, implicit_vr=True, little_endian=True, enforce_file_format=False)
    assert bare.read_bytes()[:2] == b"\x08\x00"
    assert (read_image(bare, "")[0].numpy() == RAMP).all()
    made.file_meta = header
    content = save(tmp_path / "whole.dcm", made).read_bytes()
    without_preamble = tmp_path / "IM0001"
    without_preamble.write_bytes(content[132:])
    assert (read_image(without_preamble, "")[0].numpy() == RAMP).all()
    # Sets of Hugging Face have bytes instead of files.
    assert (read_image(io.BytesIO(content), "")[0].numpy() == RAMP).all()


def test_grey_and_colour_files_get_the_channels_that_are_asked_for(tmp_path):
    grey = write(tmp_path / "grey.dcm", RAMP.astype(np.uint8))
    colour = write(tmp_path / "colour.dcm", np.stack([RAMP] * 3, -1).astype(np.uint8))
    assert read_image(grey, "", "RGB").tolist() == [RAMP.tolist()] * 3
    assert read_image(colour, "", "L").tolist() == [RAMP.tolist()]


@pytest.mark.parametrize("window", ["lungs", "file:0", [40], [40, 0.5], [40, float("nan")], ["40", "400"], 3, None])
def test_invalid_windows_are_rejected(window):
    with rejects("window", window):
        check_window(window)
