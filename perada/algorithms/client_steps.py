# SPDX-License-Identifier: Apache-2.0
"""Gradients of pulls and slopes, and errors, of both kinds of :class:`perada.algorithms.base.ClientStep`.

:class:`perada.federation.chunk.Chunk` trains; :class:`perada.algorithms.dry_run_step.DryRunStep` only tries.
"""

from torch import Tensor

from perada.algorithms.base import Algorithm
from perada.core.states import State


def add_terms(leaves: State, pull: tuple[float, State] | None, slope: State | None) -> None:
    """Add the gradients of a pull and a slope to those of the loss, in the leaves' ``grad``.

    Args:
        leaves: The trained parameters (C, ...). Without a pull or a slope, those without a gradient keep none.
        pull: ``(strength, anchor)``, as in :meth:`.ClientStep.descend`.
        slope: Gradient (C, ...) to add, as in :meth:`.ClientStep.descend`.
    """
    for key, leaf in leaves.items():
        if pull is not None:
            strength, anchor = pull
            _add_gradient(leaf, leaf.detach() - anchor[key].detach(), strength)
        if slope is not None:
            _add_gradient(leaf, slope[key])


def _add_gradient(leaf: Tensor, gradient: Tensor, factor: float = 1.0) -> None:
    """Add ``factor`` times a gradient to the gradient of a leaf, which may have none yet."""
    if leaf.grad is None:
        leaf.grad = gradient * factor
    else:
        leaf.grad.add_(gradient, alpha=factor)


def no_logits(algorithm: Algorithm) -> ValueError:
    """Return the error for an algorithm that reads outputs or labels in private training."""
    return ValueError(
        f"privacy does not support {algorithm.kind}: its local step reads the model's outputs on private images "
        "(step.logits, step.outputs), or their labels (step.labels, step.class_counts), which no noise covers; choose "
        "a different algorithm, or client_privacy; in a custom algorithm use step.loss, whose gradient is private"
    )


def no_counts(algorithm: Algorithm) -> ValueError:
    """Return the error for an algorithm that requires class counts that are not available."""
    return ValueError(
        f"algorithm {algorithm.kind} requires each client's number of images per class, but images have several "
        "labels or numbers, or labels are unknown until they are read; choose a different algorithm"
    )
