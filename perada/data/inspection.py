# SPDX-License-Identifier: Apache-2.0
"""What perada understands of a source of images, and what is wrong with it, before anything is trained.

Images that cannot be read are found before the first round, all of them, and refused or left out.

Shape suffixes: M clients, K classes.
"""

import hashlib
import io
import json
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm import tqdm

from perada.core.files import write_atomic
from perada.core.text import abbreviated
from perada.data.batches.datasets import (
    declared_labels,
    entries,
    isolated_randomness,
    length,
    place,
    read_item,
    resolved,
    tensor_source,
)
from perada.data.batches.transforms import (
    WHOLE_SCALE,
    MissingImageError,
    UnreachableImageError,
    UnreadableImageError,
    load_pixels,
    to_image,
)
from perada.data.batches.workers import Reading, worker_deaths_named, worker_loader
from perada.data.federated import FederatedData
from perada.data.partitions.division import Division, positions
from perada.data.partitions.shares import Array
from perada.data.sets.base import ImageSet, split_of
from perada.data.sets.manifest import ImageFiles

OnBroken = Literal["refuse", "skip"]
_REMEDY = re.compile(r": (fix it|fetch it again|take it out|take the row out|check the disk)[^:]*$")
T = TypeVar("T")


@dataclass
class Inspection:
    """What was found; ``leaks`` and the like hold the names of two images that are the same to the last byte.

    Attributes:
        clients: Names of the clients, or their numbers.
        classes: Names of the classes, or their numbers.
        train: Training images (M, K) of each client and class; with several labels an image, those that have each.
        test: Test images (M, K), likewise.
        images: Training and test images (M, 2) of each client.
        sizes: Width and height (N, 2) of each image that can be read.
        modes: Numbers of images by Pillow's mode, such as ``RGB`` or ``I;16``, or by number of channels.
        broken: What is wrong with each file that cannot be read.
        leaks: Test images that are training images too.
        shared: Training images of one client that another one has too.
        repeated: Training images that a client has more than once.
        notes: What else was noticed.
        several_labels: Whether an image may have several labels.
    """

    clients: list[str]
    classes: list[str]
    train: Array
    test: Array
    images: Array
    sizes: Array
    modes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    leaks: list[tuple[str, str]] = field(default_factory=list)
    shared: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    several_labels: bool = False

    @property
    def usable(self) -> bool:
        """Whether nothing must be fixed first."""
        return not (self.broken or self.leaks)

    @property
    def of_one_client(self) -> list[tuple[str, str]]:
        """Classes whose training images one client alone has, and this client; none where there is one client."""
        if len(self.clients) < 2:
            return []
        alone = np.flatnonzero((self.train > 0).sum(0) == 1)
        return [(self.classes[k], self.clients[int(self.train[:, k].argmax())]) for k in alone]


class _Seen(NamedTuple):
    """One image: its name, a hash of it, its width and height and its mode, or why it cannot be read."""

    name: str
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    error: str = ""
    frames: int = 1  # pictures in the file
    brightest: int = 0  # of grey images of more than 8 bits that are whole numbers


