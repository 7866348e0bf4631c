# SPDX-License-Identifier: Apache-2.0
"""Published sets of images in large arrays, which are mapped into memory: what a run does not use is not read."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from perada.core.checks import check_choice, check_whole
from perada.data.sets.base import ImageSet
from perada.data.sets.readers import find_folder, map_bytes, map_npy

_STL_SIZES = {"train": 5000, "test": 8000, "unlabeled": 100_000}
_CIFAR_10_1_SIZES = {"v4": 2021, "v6": 2000}

Corruption = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
    "speckle_noise",  # this and those below are the four more, which the authors meant for validation
    "gaussian_blur",
    "spatter",
    "saturate",
]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
_GROUPS: dict[str, tuple[Corruption, ...]] = {"main": CORRUPTIONS[:15], "all": CORRUPTIONS}


class STL10(ImageSet):
    """STL-10, colour photographs, 96×96: 5,000 and 8,000 of 10 classes, and 100,000 without labels.

    The files are those of the binary layout (Coates et al., AISTATS 2011; https://cs.stanford.edu/~acoates/stl10).
    The classes are numbered from 0, in the order of the files; CIFAR-10's are others, in another order.

    Args:
        root: Folder that holds (or is) ``stl10_binary``, as torchvision leaves it.
        download: Fetch the files to ``root`` if they are missing; torchvision compares the checksum (2.6 GB).
        unlabelled: The images without labels, as a public set, instead of those with.
        train: The training split, or else the test split.
    """

    num_classes = 10
    _kind = torchvision_datasets.STL10  # knows where the files are

    def __init__(
        self, root: str = "data", download: bool = False, unlabelled: bool = False, train: bool = True
    ) -> None:
        super().__init__(train)
        self.root, self.unlabelled = root, unlabelled
        self._may_download = download

    def _folder(self) -> Path | None:
        return find_folder((Path(self.root) / self._kind.base_folder, Path(self.root)), "*_X.bin")

    def download(self) -> None:
        """Fetch the files with torchvision if that was asked for and they are missing."""
        if self._may_download and self._folder() is None:
            self._kind(self.root, download=True)

    def _load(self) -> tuple[Tensor, Tensor | None]:
        folder = self._folder()
        if folder is None:
            raise FileNotFoundError(
                f"STL-10 is not in {self.root}: set root to the folder that holds {self._kind.base_folder}, or set "
                f"download: true where there is a network ({self._kind.url})"
            )
        part = "unlabeled" if self.unlabelled else "train" if self.train else "test"
        count = _STL_SIZES[part]
        images = map_bytes(folder / f"{part}_X.bin", (count, 3, 96, 96), self._kind.url).mT  # columns come first
        if self.unlabelled:
            return images, None
        return images, map_bytes(folder / f"{part}_y.bin", (count,), self._kind.url).long() - 1


class _TestSet(ImageSet):
    """A set of CIFAR-10's classes that has a test split alone."""

    num_classes = 10

    def __init__(self, train: bool) -> None:
        if train:
            raise ValueError(
                f"{type(self).__name__} is a test set and has no training split: train on CIFAR10, and give this one "
                "with train: false where another set is scored or as public"
            )
        super().__init__(train)


class CIFAR10_1(_TestSet):
    """CIFAR-10.1, about 2,000 new photographs of CIFAR-10's classes, 32×32: a test set (Recht et al., ICML 2019).

    Args:
        root: Folder that holds (or is) ``CIFAR-10.1``, in which or in whose ``datasets`` lie
            ``cifar10.1_v6_data.npy`` and ``cifar10.1_v6_labels.npy``
            (https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets).
        version: ``v6``, 2,000 images with as many of each class, or ``v4``, 2,021 images.
        train: Must be false.

    Raises:
        ValueError: If the training split is asked for, or another version.
    """

    _source = "https://github.com/modestyachts/CIFAR-10.1/tree/master/datasets"

    def __init__(self, root: str = "data", version: Literal["v4", "v6"] = "v6", train: bool = False) -> None:
        super().__init__(train)
        check_choice("version", version, [*_CIFAR_10_1_SIZES])
        self.root, self.version = root, version

    def _load(self) -> tuple[Tensor, Tensor]:
        root, name, count = Path(self.root), f"cifar10.1_{self.version}", _CIFAR_10_1_SIZES[self.version]
        places = [root, root / "CIFAR-10.1", root / "datasets", root / "CIFAR-10.1" / "datasets"]
        folder = find_folder(places, f"{name}_*.npy") or root
        images = map_npy(folder / f"{name}_data.npy", (count, 32, 32, 3), self._source)
        return _channels_first(images), _classes(map_npy(folder / f"{name}_labels.npy", (count,), self._source, True))


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

    Raises:
        ValueError: If the training split is asked for, or what there is not.
    """

    _source = "https://zenodo.org/records/2535967"

    def __init__(
        self,
        corruption: Corruption | Literal["main", "all"],
        severity: int | None = None,
        root: str = "data",
        train: bool = False,
    ) -> None:
        super().__init__(train)
        check_choice("corruption", corruption, (*CORRUPTIONS, *_GROUPS))
        check_whole("severity", severity, most=5, optional=True)
        self.corruption, self.severity, self.root = corruption, severity, root

    def _load(self) -> tuple[Tensor, Tensor]:
        folder = find_folder([Path(self.root) / "CIFAR-10-C", Path(self.root)], "*.npy") or Path(self.root)
        names = _GROUPS.get(self.corruption, (self.corruption,))
        files = [map_npy(folder / f"{name}.npy", (50_000, 32, 32, 3), self._source) for name in names]
        labels = map_npy(folder / "labels.npy", (50_000,), self._source, True)
        rows = slice(None) if self.severity is None else slice((self.severity - 1) * 10_000, self.severity * 10_000)
        count = len(labels[rows])
        images = np.empty((len(files) * count, 3, 32, 32), np.uint8)
        for number, file in enumerate(files):
            images[number * count :][:count] = file[rows].transpose(0, 3, 1, 2)
        return torch.from_numpy(images), _classes(labels[rows]).repeat(len(files))


def _channels_first(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _classes(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
