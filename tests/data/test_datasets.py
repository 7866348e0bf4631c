# SPDX-License-Identifier: Apache-2.0
import copy
import gzip
import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch.utils.data import Subset, TensorDataset

from perada.data import (
    CIFAR10,
    CIFAR100,
    Digits,
    FashionMNIST,
    ImageFolder,
    ImageSet,
    OpenImage,
    Photographs,
    UnlabelledFolder,
)
from perada.data.batches.datasets import tensor_source
from tests.rejections import rejects

RANDOM = np.random.default_rng(0)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def idx(array):
    """A file of the MNIST family, as its page describes it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(folder, zipped):
    folder.mkdir(parents=True)
    written = {}
    for prefix, count in (("train", 5), ("t10k", 3)):
        images = pixels(count, 28, 28)
        labels = RANDOM.integers(0, 10, count, dtype=np.uint8)
        written[prefix] = images, labels
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return written


def same(dataset, images, labels):
    assert dataset.images.dtype == torch.uint8
    assert dataset.labels.dtype == torch.int64
    assert np.array_equal(dataset.images, images)
    assert np.array_equal(dataset.labels, labels)
    assert len(dataset) == len(labels)
    image, label = dataset[1]
    assert np.array_equal(image, images[1])
    assert int(label) == labels[1]


def test_digits_are_scikit_learns_each_in_one_split():
    train = Digits()
    test = Digits(train=False)
    assert (len(train), len(test)) == (1438, 359)
    ours = torch.cat([train.images, test.images]).flatten(1)
    both = sorted(map(tuple, torch.cat([ours, torch.cat([train.labels, test.labels])[:, None]], dim=1).tolist()))
    data, target = load_digits(return_X_y=True)
    assert both == sorted(
        (*np.rint(row / 16 * 255).astype(int).tolist(), label) for row, label in zip(data, target.tolist(), strict=True)
    )
    assert train.images.shape[1:] == (1, 8, 8)
    assert torch.equal(Digits().images, train.images)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", ["", "FashionMNIST/raw"])
def test_fashion_mnist(tmp_path, zipped, inside):
    written = write_fashion(tmp_path / "data" / inside, zipped)
    for prefix, train in (("train", True), ("t10k", False)):
        images, labels = written[prefix]
        same(FashionMNIST(str(tmp_path / "data"), train=train), images[:, None], labels)


def test_fashion_mnist_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"MNIST.*{tmp_path}.*download: true") as caught:
        len(FashionMNIST(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b"\x00\x00\x0d" + b[3:], lambda b: b""])
def test_broken_idx_files_are_named(tmp_path, damage):
    write_fashion(tmp_path / "d", zipped=False)
    file = tmp_path / "d" / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.*bytes"):
        len(FashionMNIST(str(tmp_path / "d")))


def test_broken_gz_files_are_named(tmp_path):
    write_fashion(tmp_path / "d", zipped=True)
    file = tmp_path / "d" / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz cannot be read"):
        len(FashionMNIST(str(tmp_path / "d")))


CIFARS = [
    (CIFAR10, "cifar-10-batches", "bin", [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "labels", 1),
    (CIFAR100, "cifar-100", "binary", ["train"], ["test"], "fine_labels", 2),
]


def publish(monkeypatch, kind, home, names, key):
    """Let made-up files of the Python layout, with that of the classes' names, have the checksums that are known."""
    (home / "classes").write_bytes(pickle.dumps({key: ["a", "b"]}))
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in home.iterdir()}
    real = getattr(torchvision.datasets, kind.__name__)
    for part, files in zip(("train_list", "test_list"), names, strict=True):
        monkeypatch.setattr(real, part, [[name, sums[name]] for name in files])
    monkeypatch.setattr(real, "meta", {"filename": "classes", "key": key, "md5": sums["classes"]})


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "folder", "binary", "train", "test", "key", "label_bytes"), CIFARS)
@pytest.mark.parametrize("layout", ["py2", "py3", "binary", "the folder itself"])
def test_cifar(tmp_path, monkeypatch, kind, folder, binary, train, test, key, label_bytes, layout):
    suffix = {"CIFAR10": "py", "CIFAR100": "python"}[kind.__name__]
    home = tmp_path / f"{folder}-{binary if layout == 'binary' else suffix}"
    home.mkdir()
    expected = {}
    for name in (*train, *test):
        data = pixels(3, 3072)
        labels = RANDOM.integers(0, kind.num_classes, 3)
        expected[name] = data.reshape(3, 3, 32, 32), labels
        if layout == "binary":
            coarse = np.full((3, label_bytes - 1), 99, np.uint8)
            (home / f"{name}.bin").write_bytes(np.hstack([coarse, labels[:, None].astype(np.uint8), data]).tobytes())
        else:
            batch = {"data": data, key: labels.tolist(), "coarse_labels": [1, 2, 3], "batch_label": "x"}
            content = pickle.dumps(batch, protocol=2 if layout == "py2" else 5)
            # The real files come from Python 2 with an older NumPy, which had another name for the same module.
            (home / name).write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    if layout != "binary":
        publish(monkeypatch, kind, home, (train, test), "names")
    root = home if layout == "the folder itself" else tmp_path
    for names, part in ((train, True), (test, False)):
        images = np.concatenate([expected[name][0] for name in names])
        same(kind(str(root), train=part), images, np.concatenate([expected[name][1] for name in names]))


