# SPDX-License-Identifier: Apache-2.0
"""Images that cannot be read, which are found before the first round, and rejected or skipped."""

import hashlib
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm import tqdm

from perada.core.text import value_text
from perada.data.batches.datasets import (
    Resolve,
    ResolvedSubset,
    TensorFormat,
    check_same_format,
    image_and_label,
    isolated_randomness,
    location_of,
    read_item,
    resized_format,
    resolve_subset,
    stored_images,
    tensor_format,
)
from perada.data.batches.transforms import MissingImageError, UnreachableImageError, UnreadableImageError, to_image
from perada.data.batches.workers import WorkerProgress, explain_worker_deaths, worker_loader
from perada.data.federated import FederatedData
from perada.data.medical.reading import split_number
from perada.data.sets.manifest import ImageFiles
from perada.system.files import write_atomic

OnBroken = Literal["raise", "skip"]
SKIPPED = "skipped because on_broken is skip"
"""End of the warning of images that cannot be read."""
_FEW_NUMBERS = 2**16
"""Size of tensors that are checked together with others, because the call would take longer than the check."""
_TENSORS_OF_GROUP = 1024
"""Number of tensors that are checked together, so that their copy is at most 256 MB in single precision."""
T = TypeVar("T")


class BrokenImagesError(ValueError):
    """Raised for images that cannot be read, unless they are to be skipped."""


def without_broken(
    data: FederatedData,
    on_broken: OnBroken,
    workers: int,
    resolve: Resolve = resolve_subset,
    image_size: int | None = None,
) -> FederatedData:
    """Read every image of the clients and the server once, and reject or skip those that cannot be read.

    Files are read with a thread per processor. The result is cached until a file changes (its size or a time stamp), in
    ``perada`` in the user's cache folder. Items of other datasets are read by ``workers`` processes.

    Args:
        data: The data.
        on_broken: Whether to reject or to skip images that cannot be read.
        workers: Number of processes that read items.
        resolve: Finds the dataset behind a Subset.
        image_size: Height and width that uint8 images are resized to; None keeps them.

    Raises:
        BrokenImagesError: If images cannot be read and ``on_broken`` is "raise". The message lists all of them.
        ValueError: If images of a dataset cannot be batched together.
        TypeError: If something is not a map-style dataset.
    """
    check_datasets(data)
    parts = data.parts()
    # Clients often have Subsets of one dataset, whose items are read once. Each entry is a dataset and its rows in it.
    bases = [_resolve_named(name, dataset, resolve) for name, dataset in parts]
    problems_of_base = _find_problems([name for name, _ in parts], bases, workers, image_size)
    if not any(problems_of_base.values()):
        return data

    datasets: list[Dataset[Any]] = []
    messages = []
    for (name, dataset), (base, rows) in zip(parts, bases, strict=True):
        problems = problems_of_base[id(base)]
        if not problems:
            datasets.append(dataset)
            continue
        readable = []
        for index, row in enumerate(rows.tolist()):
            if row in problems:
                messages.append(f"{name}: {problems[row]}")
            else:
                readable.append(index)
        # The problems may be in rows that this dataset does not have.
        if len(readable) < len(rows):
            dataset = Subset(dataset, readable)
        datasets.append(dataset)
    if not messages:
        return data
    noun = "image" if len(messages) == 1 else "images"
    summary = f"{len(messages)} {noun} cannot be read ({'; '.join(messages)})"
    if on_broken == "raise":
        raise BrokenImagesError(f"{summary}: fix or remove them, or skip them with on_broken: skip (--data.on_broken)")
    warnings.warn(f"{summary}: {SKIPPED}", stacklevel=2)
    return data.with_datasets(datasets)


