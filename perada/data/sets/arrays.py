# SPDX-License-Identifier: Apache-2.0
"""Published image sets whose files are arrays: idx, CIFAR's two layouts, NumPy arrays, plain bytes.

Files that are mapped into memory are read when their pixels are used.
"""

import gzip
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets as published
from torchvision.datasets.utils import check_integrity

from perada.core.checks import check_choice, check_integer, checked_path, installed
from perada.core.seeding import derive_seed
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.base import ImageSet, explain_read_errors

DIGITS = tuple("0123456789")
CORRUPTIONS = tuple(
    "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog brightness "
    "contrast elastic_transform pixelate jpeg_compression "
    "speckle_noise gaussian_blur spatter saturate".split()  # the four more, which the authors meant for validation
)
_GROUPS = {"main": CORRUPTIONS[:15], "all": CORRUPTIONS}


class Digits(ImageSet):
    """The 1,797 handwritten digits that ship with scikit-learn, 8×8 gray. Nothing is downloaded.

    Args:
        train: Whether to load the training split or the test split, a fixed random fifth of the images (359).
    """

    num_classes = 10
    classes = DIGITS

    def _load_images(self) -> tuple[Tensor, Tensor]:
        table = sklearn_data_file("data/digits.csv.gz")
        if table is None:
            pixels, labels = installed("sklearn.datasets", "Digits", "examples").load_digits(return_X_y=True)
        else:
            numbers = np.loadtxt(table, delimiter=",")
            pixels = numbers[:, :-1]
            labels = numbers[:, -1].astype(int)
        # The pixels are from 0 to 16.
        grey_levels = np.rint(pixels * (255 / 16)).astype(np.uint8)
        images = torch.from_numpy(grey_levels).view(-1, 1, 8, 8)
        classes = torch.from_numpy(labels).long()
        order = np.random.default_rng(0).permutation(len(labels))
        num_test = len(labels) // 5
        rows_of_split = order[num_test:] if self.train else order[:num_test]
        rows = torch.from_numpy(np.sort(rows_of_split))
        return images[rows], classes[rows]


class Downloadable(ImageSet):
    """Base class of sets that torchvision supports, with the files' names, checksums and addresses.

    Args:
        root: Folder that holds (or is) the set's folder, as torchvision creates it; null for ``data``.
        download: Download the files to ``root`` if they are missing; torchvision verifies the checksums.
        train: Whether to load the training split or the test split.
    """

    num_classes = 10
    _torchvision_class: type[Any]
    _file_pattern: str
    """Pattern of one of the set's files."""
    _subfolders: tuple[str, ...] = ()
    """Folders below ``root`` that may have the files."""

    def __init__(self, root: str | None = None, download: bool = False, train: bool = True) -> None:
        super().__init__(train)
        if root is not None:
            checked_path("root", root)
        check_choice("download", download, [True, False])
        self.root = root
        self._may_download = download

    def _candidate_folders(self) -> list[Path]:
        return [Path(self.root or "data") / folder for folder in (*self._subfolders, "")]

    def download(self) -> None:
        """Download missing files, if the set is configured to."""
        if self._may_download and find_folder(self._candidate_folders(), self._file_pattern) is None:
            self._torchvision_class(self.root or "data", download=True)

    def _find_files(self) -> Path:
        """Return the folder with the files."""
        folder = find_folder(self._candidate_folders(), self._file_pattern)
        if folder is None:
            raise FileNotFoundError(
                f"{type(self).__name__} was not found in {' or '.join(map(str, self._candidate_folders()))}: set root "
                "to the folder with its files, or set download: true if a network is available"
            )
        return folder


class MNIST(Downloadable):
    """MNIST, 60,000 and 10,000 gray images of handwritten digits, 28×28 (http://yann.lecun.com/exdb/mnist).

    The four idx files (.gz or not) are in ``root``, or in its folder ``MNIST/raw``.
    """

    classes: tuple[str, ...] | None = DIGITS
    _torchvision_class = published.MNIST
    _file_pattern = "t10k-labels-idx1-ubyte*"
    _subfolders = ("MNIST/raw",)

    def _load_images(self) -> tuple[Tensor, Tensor]:
        source = self._torchvision_class.mirrors[0]
        prefix = self._find_files() / ("train" if self.train else "t10k")
        images = read_idx(Path(f"{prefix}-images-idx3-ubyte"), (28, 28), source)
        labels = read_idx(Path(f"{prefix}-labels-idx1-ubyte"), (), source)
        return images.unsqueeze(1), labels.long()


