# SPDX-License-Identifier: Apache-2.0
"""Whether a network can be folded: a folded pass compared with one client after another.

The stacked layers keep clients apart, but what stands between them in a network's own ``forward`` may not.
``h - h.mean(0)`` takes the mean over everyone's images, ``if h.mean() > 0`` decides for all.
"""

import copy
import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from perada.core.seeding import Streams, generator, seeded
from perada.core.states import State, clone, get_state, parameter_keys, stack
from perada.engine.engine import Engine

FAILS = "it fails on the images of two clients"
_BLOCK = 10_007
"""Random numbers that are drawn for a client: a prime, so that rows of a matrix do not repeat."""
ROWS = 2  # of a client: enough for a BatchNorm, few enough for a large model on a CPU


def check_fold(model: nn.Module, x: Tensor, channels_last: bool = False) -> str | None:
    """Compare a folded pass with one client after another.

    Args:
        model: The single model, whose trained layers have stacked twins.
        x: Prepared images of some clients (C, B, ...), or texts.
        channels_last: Whether images run in that memory format.

    Returns:
        Why the model cannot be folded; None if both agree, or nothing can be said.
    """
    difference = _difference(model, x, channels_last, 1e-4)
    if difference is None or difference.startswith(FAILS):
        return difference
    # The two round otherwise, by much in TF32. What differs in double precision too is a finding.
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    exact = x.to(device, torch.float64 if x.is_floating_point() else x.dtype)
    return _difference(copy.deepcopy(model).to(device, torch.float64), exact, channels_last, 1e-6)


def _difference(model: nn.Module, x: Tensor, channels_last: bool, tolerance: float) -> str | None:
    """What differs between a folded pass and one client after another; see :func:`check_fold`."""
    folded = Engine(model, "folded", channels_last=channels_last)
    loop = Engine(model, "loop", channels_last=channels_last)
    two = x[:2, :ROWS] if len(x) > 1 else torch.stack([x[0, :ROWS], x[0, :ROWS].flip(-1)])
    states = stack(perturbed_states(get_state(model), parameter_keys(model), clients=2))
    # Where something asks for a sign, the negated images of one client decide otherwise.
    batches = [two, torch.stack([two[0], -two[1]])] if two.is_floating_point() else [two]
    for training in (True, False):
        conclusive = True
        for batch in batches:
            try:
                separate = _logits(loop, states, batch, training)
            except Exception:  # whatever a network does in training, as with one image
                conclusive = False
                continue
            difference = _compare(folded, states, batch, training, separate, tolerance)
            if difference is not None:
                if _repeats(loop, states, batch, training, separate):
                    return difference
                # A network that draws from torch's global stream: no two passes agree.
                conclusive = False
        if conclusive:
            batches = [two[:, :1]]  # what could be mixed was seen: now whether evaluation reads weights in other ways
    return _backward_failure(folded, states, two[:, :1])


def _backward_failure(folded: Engine, states: State, x: Tensor) -> str | None:
    """Why gradients cannot be taken through a folded pass; ``None`` if they can."""
    trained = parameter_keys(folded.model)
    leaves = {key: value.requires_grad_(key in trained) for key, value in clone(states).items()}
    try:
        with torch.enable_grad(), seeded(0, "fold check"):
            logits = folded.logits(leaves, x)
            torch.autograd.grad(logits.sum(), [leaves[key] for key in trained], allow_unused=True)
    except Exception as error:  # whatever the network does in the backward pass
        return f"{FAILS} ({type(error).__name__}: {' '.join(str(error).split())[:150]})"
    return None


def _compare(
    folded: Engine, states: State, x: Tensor, training: bool, separate: Tensor, tolerance: float
) -> str | None:
    """Compare the logits of a folded pass with those of ``separate`` passes."""
    try:
        together = _logits(folded, states, x, training)
    except Exception as error:  # whatever the network does with the images of two clients
        return f"{FAILS} ({type(error).__name__}: {' '.join(str(error).split())[:150]})"
    size = float(separate.abs().max())
    moved = float((together - separate).abs().max())
    # Both may be without numbers where a weight must not be negative, say: that shows nothing.
    if moved <= tolerance * max(size, 1e-6) or not (separate.isfinite().all() or together.isfinite().all()):
        return None
    return (
        f"it mixes the images of a batch: logits of up to {size:.2g} change by {moved:.2g} where another client's "
        "images are in it"
    )


def perturbed_states(state: State, keys: Collection[str], clients: int, least: float = 0.0) -> list[State]:
    """States of some clients near ``state``, each with other values of the parameters called ``keys``.

    Most adapters begin as zero, so that a network computes the same with and without them. Parameters move by a tenth
    of their size, those that are zero by 0.02, and all by at least ``least``.
    """
    states = []
    for client in range(clients):
        # One block of numbers, repeated: to draw as many as a large network has takes longer than a pass through it.
        block = torch.randn(_BLOCK, generator=generator(0, "perturbation", client))
        moved = clone(state)
        for key in keys:
            value = moved[key]
            size = float(value.float().square().mean().sqrt())
            noise = block.repeat(math.ceil(value.numel() / _BLOCK))[: value.numel()].view(value.shape)
            step = max(0.1 * size if size > 0 else 0.02, least)
            value += (noise * step).to(value)
        states.append(moved)
    return states


def _repeats(engine: Engine, states: State, x: Tensor, training: bool, logits: Tensor) -> bool:
    """Whether a pass that differs in torch's global stream only gives the same ``logits``."""
    return torch.equal(logits, _logits(engine, states, x, training, seed=1))


def _logits(engine: Engine, states: State, x: Tensor, training: bool, seed: int = 0) -> Tensor:
    copies = clone(states)  # training updates running statistics in place
    with torch.no_grad(), seeded(seed, "fold check"):
        return engine.logits(copies, x, training=training, streams=Streams.derived(0, "fold check", clients=(0, 1)))
