# SPDX-License-Identifier: Apache-2.0
"""Images that cannot be read are found before the first round, all of them."""

import errno
import io
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder as TorchvisionFolder

from perada.data import ByDomain, FederatedData, FederatedDataModule, Images
from perada.data.broken_images import without_broken


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    """Two clients with six training and two test images each; of either, two are broken."""
    for client in ("north", "south"):
        for split, count in (("train", 6), ("test", 2)):
            for number in range(count):
                path = tmp_path / "images" / client / split / f"class{number % 2}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
                Image.fromarray(noise).save(path)
    for name in BROKEN:
        path = tmp_path / "images" / name
        path.write_bytes(path.read_bytes()[:300])
    (tmp_path / "images" / BROKEN[0]).write_bytes(b"")
    return tmp_path / "images"


BROKEN = ["north/train/class0/0.png", "north/train/class1/3.png", "south/train/class0/4.png", "south/test/class1/1.png"]


def module(root, **options):
    dataset = Images(root=str(root), layout="{client}/{split}/{class}/*", size=16)
    return FederatedDataModule(dataset=dataset, partition=ByDomain("client"), batch_size=4, **options)


def test_all_are_listed_in_one_line(root):
    with pytest.raises(ValueError, match=r"^4 images cannot be read \(.*on_broken: skip") as caught:
        module(root).setup()
    assert "\n" not in str(caught.value) and all(name in str(caught.value) for name in BROKEN)


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_skipped_they_are_as_if_they_had_never_been_there(root, holdout):
    with pytest.warns(UserWarning, match="4 images cannot be read"):
        (skipped := module(root, on_broken="skip", client_validation=holdout)).setup()
    for name in BROKEN:
        (root / name).unlink()
    (clean := module(root, client_validation=holdout)).setup()
    assert skipped.train_sizes == clean.train_sizes
    assert (skipped.train_sizes == (4, 5)) == (not holdout)
    for one, other in zip(skipped.test_batches(), clean.test_batches(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for one, other in ((skipped.first_batch([client]), clean.first_batch([client])) for client in (0, 1)):
        assert not one.failed and torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
    record = skipped.partition_dict()
    assert [len(rows) for rows in record["train"]] == list(skipped.train_sizes)
    assert [len(rows) for rows in record["test"]] == [2, 1]


def test_files_are_read_once_until_one_changes(root, cache, monkeypatch):
    read = []
    monkeypatch.setattr(Images, "read", lambda self, path, own=Images.read: read.append(path) or own(self, path))
    for expected in (16, 0):
        with pytest.raises(ValueError, match="4 images cannot be read"):
            module(root).setup()
        assert len(read) == expected
        read.clear()
    image = root / "south/train/class1/1.png"
    image.write_bytes(image.read_bytes()[:200])
    with pytest.raises(ValueError, match="5 images cannot be read"):
        module(root).setup()
    for file in cache.rglob("*.json"):
        file.write_text("not JSON")
    with pytest.raises(ValueError, match="5 images cannot be read"):
        module(root).setup()
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with pytest.raises(ValueError, match="5 images cannot be read"):
        module(root).setup()


def test_what_is_remembered_holds_under_any_spelling_of_the_path(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    for spelling in ("images", root, "./images/../images", root.parent / "." / "images"):
        with pytest.raises(ValueError, match="4 images cannot be read"):
            module(spelling).setup()


@pytest.mark.every(4)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, None])
@pytest.mark.parametrize("where", ["open", "decoder"])
def test_an_error_of_the_disk_is_not_remembered(root, monkeypatch, number, where):
    """Neither that the file is broken, nor what was found of the others."""
    failing = str(root / "south/train/class1/1.png")
    error = MemoryError() if number is None else OSError(number, os.strerror(number), failing)
    open_image = Image.open
    read_bytes = Path.read_bytes

    def failing_open(file, *args):
        if str(file) == failing:
            raise OSError("decoder error -2") if where == "decoder" else error
        return open_image(file, *args)

    def failing_read(path):
        if str(path) == failing:
            raise error
        return read_bytes(path)

    with monkeypatch.context() as patched:
        patched.setattr(Image, "open", failing_open)
        patched.setattr(Path, "read_bytes", failing_read)
        with pytest.raises(ValueError, match=rf"^5 images .*{failing} could not be read \("):
            module(root).setup()
    with pytest.raises(ValueError, match=r"^4 images"):
        module(root).setup()


def test_a_file_that_was_put_back_with_its_former_time_is_read_again(root):
    path = root / BROKEN[1]
    broken = path.stat()
    with pytest.raises(ValueError, match=r"^4 images"):
        module(root).setup()
    noise = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    path.write_bytes(file.getvalue().ljust(broken.st_size, b"\0"))
    os.utime(path, ns=(broken.st_atime_ns, broken.st_mtime_ns))
    assert path.stat().st_size == broken.st_size
    with pytest.raises(ValueError, match=r"^3 images"):
        module(root).setup()


def test_a_set_in_memory_names_all_of_a_split(root):
    dataset = Images(root=str(root), layout="{client}/{split}/{class}/*", size=16, in_memory=True)
    with pytest.raises(ValueError, match=r"class0/0.png.*class1/3.png.*class0/4.png.*on_broken: skip"):
        FederatedDataModule(dataset=dataset, partition=ByDomain("client"), on_broken="skip").setup()


class Lazy(Dataset):
    """Pictures that Pillow has opened and not read."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return Image.open(io.BytesIO(self.paths[index].read_bytes())), index % 2


def test_pictures_that_are_opened_only_are_read_too(root):
    data = [
        Lazy(sorted((root / client / "train").rglob("*.png"))[client == "north" :]) for client in ("north", "south")
    ]
    with pytest.raises(ValueError, match=r"^2 images .*client 0: .*sample 3 .*client 1: .*sample 2\b"):
        FederatedDataModule(FederatedData(data), image_size=16).setup()


class Rows(Dataset):
    """Rows as Hugging Face's datasets have them."""

    def __init__(self, count, bad=()):
        self.count = count
        self.bad = bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError("image file is truncated")
        return {"image": torch.full((3, 8, 8), index, dtype=torch.uint8), "label": index % 2}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_other_datasets_are_read_item_by_item(workers):
    data = FederatedData([Rows(6, (1, 4)), Rows(5)], public=Rows(4, (3,)))
    with pytest.raises(ValueError, match=r"^3 images .*client 0: .*sample 1.*sample 4.*public set"):
        FederatedDataModule(data, num_workers=workers).setup()
    with pytest.warns(UserWarning, match="3 images"):
        (datamodule := FederatedDataModule(data, num_workers=workers, on_broken="skip")).setup()
    assert datamodule.train_sizes == (4, 5) and datamodule.public_size == 3
    with (
        pytest.warns(UserWarning, match="2 images"),
        pytest.raises(ValueError, match=r"client 0 .*no training samples"),
    ):
        FederatedDataModule(FederatedData([Rows(2, (0, 1)), Rows(5)]), on_broken="skip").setup()


def test_whole_data_say_nothing(root):
    for name in BROKEN:
        (root / name).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(root, on_broken="skip").setup()
        data = [TorchvisionFolder(str(root / client / "train")) for client in ("north", "south")]
        assert without_broken(FederatedData(data), "raise", 0).train == data
