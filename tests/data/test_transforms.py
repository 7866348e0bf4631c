# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from perada.core.rounds import ImageConfig
from perada.core.seeding import generator
from perada.data import CohortBatch, EvalBatch
from perada.data.batches.transforms import Preparation, draw_crops, prepare_images, to_image
from perada.tasks.geometry import augment

IMAGENET = ImageConfig((3, 8, 8), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def random_images(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, 4, 8, 15])
def test_preparation_equals_torchvisions_one_image_at_a_time(channels, size):
    images = random_images(2, 5, channels, 8, 8)
    steps = [v2.ToDtype(torch.float32, scale=True), v2.Grayscale(3) if channels == 1 else v2.Identity()]
    steps += [v2.Resize((size, size), antialias=True)] if size else []
    plain = v2.Compose([*steps, v2.Normalize(IMAGENET.mean, IMAGENET.std)])
    expected = torch.stack([torch.stack([plain(image) for image in client]) for client in images])
    torch.testing.assert_close(prepare_images(images, IMAGENET, size), expected, atol=1e-5, rtol=1e-5)


def test_resizing_is_pillows():
    """Pillow rounds to whole grey values in between: a difference of up to one value is its."""
    image = random_images(3, 20, 20)
    pillow = v2.functional.to_pil_image(image).resize((9, 9), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.asarray(pillow).copy()).permute(2, 0, 1) / 255
    prepared = prepare_images(image, ImageConfig((3, 9, 9), (0, 0, 0), (1, 1, 1)), 9)
    assert (prepared - expected).abs().max() < 1.01 / 255


def test_without_a_backbones_constants_bytes_become_minus_one_to_one():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(prepare_images(images).flatten(), torch.tensor([-1.0, -0.6, 1.0]))


def test_a_network_for_one_channel_gets_one():
    prepared = prepare_images(random_images(4, 1, 8, 8), ImageConfig((1, 8, 8), (0.1, 0.2, 0.3), (0.5, 0.5, 0.5)))
    torch.testing.assert_close(prepared, (random_images(4, 1, 8, 8) / 255 - 0.2) / 0.5)


def test_floating_point_images_are_left_alone():
    images = torch.rand(2, 3, 8, 8)
    assert prepare_images(images, IMAGENET, 4) is images


@pytest.mark.parametrize(
    ("image", "shape", "dtype"),
    [
        (Image.new("L", (5, 4)), (1, 4, 5), torch.uint8),
        (Image.new("RGB", (5, 4)), (3, 4, 5), torch.uint8),
        (Image.new("RGBA", (5, 4)), (3, 4, 5), torch.uint8),
        (Image.new("P", (5, 4)), (3, 4, 5), torch.uint8),
        (np.zeros((4, 5), np.uint8), (1, 4, 5), torch.uint8),
        (np.zeros((4, 5, 3), np.uint8), (3, 4, 5), torch.uint8),
        (np.zeros((3, 4, 5), np.float32), (3, 4, 5), torch.float32),
        (torch.zeros(4, 5, dtype=torch.uint8), (1, 4, 5), torch.uint8),
        (torch.zeros(7), (7,), torch.float32),
    ],
)
def test_whatever_a_dataset_gives_becomes_a_tensor(image, shape, dtype):
    assert (tuple(to_image(image).shape), to_image(image).dtype) == (shape, dtype)


@pytest.mark.parametrize(
    ("image", "words"), [("cat.jpg", "got 'cat.jpg'"), (torch.zeros(3, 4, 4, dtype=torch.int64), "int64")]
)
def test_what_is_no_image(image, words):
    with pytest.raises(TypeError, match=words):
        to_image(image)


def shift_by_pixel(image, top, left, mirrored, padding):
    """One image within its border of zeros, pixel by pixel."""
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            source_row = row + top - padding
            source_column = (width - 1 - column if mirrored else column) + left - padding
            if 0 <= source_row < height and 0 <= source_column < width:
                result[:, row, column] = image[:, source_row, source_column]
    return result


def test_augmentation_equals_a_plain_loop():
    images = random_images(12, 3, 5, 6)
    crops = draw_crops(12, True, 2, generator(0, "test"))
    assert len({tuple(crop) for crop in crops.tolist()}) > 6
    expected = [shift_by_pixel(image, *crop, 2) for image, crop in zip(images, crops.tolist(), strict=True)]
    assert torch.equal(augment(images, crops, 2), torch.stack(expected))


def test_each_augmentation_can_be_had_alone():
    flips = draw_crops(200, True, 0, generator(0, "test"))
    assert (flips[:, :2] == 0).all()
    assert 70 < flips[:, 2].sum() < 130  # 100 ± 4 standard deviations of 7.1
    shifts = draw_crops(200, False, 4, generator(0, "test"))
    assert (shifts[:, 2] == 0).all()
    assert set(shifts[:, 0].tolist()) == set(shifts[:, 1].tolist()) == set(range(9))


def cohort(clients, counts, x, step=3):
    return CohortBatch(clients, x, torch.zeros(x.shape[:2], dtype=torch.long), counts, 0, step, round=2)


def test_a_clients_augmentation_depends_on_round_client_and_step_alone():
    x = random_images(2, 6, 1, 8, 8)
    prepare = Preparation(None, None, 2, True, seed=7)
    both = prepare(cohort((4, 9), (6, 6), x)).x
    for row, client in enumerate((4, 9)):
        assert torch.equal(prepare(cohort((client,), (6,), x[row : row + 1])).x[0], both[row])
        crops = draw_crops(6, True, 2, generator(7, "augment", 2, client, 3)).tolist()
        plain = torch.stack([shift_by_pixel(image, *crop, 2) for image, crop in zip(x[row], crops, strict=True)])
        torch.testing.assert_close(both[row], plain / 127.5 - 1)
    assert not torch.equal(prepare(cohort((4, 9), (6, 6), x, step=4)).x, both)


def test_a_small_clients_augmentation_is_that_which_it_draws_alone():
    x = random_images(2, 6, 1, 8, 8)
    prepare = Preparation(None, None, 2, True, seed=7)
    both = prepare(cohort((4, 9), (6, 3), x)).x
    alone = prepare(cohort((9,), (3,), x[1:, :3])).x
    assert torch.equal(both[1, :3], alone[0])


def test_padding_stays_zero():
    x = random_images(2, 6, 1, 8, 8)
    x[1, 4:] = 0
    prepared = Preparation(IMAGENET, None, 2, True)(cohort((0, 1), (6, 4), x)).x
    assert prepared.shape == (2, 6, 3, 8, 8)
    assert (prepared[1, 4:] == 0).all()
    assert (prepared[1, :4] != 0).any()


def test_test_data_are_not_augmented():
    x = random_images(6, 1, 8, 8)
    batch = EvalBatch(x, torch.zeros(6), torch.zeros(6))
    assert torch.equal(Preparation(IMAGENET, 6, 2, True)(batch).x, prepare_images(x, IMAGENET, 6))
    assert torch.equal(Preparation(IMAGENET, 6, 2, True)(x), prepare_images(x, IMAGENET, 6))
