# SPDX-License-Identifier: Apache-2.0
"""Check on a small batch, before training, that recomputed blocks change no gradient.

A block must compute the same when it runs again in the backward pass. One that draws random numbers from NumPy or
Python, keeps what it computed before, or changes its input in place does not.
"""

import torch
from torch import Tensor

from perada.core.seeding import Streams, seeded
from perada.core.states import State, batch_norms, clone, get_state, parameter_keys, stack
from perada.core.text import abbreviated
from perada.engine.engine import Engine
from perada.engine.fold_check import NORM_ROWS, perturbed_states

TOLERANCE = 1e-4
"""Largest difference that counts as rounding, relative to the largest gradient; on a CPU there is none."""


def check_recomputation(engine: Engine, x: Tensor) -> str | None:
    """Compare the gradients of an engine that recomputes blocks with those of one that does not.

    Args:
        engine: The engine that recomputes blocks.
        x: Prepared images of some clients (C, B, ...), or texts.

    Returns:
        The reason why its blocks cannot be recomputed; None if the gradients agree, or if none can be computed.
    """
    channels_last = engine.memory_format is torch.channels_last
    plain = Engine(engine.model, engine.kind, channels_last=channels_last, per_pixel=engine.per_pixel)
    recomputing = Engine(
        engine.model,
        engine.kind,
        channels_last=channels_last,
        per_pixel=engine.per_pixel,
        recomputed=engine.recomputed,
    )
    states = stack(perturbed_states(get_state(engine.model), parameter_keys(engine.model), num_clients=1))
    images = x[:1, : NORM_ROWS if batch_norms(engine.model) else 1]
    try:
        expected = _state_after_pass(plain, states, images)
    except Exception:  # networks raise errors of any kind, for which other checks have messages
        return None
    try:
        recomputed = _state_after_pass(recomputing, states, images)
    except Exception as error:  # as above, but only where blocks are recomputed
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return f"it fails in the backward pass ({reason})"
    differing = [key for key, value in expected.items() if not _tensors_agree(value, recomputed[key])]
    if differing:
        return f"the gradients or statistics of {abbreviated(differing, 3)} change if blocks run again"
    return None


def _state_after_pass(engine: Engine, states: State, x: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients and the new buffers of a training pass, by name; None for parameters without a gradient.

    Args:
        engine: The engine.
        states: State (1, ...) of a client.
        x: Its images (1, B, ...).
    """
    trained = set(parameter_keys(engine.model))
    leaves = {key: value.requires_grad_(key in trained) for key, value in clone(states).items()}
    streams = Streams.derived(0, "recomputation check", clients=(0,), device=x.device)
    with torch.enable_grad(), seeded(0, "recomputation check"):
        logits = engine.logits(leaves, x, training=True, streams=streams)
        # Not the sum, whose gradient is 0 behind a softmax.
        logits.square().sum().backward()
    return {key: value.grad if value.requires_grad else value for key, value in leaves.items()}


def _tensors_agree(expected: Tensor | None, actual: Tensor | None) -> bool:
    """Return whether two tensors agree up to rounding, or are both None."""
    if expected is None or actual is None:
        return expected is actual
    return torch.allclose(
        actual, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()), equal_nan=True
    )
