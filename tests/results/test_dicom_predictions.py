# SPDX-License-Identifier: Apache-2.0
"""Predictions as DICOM files: what other programs read in them, and whose they are."""

import shutil
import subprocess
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.cli import main
from perada.data import ByDomain, FederatedDataModule, ImageMasks, Images
from perada.data.medical.segmentations import image_reference, read_segmentation
from perada.results.dicom_predictions import ModelName, write_dicom
from perada.results.inference import Predictions
from tests.data.dicom_files import pydicom, write

SIDE = 11
IDENTITY = {
    "PatientName": "Müller^Änne",
    "PatientID": "MRN77",
    "PatientBirthDate": "19330417",
    "PatientSex": "F",
    "StudyID": "S1",
    "AccessionNumber": "ACC5",
    "ReferringPhysicianName": "Doctor^Who",
    "SpecificCharacterSet": "ISO_IR 100",
}
MODEL = ModelName("test_resnet, client north", "0123456789ab")
needs_dcmtk = pytest.mark.skipif(
    not all(map(shutil.which, ("dcmdump", "dsrdump"))), reason="needs the programs of DCMTK (apt-get install dcmtk)"
)


def write_image(path, number, frames=0, **elements):
    shape = (frames, SIDE, SIDE) if frames else (SIDE, SIDE)
    pixels = np.random.default_rng(number).integers(0, 500, shape).astype(np.int16)
    uids = {
        "SOPInstanceUID": f"1.2.3.{number}",
        "SeriesInstanceUID": "1.2.3",
        "StudyInstanceUID": "1.2",
        "FrameOfReferenceUID": "1.2.9",
        "ImagePositionPatient": [0, 0, number],
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
        "PixelSpacing": [0.5, 0.5],
    }
    return write(path, pixels, **IDENTITY | uids | elements)


def check_identity(dataset, source):
    """A prediction is of the patient and the study of its image, in a series of its own."""
    for keyword in (*IDENTITY, "StudyInstanceUID"):
        if keyword != "SpecificCharacterSet":
            assert str(dataset[keyword].value) == str(source[keyword].value)
    assert dataset.SOPInstanceUID != source.SOPInstanceUID and dataset.SeriesInstanceUID != source.SeriesInstanceUID
    assert dataset.ManufacturerModelName == MODEL.name and MODEL.version in dataset.SoftwareVersions[1]
    assert dataset.Manufacturer == "perada"


def test_masks_become_a_segmentation_of_the_series(tmp_path):
    paths = [write_image(tmp_path / f"{number}.dcm", number) for number in range(1, 4)]
    paths.append(write_image(tmp_path / "other.dcm", 9, SeriesInstanceUID="1.2.4"))
    masks = torch.from_numpy(np.random.default_rng(0).integers(0, 3, (4, SIDE, SIDE)))
    masks[1] = 0
    masks[3] = 0
    predictions = Predictions(torch.zeros(4, SIDE, SIDE, 3), masks, ("none", "liver", "tumour"), tuple(map(str, paths)))
    written = write_dicom(predictions, MODEL, tmp_path / "out")
    assert len(written) == 2
    dataset = pydicom.dcmread(written[0])
    check_identity(dataset, pydicom.dcmread(paths[0]))
    assert [item.SegmentLabel for item in dataset.SegmentSequence] == ["liver", "tumour"]
    # Read frame by frame with pydicom.
    assert dataset.pixel_array.shape == (4, SIDE, SIDE) and dataset.NumberOfFrames == 4
    found = {}
    for group, pixels in zip(dataset.PerFrameFunctionalGroupsSequence, dataset.pixel_array, strict=True):
        source = group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        number = group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        found[source] = found.get(source, 0) + number * pixels.astype(int)
        position = group.PlanePositionSequence[0].ImagePositionPatient
        assert source == f"1.2.3.{int(position[2])}"
    assert (found["1.2.3.1"] == masks[0].numpy()).all() and (found["1.2.3.3"] == masks[2].numpy()).all()
    # A file without any pixel of a segment has one empty frame.
    empty = pydicom.dcmread(written[1])
    assert empty.NumberOfFrames == 1 and not empty.pixel_array.any()
    for path, mask in zip(paths[:3], masks, strict=False):
        assert (read_segmentation(written[0]).mask_of(image_reference(path)) == mask.numpy()).all()


def test_masks_of_frames_have_the_size_of_their_image(tmp_path):
    path = write_image(tmp_path / "cine.dcm", 1, frames=4)
    small = torch.tensor([[[0, 1], [1, 0]], [[1, 1], [0, 0]]])
    names = (f"{path}#2", f"{path}#4")
    predictions = Predictions(torch.zeros(2, 2, 2, 2), small, ("none", "lesion"), names)
    (written,) = write_dicom(predictions, MODEL, tmp_path / "out")
    segmentation = read_segmentation(written)
    for number, mask in ((2, small[0]), (4, small[1])):
        shown = segmentation.mask_of(image_reference(path, number))
        # The value at the centre of each pixel; that of the pixel in the middle is on the edge.
        nearest = np.array([0] * 5 + [1] * 6)
        assert (shown == mask.numpy()[nearest][:, nearest]).all()
    assert not segmentation.mask_of(image_reference(path, 3)).any()


