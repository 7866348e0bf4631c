# SPDX-License-Identifier: Apache-2.0
"""Damaged, hostile and other DICOM files are named with a reason and a remedy, and take bounded memory and time."""

import gzip
import io
import random
import resource
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest

from perada.data import ImageFolder
from perada.data.batches.transforms import UnreadableImageError, read_image
from perada.data.medical import isolation
from perada.data.medical.codestreams import declared_size
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.isolation import DECODER
from perada.data.medical.reading import MedicalReading
from perada.data.medical.segmented_tables import expand_segments
from tests.data.dicom_files import TEST_FILES, dataset, pydicom, save, write
from tests.rejections import raises_naming

nibabel = pytest.importorskip("nibabel")

RAMP = np.arange(144).reshape(12, 12)
MEGABYTE = 2**20


def problem_of(source, **options):
    """The message for a file that cannot be read, after its name."""
    with pytest.raises(UnreadableImageError) as caught:
        read_image(source, "leave it out", **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MR_truncated.dcm", "8192 bytes.*8130.*truncated"),
        ("rtplan.dcm", "no pixel data .RT Plan Storage"),
        ("reportsi.dcm", "no pixel data .Basic Text SR Storage"),
        ("waveform_ecg.dcm", "no pixel data .12-lead ECG"),
        ("dicomdirtests/DICOMDIR", "DICOMDIR"),
        ("JPEG-lossy.dcm", "12 bits is not supported"),
        ("JPEG2000-embedded-sequence-delimiter.dcm", "256 x 1024 pixels, but its compressed pixel data"),
        ("badVR.dcm", "NumberOfFrames"),
        ("no_meta.dcm", "no DICOM file.*encrypted"),
    ],
)
def test_files_of_pydicom_that_are_no_images(name, reason):
    path = TEST_FILES / name
    with pytest.raises(UnreadableImageError, match=f"{name}.*{reason}.*: .+"):
        read_image(path, "leave it out")


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        ({"Rows": 60000, "Columns": 60000}, "60000 x 60000 pixels"),
        ({"Rows": 1000}, "24000 bytes of pixel data, but it has 288"),
        ({"Rows": 0}, "Rows"),
        ({"NumberOfFrames": "1000000"}, "bytes of pixel data"),
        ({"NumberOfFrames": "0"}, "NumberOfFrames"),
        ({"BitsAllocated": 24}, "24 bits"),
        ({"BitsStored": 17}, "BitsStored"),
        ({"HighBit": 3, "BitsStored": 12}, "HighBit"),
        ({"SamplesPerPixel": 3}, "photometric interpretation"),
        ({"PhotometricInterpretation": "CMYK"}, "photometric interpretation"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "Palette"),
        ({"RescaleSlope": "0"}, "RescaleSlope is 0"),
        ({"WindowCenter": "40", "WindowWidth": "0"}, "width 0.*auto"),
        ({"WindowCenter": "40", "WindowWidth": "40", "VOILUTFunction": "CUBIC"}, "VOILUTFunction"),
    ],
)
def test_impossible_headers_are_named(tmp_path, elements, reason):
    path = write(tmp_path / "x.dcm", RAMP.astype(np.uint16), **elements)
    with pytest.raises(UnreadableImageError, match=f"x.dcm.*{reason}"):
        read_image(path, "leave it out")


def test_unknown_and_encrypted_files_are_named(tmp_path):
    made = dataset(RAMP.astype(np.uint16))
    made.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.100"
    made.PixelData = pydicom.encaps.encapsulate([b"\0\0\1\xba"])
    made["PixelData"].is_undefined_length = True
    assert "transfer syntax is not supported" in problem_of(save(tmp_path / "video.dcm", made))

    made = dataset(RAMP.astype(np.uint16))
    del made.PixelData
    made.EncryptedAttributesSequence = [pydicom.Dataset()]
    assert "encrypted" in problem_of(save(tmp_path / "secret.dcm", made))
    # The envelope of a file that is encrypted as a whole.
    (tmp_path / "whole.dcm").write_bytes(b"\x30\x82\x01\x00" + bytes(300))
    assert "encrypted" in problem_of(tmp_path / "whole.dcm")
    assert "brain" in problem_of(write(tmp_path / "x.dcm", RAMP.astype(np.uint16), Modality="MR"), medical=brain())


def brain():
    return MedicalReading(window="brain")