def _find_problems(
    names: Sequence[str], bases: Sequence[ResolvedSubset], workers: int, image_size: int | None
) -> dict[int, dict[int, str]]:
    """Return a description of each row that cannot be read, by row, for each dataset by its id.

    Args:
        names: Names of the clients' and the server's datasets.
        bases: The dataset behind each of them, and its rows.
        workers: Number of processes that read items.
        image_size: Height and width that uint8 images are resized to; None keeps them.
    """
    rows_of_base: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
    owners_of_base: dict[int, dict[str, np.ndarray[Any, Any]]] = defaultdict(dict)
    for name, (base, rows) in zip(names, bases, strict=True):
        rows_of_base[id(base)].append(rows)
        owners_of_base[id(base)][name] = rows
    problems_of_base = _finite_bases({id(base): base for base, _ in bases}.values())
    unread: dict[int, _Unread] = {}
    for base, _ in bases:
        if id(base) in problems_of_base or id(base) in unread:
            continue
        problems = _find_broken(base, rows_of_base[id(base)])
        if problems is None:
            unread[id(base)] = _Unread(base, _unique_rows(rows_of_base[id(base)]), owners_of_base[id(base)])
        else:
            problems_of_base[id(base)] = problems
    problems_of_unread = _find_broken_items(list(unread.values()), workers, image_size)
    problems_of_base.update(zip(unread, problems_of_unread, strict=True))
    return problems_of_base


