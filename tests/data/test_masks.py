# SPDX-License-Identifier: Apache-2.0
"""Images with masks in folders and tables: pairs, values, sizes, splits, and what is rejected."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.core.checks import OptionError
from perada.data import IID, ByDomain, Dirichlet, FederatedDataModule, HuggingFace, ImageMasks, ImageTable
from perada.data.batches.transforms import MissingImageError, UnreadableImageError
from perada.tasks import Segmentation
from perada.tasks.geometry import resize_masks
from tests.masks import UNet, squares

SIZE = 32


def write(folder, names=("a", "b", "c", "d", "e"), seed=0, mode="L", values=(0, 1, 2), size=SIZE):
    """Pairs in ``folder/images`` and ``folder/masks``; returns the masks by name."""
    masks = {}
    for (image, mask), name in zip(squares(len(names), seed, size=size), names, strict=True):
        for kind in ("images", "masks"):
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{name}.png")
        stored = Image.fromarray(np.array(values, dtype=np.uint8)[mask.numpy()])
        if mode == "P":
            stored.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        stored.save(folder / "masks" / f"{name}.png")
        masks[name] = mask
    return masks


def load_masks(images):
    """Mask by name of each image."""
    names = [path.rpartition("/images/")[2].removesuffix(".png") for path in images.manifest.paths]
    return dict(zip(names, images.labels, strict=True))


@pytest.mark.parametrize("mode", ["L", "P"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_each_image_has_its_mask(tmp_path, mode, in_memory):
    masks = write(tmp_path, mode=mode)
    sets = [ImageMasks(str(tmp_path), size=SIZE, in_memory=in_memory, train=train) for train in (True, False)]
    result = load_masks(sets[0]) | load_masks(sets[1])
    assert result.keys() == masks.keys()
    for name, mask in masks.items():
        assert torch.equal(result[name], mask)
    image, mask = sets[0][0]
    assert image.shape == (3, SIZE, SIZE)
    assert torch.equal(mask, sets[0].labels[0])
    assert mask.dtype == torch.uint8


def test_clients_splits_and_groups_are_in_the_folders(tmp_path):
    write(tmp_path / "north" / "train", ["p1/a", "p1/b", "p2/c"])
    write(tmp_path / "north" / "test", ["p3/d"])
    write(tmp_path / "south" / "train", ["p1/a"])
    write(tmp_path / "south" / "test", ["p2/a"])
    train = ImageMasks(str(tmp_path), size=SIZE)
    assert train.columns["client"].tolist() == ["north", "north", "north", "south"]
    assert train.columns["group"].tolist() == ["north/p1", "north/p1", "north/p2", "south/p1"]
    assert train.group_column == "group"
    assert len(train.with_split(False)) == 2
    data = FederatedDataModule(dataset=train, partition=ByDomain(column="client"), batch_size=2)
    data.setup()
    assert data.client_names == ["north", "south"]
    assert data.train_sizes == (3, 1)
    assert data.task == Segmentation()


def test_masks_are_resized_by_nearest_neighbour(tmp_path):
    masks = write(tmp_path)
    small = ImageMasks(str(tmp_path), size=SIZE // 2)
    for name, mask in load_masks(small).items():
        rows = (np.arange(SIZE // 2) + 0.5) * 2
        expected = masks[name][rows.astype(int)][:, rows.astype(int)]
        assert torch.equal(mask, expected)
    assert resize_masks(torch.tensor([[300, 0]], dtype=torch.int32), (1, 4)).tolist() == [[300, 300, 0, 0]]


def test_values_stand_for_classes(tmp_path):
    masks = write(tmp_path, values=(0, 128, 255))
    images = ImageMasks(str(tmp_path), size=SIZE, mask_values=[0, 128, 255])
    for name, mask in load_masks(images).items():
        assert torch.equal(mask, masks[name])
    with pytest.raises(UnreadableImageError, match=r"masks/\w\.png.* 128, .*mask_values"):
        _ = ImageMasks(str(tmp_path), size=SIZE, mask_values=[0, 255]).labels


def test_values_without_a_class_are_ignored(tmp_path):
    masks = write(tmp_path, values=(0, 255, 7))
    images = ImageMasks(str(tmp_path), size=SIZE, mask_values=[0, 7])
    for name, mask in load_masks(images).items():
        assert torch.equal(mask == 255, masks[name] == 1)
        assert torch.equal(mask == 1, masks[name] == 2)


def test_foreground_that_is_ignored_is_noticed(tmp_path):
    write(tmp_path, values=(0, 255, 255))
    data = FederatedDataModule(dataset=ImageMasks(str(tmp_path), size=SIZE), partition=IID(1), num_classes=2)
    with pytest.raises(ValueError, match=r"class 0, .*255, .*mask_values"):
        data.setup()


def test_the_file_of_a_mask_with_an_unknown_class_is_named(tmp_path):
    write(tmp_path, values=(0, 1, 9))
    images = ImageMasks(str(tmp_path), size=SIZE, classes=["none", "red", "green"])
    data = FederatedDataModule(dataset=images, partition=IID(1))
    with pytest.raises(ValueError, match=r"training image 0 \('.*images/\w\.png'\).*class 9, .*0\.\.2"):
        data.setup()


def test_pairs_that_do_not_match_are_rejected(tmp_path):
    write(tmp_path)
    (tmp_path / "masks" / "b.png").rename(tmp_path / "masks" / "z.png")
    with pytest.raises(FileNotFoundError, match=r"1 of 5 images.*images/b\.png.*masks/b\.png"):
        _ = ImageMasks(str(tmp_path)).labels
    with pytest.raises(FileNotFoundError, match=r"no images .*'photos'"):
        _ = ImageMasks(str(tmp_path), images="photos").labels


def test_masks_of_another_size_or_with_colours_are_rejected(tmp_path):
    write(tmp_path)
    for path in (tmp_path / "masks").iterdir():
        Image.open(path).resize((16, 32)).save(path)
    with pytest.raises(UnreadableImageError, match=r"16 x 32 .*32 x 32"):
        _ = ImageMasks(str(tmp_path)).labels
    for path in (tmp_path / "masks").iterdir():
        Image.open(path).convert("RGB").save(path)
    with pytest.raises(UnreadableImageError, match=r"uint8 \(32, 16, 3\)"):
        _ = ImageMasks(str(tmp_path)).labels


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path)
    images = ImageMasks(str(tmp_path))
    # The files are listed here, before some disappear.
    assert len(images) + len(images.with_split(False)) == 5
    (tmp_path / "masks" / "a.png").unlink()
    (tmp_path / "masks" / "b.png").unlink()
    with pytest.raises(MissingImageError, match=r"masks/[ab]\.png does not exist"):
        _ = [split.labels for split in (images, images.with_split(False))]


@pytest.mark.parametrize("values", [[1], [1, 1], "01", [0, 1.5]])
def test_invalid_values_are_rejected(values, tmp_path):
    with pytest.raises(OptionError, match="mask_values"):
        ImageMasks(str(tmp_path), mask_values=values)


def test_partitions_by_class_are_rejected(tmp_path):
    write(tmp_path)
    data = FederatedDataModule(dataset=ImageMasks(str(tmp_path), size=SIZE), partition=Dirichlet(2, 0.5))
    with pytest.raises(ValueError, match=r"Dirichlet.*masks"):
        data.setup()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_table_lists_images_and_masks(tmp_path, in_memory):
    write(tmp_path / "north")
    write(tmp_path / "south", seed=1)
    rows = [["path", "outline", "client", "split"]]
    for client in ("north", "south"):
        for name in "abcde":
            split = "test" if name == "e" else "train"
            rows.append([f"{client}/images/{name}.png", f"{client}/masks/{name}.png", client, split])
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    table = ImageTable(str(tmp_path / "table.csv"), mask="outline", size=SIZE, in_memory=in_memory)
    assert table.task == Segmentation()
    assert len(table) == 8
    data = FederatedDataModule(dataset=table, partition=ByDomain(column="client"), batch_size="full")
    options = {"rounds": 1, "local_steps": 1, "adapter": "head", "pretrained": False, "algorithm": "fedavg"}
    run = perada.finetune(UNet(), data, **options)
    assert data.client_names == ["north", "south"]
    assert 0 < run.metrics["rounds"][-1]["personal/local_test"] < 1


def test_a_row_without_mask_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "table.csv").write_text("path,outline\nimages/a.png,masks/a.png\nimages/b.png,masks/x.png\n")
    table = ImageTable(str(tmp_path / "table.csv"), mask="outline")
    with pytest.raises(ValueError, match=r"table\.csv, row 3: .*masks/x\.png"):
        _ = table.labels


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_masks_have_the_size_of_the_upright_image(tmp_path, orientation):
    """Photographs are stored as the sensor lies; what labelling tools show is turned by their metadata."""
    shown = np.zeros((20, 30), dtype=np.uint8)
    shown[2:8, 4:10] = 1
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    image = Image.fromarray(np.stack([200 * shown] * 3, 2))
    # Stored such that the rotation in the metadata restores it.
    turn = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    exif = Image.Exif()
    exif[274] = orientation
    for name in "ab":
        image.transpose(turn[orientation]).save(tmp_path / "images" / f"{name}.png", exif=exif)
        Image.fromarray(shown).save(tmp_path / "masks" / f"{name}.png")
    images = ImageMasks(str(tmp_path), size=30)
    pixels, mask = images[0]
    # Image and mask differ at most where the image is blurred, at the border of the square.
    assert int(((pixels[0] > 100) != (mask == 1)).sum()) <= 4
    assert int(mask.sum()) >= 6 * 9 - 6
    image.transpose(turn[orientation]).save(tmp_path / "masks" / "a.png")
    Image.fromarray(shown.T).save(tmp_path / "masks" / "b.png")
    with pytest.raises(UnreadableImageError):
        _ = [ImageMasks(str(tmp_path), size=30, train=train).labels for train in (True, False)]


def write_set(folder, count=8, mode="L", values=(0, 1, 2), **columns):
    """A set of Hugging Face with a column of images and one of masks; returns the masks."""
    datasets = pytest.importorskip("datasets")
    content = {"photo": [], "outline": []}
    masks = []
    for image, mask in squares(count, 0):
        content["photo"].append(Image.fromarray(image.permute(1, 2, 0).numpy()))
        stored = Image.fromarray(np.array(values, dtype=np.uint8)[mask.numpy()])
        if mode == "P":
            stored.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        content["outline"].append(stored)
        masks.append(mask)
    features = {"photo": datasets.Image(), "outline": datasets.Image()}
    features |= {name: datasets.Value("string") for name in columns}
    dataset = datasets.Dataset.from_dict(content | columns, features=datasets.Features(features))
    parts = {"train": dataset.select(range(count - 2)), "test": dataset.select(range(count - 2, count))}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return masks


@pytest.mark.parametrize("mode", ["L", "P"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_masks_in_a_column_of_a_hugging_face_set(tmp_path, mode, in_memory):
    masks = write_set(tmp_path / "pairs", mode=mode)
    train = HuggingFace(str(tmp_path / "pairs"), mask="outline", size=SIZE, in_memory=in_memory)
    test = train.with_split(False)
    assert torch.equal(train.labels, torch.stack(masks[:6]))
    assert torch.equal(test.labels, torch.stack(masks[6:]))
    assert torch.equal(train[2][0], squares(8, 0)[2][0])
    assert torch.equal(train[2][1], masks[2])
    small = HuggingFace(str(tmp_path / "pairs"), mask="outline", size=SIZE // 2)
    rows = np.arange(1, SIZE, 2)
    assert torch.equal(small.labels, torch.stack(masks[:6])[:, rows][:, :, rows])


def test_a_hugging_face_set_with_masks_is_trained_on(tmp_path):
    clients = ["north", "south"] * 4
    masks = write_set(tmp_path / "pairs", values=(0, 128, 255), client=clients)
    options = {"name": str(tmp_path / "pairs"), "mask": "outline", "size": SIZE}
    images = HuggingFace(**options, mask_values=[0, 128, 255], classes=["none", "red", "green"])
    assert torch.equal(images.labels, torch.stack(masks[:6]))
    data = FederatedDataModule(dataset=images, partition=ByDomain(column="client"), batch_size="full")
    options = {"rounds": 1, "local_steps": 1, "adapter": "head", "pretrained": False, "algorithm": "fedavg"}
    run = perada.finetune(UNet(), data, **options)
    assert data.client_names == ["north", "south"]
    assert data.task == Segmentation()
    assert run.info["classes"] == ["none", "red", "green"]
    assert 0 < run.metrics["rounds"][-1]["personal/local_test"] < 1


def test_masks_of_a_hugging_face_set_that_cannot_be_used_are_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    name = str(tmp_path / "pairs")
    write_set(name, values=(0, 128, 255))
    with pytest.raises(
        UnreadableImageError,
        match=r"pairs, train\[0\].*outline.* 128, .*mask_values",
    ):
        _ = HuggingFace(name, mask="outline", mask_values=[0, 255], size=SIZE).labels
    with pytest.raises(ValueError, match=r"mask: .*'outlines'; .*'outline'\?"):
        _ = HuggingFace(name, mask="outlines").labels
    with pytest.raises(ValueError, match=r"image: .*\(photo, outline\)"):
        _ = HuggingFace(name).labels
    with pytest.raises(OptionError, match=r"label='a' cannot .*mask='outline'"):
        HuggingFace(name, mask="outline", label="a")
    image = Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    content = {"photo": [image] * 3, "outline": [None] * 3, "note": ["a"] * 3}
    features = {"photo": datasets.Image(), "outline": datasets.Image(), "note": datasets.Value("string")}
    dataset = datasets.Dataset.from_dict(content, features=datasets.Features(features))
    dataset.save_to_disk(tmp_path / "empty")
    with pytest.raises(MissingImageError, match=r"empty, train\[\d\]"):
        _ = HuggingFace(str(tmp_path / "empty"), mask="outline").labels
    with pytest.raises(ValueError, match=r"mask: .*'note'.*empty"):
        _ = HuggingFace(str(tmp_path / "empty"), mask="note").labels
