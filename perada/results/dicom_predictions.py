# SPDX-License-Identifier: Apache-2.0
"""Predictions of DICOM images as DICOM files: masks as SEG (PS3.3, A.51), others as Basic Text SR (A.35.1).

The files belong to the patient and the study of their images, whose identifiers they copy, in series of their own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from perada.core.checks import installed
from perada.data.medical.headers import UID_KEYWORDS, open_source, read_dataset, text
from perada.data.medical.reading import medical_kind, split_number
from perada.data.medical.segmentations import image_reference
from perada.results.inference import Predictions
from perada.results.models import Models
from perada.system.files import check_output_folder, writing
from perada.tasks.geometry import resize_masks

if TYPE_CHECKING:
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence as DicomSequence

_PATIENT_AND_STUDY = (
    *("PatientName", "PatientID", "IssuerOfPatientID", "PatientBirthDate", "PatientSex"),
    *("StudyInstanceUID", "StudyDate", "StudyTime", "StudyID", "StudyDescription", "AccessionNumber"),
    "ReferringPhysicianName",
)
"""Elements of the patient and study modules that are copied (PS3.3, C.7.1.1 and C.7.2.1)."""
_OPTIONAL = ("IssuerOfPatientID", "StudyDescription")
"""Those of them that a file need not have, not even empty."""
_GEOMETRY = ("FrameOfReferenceUID", "ImagePositionPatient", "ImageOrientationPatient", "SliceThickness")
_SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"
_BASIC_TEXT = "1.2.840.10008.5.1.4.1.1.88.11"
_SERIES_NUMBER = 9000
"""Series numbers are for display; those of modalities are lower."""
_LONGEST_LABEL = 64
"""Characters of a LO element, at most (PS3.5, 6.2)."""
_OWN_SCHEME = "99PERADA"
"""Coding scheme of the classes of a run: those that begin with 99 are private (PS3.16, 8.2)."""


@dataclass(frozen=True)
class ModelName:
    """What a file says of the model that predicted.

    Attributes:
        name: Its backbone, and the client whose model it is.
        version: A digest of its trained weights.
    """

    name: str
    version: str


@dataclass(frozen=True)
class _Source:
    """An image that was predicted.

    Attributes:
        row: Its place among the predictions.
        dataset: The header of its file.
        frame: Number of its frame; None if its file has no other.
    """

    row: int
    dataset: "Dataset"
    frame: int | None


def check_dicom_folder(folder: Path) -> None:
    """Check that the files of predictions may be written to a folder, before anything is predicted.

    Raises:
        ModuleNotFoundError: If pydicom is not installed.
        FileExistsError: If it has files.
    """
    installed("pydicom", "--dicom", "medical")
    check_output_folder("--dicom", folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"--dicom={folder} is not empty; choose a new folder")


def model_name(run: Models, client: str | None) -> ModelName:
    """Return the name and the version of the model of a client of a run; None for the global model."""
    states = []
    if client is not None and run.personalized:
        states.append(run.state("personal", client))
    if run.info["global_model"]:
        states += run.states("global")
    digest = hashlib.sha256()
    for state in states:
        for key in sorted(state):
            digest.update(key.encode())
            digest.update(state[key].detach().cpu().float().contiguous().numpy().tobytes())
    owner = "global" if client is None else f"client {client}"
    return ModelName(f"{run.info['backbone']}, {owner}"[:_LONGEST_LABEL], digest.hexdigest()[:12])


def write_dicom(predictions: Predictions, model: ModelName, folder: Path) -> list[Path]:
    """Write the predictions of the DICOM images among others: a SEG for each series, or a report for each image.

    Args:
        predictions: The predictions of images that were given as paths.
        model: The model that predicted.
        folder: The folder, which is created.

    Returns:
        The files.

    Raises:
        ValueError: If none of the images is a DICOM file.
    """
    files = predictions.paths if predictions.sources is None else predictions.sources
    sources = _read_sources(files or ())
    if not sources:
        raise ValueError("--dicom: none of the images is a DICOM file, to whose study predictions could belong")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if predictions.labels.ndim == 3:
        for place, sources_of_series in enumerate(_by_series(sources)):
            dataset = _make_segmentation(predictions, sources_of_series, model)
            written.append(_write_file(dataset, folder / f"segmentation_{place:04d}.dcm"))
        return written
    texts = _describe_predictions(predictions)
    series_of_study: dict[str, str] = {}
    for place, source in enumerate(sources):
        dataset = _make_report(source, texts[source.row], model, series_of_study)
        written.append(_write_file(dataset, folder / f"report_{place:04d}.dcm"))
    return written


def _read_sources(files: Sequence[str]) -> list[_Source]:
    """Return the headers of the DICOM files among others."""
    sources = []
    for row, path in enumerate(files):
        numbered = split_number(path)
        if medical_kind(numbered.file) != "DICOM":
            continue
        with open_source(numbered.file) as file:
            more = (*_PATIENT_AND_STUDY, *_GEOMETRY)
            dataset = read_dataset(file, with_pixels=False, with_identity=True, more_keywords=more)
        for keyword in ("SOPClassUID", *UID_KEYWORDS):
            if not text(dataset, keyword):
                raise ValueError(f"--dicom: {path} has no {keyword}, by which a prediction refers to it; leave it out")
        reference = image_reference(numbered.file, numbered.number)
        sources.append(_Source(row, dataset, None if reference.is_single else reference.frame))
    return sources


def _by_series(sources: Sequence[_Source]) -> list[list[_Source]]:
    """Return the images of each series that have one size, since all frames of a file have."""
    series: dict[tuple[Any, ...], list[_Source]] = {}
    for source in sources:
        header = source.dataset
        key = (header.get("SeriesInstanceUID"), header.Rows, header.Columns)
        series.setdefault(key, []).append(source)
    return list(series.values())


def _write_file(dataset: "Dataset", path: Path) -> Path:
    """Write a file, and return its path."""
    with writing(path):
        dataset.save_as(path, enforce_file_format=True)
    return path


def _make_file(source: _Source, sop_class: str, modality: str, model: ModelName) -> "Dataset":
    """Return a file of the patient and the study of an image, as an instance of a series of its own."""
    from pydicom import config
    from pydicom.datadict import dictionary_VR, tag_for_keyword
    from pydicom.dataelem import DataElement
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SpecificCharacterSet = "ISO_IR 192"
    for keyword in _PATIENT_AND_STUDY:
        value = source.dataset.get(keyword)
        if value is None and keyword in _OPTIONAL:
            continue
        tag = tag_for_keyword(keyword)
        assert tag is not None
        # Values are copied as they are, even if they violate the standard.
        copied = "" if value is None else str(value)
        dataset[tag] = DataElement(tag, dictionary_VR(tag), copied, validation_mode=config.IGNORE)
    dataset.SOPClassUID = sop_class
    dataset.SOPInstanceUID = generate_uid()
    dataset.SeriesInstanceUID = generate_uid()
    dataset.SeriesNumber = _SERIES_NUMBER
    dataset.InstanceNumber = 1
    dataset.Modality = modality
    dataset.SeriesDescription = "Prediction of a model"
    now = datetime.now()
    dataset.ContentDate = now.strftime("%Y%m%d")
    dataset.ContentTime = now.strftime("%H%M%S")
    dataset.Manufacturer = "perada"
    dataset.ManufacturerModelName = model.name
    dataset.DeviceSerialNumber = model.version
    dataset.SoftwareVersions = [f"perada {version('perada')}", f"weights {model.version}"]
    return dataset


def _code_sequence(value: str, scheme: str, meaning: str) -> "DicomSequence":
    """Return a sequence with one code."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence as DicomSequence

    item = Dataset()
    item.CodeValue = value
    item.CodingSchemeDesignator = scheme
    item.CodeMeaning = meaning
    return DicomSequence([item])


