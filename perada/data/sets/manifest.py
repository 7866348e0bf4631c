# SPDX-License-Identifier: Apache-2.0
"""Sets of image files, which a manifest lists and which are read one by one."""

import hashlib
import io
import os
import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import (
    OptionError,
    check_choice,
    check_integer,
    check_number,
    checked_path,
    without_effect,
)
from perada.core.text import abbreviated, near_names, quoted
from perada.data.batches.transforms import (
    UnreadableImageError,
    check_full_scale,
    read_image,
    resize_uint8,
    size_of_file,
)
from perada.data.federated import warn_of_look_alikes
from perada.data.medical.nifti import Axis
from perada.data.medical.reading import DEFAULT_READING, Frames, MedicalReading, split_number
from perada.data.partitions.shares import Array, hashed_share
from perada.data.sets.base import ImageSet, Manifest, class_names, renumber_labels
from perada.data.sets.label_names import check_label_names
from perada.data.sets.masks import read_mask, stack_masks
from perada.data.sets.medical_rows import DicomGroup, add_frames, add_groups
from perada.data.sets.palettes import Colour, check_palettes, colours_of_values, palette_of
from perada.data.sets.segment_names import check_segment_names, class_numbers, segment_names

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)
"""Split by its names in sources, which may be in any case."""
DEFAULT_SIZE = 224
"""Height and width of the images of most networks."""
_NUM_READERS = 8
"""Threads that hash files."""


