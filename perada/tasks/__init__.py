# SPDX-License-Identifier: Apache-2.0
"""What clients learn: how predictions are compared with targets, and what is computed from them. One file per task."""

from torch import Tensor

from perada.tasks.base import Task
from perada.tasks.class_task import ClassTask
from perada.tasks.classification import Classification
from perada.tasks.keypoints import Keypoints
from perada.tasks.multi_label import MultiLabel
from perada.tasks.regression import Regression
from perada.tasks.segmentation import Segmentation

__all__ = ["ClassTask", "Classification", "Keypoints", "MultiLabel", "Regression", "Segmentation", "Task"]

DEFAULT_TASK = Classification()
"""Task of functions that are called without data, such as dry runs."""


def task_of_labels(labels: Tensor) -> Task:
    """Return the default task for labels: classes (N,), vectors (N, K) of several labels per image, or masks (N, H, W).

    Raises:
        TypeError: If the labels are one number (N,) per image, or masks of numbers, which no task is the default of.

    >>> import torch
    >>> task_of_labels(torch.tensor([0, 2]))
    Classification()
    >>> task_of_labels(torch.tensor([[0.0, 1.0]]))
    MultiLabel()
    """
    tasks = {1: Classification(), 2: MultiLabel(), 3: Segmentation()}
    task = tasks.get(labels.ndim)
    if task is None or not task.fits(labels):
        raise TypeError(
            f"labels are {describe_labels(labels)}: use integers for classes (labels.long()), float vectors (K,) for "
            "several labels, or masks of integers; to predict numbers, set task=Regression()"
        )
    return task


def describe_labels(labels: Tensor) -> str:
    """Describe labels (N, ...) that are of no default task, for a message.

    >>> import torch
    >>> describe_labels(torch.tensor([0.5])), describe_labels(torch.zeros(1, 8, 8))
    ('one float32 number per image', 'float32 values of shape (8, 8)')
    """
    type_name = str(labels.dtype).removeprefix("torch.")
    if labels.ndim == 1:
        return f"one {type_name} number per image"
    return f"{type_name} values of shape {tuple(labels.shape[1:])}"