def inspect_division(division: Division) -> Inspection:
    """Divide the images as a run would, and read every one of them.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If the set cannot be read or divided.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = division.share_out()
    # A partition may give no test images.
    test = data.test or [Subset(division.dataset.with_split(False), [])] * len(data.train)
    sets: list[ImageSet] = [resolved(own[0])[0] for own in (data.train, test)]
    width = data.num_classes or 1 + max(int(part.labels.max()) for part in sets if part.labels is not None)
    seen: list[list[_Seen]] = []
    for part in sets:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            looked = pool.map(partial(_look, part), range(len(part)))
            seen.append(list(tqdm(looked, total=len(part), desc="reading", leave=False, disable=None)))
    fine = [one for one in chain(*seen) if not one.error]
    found = Inspection(
        clients=list(data.client_names or map(str, range(len(data.train)))),
        classes=list(data.classes or map(str, range(width))),
        train=np.stack([_counts(own, width) for own in data.train]),
        test=np.stack([_counts(own, width) for own in test]),
        images=np.array([list(map(length, both)) for both in zip(data.train, test, strict=True)]),
        sizes=np.array([one.size for one in fine], dtype=np.int64).reshape(-1, 2),
        modes=Counter(one.mode for one in fine),
        broken=[one.error for one in chain(*seen) if one.error],
        notes=list(dict.fromkeys(" ".join(str(one.message).split()) for one in caught)),
        several_labels=any(part.labels is not None and part.labels.ndim == 2 for part in sets),
    )
    found.notes += _of_modes(fine, getattr(sets[0], "full_scale", None) or WHOLE_SCALE)
    _compare(found, seen[0], seen[1], {row: client for client, own in enumerate(data.train) for row in positions(own)})
    return found


def _counts(own: Dataset[Any], width: int) -> Array:
    labels = declared_labels(own)
    assert isinstance(labels, torch.Tensor)
    counts: Array = (labels.bincount(minlength=width) if labels.ndim == 1 else labels.long().sum(0)).numpy()
    return counts


def _compare(found: Inspection, train: list[_Seen], test: list[_Seen], owners: dict[int, int]) -> None:
    """Find images that are the same to the last byte; ``owners`` are the clients of the training images."""
    known: dict[bytes, list[tuple[str, int | None]]] = defaultdict(list)  # names and owners of equal training images
    for row, one in enumerate(train):
        alike = known[one.digest]
        if alike and not one.error:
            same = owners.get(row) in {owner for _, owner in alike}
            (found.repeated if same else found.shared).append((one.name, alike[0][0]))
        alike.append((one.name, owners.get(row)))
    found.leaks = [(one.name, known[one.digest][0][0]) for one in test if not one.error and one.digest in known]


def _of_modes(fine: list[_Seen], white: float) -> list[str]:
    notes = []
    deep, several = [one.brightest for one in fine if one.brightest], [one.name for one in fine if one.frames > 1]
    if deep and 2 * max(deep) < white:
        fits = 2 ** max(deep).bit_length() - 1
        notes.append(
            f"the brightest pixel of the grey images of more than 8 bits ({len(deep)}) is {max(deep)}, and {white:g} "
            f"is white, so that they are dark: set full_scale to what is white, such as {fits}"
        )
    if several:
        notes.append(f"of files with several pictures ({abbreviated(several)}) the first is read")
    return notes


def _look(part: ImageSet, row: int) -> _Seen:
    if not isinstance(part, ImageFiles):
        item = part[row]
        image = to_image(item[0] if isinstance(item, tuple) else item)
        if image.ndim != 3:
            raise ValueError(
                f"{type(part).__name__} has no images, and only images can be looked at; give a set of images"
            )
        channels, height, width = image.shape
        content, mode = image.contiguous().view(torch.uint8).numpy().tobytes(), f"{channels} channel"
        digest = hashlib.sha256(content).digest()
        return _Seen(f"{split_of(part)}, image {row}", digest, (width, height), mode + "s" * (channels > 1))
    name = part.manifest.paths[row]
    try:
        part.read(name)
        content = part.content(name)
    except (OSError, ValueError) as error:
        return _Seen(name, error=str(error))
    with Image.open(io.BytesIO(content)) as picture:
        load_pixels(picture)
        brightest = int(np.asarray(picture).max()) if picture.mode.startswith("I") else 0
        return _Seen(
            name, hashlib.sha256(content).digest(), picture.size, picture.mode, "", _frames_in(picture), brightest
        )


def _frames_in(picture: Image.Image) -> int:
    """The number of frames of an opened file; 1 where its table of frames is damaged, since only the first is read."""
    try:
        return int(getattr(picture, "n_frames", 1))
    except Exception:  # Pillow's plugins raise many types
        return 1


def without_broken(data: FederatedData, on_broken: OnBroken, workers: int) -> FederatedData:
    """Read every image of the clients and the server once, and refuse or leave out those that cannot be read.

    Files are read by all processors at once. What was found of them is remembered until one changes (its size or its
    time), in ``perada`` in the user's cache folder. Items of other datasets are read by ``workers`` processes.

    Raises:
        ValueError: If there are any, and they are refused; the message lists all.
        TypeError: If something is not a map-style dataset.
    """
    check_datasets(data)
    parts, of_base = data.parts(), dict[int, list[np.ndarray[Any, Any]]]()
    found = [resolved(dataset) for _, dataset in parts]
    for base, rows in found:
        of_base.setdefault(id(base), []).append(rows)
    lost = dict[int, dict[int, str]]()  # of each dataset, which others may be Subsets of, the items and why
    for (who, _), (base, _) in zip(parts, found, strict=True):
        if id(base) not in lost:
            wanted = np.unique(np.concatenate(of_base[id(base)])).tolist()
            lost[id(base)] = _broken(base, wanted, who, workers)
    sets, said = list[Dataset[Any]](), []
    for (who, dataset), (base, rows) in zip(parts, found, strict=True):
        broken = lost[id(base)]
        gone = [place for place, row in enumerate(rows.tolist()) if row in broken] if broken else []
        kept = np.setdiff1d(np.arange(length(dataset)), gone).tolist()
        sets.append(Subset(dataset, kept) if gone else dataset)
        said += [f"{who}: {broken[rows[place]]}" for place in gone]
    if not said:
        return data
    what = f"{len(said)} image{'s' * (len(said) > 1)} cannot be read ({'; '.join(said)})"
    if on_broken == "refuse":
        raise ValueError(f"{what}: fix them or take them out, or leave them out by on_broken: skip (--data.on_broken)")
    warnings.warn(f"{what}: left out, as on_broken is skip", stacklevel=2)
    return data.with_datasets(sets)


def check_datasets(data: FederatedData) -> None:
    """Refuse what is not a map-style dataset, before any is opened.

    Raises:
        TypeError: If a client's or the server's dataset is a DataLoader, a dict of datasets or a stream, or the
            clients' datasets are not in a list.
    """
    for name, sets in (("train", data.train), ("test", data.test)):
        if not isinstance(sets, Sequence):
            raise TypeError(
                f"FederatedData.{name} is a {type(sets).__name__}, and no list: give a list with one dataset per client"
            )
    for who, dataset in data.parts():
        base: Any = dataset
        while type(base) is Subset:
            base = base.dataset
        wrong = ""
        if isinstance(base, DataLoader):
            wrong = "which has batches and no items: give its .dataset"
        elif isinstance(base, Mapping):
            wrong = f"with the keys {', '.join(map(repr, base))}, and no dataset: give one of its entries"
        elif isinstance(base, IterableDataset) or not {"__len__", "__getitem__"} <= {*dir(type(base))}:
            wrong = "whose items have no numbers: give a dataset with len() and [index], such as a list of its items"
        if wrong:
            raise TypeError(f"{who} is a {type(dataset).__name__}, {wrong}")


def _broken(base: Dataset[Any], rows: list[int], who: str, workers: int) -> dict[int, str]:
    if isinstance(base, ImageFiles) and not base.in_memory:
        return _broken_files(base, rows)
    source = tensor_source(base, False)
    if source is not None:
        broken = [] if not source.images.is_floating_point() else (~source.images.flatten(1).isfinite().all(1)).tolist()
        return {row: f"image {row} has NaN or infinity" for row in rows if broken and broken[row]}
    reading = Reading(workers, partial(_named, base, who)) if workers else None
    with isolated_randomness(), worker_deaths_named():
        wrong = partial(_noted, base, who, reading)  # workers call it
        return _reasons(rows, worker_loader(rows, workers, reading, collate_fn=wrong))


def _broken_files(base: ImageFiles, rows: list[int]) -> dict[int, str]:
    """Why files cannot be read, by row; the result is remembered until one of the files changes.

    Nothing is remembered if the disk failed, since the next run may find the same files whole.
    """
    paths = {row: os.path.abspath(base.manifest.paths[row]) for row in rows}
    cache = _cache_of(base, paths.values())
    if cache is not None:
        with suppress(OSError, ValueError):  # nothing is remembered of these files as they are now
            remembered = json.loads(cache.read_text(encoding="utf-8"))
            return {row: str(remembered[path]) for row, path in paths.items() if path in remembered}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = _progress(pool.map(partial(_problem_of_file, base), rows), len(rows))
        broken = {row: problem for row, problem in zip(rows, problems, strict=True) if problem is not None}
    reasons = {row: _without_remedy(str(problem)) for row, problem in broken.items()}
    # A missing file has no state by which it could be remembered, and one that the disk did not give may be whole.
    certain = all(type(problem) is UnreadableImageError for problem in broken.values())
    if cache is not None and certain:
        with suppress(OSError):  # the next run reads them again
            cache.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({paths[row]: reason for row, reason in reasons.items()})
            write_atomic(cache, content.encode(), durable=False)
    return reasons


def _cache_of(base: ImageFiles, paths: Iterable[str]) -> Path | None:
    """The file that remembers which of these files are broken, by all their states; None if one has no state."""
    digest = hashlib.sha256(repr((type(base).__name__, base.mode, base.full_scale)).encode())
    try:
        for path in paths:
            state = os.stat(path)
            # The time of the last change of status also tells a file that was put back with its former time.
            times = f"{state.st_mtime_ns}\0{state.st_ctime_ns}"
            digest.update(f"\0{path}\0{state.st_size}\0{times}".encode(errors="surrogateescape"))
    except (OSError, ValueError):
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "perada" / "read" / f"{digest.hexdigest()[:32]}.json"


def _problem_of_file(base: ImageFiles, row: int) -> Exception | None:
    """What stands in the way of reading a file, if anything does."""
    try:
        base.read(base.manifest.paths[row])
    except (UnreadableImageError, MissingImageError) as error:
        return error
    except OSError as error:  # a source that reads its own files
        return UnreachableImageError(f"{base.manifest.paths[row]} could not be read ({error})")
    return None


def _reasons(rows: list[int], problems: Iterable[str]) -> dict[int, str]:
    """The problems that are not empty, by row."""
    shown = _progress(problems, len(rows))
    return {row: _without_remedy(problem) for row, problem in zip(rows, shown, strict=True) if problem}


def _progress(results: Iterable[T], total: int) -> Iterable[T]:
    """Show the progress of a pass over all images."""
    return tqdm(results, total=total, desc="Read all images once", leave=False, disable=None)


def _without_remedy(problem: str) -> str:
    """A message without its last part, since a list of many ends in one remedy for all."""
    return _REMEDY.sub("", problem)


def _named(dataset: Dataset[Any], who: str, owner: int, row: int) -> str:
    """Name a sample of a dataset; where several clients have Subsets of it, ``who`` is the first of them."""
    return f"sample {row}{place(dataset, row)} of {who}"


def _noted(dataset: Dataset[Any], who: str, reading: Reading | None, row: int) -> str:
    """As :func:`_wrong`, in a worker that notes what it reads."""
    if reading is None:
        return _wrong(dataset, who, row)
    reading.begin(0, row)
    reason = _wrong(dataset, who, row)
    reading.end()
    return reason


def _wrong(dataset: Dataset[Any], who: str, row: int) -> str:
    """Why an item cannot be read, or nothing."""
    try:
        item = read_item(dataset, row, who)
    except (UnreadableImageError, MissingImageError) as error:
        return str(error).removeprefix(f"{who}, ")
    with suppress(TypeError, IndexError):  # of another kind than images, which is said later
        try:  # a picture may be read only now
            image = to_image(entries(item, labelled=False)[0])
        except ValueError as error:
            return f"sample {row} cannot be read ({_without_remedy(' '.join(str(error).split()))})"
        if image.is_floating_point() and not image.isfinite().all():
            return f"sample {row} is an image with NaN or infinity"
    return ""