def _make_sequence(*items: dict[str, Any]) -> "DicomSequence":
    """Return a sequence of items, each of elements by their keywords."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence as DicomSequence

    datasets = []
    for elements in items:
        item = Dataset()
        for keyword, value in elements.items():
            setattr(item, keyword, value)
        datasets.append(item)
    return DicomSequence(datasets)


def _reference_item(source: _Source) -> dict[str, Any]:
    """Return the elements of an item that refers to an image."""
    reference = {
        "ReferencedSOPClassUID": source.dataset.SOPClassUID,
        "ReferencedSOPInstanceUID": source.dataset.SOPInstanceUID,
    }
    if source.frame is not None:
        reference["ReferencedFrameNumber"] = source.frame
    return reference


def _make_segmentation(predictions: Predictions, sources: Sequence[_Source], model: ModelName) -> "Dataset":
    """Return the SEG of the images of a series. The first class is the background, the others are segments."""
    first = sources[0]
    header = first.dataset
    segmentation = _make_file(first, _SEGMENTATION, "SEG", model)
    segmentation.ImageType = ["DERIVED", "PRIMARY"]
    segmentation.ContentLabel = "PREDICTION"
    segmentation.ContentDescription = model.name
    segmentation.ContentCreatorName = "perada"
    segmentation.SegmentationType = "BINARY"
    segmentation.LossyImageCompression = "00"
    segmentation.SamplesPerPixel = 1
    segmentation.PhotometricInterpretation = "MONOCHROME2"
    segmentation.Rows = header.Rows
    segmentation.Columns = header.Columns
    segmentation.BitsAllocated = 1
    segmentation.BitsStored = 1
    segmentation.HighBit = 0
    segmentation.PixelRepresentation = 0
    segmentation.SegmentSequence = _make_sequence(*_segment_items(predictions.classes, model))
    references = {str(source.dataset.SOPInstanceUID): _whole_file(_reference_item(source)) for source in sources}
    segmentation.ReferencedSeriesSequence = _make_sequence(
        {
            "SeriesInstanceUID": header.SeriesInstanceUID,
            "ReferencedInstanceSequence": _make_sequence(*references.values()),
        }
    )
    _add_geometry(segmentation, header)
    _add_dimensions(segmentation)
    groups = []
    frames: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    for place, source in enumerate(sources, 1):
        mask = _mask_of(predictions.labels[source.row], header)
        for segment in range(1, len(predictions.classes)):
            pixels = mask == segment
            is_last = place == len(sources) and segment == len(predictions.classes) - 1
            # Frames without a pixel are left out, but there must be one.
            if pixels.any() or (is_last and not frames):
                groups.append(_functional_groups(source, segment, place))
                frames.append(pixels)
    segmentation.PerFrameFunctionalGroupsSequence = _make_sequence(*groups)
    segmentation.NumberOfFrames = len(frames)
    content = np.packbits(np.stack(frames).ravel(), bitorder="little").tobytes()
    segmentation.PixelData = content + b"\0" * (len(content) % 2)
    segmentation["PixelData"].VR = "OB"
    return segmentation


def _segment_items(classes: Sequence[str], model: ModelName) -> list[dict[str, Any]]:
    """Return the items that describe the segments."""
    algorithm = {
        "AlgorithmFamilyCodeSequence": _code_sequence("123110", "DCM", "Artificial Intelligence"),
        "AlgorithmName": model.name,
        "AlgorithmVersion": model.version,
    }
    segments = []
    for number, name in enumerate(classes[1:], 1):
        label = name.replace("\\", "/")[:_LONGEST_LABEL]
        segments.append(
            {
                "SegmentNumber": number,
                "SegmentLabel": label,
                "SegmentAlgorithmType": "AUTOMATIC",
                "SegmentAlgorithmName": model.name,
                "SegmentationAlgorithmIdentificationSequence": _make_sequence(algorithm),
                "SegmentedPropertyCategoryCodeSequence": _code_sequence("85756007", "SCT", "Tissue"),
                "SegmentedPropertyTypeCodeSequence": _code_sequence(f"CLASS{number}", _OWN_SCHEME, label),
            }
        )
    return segments


def _add_geometry(segmentation: "Dataset", source_header: "Dataset") -> None:
    """Add the size and the orientation of the images, as far as they are known."""
    shared: dict[str, Any] = {}
    if "PixelSpacing" in source_header:
        measures = {"PixelSpacing": source_header.PixelSpacing}
        if source_header.get("SliceThickness"):
            measures["SliceThickness"] = source_header.SliceThickness
        shared["PixelMeasuresSequence"] = _make_sequence(measures)
    if "ImageOrientationPatient" in source_header:
        shared["PlaneOrientationSequence"] = _make_sequence(
            {"ImageOrientationPatient": source_header.ImageOrientationPatient}
        )
    segmentation.SharedFunctionalGroupsSequence = _make_sequence(shared)
    if "FrameOfReferenceUID" in source_header:
        segmentation.FrameOfReferenceUID = source_header.FrameOfReferenceUID
        segmentation.PositionReferenceIndicator = ""


def _add_dimensions(segmentation: "Dataset") -> None:
    """Add that frames are numbered by their segment and their image (PS3.3, C.7.6.17)."""
    from pydicom.datadict import tag_for_keyword
    from pydicom.uid import generate_uid

    organization = generate_uid()
    segmentation.DimensionOrganizationSequence = _make_sequence({"DimensionOrganizationUID": organization})
    pointers = (
        ("ReferencedSegmentNumber", "SegmentIdentificationSequence"),
        ("InStackPositionNumber", "FrameContentSequence"),
    )
    items = []
    for element, macro in pointers:
        items.append(
            {
                "DimensionOrganizationUID": organization,
                "DimensionIndexPointer": tag_for_keyword(element),
                "FunctionalGroupPointer": tag_for_keyword(macro),
            }
        )
    segmentation.DimensionIndexSequence = _make_sequence(*items)


def _functional_groups(source: _Source, segment: int, place: int) -> dict[str, Any]:
    """Return what describes a frame: its segment, and the image that it refers to.

    Args:
        source: The image.
        segment: Number of the segment.
        place: Place of the image in the series, from 1.
    """
    purpose = _code_sequence("121322", "DCM", "Source image for image processing operation")
    image = _reference_item(source) | {"PurposeOfReferenceCodeSequence": purpose}
    derivation = {
        "SourceImageSequence": _make_sequence(image),
        "DerivationCodeSequence": _code_sequence("113076", "DCM", "Segmentation"),
    }
    content = {"StackID": "1", "InStackPositionNumber": place, "DimensionIndexValues": [segment, place]}
    groups = {
        "DerivationImageSequence": _make_sequence(derivation),
        "FrameContentSequence": _make_sequence(content),
        "SegmentIdentificationSequence": _make_sequence({"ReferencedSegmentNumber": segment}),
    }
    if "ImagePositionPatient" in source.dataset:
        position = {"ImagePositionPatient": source.dataset.ImagePositionPatient}
        groups["PlanePositionSequence"] = _make_sequence(position)
    return groups


def _mask_of(labels: Tensor, source_header: "Dataset") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a predicted mask (H, W) in the size of its image."""
    mask: np.ndarray[Any, np.dtype[np.int64]] = (
        resize_masks(labels, (source_header.Rows, source_header.Columns)).cpu().numpy()
    )
    return mask