def _resolve_named(name: str, dataset: Dataset[Any], resolve: Resolve) -> ResolvedSubset:
    """Resolve a dataset; an error begins with the dataset's name."""
    try:
        return resolve(dataset)
    except (IndexError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_datasets(data: FederatedData) -> None:
    """Check that all datasets are map-style datasets, before any is opened.

    Raises:
        TypeError: If a client's or the server's dataset is a DataLoader, a dict of datasets or a stream, or the
            clients' datasets are not in a list.
    """
    for name, datasets in (("train", data.train), ("test", data.test)):
        if isinstance(datasets, Sequence) and not isinstance(datasets, str):
            continue
        remedy = ""
        if isinstance(datasets, Mapping):
            remedy = f"; pass {name}=[*datasets.values()] and client_names=[*datasets]"
        elif name == "test" and datasets is None:
            remedy = "; pass test=[] for no evaluation"
        raise TypeError(
            f"FederatedData.{name} must be a list with one dataset per client, got {value_text(datasets)}{remedy}"
        )
    # Whether a dataset can be used depends only on its type, and many clients have datasets of few types.
    usable_types: set[type] = set()
    for name, dataset in data.parts():
        base: Any = dataset
        while type(base) is Subset:
            base = base.dataset
        if type(base) in usable_types:
            continue
        problem = ""
        if isinstance(base, DataLoader):
            problem = "which yields batches instead of items: pass its .dataset"
        elif isinstance(base, Mapping):
            problem = f"with the keys {', '.join(map(repr, base))}, not a dataset: pass one of its entries"
        elif isinstance(base, IterableDataset) or not {"__len__", "__getitem__"} <= {*dir(type(base))}:
            problem = (
                "whose items cannot be indexed: pass a dataset with len() and [index], such as a list of its items"
            )
        if problem:
            kind = "a dict" if isinstance(base, Mapping) else value_text(dataset)
            raise TypeError(f"{name} is {kind}, {problem}")
        usable_types.add(type(base))


def _finite_bases(bases: Iterable[Dataset[Any]]) -> dict[int, dict[int, str]]:
    """Return no problems, by id, for each dataset in memory whose images are all finite.

    Many small tensors are checked together, as every client may have its own. The others are left to
    :func:`_find_broken`.
    """
    finite: dict[int, dict[int, str]] = {}
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for base in bases:
        images = stored_images(base)
        if images is None:
            continue
        if not images.is_floating_point():
            finite[id(base)] = {}
        elif images.numel() <= _FEW_NUMBERS:
            groups[images.dtype, images.device].append((id(base), images.reshape(-1)))
    for group in groups.values():
        for start in range(0, len(group), _TENSORS_OF_GROUP):
            members = group[start : start + _TENSORS_OF_GROUP]
            if torch.cat([images for _, images in members]).isfinite().all():
                finite |= {base_id: {} for base_id, _ in members}
    return finite


def _find_broken(base: Dataset[Any], rows_of_datasets: list[np.ndarray[Any, Any]]) -> dict[int, str] | None:
    """Return a description of each row of a dataset that cannot be read, by row; None if its items must be read.

    Args:
        base: The dataset.
        rows_of_datasets: The rows that each client's or the server's dataset has of it.
    """
    if isinstance(base, ImageFiles) and not base.in_memory:
        return _find_broken_files(base, _unique_rows(rows_of_datasets))
    images = stored_images(base)
    if images is None:
        return None
    # All images are checked at once, before any work for each row.
    if not images.is_floating_point() or bool(images.isfinite().all()):
        return {}
    is_finite = images.flatten(1).isfinite().all(1).tolist()
    return {row: f"image {row} has NaN or infinity" for row in _unique_rows(rows_of_datasets) if not is_finite[row]}


@dataclass(frozen=True)
class _Unread:
    """A dataset whose items must be read.

    Attributes:
        base: The dataset.
        row_indices: Its rows that are used.
        rows_of_owner: The rows of each owner, by its name. Clients may share a dataset.
    """

    base: Dataset[Any]
    row_indices: list[int]
    rows_of_owner: dict[str, np.ndarray[Any, Any]]

    @cached_property
    def _first_owners(self) -> dict[int, str]:
        """The name of the first owner of each row."""
        owners: dict[int, str] = {}
        for name, rows in self.rows_of_owner.items():
            for row in rows.tolist():
                owners.setdefault(row, name)
        return owners

    def owner_of(self, row: int) -> str:
        """Return the name of the first owner of a row."""
        return self._first_owners[row]


def _find_broken_items(datasets: Sequence[_Unread], workers: int, image_size: int | None) -> list[dict[int, str]]:
    """Read rows of datasets, and return a description of each that cannot be read, by row, for each dataset.

    Args:
        datasets: The datasets. The same processes read all of them.
        workers: Number of processes that read items.
        image_size: Height and width that uint8 images are resized to; None keeps them.

    Raises:
        ValueError: If the images of a dataset's items have different shapes or types.
    """
    places = [(number, row) for number, dataset in enumerate(datasets) for row in dataset.row_indices]
    if not places:
        return [{} for _ in datasets]
    progress = None
    if workers:
        progress = WorkerProgress(workers, partial(_describe_sample, datasets))
    with isolated_randomness(), explain_worker_deaths():
        # Workers call the function that collates a batch, here a single row.
        read_row = partial(_read_row, datasets, progress)
        readings = [*_show_progress(worker_loader(places, workers, progress, collate_fn=read_row), len(places))]
    expected_formats: dict[int, TensorFormat] = {}
    problems: list[dict[int, str]] = [{} for _ in datasets]
    for (number, row), reading in zip(places, readings, strict=True):
        if reading.problem:
            problems[number][row] = reading.problem
        if reading.format is not None:
            image_format = resized_format(reading.format, image_size)
            expected = expected_formats.setdefault(number, image_format)
            dataset = datasets[number]
            if image_format != expected:
                sample = f"{dataset.owner_of(row)}, sample {row}{location_of(dataset.base, row)}"
                check_same_format(sample, image_format, expected)
    return problems


def _unique_rows(rows_of_datasets: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    """Return the rows that are in any of the arrays, ascending."""
    row_indices: list[int] = np.unique(np.concatenate(rows_of_datasets)).tolist()
    return row_indices


def _find_broken_files(image_set: ImageFiles, row_indices: list[int]) -> dict[int, str]:
    """Return a description of each file that cannot be read, by row. The result is cached until a file changes."""
    paths = {row: os.path.abspath(image_set.manifest.paths[row]) for row in row_indices}
    cache = _cache_file(image_set, paths.values())
    if cache is not None:
        with suppress(OSError, ValueError):  # the files have not been read in their present state
            cached_problems = json.loads(cache.read_text(encoding="utf-8"))
            return {row: str(cached_problems[path]) for row, path in paths.items() if path in cached_problems}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = _show_progress(pool.map(partial(_problem_of_file, image_set), row_indices), len(row_indices))
        errors = {row: error for row, error in zip(row_indices, results, strict=True) if error is not None}
    # A list of problems ends with one remedy for all.
    problems = {row: error.problem for row, error in errors.items()}
    # A missing file has no state to compare later, and one that the disk failed to deliver may be intact next time.
    is_certain = all(type(error) is UnreadableImageError for error in errors.values())
    if cache is not None and is_certain:
        with suppress(OSError):  # without a cache the next run reads the files again
            cache.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({paths[row]: problem for row, problem in problems.items()})
            write_atomic(cache, content.encode(), durable=False)
    return problems


def _cache_file(image_set: ImageFiles, paths: Iterable[str]) -> Path | None:
    """Return the cache file for these files in their present state; None if one of them has no state."""
    reading = (type(image_set).__name__, image_set.mode, image_set.full_scale, image_set.medical)
    digest = hashlib.sha256(repr(reading).encode())
    try:
        for path in paths:
            state = os.stat(split_number(path).file)
            # The time of the last status change reveals a file that was replaced with its former modification time.
            times = f"{state.st_mtime_ns}\0{state.st_ctime_ns}"
            digest.update(f"\0{path}\0{state.st_size}\0{times}".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "perada" / "read" / f"{digest.hexdigest()[:32]}.json"


def _problem_of_file(image_set: ImageFiles, row: int) -> UnreadableImageError | MissingImageError | None:
    """Read a file and return the error, if there is one."""
    try:
        image_set.read(image_set.manifest.paths[row])
    except (UnreadableImageError, MissingImageError) as error:
        return error
    except OSError as error:  # a source that reads its own files
        return UnreachableImageError(f"{image_set.manifest.paths[row]} could not be read ({error})")
    return None


def _show_progress(results: Iterable[T], total: int) -> Iterable[T]:
    """Show the progress of a pass over all images."""
    return tqdm(results, total=total, desc="Read all images once", leave=False, disable=None)


def _describe_sample(datasets: Sequence[_Unread], number: int, row: int) -> str:
    """Name a sample of one of the datasets."""
    dataset = datasets[number]
    return f"sample {row}{location_of(dataset.base, row)} of {dataset.owner_of(row)}"


class _Reading(NamedTuple):
    """What is known of an item after it was read once.

    Attributes:
        problem: Why it cannot be used; an empty string if it can.
        format: Shape and type of its image; None if it is not an image.
    """

    problem: str
    format: TensorFormat | None = None


def _read_row(datasets: Sequence[_Unread], progress: WorkerProgress | None, place: tuple[int, int]) -> _Reading:
    """Read an item, given the number of its dataset and its row, in a worker if there are workers."""
    number, row = place
    dataset = datasets[number]
    if progress is None:
        return _read_once(dataset.base, dataset.owner_of(row), row)
    progress.begin(number, row)
    reading = _read_once(dataset.base, dataset.owner_of(row), row)
    progress.end()
    return reading


def _read_once(dataset: Dataset[Any], name: str, row: int) -> _Reading:
    """Read an item, and find what is wrong with it."""
    try:
        item = read_item(dataset, row, name)
    except (UnreadableImageError, MissingImageError) as error:
        return _Reading(error.problem)
    # The checks of the data report items that are not images.
    with suppress(TypeError, IndexError):
        stored, _ = image_and_label(item, labelled=False)
        try:
            image = to_image(stored)  # reads the pixels of a PIL image that was only opened
        except UnreadableImageError as error:
            return _Reading(f"sample {row} cannot be read ({' '.join(error.problem.split())})")
        if image.is_floating_point() and not image.isfinite().all():
            return _Reading(f"sample {row} is an image with NaN or infinity")
        # Several images in one item are not an item, which the checks of the data report.
        if image.ndim <= 3:
            return _Reading("", tensor_format(image, 0))
    return _Reading("")
