# SPDX-License-Identifier: Apache-2.0
"""Slices of NIfTI volumes: orientation, windows, and masks that are volumes of labels."""

import gzip
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from perada.cli import main
from perada.data import ImageMasks, Images
from perada.data.batches.transforms import UnreadableImageError, read_image
from perada.data.medical.nifti import decode_nifti, read_volume
from perada.data.medical.reading import MedicalReading
from perada.results.inference import Predictions
from tests.data.dicom_files import linear

nibabel = pytest.importorskip("nibabel", reason="needs the extra medical")

SHAPE = (5, 6, 7)


def volume(values=None, affine=None, **header):
    """A volume in memory, whose axes point to the right, the front and up unless an affine is given."""
    if values is None:
        values = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    image = nibabel.Nifti1Image(values, np.diag([0.5, 0.75, 2.0, 1.0]) if affine is None else affine)
    for name, value in header.items():
        image.header[name] = value
    return image


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


def landmarks():
    """A volume with one bright voxel at the patient's right, front and head."""
    values = np.zeros(SHAPE, np.uint8)
    values[-1, -1, -1] = 255
    return values


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "SAR", "PIR", "ASL"])
@pytest.mark.parametrize(
    ("axis", "corner", "shape"),
    [
        # The patient's right is on the left, front and head are at the top; sagittal slices have the front on the left.
        ("axial", (0, 0), (6, 5)),
        ("coronal", (0, 0), (7, 5)),
        ("sagittal", (0, 0), (7, 6)),
    ],
)
def test_slices_have_the_orientation_of_radiologists_whatever_that_of_the_file(tmp_path, codes, axis, corner, shape):
    original = volume(landmarks(), np.eye(4))
    target = nibabel.orientations.axcodes2ornt(codes)
    turn = nibabel.orientations.ornt_transform(nibabel.io_orientation(original.affine), target)
    turned = original.as_reoriented(turn)
    assert nibabel.aff2axcodes(turned.affine) == tuple(codes)
    path = save(tmp_path / "x.nii.gz", turned)
    number = {"axial": 7, "coronal": 6, "sagittal": 5}[axis]
    shown = decode_nifti(path, number, axis, "file")
    assert shown.shape == shape
    assert np.argwhere(shown == 255).tolist() == [list(corner)]
    assert (decode_nifti(path, 1, axis, "file") == 0).all()


def test_spacing_follows_the_axes(tmp_path):
    original = volume()
    turn = nibabel.orientations.axcodes2ornt("SLP")
    turned = original.as_reoriented(nibabel.orientations.ornt_transform([[0, 1], [1, 1], [2, 1]], turn))
    assert read_volume(save(tmp_path / "x.nii", turned)).spacing == (0.5, 0.75, 2.0)


@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
def test_values_pass_slope_and_window(tmp_path, extension):
    image = volume()
    image.header.set_slope_inter(2, -100)
    path = save(tmp_path / f"x{extension}", image)
    values = np.asarray(nibabel.load(path).dataobj)[::-1, ::-1, 2].T
    assert np.abs(decode_nifti(path, 3, "axial", (40, 200)) - linear(values, 40, 200)).max() <= 0.5
    all_values = np.asarray(nibabel.load(path).dataobj)
    for window, (low, high) in {
        "file": (all_values.min(), all_values.max()),
        "auto": np.percentile(all_values, [0.5, 99.5]),
    }.items():
        expected = np.clip((values - low) / (high - low), 0, 1) * 255
        assert np.abs(decode_nifti(path, 3, "axial", window) - expected).max() <= 0.5
    assert np.abs(decode_nifti(path, 3, "axial", "brain") - linear(values, 40, 80)).max() <= 0.5
    middle = read_image(path, "", medical=MedicalReading((40, 200)))
    assert (middle[0].numpy() == decode_nifti(path, 4, "axial", (40, 200))).all()


def test_the_limits_of_a_header_are_its_window(tmp_path):
    path = save(tmp_path / "x.nii", volume(cal_min=20, cal_max=120))
    values = np.asarray(nibabel.load(path).dataobj)[::-1, ::-1, 0].T
    expected = np.clip((values - 20) / 100, 0, 1) * 255
    assert np.abs(decode_nifti(path, 1, "axial", "file") - expected).max() <= 0.5


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (volume(np.zeros((3, 3, 3, 2), np.uint8)), "4 dimensions"),
        (volume(np.full((3, 3, 3), np.nan, np.float32)), "NaN"),
        (volume(np.zeros((3, 3, 3), np.complex64)), "complex"),
    ],
)
def test_other_volumes_are_named(tmp_path, image, reason):
    with pytest.raises(UnreadableImageError, match=f"x.nii.*{reason}"):
        read_image(save(tmp_path / "x.nii", image), "leave it out")


