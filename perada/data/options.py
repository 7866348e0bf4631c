# SPDX-License-Identifier: Apache-2.0
"""Refusals of data and partitions that are of another type."""

from collections.abc import Mapping, Sequence
from typing import get_args

from perada.core.checks import check_choice, check_whole
from perada.data.broken import OnBroken
from perada.data.federated import FederatedData
from perada.data.partitions.base import Partition
from perada.data.sets.base import ImageSet
from perada.data.shifts import ShiftsWhen


def check_types(data: object, dataset: object, partition: object, public: object, shifts: object) -> None:
    """Refuse, by a ValueError or a TypeError of one line, what a data module cannot take."""
    for name, value, kind, such in (
        ("data", data, FederatedData, "FederatedData(train=[...])"),
        ("dataset", dataset, ImageSet, "Digits()"),
        ("partition", partition, Partition, "Dirichlet(20, 0.1)"),
        ("public", public, ImageSet, "Photographs()"),
        ("shifts", shifts, Mapping, "{'noise': 'gaussian_noise'}"),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}={value!r} cannot be used; give such as {such}, or leave it out")
    if isinstance(data, FederatedData):
        for name in ("classes", "client_names"):
            names = getattr(data, name)
            if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
                raise TypeError(
                    f"FederatedData: {name}={names!r} cannot be used; give a list of names, or leave it out"
                )


def check_reading(
    seed: object, num_workers: object, crop_padding: object, flip: object, shifts_when: object, on_broken: object
) -> None:
    """Refuse, by a ValueError, how images are drawn, read and augmented, if it is out of range or of another type."""
    check_whole("seed", seed, 0, most=None)
    check_whole("num_workers", num_workers, 0)
    check_whole("crop_padding", crop_padding, 0)
    check_choice("flip", flip, [False, True])
    check_choice("shifts_when", shifts_when, get_args(ShiftsWhen))
    check_choice("on_broken", on_broken, get_args(OnBroken))
