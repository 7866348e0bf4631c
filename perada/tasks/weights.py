# SPDX-License-Identifier: Apache-2.0
"""Weights of classes in a loss."""

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from perada.core.checks import check_number, invalid_option
from perada.core.states import to_device_async

BALANCED = "balanced"
"""Weights that follow from the frequencies of classes among all clients."""
BALANCED_PER_CLIENT: Final = "balanced_per_client"
"""Weights that follow from the frequencies of classes at each client."""
Weights = Sequence[float] | Literal["balanced"] | None


def checked_weights(name: str, weights: Weights) -> tuple[float, ...] | Literal["balanced"] | None:
    """Return the value of an option as a tuple of numbers, ``balanced`` or None.

    Raises:
        OptionError: If it is none of these, or a weight is not a number > 0.
    """
    if weights is None or (isinstance(weights, str) and weights == BALANCED):
        return weights
    if not isinstance(weights, str) and hasattr(weights, "tolist"):  # a tensor or an array
        weights = weights.tolist()
    if isinstance(weights, str) or not isinstance(weights, Sequence) or not weights:
        raise invalid_option(name, weights, "a list of numbers, one for each class, or 'balanced'")
    for weight in weights:
        check_number(name, weight, gt=0, hint="it is a list of factors of the loss")
    return tuple(float(weight) for weight in weights)


def check_length(name: str, weights: Weights, num_classes: int) -> None:
    """Raise an OptionError if there are weights, and not one for each of K classes."""
    if weights is not None and weights != BALANCED and len(weights) != num_classes:
        raise invalid_option(name, weights, f"a list of {num_classes} numbers, one for each class")


def check_all_occur(name: str, class_counts: Tensor) -> None:
    """Raise an OptionError if a class does not occur in the counts (K,), so no weight follows from its frequency."""
    missing = (class_counts == 0).nonzero().flatten().tolist()
    if missing:
        numbers = ", ".join(map(str, missing))
        raise invalid_option(
            name, BALANCED, "a list of numbers", hint=f"no client has a training image that determines class {numbers}"
        )


def weights_per_client(class_counts: Tensor) -> Tensor:
    """Return the weights n / (k n_c) of a client with n images of k classes, of which n_c have class c.

    Classes that the client does not have are not among its k classes, and have a weight of 0. The mean weight of its
    images is 1.

    Args:
        class_counts: Number (N, K) of images of each class, for N clients or for the client of each of N images.

    Returns:
        Weights (N, K) in double precision.

    >>> weights_per_client(torch.tensor([[3, 1, 0]])).tolist()
    [[0.6666666666666666, 2.0, 0.0]]
    """
    class_counts = class_counts.double()
    is_present = class_counts > 0
    num_images = class_counts.sum(-1, keepdim=True)
    num_classes = is_present.sum(-1, keepdim=True)
    weights = num_images / (num_classes * class_counts)
    return weights.where(is_present, 0)


def weights_on(weights: Weights, logits: Tensor) -> Tensor | None:
    """Return weights (K,) in the dtype and on the device of logits; None if there are none.

    Raises:
        RuntimeError: If the weights are ``balanced``, and the task was not fitted to the targets.
    """
    if weights is None:
        return None
    if isinstance(weights, str):
        raise RuntimeError("balanced weights are not known before Task.fitted_to was called with the training targets")
    return to_device_async(torch.tensor(weights, dtype=logits.dtype), logits.device)
