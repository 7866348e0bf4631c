# SPDX-License-Identifier: Apache-2.0
"""Clients that write the same class of masks with different numbers are rejected or warned of."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from perada.data import ByDomain, FederatedData, FederatedDataModule, ImageMasks
from perada.data.checks.masks import MaskCounter
from perada.tasks import Segmentation

SIZE = 6


def masks_of(*values, count=4):
    """Masks whose pixels have the values in turn."""
    pixels = torch.tensor(values).repeat(count * SIZE * SIZE)[: count * SIZE * SIZE]
    return pixels.view(count, SIZE, SIZE)


class Items:
    """Pairs that are read one by one."""

    def __init__(self, images, masks):
        self.images = images
        self.masks = masks

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]


def set_up(*masks_of_clients, kind=TensorDataset, task=None, **options):
    """Set up clients with these masks; returns the data module."""
    parts = [kind(torch.zeros(len(masks), 3, SIZE, SIZE, dtype=torch.uint8), masks) for masks in masks_of_clients]
    data = FederatedDataModule(FederatedData(parts, parts, **options), task=task)
    data.setup()
    return data


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize(
    ("others", "suspect"), [((0, 1), (0, 255)), ((0, 1, 2), (0, 255)), ((0, 1), (255,)), ((0, 1), (1, 255))]
)
def test_a_class_that_one_client_writes_as_255_is_rejected(kind, others, suspect):
    masks = masks_of(*others)
    with pytest.raises(ValueError, match=r"client 1 \('south'\).* 255, .*'south'\): [01, ]*255; .*north"):
        set_up(masks, masks_of(*suspect), masks, kind=kind, client_names=["north", "south", "west"], num_classes=3)


def test_the_remedy_for_pixels_without_a_class_helps():
    with pytest.raises(ValueError, match=r"-1, .*ignore_index"):
        set_up(masks_of(0, 1), masks_of(0, 255), num_classes=2)
    task = Segmentation(ignore_index=-1)
    with pytest.warns(UserWarning, match="-1 marks"):
        assert set_up(masks_of(0, 1), masks_of(0, -1), num_classes=2, task=task).num_classes == 2


@pytest.mark.parametrize("num_masks", [19, 30])
def test_masks_that_are_read_one_by_one_are_all_read_before_a_client_is_rejected(num_masks):
    late = torch.cat([masks_of(0, 255, count=num_masks), masks_of(0, 1)])
    with pytest.warns(UserWarning, match="none has both") as recorded:
        set_up(masks_of(0, 1), late, kind=Items, num_classes=2)
    message = next(str(each.message) for each in recorded if "none has both" in str(each.message))
    assert message.count("client 0") == message.count("client 1") == 1


def test_pixels_without_a_class_at_several_clients_are_warned_of():
    with pytest.warns(UserWarning, match="255 marks"):
        set_up(masks_of(0, 1, 255), masks_of(0, 255), num_classes=2)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, 1), (0, 2), "other classes"),
        ((0, 1), (1, 2), "classes 1, 2 of client 1 look like the classes 0, 1 of client 0 plus 1"),
        ((0, 2), (0, 2), "0, 2, which"),
    ],
)
def test_other_numbers_are_warned_of_unless_the_classes_are_declared(first, second, message):
    with pytest.warns(UserWarning, match=message):
        set_up(masks_of(*first), masks_of(*second))
    set_up(masks_of(*first), masks_of(*second), num_classes=3)


def masks_with_background(value, share, count=4):
    """Masks of two classes of which a share of the pixels has one value, and the others have the other one."""
    masks = torch.full((count, SIZE, SIZE), 1 - value)
    num_pixels = round(share * SIZE * SIZE)
    masks.flatten(1)[:, :num_pixels] = value
    return masks


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((8 / 9, 1 / 9, 5 / 6), r"0 covers 11 % .* masks of client 1 \('b'\), but 83 to 89 % at .*'a'\), .*'c'\)"),
        ((1 / 9, 1 / 9, 5 / 6), r"0 covers 83 % .* masks of client 2 \('c'\), but 11 % at .*'a'\), .*'b'\)"),
        ((8 / 9, 1 / 4), r"0 covers 25 % .* masks of client 1 \('b'\), but 89 % at client 0 \('a'\), as if"),
        ((1 / 6, 8 / 9, 2 / 3, 1 / 4), r"0 covers 17 to 25 % .*'a'\), .*'d'\), but 67 to 89 %"),
    ],
)
def test_clients_with_foreground_and_background_swapped_are_warned_of(kind, shares, message):
    masks = [masks_with_background(0, share) for share in shares]
    names = ["a", "b", "c", "d"][: len(shares)]
    with pytest.warns(UserWarning, match=message):
        set_up(*masks, kind=kind, client_names=names, num_classes=2)


@pytest.mark.parametrize(
    "masks",
    [
        [masks_with_background(0, share) for share in (8 / 9, 5 / 6, 2 / 3)],
        [masks_with_background(0, share) for share in (8 / 9, 5 / 6, 4 / 9)],  # no clear minority
        [masks_with_background(0, share) for share in (8 / 9, 4 / 9, 1 / 9)],  # images differ by degrees
        [masks_with_background(0, 8 / 9), masks_with_background(0, 1 / 9, count=2)],  # too few masks
        [masks_of(0, 0, 0, 0, 1, 2), masks_of(0, 1, 1, 1, 1, 2)],  # regions with another commonest class
        [masks_with_background(0, 8 / 9), masks_with_background(0, 1.0)],
    ],
)
def test_clients_whose_images_differ_are_accepted(masks):
    assert set_up(*masks, num_classes=3 if masks[0].max() > 1 else 2).num_clients == len(masks)


def test_pixels_without_a_class_do_not_count_as_background_or_foreground():
    masks = masks_with_background(0, 8 / 9)
    mostly_ignored = masks.clone()
    # What is left of the background is a sixth of the pixels, but still most of those that count.
    mostly_ignored.flatten(1)[:, 6:32] = 255
    assert set_up(masks, mostly_ignored, num_classes=2).num_clients == 2
    with pytest.warns(UserWarning, match=r"0 covers 20 % .*client 1, .*89 % .*client 0"):
        mostly_ignored.flatten(1)[:, 1:6] = 255
        set_up(masks, mostly_ignored, num_classes=2)


@pytest.mark.parametrize(
    "values",
    [((0, 1, 2), (0, 1)), ((0, 1, 255), (0, 1)), ((0, 1), (0,)), ((0, 1), (0, 1))],
)
def test_clients_that_lack_classes_are_accepted(values):
    assert set_up(*[masks_of(*each) for each in values]).num_clients == len(values)


def test_gaps_are_rejected_with_the_clients_side_by_side():
    with pytest.raises(ValueError, match=r"0, 1, 1000, .*client 1: 0, 1000; client 0: 0, 1"):
        set_up(masks_of(0, 1), masks_of(0, 1000), masks_of(0, 1))


def write(folder, values, count=5):
    """Pairs of a client."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        image = np.full((SIZE, SIZE, 3), number, np.uint8)
        image[0, 0] = len(folder.name)
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
        Image.fromarray(masks_of(*values)[0].numpy().astype(np.uint8)).save(folder / "masks" / f"{number}.png")


