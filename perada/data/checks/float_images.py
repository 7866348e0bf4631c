# SPDX-License-Identifier: Apache-2.0
"""A warning about floating-point images that are not prepared for a model, such as those from 0 to 255."""

import warnings
from collections.abc import Mapping

import torch

from perada.data.batches.datasets import isolated_randomness
from perada.data.batches.samples import MapStore, Store

LARGEST_PREPARED_VALUE = 50.0
"""Magnitude that pixels of normalised images do not exceed: those of photographs are below 3."""
_IMAGES_OF_CLIENT = 4
"""Number of images of each client that are looked at, if images are read one by one."""
_CLIENTS = 8
"""Number of clients whose images are then looked at."""
_ROWS = 1024
"""Number of images in memory that are looked at."""


def warn_of_raw_floats(stores: Mapping[str, Store | None]) -> None:
    """Warn once of sets whose floating-point images have values that no normalised image has.

    Floating-point images are taken as they are, so pixels from 0 to 255 would reach the network unscaled.

    Args:
        stores: The sets by their names; those that are None are left out.
    """
    for name, store in stores.items():
        extremes = None if store is None else _find_extremes(store)
        if extremes is not None and max(map(abs, extremes)) > LARGEST_PREPARED_VALUE:
            low, high = extremes
            warnings.warn(
                f"the floating-point images of the {name} set have values from {low:g} to {high:g}, and are used as "
                "they are: pass uint8 images, which are scaled and normalised for the backbone, or subtract a mean and "
                "divide by a standard deviation, so that values are near 0",
                stacklevel=2,
            )
            return


def _find_extremes(store: Store) -> tuple[float, float] | None:
    """Return the smallest and the largest value of some images; None if they are not floating-point images."""
    if isinstance(store, MapStore):
        images = []
        for client, size in enumerate(store.sizes[:_CLIENTS]):
            for index in range(min(size, _IMAGES_OF_CLIENT)):
                with isolated_randomness():
                    image, _ = store.item(client, index)
                if not image.is_floating_point():
                    return None
                images.append(torch.stack(image.aminmax()))
        if not images:
            return None
        values = torch.stack(images)
    else:
        if not store.images.is_floating_point() or not len(store.table):
            return None
        values = store.images[store.table[:_ROWS].to(store.images.device)]
    smallest, largest = values.aminmax()
    return float(smallest), float(largest)
