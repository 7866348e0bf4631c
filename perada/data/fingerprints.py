# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a run's training data, so that it is not resumed with different clients or images.

A fingerprint holds hashes and names only, in plain types, and is part of a checkpoint. What is hashed:

- Labels: all of them where they are known without reading an image, else those of the images that are hashed.
- Images in memory: all of them up to :data:`BYTES_LIMIT` in a part of the data, beyond that evenly spaced ones.
- Image files: their content as stored, of up to :data:`FILES_LIMIT` files in a part, so that another version of a
  decoder changes nothing.
- Items of other datasets: of up to :data:`ITEMS_LIMIT` evenly spaced ones in a part, as the dataset returns them.

Of files and items at least two are read for each client, of at most :data:`CLIENTS_LIMIT` evenly spaced clients.

A dataset may return another image each time it is asked, from a generator of its own. Some items of each part are
therefore read twice. If any of them differs, no images of that part are hashed, and only names, numbers of images and
labels are compared.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.core.states import bytes_of
from perada.core.text import abbreviated
from perada.data.batches.datasets import as_labels, isolated_randomness, resolve_subset, seed_all
from perada.data.batches.samples import MapStore, Store, TensorStore
from perada.data.checked import CheckedData
from perada.data.sets.manifest import ImageFiles
from perada.data.value_hashes import add_to_hash, hash_of, hash_of_content, new_hash

BYTES_LIMIT = 2**30
"""Bytes of images in memory that are hashed in each part of the data, at most."""
FILES_LIMIT = 20_000
ITEMS_LIMIT = 1_000
CLIENTS_LIMIT = 1_000
REPEATED_ITEMS = 16
"""Items of each client that are read twice, at most."""
NOT_READ = ""
"""Stands for the hash of a client whose images were not read."""
SAMPLED = "sample "
"""Prefix of the hash of a client's labels if only those of the images that are hashed are known."""
_CHUNK = 4096  # images of a tensor that are gathered at a time

Fingerprint = dict[str, Any]
PartFingerprint = dict[str, list[str] | None]
"""Hashes of each client's ``labels`` and ``images``; None for what cannot be compared."""


def fingerprint_of(checked: CheckedData, client_names: Sequence[str] | None, evaluated: str) -> Fingerprint:
    """Compute the fingerprint of checked data.

    Args:
        checked: The data.
        client_names: Names of the clients, or None.
        evaluated: Which images clients are evaluated on, ``test`` or ``validation``.

    Returns:
        ``clients`` and ``classes`` (names or None) and, for each part of the data, ``labels`` and ``images``: a list
        with a hash per client, or None where they cannot be compared.
    """
    fingerprint: Fingerprint = {
        "clients": None if client_names is None else list(client_names),
        "classes": checked.classes,
        "train": part_fingerprint(checked.train),
    }
    other_parts = {evaluated: checked.test, "public": checked.public, "server_validation": checked.server_validation}
    for part, store in other_parts.items():
        if store is not None:
            fingerprint[part] = part_fingerprint(store)
    return fingerprint


def part_fingerprint(store: Store) -> PartFingerprint:
    """Hash the labels and the images of each client in a store."""
    if isinstance(store, TensorStore):
        return _fingerprint_of_tensors(store)
    return _fingerprint_of_items(store)


def _fingerprint_of_tensors(store: TensorStore) -> PartFingerprint:
    """Return the hashes of each client's labels and of a sample of its images, for images in tensors."""
    image_bytes = store.images[:1].numel() * store.images.element_size()
    limit = BYTES_LIMIT // max(1, image_bytes)
    label_hashes: list[str] | None = None
    if store.labels is not None:
        labels = store.labels[store.table.to(store.labels.device)]
        label_hashes = []
        for size, content in zip(store.sizes, _split_bytes(labels, store.sizes), strict=True):
            # One value: the client's labels.
            label_hashes.append(hash_of_content((size, *labels.shape[1:]), labels.dtype, content).hexdigest())
    if limit >= len(store.table) and max(store.sizes) <= _CHUNK:
        return {"labels": label_hashes, "images": _hashes_of_small_clients(store)}

    image_hashes = []
    for rows in torch.split(store.table, list(store.sizes)):
        client_limit = limit * len(rows) // len(store.table)
        hashed_rows = rows[_evenly_spaced(len(rows), client_limit)]
        image_hash = new_hash()
        for chunk in torch.split(hashed_rows, _CHUNK):
            images = store.images[chunk.to(store.images.device)]
            add_to_hash(image_hash, tuple(images.shape[1:]), images.dtype, bytes_of(images))
        image_hashes.append(image_hash.hexdigest())
    return {"labels": label_hashes, "images": image_hashes}


