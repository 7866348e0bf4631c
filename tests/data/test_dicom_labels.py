# SPDX-License-Identifier: Apache-2.0
"""Labels of DICOM files by their UIDs, and masks in DICOM SEG, whose names are compared between clients."""

import csv
import json
import warnings

import numpy as np
import pytest

from perada.data import ImageMasks, ImageTable
from perada.data.batches.transforms import UnreadableImageError
from tests.data.dicom_files import pydicom, save, segmentation, write
from tests.rejections import ANY_VALUE, rejects

nibabel = pytest.importorskip("nibabel", reason="needs the extra medical")

SIDE = 9
"""Odd, so that the bits of a frame begin within a byte."""
STUDY = "1.2.826.0.1.3680043.8.498.99"


def pixels_of(seed):
    return np.random.default_rng(seed).integers(0, 500, (SIDE, SIDE)).astype(np.int16)


def write_series(folder, series, count, **elements):
    """A series of single slices; returns their datasets."""
    files = []
    for number in range(count):
        path = write(
            folder / f"{series}_{number}.dcm", pixels_of(number), SOPInstanceUID=f"{STUDY}.{series}.{number + 1}",
            SeriesInstanceUID=f"{STUDY}.{series}", StudyInstanceUID=f"{STUDY}{series // 2}",
            PatientID=f"P{series // 2}", **elements,
        )  # fmt: skip
        files.append(pydicom.dcmread(path))
    return files


def write_table(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("key", "label"), *rows])
    return str(path)