@needs_dcmtk
def test_other_programs_read_the_files(tmp_path):
    paths = [str(write_image(tmp_path / f"{number}.dcm", number)) for number in (1, 2)]
    classes = ("benign", "malignant")
    predictions = Predictions(torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([1, 0]), classes, tuple(paths))
    reports = write_dicom(predictions, MODEL, tmp_path / "reports")
    for report, path, words in zip(reports, paths, ("malignant", "benign"), strict=True):
        check_identity(pydicom.dcmread(report), pydicom.dcmread(path))
        # It rejects reports that violate PS3.3, A.35.1.
        finished = subprocess.run(["dsrdump", "+Pl", report], capture_output=True, text=True, check=True)
        # DCMTK checks no values in UTF-8.
        assert all("VR checker does not support" in line for line in finished.stderr.splitlines()), finished.stderr
        finding = next(line for line in finished.stdout.splitlines() if "Finding" in line)
        assert words in finding
        assert "0.750000" in finished.stdout or words == "benign"
        assert MODEL.version in finished.stdout
    assert len({pydicom.dcmread(report).SeriesInstanceUID for report in reports}) == 1
    masks = torch.ones(2, SIDE, SIDE, dtype=torch.int64)
    segmented = Predictions(torch.zeros(2, SIDE, SIDE, 2), masks, ("none", "lesion"), tuple(paths))
    (segmentation,) = write_dicom(segmented, MODEL, tmp_path / "masks")
    finished = subprocess.run(["dcmdump", segmentation], capture_output=True, text=True, check=True)
    assert not finished.stderr, finished.stderr
    assert "=SegmentationStorage" in finished.stdout and "[lesion]" in finished.stdout


def test_numbers_and_several_labels_are_in_reports(tmp_path):
    path = str(write_image(tmp_path / "1.dcm", 1))
    numbers = Predictions(torch.tensor([[61.5]]), torch.tensor([[61.5]], dtype=torch.float64), ("age",), (path,))
    labels = Predictions(torch.tensor([[0.9, 0.8]]), torch.tensor([[1, 1]]), ("a", "b"), (path,))
    for predictions, expected in ((numbers, "age 61.5"), (labels, "a|b")):
        (report,) = write_dicom(predictions, MODEL, tmp_path / expected)
        texts = [item.get("TextValue") for item in pydicom.dcmread(report).ContentSequence]
        assert expected in texts


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    predictions = Predictions(torch.zeros(1, 2), torch.tensor([0]), ("a", "b"), (str(tmp_path / "a.png"),))
    with pytest.raises(ValueError, match="none of the images is a DICOM file"):
        write_dicom(predictions, MODEL, tmp_path / "out")
    path = str(write(tmp_path / "1.dcm", np.zeros((2, 2), np.uint8)))
    predictions = Predictions(torch.zeros(1, 2), torch.tensor([0]), ("a", "b"), (path,))
    with pytest.raises(ValueError, match=r"1\.dcm has no SeriesInstanceUID"):
        write_dicom(predictions, MODEL, tmp_path / "out")


def write_labelled(root, masked):
    """Eight images of a client, with a mask or in the folder of a class each."""
    for number in range(8):
        label = "images" if masked else "ab"[number % 2]
        path = write_image(root / "north" / label / f"{number}.dcm", number, PatientID=f"MRN77-{number}")
        if masked:
            target = root / "north" / "masks" / f"{number}.png"
            target.parent.mkdir(exist_ok=True)
            Image.fromarray((pydicom.dcmread(path).pixel_array > 250).astype(np.uint8)).save(target)


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_writes_them(tmp_path, masked, capsys):
    scans = tmp_path / "scans"
    write_labelled(scans, masked)
    if masked:
        pytest.importorskip("segmentation_models_pytorch")
    images = (ImageMasks if masked else Images)(str(scans), size=32, dicom_group=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = perada.finetune(
            "smp:unet-resnet18" if masked else "test_resnet",
            FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4),
            pretrained=False, adapter="head", algorithm="fedavg", rounds=1, logger=False, enable_progress_bar=False,
            accelerator="cpu",
        )  # fmt: skip
    run.save(tmp_path / "run")
    source = scans / "north" / "images" if masked else scans
    options = ["predict", str(tmp_path / "run"), "--images", str(source), "--client", "north"]
    options += ["--output", str(tmp_path / "p.csv"), "--dicom", str(tmp_path / "dicom")]
    main(options)
    written = sorted((tmp_path / "dicom").iterdir())
    assert f"DICOM files: {len(written)}" in capsys.readouterr().out
    dataset = pydicom.dcmread(written[0])
    assert dataset.Modality == ("SEG" if masked else "SR") and len(written) == (1 if masked else 8)
    assert dataset.ManufacturerModelName.endswith(", client north") and dataset.PatientID.startswith("MRN77")
    assert len(dataset.DeviceSerialNumber) == 12
    with pytest.raises(FileExistsError, match="--dicom"):
        main(options)
    # Nothing else has an identifier.
    for path in (tmp_path / "p.csv", *(tmp_path / "run").rglob("*"), *(tmp_path / "p").rglob("*")):
        assert path.is_dir() or not path.exists() or b"MRN77" not in path.read_bytes()
