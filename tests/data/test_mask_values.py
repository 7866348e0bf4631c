# SPDX-License-Identifier: Apache-2.0
"""Values of masks in any type and format: exact as Pillow and NumPy hold them, or rejected by name."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from perada.core.checks import OptionError
from perada.data import IID, FederatedData, FederatedDataModule, ImageMasks
from perada.data.batches.datasets import as_labels
from perada.data.batches.transforms import Preparation, UnreadableImageError
from perada.data.sets.label_types import stack_integers
from perada.data.sets.masks import decode_mask
from perada.tasks import Segmentation
from perada.tasks.geometry import resize_masks
from tests.masks import squares

SIZE = 8


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (SIZE, SIZE)).save(path)
    return str(path)


def store_mask(tmp_path, pixels, suffix="png", **options):
    """Path of a mask with the pixels."""
    path = tmp_path / f"mask.{suffix}"
    Image.fromarray(pixels).save(path, **options)
    return str(path)


def checkerboard(low, high, dtype):
    """Pixels of two values."""
    rows, columns = np.indices((SIZE, SIZE))
    return np.where((rows + columns) % 2, high, low).astype(dtype)


@pytest.mark.parametrize(
    ("suffix", "dtype", "low", "high"),
    [
        ("png", np.uint8, 0, 255),
        ("png", np.uint16, 0, 65535),
        ("png", bool, 0, 1),
        ("tif", np.uint8, 3, 255),
        ("tif", np.uint16, 1, 40000),
        ("tif", np.int32, -1024, 2),
        ("tif", np.int32, -254, 0),
        ("tif", np.float32, -100, 3),
        ("bmp", np.uint8, 0, 7),
    ],
)
def test_values_of_files_are_exact(tmp_path, image, suffix, dtype, low, high):
    pixels = checkerboard(low, high, dtype)
    path = store_mask(tmp_path, pixels, suffix)
    assert np.array(Image.open(path)).tolist() == pixels.tolist()
    mask = decode_mask(path, image, SIZE, None, path)
    assert mask.tolist() == pixels.astype(np.int64).tolist()
    assert stack_integers([mask])[0].tolist() == mask.tolist()


@pytest.mark.parametrize(("dtype", "values"), [(np.int8, (-1, -128)), (np.uint32, (2**31 + 5, 7)), (np.int16, (-3, 9))])
def test_signs_of_tiff_files_are_those_of_their_type(tmp_path, image, dtype, values):
    """Pillow reads signed integers of 8 bits as unsigned, and unsigned ones of 32 bits as signed; it writes neither."""
    pixels = checkerboard(*values, dtype)
    path = tmp_path / "mask.tif"
    header = [
        (256, 4, SIZE), (257, 4, SIZE), (258, 3, 8 * pixels.itemsize), (259, 3, 1), (262, 3, 1), (273, 4, 138),
        (277, 3, 1), (278, 4, SIZE), (279, 4, pixels.nbytes), (339, 3, 1 + (np.iinfo(dtype).min < 0)),
    ]  # fmt: skip
    entries = b"".join(
        tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, kind, value in header
    )
    directory = len(header).to_bytes(2, "little") + entries + bytes(4)
    content = b"II*\0" + (8).to_bytes(4, "little") + directory
    path.write_bytes(content.ljust(138, b"\0") + pixels.tobytes())
    assert decode_mask(str(path), image, SIZE, None, "mask").tolist() == pixels.astype(np.int64).tolist()


def test_numbers_of_a_palette_are_the_classes(tmp_path, image):
    pixels = checkerboard(0, 3, np.uint8)
    mask = Image.fromarray(pixels).convert("P")
    mask.putpalette([0, 0, 0, 9, 9, 9, 8, 8, 8, 255, 0, 0])
    for bits in (2, 4, 8):
        mask.save(tmp_path / "mask.png", bits=bits)
        assert decode_mask(str(tmp_path / "mask.png"), image, SIZE, None, "mask").tolist() == pixels.tolist()


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5"), (np.nan, "nan"), (2.0**24, "1.67772e"), (np.inf, "inf")])
def test_floats_that_are_no_classes_are_rejected(tmp_path, image, value, text):
    path = store_mask(tmp_path, checkerboard(0, value, np.float32), "tif")
    with pytest.raises(UnreadableImageError, match=rf"mask\.tif.*{text}"):
        decode_mask(path, image, SIZE, None, path)


def test_jpeg_is_the_reason_and_png_the_remedy(tmp_path, image):
    rows, columns = np.indices((SIZE, SIZE))
    pixels = (rows * columns % 3 * 100).astype(np.uint8)
    path = store_mask(tmp_path, pixels, "jpg")
    assert len(np.unique(np.array(Image.open(path)))) > 3
    for values in (None, [0, 100, 200]):
        with pytest.raises(UnreadableImageError, match=r"mask\.jpg.*JPEG"):
            decode_mask(path, image, SIZE, values, path)
    exact = store_mask(tmp_path, np.full((SIZE, SIZE), 128, np.uint8), "jpg")
    assert decode_mask(exact, image, SIZE, [0, 128], exact).unique().tolist() == [1]


def test_a_stack_of_pictures_is_no_mask(tmp_path, image):
    pages = [Image.fromarray(checkerboard(0, number, np.uint8)) for number in (1, 2)]
    pages[0].save(tmp_path / "mask.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(UnreadableImageError, match="2 pictures"):
        decode_mask(str(tmp_path / "mask.tif"), image, SIZE, None, "mask.tif")


def test_more_classes_than_255_have_no_ignored_value(tmp_path, image):
    path = store_mask(tmp_path, checkerboard(0, 255, np.uint16))
    values = [*range(255), *range(1000, 1100)]
    with pytest.raises(UnreadableImageError, match=r"255, .*mask_values"):
        decode_mask(path, image, SIZE, values, path)
    assert decode_mask(path, image, SIZE, [0, 5], path).unique().tolist() == [0, 255]


def test_values_of_signed_files_can_be_listed(tmp_path, image):
    path = store_mask(tmp_path, checkerboard(-1, 1, np.int32), "tif")
    assert decode_mask(path, image, SIZE, [-1, 1], path).tolist() == checkerboard(0, 1, np.uint8).tolist()


INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("as_array", [True, False])
def test_integers_of_any_type_are_masks(dtype, as_array):
    masks = (torch.arange(32).view(2, 4, 4) % 2).to(dtype)
    given = masks.numpy() if as_array else masks
    labels = as_labels(given)
    assert labels.tolist() == masks.to(torch.int64).tolist()
    assert int(labels.max()) == 1
    assert as_labels(given[0], of_one_image=True).tolist() == labels[0].tolist()


def test_a_value_that_does_not_fit_is_rejected():
    masks = np.array([[[0, 2**63], [0, 1]]], dtype=np.uint64)
    with pytest.raises(TypeError, match=str(2**63)):
        as_labels(masks)


@pytest.mark.parametrize("value", [-(2**31), -1, 2**24 + 1, 2**31 - 1])
def test_resized_values_are_exact(value):
    masks = torch.tensor([[0, value, 1]], dtype=torch.int64)
    assert resize_masks(masks, (2, 6)).tolist() == [[0, 0, value, value, 1, 1]] * 2


@pytest.mark.parametrize(("length", "new_length"), [(7, 3), (3, 7), (10, 4), (5, 5), (32, 12)])
def test_resized_masks_are_those_of_torch(length, new_length):
    masks = torch.randint(0, 250, (3, length, length + 1))
    expected = torch.nn.functional.interpolate(
        masks[:, None].double(), (new_length, new_length + 2), mode="nearest-exact"
    )
    assert torch.equal(resize_masks(masks, (new_length, new_length + 2)), expected[:, 0].long())


@pytest.mark.parametrize("ignore_index", [-1, -100, 300, 255])
def test_pixels_outside_of_an_image_are_ignored_whatever_their_value(ignore_index):
    """A border of −1 or 300 is no value of uint8, as which masks are stored."""
    images, masks = squares(4, 0).tensors
    part = TensorDataset(images, masks)
    data = FederatedDataModule(
        FederatedData([part], [part]), batch_size=4, crop_padding=6, task=Segmentation(ignore_index=ignore_index)
    )
    data.setup()
    batch = data.first_batch([0])
    batches = [batch] if not isinstance(batch, dict) else [*batch.values()]
    values = {*torch.cat([each.y.flatten() for each in batches]).tolist()}
    assert values <= {0, 1, 2, ignore_index}
    assert ignore_index in values


def test_the_proposed_ignored_value_is_accepted():
    with pytest.raises(OptionError, match="such as -1"):
        Segmentation().check_classes(300)
    Segmentation(ignore_index=-1).check_classes(300)
    with pytest.raises(OptionError, match="such as 255"):
        Segmentation(ignore_index=2).check_classes(3)


def test_all_images_may_be_for_training(tmp_path):
    """With one patient a hospital, no image is left for the test split."""
    for hospital in ("north", "south"):
        for kind, pixels in (("images", np.zeros((SIZE, SIZE, 3))), ("masks", checkerboard(0, 1, np.uint8))):
            path = tmp_path / hospital / kind / "patient" / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    images = ImageMasks(str(tmp_path), size=SIZE)
    assert images.labels.shape == (2, SIZE, SIZE)
    assert images.with_split(False).labels.shape == (0, SIZE, SIZE)
    data = FederatedDataModule(dataset=images, partition=IID(2))
    data.setup()
    assert data.train_sizes == (1, 1)


def test_preparation_keeps_masks_that_need_no_other_type():
    masks = torch.tensor([[[1]]], dtype=torch.uint8)
    prepare = Preparation(task=Segmentation(), prepared_size=(2, 2))
    assert prepare.prepare_targets(masks, torch.zeros(1, 3, 1, 1)).dtype == torch.uint8