@pytest.mark.parametrize("level", ["image", "series", "study", "mixed"])
def test_a_table_is_keyed_by_any_uid(tmp_path, level):
    for series in range(4):
        write_series(tmp_path / "scans" / str(series), series, 3)
    expected = {}
    rows = []
    for series in range(4):
        label = "ab"[series // 2]
        if level == "image" or (level == "mixed" and series == 3):
            rows += [(f"{STUDY}.{series}.{number + 1}", label) for number in range(3)]
        elif level == "series" or (level == "mixed" and series == 2):
            rows.append((f"{STUDY}.{series}", label))
        elif series % 2 == 0:
            rows.append((f"{STUDY}{series // 2}", label))
        expected |= {f"{series}_{number}.dcm": label for number in range(3)}
    table = write_table(tmp_path / "labels.csv", rows)
    images = ImageTable(table, folder=str(tmp_path / "scans"), uid="key", size=SIDE, classes=["a", "b"], test_share=0.4)
    found = {}
    for side in (images, images.with_split(False)):
        for file, label in zip(side.files, side.labels.tolist(), strict=True):
            found[file.rpartition("/")[2]] = side.classes[label]
    assert found == expected


def test_uids_are_not_in_messages(tmp_path):
    write_series(tmp_path, 0, 2)
    uid = f"{STUDY}.0.1"
    cases = {
        "row 3": [(uid, "a"), (f"{STUDY}.7", "b")],
        "rows 2, 3": [(uid, "a"), (f"{STUDY}.0", "b")],
        "2, 3": [(uid, "a"), (uid, "b")],
    }
    for named, rows in cases.items():
        table = write_table(tmp_path / "labels.csv", rows)
        with pytest.raises(ValueError, match=named) as caught:
            ImageTable(table, uid="key", size=SIDE).read_manifest()
        assert STUDY not in str(caught.value)
    table = write_table(tmp_path / "labels.csv", [(uid, "a")])
    with pytest.warns(UserWarning, match="1 of 2"):
        assert len(ImageTable(table, uid="key", size=SIDE).read_manifest().paths) == 1
    with rejects("path", "file"):
        ImageTable(table, uid="key", path="file")


def masks_of(files, num_segments=2):
    """Pixels of disjoint segments by image and segment."""
    masks = {}
    for number, file in enumerate(files):
        segments = np.random.default_rng(number).integers(0, num_segments + 1, (SIDE, SIDE))
        for segment in range(1, num_segments + 1):
            masks[file.SOPInstanceUID, segment] = (segments == segment).astype(np.uint8)
    return masks


def expected_mask(masks, file):
    return sum(number * mask.astype(int) for (uid, number), mask in masks.items() if uid == file.SOPInstanceUID)


NAMES = {1: "liver", 2: "tumour"}


def write_client(root, client, series, kind="BINARY", names=None, one_file=True):
    """A client's series with its segmentation; returns the datasets and the masks."""
    names = names or NAMES
    files = write_series(root / client / "images", series, 4)
    masks = masks_of(files)
    stored = masks
    if kind == "FRACTIONAL":
        stored = {key: np.where(mask, 128, 127).astype(np.uint8) for key, mask in masks.items()}
    if kind == "LABELMAP":
        stored = {(file.SOPInstanceUID, 1): expected_mask(masks, file) for file in files}
    folder = root / client / "masks"
    if one_file:
        save(folder / "all.dcm", segmentation(files[0], stored, kind, names))
    else:
        for number, file in enumerate(files):
            own = {key: mask for key, mask in stored.items() if key[0] == file.SOPInstanceUID}
            save(folder / f"{series}_{number}.dcm", segmentation(file, own, kind, names))
    return files, masks


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL", "LABELMAP"])
@pytest.mark.parametrize("one_file", [True, False])
def test_segmentations_are_masks_of_their_images(tmp_path, kind, one_file):
    expected = {}
    for client, series in (("north", 0), ("south", 2)):
        files, masks = write_client(tmp_path, client, series, kind, one_file=one_file)
        for number, file in enumerate(files):
            expected[f"{series}_{number}.dcm"] = expected_mask(masks, file)
    images = ImageMasks(str(tmp_path), size=SIDE, dicom_group=None)
    assert images.classes == ("background", "liver", "tumour")
    seen = 0
    for side in (images, images.with_split(False)):
        for row, file in enumerate(side.files):
            assert (side[row][1].numpy() == expected[file.rpartition("/")[2]]).all()
            seen += 1
    assert seen == 8


def test_frames_of_a_file_have_their_own_masks(tmp_path):
    stack = np.stack([pixels_of(number) for number in range(5)])
    for part in ("train", "test"):
        uid = f"{STUDY}.{len(part)}"
        path = write(tmp_path / part / "images" / "a.dcm", stack, SOPInstanceUID=uid, SeriesInstanceUID=uid)
        pixels = {number: np.eye(SIDE, k=number, dtype=np.uint8) for number in (1, 2, 4)}
        # One frame for each of three frames: the keys differ in the segment, which is one.
        segmentation_file = segmentation(
            pydicom.dcmread(path), {(uid, number): mask for number, mask in pixels.items()}, names={1: "lesion"},
            frame_numbers=[1, 2, 4],
        )  # fmt: skip
        for group in segmentation_file.PerFrameFunctionalGroupsSequence:
            group.SegmentIdentificationSequence[0].ReferencedSegmentNumber = 1
        save(tmp_path / part / "masks" / "a.dcm", segmentation_file)
    images = ImageMasks(str(tmp_path), size=SIDE, frames="all")
    shown = [images[row][1].numpy() for row in range(len(images))]
    expected = [pixels.get(number, np.zeros((SIDE, SIDE))) for number in range(1, 6)]
    assert len(shown) == 5 and all((ours == theirs).all() for ours, theirs in zip(shown, expected, strict=True))


def test_declared_classes_number_segments_by_name(tmp_path):
    write_client(tmp_path, "north", 0)
    files, masks = write_client(tmp_path, "south", 2, names={1: "tumour", 2: "liver"})
    images = ImageMasks(str(tmp_path), size=SIDE, classes=["background", "tumour", "liver"], dicom_group=None)
    by_file = {}
    for side in (images, images.with_split(False)):
        by_file |= {file.rpartition("/")[2]: side[row][1].numpy() for row, file in enumerate(side.files)}
    # Both clients have the same pixels: north's liver is 1, and the class 2.
    swapped = np.array([0, 2, 1])[expected_mask(masks, files[0])]
    assert (by_file["0_0.dcm"] == swapped).all()
    assert (by_file["2_0.dcm"] == np.array([0, 1, 2])[expected_mask(masks, files[0])]).all()


@pytest.mark.parametrize(
    ("names", "classes", "facts"),
    [
        ({1: "Liver", 2: "tumour"}, None, ("'liver'", "'Liver'", "north", "south", "segment 1")),
        ({1: "tumour", 2: "liver"}, None, ("'liver'", "'tumour'", "north", "south")),
        ({1: "Liver", 2: "tumour"}, ["background", "liver", "tumour"], ("'Liver'", "'liver'", "south", "differently")),
        ({1: "spleen", 2: "tumour"}, ["background", "liver", "tumour"], ("'spleen'", "south")),
        ({1: "liver", 2: "tumour"}, ["liver", "tumour"], ("'liver'", "north", "background")),
    ],
)
def test_names_that_contradict_each_other_are_rejected(tmp_path, names, classes, facts):
    write_client(tmp_path, "north", 0)
    write_client(tmp_path, "south", 2, names=names)
    with rejects("classes", ANY_VALUE, *facts):
        ImageMasks(str(tmp_path), size=SIDE, classes=classes, dicom_group=None).manifest  # noqa: B018  # read when it is first used
    # Declared values have no names.
    declared = ImageMasks(str(tmp_path), size=SIDE, mask_values=[0, 1, 2], dicom_group=None)
    assert set(declared[0][1].unique().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize(
    "labels", [{"background": 0, "liver": 1, "tumour": 2}, {"0": "background", "1": "liver", "2": "tumour"}]
)
def test_label_maps_have_the_names_of_their_dataset_json(tmp_path, labels):
    volume = np.random.default_rng(0).integers(0, 3, (SIDE, SIDE, 3)).astype(np.int16)
    for client, named in (("north", labels), ("south", {"background": 0, "tumour": 1, "liver": 2})):
        for folder in ("images", "masks"):
            (tmp_path / client / folder).mkdir(parents=True)
            for number in range(5):
                image = nibabel.Nifti1Image(volume, np.eye(4))
                nibabel.save(image, tmp_path / client / folder / f"{client}{number}.nii.gz")
        (tmp_path / client / "dataset.json").write_text(json.dumps({"labels": named}))
    with rejects("classes", ANY_VALUE, "'liver'", "'tumour'", "north", "south"):
        ImageMasks(str(tmp_path), size=SIDE).manifest  # noqa: B018  # read when it is first used
    images = ImageMasks(str(tmp_path), size=SIDE, classes=["background", "liver", "tumour"])
    plane = volume[::-1, ::-1, 1].T
    seen = set()
    for side in (images, images.with_split(False)):
        for row, file in enumerate(side.files):
            client = side.columns["client"][row]
            seen.add(client)
            expected = plane if client == "north" else np.array([0, 2, 1])[plane]
            assert (side[row][1].numpy() == expected).all(), file
    assert seen == {"north", "south"}


def assert_unreadable(folder, reason):
    """Reading the masks of both splits names the file and the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = ImageMasks(str(folder), size=SIDE, dicom_group=None)
        with pytest.raises(UnreadableImageError, match=rf"0_0\.dcm.*{reason}"):
            for side in (images, images.with_split(False)):
                _ = side.labels  # read when it is first used


def test_wrong_segmentations_are_named(tmp_path):
    files, masks = write_client(tmp_path, "north", 0, one_file=False)
    target = tmp_path / "north" / "masks" / "0_0.dcm"
    good = target.read_bytes()
    overlapping = {key: np.ones((SIDE, SIDE), np.uint8) for key in masks if key[0] == files[0].SOPInstanceUID}
    other = pydicom.dcmread(tmp_path / "north" / "images" / "0_0.dcm")
    other.SeriesInstanceUID = "1.2.3"
    elsewhere = {("1.2.3.4", 1): np.ones((SIDE, SIDE), np.uint8)}
    cases = [
        (segmentation(files[0], overlapping, names=NAMES), "overlap"),
        (segmentation(other, elsewhere, names=NAMES), "another series"),
        (
            segmentation(files[0], {(files[0].SOPInstanceUID, 3): np.ones((SIDE, SIDE), np.uint8)}, names=NAMES),
            "segment 3",
        ),
        (files[0], "no segmentation"),
    ]
    for dataset, reason in cases:
        save(target, dataset)
        assert_unreadable(tmp_path, reason)
    for length in range(200, len(good), 97):
        target.write_bytes(good[:length])
        assert_unreadable(tmp_path, "")
