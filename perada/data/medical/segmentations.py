# SPDX-License-Identifier: Apache-2.0
"""DICOM segmentations (PS3.3, A.51): which pixels of an image are in which of their named segments."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perada.data.medical.dicom import open_frame, stored_values
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import integer, open_source, pixel_format, read_dataset, text

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

SEGMENTATION_CLASSES = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
"""SOP classes of segmentations, and of those that store the number of a pixel's segment (label maps)."""
LABELMAP = "LABELMAP"
KEYWORDS = ("SegmentationType", "SegmentSequence", "MaximumFractionalValue", "ReferencedSeriesSequence")
_LARGEST_NAME = 64
"""Characters of a SegmentLabel, at most (PS3.5, 6.2, LO)."""


@dataclass(frozen=True)
class ImageReference:
    """An image to which a segmentation may refer.

    Attributes:
        instance: Its SOPInstanceUID.
        series: Its SeriesInstanceUID.
        frame: Number of its frame, from 1.
        is_single: Whether its file has no other frame.
    """

    instance: str
    series: str
    frame: int
    is_single: bool


@dataclass(frozen=True)
class _SegmentFrame:
    """A frame of a segmentation: the number of its segment, and the images that it refers to with their frames."""

    segment: int
    frames_of_image: Mapping[str, Sequence[int]]

    def shows(self, image: ImageReference) -> bool:
        """Return whether the frame refers to an image. Without numbers of frames it refers to all of them."""
        if image.instance not in self.frames_of_image:
            return False
        frames = self.frames_of_image[image.instance]
        return image.is_single or not frames or image.frame in frames


@dataclass(frozen=True)
class DicomSegmentation:
    """A segmentation of the images of a series.

    Attributes:
        segment_names: Name of each segment by its number, from 1.
        series: SeriesInstanceUID of the images, if it is known.
    """

    segment_names: Mapping[int, str]
    series: frozenset[str]
    _frames: Sequence[_SegmentFrame]
    _dataset: "Dataset"

    def mask_of(self, image: ImageReference) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the number of the segment of each pixel (H, W) of an image; 0 for none.

        Raises:
            MedicalImageError: If the image is of another series, or a pixel is in two segments.
        """
        is_referenced = any(image.instance in frame.frames_of_image for frame in self._frames)
        if not is_referenced and image.series not in self.series:
            raise MedicalImageError("it is the segmentation of another series than its image", "correct the pair")
        stored_as = pixel_format(self._dataset)
        mask = np.zeros((stored_as.rows, stored_as.columns), np.int64)
        for index, frame in enumerate(self._frames):
            if not frame.shows(image):
                continue
            segments = self._segments_of_frame(index, frame.segment)
            if ((mask > 0) & (segments > 0) & (mask != segments)).any():
                raise MedicalImageError("two of its segments overlap", "give each pixel one segment")
            mask = np.maximum(mask, segments)
        return mask

    def _segments_of_frame(self, index: int, segment: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the number of the segment of each pixel (H, W) of a frame; 0 for none."""
        values = stored_values(open_frame(self._dataset, index + 1)).astype(np.int64)
        kind = text(self._dataset, "SegmentationType")
        if kind == LABELMAP:
            return values
        least = 1
        if kind == "FRACTIONAL":
            # A pixel belongs to a segment from a fraction of one half on.
            least = (integer(self._dataset, "MaximumFractionalValue", 1, 255) + 1) // 2
        return np.where(values >= least, segment, 0)


def read_segmentation(source: str | Path | IO[bytes]) -> DicomSegmentation:
    """Read a segmentation. Those of some paths stay in memory, since all images of a series need theirs.

    Raises:
        MedicalImageError: If it is damaged, or another kind of file.
    """
    if isinstance(source, str | Path):
        state = os.stat(source)
        return _read_path(str(source), state.st_size, state.st_mtime_ns)
    return _read_segmentation(source)


@lru_cache(maxsize=4)
def _read_path(path: str, size: int, modified_ns: int) -> DicomSegmentation:
    """Read a segmentation. Size and time of the last modification are part of the key of the cache."""
    return _read_segmentation(path)


