# SPDX-License-Identifier: Apache-2.0
"""What clients learn: how predictions are compared with targets, and what is computed from them. One file per task."""

from torch import Tensor

from perada.tasks.base import Task
from perada.tasks.class_task import ClassTask
from perada.tasks.classification import Classification
from perada.tasks.multi_label import MultiLabel
from perada.tasks.segmentation import Segmentation

__all__ = ["ClassTask", "Classification", "MultiLabel", "Segmentation", "Task"]

DEFAULT_TASK = Classification()
"""Task of functions that are called without data, such as dry runs."""


def task_of_labels(labels: Tensor) -> Task:
    """Return the default task for labels: classes (N,), vectors (N, K) of several labels per image, or masks (N, H, W).

    >>> import torch
    >>> task_of_labels(torch.tensor([0, 2]))
    Classification()
    >>> task_of_labels(torch.tensor([[0.0, 1.0]]))
    MultiLabel()
    """
    if labels.ndim == 3:
        return Segmentation()
    if labels.ndim == 2:
        return MultiLabel()
    return Classification()