def test_broken_files_are_left_out(tmp_path):
    for part in ("train", "test"):
        for name in ("a", "b"):
            for number in range(2):
                write(
                    tmp_path / part / name / f"{number}.dcm", (RAMP + number).astype(np.uint16), PatientID=str(number)
                )
    (tmp_path / "train" / "a" / "report.dcm").write_bytes((TEST_FILES / "reportsi.dcm").read_bytes())
    images = ImageFolder(str(tmp_path), size=12, dicom_group=None)
    readable = 0
    for row in range(len(images)):
        if "report" in images.files[row]:
            with raises_naming(UnreadableImageError, "report.dcm"):
                images[row]
        else:
            assert images[row][0].shape == (3, 12, 12)
            readable += 1
    assert readable == 4


def test_a_decoder_that_crashes_is_started_again(tmp_path):
    made = pydicom.dcmread(TEST_FILES / "SC_rgb_jpeg_gdcm.dcm")
    intact = read_image(TEST_FILES / "SC_rgb_jpeg_gdcm.dcm", "")
    process = DECODER._process
    # As a decoder that segfaults.
    process.kill()
    process.wait()
    assert (read_image(TEST_FILES / "SC_rgb_jpeg_gdcm.dcm", "") == intact).all()
    assert DECODER._process is not process
    frame = bytearray(pydicom.encaps.get_frame(made.PixelData, 0, number_of_frames=1))
    # A table of codes that gives no code.
    frame[60:100] = bytes(40)
    made.PixelData = pydicom.encaps.encapsulate([bytes(frame)])
    assert "damaged" in problem_of(save(tmp_path / "x.dcm", made))
    assert (read_image(TEST_FILES / "SC_rgb_jpeg_gdcm.dcm", "") == intact).all()


def test_a_decoder_that_does_not_end_is_stopped(monkeypatch):
    read_image(TEST_FILES / "MR_small_jpeg_ls_lossless.dcm", "")
    monkeypatch.setattr(isolation, "SECONDS", 0.0)
    monkeypatch.setattr(isolation, "SECONDS_PER_MEGABYTE", 0.0)
    monkeypatch.setattr(isolation, "write_message", lambda *_: time.sleep(0.2))
    assert "not decoded in 0 s" in problem_of(TEST_FILES / "MR_small_jpeg_ls_lossless.dcm")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("SC_rgb_jpeg_dcmtk.dcm", (100, 100)),
        ("MR_small_jpeg_ls_lossless.dcm", (64, 64)),
        ("MR_small_jp2klossless.dcm", (64, 64)),
        ("JPGExtended.dcm", (256, 1024)),
        ("SC_rgb_small_odd_jpeg.dcm", (3, 3)),
    ],
)
def test_the_size_of_a_compressed_frame_is_found_in_it(name, size):
    content = pydicom.dcmread(TEST_FILES / name).PixelData
    frame = pydicom.encaps.get_frame(content, 0, number_of_frames=1)
    assert declared_size(frame) == size
    for length in range(0, 60):
        assert declared_size(frame[:length]) in (None, size)


def test_a_frame_larger_than_its_header_is_not_decoded(tmp_path):
    made = pydicom.dcmread(TEST_FILES / "MR_small_jp2klossless.dcm")
    frame = bytearray(pydicom.encaps.get_frame(made.PixelData, 0, number_of_frames=1))
    place = frame.find(b"\xff\x4f\xff\x51") + 8
    frame[place : place + 8] = struct.pack(">II", 60000, 60000)
    made.PixelData = pydicom.encaps.encapsulate([bytes(frame)])
    assert "64 x 64 pixels, but its compressed pixel data 60000 x 60000" in problem_of(save(tmp_path / "x.dcm", made))


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_small_files_that_declare_much_take_little_memory(tmp_path):
    before = peak_memory()
    made = dataset(RAMP.astype(np.uint8))
    content = save(tmp_path / "x.dcm", made).read_bytes()
    # The length of an element: Rows of 4 GB.
    place = content.index(b"\x28\x00\x10\x00US")
    long_element = content[:place] + b"\x28\x00\x10\x00OB\0\0\xf0\xff\xff\xff" + content[place + 8 :]
    problem_of(io.BytesIO(long_element))
    (tmp_path / "long.dcm").write_bytes(long_element)
    # Python reserves memory that it does not use.
    tracemalloc.start()
    try:
        problem_of(tmp_path / "long.dcm")
        assert tracemalloc.get_traced_memory()[1] < 20 * MEGABYTE
    finally:
        tracemalloc.stop()
    # A volume of 8 GB, compressed to few bytes.
    volume = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)).to_bytes()
    large = bytearray(volume)
    large[42:48] = struct.pack("<3h", 2000, 2000, 2000)
    assert "bytes" in problem_of(io.BytesIO(gzip.compress(bytes(large))))
    # 600 MB of zeros after a small volume.
    assert read_image(io.BytesIO(gzip.compress(volume) + gzip.compress(bytes(64 * MEGABYTE))), "").shape == (1, 4, 4)
    assert peak_memory() - before < 60 * MEGABYTE


