# SPDX-License-Identifier: Apache-2.0
"""Published sets of images that are kept as one uint8 tensor."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from perada.core.checks import check_whole
from perada.core.seeding import derive_seed
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.base import ImageSet
from perada.data.sets.readers import find_folder, read_cifar, read_cifar_binary, read_idx

DIGITS = tuple("0123456789")


class Digits(ImageSet):
    """The 1,797 handwritten digits that ship with scikit-learn, 8×8 gray: nothing to download.

    Args:
        train: The training split, or else the test split: a fixed fifth of the images (359), drawn once.
    """

    num_classes = 10
    classes = DIGITS

    def _load(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        order = np.random.default_rng(0).permutation(len(labels))
        cut = len(labels) // 5
        chosen = torch.from_numpy(np.sort(order[cut:] if self.train else order[:cut]))
        return images[chosen], torch.from_numpy(labels).long()[chosen]


class MNIST(ImageSet):
    """MNIST, 60,000 and 10,000 gray images of handwritten digits, 28×28 (http://yann.lecun.com/exdb/mnist).

    Args:
        root: Folder with the four idx files (.gz or not), or one that torchvision downloaded to.
        download: Fetch the files to ``root`` if they are missing.
        train: The training split, or else the test split.
    """

    num_classes = 10
    classes: tuple[str, ...] | None = DIGITS
    _title = "MNIST"
    _kind = torchvision_datasets.MNIST  # knows where the files are and their checksums
    _package = ""  # Debian's package that has them, if there is one
    _folders: tuple[str, ...] = ()  # where it puts them

    def __init__(self, root: str = "data", download: bool = False, train: bool = True) -> None:
        super().__init__(train)
        self.root: str | None = root
        self._may_download = download

    def _candidates(self) -> list[Path]:
        roots = [self.root] if self.root is not None else [*self._folders, "data"]
        return [folder for root in roots for folder in (Path(root), Path(root) / self._kind.__name__ / "raw")]

    def _folder(self) -> Path | None:
        return find_folder(self._candidates(), "t10k-labels-idx1-ubyte*")

    def download(self) -> None:
        """Fetch the files with torchvision if that was asked for and they are missing."""
        if self._may_download and self._folder() is None:
            self._kind(self.root or "data", download=True)

    def _load(self) -> tuple[Tensor, Tensor]:
        folder = self._folder()
        if folder is None:
            package = f"install Debian's package {self._package}, " if self._package else ""
            raise FileNotFoundError(
                f"{self._title} is not in {' or '.join(map(str, self._candidates()))}: set root to the folder with its "
                f"idx files, {package}or set download: true where there is a network"
            )
        prefix = "train" if self.train else "t10k"
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte", (28, 28), self._kind.mirrors[0])
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte", (), self._kind.mirrors[0])
        return images.unsqueeze(1), labels.long()


class FashionMNIST(MNIST):
    """Fashion-MNIST, 60,000 and 10,000 gray images of clothing, 28×28 (https://github.com/zalandoresearch/fashion-mnist).

    Args:
        root: Folder with the four idx files (.gz or not), or one that torchvision downloaded to. None: where Debian's
            package dataset-fashion-mnist puts them, then ``data``.
        download: Fetch the files to ``root`` if they are missing.
        train: The training split, or else the test split.
    """

    classes = tuple(torchvision_datasets.FashionMNIST.classes)
    _title = "Fashion-MNIST"
    _kind = torchvision_datasets.FashionMNIST
    _package = "dataset-fashion-mnist"
    _folders = ("/usr/share/datasets/fashion-mnist",)

    def __init__(self, root: str | None = None, download: bool = False, train: bool = True) -> None:
        super().__init__("data", download, train)
        self.root = root


class CIFAR10(ImageSet):
    """CIFAR-10, 50,000 and 10,000 colour photographs, 32×32 (https://www.cs.toronto.edu/~kriz/cifar.html).

    Args:
        root: Folder that holds (or is) ``cifar-10-batches-py``, as torchvision leaves it, or ``cifar-10-batches-bin``.
        download: Fetch the files to ``root`` if they are missing.
        train: The training split, or else the test split.
    """

    num_classes = 10
    _title = "CIFAR-10"
    _kind = torchvision_datasets.CIFAR10  # knows the files and their checksums
    _binary = ("cifar-10-batches-bin", 1)  # its folder, and the bytes before the pixels of a record
    _names_file = "batches.meta.txt"  # in that folder

    def __init__(self, root: str = "data", download: bool = False, train: bool = True) -> None:
        super().__init__(train)
        self.root = root
        self._may_download = download
        self._names: tuple[str, ...] | None = None

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # read from a file
        """Names of the classes, or None where the files of the binary layout come without them."""
        _ = self._tensors
        return self._names

    def _folder(self) -> Path | None:
        root = Path(self.root)
        candidates = root / self._kind.base_folder, root / self._binary[0], root
        return find_folder(candidates, f"{self._kind.test_list[0][0]}*")

    def download(self) -> None:
        """Fetch the files with torchvision if that was asked for and they are missing."""
        if self._may_download and self._folder() is None:
            self._kind(self.root, download=True)

    def _load(self) -> tuple[Tensor, Tensor]:
        folder = self._folder()
        if folder is None:
            raise FileNotFoundError(
                f"{self._title} is not in {self.root}: set root to the folder that holds {self._kind.base_folder}, "
                "or set download: true where there is a network"
            )
        if (folder / self._kind.test_list[0][0]).exists():
            *found, self._names = read_cifar(self._kind, folder, self.train)
            return found[0], found[1]
        if (folder / self._names_file).is_file():
            self._names = tuple((folder / self._names_file).read_text(encoding="utf-8").split())
        names = self._kind.train_list if self.train else self._kind.test_list
        return read_cifar_binary([folder / f"{name}.bin" for name, _ in names], self._binary[1])


class CIFAR100(CIFAR10):
    """CIFAR-100, 50,000 and 10,000 colour photographs in 100 classes, 32×32.

    Args:
        root: Folder that holds (or is) ``cifar-100-python``, as torchvision leaves it, or ``cifar-100-binary``.
        download: Fetch the files to ``root`` if they are missing.
        train: The training split, or else the test split.
    """

    num_classes = 100
    _title = "CIFAR-100"
    _kind = torchvision_datasets.CIFAR100
    _binary = ("cifar-100-binary", 2)  # a coarse label stands before the fine one
    _names_file = "fine_label_names.txt"


class Photographs(ImageSet):
    """Unlabelled square cut-outs of the two photographs that ship with scikit-learn: a public set without a download.

    Args:
        count: Number of images.
        size: Height and width of each, in pixels.
        smallest: Side of the smallest cut-out before it is resized, in pixels of the photograph.
        largest: Side of the largest one; at most 427.
        gray: One channel instead of three.
        seed: Another seed, other cut-outs.

    Raises:
        ValueError: If a size does not fit.
    """

    def __init__(
        self,
        count: int = 2000,
        size: int = 32,
        smallest: int = 32,
        largest: int = 256,
        gray: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_whole("count", count)
        check_whole("size", size)
        check_whole("largest", largest, most=427, hint="the photographs' height")
        check_whole("smallest", smallest, most=largest, hint=f"largest is {largest}")
        self.count, self.size, self.smallest, self.largest = count, size, smallest, largest
        self.gray, self.seed = gray, seed

    def _load(self) -> tuple[Tensor, None]:
        from sklearn.datasets import load_sample_images

        photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images]
        if self.gray:
            luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # ITU-R BT.601
            photographs = [(image * luma).sum(0, keepdim=True).round().byte() for image in photographs]
        random = np.random.default_rng(derive_seed(self.seed, "photographs"))
        cuts = []
        for _ in range(self.count):
            image = photographs[random.integers(len(photographs))]
            side = int(random.integers(self.smallest, self.largest + 1))
            top, left = (int(random.integers(extent - side + 1)) for extent in image.shape[1:])
            cuts.append(resize_uint8(image[:, top : top + side, left : left + side], self.size))
        return torch.stack(cuts), None