def test_files_are_compared_and_declared_values_confirm_them(tmp_path):
    write(tmp_path / "north", (0, 1))
    write(tmp_path / "southern", (0, 255))
    with pytest.raises(ValueError, match=r"'southern'.*set mask_values=\[0, 1\]"):
        FederatedDataModule(dataset=ImageMasks(str(tmp_path), size=SIZE), partition=ByDomain("client")).setup()
    declared = ImageMasks(str(tmp_path), size=SIZE, mask_values=[0, 1])
    with pytest.warns(UserWarning, match="255 marks"):
        FederatedDataModule(dataset=declared, partition=ByDomain("client")).setup()


def test_the_proposed_values_of_gaps_are_accepted(tmp_path):
    write(tmp_path / "north", (0, 1000 % 256, 100))
    write(tmp_path / "southern", (0, 232, 100))
    with pytest.raises(ValueError, match=r"mask_values=\[0, 100, 232\]"):
        FederatedDataModule(dataset=ImageMasks(str(tmp_path), size=SIZE), partition=ByDomain("client")).setup()
    images = ImageMasks(str(tmp_path), size=SIZE, mask_values=[0, 100, 232])
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"))
    data.setup()
    assert data.num_classes == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_pixels_and_masks_are_counted_as_in_a_loop(dtype):
    masks = torch.randint(0, 4, (150, SIZE, SIZE), generator=torch.Generator().manual_seed(0)).to(dtype)
    masks[masks == 3] = 255 if dtype == torch.uint8 else 300
    masks[:3] = 0
    ignored = int(masks.max())
    counter = MaskCounter(ignored)
    counter.add(masks)
    pixels = {}
    both = 0
    for mask in masks.tolist():
        values = [value for row in mask for value in row]
        for value in values:
            pixels[value] = pixels.get(value, 0) + 1
        both += ignored in values and not {*values} <= {0, ignored}
    assert counter.pixels == pixels
    assert (counter.with_both, counter.with_foreground, counter.with_ignored) == (both, 147, both)