def test_a_compressed_frame_too_short_for_its_header_is_not_decoded(tmp_path):
    made = pydicom.dcmread(TEST_FILES / "MR_small_RLE.dcm")
    made.Rows, made.Columns = 12_000, 12_000
    tracemalloc.start()
    try:
        assert "12000 x 12000 pixels" in problem_of(save(tmp_path / "x.dcm", made))
        assert tracemalloc.get_traced_memory()[1] < 20 * MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "segments", [[], [1, 5, 9], [2, 1, 0, 0], [0, 1, 7, 2, 9, 3, 0], [0, 1, 7, 3, 1, 1], [0, 1, 7, 2, 65_535, 0, 50]]
)
def test_damaged_segments_of_palettes_are_named(segments):
    with pytest.raises(MedicalImageError, match="segments"):
        expand_segments(segments, 256)


def test_segments_that_stand_for_very_many_entries_give_those_that_are_declared():
    copies = [0, 2, 1, 2] + [1, 65_535, 9] * 5 + [2, 65_535, 4, 0] * 2000
    assert len(expand_segments(copies, 65_536)) == 65_536


def test_deflated_files_are_inflated_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("perada.data.medical.headers.LARGEST_INFLATED", 4 * MEGABYTE)
    path = TEST_FILES / "image_dfl.dcm"
    assert read_image(path, "").shape == (1, 512, 512)
    content = path.read_bytes()
    start = 144 + int.from_bytes(content[140:144], "little")
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bomb = content[:start] + deflater.compress(bytes(8 * MEGABYTE)) + deflater.flush()
    assert "inflates to more than 4 MiB" in problem_of(io.BytesIO(bomb))


def test_sequences_in_sequences_end_in_an_error():
    header = dataset(RAMP.astype(np.uint8))
    stream = io.BytesIO()
    del header.PixelData
    pydicom.dcmwrite(stream, header, enforce_file_format=True)
    item = b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    nested = (b"\x00\x52\x30\x92SQ\0\0\xff\xff\xff\xff" + item) * 20_000
    problem_of(io.BytesIO(stream.getvalue() + nested))


SMALL_FILES = [path for path in sorted(TEST_FILES.glob("*.dcm")) if path.stat().st_size < 40_000]
FOUR_BYTES = [b"\xff\xff\xff\xff", b"\xfe\xff\xff\x7f", b"\0\0\0\x80", b"\xff\xff\xff\x0f"]


@pytest.fixture(scope="module")
def intact_files():
    """Contents that are damaged below: files of pydicom, and volumes with and without compression."""
    contents = [path.read_bytes() for path in SMALL_FILES]
    for dtype in (np.int16, np.float32):
        values = np.arange(6 * 7 * 8, dtype=dtype).reshape(6, 7, 8)
        volume = nibabel.Nifti1Image(values, np.diag([2, -1, 3, 1])).to_bytes()
        contents += [volume, gzip.compress(volume)]
    return contents


def damaged(content, source):
    """A copy with bytes replaced, inserted and removed, more often in the header, or cut off."""
    content = bytearray(content)
    for _ in range(source.choice([1, 1, 2, 4, 10, 40])):
        place = source.randrange(min(len(content), source.choice([len(content), len(content), 2000, 600])))
        kind = source.random()
        if kind < 0.5:
            content[place] = source.randrange(256)
        elif kind < 0.65:
            content[place : place + 4] = source.choice(FOUR_BYTES)
        elif kind < 0.75:
            content[place : place + 2] = b"\xff\xff"
        elif kind < 0.85:
            start = source.randrange(len(content))
            content[place:place] = content[start : start + source.randrange(64)]
        elif kind < 0.95:
            del content[place : place + source.randrange(64)]
        else:
            content = content[: max(4, place)]
        if len(content) < 4:
            return b"DICM"
    return bytes(content)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.slow)], ids=str)
def test_damaged_files_are_read_or_named(intact_files, tmp_path, seeds):
    before = peak_memory()
    outcomes = {"read": 0, "named": 0}
    for seed in seeds:
        source = random.Random(seed)
        content = damaged(source.choice(intact_files), source)
        window = source.choice(["file", "auto", (40.0, 400.0), "lung", "file:2"])
        file = io.BytesIO(content)
        if seed % 2:
            file = tmp_path / "x.dcm"
            file.write_bytes(content)
        try:
            pixels = read_image(file, "leave it out", "RGB", medical=MedicalReading(window))
        except UnreadableImageError as error:
            assert "\n" not in str(error)
            outcomes["named"] += 1
        else:
            assert len(pixels) == 3
            outcomes["read"] += 1
    assert min(outcomes.values()) > len(seeds) / 20
    assert peak_memory() - before < 200 * MEGABYTE
