# SPDX-License-Identifier: Apache-2.0
"""Image sets in folders."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from perada.core.checks import check_number, check_whole
from perada.core.seeding import derive_seed
from perada.data.batches.decoding import UnreadableImageError, check_full_scale, read_image
from perada.data.batches.transforms import resize_uint8
from perada.data.partitions.shares import hashed_share, of_each_stratum
from perada.data.sets.base import ImageSet
from perada.data.sets.readers import find_folder

_TOGETHER = 8
"""Files that are read at a time for their digests."""
OFFICE_HOME_DOMAINS = ("Art", "Clipart", "Product", "Real World")


class Listing(NamedTuple):
    """The files of a split, in order, and what is known of each."""

    paths: list[str]
    labels: Tensor | None = None
    columns: Mapping[str, np.ndarray[Any, Any]] = {}
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    identities: np.ndarray[Any, Any] | None = None


class ImageFiles(ImageSet):
    """Images that are read from their files, as squares of one size; a subclass lists the files."""

    _mode = "RGB"  # of Pillow
    full_scale: float | None = None  # the value of white in images of more than 8 bits
    _source = ""  # where to fetch them
    _own = False  # whether they are not a published set

    def __init__(self, root: str, size: int, in_memory: bool, train: bool) -> None:
        super().__init__(train)
        check_whole("size", size)
        self.root, self.size, self.in_memory = root, size, in_memory

    @cached_property
    @abstractmethod
    def _listing(self) -> Listing:
        """What the split in ``self.train`` consists of."""

    def read(self, path: str) -> Tensor:
        """Read one file as uint8 (Ch, size, size), turned as its EXIF data say (see :func:`.decode`).

        Raises:
            MissingImageError: If it does not exist.
            UnreadableImageError: If it is no image, is cut short, or has values that cannot be scaled.
        """
        remedy = f"fetch it again from {self._source}" if self._source else "fix it or take it out of the folder"
        return resize_uint8(read_image(path, remedy, self._mode, self.full_scale), self.size)

    def content(self, path: str) -> bytes:
        """One file as it is stored."""
        return Path(path).read_bytes()

    def digest(self, path: str) -> str:
        """A digest of a file's content, whatever it is called; of the path if it cannot be read."""
        try:
            state = os.stat(path)
            return _digest(path, state.st_size, state.st_mtime_ns)
        except OSError:
            return hashlib.sha256(path.encode()).hexdigest()

    def _identified(self, paths: Sequence[str], columns: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """What stands for each image: its group, or else its content."""
        if self.group_column in columns:
            return np.array(
                [hashlib.sha256(f"group {name}".encode()).hexdigest() for name in columns["group"].tolist()]
            )
        with ThreadPoolExecutor(_TOGETHER) as pool:
            return np.array(list(pool.map(self.digest, paths)))

    @property
    def identities(self) -> np.ndarray[Any, Any] | None:
        """Of images of one's own, a digest of the group, or else of the content."""
        found = self._listing
        if self._own and found.identities is None:
            return self._identified(found.paths, found.columns)
        return found.identities

    def _load(self) -> tuple[Tensor | None, Tensor | None]:
        return (self._read_all() if self.in_memory else None), self._listing.labels

    def _read_all(self) -> Tensor:
        """All images; an UnreadableImageError names every file that cannot be read."""
        images, broken = [], []
        for path in self._listing.paths:
            try:
                images.append(self.read(path))
            except (OSError, ValueError) as error:
                broken.append(str(error))
        if broken:
            raise UnreadableImageError(
                f"{'; '.join(broken)}; to leave such out, set in_memory: false and on_broken: skip"
            )
        return torch.stack(images)

    @property
    def num_classes(self) -> int | None:  # type: ignore[override]  # known from the files
        """Number of classes, or of labels that an image may have; None where there are no labels."""
        return self._listing.num_classes

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # known from the files
        """Names of the classes, or of the labels that an image may have, in the order of their numbers."""
        return self._listing.classes

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Further facts about each image, (N,) by name."""
        return self._listing.columns

    def __len__(self) -> int:
        return len(self._listing.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        image = self.images[index] if self.images is not None else self.read(self._listing.paths[index])
        return image if self.labels is None else (image, self.labels[index])


class ImageFolder(ImageFiles):
    """Images sorted into a folder per class, as torchvision's ImageFolder reads them.

    ``root`` holds ``train`` and ``test`` with the same class folders, or the class folders themselves, of which about a
    fifth of the images, chosen by their content, is then the test split. With ``domains``, a folder per domain comes
    above the classes.

    Args:
        root: The folder.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        domains: Whether class folders stand within domain folders; the column ``domain`` then names each image's.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        full_scale: The value of white in grey images of more than 8 bits, such as 4095; null for 65535, or for 1 in
            floating-point images.
        train: The training split, or else the test split.
    """

    _own = True

    def __init__(
        self,
        root: str,
        size: int = 224,
        domains: bool = False,
        in_memory: bool = False,
        full_scale: float | None = None,
        train: bool = True,
    ) -> None:
        super().__init__(root, size, in_memory, train)
        check_full_scale(full_scale)
        self.domains, self.full_scale = domains, full_scale

    @cached_property
    def _listing(self) -> Listing:
        root = Path(self.root)
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not a folder: set root to the folder that holds a folder per class")
        divided = (root / "train").is_dir() and (root / "test").is_dir()
        split = root / ("train" if self.train else "test") if divided else root
        tops = _subfolders(split) if self.domains else [split]
        both = [root / part for part in ("train", "test")] if divided else [root]  # a class may be in one of them only
        every = [top for one in both for top in (_subfolders(one) if self.domains else [one])]
        classes = sorted({folder.name for top in every for folder in _subfolders(top)})
        if not classes:
            raise FileNotFoundError(f"{split} has no folders of classes: set root (and domains) to fit its layout")
        numbers = {name: number for number, name in enumerate(classes)}
        samples = [
            (path, number, top.name)
            for top in tops
            for path, number in make_dataset(str(top), numbers, IMG_EXTENSIONS, allow_empty=True)
        ]
        if not divided:
            paths, parts, tops_of = zip(*samples, strict=True) if samples else ((), (), ())
            keys = self._identified(paths, {}).tolist()
            test = {*hashed_share(keys, tops_of, [[part] for part in parts], 0.2, 0, leave=True).tolist()}
            samples = [sample for row, sample in enumerate(samples) if (row in test) != self.train]
        columns = {"domain": np.array([sample[2] for sample in samples])} if self.domains else {}
        labels = torch.tensor([sample[1] for sample in samples], dtype=torch.int64)
        return Listing([sample[0] for sample in samples], labels, columns, len(classes), tuple(classes))


class OfficeHome(ImageFiles):
    """Office-Home, 15,588 photographs and drawings of 65 classes in four domains (Venkateswara et al., CVPR 2017).

    The column ``domain`` says which of ``Art``, ``Clipart``, ``Product`` and ``Real World`` an image is of. The set is
    published without splits: of each domain and class, a share drawn by ``seed`` is the test split.

    Args:
        root: Folder that holds (or is) ``OfficeHomeDataset_10072016``, the folder with one folder for each domain
            (https://www.hemanthdv.org/officeHomeDataset.html).
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        test_share: Share of each domain and class that is the test split. PerAda's experiments have 1,656 test images.
        seed: Another seed, another test split.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
    """

    _source = "https://www.hemanthdv.org/officeHomeDataset.html"

    def __init__(
        self,
        root: str = "data",
        size: int = 224,
        test_share: float = 0.1,
        seed: int = 0,
        in_memory: bool = False,
        train: bool = True,
    ) -> None:
        super().__init__(root, size, in_memory, train)
        check_number("test_share", test_share, above=0, below=1, hint="a share of the images")
        self.test_share, self.seed = test_share, seed

    @cached_property
    def _listing(self) -> Listing:
        home = find_folder([Path(self.root), Path(self.root) / "OfficeHomeDataset_10072016"], "Art") or Path(self.root)
        tops = [self._domain(home, name) for name in OFFICE_HOME_DOMAINS]
        classes = sorted({folder.name for top in tops for folder in _subfolders(top)})
        if len(classes) != 65:
            raise ValueError(
                f"{home} has folders of {len(classes)} classes in its domains, and Office-Home has 65: fetch it again "
                f"from {self._source}"
            )
        numbers = {name: number for number, name in enumerate(classes)}
        found = [make_dataset(str(top), numbers, IMG_EXTENSIONS, allow_empty=True) for top in tops]
        for top, samples in zip(tops, found, strict=True):
            missing = sorted(numbers.keys() - {classes[number] for _, number in samples})
            if missing:
                raise FileNotFoundError(
                    f"{top / missing[0]} has no images, and every class of Office-Home has some in every domain: fetch "
                    f"it again from {self._source}"
                )
        paths, labels = zip(*(sample for samples in found for sample in samples), strict=True)
        domains = np.repeat(OFFICE_HOME_DOMAINS, [len(samples) for samples in found])
        strata = np.array(labels) + 65 * np.repeat(np.arange(4), [len(samples) for samples in found])
        held = of_each_stratum(strata, self.test_share, np.random.default_rng(derive_seed(self.seed, "office_home")))
        rows = np.setdiff1d(np.arange(len(paths)), held) if self.train else held
        own = torch.tensor(np.array(labels)[rows])
        columns = {"domain": domains[rows]}
        return Listing([paths[row] for row in rows], own, columns, len(classes), tuple(classes))

    def _domain(self, home: Path, name: str) -> Path:
        places = [home / spelt for spelt in dict.fromkeys((name, name.replace(" ", "")))]
        for place in places:
            if place.is_dir():
                return place
        raise FileNotFoundError(
            f"{' or '.join(map(str, places))} does not exist: set root to the folder with Office-Home's folders "
            f"{', '.join(OFFICE_HOME_DOMAINS)} (from {self._source})"
        )


class UnlabelledFolder(ImageFiles):
    """All images below a folder, without labels: a public set.

    Args:
        root: The folder.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        in_memory: Keep all images as one tensor instead of reading files again and again.
    """

    def __init__(self, root: str, size: int = 224, in_memory: bool = False) -> None:
        super().__init__(root, size, in_memory, train=True)

    @cached_property
    def _listing(self) -> Listing:
        files = sorted(str(path) for path in Path(self.root).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise FileNotFoundError(f"{self.root} has no images: set root to a folder with {', '.join(IMG_EXTENSIONS)}")
        return Listing(files)


@lru_cache(maxsize=2**20)
def _digest(path: str, size: int, changed: int) -> str:
    """Of the content of a file that has so many bytes, and was changed then."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