class Intruder:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.every(5)
@pytest.mark.parametrize("content", [pickle.dumps({"data": Intruder(), "labels": [1]}), b"", b"cut short"])
@pytest.mark.parametrize("wrong", ["data_batch_3", "test_batch", "classes"])
@pytest.mark.parametrize("train", [True, False])
def test_a_cifar_file_that_is_not_the_published_one_is_not_opened(tmp_path, monkeypatch, content, wrong, train, capsys):
    names = CIFARS[0][3:5]
    for name in (*names[0], *names[1]):
        (tmp_path / name).write_bytes(pickle.dumps({"data": pixels(2, 3072), "labels": [0, 1]}))
    publish(monkeypatch, CIFAR10, tmp_path, names, "names")
    assert len(CIFAR10(str(tmp_path), train=train)) == (10 if train else 2)
    (tmp_path / wrong).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{wrong}.*published") as caught:
        len(CIFAR10(str(tmp_path), train=train))
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", [b"", b"x" * 3072])
def test_a_binary_cifar_file_that_is_cut_short_is_named(tmp_path, damage):
    (tmp_path / "test_batch.bin").write_bytes(damage)
    with pytest.raises(ValueError, match=r"test_batch\.bin.*\(-1, 3073\)") as caught:
        len(CIFAR10(str(tmp_path), train=False))
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin does not exist.*https"):
        len(CIFAR10(str(tmp_path)))


def test_cifar_that_is_not_there_or_not_all_of_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"CIFAR100.*cifar-100-python.*download: true"):
        len(CIFAR100(str(tmp_path)))
    (tmp_path / "test_batch").write_bytes(b"")
    with pytest.raises(ValueError, match="data_batch_1 is missing"):
        len(CIFAR10(str(tmp_path)))


@pytest.mark.parametrize("kind", [FashionMNIST, CIFAR10, CIFAR100])
def test_downloads_are_torchvisions_and_only_if_asked_for(tmp_path, kind, monkeypatch):
    calls = []
    monkeypatch.setattr(
        f"torchvision.datasets.{kind.__name__}.__init__",
        lambda self, root, download: calls.append((root, download)),
    )
    kind(str(tmp_path)).download()
    assert calls == []
    kind(str(tmp_path), download=True).download()
    assert calls == [(str(tmp_path), True)]


def test_photographs_are_cut_from_scikit_learns():
    photographs = Photographs(count=6, size=40, smallest=40, largest=40)
    assert photographs.images.shape == (6, 3, 40, 40)
    assert photographs.labels is None
    sources = [torch.from_numpy(image.copy()) for image in load_sample_images().images]
    for cut in photographs.images.permute(0, 2, 3, 1):
        # Every place whose first pixel is the cut's first pixel.
        places = [
            (image, *place)
            for image in sources
            for place in (image[:388, :601] == cut[0, 0]).all(-1).nonzero().tolist()
        ]
        assert any(torch.equal(image[row : row + 40, column : column + 40], cut) for image, row, column in places)