def _describe_predictions(predictions: Predictions) -> list[tuple[str, str]]:
    """Return the prediction of each image in words, and the probabilities; an empty text if numbers are predicted."""
    texts = []
    if predictions.labels.is_floating_point():
        for values in predictions.labels.tolist():
            pairs = [f"{name} {value:.6g}" for name, value in zip(predictions.classes, values, strict=True)]
            texts.append(("; ".join(pairs), ""))
        return texts
    for name, probabilities in zip(predictions.names, predictions.probabilities.tolist(), strict=True):
        pairs = [f"{other} {value:.6f}" for other, value in zip(predictions.classes, probabilities, strict=True)]
        texts.append((name or "none", "; ".join(pairs)))
    return texts


def _make_report(
    source: _Source, prediction_texts: tuple[str, str], model: ModelName, series_of_study: dict[str, str]
) -> "Dataset":
    """Return the report on an image.

    Args:
        source: The image.
        prediction_texts: Its prediction and the probabilities, in words.
        model: The model.
        series_of_study: Series of the reports by study, to which a new study's is added.
    """
    header = source.dataset
    report = _make_file(source, _BASIC_TEXT, "SR", model)
    study = str(header.get("StudyInstanceUID"))
    report.SeriesInstanceUID = series_of_study.setdefault(study, report.SeriesInstanceUID)
    report.InstanceNumber = source.row + 1
    report.ReferencedPerformedProcedureStepSequence = _make_sequence()
    report.PerformedProcedureCodeSequence = _make_sequence()
    report.CompletionFlag = "COMPLETE"
    # Nobody has checked what a model predicts.
    report.VerificationFlag = "UNVERIFIED"
    reference = _reference_item(source)
    series = {
        "SeriesInstanceUID": header.SeriesInstanceUID,
        "ReferencedSOPSequence": _make_sequence(_whole_file(reference)),
    }
    study_items = {"StudyInstanceUID": header.StudyInstanceUID, "ReferencedSeriesSequence": _make_sequence(series)}
    report.CurrentRequestedProcedureEvidenceSequence = _make_sequence(study_items)
    prediction, probabilities = prediction_texts
    text_of_concept = [
        (_code_sequence("121071", "DCM", "Finding"), prediction),
        (_code_sequence("PROBABILITIES", _OWN_SCHEME, "Probabilities"), probabilities),
        (_code_sequence("111001", "DCM", "Algorithm Name"), model.name),
        (_code_sequence("111003", "DCM", "Algorithm Version"), model.version),
    ]
    content = []
    for concept, concept_text in text_of_concept:
        if concept_text:
            content.append(
                {
                    "RelationshipType": "CONTAINS",
                    "ValueType": "TEXT",
                    "ConceptNameCodeSequence": concept,
                    "TextValue": concept_text,
                }
            )
    image = {"RelationshipType": "CONTAINS", "ValueType": "IMAGE", "ReferencedSOPSequence": _make_sequence(reference)}
    report.ValueType = "CONTAINER"
    report.ConceptNameCodeSequence = _code_sequence("18748-4", "LN", "Diagnostic Imaging Report")
    report.ContinuityOfContent = "SEPARATE"
    report.ContentSequence = _make_sequence(*content, image)
    return report


def _whole_file(reference: dict[str, Any]) -> dict[str, Any]:
    """Return a reference without the number of a frame."""
    return {keyword: value for keyword, value in reference.items() if keyword != "ReferencedFrameNumber"}
