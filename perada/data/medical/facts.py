# SPDX-License-Identifier: Apache-2.0
"""Facts about scanners in the headers of medical images, by which clients are compared; none identifies a patient."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from perada.core.text import abbreviated
from perada.data.medical.dicom import DicomFrame, windows_in_file
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import numbers, open_source, pixel_format, read_dataset, text
from perada.data.medical.nifti import read_volume
from perada.data.medical.reading import Kind, split_number
from perada.data.medical.windows import GreyWindow

PROPERTIES = ("modality", "manufacturer", "bits", "photometric interpretation", "window", "spacing in mm", "size")
"""The properties of an image that are compared."""
MAX_VALUES = 6
"""Values of a property that a line lists."""
_NONE = "none"

HeaderFacts = Mapping[str, str]
"""The value of each of :data:`PROPERTIES`, in words."""


def header_facts(source: str | Path | IO[bytes], kind: Kind) -> HeaderFacts:
    """Return the facts in the header of a medical image that can be read.

    Raises:
        MedicalImageError: If the header is damaged.
    """
    if isinstance(source, str | Path):
        source = split_number(source).file
    if kind == "NIfTI":
        volume = read_volume(source)
        values = (
            "NIfTI",
            "unknown",
            volume.values.dtype.name,
            _NONE,
            _NONE if volume.limits is None else f"{volume.limits[0]:g} to {volume.limits[1]:g}",
            " x ".join(f"{distance:.3g}" for distance in volume.spacing),
            " x ".join(str(side) for side in volume.values.shape),
        )
        return dict(zip(PROPERTIES, values, strict=True))
    with open_source(source) as file:
        dataset = read_dataset(file, with_pixels=False)
    stored_as = pixel_format(dataset)
    frame = DicomFrame(dataset, stored_as, 0)
    names = [text(dataset, "Manufacturer"), text(dataset, "ManufacturerModelName")]
    sign = "signed" if stored_as.is_signed else "unsigned"
    values = (
        text(dataset, "Modality") or "unknown",
        " ".join(name for name in names if name) or "unknown",
        f"{stored_as.bits_stored} of {stored_as.bits_allocated}, {sign}",
        stored_as.photometric,
        _describe_window(frame),
        _describe_spacing(frame),
        f"{stored_as.columns} x {stored_as.rows}",
    )
    return dict(zip(PROPERTIES, values, strict=True))


def _describe_spacing(frame: DicomFrame) -> str:
    """Return the distances between rows and columns in words."""
    try:
        spacing = numbers(frame.of_frame("PixelMeasuresSequence", "PixelSpacing"), "PixelSpacing")
        spacing = spacing or numbers(frame.dataset, "ImagerPixelSpacing")
    except MedicalImageError:
        return "damaged"
    return " x ".join(f"{distance:.3g}" for distance in spacing) or _NONE


def _describe_window(frame: DicomFrame) -> str:
    """Return the first window of a frame in words."""
    try:
        windows = windows_in_file(frame)
    except MedicalImageError as error:
        return error.reason
    if not windows:
        return _NONE
    first = windows[0]
    if not isinstance(first, GreyWindow):
        return "table"
    function = "" if first.function == "LINEAR" else f" {first.function}"
    return f"centre {first.centre:g}, width {first.width:g}{function}"


@dataclass(frozen=True)
class ClientHeaders:
    """The headers of a client's medical images.

    Attributes:
        counts: Number of images with each value, by property; empty if the client has no medical images.
    """

    counts: Mapping[str, Counter[str]]

    @classmethod
    def of_images(cls, facts_of_images: Sequence[HeaderFacts]) -> "ClientHeaders":
        """Count the values of images."""
        counts: dict[str, Counter[str]] = {}
        for facts in facts_of_images:
            for name, value in facts.items():
                counts.setdefault(name, Counter())[value] += 1
        return cls(counts)

    def record(self) -> dict[str, dict[str, int]]:
        """Return plain values, for a JSON file."""
        return {name: dict(counter) for name, counter in self.counts.items()}

    def describe(self) -> str:
        """Return all properties in one line."""
        parts = []
        for name, counter in self.counts.items():
            values = [f"{value} ({count})" if len(counter) > 1 else value for value, count in counter.most_common()]
            parts.append(f"{name} {abbreviated(values, MAX_VALUES)}")
        return "; ".join(parts)


def differences(names: Sequence[str], headers: Sequence[ClientHeaders]) -> list[str]:
    """Return a line for each property of which clients have different values.

    Args:
        names: Names of the clients.
        headers: Headers of each client. Clients without medical images are left out.
    """
    lines = []
    for name in PROPERTIES:
        clients_of_values: dict[tuple[str, ...], list[str]] = {}
        for client, header in zip(names, headers, strict=True):
            if name in header.counts:
                clients_of_values.setdefault(tuple(sorted(header.counts[name])), []).append(client)
        if len(clients_of_values) < 2:
            continue
        parts = []
        for values, clients in clients_of_values.items():
            parts.append(f"{abbreviated(clients, MAX_VALUES)}: {abbreviated(values, MAX_VALUES)}")
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines
