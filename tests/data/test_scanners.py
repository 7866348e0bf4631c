# SPDX-License-Identifier: Apache-2.0
"""Scanners: each device against a loop over pixels, who gets which image, and where the set goes in a recipe."""

import hashlib
import json
from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.runs import PeradaCLI
from perada.core.seeding import derive_seed
from perada.data import (
    ByDomain,
    Digits,
    Dirichlet,
    FederatedDataModule,
    FromFile,
    ImageFolder,
    ImageSet,
    Photographs,
    Scanners,
)
from perada.data.partitions import Split
from perada.data.sets.scanners import DEVICES, scan
from perada.deploy.site.file import read_site

SIDE = 10
DIGEST = "59d959ef93ed8976034e44f1ed90cbdf34582b1411f31d5030734931c2df57cf"


def round_half_up(value):
    return floor(value + Fraction(1, 2))


def at(image, row, column):
    inside = 0 <= row < len(image) and 0 <= column < len(image)
    return image[row][column] if inside else 0


def bilinear(image, row, column):
    """The value at a place between pixels; black outside."""
    top = floor(row)
    left = floor(column)
    total = Fraction(0)
    for near_row, row_weight in ((top, top + 1 - row), (top + 1, row - top)):
        for near_column, column_weight in ((left, left + 1 - column), (left + 1, column - left)):
            total += at(image, near_row, near_column) * row_weight * column_weight
    return round_half_up(total)


def blurred(image, row, column):
    reach = 2
    size = len(image)
    total = weights = 0
    for down in range(1 - reach, reach):
        for right in range(1 - reach, reach):
            weight = (reach - abs(down)) * (reach - abs(right))
            near = image[min(max(row + down, 0), size - 1)][min(max(column + right, 0), size - 1)]
            total = total + weight * near
            weights = weights + weight
    return round_half_up(Fraction(total, weights))


MIDDLE = Fraction(SIDE - 1, 2)
PIXELS = {
    "plain": lambda image, row, column: image[row][column],
    "negative": lambda image, row, column: 255 - image[row][column],
    "turned": lambda image, row, column: image[column][SIDE - 1 - row],
    "thick": lambda image, row, column: max(
        at(image, row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)
    ),
    "faint": lambda image, row, column: 102 + floor(Fraction(image[row][column], 5)),
    "mirrored": lambda image, row, column: image[row][SIDE - 1 - column],
    "blurred": blurred,
    "upside_down_negative": lambda image, row, column: 255 - image[SIDE - 1 - row][SIDE - 1 - column],
    "sheared": lambda image, row, column: bilinear(image, Fraction(row), column + (row - MIDDLE) / 2),
    "small": lambda image, row, column: bilinear(image, MIDDLE + 2 * (row - MIDDLE), MIDDLE + 2 * (column - MIDDLE)),
    "lit": lambda image, row, column: floor(Fraction(image[row][column] + floor(Fraction(255 * column, SIDE - 1)), 2)),
}


def looped(image, kind):
    return [[PIXELS[kind](image, row, column) for column in range(SIDE)] for row in range(SIDE)]


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", [kind for kind in DEVICES if kind != "noisy"])
def test_a_device_makes_of_each_channel_what_a_loop_over_pixels_makes(kind):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, SIDE, SIDE)).astype(np.uint8))
    expected = [[looped(channel, kind) for channel in image] for image in images.tolist()]
    assert scan(images, kind, [0, 1]).tolist() == expected


def test_devices_joined_by_plus_work_one_after_another():
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, 1, SIDE, SIDE)).astype(np.uint8))
    expected = looped(looped(images[0, 0].tolist(), "negative"), "sheared")
    assert scan(images, "negative+sheared", [0])[0, 0].tolist() == expected


def test_noise_has_mean_0_and_the_documented_deviation_and_is_that_of_the_image_s_seed():
    grey = torch.full((4, 1, 64, 64), 128, dtype=torch.uint8)
    seen = scan(grey, "noisy", [5, 6, 5, 7])
    inside = (seen.double() - 128)[(seen > 0) & (seen < 255)]
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    # Four uniform numbers from 0 to 255, summed and scaled by 2/5, cut off at 0 and 255.
    draws = np.random.default_rng(9).integers(0, 256, (4, 100_000)).sum(0)
    expected = np.clip(128 + (draws - 510) * 2 // 5, 0, 255)
    assert abs(seen.double().mean() - expected.mean()) < 1.5
    assert abs(seen.double().std() - expected.std()) < 1.5
    assert 45 < inside.std() < 65


class Numbered(ImageSet):
    """Images of one grey level each, which no turn or mirror changes: 90 for training, and 60 others for testing."""

    num_classes = 3
    classes = ("a", "b", "c")

    def _load_images(self):
        levels = torch.arange(90) if self.train else torch.arange(90, 150)
        images = levels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 6, 6).contiguous()
        return images, levels % 3


def levels_of(images):
    return images.images[:, 0, 0, 0].tolist()


STILL = ["plain", "turned", "mirrored"]


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_each_image_belongs_to_one_scanner_and_one_split(alpha):
    train = Scanners(Numbered(), STILL, alpha=alpha, test_share=0.4, size=None)
    test = train.with_split(False)
    assert sorted(levels_of(train) + levels_of(test)) == list(range(150))
    for part in (train, test):
        assert part.labels.tolist() == [level % 3 for level in levels_of(part)]
    sizes = {name: [(part.columns["scanner"] == name).sum() for part in (train, test)] for name in STILL}
    for of_train, of_test in sizes.values():
        assert of_test == round(0.4 * (of_train + of_test))
    if alpha is None:
        assert {sum(both) for both in sizes.values()} == {50}


def test_the_splits_of_the_set_are_kept_without_test_share():
    train = Scanners(Numbered(), STILL, alpha=0.3, size=None)
    test = train.with_split(False)
    assert levels_of(train) == list(range(90))
    assert levels_of(test) == list(range(90, 150))
    # A scanner has of each class the same share of both splits, but for rounding and one image that each has at least.
    for label in range(3):
        for name in STILL:
            counts = [
                ((part.columns["scanner"] == name) & (part.labels == label).numpy()).sum() for part in (train, test)
            ]
            assert abs(counts[0] / 30 - counts[1] / 20) <= 2 / 20


def test_alpha_makes_the_scanners_unequal_and_min_per_scanner_bounds_it():
    sizes = [
        np.unique(
            Scanners(Numbered(), STILL, alpha=alpha, min_per_scanner=least).columns["scanner"], return_counts=True
        )[1]
        for alpha, least in ((None, 2), (0.1, 2), (0.1, 25))
    ]
    assert sizes[0].tolist() == [30, 30, 30]
    assert np.ptp(sizes[1]) > 20
    assert sizes[2].min() == 25


def test_the_digits_through_twelve_scanners_are_the_same_bytes_everywhere():
    """The digest was written down once: another processor, number of threads or version must give it too."""
    digits = Scanners(Digits(), kinds=12, alpha=0.5, test_share=0.4)
    content = digits.images.numpy().tobytes() + "".join(digits.columns["scanner"].tolist()).encode()
    assert hashlib.sha256(content).hexdigest() == DIGEST
    assert digits.images.shape == (1078, 1, 32, 32)
    assert (digits.num_classes, digits.classes) == (10, Digits().classes)
    other = Scanners(Digits(), kinds=12, alpha=0.5, test_share=0.4, seed=1)
    assert not torch.equal(other.images, digits.images)


