# SPDX-License-Identifier: Apache-2.0
"""Shifted test sets: what the corruptions make of an image, and what is rejected."""

import random
import sys

import imagecorruptions
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from perada import FederatedData, FederatedDataModule
from perada.data import Corruptions, ImageSet, LabelShift
from perada.data import shifts as shifted
from perada.data.batches.samples import make_store
from perada.data.shifts import EXTRA, MAIN, Condition, CorruptedStore, corrupt
from tests.rejections import rejects

DETERMINISTIC = {"defocus_blur", "zoom_blur", "brightness", "contrast"}
DETERMINISTIC |= {"pixelate", "jpeg_compression", "gaussian_blur", "saturate"}


def image(channels=3, size=32):
    return torch.randint(0, 256, (channels, size, size), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def test_the_kinds_are_those_of_the_benchmark():
    assert list(MAIN) == imagecorruptions.get_corruption_names("common")
    assert list(EXTRA) == imagecorruptions.get_corruption_names("validation")
    assert (len(MAIN), len(EXTRA)) == (15, 4)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "kind",  # glass_blur is compiled, which takes seconds
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "glass_blur")) for kind in MAIN + EXTRA],
)
def test_a_corruption_follows_from_its_seed_and_leaves_the_global_streams_alone(kind):
    streams = [random.random, np.random.random, lambda: torch.rand(()).item()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = [draw() for draw in streams]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    first = corrupt(image(), kind, 3, 5)
    assert [draw() for draw in streams] == expected
    assert first.shape == (3, 32, 32)
    assert first.dtype == torch.uint8
    assert not torch.equal(first, image())
    assert torch.equal(first, corrupt(image(), kind, 3, 5))
    assert torch.equal(first, corrupt(image(), kind, 3, 6)) == (kind in DETERMINISTIC)
    assert not torch.equal(first, corrupt(image(), kind, 4, 5))


def test_contrast_and_noise_have_the_parameters_of_imagenet_c():
    x = image().double().div(255)
    mean = x.mean((1, 2), keepdim=True)
    for severity, factor in enumerate((0.4, 0.3, 0.2, 0.1, 0.05), 1):
        expected = ((x - mean) * factor + mean) * 255
        assert (corrupt(image(), "contrast", severity, 0) - expected).abs().max() <= 1  # cut to whole numbers
    grey = torch.full((3, 128, 128), 128, dtype=torch.uint8)
    spread = corrupt(grey, "gaussian_noise", 1, 0).double().std() / 255
    assert float(spread) == pytest.approx(0.08, rel=0.02)


def test_of_a_grey_image_the_green_channel_is_kept():
    grey = image(1)
    for kind in ("shot_noise", "frost"):
        result = corrupt(grey, kind, 2, 9)
        assert result.shape == (1, 32, 32)
        assert torch.equal(result, corrupt(grey.expand(3, -1, -1), kind, 2, 9)[1:2])


def test_a_spatter_without_drops_leaves_the_image():
    plain = torch.full((3, 32, 32), 100, dtype=torch.uint8)
    result = [corrupt(plain, "spatter", 1, seed) for seed in range(60)]
    assert min(int(one.min()) for one in result) >= 99  # drops only lighten; a division by zero made it black
    assert any(torch.equal(one, plain) for one in result)


class Read(Dataset):
    """Images that are read one by one."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 2


@pytest.mark.parametrize("size", [None, 40])
def test_an_images_corruption_does_not_depend_on_its_batch(size):
    images = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    sets = [TensorDataset(part, torch.zeros(len(part)).long()) for part in images.split([3, 4])]
    owners = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    indices = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    for datasets in (sets, [Read(part) for part in images.split([3, 4])]):
        store = CorruptedStore(Condition("", make_store(datasets, size=size), "gaussian_noise", 2), 7, size)
        whole, labels = store.take(owners, indices)
        assert whole.shape == (7, 3, size or 32, size or 32)
        assert len(labels) == 7
        for row in range(7):
            assert torch.equal(store.take(owners[row : row + 1], indices[row : row + 1], (7, -1, 3))[0][0], whole[row])
    equal = make_store([TensorDataset(images[:1].expand(2, -1, -1, -1), torch.zeros(2).long())])
    same = CorruptedStore(Condition("", equal, "fog", 2), 7, None)
    twice, _ = same.take(torch.zeros(2).long(), torch.arange(2))
    assert not torch.equal(*twice)  # equal images in other places


def test_workers_corrupt_alike():
    def batches(workers):
        parts = [TensorDataset(torch.arange(4 * 3 * 32 * 32).view(4, 3, 32, 32).byte(), torch.arange(4) % 2)] * 2
        data = FederatedDataModule(FederatedData(parts, parts), num_workers=workers, shifts={"x": ["snow"]})
        data.setup()
        return [batch.x for batch in data.shift_loader(data.conditions[2])]

    assert torch.equal(torch.cat(batches(0)), torch.cat(batches(2)))


class Other(ImageSet):
    """Six images with the given labels."""

    def __init__(self, labels=(0, 1, 2, 0, 1, 2), classes=3, train=True):
        super().__init__(train)
        self.given = labels
        self.num_classes = classes

    def _load_images(self):
        labels = None if self.given is None else torch.tensor(self.given)
        return torch.zeros(6 if labels is None else len(labels), 1, 32, 32, dtype=torch.uint8), labels


def module(shifts, dtype=torch.uint8, size=32, test=True, clients=3, classes=3, **options):
    parts = [TensorDataset(torch.ones(6, 1, size, size).to(dtype), torch.arange(6) % classes) for _ in range(clients)]
    data = FederatedDataModule(FederatedData(parts, parts if test else []), shifts=shifts, **options)
    data.setup()
    return data


def test_short_forms():
    data = module({"a": "main", "b": "fog", "c": ["snow", "frost"], "d": "label_shift", "e": Other(), "f": "extra"})
    passes = []
    for condition in data.conditions:
        passes.append((condition.shift, condition.corruption, condition.severity, condition.of_other_clients))
    expected = [("a", kind, severity, False) for kind in MAIN for severity in range(1, 6)]
    expected += [("b", "fog", severity, False) for severity in range(1, 6)]
    expected += [("c", kind, severity, False) for kind in ("snow", "frost") for severity in range(1, 6)]
    expected += [("d", "", 0, True), ("e", "", 0, False)]
    expected += [("f", kind, severity, False) for kind in EXTRA for severity in range(1, 6)]
    assert passes == expected
    assert len(module({"all": Corruptions("all")}).conditions) == 19 * 5
    assert [condition.severity for condition in module({"a": Corruptions("fog", [5, 2])}).conditions] == [5, 2]


def test_held_out_images_are_not_shifted():
    assert module({"a": "fog", "b": Other()}, evaluate_on="validation", client_validation=0.5).conditions == []


@pytest.mark.parametrize(
    ("shifts", "options", "said"),
    [
        ({"local_test": "fog"}, {}, "the name 'local_test' is not allowed"),
        ({"fog_std": "fog"}, {}, "the name 'fog_std' is not allowed"),
        ({"a/b": "fog"}, {}, "the name 'a/b' is not allowed"),
        ({"a": "fogg"}, {}, "a='fogg' is not a shift; use 'label_shift'"),
        ({"a": 3}, {}, "a=3 is not a shift"),
        ({"a": ["fog", "fogg"]}, {}, "kind must be one of .*, got 'fogg'"),
        ({"a": ["fog", "fog"]}, {}, r"kinds must have at least one entry and each only once, got \['fog', 'fog'\]"),
        (
            {"a": "fog"},
            {"size": 28},
            r"'a' cannot corrupt images uint8 of shape \(1, 28, 28\); use .* and set image_size=32 or more",
        ),
        ({"a": "fog"}, {"dtype": torch.float32}, "'a' cannot corrupt images float32 of shape"),
        ({"a": "fog"}, {"test": False}, "'a' needs test images"),
        ({"a": LabelShift()}, {"clients": 1}, "'a' needs test images of at least two clients"),
        ({"a": Other(None)}, {}, r"'a' \(Other, test split\) has no labels"),
        ({"a": Other(classes=4)}, {}, "must have 3 classes like the data, got 4; use a different set"),
        ({"a": Other((0, 1, 3), classes=None)}, {}, r"'a' \(Other, test split\): it has the label 3, outside 0..2"),
        (
            {"a": Other(((0.0, 1.0, 0.0),), classes=None)},
            {},
            r"has several labels per image, unlike the data; use a set of the same kind",
        ),
    ],
)
def test_what_cannot_be_used_is_rejected(shifts, options, said):
    with pytest.raises(ValueError, match=rf"shifts: .*{said}"):
        module(shifts, **options)


@pytest.mark.parametrize("severity", [0, 6, 2.5, True])
def test_a_severity_is_from_1_to_5(severity):
    with rejects("shifts: severity", severity):
        Corruptions("fog", [severity])


def test_when_is_one_of_three():
    with rejects("shifts_when", "often"):
        module({}, shifts_when="often")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(shifted, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"install perada\[shifts\]"):
        module({"a": "fog"})
    assert len(module({"a": "label_shift"}).conditions) == 1


def test_a_library_that_does_not_load_is_rejected_at_set_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ImportError, match=r"^shifts: .*OpenCV.*cv2"):
        module({"fog": Corruptions("fog")})
