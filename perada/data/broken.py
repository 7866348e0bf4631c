# SPDX-License-Identifier: Apache-2.0
"""Images that cannot be read: found before the first round, all of them, and refused or left out."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from tqdm import tqdm

from perada.core.files import write_atomic
from perada.data.batches.datasets import entries, isolated_randomness, length, read_item, resolved, tensor_source
from perada.data.batches.transforms import UNREADABLE, MissingImageError, UnreadableImageError, to_image
from perada.data.federated import FederatedData
from perada.data.sets.manifest import ImageFiles

OnBroken = Literal["refuse", "skip"]
_REMEDY = re.compile(r": (fix it|fetch it again|take it out)[^:]*$")


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
    """Items of a dataset that cannot be read, and why."""
    if isinstance(base, ImageFiles):
        return {} if base.in_memory else _of_files(base, rows)  # which were read to be there
    source = tensor_source(base, False)
    if source is not None:
        broken = [] if not source.images.is_floating_point() else (~source.images.flatten(1).isfinite().all(1)).tolist()
        return {row: f"image {row} has NaN or infinity" for row in rows if broken and broken[row]}
    with isolated_randomness():
        wrong, listed = partial(_wrong, base, who), cast(Dataset[int], rows)  # workers call it
        return _reasons(rows, DataLoader(listed, batch_size=None, num_workers=workers, collate_fn=wrong))


def _of_files(base: ImageFiles, rows: list[int]) -> dict[int, str]:
    """Files that cannot be read, as remembered or as found now."""
    paths = [base.manifest.paths[row] for row in rows]
    place = _memory(base, paths)
    if place is not None and place.is_file():
        with suppress(OSError, ValueError):
            known = json.loads(place.read_text(encoding="utf-8"))
            return {row: str(known[path]) for row, path in zip(rows, paths, strict=True) if path in known}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = _reasons(rows, pool.map(partial(_wrong, base, type(base).__name__), rows))
    if place is not None:
        with suppress(OSError):  # the next run reads them again
            place.parent.mkdir(parents=True, exist_ok=True)
            known = {path: found[row] for row, path in zip(rows, paths, strict=True) if row in found}
            write_atomic(place, json.dumps(known).encode(), durable=False)
    return found


def _memory(base: ImageFiles, paths: list[str]) -> Path | None:
    """Where to remember of files, as they are now and as they are read, which are broken; None if one is not there."""
    made = hashlib.sha256(repr((type(base).__name__, base.mode, base.full_scale)).encode())
    for path in paths:
        try:
            now = os.stat(path)
        except OSError:
            return None
        made.update(f"\0{os.path.abspath(path)}\0{now.st_size}\0{now.st_mtime_ns}".encode(errors="surrogateescape"))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "perada" / "read" / f"{made.hexdigest()[:32]}.json"


def _reasons(rows: list[int], found: Iterable[str]) -> dict[int, str]:
    """The reasons that are not empty, by row, without a remedy each."""
    shown = tqdm(found, total=len(rows), desc="Read all images once", leave=False, disable=None)
    return {row: _REMEDY.sub("", why) for row, why in zip(rows, shown, strict=True) if why}


def _wrong(dataset: Dataset[Any], who: str, row: int) -> str:
    """Why an item cannot be read, or nothing."""
    try:
        item = read_item(dataset, row, who)
    except (UnreadableImageError, MissingImageError) as error:
        return str(error).removeprefix(f"{who}, ")
    with suppress(TypeError, IndexError):  # of another kind than images, which is said later
        try:  # a picture may be read only now
            image = to_image(entries(item, labelled=False)[0])
        except UNREADABLE as error:
            return f"sample {row} cannot be read ({' '.join(str(error).split())})"
        if image.is_floating_point() and not image.isfinite().all():
            return f"sample {row} is an image with NaN or infinity"
    return ""