def _read_segmentation(source: str | Path | IO[bytes]) -> DicomSegmentation:
    with open_source(source) as file:
        dataset = read_dataset(file, with_pixels=True, more_keywords=KEYWORDS)
    if text(dataset, "SOPClassUID") not in SEGMENTATION_CLASSES:
        raise MedicalImageError("it is a DICOM file, but no segmentation", "save masks as DICOM SEG, NIfTI or PNG")
    try:
        names = {int(item.SegmentNumber): _printed_name(item) for item in dataset.get("SegmentSequence") or []}
        series = frozenset(str(item.SeriesInstanceUID) for item in dataset.get("ReferencedSeriesSequence") or [])
        groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
        shared = (dataset.get("SharedFunctionalGroupsSequence") or [None])[0]
        is_labelmap = text(dataset, "SegmentationType") == LABELMAP
        frames = [_read_segment_frame(group, shared, is_labelmap) for group in groups]
    except Exception as error:  # pydicom converts a value when it is first used
        raise MedicalImageError(f"its description of segments is damaged ({type(error).__name__})") from None
    if len(frames) != pixel_format(dataset).num_frames:
        raise MedicalImageError(f"it describes {len(frames)} frames, but has {pixel_format(dataset).num_frames}")
    unnamed = sorted({frame.segment for frame in frames if frame.segment} - {*names})
    if unnamed:
        raise MedicalImageError(f"it has frames of the segment {unnamed[0]}, which it does not describe")
    return DicomSegmentation(names, series, frames, dataset)


def _printed_name(item: "Dataset") -> str:
    """Return the name of a segment, as it is printed in one line."""
    return " ".join(str(item.SegmentLabel).split())[:_LARGEST_NAME]


def _read_segment_frame(frame_groups: "Dataset", shared_groups: "Dataset | None", is_labelmap: bool) -> _SegmentFrame:
    """Read a frame from its functional groups and those that all frames share."""
    segment = 0
    if not is_labelmap:
        identification = frame_groups.get("SegmentIdentificationSequence")
        if not identification and shared_groups is not None:
            identification = shared_groups.get("SegmentIdentificationSequence")
        segment = int(identification[0].ReferencedSegmentNumber)
    derivations = frame_groups.get("DerivationImageSequence")
    if not derivations and shared_groups is not None:
        derivations = shared_groups.get("DerivationImageSequence")
    frames_of_image: dict[str, list[int]] = {}
    for derivation in derivations or []:
        for image in derivation.get("SourceImageSequence") or []:
            numbers = image.get("ReferencedFrameNumber")
            frames = frames_of_image.setdefault(str(image.ReferencedSOPInstanceUID), [])
            if numbers is not None:
                frames += [int(number) for number in np.atleast_1d(numbers)]
    return _SegmentFrame(segment, frames_of_image)


class _FileReference(NamedTuple):
    """The identifiers of a file and of its series, and its number of frames."""

    instance: str
    series: str
    num_frames: int


@lru_cache(maxsize=2**16)
def _read_reference_of_path(path: str, size: int, modified_ns: int) -> _FileReference:
    """Read the reference of a file. Size and time of the last modification are part of the key of the cache."""
    return _read_reference(path)


def _read_reference(source: str | Path | IO[bytes]) -> _FileReference:
    with open_source(source) as file:
        dataset = read_dataset(file, with_pixels=False, with_identity=True)
    num_frames = integer(dataset, "NumberOfFrames", 1, 2**31 - 1, default=1)
    return _FileReference(text(dataset, "SOPInstanceUID"), text(dataset, "SeriesInstanceUID"), num_frames)


def image_reference(source: str | Path | IO[bytes], number: int | None = None) -> ImageReference:
    """Return what a segmentation calls a frame of a DICOM file, by its number from 1; None for the one in the middle.

    Raises:
        MedicalImageError: If its header is damaged.
    """
    if isinstance(source, str | Path):
        state = os.stat(source)
        reference = _read_reference_of_path(str(source), state.st_size, state.st_mtime_ns)
    else:
        reference = _read_reference(source)
    frame = number
    if frame is None:
        frame = reference.num_frames // 2 + 1
    return ImageReference(reference.instance, reference.series, frame, is_single=reference.num_frames == 1)
