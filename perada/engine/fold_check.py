# SPDX-License-Identifier: Apache-2.0
"""Checks whether a network can be folded, by comparing a folded pass with passes of one client after another.

Stacked layers separate the clients, but the code between them in a network's ``forward`` may not: ``h - h.mean(0)``
averages over all clients' images, and ``if h.mean() > 0`` decides for all clients.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perada.core.seeding import Streams, generator, seeded
from perada.core.states import State, batch_norms, clone, get_state, parameter_keys, stack
from perada.engine.engine import Engine
from perada.engine.precision import tolerance_of

NORM_ROWS = 2
"""Number of images per client where a norm uses the statistics of a batch, which one image may not have."""
TOLERANCE = 1e-4
"""Largest accepted difference of logits in the model's precision, relative to the largest logit."""
TOLERANCE_DOUBLE = 1e-6
"""The same for a model in double precision."""
_BLOCK = 10_007
"""Number of random numbers drawn per client. It is prime, so that no two rows of a matrix get the same numbers."""


def check_fold(model: nn.Module, x: Tensor, channels_last: bool = False) -> str | None:
    """Compare a folded pass with passes of one client after another.

    Args:
        model: The single model, whose trained layers have stacked twins.
        x: Prepared images of some clients (C, B, ...), or texts.
        channels_last: Whether images run in that memory format.

    Returns:
        The reason why the model cannot be folded; None if both agree, or if they cannot be compared.
    """
    obstacle = _find_obstacle(model, x, channels_last, TOLERANCE)
    if obstacle is None:
        return None
    if obstacle.raised:
        return obstacle.reason
    # The two round differently, and very much so with TF32, so a difference must persist in double precision.
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    exact = x.to(device, torch.float64 if x.is_floating_point() else x.dtype)
    exact_model = copy.deepcopy(model).to(device, torch.float64)
    if _runs_unfolded(exact_model, exact, channels_last):
        obstacle = _find_obstacle(exact_model, exact, channels_last, TOLERANCE_DOUBLE)
    else:
        # A network with a fixed dtype. The rounding of this dtype must not be taken for a difference.
        obstacle = _find_obstacle(model, x, channels_last, tolerance_of(model, TOLERANCE))
    return None if obstacle is None else obstacle.reason


def _runs_unfolded(model: nn.Module, x: Tensor, channels_last: bool) -> bool:
    """Return whether a model computes the logits of one client's images (C, B, ...)."""
    engine = Engine(model, "loop", channels_last=channels_last)
    try:
        _seeded_logits(engine, stack([get_state(model)]), x[:1, :1], training=False)
    except Exception:  # networks raise errors of any kind for inputs of another dtype
        return False
    return True


@dataclass(frozen=True)
class _Obstacle:
    """Why a model cannot be folded.

    Attributes:
        reason: The reason as a sentence.
        raised: Whether a folded pass raised an error. Otherwise it differs from passes of one client after another.
    """

    reason: str
    raised: bool


def _find_obstacle(model: nn.Module, x: Tensor, channels_last: bool, tolerance: float) -> _Obstacle | None:
    """Compare a folded pass with passes of one client after another.

    Args:
        model: The single model.
        x: Images of some clients (C, B, ...).
        channels_last: Whether images run in that memory format.
        tolerance: Largest accepted difference, relative to the largest logit.

    Returns:
        The obstacle; None as in :func:`check_fold`.
    """
    folded = Engine(model, "folded", channels_last=channels_last)
    loop = Engine(model, "loop", channels_last=channels_last)
    # The check runs on as few images as possible: passes of a large model take seconds on a CPU.
    rows = NORM_ROWS if batch_norms(model) else 1
    if len(x) > 1:
        two_clients = x[:2, :rows]
    else:
        # There is a single client, whose mirrored images are used for the second one.
        two_clients = torch.stack([x[0, :rows], x[0, :rows].flip(-1)])
    states = stack(perturbed_states(get_state(model), parameter_keys(model), num_clients=2))
    batches = [two_clients]
    if two_clients.is_floating_point():
        # For negated images of one client, a network that branches on a sign may take another branch.
        batches.append(torch.stack([two_clients[0], -two_clients[1]]))
    for training in (True, False):
        conclusive = True
        for batch in batches:
            try:
                separate = _seeded_logits(loop, states, batch, training)
            except Exception:  # networks raise errors of any kind in training, for example with one image
                conclusive = False
                continue
            obstacle = _compare_passes(folded, states, batch, training, separate, tolerance)
            if obstacle is not None:
                if _repeats_logits(loop, states, batch, training, separate):
                    return obstacle
                # The network draws from torch's global generator, so no two passes agree.
                conclusive = False
        if conclusive:
            # Training mode was conclusive: the images are not mixed. For evaluation mode, one image per client is
            # enough to show whether the weights are used in another way.
            batches = [two_clients[:, :1]]
    error = _backward_error(folded, states, two_clients[:, :1])
    if error is None or _backward_error(loop, states, two_clients[:, :1]) is not None:
        # A pass that also fails for one client after another is no reason against folding.
        return None
    return _obstacle_of_error(error)


