# SPDX-License-Identifier: Apache-2.0
"""Write DICOM files of three hospitals for the recipe ``sites_dicom``: drawn nodules in the slices of a CT.

``python -m perada.studies.dicom_sites FOLDER`` writes ``FOLDER/sites`` and ``FOLDER/public``, with which a recipe or a
deployment can be tried before it reads images of patients.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perada.core.checks import installed
from perada.system.files import check_output_folder

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
CLASSES = ("benign", "malignant")
SIDE = 64
"""Height and width of a slice in pixels."""
SLICES_PER_PATIENT = 2
LUNG = -800.0
"""Hounsfield units of the lung around a nodule."""
NODULE = 40.0


@dataclass(frozen=True)
class Scanner:
    """The scanner of a hospital.

    Attributes:
        site: Name of the hospital.
        manufacturer: Its entry in the header.
        noise: Standard deviation of the noise in Hounsfield units.
        intercept: Hounsfield units of the stored value 0. Negative ones are stored without a sign.
        bits: Bits of a stored value.
    """

    site: str
    manufacturer: str
    noise: float
    intercept: float
    bits: int


SCANNERS = (
    Scanner("north", "Alpha", noise=100, intercept=-1024, bits=12),
    Scanner("south", "Beta", noise=250, intercept=0, bits=16),
    Scanner("west", "Gamma", noise=400, intercept=-1024, bits=16),
)


def draw_slice(is_malignant: bool, noise: float, rng: np.random.Generator) -> FloatArray:
    """Return a slice (H, W) in Hounsfield units with one nodule: round if it is benign, with spikes otherwise."""
    centre = SIDE / 2 + rng.uniform(-8, 8, 2)
    row = np.arange(SIDE)[:, None] - centre[0]
    column = np.arange(SIDE)[None, :] - centre[1]
    angle = np.arctan2(row, column)
    radius = np.full((SIDE, SIDE), rng.uniform(9, 15))
    if is_malignant:
        num_spikes = rng.integers(6, 11)
        radius *= 1 + rng.uniform(0.08, 0.3) * np.cos(num_spikes * angle + rng.uniform(0, 2 * np.pi))
    # The edge is a few pixels wide, as after the reconstruction of a slice.
    inside = 1 / (1 + np.exp(np.hypot(row, column) - radius))
    values: FloatArray = LUNG + (NODULE - LUNG) * inside + rng.normal(0, noise, (SIDE, SIDE))
    return values


def make_file(values: FloatArray, scanner: Scanner, patient: str, number: int) -> "Dataset":
    """Return a DICOM file with a slice.

    Args:
        values: The slice (H, W) in Hounsfield units.
        scanner: Its scanner.
        patient: The invented PatientID.
        number: Number of the slice, from which its UIDs follow.
    """
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    is_signed = scanner.intercept == 0
    least = -(2 ** (scanner.bits - 1)) if is_signed else 0
    stored = np.clip(np.rint(values - scanner.intercept), least, least + 2**scanner.bits - 1)
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID = CTImageStorage
    file.SOPInstanceUID = generate_uid(entropy_srcs=[patient, str(number)])
    file.StudyInstanceUID = generate_uid(entropy_srcs=[patient, "study"])
    file.SeriesInstanceUID = generate_uid(entropy_srcs=[patient, "series"])
    file.FrameOfReferenceUID = generate_uid(entropy_srcs=[patient, "frame of reference"])
    file.PatientID = patient
    file.PatientName = "Invented^Patient"
    file.PatientBirthDate = ""
    file.PatientSex = ""
    file.StudyDate = ""
    file.StudyTime = ""
    file.StudyID = ""
    file.AccessionNumber = ""
    file.ReferringPhysicianName = ""
    file.PositionReferenceIndicator = ""
    file.Modality = "CT"
    file.Manufacturer = scanner.manufacturer
    file.SeriesNumber = 1
    file.InstanceNumber = number
    file.AcquisitionNumber = 1
    file.ImageType = ["DERIVED", "SECONDARY", "AXIAL"]
    file.KVP = ""
    file.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    file.ImagePositionPatient = [0, 0, 5 * number]
    file.PixelSpacing = [0.7, 0.7]
    file.SliceThickness = 5
    file.SamplesPerPixel = 1
    file.PhotometricInterpretation = "MONOCHROME2"
    file.Rows = SIDE
    file.Columns = SIDE
    file.BitsAllocated = 16
    file.BitsStored = scanner.bits
    file.HighBit = scanner.bits - 1
    file.PixelRepresentation = int(is_signed)
    file.RescaleIntercept = scanner.intercept
    file.RescaleSlope = 1
    file.RescaleType = "HU"
    file.PixelData = stored.astype(np.int16 if is_signed else np.uint16).tobytes()
    return file


def write_dicom_sites(folder: Path, patients: int) -> int:
    """Write the files of all hospitals and of the server, and return their number.

    Args:
        folder: The folder, which is created.
        patients: Patients of each class at each hospital, and as many in all with unlabelled slices at the server.
    """
    installed("pydicom", "a DICOM file", "medical")
    count = 0
    for place, scanner in enumerate((*SCANNERS, *SCANNERS)):
        is_public = place >= len(SCANNERS)
        for label, name in enumerate(CLASSES):
            target = folder / "public" if is_public else folder / "sites" / scanner.site / name
            target.mkdir(parents=True, exist_ok=True)
            for patient in range(max(1, patients // len(SCANNERS)) if is_public else patients):
                rng = np.random.default_rng([place, label, patient])
                patient_id = f"INVENTED-{place}{label}{patient:03d}"
                for number in range(SLICES_PER_PATIENT):
                    values = draw_slice(bool(label), scanner.noise, rng)
                    file = make_file(values, scanner, patient_id, number + 1)
                    file.save_as(target / f"{place}{label}{patient:03d}_{number + 1}.dcm", enforce_file_format=True)
                    count += 1
    return count


def main(words: Sequence[str] | None = None) -> None:
    """Write the files into a new folder."""
    parser = argparse.ArgumentParser(prog="python -m perada.studies.dicom_sites", description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder to write; it must not exist yet, or be empty.")
    parser.add_argument("--patients", type=int, default=20, help="Patients of each class at each hospital.")
    options = parser.parse_args(words)
    check_output_folder("folder", options.folder)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{str(options.folder)!r} is not empty; choose a new folder")
    if options.patients < 3:
        parser.error(f"--patients must be >= 3, got {options.patients}, so that training and test images have some")
    count = write_dicom_sites(options.folder, options.patients)
    print(f"Wrote {count} DICOM files to {options.folder}")


if __name__ == "__main__":
    main()