class FashionMNIST(MNIST):
    """Fashion-MNIST, 60,000 and 10,000 gray images of clothing, 28×28 (https://github.com/zalandoresearch/fashion-mnist).

    Without ``root`` the files are looked for in the folder of Debian's package dataset-fashion-mnist, and in ``data``.
    """

    classes = tuple(published.FashionMNIST.classes)
    _torchvision_class = published.FashionMNIST
    _subfolders = ("FashionMNIST/raw",)

    def _candidate_folders(self) -> list[Path]:
        folders = super()._candidate_folders()
        if self.root is None:
            folders.insert(0, Path("/usr/share/datasets/fashion-mnist"))
        return folders


class CIFAR10(Downloadable):
    """CIFAR-10, 50,000 and 10,000 colour photographs, 32×32 (https://www.cs.toronto.edu/~kriz/cifar.html).

    The files are in ``cifar-10-batches-py``, or in ``cifar-10-batches-bin`` for the binary layout.
    """

    _torchvision_class = published.CIFAR10
    _file_pattern = "test_batch*"
    _subfolders = ("cifar-10-batches-py", "cifar-10-batches-bin")
    _num_label_bytes = 1
    """Bytes before the pixels of a record of the binary layout; the last of them is the label."""
    _class_names_file = "batches.meta.txt"
    """File with the class names in the binary layout."""

    _class_names: tuple[str, ...] | None = None

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # read from a file
        """Names of the classes, or None if the files of the binary layout come without them."""
        _ = self._images_and_labels  # reads the files
        return self._class_names

    def _load_images(self) -> tuple[Tensor, Tensor]:
        folder = self._find_files()
        first_test_file, _ = self._torchvision_class.test_list[0]
        if (folder / first_test_file).exists():
            return self._load_pickled(folder)
        return self._load_binary(folder)

    def _load_pickled(self, folder: Path) -> tuple[Tensor, Tensor]:
        cifar = self._torchvision_class
        checksums = [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]
        for name, checksum in checksums:
            # Files are unpickled only if they are the published ones.
            if not check_integrity(str(folder / name), checksum):
                raise ValueError(
                    f"{folder / name} is missing or differs from the published file (by MD5): fetch it again"
                )
        # torchvision looks for the files in base_folder below the folder that it is given.
        in_folder = type(cifar.__name__, (cifar,), {"base_folder": ""})
        split = in_folder(folder, self.train)
        self._class_names = tuple(split.classes)
        return torch.from_numpy(split.data.transpose(0, 3, 1, 2)), torch.tensor(split.targets)

    def _load_binary(self, folder: Path) -> tuple[Tensor, Tensor]:
        cifar = self._torchvision_class
        if (folder / self._class_names_file).is_file():
            self._class_names = tuple((folder / self._class_names_file).read_text(encoding="utf-8").split())
        num_pixels = 3 * 32 * 32
        files = cifar.train_list if self.train else cifar.test_list
        parts = []
        for name, _ in files:
            parts.append(map_array(folder / f"{name}.bin", (-1, self._num_label_bytes + num_pixels), cifar.url))
        records = torch.cat(parts)
        images = records[:, -num_pixels:].reshape(-1, 3, 32, 32)
        labels = records[:, self._num_label_bytes - 1].long()
        return images, labels


class CIFAR100(CIFAR10):
    """CIFAR-100, 50,000 and 10,000 colour photographs in 100 classes, 32×32.

    The files are in ``cifar-100-python``, or in ``cifar-100-binary`` for the binary layout.
    """

    num_classes = 100
    _torchvision_class = published.CIFAR100
    _file_pattern = "test*"
    _subfolders = ("cifar-100-python", "cifar-100-binary")
    _num_label_bytes = 2  # a coarse label before the fine one
    _class_names_file = "fine_label_names.txt"


class STL10(Downloadable):
    """STL-10, colour photographs, 96×96: 5,000 and 8,000 of 10 classes, and 100,000 without labels.

    The files are those of the binary layout (Coates et al., AISTATS 2011; https://cs.stanford.edu/~acoates/stl10), in
    ``stl10_binary``. The classes are numbered from 0, in the order of the files. They are not CIFAR-10's classes.

    Args:
        root: Folder that holds (or is) ``stl10_binary``.
        download: Download the files to ``root`` if they are missing (2.6 GB).
        unlabelled: Load the images without labels, as a public set, instead of those with labels.
        train: Whether to load the training split or the test split.
    """

    _torchvision_class = published.STL10
    _file_pattern = "*_X.bin"
    _subfolders = ("stl10_binary",)

    def __init__(
        self, root: str = "data", download: bool = False, unlabelled: bool = False, train: bool = True
    ) -> None:
        super().__init__(root, download, train)
        check_choice("unlabelled", unlabelled, [True, False])
        self.unlabelled = unlabelled

    def _load_images(self) -> tuple[Tensor, Tensor | None]:
        folder = self._find_files()
        source = self._torchvision_class.url
        if self.unlabelled:
            return _read_stl10_images(folder / "unlabeled_X.bin", 100_000, source), None
        name = "test"
        count = 8000
        if self.train:
            name = "train"
            count = 5000
        images = _read_stl10_images(folder / f"{name}_X.bin", count, source)
        labels = map_array(folder / f"{name}_y.bin", (count,), source).long()
        return images, labels - 1  # the files number the classes from 1