def test_truncated_volumes_are_named(tmp_path):
    content = volume().to_bytes()
    for name, part in {"a.nii": content[:-20], "b.nii.gz": gzip.compress(content)[:-40], "c.nii": b"no volume"}.items():
        (tmp_path / name).write_bytes(part)
        with pytest.raises(UnreadableImageError, match=name):
            read_image(tmp_path / name, "leave it out")
    # One without a name, as sets of Hugging Face have it.
    assert read_image(io.BytesIO(gzip.compress(content)), "").shape == (1, 6, 5)


def labels_of(number):
    """Labels of a volume, of which slices 2, 3 and 5 have some."""
    labels = np.zeros(SHAPE, np.uint8)
    labels[number % 5, 2, 1] = 1
    labels[1:3, :, 2] = 1
    labels[4, 4:, 4] = 2
    return labels


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Volumes with labels in the folders of nnU-Net, for two clients."""
    root = tmp_path_factory.mktemp("scans")
    for client in ("north", "south"):
        for number in range(6):
            values = np.random.default_rng(number).integers(0, 1000, SHAPE).astype(np.int16)
            save(root / client / "images" / f"case{number}.nii.gz", volume(values))
            save(root / client / "masks" / f"case{number}.nii.gz", volume(labels_of(number)))
    return root


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"frames": "all"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"frames": "all", "foreground_only": True}, [2, 3, 5]),
        ({"frames": 2, "foreground_only": True}, [2, 5]),
        ({"foreground_only": True}, [3]),
        ({}, [None]),
    ],
    ids=str,
)
def test_slices_with_their_masks(scans, options, numbers):
    images = ImageMasks(str(scans), size=8, **options)
    other = images.with_split(False)
    files = [file for side in (images, other) for file in side.files]
    suffixes = [f"#{number}" if number else "" for number in numbers]
    expected = [f"{scans}/{c}/images/case{n}.nii.gz{s}" for c in ("north", "south") for n in range(6) for s in suffixes]
    assert sorted(files) == sorted(expected)
    # A volume is on one side.
    sides = [{file.partition("#")[0] for file in side.files} for side in (images, other)]
    assert all(sides) and not sides[0] & sides[1]
    number = int(images.files[0].partition("case")[2][0])
    index = 3 if numbers == [None] else int(images.files[0].partition("#")[2]) - 1
    labels = Image.fromarray(labels_of(number)[::-1, ::-1, index].T).resize((8, 8), Image.Resampling.NEAREST)
    assert (images[0][1].numpy() == np.asarray(labels)).all()


def test_volumes_without_masks_are_classes_with_groups(tmp_path):
    for label in ("a", "b"):
        for number in range(6):
            values = np.random.default_rng([number, label == "b"]).integers(0, 1000, SHAPE).astype(np.int16)
            save(tmp_path / "north" / label / f"{number}.nii", volume(values))
    images = Images(str(tmp_path), size=8, frames="all", axis="coronal")
    other = images.with_split(False)
    assert len(images) + len(other) == 12 * 6
    assert not {*images.columns["group"]} & {*other.columns["group"]}


def test_a_mask_with_fractions_is_named(tmp_path):
    for client in ("north", "south"):
        save(tmp_path / client / "images" / "a.nii", volume())
        save(tmp_path / client / "masks" / "a.nii", volume(np.full(SHAPE, 0.5, np.float32)))
    with pytest.raises(UnreadableImageError, match=r"a\.nii.*0\.5"):
        ImageMasks(str(tmp_path), size=8, frames="all").labels  # noqa: B018  # read when they are first used


def test_inspection_reports_volumes(scans, capsys):
    main(["data", "inspect", str(scans), "--frames", "all", "--foreground_only", "true", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["headers"][0]["spacing in mm"] == {"0.5 x 0.75 x 2": 18}
    assert record["headers"][0]["size"] == {"5 x 6 x 7": 18}


def test_predicted_masks_have_the_size_of_their_slice(scans, tmp_path):
    path = scans / "north" / "images" / "case0.nii.gz"
    labels = torch.ones(1, 4, 4, dtype=torch.long)
    for axis, size in (("axial", (5, 6)), ("coronal", (5, 7)), ("sagittal", (6, 7))):
        predictions = Predictions(torch.zeros(1, 4, 4, 2), labels, ("a", "b"), (f"{path}#2",), axis=axis)
        folder = predictions.save_masks(tmp_path / axis)
        (mask,) = folder.rglob("*.png")
        with Image.open(mask) as opened:
            assert opened.size == size
