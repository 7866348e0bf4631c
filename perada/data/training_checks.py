# SPDX-License-Identifier: Apache-2.0
"""What training would reject or warn of in data that are inspected."""

import warnings
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from perada.data.batches.datasets import declared_labels, resolve_subset
from perada.data.checked import check
from perada.data.checks.masks import MaskCounter
from perada.data.federated import FederatedData
from perada.tasks import Task


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that decide whether its data can be used; see :class:`.FederatedDataModule`."""

    task: Task | None = None
    num_classes: int | None = None
    image_size: int | None = None


@dataclass
class Findings:
    """What training would do with data.

    Attributes:
        rejections: Errors that it would begin with.
        warnings: Warnings of its set-up.
    """

    rejections: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_as_training_does(
    data: FederatedData, run_options: RunOptions, unreadable_rows: Mapping[bool, AbstractSet[int]]
) -> Findings:
    """Check data as the set-up of a run does.

    Args:
        data: The data, of which images that cannot be read are left out.
        run_options: Options of the run.
        unreadable_rows: Positions of images that cannot be read, in the training split (True) and in the test split
            (False).
    """
    readable = replace(
        data,
        train=[_leave_out(dataset, unreadable_rows[True]) for dataset in data.train],
        test=[_leave_out(dataset, unreadable_rows[False]) for dataset in data.test],
    )
    findings = Findings()
    if unreadable_rows[True] and any(len(resolve_subset(dataset).rows) == 0 for dataset in readable.train):
        # The broken images are reported, and hide what else may be wrong with the client.
        return findings
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        try:
            check(readable, run_options.num_classes, run_options.image_size, task=run_options.task)
        except (TypeError, ValueError) as error:
            findings.rejections.append(" ".join(str(error).split()))
    findings.warnings += [" ".join(str(warning.message).split()) for warning in recorded_warnings]
    return findings


def _leave_out(dataset: Dataset[Any], positions: AbstractSet[int]) -> Dataset[Any]:
    """Return a client's images without those at some positions of the set that they are taken from."""
    if not positions:
        return dataset
    base, rows = resolve_subset(dataset)
    return Subset(base, [row for row in rows.tolist() if row not in positions])


def shares_of_values(
    datasets: Sequence[Dataset[Any]], ignored: int, mask_values: Sequence[int] | None
) -> dict[int, float]:
    """Return the share of a client's pixels that have each value in its masks, by ascending value.

    Args:
        datasets: The client's training and test images.
        ignored: The value of pixels that do not count.
        mask_values: The value of each class in the files; None for its number.
    """
    counter = MaskCounter(ignored)
    for dataset in datasets:
        labels = declared_labels(dataset)
        assert isinstance(labels, torch.Tensor)
        counter.add(labels)
    num_pixels = max(1, sum(counter.pixels.values()))
    share_of_value: dict[int, float] = {}
    for number, count in counter.pixels.items():
        is_listed = mask_values is not None and number < len(mask_values)
        value = mask_values[number] if mask_values is not None and is_listed else number
        share_of_value[value] = count / num_pixels
    return dict(sorted(share_of_value.items()))
