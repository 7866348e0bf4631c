# SPDX-License-Identifier: Apache-2.0
"""Published sets of images that are arrays, and their files: idx, CIFAR's two layouts, NumPy's, plain bytes.

What is mapped into memory is read when it is used.
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

from perada.core.checks import check_choice, check_integer, installed
from perada.core.seeding import derive_seed
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.base import ImageSet, reading

DIGITS = tuple("0123456789")
CORRUPTIONS = tuple(
    "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog brightness "
    "contrast elastic_transform pixelate jpeg_compression "
    "speckle_noise gaussian_blur spatter saturate".split()  # the four more, which the authors meant for validation
)
_GROUPS = {"main": CORRUPTIONS[:15], "all": CORRUPTIONS}


class Digits(ImageSet):
    """The 1,797 handwritten digits that ship with scikit-learn, 8×8 gray: nothing to download.

    Args:
        train: The training split, or else the test split: a fixed fifth of the images (359), drawn once.
    """

    num_classes = 10
    classes = DIGITS

    def _load(self) -> tuple[Tensor, Tensor]:
        table = sklearn_data_file("data/digits.csv.gz")
        if table is None:
            pixels, labels = installed("sklearn.datasets", "Digits", "examples").load_digits(return_X_y=True)
        else:
            numbers = np.loadtxt(table, delimiter=",")
            pixels = numbers[:, :-1]
            labels = numbers[:, -1].astype(int)
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        order = np.random.default_rng(0).permutation(len(labels))
        cut = len(labels) // 5
        chosen = torch.from_numpy(np.sort(order[cut:] if self.train else order[:cut]))
        return images[chosen], torch.from_numpy(labels).long()[chosen]


class Downloadable(ImageSet):
    """A set that torchvision knows, of which it has the files' names, checksums and addresses.

    Args:
        root: Folder that holds (or is) the set's own, as torchvision leaves it; null for ``data``.
        download: Fetch the files to ``root`` if they are missing; torchvision compares the checksums.
        train: The training split, or else the test split.
    """

    num_classes = 10
    _kind: type[Any]
    _file: str  # one of the set's files, as a pattern
    _folders: tuple[str, ...] = ()  # where the files may be, below root

    def __init__(self, root: str | None = None, download: bool = False, train: bool = True) -> None:
        super().__init__(train)
        self.root, self._may_download = root, download

    def _places(self) -> list[Path]:
        return [Path(self.root or "data") / folder for folder in (*self._folders, "")]

    def download(self) -> None:
        """Fetch the files if that was asked for and they are missing."""
        if self._may_download and find_folder(self._places(), self._file) is None:
            self._kind(self.root or "data", download=True)

    def _found(self) -> Path:
        if folder := find_folder(self._places(), self._file):
            return folder
        raise FileNotFoundError(
            f"{type(self).__name__} is not in {' or '.join(map(str, self._places()))}: set root to the folder with its "
            "files, or set download: true where there is a network"
        )


class MNIST(Downloadable):
    """MNIST, 60,000 and 10,000 gray images of handwritten digits, 28×28 (http://yann.lecun.com/exdb/mnist).

    The four idx files (.gz or not) are in ``root``, or in ``MNIST/raw`` there.
    """

    classes: tuple[str, ...] | None = DIGITS
    _kind = published.MNIST
    _file = "t10k-labels-idx1-ubyte*"
    _folders = ("MNIST/raw",)

    def _load(self) -> tuple[Tensor, Tensor]:
        prefix = self._found() / ("train" if self.train else "t10k")
        images = read_idx(Path(f"{prefix}-images-idx3-ubyte"), (28, 28), self._kind.mirrors[0])
        return images.unsqueeze(1), read_idx(Path(f"{prefix}-labels-idx1-ubyte"), (), self._kind.mirrors[0]).long()


class FashionMNIST(MNIST):
    """Fashion-MNIST, 60,000 and 10,000 gray images of clothing, 28×28 (https://github.com/zalandoresearch/fashion-mnist).

    Without ``root`` the files are where Debian's package dataset-fashion-mnist puts them, or in ``data``.
    """

    classes = tuple(published.FashionMNIST.classes)
    _kind = published.FashionMNIST
    _folders = ("FashionMNIST/raw",)

    def _places(self) -> list[Path]:
        return [Path("/usr/share/datasets/fashion-mnist")] * (self.root is None) + super()._places()


class CIFAR10(Downloadable):
    """CIFAR-10, 50,000 and 10,000 colour photographs, 32×32 (https://www.cs.toronto.edu/~kriz/cifar.html).

    The files are in ``cifar-10-batches-py``, or in ``cifar-10-batches-bin``, whose layout is binary.
    """

    _kind = published.CIFAR10
    _file = "test_batch*"
    _folders = ("cifar-10-batches-py", "cifar-10-batches-bin")
    _label_bytes = 1  # before the pixels of a record of the binary layout; the last one is the label
    _names_file = "batches.meta.txt"  # of the binary layout

    _names: tuple[str, ...] | None = None

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # read from a file
        """Names of the classes, or None where the files of the binary layout come without them."""
        _ = self._tensors
        return self._names

    def _load(self) -> tuple[Tensor, Tensor]:
        folder, kind = self._found(), self._kind
        if (folder / kind.test_list[0][0]).exists():
            for name, checksum in (*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])):
                if not check_integrity(str(folder / name), checksum):
                    raise ValueError(f"{folder / name} is missing or not the published file (by MD5): fetch it again")
            split = type(kind.__name__, (kind,), {"base_folder": ""})(folder, self.train)
            self._names = tuple(split.classes)
            return torch.from_numpy(split.data.transpose(0, 3, 1, 2)), torch.tensor(split.targets)
        if (folder / self._names_file).is_file():
            self._names = tuple((folder / self._names_file).read_text(encoding="utf-8").split())
        files = [folder / f"{name}.bin" for name, _ in (kind.train_list if self.train else kind.test_list)]
        records = torch.cat([map_array(file, (-1, self._label_bytes + 3072), kind.url) for file in files])
        return records[:, -3072:].reshape(-1, 3, 32, 32), records[:, self._label_bytes - 1].long()


class CIFAR100(CIFAR10):
    """CIFAR-100, 50,000 and 10,000 colour photographs in 100 classes, 32×32.

    The files are in ``cifar-100-python``, or in ``cifar-100-binary``, whose layout is binary.
    """

    num_classes = 100
    _kind = published.CIFAR100
    _file = "test*"
    _folders = ("cifar-100-python", "cifar-100-binary")
    _label_bytes = 2  # a coarse label stands before the fine one
    _names_file = "fine_label_names.txt"


class STL10(Downloadable):
    """STL-10, colour photographs, 96×96: 5,000 and 8,000 of 10 classes, and 100,000 without labels.

    The files are those of the binary layout (Coates et al., AISTATS 2011; https://cs.stanford.edu/~acoates/stl10), in
    ``stl10_binary``. The classes are numbered from 0, in the order of the files; CIFAR-10's are others, in another
    order.

    Args:
        root: Folder that holds (or is) ``stl10_binary``.
        download: Fetch the files to ``root`` if they are missing (2.6 GB).
        unlabelled: The images without labels, as a public set, instead of those with.
        train: The training split, or else the test split.
    """

    _kind = published.STL10
    _file = "*_X.bin"
    _folders = ("stl10_binary",)

    def __init__(
        self, root: str = "data", download: bool = False, unlabelled: bool = False, train: bool = True
    ) -> None:
        super().__init__(root, download, train)
        self.unlabelled = unlabelled

    def _load(self) -> tuple[Tensor, Tensor | None]:
        folder, source = self._found(), self._kind.url
        part, count = ("train", 5000) if self.train else ("test", 8000)
        part, count = ("unlabeled", 100_000) if self.unlabelled else (part, count)
        images = map_array(folder / f"{part}_X.bin", (count, 3, 96, 96), source).mT  # columns come first
        return images, None if self.unlabelled else map_array(folder / f"{part}_y.bin", (count,), source).long() - 1


class _TestSet(ImageSet):
    """A set of CIFAR-10's classes that has a test split alone, in arrays of NumPy's."""

    num_classes = 10
    _source: str
    _folders: tuple[str, ...]  # where the files may be, in root
    _file: str  # one of them, as a pattern

    def __init__(self, root: str, train: bool) -> None:
        if train:
            raise ValueError(
                f"{type(self).__name__} is a test set and has no training split: train on CIFAR10, and give this one "
                "with train: false where another set is scored or as public"
            )
        super().__init__(train)
        self.root = root

    def _read(self, names: Sequence[str], labels: str, count: int) -> tuple[list[Tensor], Tensor]:
        """So many images of each of some files, with their channels first, and the labels of each."""
        folder = find_folder([Path(self.root) / name for name in self._folders], self._file) or Path(self.root)
        images = [map_array(folder / name, (count, 32, 32, 3), self._source).permute(0, 3, 1, 2) for name in names]
        return images, map_array(folder / labels, (count,), self._source).long()


class CIFAR10_1(_TestSet):
    """CIFAR-10.1, about 2,000 new photographs of CIFAR-10's classes, 32×32: a test set (Recht et al., ICML 2019).

    Args:
        root: Folder that holds (or is) ``CIFAR-10.1``, in which or in whose ``datasets`` lie
            ``cifar10.1_v6_data.npy`` and ``cifar10.1_v6_labels.npy``
            (https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets).
        version: ``v6``, 2,000 images with as many of each class, or ``v4``, 2,021 images.
        train: Must be false.
    """

    _source = "https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets"
    _folders = ("", "CIFAR-10.1", "datasets", "CIFAR-10.1/datasets")
    _file = "cifar10.1_*.npy"

    def __init__(self, root: str = "data", version: Literal["v4", "v6"] = "v6", train: bool = False) -> None:
        super().__init__(root, train)
        check_choice("version", version, ["v4", "v6"])
        self.version = version

    def _load(self) -> tuple[Tensor, Tensor]:
        name, count = f"cifar10.1_{self.version}", 2000 if self.version == "v6" else 2021
        (images,), labels = self._read([f"{name}_data.npy"], f"{name}_labels.npy", count)
        return images.contiguous(), labels


class CIFAR10C(_TestSet):
    """CIFAR-10-C, CIFAR-10's test images with a corruption, 32×32: a test set (Hendrycks and Dietterich, ICLR 2019).

    Args:
        corruption: Name of the corruption: one of the 15 of the benchmark, or of ``speckle_noise``, ``gaussian_blur``,
            ``spatter`` and ``saturate``; or ``main`` for the 15 and ``all`` for the 19, one after another. Accuracy on
            these is the mean over the corruptions, since all have as many images.
        severity: 1, the mildest, to 5 (10,000 images), or null for all five (50,000 images, the mildest first).
        root: Folder that holds (or is) ``CIFAR-10-C`` with a file of each corruption and ``labels.npy``
            (https://zenodo.org/records/2535967).
        train: Must be false.
    """

    _source = "https://zenodo.org/records/2535967"
    _folders = ("CIFAR-10-C", "")
    _file = "*.npy"

    def __init__(self, corruption: str, severity: int | None = None, root: str = "data", train: bool = False) -> None:
        super().__init__(root, train)
        check_choice("corruption", corruption, (*CORRUPTIONS, *_GROUPS))
        check_integer("severity", severity, le=5, optional=True)
        self.corruption, self.severity = corruption, severity

    def _load(self) -> tuple[Tensor, Tensor]:
        names = [f"{name}.npy" for name in _GROUPS.get(self.corruption, (self.corruption,))]
        files, labels = self._read(names, "labels.npy", 50_000)
        rows = slice(None) if self.severity is None else slice((self.severity - 1) * 10_000, self.severity * 10_000)
        labels = labels[rows]
        images = torch.empty(len(files) * len(labels), 3, 32, 32, dtype=torch.uint8)
        return torch.cat([file[rows] for file in files], out=images), labels.repeat(len(files))


class Photographs(ImageSet):
    """Unlabelled square cut-outs of the two photographs that ship with scikit-learn: a public set without a download.

    Args:
        count: Number of images.
        size: Height and width of each, in pixels.
        smallest: Side of the smallest cut-out before it is resized, in pixels of the photograph.
        largest: Side of the largest one; at most 427.
        gray: One channel instead of three.
        seed: Another seed, other cut-outs.
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
        check_integer("largest", largest, le=427, hint="the photographs' height")
        check_integer("smallest", smallest, le=largest, hint=f"largest is {largest}")
        self.count, self.size, self.smallest, self.largest = count, size, smallest, largest
        self.gray, self.seed = gray, seed

    def _load(self) -> tuple[Tensor, None]:
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
        random = np.random.default_rng(derive_seed(self.seed, "photographs"))
        cuts = []
        for _ in range(self.count):
            image = photographs[random.integers(len(photographs))]
            side = int(random.integers(self.smallest, self.largest + 1))
            top, left = (int(random.integers(extent - side + 1)) for extent in image.shape[1:])
            cuts.append(resize_uint8(image[:, top : top + side, left : left + side], self.size))
        return torch.stack(cuts), None


def sklearn_data_file(name: str) -> Path | None:
    """Return where a data file of scikit-learn is, or None if it is not below ``sklearn/datasets``.

    The quickstart needs nothing else of scikit-learn, whose import takes pandas, pyarrow and 500 modules with it.
    """
    spec = find_spec("sklearn")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / "datasets" / name for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def find_folder(candidates: Sequence[Path], pattern: str) -> Path | None:
    """Return the first folder with a file that matches ``pattern``."""
    return next((folder for folder in candidates if any(folder.glob(pattern))), None)


def read_idx(path: Path, item: tuple[int, ...], source: str) -> Tensor:
    """Read an idx file of unsigned bytes, ``path`` or ``path.gz``: uint8 (N, ...) of ``item`` each.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian 32-bit
    integer, then the data (http://yann.lecun.com/exdb/mnist).
    """
    zipped = path.with_name(path.name + ".gz")
    path = path if path.exists() or not zipped.exists() else zipped
    shape = ", ".join(map(str, ("N", *item)))
    with reading(path, f"fetch it again from {source}", f"an idx file of bytes ({shape})"):
        content = gzip.decompress(path.read_bytes()) if path == zipped else path.read_bytes()
        kind, count, *sides = np.frombuffer(content, ">i4", 2 + len(item)).tolist()
        if kind != 0x801 + len(item) or sides != list(item):
            raise ValueError(f"its header is {kind:#x} {count} {sides}")
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=8 + 4 * len(item)).reshape(count, *item).copy())


def map_array(path: Path, shape: tuple[int, ...], source: str) -> Tensor:
    """Map a .npy file, or else one of plain bytes, into memory: uint8, or whole numbers (N,). Nothing in it is run."""
    with reading(path, f"fetch it again from {source}", f"an array {shape} of whole numbers"):
        if path.suffix == ".npy":
            array: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="c")
            kind = np.integer if len(shape) == 1 else np.uint8
            if array.shape != shape or not np.issubdtype(array.dtype, kind):
                raise ValueError(f"it is {array.dtype} {array.shape}")
        else:
            array = np.memmap(path, np.uint8, mode="c").reshape(shape)
        return torch.from_numpy(array)