class ImageFiles(ImageSet):
    """Base class of images that are read one by one, as squares of one size. A subclass makes their manifest.

    Args:
        root: Folder of the images.
        size: Height and width to resize images to (bilinear, antialiased, regardless of their proportions). The
            ``image_size`` of a data module takes its place.
        in_memory: Keep all images as one tensor instead of rereading files.
        train: Whether to load the training split or the test split.
    """

    is_repeatable = True
    mode = "RGB"
    """Pillow's mode that images are converted to."""
    full_scale: float | None = None
    """The value of white in images of more than 8 bits."""
    medical = DEFAULT_READING
    """How DICOM files and NIfTI volumes are decoded."""
    mask_values: Sequence[int] | None = None
    """The value of each class in masks; None for its number."""
    _source = ""
    """Address from which the files can be downloaded, for messages."""

    def __init__(self, root: str, *, size: int = DEFAULT_SIZE, in_memory: bool = False, train: bool = True) -> None:
        super().__init__(train)
        check_integer("size", size)
        checked_path("root", root)
        check_choice("in_memory", in_memory, [True, False])
        self.root = root
        self.size = int(size)  # resizing does not take NumPy's integers
        self.in_memory = in_memory

    def with_size(self, size: int) -> Self:
        """Return the same split of the same set, with images of another size. A class without this option is unchanged.

        Args:
            size: Height and width of the images.
        """
        if size == self.size:
            return self
        try:
            other = self._copy_with("size", size)
        except (TypeError, ValueError):
            # It hands its keyword arguments on to a class that has no such option.
            return self
        other.train = self.train
        for name in ("manifest", "listing"):
            # What was listed already does not depend on the size.
            if name in vars(self):
                vars(other)[name] = vars(self)[name]
        return other

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """List all images of the source."""

    @cached_property
    def manifest(self) -> Manifest:
        """The images of the split in ``self.train``; all images if there are no splits."""
        manifest = self._assign_splits(self._expand_frames(self.read_manifest()))
        if manifest.split is None:
            return manifest
        split = "train" if self.train else "test"
        return manifest.rows(np.flatnonzero(manifest.split == split))

    def _expand_frames(self, manifest: Manifest) -> Manifest:
        """Return the manifest with a row for each frame of a medical image that is an image of the set."""
        return add_frames(manifest, self.medical, foreground_only=False)

    def _assign_splits(self, manifest: Manifest) -> Manifest:
        """Return the manifest with ``train`` or ``test`` as split of each image. Subclasses may override this."""
        return manifest

    def read(self, path: str) -> Tensor:
        """Read one file as uint8 (Ch, size, size); see :func:`.decode`.

        Raises:
            MissingImageError: If the file does not exist.
            UnreadableImageError: If it is not an image, is truncated, or has values that cannot be scaled.
        """
        remedy = "fix it or take it out of the folder"
        if self._source:
            remedy = f"fetch it again from {self._source}"
        pixels = read_image(path, remedy, self.mode, self.full_scale, medical=self.reading_of(path))
        return resize_uint8(pixels, self.size)

    def reading_of(self, path: str) -> MedicalReading:
        """Return how a file is decoded if it is a medical image."""
        return self.medical

    def content(self, path: str) -> bytes:
        """Return the bytes of one file."""
        return Path(split_number(path).file).read_bytes()

    def digest(self, path: str) -> str:
        """Return a digest of a file's content, or of its path if the file cannot be read."""
        try:
            return self._hash_image(path)
        except OSError:
            return hashlib.sha256(path.encode()).hexdigest()

    def _hash_image(self, path: str) -> str:
        numbered = split_number(path)
        state = os.stat(numbered.file)
        digest = _digest_of_file(numbered.file, state.st_size, state.st_mtime_ns)
        if numbered.number is None:
            return digest
        return hashlib.sha256(f"{digest}#{numbered.number}".encode()).hexdigest()

    def read_mask(self, path: str, image_path: str) -> Tensor:
        """Read the mask (size, size) of an image; see :func:`.read_mask`."""
        return read_mask(path, image_path, self.size, self.mask_values, self.medical)

    def read_palette(self, path: str) -> list[Colour] | None:
        """Return the colours of a mask by number; None if it has no palette."""
        return palette_of(path)

    def _check_palettes(
        self, paths: Sequence[str], masks: Sequence[Tensor], palettes: Sequence[list[Colour] | None]
    ) -> None:
        """Check that masks give the same colours to the same values; see :func:`.check_palettes`."""
        colours_of_files: dict[str, dict[int, Colour]] = {}
        for path, mask, palette in zip(paths, masks, palettes, strict=True):
            if palette is None:
                continue
            pixel_values: list[int] = mask.unique().tolist()
            values = pixel_values
            if self.mask_values is not None:
                values = [self.mask_values[number] for number in pixel_values if number < len(self.mask_values)]
            colours_of_files[path] = colours_of_values(palette, values)
        check_palettes(colours_of_files, values_are_declared=self.mask_values is not None)

    @property
    def resizes_images_only(self) -> bool:  # type: ignore[override]  # it follows from the labels
        """Whether labels refer to the files as they are: masks are resized like their images, numbers are not."""
        return self.manifest.numbers is not None

    def original_size(self, index: int) -> tuple[int, int] | None:
        """Return height and width of an image's file, to which numbers such as coordinates refer; None for others."""
        if not self.resizes_images_only:
            return None
        content = io.BytesIO(self.content(self.manifest.paths[index]))
        width, height = size_of_file(content, self.medical)
        return height, width

    @property
    def files(self) -> list[str]:
        """The file of each image, for messages."""
        return self.manifest.paths

    def _load_labels(self) -> Tensor | None:
        """Return the labels of all images. Masks are read, and stay in memory."""
        manifest = self.manifest
        if manifest.masks is not None:
            with ThreadPoolExecutor(_NUM_READERS) as pool:
                masks = list(pool.map(self.read_mask, manifest.masks, manifest.paths))
                palettes = list(pool.map(self.read_palette, manifest.masks))
            self._check_palettes(manifest.masks, masks, palettes)
            return stack_masks(masks, self.size)
        if manifest.numbers is not None:
            return torch.from_numpy(manifest.numbers)
        if manifest.labels is None:
            return None
        return torch.from_numpy(manifest.labels)

    def _load_images(self) -> tuple[Tensor | None, Tensor | None]:
        labels = self._load_labels()
        if not self.in_memory:
            return None, labels
        images = []
        problems = []
        for path in self.manifest.paths:
            try:
                images.append(self.read(path))
            except (OSError, ValueError) as error:
                problems.append(str(error))
        if problems:
            raise UnreadableImageError(
                f"{'; '.join(problems)}; to skip such images, set in_memory: false and on_broken: skip"
            )
        return torch.stack(images), labels

    @property
    def num_classes(self) -> int | None:  # type: ignore[override]  # known from the files
        """Number of classes, or of labels that an image may have; None without labels."""
        return self.manifest.num_classes if self.classes is None else len(self.classes)

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # known from the files
        """Names of the classes, or of the labels that an image may have, in the order of their numbers."""
        return self.manifest.classes

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Further facts (N,) about each image by name."""
        return self.manifest.columns

    def __len__(self) -> int:
        return len(self.manifest.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        if self.images is not None:
            image = self.images[index]
        else:
            image = self.read(self.manifest.paths[index])
        if self.labels is None:
            return image
        return image, self.labels[index]


class OwnImages(ImageFiles):
    """Base class of users' own images. A subclass lists them.

    Classes are numbered in sorted order, as numbers if all names are numbers, or in the order of ``classes``. If the
    source has no splits, about ``test_share`` of the images is the test split, but never all images of a client, or of
    a class if ``classes`` is not given. The choice depends only on ``seed`` and each image's content, or on the name of
    its group. Images that are added or removed therefore move no others, except at clients with few images
    (:func:`.hashed_share`).

    Args:
        root: Folder of the images.
        classes: Names of the classes, in the order of their numbers; some may have no images. Null for all classes that
            occur.
        test_share: Approximate share of each client's images in the test split, if the source has no splits.
        seed: Seed of the choice of test images.
        gray: Load images with one channel instead of three.
        full_scale: The value of white in grey images of more than 8 bits, such as 4095; null for 65535, or for 1 in
            floating-point images.
        shared_groups: Whether a group's name stands for the same group at all clients, such as a patient's number in a
            national register, or whether each client names its groups itself (``false``), such as a hospital that
            numbers its patients from 1. Null is like ``false``, but warns if splits divide a name between clients.
        window: Which values of DICOM files and NIfTI volumes become black and white: ``file``, the window in the file
            (``file:2`` is the second); ``auto``, the 0.5th and 99.5th percentile of the image; a preset for CT such as
            ``lung``; or a list of centre and width. Files without a window show all values of up to 8 bits, and of more
            bits those from the smallest to the largest of the image. A mapping has a window for each client, such as
            ``{north: lung, south: [-600, 1200]}``.
        frames: Which frames of a DICOM file, or slices of a NIfTI volume, are images: the ``middle`` one, ``all``, or
            with a number n each n-th.
        axis: Which slices of a NIfTI volume are images.
        foreground_only: Whether to leave out slices of NIfTI volumes whose mask has no value above 0.
        dicom_group: Which DICOM files are a group that is never divided between training and test, if the source names
            no groups: those of a patient, a study, or an accession number. Null for none.
        **options: Options of :class:`ImageFiles`.

    Attributes:
        fixed_splits: Whether images of these identities are test images, regardless of ``test_share``. A run that
            resumes keeps its former split this way.
    """

    _client_column = "client"
    """Column of the clients, of which never all images are test images."""

    def __init__(  # noqa: PLR0913  # each argument is an option of recipes
        self,
        root: str,
        *,
        classes: list[str] | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        gray: bool = False,
        full_scale: float | None = None,
        shared_groups: bool | None = None,
        window: str | list[float] | dict[str, str | list[float]] = "file",
        frames: Frames = "middle",
        axis: Axis = "axial",
        foreground_only: bool = False,
        dicom_group: DicomGroup | None = "patient",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self._class_names = class_names(type(self).__name__, classes, None)
        check_number("test_share", test_share, gt=0, lt=1, hint="it is a share of the images")
        check_integer("seed", seed, 0, le=None)
        check_choice("gray", gray, [True, False])
        check_full_scale(full_scale)
        check_choice("shared_groups", shared_groups, [True, False, None])
        check_choice("foreground_only", foreground_only, [True, False])
        check_choice("dicom_group", dicom_group, [*get_args(DicomGroup), None])
        self.medical = MedicalReading.checked(window, frames, axis)
        self.window = window
        self.frames = frames
        self.axis = axis
        self.foreground_only = foreground_only
        self.dicom_group = dicom_group
        self.shared_groups = shared_groups
        self.fixed_splits: Mapping[str, bool] = {}
        self.test_share = test_share
        self.seed = seed
        self.gray = gray
        self.full_scale = full_scale
        self.mode = "L" if gray else "RGB"
        self.source_name = root
        """Name of the source in messages."""

    @property
    def names_clients(self) -> bool:
        """Whether the source names the client of each image, in the column ``client``."""
        return self._client_column in self.columns

    def _expand_frames(self, manifest: Manifest) -> Manifest:
        if self.foreground_only and manifest.masks is None:
            raise without_effect("foreground_only", True, "images without masks", "read masks, too")
        manifest = add_frames(manifest, self.medical, self.foreground_only)
        clients = manifest.columns.get(self._client_column)
        self._check_windows(None if clients is None else clients.tolist())
        return add_groups(
            manifest, self.dicom_group, None if clients is None else clients.tolist(), super()._hash_image
        )

    def _check_windows(self, clients: Sequence[str] | None) -> None:
        """Raise an OptionError if the option ``window`` lacks a client, or the source (None) names no clients."""
        if not self.medical.window_of_client:
            return
        if clients is None:
            raise without_effect(
                "window", self.window, f"{self.source_name}, which names no clients", "set one window for all images"
            )
        for client in dict.fromkeys(clients):
            self.medical.of_client(client)

    @cached_property
    def _client_of_path(self) -> dict[str, str]:
        return dict(zip(self.manifest.paths, self.manifest.columns[self._client_column].tolist(), strict=True))

    def reading_of(self, path: str) -> MedicalReading:
        """Return how a file is decoded if it is a medical image: with the window of its client, if clients have one."""
        if not self.medical.window_of_client:
            return self.medical
        return self.medical.of_client(self._client_of_path[path])

    def _assign_splits(self, manifest: Manifest) -> Manifest:
        if manifest.masks is not None:
            manifest = replace(manifest, classes=self._classes_of_masks(manifest))
        elif manifest.numbers is not None:
            self._check_no_class_names()
        elif self._class_names is not None:
            manifest = renumber_labels(manifest, self._class_names, self.source_name)
        else:
            self._check_label_names(manifest)
        # Names of classes and clients are compared when FederatedData is made.
        warn_of_look_alikes("groups", manifest.columns.get("group", ()))
        if manifest.split is None:
            if manifest.identities is None:
                manifest = replace(manifest, identities=self._compute_identities(manifest))
            split = self._draw_split(manifest)
        else:
            split = self._normalise_split(manifest, manifest.split.tolist())
        self._check_classes(manifest, split == "train")
        return replace(manifest, split=split)

    def _classes_of_masks(self, manifest: Manifest) -> tuple[str, ...] | None:
        """Return the classes of masks; raise an OptionError if the names of their segments contradict each other.

        With ``mask_values`` the numbers are declared, whatever their names.
        """
        assert manifest.masks is not None
        if self.mask_values is not None:
            return self._class_names
        unnamed = np.full(len(manifest.masks), self.source_name, dtype=object)
        owner_of_mask = dict(zip(manifest.masks, manifest.columns.get(self._client_column, unnamed), strict=True))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            names_of_masks = list(pool.map(segment_names, owner_of_mask))
        named = []
        owners = []
        for owner, names in zip(owner_of_mask.values(), names_of_masks, strict=True):
            if names is not None:
                named.append(names)
                owners.append(str(owner))
        return check_segment_names(self.source_name, named, owners, self._class_names)

    def read_mask(self, path: str, image_path: str) -> Tensor:
        """Read the mask (size, size) of an image, whose segments are numbered by their names if they have any."""
        class_of_number = class_numbers(segment_names(path), self.manifest.classes)
        return read_mask(path, image_path, self.size, self.mask_values, self.medical, class_of_number)

    def _check_label_names(self, manifest: Manifest) -> None:
        """Check classes that are not declared; see :func:`.check_label_names`."""
        if not self._has_words or manifest.labels is None or manifest.classes is None:
            return
        if manifest.labels.ndim == 1:
            rows = np.arange(len(manifest.labels))
            numbers = manifest.labels
        else:
            rows, numbers = np.nonzero(manifest.labels == 1)
        names = np.array(manifest.classes, dtype=object)[numbers].tolist()
        clients = manifest.columns.get(self._client_column)
        check_label_names(self.source_name, names, None if clients is None else clients[rows].tolist())

    @property
    def _has_words(self) -> bool:
        """Whether labels are words that were read, so that their names are all that is known of them."""
        return True

    def _check_no_class_names(self) -> None:
        """Raise an OptionError if classes are named, and the labels are numbers."""
        if self._class_names is not None:
            raise OptionError(
                f"the classes {quoted(self._class_names)} cannot be combined with numbers, which have the names of "
                "their columns; leave classes out",
                name="classes",
                value=self._class_names,
            )

    def _draw_split(self, manifest: Manifest) -> Array:
        """Choose the test images of a source without splits by their identities."""
        assert manifest.identities is not None
        split = np.full(len(manifest.paths), "train")
        no_clients = np.zeros(len(split), np.int64)
        if manifest.labels is None:
            # Masks and numbers: an image has no class.
            classes_of_images = [[0] for _ in manifest.paths]
        elif manifest.labels.ndim == 2:
            # Unknown labels are not 0.
            classes_of_images = [np.flatnonzero(labels == 1).tolist() for labels in manifest.labels]
        else:
            classes_of_images = [[label] for label in manifest.labels.tolist()]
        test_rows = hashed_share(
            keys=manifest.identities.tolist(),
            clients_of_rows=manifest.columns.get(self._client_column, no_clients).tolist(),
            classes_of_rows=classes_of_images,
            share=self.test_share,
            seed=self.seed,
            preset=self.fixed_splits,
            protect_classes=self._class_names is None,
        )
        split[test_rows] = "test"
        return split

    def _compute_identities(self, manifest: Manifest) -> Array:
        """Hash each image's group, or else its content."""
        if "group" in manifest.columns:
            groups = manifest.columns["group"].tolist()
            return np.array([hashlib.sha256(f"group {name}".encode()).hexdigest() for name in groups])
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            return np.array(list(pool.map(self.digest, manifest.paths)))

    @property
    def identities(self) -> Array:  # type: ignore[override]  # known from the files
        """A digest (N,) of each image's group, or else of its content."""
        if self.manifest.identities is None:
            return self._compute_identities(self.manifest)
        return self.manifest.identities

    def with_split(self, train: bool) -> Self:
        """Return the training or the test split of the same set, with the same fixed splits."""
        other = super().with_split(train)
        other.fixed_splits = self.fixed_splits
        return other

    @property
    def group_column(self) -> str | None:  # type: ignore[override]  # known from the source
        """The column of groups, if there is one."""
        return "group" if "group" in self.columns else None

    def _normalise_split(self, manifest: Manifest, split_names: list[str]) -> Array:
        """Translate the source's names of splits to ``train``, ``test`` or ``val`` (N,), and check the splits."""
        split = np.array([SPLITS.get(name.lower(), "") for name in split_names])
        if "" in split:
            row = int(np.argmax(split == ""))
            raise ValueError(
                f"{manifest.paths[row]}: split must be one of {', '.join(SPLITS)}, got {split_names[row]!r}"
            )
        sizes = Counter(split.tolist())
        missing = ""
        if not sizes["train"]:
            missing = "training"
        elif not sizes["test"] + sizes["val"]:
            missing = "test"
        if missing:
            raise ValueError(
                f"{self.source_name} has no {missing} images in its split: add some, or leave the split out to use "
                "test_share of the images as the test split"
            )
        if not sizes["test"]:
            split[split == "val"] = "test"
        elif sizes["val"]:
            warnings.warn(
                f"{sizes['val']} validation images of {self.source_name} are used neither for training nor for "
                "testing; label them train to use them",
                stacklevel=2,
            )
        self._check_groups(manifest, split)
        return split

    def _check_groups(self, manifest: Manifest, split: Array) -> None:
        """Raise a ValueError if a group has training and test images.

        Groups of different clients are different groups, unless ``shared_groups`` is true.
        """
        if "group" not in manifest.columns:
            return
        groups = manifest.columns["group"]
        if self._client_column in manifest.columns and not self.shared_groups:
            clients = manifest.columns[self._client_column].tolist()
            self._check_groups_of_clients(groups, clients, split)
            return
        divided = np.intersect1d(groups[split == "train"], groups[split == "test"]).tolist()
        if divided:
            raise self._divided_error([str(group) for group in divided])

    def _check_groups_of_clients(self, groups: Array, clients: Sequence[str], split: Array) -> None:
        """Raise a ValueError if a client has training and test images of a group, and warn if two clients have."""
        clients_of_group: dict[str, dict[str, set[str]]] = {}
        for group, client, part in zip(groups.tolist(), clients, split.tolist(), strict=True):
            if part in ("train", "test"):
                clients_of_part = clients_of_group.setdefault(str(group), {"train": set(), "test": set()})
                clients_of_part[part].add(str(client))
        divided = []
        divided_between_clients = []
        for group, clients_of_part in clients_of_group.items():
            common = sorted(clients_of_part["train"] & clients_of_part["test"])
            divided += [f"{group} of client {client}" for client in common]
            if clients_of_part["train"] and clients_of_part["test"]:
                divided_between_clients.append(group)
        if divided:
            raise self._divided_error(divided)
        if divided_between_clients and self.shared_groups is None:
            names = abbreviated(sorted(divided_between_clients))
            warnings.warn(
                f"{self.source_name} has training images at one client and test images at another of groups called "
                f"{names}, which count as different groups: set shared_groups to false if they are, or to true if a "
                "name stands for the same group, such as a patient, at all clients",
                stacklevel=2,
            )

    def _divided_error(self, divided: Sequence[str]) -> ValueError:
        """Return the error for groups that have training and test images."""
        noun = "group" if len(divided) == 1 else "groups"
        return ValueError(
            f"{self.source_name} has both training and test images of the {noun} {abbreviated(divided)}: put all "
            "images of a group into one split, or leave the split out"
        )

    def _check_classes(self, manifest: Manifest, is_train: Array) -> None:
        """Raise a ValueError if a class has no training images, unless the user has named the classes."""
        has_classes = manifest.masks is None and manifest.numbers is None
        if self._class_names is not None or not has_classes:
            return
        assert manifest.labels is not None and manifest.classes is not None
        labels = manifest.labels[is_train]
        if labels.ndim == 1:
            counts = np.bincount(labels, minlength=len(manifest.classes))
        else:
            counts = (labels == 1).sum(0)
        untrained = [name for name, count in zip(manifest.classes, counts, strict=True) if not count]
        if untrained:
            raise ValueError(
                f"{self.source_name} has no training images of {abbreviated(untrained)}, among {len(manifest.classes)} "
                "classes: add some, or remove its test images"
            )


