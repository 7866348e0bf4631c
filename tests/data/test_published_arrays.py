# SPDX-License-Identifier: Apache-2.0
"""MNIST, STL-10, CIFAR-10.1 and CIFAR-10-C, in files of the published names, sizes and types."""

import struct

import numpy as np
import pytest
import torch
import torchvision

from perada.data import CIFAR10_1, CIFAR10C, IID, MNIST, STL10, Digits, FederatedDataModule
from perada.data.sets.arrays import CORRUPTIONS
from tests.rejections import rejects

RANDOM = np.random.default_rng(0)
# What the authors list: four groups of the benchmark, then what they call extra (https://github.com/hendrycks/robustness).
BENCHMARK = (
    "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog brightness "
    "contrast elastic_transform pixelate jpeg_compression"
)
EXTRA = "speckle_noise gaussian_blur spatter saturate"


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def write_mnist(folder):
    folder.mkdir(parents=True)
    for prefix, count in (("train", 5), ("t10k", 3)):
        for name, array in (("images-idx3", pixels(count, 28, 28)), ("labels-idx1", pixels(count) % 10)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())


@pytest.mark.parametrize("train", [True, False])
def test_mnist_is_what_torchvision_reads(tmp_path, train):
    write_mnist(tmp_path / "MNIST" / "raw")
    theirs = torchvision.datasets.MNIST(tmp_path, train=train)
    for root in (tmp_path, tmp_path / "MNIST" / "raw"):
        ours = MNIST(str(root), train=train)
        assert torch.equal(ours.images, theirs.data[:, None])
        assert torch.equal(ours.labels, theirs.targets)


def test_mnist_that_is_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"MNIST.*MNIST/raw.*download: true"):
        len(MNIST(str(tmp_path)))
    write_mnist(tmp_path / "raw")
    labels, images = (tmp_path / "raw" / f"train-{name}-ubyte" for name in ("labels-idx1", "images-idx3"))
    images.write_bytes(labels.read_bytes())
    with pytest.raises(ValueError, match=r"images-idx3-ubyte.*\(N, 28, 28\).*https?://"):
        len(MNIST(str(tmp_path / "raw")))
    images.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte does not exist.*http"):
        len(MNIST(str(tmp_path / "raw")))


@pytest.mark.parametrize("kind", [MNIST, STL10])
def test_downloads_are_torchvisions_and_only_if_asked_for(tmp_path, kind, monkeypatch):
    calls = []
    name = f"torchvision.datasets.{kind.__name__}.__init__"
    monkeypatch.setattr(name, lambda self, root, download: calls.append((root, download)))
    kind(str(tmp_path)).download()
    assert calls == []
    kind(str(tmp_path), download=True).download()
    assert calls == [(str(tmp_path), True)]


def sparse(path, size, head=b""):
    """A file of the published size, most of it a hole that takes no room."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


@pytest.fixture
def stl10(tmp_path):
    """Images of the binary layout: 3 channels, in each the columns one after another. The first two are not black."""
    drawn = pixels(2, 96, 96, 3)
    for part, count in (("train", 5000), ("test", 8000), ("unlabeled", 100_000)):
        sparse(tmp_path / "stl10_binary" / f"{part}_X.bin", count * 27648, drawn.transpose(0, 3, 2, 1).tobytes())
    for part, count in (("train", 5000), ("test", 8000)):
        (tmp_path / "stl10_binary" / f"{part}_y.bin").write_bytes(bytes(1 + i % 10 for i in range(count)))
    return tmp_path, drawn


def test_stl10(stl10):
    root, drawn = stl10
    for train, count in ((True, 5000), (False, 8000)):
        labelled = STL10(str(root), train=train)
        assert labelled.images.shape == (count, 3, 96, 96)
        assert np.array_equal(labelled.images[:2].permute(0, 2, 3, 1), drawn)
        assert labelled.labels.tolist() == [i % 10 for i in range(count)]
    dataset = STL10(str(root / "stl10_binary"), unlabelled=True)
    assert (len(dataset), dataset.labels) == (100_000, None)
    assert np.array_equal(dataset[1].permute(1, 2, 0), drawn[1])


def test_unlabelled_stl10_is_a_public_set_of_which_only_what_is_used_is_read(stl10):
    root, drawn = stl10
    data = FederatedDataModule(
        dataset=Digits(), partition=IID(2), public=STL10(str(root), unlabelled=True), image_size=96, train_limit=20
    )
    assert data.public_size == 100_000
    images = data.public_images(torch.tensor([99_999, 0]))
    assert torch.equal(images[0], torch.full((3, 96, 96), -1.0))
    assert torch.allclose(images[1].permute(1, 2, 0), torch.from_numpy(drawn[0]) / 127.5 - 1, atol=1e-6)


def test_stl10_that_is_not_there_or_damaged(stl10, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"STL10.*stl10_binary.*download: true"):
        len(STL10(str(tmp_path / "none")))
    folder = stl10[0] / "stl10_binary"
    (folder / "test_y.bin").write_bytes(b"\x01" * 7999)
    with pytest.raises(ValueError, match=r"test_y\.bin.* 7999 .*\(8000,\).*http"):
        len(STL10(str(stl10[0]), train=False))
    (folder / "unlabeled_X.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"unlabeled_X\.bin.*\(100000, 3, 96, 96\)"):
        len(STL10(str(stl10[0]), unlabelled=True))


def same(dataset, images, labels):
    assert dataset.images.dtype == torch.uint8
    assert np.array_equal(dataset.images.permute(0, 2, 3, 1), images)
    assert dataset.labels.dtype == torch.int64
    assert np.array_equal(dataset.labels, labels)


@pytest.mark.parametrize(("version", "count"), [("v4", 2021), ("v6", 2000)])
@pytest.mark.parametrize("inside", ["", "CIFAR-10.1/datasets"])
def test_cifar_10_1(tmp_path, version, count, inside):
    folder = tmp_path / "data" / inside
    folder.mkdir(parents=True)
    images = pixels(count, 32, 32, 3)
    labels = RANDOM.integers(0, 10, count)
    np.save(folder / f"cifar10.1_{version}_data.npy", images)
    np.save(folder / f"cifar10.1_{version}_labels.npy", labels)
    same(CIFAR10_1(str(tmp_path / "data"), version), images, labels)


@pytest.fixture
def cifar_10_c(tmp_path):
    """Fog of the published shape, with holes: of each severity the first and the last image are not black."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    fog = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    rows = [row for severity in range(5) for row in (10_000 * severity, 10_000 * severity + 9_999)]
    fog[rows] = drawn = pixels(10, 32, 32, 3)
    labels = np.tile(RANDOM.integers(0, 10, 10_000).astype(np.uint8), 5)
    np.save(folder / "labels.npy", labels)
    return tmp_path, drawn, labels