def _read_stl10_images(path: Path, count: int, source: str) -> Tensor:
    return map_array(path, (count, 3, 96, 96), source).mT  # the files store columns first


class _TestSet(ImageSet):
    """Base class of sets of CIFAR-10's classes that have only a test split, in NumPy arrays."""

    num_classes = 10
    _source: str
    """Address from which the files can be downloaded."""
    _subfolders: tuple[str, ...]
    """Folders below ``root`` that may have the files."""
    _file_pattern: str
    """Pattern of one of the files."""

    def __init__(self, root: str, train: bool) -> None:
        if train:
            raise ValueError(
                f"{type(self).__name__} is a test set and has no training split: train on CIFAR10, and use this set "
                "with train: false as a shift or as public"
            )
        super().__init__(train)
        checked_path("root", root)
        self.root = root

    def _read_files(self, file_names: Sequence[str], labels_name: str, count: int) -> tuple[list[Tensor], Tensor]:
        """Read files of ``count`` images each, which share their labels.

        Returns:
            The images (count, 3, 32, 32) of each file, and the labels (count,).
        """
        root = Path(self.root)
        folder = find_folder([root / name for name in self._subfolders], self._file_pattern) or root
        images = []
        for name in file_names:
            channels_last = map_array(folder / name, (count, 32, 32, 3), self._source)
            images.append(channels_last.permute(0, 3, 1, 2))
        labels = map_array(folder / labels_name, (count,), self._source)
        return images, labels.long()


class CIFAR10_1(_TestSet):
    """CIFAR-10.1, about 2,000 new photographs of CIFAR-10's classes, 32×32: a test set (Recht et al., ICML 2019).

    Args:
        root: Folder that holds (or is) ``CIFAR-10.1``, with ``cifar10.1_v6_data.npy`` and ``cifar10.1_v6_labels.npy``
            in it or in its folder ``datasets`` (https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets).
        version: ``v6``, 2,000 images with equally many of each class, or ``v4``, 2,021 images.
        train: Must be false.
    """

    _source = "https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets"
    _subfolders = ("", "CIFAR-10.1", "datasets", "CIFAR-10.1/datasets")
    _file_pattern = "cifar10.1_*.npy"

    def __init__(self, root: str = "data", version: Literal["v4", "v6"] = "v6", train: bool = False) -> None:
        super().__init__(root, train)
        check_choice("version", version, ["v4", "v6"])
        self.version = version

    def _load_images(self) -> tuple[Tensor, Tensor]:
        prefix = f"cifar10.1_{self.version}"
        count = 2000 if self.version == "v6" else 2021
        (images,), labels = self._read_files([f"{prefix}_data.npy"], f"{prefix}_labels.npy", count)
        return images.contiguous(), labels


class CIFAR10C(_TestSet):
    """CIFAR-10-C, CIFAR-10's test images with a corruption, 32×32: a test set (Hendrycks and Dietterich, ICLR 2019).

    Args:
        corruption: Name of the corruption: one of the 15 of the benchmark, or of ``speckle_noise``, ``gaussian_blur``,
            ``spatter`` and ``saturate``; or ``main`` for the 15 and ``all`` for the 19, one after another. Accuracy on
            these is the mean over the corruptions, since all have the same number of images.
        severity: From 1, the mildest, to 5 (10,000 images each), or null for all five (50,000 images, the mildest
            first).
        root: Folder that holds (or is) ``CIFAR-10-C`` with a file of each corruption and ``labels.npy``
            (https://zenodo.org/records/2535967).
        train: Must be false.
    """

    _source = "https://zenodo.org/records/2535967"
    _subfolders = ("CIFAR-10-C", "")
    _file_pattern = "*.npy"

    def __init__(self, corruption: str, severity: int | None = None, root: str = "data", train: bool = False) -> None:
        super().__init__(root, train)
        check_choice("corruption", corruption, (*CORRUPTIONS, *_GROUPS))
        check_integer("severity", severity, le=5, optional=True)
        self.corruption = corruption
        self.severity = severity

    def _load_images(self) -> tuple[Tensor, Tensor]:
        corruptions = _GROUPS.get(self.corruption, (self.corruption,))
        images_of_files, labels = self._read_files([f"{name}.npy" for name in corruptions], "labels.npy", 50_000)
        rows = slice(None)
        if self.severity is not None:
            rows = slice((self.severity - 1) * 10_000, self.severity * 10_000)
        labels = labels[rows]
        # Without `out` the result would have the layout of the files, channels last.
        images = torch.empty(len(corruptions) * len(labels), 3, 32, 32, dtype=torch.uint8)
        torch.cat([file_images[rows] for file_images in images_of_files], out=images)
        return images, labels.repeat(len(corruptions))


