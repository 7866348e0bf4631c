# SPDX-License-Identifier: Apache-2.0
"""Image sets in folders."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from perada.core.checks import check_whole
from perada.core.seeding import derive_seed
from perada.data.batches.transforms import resize_uint8, to_image
from perada.data.sets.images import ImageSet


class _Files(ImageSet):
    """Images that are read from their files, as RGB squares of one size."""

    def __init__(self, root: str, size: int, in_memory: bool, train: bool) -> None:
        super().__init__(train)
        check_whole("size", size)
        self.root, self.size, self.in_memory = root, size, in_memory

    @cached_property
    @abstractmethod
    def _paths(self) -> list[str]:
        """Files of this split, in order."""

    def read(self, path: str) -> Tensor:
        """Read one file as uint8 (3, size, size)."""
        with Image.open(path) as image:
            return resize_uint8(to_image(image.convert("RGB")), self.size)

    def _load(self) -> tuple[Tensor | None, Tensor | None]:
        return (torch.stack([self.read(path) for path in self._paths]) if self.in_memory else None), None

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        image = self.images[index] if self.images is not None else self.read(self._paths[index])
        return image if self.labels is None else (image, self.labels[index])


class ImageFolder(_Files):
    """Images sorted into a folder per class, as torchvision's ImageFolder reads them.

    ``root`` holds ``train`` and ``test`` with the same class folders, or the class folders themselves, of which a fixed
    fifth of the images is then the test split. With ``domains``, a folder per domain comes above the classes.

    Args:
        root: The folder.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        domains: Whether class folders stand within domain folders; the column ``domain`` then names each image's.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.
    """

    def __init__(
        self, root: str, size: int = 224, domains: bool = False, in_memory: bool = False, train: bool = True
    ) -> None:
        super().__init__(root, size, in_memory, train)
        self.domains = domains

    @cached_property
    def _index(self) -> tuple[list[str], list[int], list[str], int]:
        """Path, class and domain of each image of the split, and the number of classes."""
        root = Path(self.root)
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not a folder: set root to the folder that holds a folder per class")
        divided = (root / "train").is_dir() and (root / "test").is_dir()
        split = root / ("train" if self.train else "test") if divided else root
        tops = _subfolders(split) if self.domains else [split]
        classes = sorted({folder.name for top in tops for folder in _subfolders(top)})
        if not classes:
            raise FileNotFoundError(f"{split} has no folders of classes: set root (and domains) to fit its layout")
        numbers = {name: number for number, name in enumerate(classes)}
        samples = [
            (path, number, top.name)
            for top in tops
            for path, number in make_dataset(str(top), numbers, IMG_EXTENSIONS, allow_empty=True)
        ]
        if not divided:
            order = np.random.default_rng(derive_seed(0, "folder")).permutation(len(samples))
            cut = len(samples) // 5
            samples = [samples[i] for i in np.sort(order[cut:] if self.train else order[:cut])]
        return [s[0] for s in samples], [s[1] for s in samples], [s[2] for s in samples], len(classes)

    @cached_property
    def _paths(self) -> list[str]:
        return self._index[0]

    @property
    def num_classes(self) -> int:  # type: ignore[override]  # known from the folders
        """Number of classes."""
        return self._index[3]

    @property
    def labels(self) -> Tensor:
        """Class of each image (N,), by the alphabetical order of the folders."""
        return torch.tensor(self._index[1], dtype=torch.int64)

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The domain of each image, if there are any."""
        return {"domain": np.array(self._index[2])} if self.domains else {}


class UnlabelledFolder(_Files):
    """All images below a folder, without labels: a public set.

    Args:
        root: The folder.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        in_memory: Keep all images as one tensor instead of reading files again and again.
    """

    def __init__(self, root: str, size: int = 224, in_memory: bool = False) -> None:
        super().__init__(root, size, in_memory, train=True)

    @cached_property
    def _paths(self) -> list[str]:
        files = sorted(str(path) for path in Path(self.root).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise FileNotFoundError(f"{self.root} has no images: set root to a folder with {', '.join(IMG_EXTENSIONS)}")
        return files


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
