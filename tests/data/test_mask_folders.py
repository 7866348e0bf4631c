# SPDX-License-Identifier: Apache-2.0
"""Folders of images and masks are recognised by common names, and never become classes of pictures."""

import numpy as np
import pytest
from PIL import Image

from perada.cli import main
from perada.data import ImageFolder, ImageMasks, Images
from perada.data.sets.folders import have_masks
from perada.data.sets.mask_folders import role_of

SIZE = 4


def write(root, *files):
    """Files with different pixels, those of masks with two values."""
    for number, file in enumerate(files):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        roles = [role_of(folder) for folder in path.relative_to(root).parts]
        if any(role is not None and role.file_kind == "masks" for role in roles):
            pixels = np.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 2
        else:
            pixels = np.full((SIZE, SIZE), number)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


PAIRS = [
    ("images", "masks"),
    ("Images", "Masks"),
    ("IMAGES", "masks"),
    ("image", "mask"),
    ("img", "seg"),
    ("imgs", "gt"),
    ("images", "labels"),
    ("images", "annotations"),
    ("JPEGImages", "SegmentationClass"),
    ("Input", "Ground Truth"),
    ("train_images", "train_masks"),
    ("imagesTr", "labelsTr"),
]


@pytest.mark.parametrize(("images", "masks"), PAIRS)
def test_common_names_are_recognised(tmp_path, images, masks):
    for hospital in ("north", "south"):
        for number in range(3):
            write(tmp_path, f"{hospital}/{images}/{hospital}{number}.png", f"{hospital}/{masks}/{hospital}{number}.png")
    manifest = ImageMasks(str(tmp_path)).read_manifest()
    assert sorted(manifest.columns["client"].tolist()) == ["north"] * 3 + ["south"] * 3
    for path, mask in zip(manifest.paths, manifest.masks, strict=True):
        assert mask == path.replace(f"/{images}/", f"/{masks}/")
    for kind, options in ((Images, {}), (ImageFolder, {"domains": True})):
        with pytest.raises(ValueError, match=r"ImageMasks.*classes: \["):
            _ = kind(str(tmp_path), **options).labels
        declared = kind(str(tmp_path), classes=sorted([images, masks]), **options)
        assert len(declared) + len(declared.with_split(False)) == 12


def test_the_layout_of_nnunet_is_read(tmp_path):
    for number in range(3):
        write(tmp_path, f"imagesTr/case_{number}_0000.png", f"labelsTr/case_{number}.png")
    write(tmp_path, "imagesTs/case_9_0000.png", "labelsTs/case_9.png")
    manifest = ImageMasks(str(tmp_path)).read_manifest()
    names = [path.rpartition("/")[2] for path in manifest.paths]
    assert dict(zip(names, manifest.split.tolist(), strict=True)) == {
        "case_0_0000.png": "train", "case_1_0000.png": "train", "case_2_0000.png": "train", "case_9_0000.png": "test",
    }  # fmt: skip
    assert [mask.rpartition("/")[2] for mask in manifest.masks] == [name.replace("_0000", "") for name in names]
    (tmp_path / "labelsTs" / "case_9.png").unlink()
    with pytest.warns(UserWarning, match=r"1 images.*imagesTs/case_9_0000\.png"):
        assert len(ImageMasks(str(tmp_path)).read_manifest().paths) == 3
    write(tmp_path, "imagesTr/case_0_0001.png")
    with pytest.raises(ValueError, match=r"imagesTr/case_0_0000\.png, imagesTr/case_0_0001\.png"):
        ImageMasks(str(tmp_path)).read_manifest()


@pytest.mark.parametrize("suffix", ["_mask", "_segmentation", "_gt"])
def test_masks_may_have_a_suffix(tmp_path, suffix):
    write(tmp_path, "img/p1/7.png", f"gt/p1/7{suffix}.png")
    manifest = ImageMasks(str(tmp_path)).read_manifest()
    assert manifest.masks == [f"{tmp_path}/gt/p1/7{suffix}.png"]
    assert manifest.columns["group"].tolist() == ["p1"]


def test_two_folders_that_may_have_the_masks_are_named(tmp_path):
    write(tmp_path, "images/0.png", "gt/0.png", "labels/0.png")
    with pytest.raises(ValueError, match="gt, labels"):
        ImageMasks(str(tmp_path)).read_manifest()
    assert ImageMasks(str(tmp_path), images="images", masks="gt").read_manifest().masks == [f"{tmp_path}/gt/0.png"]
    assert ImageMasks(str(tmp_path), masks="labels").read_manifest().masks == [f"{tmp_path}/labels/0.png"]


@pytest.mark.parametrize(
    "files",
    [
        ["a/images/0.png", "b/masks/0.png"],
        ["a/scans/0.png", "a/targets/1.png"],
        ["images/0.png", "lesions/0.png"],
        ["scans/north/benign/0.png", "scans/north/malignant/0.png"],
    ],
)
def test_other_folders_are_none(files):
    assert not have_masks(files)


def test_inspect_and_init_recognise_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        for hospital in ("north", "south"):
            write(
                tmp_path, f"mine/{hospital}/img/{hospital}{number}.png", f"mine/{hospital}/seg/{hospital}{number}.png"
            )
    main(["data", "inspect", "mine"])
    printed = capsys.readouterr().out
    assert "- north: 0 (50 %), 1 (50 %)" in printed
    assert "The images can be used." in printed
    main(["init", "--yes", "--images=mine", "--algorithm=fedavg"])
    assert "class_path: ImageMasks" in (tmp_path / "recipe.yaml").read_text()
