# SPDX-License-Identifier: Apache-2.0
"""What training does to images: recorded, and done again to images from elsewhere."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import TensorDataset

from perada.core.rounds import ImageConfig
from perada.data import Digits, Dirichlet, FederatedData, FederatedDataModule, ImageFolder, Phase
from perada.data.preprocessing import Preprocessing

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class Pictures(torch.utils.data.Dataset):
    """PIL images of different sizes, as torchvision's sets give them."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.images = [
            Image.fromarray(random.integers(0, 256, (10 + i, 12, 3), dtype=np.uint8).astype(np.uint8)) for i in range(4)
        ]
        self.targets = [0, 1, 0, 1]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def noise(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def folder_of_images(root):
    for number in range(20):
        path = root / f"class_{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(20, 30, 3).numpy()).save(path)
    return root


def set_up(data, channels=3):
    constants = (MEAN, STD) if channels == 3 else ((0.3,), (0.2,))
    data.configure_rounds(
        seed=0, clients_per_round=None, phases=[Phase()], image_config=ImageConfig((channels, 9, 9), *constants)
    )
    return data


def datamodule_of(kind, tmp_path):
    """A data module, and its test images before anything was done to them."""
    if kind == "digits":
        data = FederatedDataModule(dataset=Digits(), partition=Dirichlet(3), image_size=16, test_limit=20)
        return set_up(data), None
    if kind == "folder":
        files = ImageFolder(str(folder_of_images(tmp_path)), size=12)
        data = set_up(FederatedDataModule(dataset=files, partition=Dirichlet(2), image_size=18))
        return data, [path for part in data.checked.test.datasets for path in paths_of(part)]
    if kind == "pictures":
        sets = [Pictures(1), Pictures(2)]
        data = FederatedDataModule(FederatedData(sets, sets), image_size=16)
        return set_up(data), [image for part in sets for image in part.images]
    shape = (1, 8, 10) if kind == "grey" else (3, 8, 10)
    sets = [TensorDataset(noise(4, *shape), torch.arange(4) % 2) for _ in range(2)]
    data = FederatedDataModule(FederatedData(sets, sets), image_size=None)
    return set_up(data, shape[0]), [image for part in sets for image in part.tensors[0]]


def paths_of(part):
    return [part.dataset.manifest.paths[index] for index in part.indices]


@pytest.mark.parametrize("kind", ["digits", "folder", "pictures", "grey", "colour"])
def test_images_from_elsewhere_are_prepared_as_the_test_images_are(kind, tmp_path):
    data, images = datamodule_of(kind, tmp_path)
    expected = torch.cat([data.prepare(batch).x for batch in data.val_dataloader()])
    if images is None:
        images = list(torch.cat([batch.x for batch in data.val_dataloader()]))
        assert {image.shape for image in images} == {(1, 8, 8)}
    read = Preprocessing.from_record(json.loads(json.dumps(data.preprocessing.record())))
    assert read == data.preprocessing
    actual = read.batch(images)
    torch.testing.assert_close(actual.expand_as(expected), expected, rtol=0, atol=1e-6)
    assert read.shape in (tuple(expected.shape[1:]), (3, *expected.shape[2:]))


COLOUR = Preprocessing.from_record(
    {
        "kind": "uint8",
        "shape": [3, 6, 7],
        "channels": 3,
        "resize": [{"size": [6, 7], "rounded": True}],
        "interpolation": "bilinear, antialiased",
        "mean": list(MEAN),
        "std": list(STD),
    }
)
GREY = Preprocessing.from_record({**COLOUR.record(), "channels": 1})


def by_hand(pixels):
    """Pixels (H, W, 3) resized by torch in floats, and normalised channel by channel."""
    x = torch.from_numpy(pixels).permute(2, 0, 1).double()[None]
    x = functional.interpolate(x, (6, 7), mode="bilinear", antialias=True)[0] / 255
    return torch.stack([(x[c] - MEAN[c]) / STD[c] for c in range(3)])


def test_all_that_an_image_may_be(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    pixels = np.repeat(np.repeat(pixels, 2, 0), 2, 1)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    opaque = np.dstack([pixels, np.full(pixels.shape[:2], 255, dtype=np.uint8)])
    forms = [tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(pixels), pixels, tensor]
    forms += [opaque, torch.from_numpy(opaque).permute(2, 0, 1), Image.fromarray(opaque)]
    result = COLOUR.batch(forms)
    assert result.shape == (len(forms), 3, 6, 7)
    levels = (result[0].double() - by_hand(pixels)).abs() * torch.tensor(STD).view(3, 1, 1) * 255
    assert levels.max() < 1.01  # rows are resized and rounded to whole numbers, then columns
    assert all(torch.equal(one, result[0]) for one in result)


def test_grey_and_colour_become_one_another():
    levels = np.random.default_rng(0).integers(0, 256, (6, 7), dtype=np.uint8)
    three = np.dstack([levels] * 3)
    forms = [levels, levels[:, :, None], torch.from_numpy(levels), Image.fromarray(levels), three]
    for preprocessing in (COLOUR, GREY):
        result = preprocessing.batch(forms)
        torch.testing.assert_close(result, by_hand(three).float().expand_as(result), rtol=0, atol=1e-5)
    palette = Image.fromarray(three).quantize(256)
    kept = np.array(palette.convert("RGB"))
    torch.testing.assert_close(COLOUR.batch([palette])[0], by_hand(kept).float(), rtol=0, atol=1e-5)


def test_floats_pass_as_they_are():
    x = torch.randn(3, 6, 7)
    result = COLOUR.batch([x, x.double(), x.numpy(), x.permute(1, 2, 0).numpy()])
    assert all(torch.equal(one, x) for one in result)
    with pytest.warns(UserWarning, match=r"\[0, 1\].*normalised"):
        COLOUR.batch([x.sigmoid()])


@pytest.mark.parametrize(
    ("preprocessing", "image", "message"),
    [
        (COLOUR, torch.randn(3, 6, 6), r"of shape \(3, 6, 6\); pass float32 of shape \(3, 6, 7\)"),
        (COLOUR, noise(2, 6, 6), r"must have 3 channels, as in training, got uint8 of shape \(2, 6, 6\)"),
        (COLOUR, noise(5), r"a uint8 image must have the shape \(channels, height, width\), got \(5,\)"),
        (COLOUR, torch.zeros(2, 2, dtype=torch.int32), "images are int32"),
        (COLOUR, "missing.png", "missing.png does not exist: fix it, or leave it out"),
        (COLOUR, 7, "an image must be a tensor, an array or a PIL image, got 7"),
        (
            Preprocessing("float", (1, 8, 8)),
            "a.png",
            "'a.png' cannot be decoded",
        ),
        (Preprocessing("float", (1, 8, 8)), noise(1, 8, 8), r"is uint8 of shape .*; pass float32"),
        (Preprocessing("tokens", (5,)), torch.randn(5), r"is float32 of shape \(5,\); pass int64"),
    ],
)
def test_what_is_no_image_is_rejected(preprocessing, image, message):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message) as error:
        preprocessing.batch([image])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "video"),
        ("shape", [3, 0, 1]),
        ("std", [1.0, 1.0, 0.0]),
        ("mean", [0.1]),
        ("channels", "3"),
        ("interpolation", "nearest"),
        ("resize", [{"size": [4, 5], "rounded": False}]),
    ],
)
def test_a_broken_record_is_rejected(key, value):
    with pytest.raises(ValueError, match=r"preprocessing: |argument 2 is"):
        Preprocessing.from_record({**COLOUR.record(), key: value})
