# SPDX-License-Identifier: Apache-2.0
"""DICOM files and NIfTI volumes that tests write, and the decoders of DCMTK, which they are compared with."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pydicom = pytest.importorskip("pydicom", reason="needs the extra medical")
pytest.importorskip("gdcm", reason="needs the extra medical")

from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402  # after the check that it is installed
from pydicom.sequence import Sequence  # noqa: E402
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid  # noqa: E402

TEST_FILES = Path(pydicom.data.__file__).parent / "test_files"
PROGRAMS = ("dcm2pnm", "dcmj2pnm", "dcml2pnm")
needs_dcmtk = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason="compares with the programs of DCMTK (apt-get install dcmtk)"
)


def dataset(pixels, **elements):
    """Return a file in memory with grey or colour pixels (H, W), (frames, H, W), or (H, W, 3) of 8 bits."""
    pixels = np.asarray(pixels)
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = CTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["perada"])
    made.SOPClassUID = CTImageStorage
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID
    made.Modality = "CT"
    is_colour = pixels.ndim == 3 and pixels.shape[-1] == 3
    made.SamplesPerPixel = 3 if is_colour else 1
    if is_colour:
        made.PlanarConfiguration = 0
    made.PhotometricInterpretation = "RGB" if is_colour else "MONOCHROME2"
    made.Rows, made.Columns = pixels.shape[:2] if is_colour else pixels.shape[-2:]
    if pixels.ndim == 3 and not is_colour:
        made.NumberOfFrames = len(pixels)
    made.BitsAllocated = 8 * pixels.dtype.itemsize
    made.BitsStored = made.BitsAllocated
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in elements.items():
        setattr(made, name, value)
    if "BitsStored" in elements and "HighBit" not in elements:
        made.HighBit = made.BitsStored - 1
    content = pixels.tobytes()
    made.PixelData = content + b"\0" * (len(content) % 2)
    made["PixelData"].VR = "OB" if made.BitsAllocated <= 8 else "OW"
    return made


def save(path, made, **options):
    """Write a file, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, **{"enforce_file_format": True} | options)
    return path


def write(path, pixels, **elements):
    """Write a file with pixels, and return its path."""
    return save(path, dataset(pixels, **elements))


def table(first, entries, bits=16, num_entries=None):
    """Return the sequence of a modality or VOI lookup table."""
    item = Dataset()
    item.LUTDescriptor = [len(entries) if num_entries is None else num_entries, first, bits]
    item["LUTDescriptor"].VR = "SS" if first < 0 else "US"
    item.LUTData = list(entries)
    item["LUTData"].VR = "US"
    item.ModalityLUTType = "US"
    return Sequence([item])


def dcmtk(path, *options, depth=16):
    """Return the pixels that DCMTK shows, in grey levels from 0 to 255, which have fractions if the depth is 16."""
    target = Path(path).with_suffix(".dcmtk.png")
    kind = "--write-16-bit-png" if depth == 16 else "--write-png"
    for program in PROGRAMS:
        # Overlays are not displayed.
        finished = subprocess.run([program, "-q", kind, "-O", *options, path, target], check=False, capture_output=True)
        if finished.returncode == 0:
            with Image.open(target) as image:
                pixels = np.asarray(image).astype(np.float64)
                return pixels / 257 if image.mode.startswith("I") else pixels
    raise AssertionError(f"DCMTK cannot read {path}")


def modality(values, slope=1.0, intercept=0.0):
    """Rescale stored values by hand."""
    return np.asarray(values, np.float64) * slope + intercept


def linear(values, centre, width):
    """Return grey levels by the formula of PS3.3, C.11.2.1.2.1, pixel by pixel."""
    shown = []
    for value in np.asarray(values, np.float64).ravel():
        if value <= centre - 0.5 - (width - 1) / 2:
            shown.append(0.0)
        elif value > centre - 0.5 + (width - 1) / 2:
            shown.append(255.0)
        else:
            shown.append(((value - (centre - 0.5)) / (width - 1) + 0.5) * 255)
    return np.array(shown).reshape(np.shape(values))


def segmentation(image, masks, kind="BINARY", names=None, frame_numbers=None):
    """Return a DICOM SEG with a frame for each segment and image.

    Args:
        image: A file of the series, whose size and series the segmentation has.
        masks: By SOPInstanceUID of an image and number of a segment, its pixels (H, W): ones, or numbers up to 255 if
            the kind is FRACTIONAL, or the numbers of segments if it is LABELMAP.
        kind: Its SegmentationType.
        names: Name of each segment by its number.
        frame_numbers: Number of the frame of each mask in a file with several.
    """
    made = dataset(np.zeros((len(masks), image.Rows, image.Columns), np.uint8))
    sop_class = "1.2.840.10008.5.1.4.1.1.66.7" if kind == "LABELMAP" else "1.2.840.10008.5.1.4.1.1.66.4"
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = sop_class
    made.Modality = "SEG"
    made.SegmentationType = kind
    made.MaximumFractionalValue = 255
    made.SegmentSequence = Sequence()
    for number, name in (names or {1: "lesion"}).items():
        item = Dataset()
        item.SegmentNumber = number
        item.SegmentLabel = name
        made.SegmentSequence.append(item)
    referenced = Dataset()
    referenced.SeriesInstanceUID = image.SeriesInstanceUID
    made.ReferencedSeriesSequence = Sequence([referenced])
    made.PerFrameFunctionalGroupsSequence = Sequence()
    for place, (instance, number) in enumerate(masks):
        group, segment, derivation, source = Dataset(), Dataset(), Dataset(), Dataset()
        segment.ReferencedSegmentNumber = number
        source.ReferencedSOPInstanceUID = instance
        if frame_numbers:
            source.ReferencedFrameNumber = frame_numbers[place]
        derivation.SourceImageSequence = Sequence([source])
        if kind != "LABELMAP":
            group.SegmentIdentificationSequence = Sequence([segment])
        group.DerivationImageSequence = Sequence([derivation])
        made.PerFrameFunctionalGroupsSequence.append(group)
    pixels = np.stack([*masks.values()])
    made.NumberOfFrames = len(masks)
    if kind == "BINARY":
        made.BitsAllocated = made.BitsStored = 1
        made.HighBit = 0
        content = np.packbits(pixels.ravel(), bitorder="little").tobytes()
    else:
        content = pixels.astype(np.uint8).tobytes()
    made.PixelData = content + b"\0" * (len(content) % 2)
    return made