def test_without_the_files_scikit_learn_reads_its_own_images(monkeypatch):
    """A later release may keep them elsewhere."""
    digits = Digits()
    photographs = Photographs(count=3)
    monkeypatch.setattr("perada.data.sets.arrays.sklearn_data_file", lambda name: None)
    by_function = Digits()
    assert torch.equal(by_function.images, digits.images) and torch.equal(by_function.labels, digits.labels)
    assert torch.equal(Photographs(count=3).images, photographs.images)


def test_photographs_options():
    gray = Photographs(count=4, size=8, gray=True)
    colour = Photographs(count=4, size=8)
    assert gray.images.shape == (4, 1, 8, 8)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    assert ((colour.images * weights).sum(1, keepdim=True) - gray.images).abs().max() < 3  # both were rounded twice
    assert torch.equal(Photographs(count=4, size=8).images, colour.images)
    assert not torch.equal(Photographs(count=4, size=8, seed=1).images, colour.images)
    with rejects("largest", 500):
        Photographs(largest=500)
    with rejects("smallest", 60):
        Photographs(smallest=60, largest=50)


def write_images(root, names, size=(6, 4)):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 0, 0)).save(root / name)


def test_image_folder_with_splits(tmp_path):
    write_images(
        tmp_path, ["train/cat/0.png", "train/cat/1.png", "train/dog/2.png", "test/dog/3.png", "test/cat/4.png"]
    )
    train = ImageFolder(str(tmp_path), size=5)
    test = ImageFolder(str(tmp_path), size=5, train=False)
    assert train.num_classes == 2
    assert train.labels.tolist() == [0, 0, 1]
    assert [(int(image[0, 0, 0]), int(label)) for image, label in (test[0], test[1])] == [(4, 0), (3, 1)]
    assert train[0][0].shape == (3, 5, 5)
    assert train.images is None
    assert torch.equal(ImageFolder(str(tmp_path), size=5, in_memory=True).images[2], train[2][0])


def test_image_folder_with_domains_and_about_a_fifth_for_testing(tmp_path):
    write_images(tmp_path, [f"{d}/{c}/{i}.png" for d in ("art", "photo") for c in ("cat", "dog") for i in range(5)])
    write_images(tmp_path, ["photo/emu/0.png"])
    train = ImageFolder(str(tmp_path), size=4, domains=True)
    test = train.with_split(False)
    assert (len(train) + len(test), train.num_classes) == (21, 3)
    assert {*test.columns["domain"]} == {"art", "photo"} and len(test) < 10
    assert {*train.labels.tolist()} == {0, 1, 2}
    both = {*zip(train.manifest.paths, train.labels.tolist(), train.columns["domain"], strict=True)}
    both |= {*zip(test.manifest.paths, test.labels.tolist(), test.columns["domain"], strict=True)}
    assert len(both) == 21
    for path, label, domain in both:
        assert path.split("/")[-3:-1] == [domain, ["cat", "dog", "emu"][label]]


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        len(ImageFolder(str(tmp_path / "none")))
    with pytest.raises(FileNotFoundError, match="no images"):
        len(ImageFolder(str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="no images"):
        len(UnlabelledFolder(str(tmp_path)))
    write_images(tmp_path, ["a.png"])
    with pytest.raises(FileNotFoundError, match=r"a\.png.*'\{class\}/\*\*'"):
        len(ImageFolder(str(tmp_path)))
    with rejects("size", 0):
        UnlabelledFolder(str(tmp_path), size=0)


def test_unlabelled_folder(tmp_path):
    write_images(tmp_path, ["a.png", "deep/er/b.PNG"])
    (tmp_path / "notes.txt").write_text("no image")
    for in_memory in (False, True):
        images = UnlabelledFolder(str(tmp_path), size=4, in_memory=in_memory)
        assert [int(images[i][0, 0, 0]) for i in range(len(images))] == [0, 1]


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        (["a.png", "b.png"], ["a_mask.png", "b_seg.png"]),
        (["x/a.png", "x/b.png"], ["x/a_mask_1.png", "x/a_mask_2.png"]),
        (["images/a.png", "images/b.png"], ["masks/a.png", "masks/b.png"]),
        (["north/imagesTr/a_0000.png", "north/imagesTr/b_0000.png"], ["north/labelsTr/a.png"]),
    ],
)
def test_an_unlabelled_folder_leaves_masks_out(tmp_path, images, masks):
    write_images(tmp_path, images + masks)
    with pytest.warns(UserWarning, match=rf"{len(masks)} of {len(images + masks)} images .*masks"):
        result = UnlabelledFolder(str(tmp_path), size=4)
        values = [int(result[i][0, 0, 0]) for i in range(len(result))]
    assert values == [0, 1]