class Listing(NamedTuple):
    """The rows of a list of images.

    Attributes:
        columns: Columns by name, each of words or of lists of words.
        row_names: Name of each row in messages.
    """

    columns: Mapping[str, Sequence[Any]]
    row_names: Sequence[Any]


class ListedImages(OwnImages):
    """Base class of users' own images in a list with further facts. A subclass reads the list.

    Args:
        root: Folder of the images.
        client: Column of the clients; null for ``client``, if there is such a column.
        group: Column of the groups that must not be divided between training and test, such as the patient; null for
            ``group``, if there is such a column.
        domain: Column of the domains; null for ``domain``, if there is such a column.
        **options: Options of :class:`.OwnImages`.
    """

    def __init__(
        self,
        root: str,
        *,
        client: str | None = None,
        group: str | None = None,
        domain: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.client = client
        self.group = group
        self.domain = domain

    @property
    @abstractmethod
    def listing(self) -> Listing:
        """The rows and columns of the list."""

    @property
    def names_clients(self) -> bool:
        """Whether a column of the list has the client of each image."""
        return self.client is not None or self._client_column in self.listing.columns

    def check_column(self, option: str, name: str) -> str:
        """Return the name of a column that an option selects.

        Raises:
            ValueError: If there is no such column.
        """
        columns = self.listing.columns
        if name in columns:
            return name
        if re.fullmatch(r"\[.*\]", name):
            names = [part.strip() for part in name[1:-1].split(",")]
            quoted = ", ".join(f'"{part}"' for part in names if part)
            raise ValueError(
                f"{option}: {self.source_name} has no column {name!r}. For a list of columns, quote each name that "
                f"YAML reads as a number or as true or false: '--{option}=[{quoted}]' on the command line, "
                f"{option}: [{quoted}] in a recipe"
            )
        hint = f"name one of {', '.join(map(repr, columns))}"
        similar = near_names(name, columns)
        if similar:
            hint = f"did you mean {similar[0]!r}?"
        raise ValueError(f"{option}: {self.source_name} has no column {name!r}; {hint}")

    def column(self, option: str, name: str, remedy: str = "fill it in, or take the row out") -> list[Any]:
        """Return the values of a column that an option selects.

        Raises:
            ValueError: If there is no such column, or it has empty cells.
        """
        # Columns of Hugging Face's datasets become lists by a slice.
        values = list(self.listing.columns[self.check_column(option, name)][:])
        empty = [row for row, value in enumerate(values) if value in ("", None)]
        self.reject_rows(empty, f"{name} is empty", remedy)
        return values

    def reject_rows(self, row_indices: Iterable[int], problem: str, remedy: str) -> None:
        """Raise a ValueError that names ``row_indices``, if there are any."""
        names = [str(self.listing.row_names[row]) for row in row_indices]
        if names:
            noun = "row" if len(names) == 1 else "rows"
            raise ValueError(f"{self.source_name}, {noun} {abbreviated(names)}: {problem}; {remedy}")

    def extra_columns(self) -> dict[str, Array]:
        """Return those of the columns ``client``, ``group`` and ``domain`` that exist or that options select."""
        arrays = {}
        for name in ("client", "group", "domain"):
            selected = getattr(self, name)
            if selected or name in self.listing.columns:
                values = self.column(name, selected or name)
                arrays[name] = np.array([str(value) for value in values])
        return arrays


@lru_cache(maxsize=2**20)
def _digest_of_file(path: str, size: int, modified_ns: int) -> str:
    """Hash the content of a file. Size and time of the last modification are part of the key of the cache."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