def test_cifar_10_c(cifar_10_c):
    root, drawn, labels = cifar_10_c
    for severity in (1, 5):
        fog = CIFAR10C("fog", severity, str(root))
        assert fog.images.shape == (10_000, 3, 32, 32)
        assert np.array_equal(fog.images[[0, -1]].permute(0, 2, 3, 1), drawn[2 * severity - 2 : 2 * severity])
        assert not fog.images[1:-1].any()
        assert np.array_equal(fog.labels, labels[:10_000])
    every = CIFAR10C("fog", root=str(root / "CIFAR-10-C"))
    assert (len(every), len(every.labels)) == (50_000, 50_000)
    assert np.array_equal(every.images[[0, 9_999, 10_000]].permute(0, 2, 3, 1), drawn[:3])


@pytest.mark.slow
def test_all_corruptions_of_the_benchmark_are_one_set(cifar_10_c):
    root, drawn, labels = cifar_10_c
    for name in BENCHMARK.split():
        if name != "fog":
            (root / "CIFAR-10-C" / f"{name}.npy").symlink_to("fog.npy")
    every = CIFAR10C("main", 5, str(root))
    assert every.images.shape == (150_000, 3, 32, 32)
    assert np.array_equal(every.images[[0, 9_999, 10_000, -1]].permute(0, 2, 3, 1), drawn[[8, 9, 8, 9]])
    assert np.array_equal(every.labels, np.tile(labels[:10_000], 15))
    with pytest.raises(FileNotFoundError, match="speckle_noise"):
        len(CIFAR10C("all", 5, str(root)))


def test_cifar_10_c_has_19_corruptions_15_of_them_of_the_benchmark():
    assert (*BENCHMARK.split(), *EXTRA.split()) == CORRUPTIONS
    with rejects("corruption", "mist"):
        CIFAR10C("mist")
    with rejects("severity", 6):
        CIFAR10C("fog", 6)
    with rejects("version", "v7"):
        CIFAR10_1(version="v7")


@pytest.mark.parametrize("dataset", [CIFAR10_1(), CIFAR10C("fog")], ids=repr)
def test_sets_for_testing_have_no_training_split(dataset):
    assert not dataset.train
    words = rf"{type(dataset).__name__} is a test set and has no training split: train on CIFAR10"
    with pytest.raises(ValueError, match=words):
        dataset.with_split(True)
    with pytest.raises(ValueError, match=words):
        FederatedDataModule(dataset=dataset, partition=IID(2)).setup()


def object_array(path):
    np.save(path, np.array([print], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), r"does not exist, expected an array \(50000,\) of integers"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"cannot be read \(.*\), expected an array \(50000,\)"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (object_array, "cannot be read"),
        (
            lambda path: np.save(path, np.zeros(10_000, np.uint8)),
            r"cannot be read \(it is uint8 \(10000,\)\), expected",
        ),
        (
            lambda path: np.save(path, np.zeros(50_000)),
            r"cannot be read \(it is float64 \(50000,\)\), expected",
        ),
    ],
)
def test_damaged_files_are_named_with_what_is_expected_and_where_it_is(cifar_10_c, damage, words):
    damage(cifar_10_c[0] / "CIFAR-10-C" / "labels.npy")
    with pytest.raises((FileNotFoundError, ValueError), match=rf"labels\.npy.*{words}.*zenodo\.org") as caught:
        len(CIFAR10C("fog", 1, str(cifar_10_c[0])))
    assert "\n" not in str(caught.value)


def test_a_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar10\.1_v6_data\.npy.*\(2000, 32, 32, 3\).*github"):
        len(CIFAR10_1(str(tmp_path)))
    with pytest.raises(FileNotFoundError, match=r"snow\.npy.*\(50000, 32, 32, 3\)"):
        len(CIFAR10C("snow", root=str(tmp_path)))