@pytest.mark.parametrize(
    "files", [["masks/a.png", "masks/b.png"], ["a_mask.png", "b_mask.png"], ["a.png", "b_seg.png"]]
)
def test_images_without_others_are_no_masks(tmp_path, files):
    write_images(tmp_path, files)
    assert len(UnlabelledFolder(str(tmp_path), size=4)) == 2


def test_splits_do_not_share_what_they_have_read():
    train = Digits()
    assert len(train) == 1438
    test = train.with_split(False)
    assert (len(test), len(train), test.train) == (359, 1438, False)


def test_tensors_are_found_behind_subsets_of_subsets():
    source = tensor_source(Subset(Subset(Digits(), [5, 6, 7, 8]), [3, 1]), labelled=True)
    assert source.rows.tolist() == [8, 6]


def test_names_say_what_was_asked_for():
    assert repr(CIFAR10("x")) == "CIFAR10(root='x')"
    assert repr(ImageFolder("x", size=8).with_split(False)) == "ImageFolder(root='x', size=8, train=False)"


@pytest.mark.parametrize(("indices", "wrong"), [([0, 4], 4), ([1, -5], -5)])
def test_a_subset_of_items_that_are_not_there_is_rejected(indices, wrong):
    base = TensorDataset(torch.zeros(4, 1, 2, 2), torch.arange(4))
    assert tensor_source(Subset(Subset(base, [3, 1, -2]), [2, 0]), labelled=True).rows.tolist() == [2, 3]
    with pytest.raises(IndexError, match=rf"item {wrong} .* 4;"):
        tensor_source(Subset(base, indices), labelled=True)


class Eager(ImageSet):
    """Computes what depends on the split when it is made, and keeps its options under other names."""

    num_classes = 3

    def __init__(self, factor, train=True, *, more=0):
        super().__init__(train)
        self.count = factor * (12 if train else 5) + more

    def _load_images(self):
        return torch.zeros(self.count, 1, 4, 4, dtype=torch.uint8), torch.arange(self.count) % 3


def test_the_other_split_is_made_of_the_same_arguments():
    dataset = Eager(2, more=1)
    for one in (dataset, pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert [len(one.with_split(train)) for train in (True, False)] == [25, 11]
        assert len(one.with_split(False).with_split(True)) == 25


def test_a_class_that_one_split_lacks_keeps_its_number(tmp_path):
    for split, names in (("train", "abc"), ("test", "bc")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / split / name / "one.png")
    images = ImageFolder(str(tmp_path), size=4)
    assert images.labels.tolist() == [0, 1, 2]
    assert images.with_split(False).labels.tolist() == [1, 2]
    assert images.with_split(False).num_classes == 3


def test_a_table_names_no_file_outside_of_its_folder(tmp_path):
    mapping = tmp_path / "client_data_mapping"
    mapping.mkdir()
    for path in ("../secret.png", "/secret.png"):
        (mapping / "train.csv").write_text(f"client_id,sample_path,label_name,label_id\n1,{path},cat,0\n")
        with pytest.raises(ValueError, match=r"train\.csv, row 2.*secret\.png'"):
            _ = OpenImage(str(tmp_path)).labels