def test_a_client_of_each_scanner_has_the_images_of_its_own_device():
    data = FederatedDataModule(dataset=Scanners(Digits(), kinds=4), partition=ByDomain("scanner"))
    data.setup()
    assert data.client_names == ["negative", "noisy", "plain", "turned"]
    # The background of a digit is black, and that of its negative is white.
    for client, corner in enumerate((255, None, 0, None)):
        images = data.checked.train.take(torch.full((50,), client), torch.arange(50))[0]
        if corner is not None:
            assert images[:, 0, :, 0].float().median() == corner


def test_clients_of_one_scanner_divide_it_by_another_partition():
    images = Scanners(Numbered(), STILL, size=None)
    partition = ByDomain("scanner", within=Dirichlet(2, alpha=0.3, min_per_client=5))
    column = images.columns["scanner"]
    labels = images.labels.numpy()
    train = Split(labels, np.arange(90), {"scanner": column})
    test = Split(labels[:0], np.arange(0), {"scanner": column[:0]})
    rows, test_rows = partition.split(train, test, seed=4)
    assert partition.client_names(train) == [f"{name} {number}" for name in sorted(STILL) for number in (0, 1)]
    assert len(test_rows) == len(rows) == 6
    for place, name in enumerate(sorted(STILL)):
        own = np.flatnonzero(column == name)
        alone = Split(labels[own], np.arange(len(own)))
        shares, _ = partition.within.split(alone, Split(labels[:0], np.arange(0)), derive_seed(4, "within", place))
        for number, share in enumerate(shares):
            assert rows[2 * place + number].tolist() == own[share].tolist()


def test_public_images_come_from_all_scanners_and_belong_to_no_client(tmp_path):
    options = {"partition": ByDomain("scanner"), "image_size": 32}
    held_back = FederatedDataModule(
        dataset=Scanners(Digits(), alpha=0.5, test_share=0.4), public_fraction=0.25, **options
    )
    held_back.setup()
    record = held_back._record
    owned = [row for rows in record["train"] for row in rows]
    assert sorted(owned + record["public"]) == list(range(1078))
    scanners = held_back.division.dataset.columns["scanner"][record["public"]]
    assert len(set(scanners.tolist())) == 12
    photographs = Scanners(Photographs(60, gray=True))
    assert photographs.labels is None
    apart = FederatedDataModule(dataset=Scanners(Digits()), public=photographs, **options)
    apart.setup()
    assert apart.checked.public.sizes == (60,)
    assert photographs.columns["scanner"].tolist().count("negative") == 5
    # A run's division can be read again.
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(record))
    again = FederatedDataModule(
        dataset=Scanners(Digits(), alpha=0.5, test_share=0.4), partition=FromFile(str(path)), public_fraction=0.25
    )
    again.setup()
    assert again.client_names == held_back.client_names
    assert again._record["train"] == record["train"]


def test_images_that_stay_on_disk_are_scanned_as_they_are_read(tmp_path):
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(8):
            Image.fromarray(rng.integers(0, 256, (9, 7), dtype=np.uint8)).save(tmp_path / label / f"{number}.png")
    kinds = ["negative", "noisy", "lit"]
    lazy = Scanners(ImageFolder(str(tmp_path), size=8, gray=True), kinds, size=16)
    assert lazy.images is None
    source = lazy.dataset
    for index in range(len(lazy)):
        image, label = lazy[index]
        plain, own_label = source[index]
        resized = np.asarray(Image.fromarray(plain[0].numpy()).resize((16, 16), Image.Resampling.BILINEAR))
        seed = derive_seed(0, "scanner", 1, index)
        expected = scan(torch.from_numpy(resized.copy())[None, None], lazy.columns["scanner"][index], [seed])[0]
        assert label == own_label
        assert torch.equal(image, expected)
    module = FederatedDataModule(dataset=lazy, partition=ByDomain("scanner"))
    module.setup()
    assert module.client_names == sorted(kinds)