class Photographs(ImageSet):
    """Unlabelled square crops of the two photographs that ship with scikit-learn, as a public set without a download.

    Args:
        count: Number of images.
        size: Height and width of each image in pixels.
        smallest: Side of the smallest crop before it is resized, in pixels of the photograph.
        largest: Side of the largest crop, at most 427.
        gray: Load images with one channel instead of three.
        seed: A different seed gives different crops.
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
        check_integer("count", count)
        check_integer("size", size)
        check_integer("largest", largest, le=427, hint="the photographs are 427 pixels high")
        check_integer("smallest", smallest, le=largest, hint=f"largest is {largest}")
        check_choice("gray", gray, [True, False])
        check_integer("seed", seed, 0, le=None)
        self.count = count
        self.size = size
        self.smallest = smallest
        self.largest = largest
        self.gray = gray
        self.seed = seed

    def _load_images(self) -> tuple[Tensor, None]:
        china = sklearn_data_file("images/china.jpg")
        flower = sklearn_data_file("images/flower.jpg")
        if china is None or flower is None:
            shipped = installed("sklearn.datasets", "Photographs", "examples").load_sample_images().images
        else:
            shipped = [np.asarray(Image.open(file)) for file in (china, flower)]
        photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in shipped]
        if self.gray:
            luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # ITU-R BT.601
            photographs = [(image * luma).sum(0, keepdim=True).round().byte() for image in photographs]
        rng = np.random.default_rng(derive_seed(self.seed, "photographs"))
        crops = []
        for _ in range(self.count):
            image = photographs[rng.integers(len(photographs))]
            _, height, width = image.shape
            side = int(rng.integers(self.smallest, self.largest + 1))
            top = int(rng.integers(height - side + 1))
            left = int(rng.integers(width - side + 1))
            crops.append(resize_uint8(image[:, top : top + side, left : left + side], self.size))
        return torch.stack(crops), None


def sklearn_data_file(name: str) -> Path | None:
    """Return the path of a data file of scikit-learn, or None if it is not below ``sklearn/datasets``.

    The file is read without importing scikit-learn, which would load pandas, pyarrow and 500 modules.
    """
    spec = find_spec("sklearn")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / "datasets" / name
        if path.is_file():
            return path
    return None


def find_folder(candidate_folders: Sequence[Path], pattern: str) -> Path | None:
    """Return the first folder with a file that matches ``pattern``."""
    for folder in candidate_folders:
        if any(folder.glob(pattern)):
            return folder
    return None


def read_idx(path: Path, item_shape: tuple[int, ...], source: str) -> Tensor:
    """Read an idx file of unsigned bytes, ``path`` or ``path.gz``.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian 32-bit
    integer, then the data (http://yann.lecun.com/exdb/mnist).

    Args:
        path: The file.
        item_shape: Expected shape of an item.
        source: Address from which the file can be downloaded, for messages.

    Returns:
        uint8 (N, *item_shape).
    """
    compressed = path.with_name(path.name + ".gz")
    if compressed.exists() and not path.exists():
        path = compressed
    shape = ", ".join(map(str, ("N", *item_shape)))
    with explain_read_errors(path, f"fetch it again from {source}", f"an idx file of bytes ({shape})"):
        content = path.read_bytes()
        if path == compressed:
            content = gzip.decompress(content)
        magic, count, *sides = np.frombuffer(content, ">i4", 2 + len(item_shape)).tolist()
        if magic != 0x801 + len(item_shape) or sides != list(item_shape):
            raise ValueError(f"its header is {magic:#x} {count} {sides}")
        header_size = 8 + 4 * len(item_shape)
        values = np.frombuffer(content, np.uint8, offset=header_size).reshape(count, *item_shape)
        return torch.from_numpy(values.copy())  # torch warns of arrays that cannot be written to


def map_array(path: Path, shape: tuple[int, ...], source: str) -> Tensor:
    """Map a .npy file, or another file of plain bytes, into memory. Pickled objects are rejected.

    Args:
        path: The file.
        shape: Expected shape of the array. With one axis it holds integers of any type, else uint8.
        source: Address from which the file can be downloaded, for messages.
    """
    with explain_read_errors(path, f"fetch it again from {source}", f"an array {shape} of integers"):
        if path.suffix == ".npy":
            array: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="c")
            expected_dtype = np.integer if len(shape) == 1 else np.uint8
            if array.shape != shape or not np.issubdtype(array.dtype, expected_dtype):
                raise ValueError(f"it is {array.dtype} {array.shape}")
        else:
            array = np.memmap(path, np.uint8, mode="c").reshape(shape)
        return torch.from_numpy(array)
