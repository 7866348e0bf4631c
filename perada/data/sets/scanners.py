# SPDX-License-Identifier: Apache-2.0
"""Images seen through generated scanners, so that clients differ in how their images look (feature shift).

All arithmetic is on integers, so that the images are the same on every machine.
Shape suffixes: N images, Ch channels, S height and width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perada.core.checks import check_choice, check_integer, check_number, invalid_option
from perada.core.seeding import derive_seed
from perada.core.text import dtype_name
from perada.data.partitions import Dirichlet, Split
from perada.data.partitions.shares import Array, stratified_sample
from perada.data.sets.base import ImageSet, checked_columns, split_of
from perada.data.sets.derived import DerivedSet

COLUMN = "scanner"
"""The column that names each image's scanner."""
WHITE = 255
_BILINEAR = Image.Resampling.BILINEAR
_AT_ONCE = 1000  # images


def _resample_images(images: Array, matrix: tuple[int, int, int, int], denominator: int) -> Array:
    """Resample images (N, Ch, S, S) along an affine map around their centre, bilinear; what lies outside is black.

    The value at (row, column) is that of the images at ``matrix / denominator`` times it, both counted from the centre.
    """
    size = images.shape[-1]
    # Twice the distance from the centre is a whole number, also where the size is even.
    from_centre = 2 * np.arange(size) - (size - 1)
    rows = from_centre[:, None]
    columns = from_centre[None, :]
    # Positions in the images, counted from their upper left corner, in so many parts of a pixel.
    unit = 2 * denominator
    row_position = matrix[0] * rows + matrix[1] * columns + denominator * (size - 1)
    column_position = matrix[2] * rows + matrix[3] * columns + denominator * (size - 1)
    # Each lies between two rows and two columns; the nearer one weighs more.
    upper = row_position // unit
    left = column_position // unit
    weight_of_lower = row_position % unit
    weight_of_right = column_position % unit
    weighted_rows = [(upper, unit - weight_of_lower), (upper + 1, weight_of_lower)]
    weighted_columns = [(left, unit - weight_of_right), (left + 1, weight_of_right)]

    # A black frame of two pixels stands for all that lies outside.
    frame = 2
    framed = np.pad(images, ((0, 0), (0, 0), (frame, frame), (frame, frame)))
    last = size + 2 * frame - 1
    total = np.zeros_like(images)
    for row, row_weight in weighted_rows:
        for column, column_weight in weighted_columns:
            framed_row = np.clip(row + frame, 0, last)
            framed_column = np.clip(column + frame, 0, last)
            total += framed[:, :, framed_row, framed_column] * (row_weight * column_weight)
    sum_of_weights = unit * unit
    # Half of the divisor is added before, so that the quotient is rounded and not cut off.
    rounded: Array = (total + sum_of_weights // 2) // sum_of_weights
    return rounded


def _leave_unchanged(images: Array, seeds: Sequence[int]) -> Array:
    return images


def _invert_images(images: Array, seeds: Sequence[int]) -> Array:
    return WHITE - images


def _turn_left(images: Array, seeds: Sequence[int]) -> Array:
    """Turn by 90 degrees, counter-clockwise."""
    return np.rot90(images, axes=(2, 3))


def _add_noise(images: Array, seeds: Sequence[int]) -> Array:
    """Add noise with a standard deviation of 59 grey levels: the sum of four uniform numbers, nearly normal."""
    noise = np.empty_like(images)
    for index, seed in enumerate(seeds):
        rng = np.random.default_rng(seed)
        draws = rng.integers(0, WHITE + 1, (4, *images.shape[1:]))
        # The mean of four draws from 0 to 255 is twice 255.
        noise[index] = draws.sum(0) - 2 * WHITE
    noisy: Array = np.clip(images + noise * 2 // 5, 0, WHITE)
    return noisy


def _thicken_strokes(images: Array, seeds: Sequence[int]) -> Array:
    """Give each pixel the largest value within a sixteenth of the image's side."""
    radius = max(1, images.shape[-1] // 16)
    for axis in (2, 3):
        padding = [(0, 0)] * 4
        padding[axis] = (radius, radius)
        padded = np.pad(images, padding)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis)
        images = np.asarray(windows.max(-1))
    return images


def _reduce_contrast(images: Array, seeds: Sequence[int]) -> Array:
    """Leave a fifth of the contrast, around a dark grey."""
    return images // 5 + 2 * WHITE // 5


def _mirror_images(images: Array, seeds: Sequence[int]) -> Array:
    return images[:, :, :, ::-1]


def _blur_images(images: Array, seeds: Sequence[int]) -> Array:
    """Average with triangular weights that reach an eighth of the image's side."""
    reach = max(2, images.shape[-1] // 8)
    weights = reach - np.abs(np.arange(1 - reach, reach))
    for axis in (2, 3):
        padding = [(0, 0)] * 4
        padding[axis] = (reach - 1, reach - 1)
        padded = np.pad(images, padding, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(weights), axis)
        images = windows @ weights
    sum_of_weights = reach**4
    averaged: Array = (images + sum_of_weights // 2) // sum_of_weights
    return averaged


def _flip_and_invert(images: Array, seeds: Sequence[int]) -> Array:
    return WHITE - images[:, :, ::-1, ::-1]


def _shear_rows(images: Array, seeds: Sequence[int]) -> Array:
    """Move each row sideways by half of its distance from the middle row."""
    return _resample_images(images, (2, 0, 1, 2), 2)


def _shrink_images(images: Array, seeds: Sequence[int]) -> Array:
    """Halve both sides, in the middle of a black image."""
    return _resample_images(images, (2, 0, 0, 2), 1)


def _light_one_side(images: Array, seeds: Sequence[int]) -> Array:
    """Halve the contrast and add light that grows from the left edge to the right one."""
    size = images.shape[-1]
    light: Array = np.arange(size) * WHITE // max(1, size - 1)
    lit: Array = (images + light) // 2
    return lit


Device = Callable[[Array, Sequence[int]], Array]
"""What a scanner makes of int64 images (N, Ch, S, S) from 0 to 255, with a seed for each."""
DEVICES: dict[str, Device] = {
    "plain": _leave_unchanged,
    "negative": _invert_images,
    "turned": _turn_left,
    "noisy": _add_noise,
    "thick": _thicken_strokes,
    "faint": _reduce_contrast,
    "mirrored": _mirror_images,
    "blurred": _blur_images,
    "upside_down_negative": _flip_and_invert,
    "sheared": _shear_rows,
    "small": _shrink_images,
    "lit": _light_one_side,
}
"""The scanners by name, in the order in which ``kinds`` takes them."""
MOVING = ("turned", "mirrored", "upside_down_negative", "sheared", "small")
"""The scanners that move the content of images."""


def scan(images: Tensor, scanner: str, seeds: Sequence[int]) -> Tensor:
    """Transform images as a scanner does.

    Args:
        images: uint8 (N, Ch, S, S).
        scanner: Name of a scanner, or several joined by ``+``, which work one after another.
        seeds: One for each image, from which a noisy scanner draws.

    Returns:
        uint8 (N, Ch, S, S).

    >>> scan(torch.tensor([[[[0, 10], [20, 30]]]], dtype=torch.uint8), "negative+mirrored", [0]).tolist()
    [[[[245, 255], [225, 235]]]]
    """
    pixels = images.numpy().astype(np.int64)
    for name in scanner.split("+"):
        pixels = DEVICES[name](pixels, seeds)
    return torch.from_numpy(np.ascontiguousarray(pixels).astype(np.uint8))


@dataclass(frozen=True)
class _Scans:
    """Locations of a split's images: the set (N,) among ``sources``, the row (N,) in it, and the scanner (N,)."""

    sources: tuple[ImageSet, ...]
    source_index: Array
    row_index: Array
    scanner_index: Array


class Scanners(DerivedSet):
    """A set of images, each seen through one of several simulated scanners, as in hospitals with different devices.

    Each image belongs to one scanner, which the column ``scanner`` names. ``ByDomain(column="scanner")`` makes a client
    of each, and ``ByDomain(column="scanner", within=...)`` several. A set without labels, such as
    :class:`Photographs`, becomes a public set whose images come from all scanners.

    Args:
        dataset: The images, uint8 and square, or of any shape with ``size``.
        kinds: How many, in this order, of ``plain``, ``negative``, ``turned``, ``noisy``, ``thick``, ``faint``,
            ``mirrored``, ``blurred``, ``upside_down_negative``, ``sheared``, ``small`` and ``lit``; or a list of their
            names. A name may be several joined by ``+``, as in ``negative+turned``.
        alpha: Divide each class among the scanners in proportions drawn from a Dirichlet distribution, as
            :class:`Dirichlet` does; null for equal shares at random.
        min_per_scanner: Minimum number of images of each scanner, with ``alpha``.
        test_share: Redraw both splits of ``dataset``: this share of each scanner's images is the test split. Null
            keeps the splits.
        size: Height and width in pixels to which images are resized before they are scanned; null keeps them.
        seed: A different seed gives a different assignment, different test images and different noise. Null for the
            seed of the data module, or 0 without one.
        train: Whether to load the training split or the test split.

    Raises:
        ValueError: If an option is out of range, or ``alpha`` is given and the set has no labels.

    >>> Scanners(Digits(), kinds=12, alpha=0.5)  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: ImageSet,
        kinds: int | list[str] = 12,
        alpha: float | None = None,
        min_per_scanner: int = 2,
        test_share: float | None = None,
        size: int | None = 32,
        seed: int | None = None,
        train: bool = True,
    ) -> None:
        super().__init__(dataset, train)
        self.names = _select_scanners(kinds)
        check_number("alpha", alpha, gt=0, optional=True, hint="0.1 is very unequal, 100 even")
        check_integer("min_per_scanner", min_per_scanner)
        check_number("test_share", test_share, gt=0, lt=1, optional=True, hint="it is a share of all images")
        check_integer("size", size, optional=True)
        check_integer("seed", seed, 0, le=None, optional=True)
        self.kinds = kinds
        self.alpha = alpha
        self.min_per_scanner = min_per_scanner
        self.test_share = test_share
        self.size = size
        self.seed = seed

    @property
    def identities(self) -> Array | None:  # type: ignore[override]  # those of the set
        """Identity (N,) of each image, or None if the set has none."""
        identities = []
        for source in self._assigned_scans.sources:
            if source.identities is None:
                return None
            identities.append(source.identities)
        return self._gather_entries(identities)

    @property
    def movements(self) -> Sequence[str]:  # type: ignore[override]  # they follow from the scanners
        """Names of the scanners that move the content of images, but not their labels."""
        names = [name for kind in self.names for name in kind.split("+")]
        moving = dict.fromkeys(name for name in names if name in MOVING)
        return [*self.dataset.movements, *moving]

    @property
    def _seed_of_draws(self) -> int:
        return 0 if self.seed is None else self.seed

    @cached_property
    def _assigned_scans(self) -> _Scans:
        """Assign each image of this split to a scanner."""
        if self.test_share is not None:
            return self._divided_anew(self.test_share)
        source = self.dataset.with_split(self.train)
        if self.alpha is None:
            scanner = self._draw_evenly(len(source), int(self.train))
        else:
            # Both splits have the same proportions, and are assigned together.
            train = self.dataset.with_split(True)
            test = self.dataset.with_split(False)
            scanners = self._draw_by_class([train, test])
            scanner = scanners[0] if self.train else scanners[1]
        return _Scans(
            sources=(source,),
            source_index=np.zeros(len(source), dtype=np.int64),
            row_index=np.arange(len(source)),
            scanner_index=scanner,
        )

    def _divided_anew(self, test_share: float) -> _Scans:
        """Assign the images of both splits together, and draw the test images of each scanner."""
        train = self.dataset.with_split(True)
        test = self.dataset.with_split(False)
        if train.group_column is not None:
            raise ValueError(
                f"Scanners: test_share={test_share} would divide the images of one {train.group_column} between "
                f"training and test; leave it out to keep the splits of {type(self.dataset).__name__}"
            )
        # The set's images are joined, those of its training split first.
        source = np.repeat([0, 1], [len(train), len(test)])
        row = np.concatenate([np.arange(len(train)), np.arange(len(test))])
        if self.alpha is None:
            scanner = self._draw_evenly(len(row), 0)
        else:
            scanner = np.concatenate(self._draw_by_class([train, test]))

        rng = np.random.default_rng(derive_seed(self._seed_of_draws, "scanners/test"))
        is_test = np.zeros(len(scanner), dtype=bool)
        is_test[stratified_sample(scanner, test_share, rng)] = True
        in_split = np.flatnonzero(is_test != self.train)
        return _Scans(
            sources=(train, test),
            source_index=source[in_split],
            row_index=row[in_split],
            scanner_index=scanner[in_split],
        )

    def _draw_evenly(self, count: int, part: int) -> Array:
        """Draw the scanners (N,) of so many images; the scanners' numbers of images differ by at most one."""
        rng = np.random.default_rng(derive_seed(self._seed_of_draws, "scanners", part))
        scanner: Array = rng.permutation(count) % len(self.names)
        return scanner

    def _draw_by_class(self, image_sets: Sequence[ImageSet]) -> list[Array]:
        """Draw the scanners (N,) of the images of each split, in proportions that differ by class."""
        assert self.alpha is not None
        splits = []
        for part in image_sets:
            if part.labels is None:
                raise ValueError(
                    f"Scanners: alpha={self.alpha} divides by classes, but {split_of(part)} has no labels; leave alpha "
                    "out"
                )
            splits.append(Split(part.labels.numpy(), np.arange(len(part)), name=type(part).__name__))
        division = Dirichlet(len(self.names), self.alpha, min_per_client=self.min_per_scanner)
        assigned = division.split(splits[0], splits[1], derive_seed(self._seed_of_draws, "scanners"))
        scanners = []
        for split, rows_of_scanners in zip(splits, assigned, strict=True):
            scanner = np.empty(len(split), dtype=np.int64)
            for number, rows in enumerate(rows_of_scanners):
                scanner[rows] = number
            scanners.append(scanner)
        return scanners

    @property
    def columns(self) -> Mapping[str, Array]:
        """The set's own columns and ``scanner``."""
        scans = self._assigned_scans
        all_columns: dict[str, Array] = {COLUMN: np.array(self.names)[scans.scanner_index]}
        columns_of_sources = []
        for source in scans.sources:
            columns_of_sources.append(checked_columns(split_of(source), source.columns, len(source)))
        for name in columns_of_sources[0]:
            in_all_sources = all(name in source_columns for source_columns in columns_of_sources)
            if in_all_sources and name != COLUMN:
                all_columns[name] = self._gather_entries(
                    [source_columns[name] for source_columns in columns_of_sources]
                )
        return all_columns

    def _gather_entries(self, arrays_of_sources: Sequence[Array]) -> Array:
        """Return an entry (N, ...) for each image of this split, from one array for each source."""
        scans = self._assigned_scans
        sizes = [len(source) for source in scans.sources]
        # The arrays stand behind one another, and each source begins at one of these places.
        starts = np.cumsum(sizes) - sizes
        gathered: Array = np.concatenate(arrays_of_sources)[starts[scans.source_index] + scans.row_index]
        return gathered

    @property
    def paths(self) -> list[str | None]:
        """Paths of the images for messages; None if the set does not name them."""
        paths_of_sources = [getattr(source, "paths", None) for source in self._assigned_scans.sources]
        paths = []
        for source, row in zip(
            self._assigned_scans.source_index.tolist(), self._assigned_scans.row_index.tolist(), strict=True
        ):
            paths_of_source = paths_of_sources[source]
            if isinstance(paths_of_source, list):
                paths.append(paths_of_source[row])
            else:
                paths.append(None)
        return paths

    def __len__(self) -> int:
        return len(self._assigned_scans.row_index)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        if self.images is not None:
            return super().__getitem__(index)
        scans = self._assigned_scans
        # A range turns a negative index into the place that it stands for, and raises beyond the end.
        place = range(len(self))[index]
        source = scans.sources[scans.source_index[place]]
        item = source[int(scans.row_index[place])]
        image = item[0] if isinstance(item, tuple) else item
        resized = self._resize_images(image.unsqueeze(0))
        scanned = self._scan_images(resized, np.array([place]))[0]
        if self.labels is None:
            return scanned
        return scanned, self.labels[place]

    def _load_images(self) -> tuple[Tensor | None, Tensor | None]:
        scans = self._assigned_scans
        of_sources = [source.labels.numpy() for source in scans.sources if source.labels is not None]
        labels = torch.from_numpy(self._gather_entries(of_sources)) if len(of_sources) == len(scans.sources) else None
        in_memory = [source.images for source in scans.sources if source.images is not None]
        if len(in_memory) < len(scans.sources):
            return None, labels  # they stay on disk, and are scanned as they are read
        resized = torch.from_numpy(self._gather_entries([self._resize_images(images).numpy() for images in in_memory]))
        return self._scan_images(resized, np.arange(len(self))), labels

    def _resize_images(self, images: Tensor) -> Tensor:
        """Make images (N, Ch, H, W) square, of ``size`` if it is given."""
        if images.dtype != torch.uint8:
            raise TypeError(
                f"Scanners: {type(self.dataset).__name__} has samples of type {dtype_name(images.dtype)}, but scanners "
                "take uint8 images: pass them before normalisation"
            )
        if images.ndim == 3:
            images = images.unsqueeze(1)
        height, width = images.shape[2:]
        if self.size is None and height != width:
            raise ValueError(f"Scanners: images are {height}×{width} pixels, but scanners need square images: set size")
        size = self.size or height
        if height == width == size:
            return images
        # Pillow resizes by whole numbers, torch by floating point whose rounding depends on the processor.
        flat = images.reshape(-1, height, width).numpy()
        resized = [np.asarray(Image.fromarray(channel).resize((size, size), _BILINEAR)) for channel in flat]
        return torch.from_numpy(np.stack(resized)).view(*images.shape[:2], size, size)

    def _scan_images(self, images: Tensor, image_indices: Array) -> Tensor:
        """Scan the images (N, Ch, S, S) at ``image_indices`` (N,) of this split."""
        scans = self._assigned_scans
        scanned = torch.empty_like(images)
        for number, name in enumerate(self.names):
            scanner_rows = np.flatnonzero(scans.scanner_index[image_indices] == number)
            num_parts = max(1, len(scanner_rows) // _AT_ONCE)
            # Images are scanned in parts: the arithmetic takes 64 bits a pixel, and some scanners several times that.
            for part in np.array_split(scanner_rows, num_parts):
                sources = scans.source_index[image_indices[part]].tolist()
                rows = scans.row_index[image_indices[part]].tolist()
                seeds = []
                for source, row in zip(sources, rows, strict=True):
                    seeds.append(derive_seed(self._seed_of_draws, "scanner", self._split_of(source), row))
                scanned[part] = scan(images[part], name, seeds)
        return scanned

    def _split_of(self, source_index: int) -> int:
        """Return which split of the set one of the sources is: 1 for training, else 0."""
        return int(self._assigned_scans.sources[source_index].train)


def _select_scanners(kinds: int | list[str]) -> list[str]:
    """Return the scanners that ``kinds`` selects."""
    if not isinstance(kinds, list):
        check_integer("kinds", kinds, le=len(DEVICES), hint="a list of names is accepted too")
        return [*DEVICES][:kinds]
    for kind in kinds:
        for name in str(kind).split("+"):
            check_choice("kinds", name, [*DEVICES], hint="several work one after another if joined by '+'")
    if not kinds or len(set(kinds)) < len(kinds):
        raise invalid_option("kinds", kinds, "a list of at least one name without repetitions")
    return [*kinds]