def _hashes_of_small_clients(store: TensorStore) -> list[str]:
    """Hash all images of each client, of whom none has more than a chunk; there may be 100,000 of them.

    The images of several clients are gathered at once, since gathering a few images takes longer than hashing them.
    """
    hashes: list[str] = []
    start = 0
    for group in _group_sizes(store.sizes):
        stop = start + sum(group)
        images = store.images[store.table[start:stop].to(store.images.device)]
        for content in _split_bytes(images, group):
            hashes.append(hash_of_content(tuple(images.shape[1:]), images.dtype, content).hexdigest())
        start = stop
    return hashes


def _group_sizes(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Divide sizes, none above a chunk, into consecutive groups whose sums are at most a chunk."""
    group: list[int] = []
    total = 0
    for size in sizes:
        if total + size > _CHUNK:
            yield group
            group = []
            total = 0
        group.append(size)
        total += size
    yield group


def _split_bytes(values: Tensor, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield the bytes of ``sizes[0]`` values (N, ...), of the next ``sizes[1]``, and so on."""
    content = bytes_of(values)
    bytes_of_value = len(content) // max(1, len(values))
    start = 0
    for size in sizes:
        stop = start + size * bytes_of_value
        yield content[start:stop]
        start = stop


@dataclass(frozen=True)
class _ClientHashes:
    """Hashes of a client's labels and images; None for what cannot be compared."""

    labels_hash: str | None
    images_hash: str | None


def _fingerprint_of_items(store: MapStore) -> PartFingerprint:
    """Return the hashes of each client's labels and of a sample of its images, for images that are read one by one."""
    total = max(1, sum(store.sizes))
    clients_to_read = set(_evenly_spaced(len(store.sizes), CLIENTS_LIMIT).tolist())
    image_hashes = []
    label_hashes = []
    for client in range(len(store.sizes)):
        hashes = _hash_client(store, client, total, read=client in clients_to_read)
        image_hashes.append(hashes.images_hash)
        label_hashes.append(hashes.labels_hash)
    labels = None
    if store.labelled:
        labels = _all_or_none(label_hashes)
    # If one client's items changed from read to read, those of others may have been equal by chance.
    return {"labels": labels, "images": _all_or_none(image_hashes)}


def _hash_client(store: MapStore, client: int, total: int, read: bool) -> _ClientHashes:
    """Hash a client's labels and images.

    Args:
        store: The part of the data.
        client: Number of the client.
        total: Number of all items in the part, of which the client's share is read.
        read: Whether images are read. Otherwise only labels that are known without that are hashed.
    """
    labels_hash: str | None = None
    if store.labelled:
        known_labels = store.known_labels[client]
        if known_labels is not None:
            labels_hash = hash_of(known_labels).hexdigest()
    if not read:
        return _ClientHashes(labels_hash=NOT_READ if labels_hash is None else labels_hash, images_hash=NOT_READ)

    size = store.sizes[client]
    base, rows = resolve_subset(store.datasets[client])
    if isinstance(base, ImageFiles):
        positions = _evenly_spaced(size, FILES_LIMIT * size // total).tolist()
        paths = [base.manifest.paths[rows[position]] for position in positions]
        with ThreadPoolExecutor(8) as pool:
            return _ClientHashes(labels_hash, _hash_of_words(pool.map(base.digest, paths)))

    samples = _read_samples(store, client, ITEMS_LIMIT * size // total)
    if samples is None:
        return _ClientHashes(labels_hash, None)
    if labels_hash is None:
        labels_hash = SAMPLED + _hash_of_words(label for _, label in samples)
    return _ClientHashes(labels_hash, _hash_of_words(image for image, _ in samples))


def _all_or_none(hashes: Sequence[str | None]) -> list[str] | None:
    """Return the hashes, or None if any of them is None."""
    complete = []
    for value in hashes:
        if value is None:
            return None
        complete.append(value)
    return complete


def _read_samples(store: MapStore, client: int, limit: int) -> list[tuple[str, str]] | None:
    """Hash images and labels of up to ``limit`` of a client's items.

    Returns:
        Pairs of the hashes of an image and its label; None if an item cannot be read, or changes from read to read.
    """
    indices = _evenly_spaced(store.sizes[client], limit).tolist()
    repeated = _evenly_spaced(len(indices), REPEATED_ITEMS).tolist()
    try:
        with isolated_randomness():
            samples = [_hash_item(store, client, index) for index in indices]
            second_reads = [_hash_item(store, client, indices[position]) for position in repeated]
    except Exception:  # whatever a dataset raises; the client's training reports it
        return None
    first_reads = [samples[position] for position in repeated]
    if second_reads != first_reads:
        return None
    return samples


def _hash_item(store: MapStore, client: int, index: int) -> tuple[str, str]:
    """Hash an image and its label, "" without one."""
    # Transforms that draw from a global generator always draw alike.
    seed_all(0)
    image, label = store.item(client, index, resize=False)
    if label is None:
        return hash_of(image).hexdigest(), ""
    return hash_of(image).hexdigest(), hash_of(as_labels(label, of_one_image=True)).hexdigest()


def _evenly_spaced(count: int, limit: int) -> Tensor:
    """Return up to ``limit`` of ``count`` positions, always including the first and the last."""
    limit = min(count, max(2, limit))
    return torch.from_numpy(np.linspace(0, count - 1, limit).round().astype(np.int64))


def _hash_of_words(words: Iterable[str]) -> str:
    """Return the hash of a sequence of words."""
    result = new_hash()
    for word in words:
        result.update(f"{word}\n".encode())
    return result.hexdigest()


def difference_in_names(previous_fingerprint: Mapping[str, Any], current_fingerprint: Mapping[str, Any]) -> str | None:
    """Describe how the clients or classes of two fingerprints differ in their names or order; None if they do not.

    The result continues a sentence about the former data.
    """
    for what, remedy in (
        ("clients", "pass the same clients in the same order as before"),
        ("classes", "number the classes as before"),
    ):
        before = previous_fingerprint.get(what)
        now = current_fingerprint.get(what)
        if before == now:
            continue
        return f"its {what} {_change_of_names(before, now)}; {remedy}"
    return None


def _change_of_names(previous_names: object, current_names: object) -> str:
    """Describe how two lists of names differ; anything but a list stands for data without names."""
    if not isinstance(previous_names, list) or not isinstance(current_names, list):
        return f"are {_describe_names(previous_names)}, but here they are {_describe_names(current_names)}"
    if sorted(map(str, previous_names)) == sorted(map(str, current_names)):
        return f"are {abbreviated(previous_names)} in this order, but here they are {abbreviated(current_names)}"
    first_change = _first_change(previous_names, current_names)
    return f"are {_describe_names(previous_names)}, but here they are {_describe_names(current_names)}{first_change}"


def _first_change(previous_names: Sequence[object], current_names: Sequence[object]) -> str:
    """Describe the first difference of two lists in parentheses; an empty string if one begins with the other."""
    for old, new in zip(previous_names, current_names, strict=False):
        if old != new:
            return f" ({old!r} became {new!r})"
    return ""


def _describe_names(value: object) -> str:
    """Return a list of names for a message, abbreviated if it is long."""
    if not isinstance(value, list):
        return "without names"
    return abbreviated(list(map(str, value)))


def difference_in_content(
    previous_fingerprint: Mapping[str, Any], current_fingerprint: Mapping[str, Any]
) -> str | None:
    """Describe how the labels or images of two fingerprints differ; None if no difference is known."""
    for part, title in (
        ("train", "training images"),
        ("test", "test images"),
        ("validation", "validation images"),
        ("public", "public images"),
        ("server_validation", "validation images on the server"),
    ):
        before = previous_fingerprint.get(part)
        now = current_fingerprint.get(part)
        if not isinstance(before, dict) or not isinstance(now, dict):
            continue  # the numbers of images are compared elsewhere
        for what, description in (("labels", f"the labels of the {title}"), ("images", f"the {title}")):
            old = before.get(what)
            new = now.get(what)
            if not isinstance(old, list) or not isinstance(new, list) or old == new:
                continue
            if part in ("public", "server_validation"):
                return f"{description} differ from those of the checkpoint"
            return f"{description} of {_changed_clients(old, new, current_fingerprint.get('clients'))}"
    return None


def changed_content(previous_fingerprint: Mapping[str, Any], current_fingerprint: Mapping[str, Any]) -> str | None:
    """Name what differs in two fingerprints of one client's data, such as ``training images``; None if nothing does."""
    for part, title in (("train", "training images"), ("test", "test images"), ("validation", "validation images")):
        before = previous_fingerprint.get(part)
        now = current_fingerprint.get(part)
        if not isinstance(before, dict) or not isinstance(now, dict):
            if before != now:
                return title
            continue
        for what, description in (("labels", f"labels of the {title}"), ("images", title)):
            # What changes from read to read cannot be compared.
            if before[what] is not None and now[what] is not None and before[what] != now[what]:
                return description
    return None


def _changed_clients(old: Sequence[str], new: Sequence[str], client_names: Sequence[str] | None) -> str:
    """Name the clients whose hashes differ, and the first one whose data were another client's before."""
    labels = [str(client) for client in range(len(new))]
    if client_names is not None:
        labels = [repr(name) for name in client_names]
    changed = [client for client, value in enumerate(new) if client >= len(old) or old[client] != value]
    noun = "clients" if len(changed) > 1 else "client"
    text = f"{noun} {abbreviated([labels[client] for client in changed])} differ from those of the checkpoint"
    for client in changed:
        if new[client] != NOT_READ and new[client] in old:
            former_client = old.index(new[client])
            former_label = labels[former_client] if former_client < len(labels) else str(former_client)
            return f"{text} (client {labels[client]} now has those of client {former_label})"
    return text


def training_fingerprint(checked_data: CheckedData, clients: Sequence[int]) -> PartFingerprint:
    """Hash the training labels and images of some clients, as if the data had no others.

    Which images of a client are hashed depends on the number of clients and of all their images, so the hashes of a
    client can be compared only if they were computed among the same clients.

    Args:
        checked_data: The data.
        clients: Numbers of the clients, in the order of the hashes.
    """
    return part_fingerprint(checked_data.train.select(clients))


def first_changed_client(previous_part: PartFingerprint, current_part: PartFingerprint) -> int | None:
    """Return the position of the first client whose labels or images differ; None if no difference is known.

    Args:
        previous_part: Fingerprint of a part of the data.
        current_part: Fingerprint of the same part for the same number of clients in the same order.
    """
    changed = []
    for what in ("labels", "images"):
        old_hashes = previous_part[what]
        new_hashes = current_part[what]
        if old_hashes is None or new_hashes is None:
            continue
        for client, (old, new) in enumerate(zip(old_hashes, new_hashes, strict=True)):
            if old != new and _are_comparable(old, new):
                changed.append(client)
    return min(changed, default=None)


def _are_comparable(old: str, new: str) -> bool:
    """Whether two hashes of a client's labels, or of its images, cover the same labels or images."""
    if NOT_READ in (old, new):
        return False
    # With more clients, labels that are not declared may be too many to read them all.
    return old.startswith(SAMPLED) == new.startswith(SAMPLED)