class Patients(Numbered):
    group_column = "patient"

    @property
    def columns(self):
        return {"patient": np.arange(len(self)) // 5, "scanner": np.arange(len(self))}


def test_columns_of_the_set_are_kept_and_patients_stay_together():
    images = Scanners(Patients(), STILL, size=None)
    assert images.group_column == "patient"
    assert images.columns["patient"].tolist() == [row // 5 for row in range(90)]
    assert set(images.columns["scanner"].tolist()) == set(STILL)
    with pytest.raises(ValueError, match=r"test_share=0\.4 .*one patient"):
        _ = Scanners(Patients(), STILL, test_share=0.4).labels


class Ready(Numbered):
    def _load_images(self):
        images, labels = super()._load_images()
        return images.float(), labels


class Oblong(Numbered):
    def _load_images(self):
        images, labels = super()._load_images()
        return images[..., :4], labels


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scanners("Digits"), "dataset must be an image set such as Digits"),
        (lambda: Scanners(Numbered(), 13), r"kinds .*got 13"),
        (lambda: Scanners(Numbered(), 0), r"kinds .*got 0"),
        (
            lambda: Scanners(Numbered(), ["plain", "upside"]),
            r"kinds .*got 'upside'",
        ),
        (
            lambda: Scanners(Numbered(), ["plain", "plain"]),
            "kinds must be a list of at least one name without rep",
        ),
        (lambda: Scanners(Numbered(), []), "kinds must be a list of at least one name without rep"),
        (lambda: Scanners(Numbered(), alpha=0), r"alpha .*got 0"),
        (lambda: Scanners(Numbered(), test_share=1), r"test_share .*got 1"),
        (lambda: Scanners(Photographs(20), alpha=0.5).images, "alpha=0.5"),
        (lambda: Scanners(Ready()).images, "samples of type float32, but scanners take uint8 images"),
        (lambda: Scanners(Oblong(), size=None).images, "6×4 pixels, but scanners need square images: set size"),
        (lambda: Scanners(Numbered(), alpha=0.5, min_per_scanner=20).images, "12 clients with at least 20"),
        (lambda: ByDomain("scanner", 2, Dirichlet(2)), "are mutually exclusive: leave one out"),
        (lambda: ByDomain("scanner", within=FromFile("x")), "num_clients"),
    ],
)
def test_what_cannot_be_used_is_rejected(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


RECIPE = {
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
    "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
    "data": {
        "dataset": {"class_path": "Scanners", "init_args": {"dataset": "Digits", "kinds": 3, "test_share": 0.4}},
        "partition": {"class_path": "ByDomain", "init_args": {"column": "scanner"}},
        "public": {
            "class_path": "Scanners",
            "init_args": {"dataset": {"class_path": "Photographs", "init_args": {"count": 8, "gray": True}}},
        },
    },
    "federated": {"algorithm": "PerAda"},
    "distillation": {"steps": 1},
}


@pytest.mark.slow
def test_a_recipe_names_the_set_and_a_site_gets_the_images_of_its_own_device(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    simulated = PeradaCLI(["--config", str(path)], run=False).datamodule
    simulated.setup()
    assert simulated.client_names == ["negative", "plain", "turned"]
    server = server_recipe(str(path))
    assert (server.num_classes, server.classes) == (10, Digits().classes)
    assert len(server.public) == 8
    for client, name in enumerate(simulated.client_names):
        data = {key: RECIPE["data"][key] for key in ("dataset", "partition")} | {"client": client}
        content = {"name": name.replace("_", "-"), "recipes": [{"recipe": "recipe.yaml"}], "data": data}
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
        own = site_recipe(path, read_site(tmp_path / "site.yaml")).data
        own.setup()
        rows = torch.arange(simulated.train_sizes[client])
        expected = simulated.checked.train.take(torch.full_like(rows, client), rows)
        seen = own.checked.train.take(torch.zeros_like(rows), rows)
        assert own.train_sizes == (len(rows),)
        assert torch.equal(seen[0], expected[0])
        assert torch.equal(seen[1], expected[1])
