# SPDX-License-Identifier: Apache-2.0
"""Parts of an image set: no image in two parts, groups whole, and one seed that draws everything of a division."""

from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from perada.cli import main
from perada.data import ByDomain, Digits, FederatedDataModule, ImageSet, Photographs, RandomPart, Scanners


class Patients(ImageSet):
    """60 images of 12 patients, each with its own grey level; labels count the images."""

    group_column = "patient"
    num_classes = 2

    def _load_images(self):
        numbers = torch.arange(60) + 60 * (not self.train)
        return numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).clone(), numbers % 2

    @property
    def columns(self):
        return {"patient": np.repeat(np.arange(12), 5)}

    @property
    def identities(self):
        return np.array([f"p{number}" for number in np.repeat(np.arange(12), 5)])

    @property
    def paths(self):
        return [f"{number}.png" for number in range(60)]


class Streamed(Patients):
    """The same, read one by one."""

    @property
    def images(self):
        return None

    def __len__(self):
        return 60

    def __getitem__(self, index):
        images, labels = self._load_images()
        return images[index], labels[index]


def grey_levels(images):
    return [int(images[row][0][0, 0, 0]) for row in range(len(images))]


@pytest.mark.parametrize("kind", [Patients, Streamed])
@pytest.mark.parametrize("train", [True, False])
def test_parts_have_no_image_in_common_and_miss_none(kind, train):
    cuts = [0.0, 0.2, 0.55, 1.0]
    parts = [RandomPart(kind(), start, stop, train=train) for start, stop in pairwise(cuts)]
    levels = [grey_levels(part) for part in parts]
    first_level = 0 if train else 60
    assert sorted(chain.from_iterable(levels)) == list(range(first_level, first_level + 60))
    for part, own_levels in zip(parts, levels, strict=True):
        assert own_levels == sorted(own_levels)
        assert len(part) == len(own_levels)
        for row, level in enumerate(own_levels):
            position = level % 60
            assert part.labels[row] == level % 2
            assert part.columns["patient"][row] == position // 5
            assert part.identities[row] == f"p{position // 5}"
            assert part.paths[row] == f"{position}.png"
    # A fifth, and 55 %, of 12 patients with 5 images each; no patient is in two parts.
    patients = [{level % 60 // 5 for level in own_levels} for own_levels in levels]
    assert [len(names) for names in patients] == [2, 5, 5]
    assert len(set.union(*patients)) == 12


def test_a_negative_index_and_one_beyond_the_end():
    part = RandomPart(Streamed(), stop=0.5)
    assert torch.equal(part[-1][0], part[len(part) - 1][0])
    with pytest.raises(IndexError):
        part[len(part)]


def test_other_seeds_draw_other_images():
    parts = {seed: grey_levels(RandomPart(Patients(), stop=0.5, seed=seed)) for seed in (None, 0, 1)}
    assert parts[None] == parts[0] != parts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.5, "stop": 0.5}, r"start=0.5 leaves no images before stop=0.5"),
        ({"start": 0.9, "stop": 0.2}, r"start=0.9 leaves no images before stop=0.2"),
        ({"start": 1.0}, r"start .*got 1.0"),
        ({"stop": 1.5}, r"stop .*got 1.5"),
        ({"start": -0.1}, r"start .*got -0.1"),
        ({"seed": -1}, r"seed .*got -1"),
        ({"dataset": [1]}, r"RandomPart: dataset .*got \[1\]"),
        ({"dataset": None}, r"RandomPart: dataset .*got None"),
    ],
)
def test_impossible_parts_are_rejected(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RandomPart(**{"dataset": Patients()} | options)


def test_a_part_without_images_is_named():
    with pytest.raises(ValueError, match=r"60 images of Patients, .*start=0\.5"):
        len(RandomPart(Patients(), start=0.5, stop=0.501))


def divide_images(data_seed, **options):
    """The images of each client's training and test sets, and of the server, as sets of bytes."""
    clients = RandomPart(Digits(), start=0.2, **options)
    data = FederatedDataModule(
        dataset=Scanners(clients, kinds=["plain", "negative"], alpha=0.5, test_share=0.4, size=None, **options),
        partition=ByDomain("scanner"),
        public=RandomPart(Digits(), stop=0.2, **options),
        seed=data_seed,
    )
    data.setup()

    def pixels(dataset):
        items = [dataset[row] for row in range(len(dataset))]
        return {(item[0] if isinstance(item, tuple) else item).numpy().tobytes() for item in items}

    shared = data.division.share_out()
    return [*map(pixels, shared.train), *map(pixels, shared.test), pixels(shared.public)]


def test_one_seed_draws_a_new_division_of_everything():
    """Training, test and public images, of which another seed used to move only a part."""
    first = divide_images(0)
    assert divide_images(0) == first
    assert divide_images(0, seed=0) == first
    for before, after in zip(first, divide_images(1), strict=True):
        # By chance at most the larger share is in both, which here is about 60 %.
        assert len(before & after) < 0.75 * len(after)
    # A seed of their own fixes the sets, whatever the data module's.
    assert divide_images(1, seed=0) == first


def test_sets_within_sets_get_the_seed():
    scanners = Scanners(RandomPart(Scanners(Digits(), seed=3), stop=0.5)).with_seed(7)
    assert repr(scanners) == (
        "Scanners(dataset=RandomPart(dataset=Scanners(dataset=Digits(), seed=3), stop=0.5, seed=7), seed=7)"
    )
    assert Digits().with_seed(7).train and repr(Photographs().with_seed(7)) == repr(Photographs())
    fixed = Scanners(Digits(), seed=2)
    assert fixed.with_seed(7) is fixed
    test_split = Scanners(Digits(), train=False).with_seed(1)
    assert not test_split.train and test_split.seed == 1


def test_the_quickstart_can_be_deployed(tmp_path, monkeypatch):
    """Its public images are the server's own: sites train on all of theirs."""
    monkeypatch.chdir(tmp_path)
    main(["deploy", "init", "quickstart", "federation", "--host", "localhost"])
    assert (tmp_path / "federation").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--config", "privacy/sample"],
        # It protects whole clients, whose updates must not be teachers.
        ["--config", "privacy/client", "--distillation.steps=0"],
    ],
)
def test_the_quickstart_passes_the_checks_of_a_private_run(tmp_path, monkeypatch, capsys, words):
    """With norms that a private run can train, and no image of a client at the server."""
    monkeypatch.chdir(tmp_path)
    norms = "--model.adapter_options={last_blocks: 3, norm: group, train_norms: false}"
    main(["check", "--config", "quickstart", *words, norms])
    assert "ε" in capsys.readouterr().out
