# SPDX-License-Identifier: Apache-2.0
"""Comparisons of the clients' labels, which show that some use other numbers for the same classes."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from perada.data.batches.datasets import Resolve, isolated_randomness
from perada.data.batches.samples import MapStore, Store
from perada.data.checks.masks import MaskCounter, MaskValues, check_masks_of_clients, find_suspects
from perada.data.federated import FederatedData
from perada.data.labels import SCAN_LIMIT, read_label
from perada.data.sets.label_numbers import find_shifted_numbers
from perada.tasks import Task

MAX_COMPARED_MASKS = 20
"""Masks of a client that are compared with those of others, if they are read one by one."""


def compare_clients(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    data: FederatedData,
    resolve: Resolve,
    is_declared: bool,
    names_are_known: bool,
) -> None:
    """Reject or warn of clients that seem to use other numbers for the same classes.

    Args:
        labels_of_parts: Labels or masks of each client by part of the data.
        stores: The data by part.
        task: What is learnt from them.
        data: The data.
        resolve: Finds the dataset behind a Subset.
        is_declared: Whether the number of classes is declared.
        names_are_known: Whether it is, or the classes have names.
    """
    bases = [resolve(dataset).base for dataset in data.train]
    if task.per_pixel:
        _compare_masks(labels_of_parts, stores, task, data.client_names, is_declared, bases)
    elif task.exclusive and not names_are_known:
        _compare_numbers(labels_of_parts["training"], task, data.client_names, bases)


def _compare_masks(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    client_names: Sequence[str] | None,
    is_declared: bool,
    bases: Sequence[Dataset[Any]],
) -> None:
    """Compare the values of the clients' masks; see :func:`.check_masks_of_clients`.

    Args:
        labels_of_parts: Masks of each client by part of the data, of some datasets only the first one.
        stores: The data by part.
        task: What is learnt from the masks.
        client_names: Names of the clients, if they have any.
        is_declared: Whether the number of classes is declared.
        bases: The sets of the training masks.
    """
    values_of_clients = _read_mask_values(labels_of_parts, stores, task, client_names, MAX_COMPARED_MASKS)
    if find_suspects(values_of_clients):
        # Masks that were not read yet may have the missing classes.
        values_of_clients = _read_mask_values(labels_of_parts, stores, task, client_names, SCAN_LIMIT)
    check_masks_of_clients(values_of_clients, bases, is_declared)


def _compare_numbers(
    labels_of_clients: Sequence[Tensor],
    task: Task,
    client_names: Sequence[str] | None,
    bases: Sequence[Dataset[Any]],
) -> None:
    """Warn of clients whose classes are numbers from 1, where those of others are numbers from 0.

    Args:
        labels_of_clients: Training labels of each client.
        task: What is learnt from the labels.
        client_names: Names of the clients, if they have any.
        bases: The sets of the training images. Labels of a single set are numbered alike.
    """
    if len({id(base) for base in bases}) == 1:
        return
    numbers_of_clients: dict[str, set[int]] = {}
    for client, labels in enumerate(labels_of_clients):
        name = f"client {client}" if client_names is None else repr(client_names[client])
        numbers_of_clients[name] = {*labels[task.known(labels)].unique().tolist()}
    shift = find_shifted_numbers(numbers_of_clients)
    if shift is not None:
        num_classes = shift.higher_numbers[-1] + 1
        warnings.warn(shift.describe(f"set num_classes={num_classes}"), stacklevel=4)


def _read_mask_values(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    client_names: Sequence[str] | None,
    limit: int,
) -> list[MaskValues]:
    """Return the values of each client's masks in each part; see :func:`_compare_masks`.

    Args:
        labels_of_parts: Masks of each client by part of the data, of some datasets only the first one.
        stores: The data by part.
        task: What is learnt from the masks.
        client_names: Names of the clients, if they have any.
        limit: Number of masks of a client and part that are read, if they are not in memory.
    """
    values_of_clients: list[MaskValues] = []
    for part, labels_of_clients in labels_of_parts.items():
        store = stores[part]
        for client, masks in enumerate(labels_of_clients):
            num_masks = store.sizes[client]
            if not num_masks:
                continue
            owner = "the server" if part == "validation" else f"client {client}"
            if client_names is not None and part != "validation":
                owner += f" ({client_names[client]!r})"
            counts = MaskCounter(task.border_target)
            if len(masks) == num_masks:
                counts.add(masks)
            else:
                assert isinstance(store, MapStore)
                with isolated_randomness():
                    for index in range(min(num_masks, limit)):
                        mask = read_label(store.datasets[client], owner, index)
                        assert isinstance(mask, Tensor)
                        counts.add(mask.unsqueeze(0))
            values_of_clients.append(MaskValues(owner, part, counts))
    return values_of_clients
