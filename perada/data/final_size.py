# SPDX-License-Identifier: Apache-2.0
"""Have files read at the size of the model's images, so that they are resized only once."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset, Subset

from perada.data.federated import FederatedData
from perada.data.sets.manifest import DEFAULT_SIZE, ImageFiles

DatasetT = TypeVar("DatasetT")


def read_at_size(original: DatasetT, size: int | None) -> DatasetT:
    """Return a set of files that are resized to this size when they are read; any other object is returned unchanged.

    Args:
        original: A set of images, or anything else.
        size: Height and width of the images; None keeps those of the set.
    """
    if size is None or not isinstance(original, ImageFiles) or original.size == size:
        return original
    if original.size != DEFAULT_SIZE:
        rank_zero_info(
            f"data: {type(original).__name__} reads files at image_size={size} instead of its own size={original.size}"
        )
    return original.with_size(size)


def read_shifts_at_size(shifts: Mapping[str, Any], size: int | None) -> dict[str, Any]:
    """Return shifted test sets, of which those of files are resized to this size when they are read."""
    return {name: read_at_size(shift, size) for name, shift in shifts.items()}


def read_clients_at_size(data: FederatedData | None, size: int | None) -> FederatedData | None:
    """Return the clients' data, of which sets of files and Subsets of them are resized to this size when read.

    Args:
        data: The data; None is returned unchanged.
        size: Height and width of the images; None keeps those of the sets.
    """
    if data is None or size is None:
        return data
    datasets = [*data.train, *data.test]
    for server_set in (data.public, data.server_validation):
        if server_set is not None:
            datasets.append(server_set)
    if not any(isinstance(_set_behind(dataset), ImageFiles) for dataset in datasets):
        return data
    # Clients often have Subsets of one set, which stays one set.
    set_of_id: dict[int, Dataset[Any]] = {}

    def resized(dataset: Dataset[Any]) -> Dataset[Any]:
        images = _set_behind(dataset)
        if id(images) not in set_of_id:
            set_of_id[id(images)] = read_at_size(images, size)
        resized_images = set_of_id[id(images)]
        if images is dataset:
            return resized_images
        assert isinstance(dataset, Subset)
        return Subset(resized_images, dataset.indices)

    # dataclasses.replace would warn of the names of clients and classes once more.
    at_size = copy.copy(data)
    at_size.train = [resized(dataset) for dataset in data.train]
    at_size.test = [resized(dataset) for dataset in data.test]
    at_size.public = None if data.public is None else resized(data.public)
    at_size.server_validation = None if data.server_validation is None else resized(data.server_validation)
    return at_size


def _set_behind(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the set of files that a dataset is a Subset of, and any other dataset itself."""
    if type(dataset) is Subset and isinstance(dataset.dataset, ImageFiles):
        return dataset.dataset
    return dataset
