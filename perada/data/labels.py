# SPDX-License-Identifier: Apache-2.0
"""Labels of all samples, which are read and numbered before training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.data.batches.datasets import (
    LABEL_KEYS,
    Labels,
    Resolve,
    as_labels,
    format_text,
    image_and_label,
    isolated_randomness,
    labels_at,
    labels_of_base,
    read_item,
    tensor_format,
)
from perada.data.batches.samples import MapStore, Store, TensorStore
from perada.data.sets.base import ImageSet
from perada.data.sets.label_names import check_label_names

SCAN_LIMIT = 50_000
"""Labels of datasets that declare none are read from all samples, up to this many. Beyond, they are checked on use."""
VALIDATION_SET = "the server's validation set"
"""Owner of the labelled images of the server in messages."""


def known_labels(part: str, store: Store, num_classes: int | None, resolve: Resolve) -> list[Labels]:
    """Return the labels of every client where they can be determined before training.

    Labels that a dataset does not declare are read from all samples, or from the first one if there are more than
    ``SCAN_LIMIT``.
    """
    if isinstance(store, TensorStore):
        return [*store.client_labels()]
    num_samples = sum(store.sizes)
    labels_of_clients: list[Labels] = []
    # Clients often have Subsets of one dataset, whose labels are read once, since they may be a long list.
    labels_of_bases: dict[int, Labels | None] = {}
    with isolated_randomness():
        for client, dataset in enumerate(store.datasets):
            base, rows = resolve(dataset)
            if id(base) not in labels_of_bases:
                labels_of_bases[id(base)] = labels_of_base(base)
            base_labels = labels_of_bases[id(base)]
            labels = None
            if base_labels is not None:
                labels = labels_at(base_labels, rows)
                # The declared labels of an ImageSet are trusted, so that no item has to be read.
                is_certain = store.sizes[client] == 0 or isinstance(base, ImageSet)
                if not is_certain and not _labels_match_items(labels, dataset, name_owner(part, client)):
                    labels = None
            if labels is None:
                labels = _read_client_labels(part, store, client, num_samples, num_classes)
            labels_of_clients.append(labels)
    return labels_of_clients


def _read_client_labels(part: str, store: MapStore, client: int, num_samples: int, num_classes: int | None) -> Labels:
    """Read the labels of a client's samples, or only of the first one; see :func:`known_labels`.

    Args:
        part: Part of the data, for messages.
        store: The samples of all clients in this part.
        client: The client.
        num_samples: Number of samples of all clients.
        num_classes: Number of classes, if it is declared.

    Raises:
        ValueError: If too few labels are read to show the number of classes, or their formats differ.
    """
    reads_all = num_samples <= SCAN_LIMIT
    if not reads_all and num_classes is None:
        raise ValueError(
            f"client {client} declares no labels, and its {num_samples} {part} samples are too many to read them all: "
            "set num_classes, or classes if labels are words, or add an attribute targets to its dataset"
        )
    dataset = store.datasets[client]
    owner = name_owner(part, client)
    size = store.sizes[client]
    num_read = size if reads_all else min(1, size)
    labels = [read_label(dataset, owner, index) for index in range(min(1, num_read))]
    if labels and _is_mask(labels[0]):
        # Masks are too large to be kept, and are checked when they are read.
        num_read = 1
        _require_num_classes(client, num_classes)
    labels += [read_label(dataset, owner, index) for index in range(1, num_read)]
    tensors = [label for label in labels if isinstance(label, Tensor)]
    _check_one_label_format(owner, tensors)
    has_words = len(tensors) < len(labels)
    if has_words:
        return labels
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    return torch.stack(tensors)


def _is_mask(raw_label: str | Tensor) -> bool:
    """Return whether a label is a mask (H, W) of classes."""
    return isinstance(raw_label, Tensor) and raw_label.ndim == 2


def _require_num_classes(client: int, num_classes: int | None) -> None:
    """Raise a ValueError if the number of classes would have to be inferred from masks that are read one by one."""
    if num_classes is None:
        raise ValueError(
            f"the masks of client {client} are read one by one during training, so they do not show the number of "
            "classes before; set num_classes or classes"
        )


def name_owner(part: str, client: int | str) -> str:
    """Name the owner of samples for a message; ``client`` is its number, or ``{client}`` in a template of names."""
    if part == "validation":
        return VALIDATION_SET
    return f"client {client}: the test set" if part == "test" else f"client {client}"


def _check_one_label_format(owner: str, label_tensors: Sequence[Tensor]) -> None:
    """Raise a ValueError if labels (...) of single samples cannot be stacked, such as vectors of several lengths."""
    for index, label in enumerate(label_tensors):
        label_format = tensor_format(label, 0)
        first_format = tensor_format(label_tensors[0], 0)
        if label_format != first_format:
            raise ValueError(
                f"{owner}, sample {index}: the label is {format_text(label_format)}, that of the first sample is "
                f"{format_text(first_format)}: use labels of one kind and length for all"
            )


def _labels_match_items(declared: Labels, dataset: Dataset[Any], owner: str) -> bool:
    """Return whether a dataset's declared labels are of the same kind, words or not, as those of its items.

    A transform may turn one into the other.
    """
    items_have_words = isinstance(read_label(dataset, owner, 0), str)
    return items_have_words == isinstance(declared, list)


def read_label(dataset: Dataset[Any], owner: str, index: int) -> str | Tensor:
    """Read the label of a sample, a word or a tensor."""
    try:
        item = read_item(dataset, index, owner)
        _, label = image_and_label(item, labelled=True)
        # A word of NumPy becomes one of Python, which is what messages and files show.
        return str(label) if isinstance(label, str) else as_labels(label, of_one_image=True)
    except TypeError as error:
        raise TypeError(f"{owner}, sample {index}: {error}") from None


def collect_words(labels_of_parts: Mapping[str, list[Labels]]) -> list[str] | None:
    """Return all words that are labels, sorted, or None if all labels are numbers.

    Raises:
        ValueError: If some labels are words and others are numbers.
    """
    words = set()
    for labels_of_clients in labels_of_parts.values():
        for labels in labels_of_clients:
            if isinstance(labels, list):
                words |= {label for label in labels if isinstance(label, str)}
    if not words:
        return None
    for part, labels_of_clients in labels_of_parts.items():
        for client, labels in enumerate(labels_of_clients):
            number = next((label for label in labels if not isinstance(label, str)), None)
            if number is not None:
                raise ValueError(
                    f"client {client} has the {part} label {torch.as_tensor(number).tolist()}, but others are words, "
                    f"such as {min(words)!r}: use words for all, or numbers for all"
                )
    return sorted(words)


def check_word_labels(labels_of_parts: Mapping[str, list[Labels]], client_names: Sequence[str] | None) -> None:
    """Check the words that are labels; see :func:`.check_label_names`."""
    names = []
    owners = []
    for part, labels_of_clients in labels_of_parts.items():
        for client, labels in enumerate(labels_of_clients):
            owner = "the server" if part == "validation" else f"client {client}"
            if client_names is not None and part != "validation":
                owner = client_names[client]
            names += [str(label) for label in labels]
            owners += [owner] * len(labels)
    check_label_names("the data", names, owners)


def hugging_face_classes(
    sets: Mapping[str, Sequence[Any]], num_classes: int | None, resolve: Resolve
) -> list[str] | None:
    """Return the class names in the features of Hugging Face's datasets, unless ``num_classes`` is another number.

    Raises:
        ValueError: If datasets have different names.
    """
    names_of_sets: dict[str, list[str]] = {}
    for part, datasets in sets.items():
        for client, dataset in enumerate(datasets):
            features = getattr(resolve(dataset).base, "features", None)
            if not isinstance(features, Mapping):
                continue
            for key in LABEL_KEYS:
                names = getattr(features.get(key), "names", None)
                if names is not None:
                    names_of_sets[f"client {client}: the {part} set"] = list(names)
    if not names_of_sets:
        return None
    first_set, first_names = next(iter(names_of_sets.items()))
    for name, names in names_of_sets.items():
        if names != first_names:
            raise ValueError(
                f"{name} has the classes {names}, but {first_set} has {first_names}: number them identically, or use "
                "words as labels"
            )
    if not first_names or num_classes not in (None, len(first_names)):
        return None
    return first_names


def replace_words(store: Store, labels_of_clients: list[Labels], class_numbers: dict[str, int] | None) -> list[Tensor]:
    """Return the labels of every client with numbers in place of words.

    A MapStore gets the class numbers, and the labels of clients of which all are known.
    """
    if isinstance(store, MapStore):
        store.class_numbers = class_numbers
    numbered: list[Tensor] = []
    for client, labels in enumerate(labels_of_clients):
        if isinstance(labels, Tensor):
            numbered.append(labels)
        else:
            assert isinstance(store, MapStore)
            numbers = [int(store.class_number(client, word)) for word in labels]
            numbered.append(torch.tensor(numbers, dtype=torch.int64))  # a client may have no images
        if isinstance(store, MapStore):
            all_known = len(labels) == store.sizes[client]
            store.known_labels[client] = numbered[client] if all_known else None
    return numbered