def _backward_error(engine: Engine, states: State, x: Tensor) -> Exception | None:
    """Return the error with which gradients cannot be computed; None if they can."""
    trained = parameter_keys(engine.model)
    leaves = {key: value.requires_grad_(key in trained) for key, value in clone(states).items()}
    try:
        with torch.enable_grad(), seeded(0, "fold check"):
            logits = engine.logits(leaves, x)
            torch.autograd.grad(logits.sum(), [leaves[key] for key in trained], allow_unused=True)
    except Exception as error:  # networks raise errors of any kind in the backward pass
        return error
    return None


def _compare_passes(
    folded: Engine,
    states: State,
    x: Tensor,
    training: bool,
    separate: Tensor,
    tolerance: float,
) -> _Obstacle | None:
    """Compare a folded pass with passes of one client after another.

    Args:
        folded: Engine of the folded pass.
        states: States (2, ...) of two clients.
        x: Their images (2, B, ...).
        training: Whether the pass is in training mode.
        separate: Logits (2, B, K) of the passes of one client after another.
        tolerance: Largest accepted difference, relative to the largest logit.

    Returns:
        The obstacle; None if the logits agree.
    """
    try:
        together = _seeded_logits(folded, states, x, training)
    except Exception as error:  # networks raise errors of any kind for the images of two clients
        return _obstacle_of_error(error)
    largest = float(separate.abs().max())
    difference = float((together - separate).abs().max())
    if difference <= tolerance * max(largest, 1e-6):
        return None
    if not separate.isfinite().all() and not together.isfinite().all():
        # Both are not finite, for example because a perturbed weight must not be negative: nothing can be concluded.
        return None
    return _Obstacle(
        f"it mixes the images of a batch: logits of up to {largest:.2g} change by {difference:.2g} when the batch "
        "contains another client's images",
        raised=False,
    )


def _obstacle_of_error(error: Exception) -> _Obstacle:
    """Return the obstacle for an error that the network raised in a folded pass."""
    message = " ".join(str(error).split())[:150]
    return _Obstacle(f"it fails on images of two clients ({type(error).__name__}: {message})", raised=True)


def perturbed_states(state: State, keys: Collection[str], num_clients: int, least: float = 0.0) -> list[State]:
    """Return a copy of a state for each client, with random changes of some parameters.

    The changes matter because most adapters are initially zero: a network would compute the same with and without them.

    Args:
        state: State to copy, without a client axis.
        keys: Names of the parameters to change. The standard deviation of a change is a tenth of the parameter's root
            mean square, or 0.02 if the parameter is zero.
        num_clients: Number of clients.
        least: Smallest standard deviation of a change.
    """
    states = []
    for client in range(num_clients):
        # One block of numbers is repeated, since drawing numbers for all parameters would take longer than a pass.
        block = torch.randn(_BLOCK, generator=generator(0, "perturbation", client))
        perturbed = clone(state)
        for key in keys:
            value = perturbed[key]
            root_mean_square = float(value.float().square().mean().sqrt())
            change = 0.02
            if root_mean_square > 0:
                change = 0.1 * root_mean_square
            change = max(change, least)
            num_blocks = math.ceil(value.numel() / _BLOCK)
            noise = block.repeat(num_blocks)[: value.numel()].view(value.shape)
            value += (noise * change).to(value)
        states.append(perturbed)
    return states


def _repeats_logits(engine: Engine, states: State, x: Tensor, training: bool, logits: Tensor) -> bool:
    """Return whether a pass with another state of torch's global generator gives the same ``logits``."""
    return torch.equal(logits, _seeded_logits(engine, states, x, training, seed=1))


def _seeded_logits(engine: Engine, states: State, x: Tensor, training: bool, seed: int = 0) -> Tensor:
    """Return the logits (2, B, K) of two clients, with torch's global generator seeded by ``seed``."""
    # Training mode updates running statistics in place, so these are copies.
    copies = clone(states)
    streams = Streams.derived(0, "fold check", clients=(0, 1))
    with torch.no_grad(), seeded(seed, "fold check"):
        return engine.logits(copies, x, training=training, streams=streams)
