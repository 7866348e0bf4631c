# SPDX-License-Identifier: Apache-2.0
"""The noise of clients in secure sums: each client adds its share, rounded to the sum's grid, before masking.

Of n invited clients, at least t must be in the sum (:meth:`.SecureSums.least`), or it cannot be decrypted. Each client
clips its change to the norm S, rounds it towards zero to multiples of u = 2^−``fraction_bits``, and adds Gaussian noise
of variance z²S²/t, rounded to the nearest multiple. A sum of t or more clients thus has at least the noise of z, which
is what the ledgers count. Two things must be shown: that no change is longer than S after rounding, and that a sum of
rounded Gaussians protects like a Gaussian.

**Rounding of changes.** The magnitude of every number is rounded down, so the norm cannot grow. Floating-point errors
cannot make it longer than S before that: its computed value is raised by more than the error of a sum of squares, and
the factor is lowered by more than the error of a product (:func:`clip_to_grid`).

**Rounding of noise.** In units of u, let σ = zS/(u√t) be the deviation of one client's noise, and a(ω) = exp(−σ²ω²/2)
sin(ω/2)/(ω/2) the characteristic function of N(0, σ²) + U with U uniform on [−1/2, 1/2]. A rounded Gaussian takes the
integer k with the density of that variable at k. So by Poisson's summation its characteristic function is
Σ_m a(θ + 2πm), and that of the sum R of t independent ones is the t-th power of it. Let R' be N(0, tσ²) plus t − 1 such
uniforms, rounded; its characteristic function is Σ_m a(θ + 2πm)^t by the same argument. As clipped changes are
integers v, v + R' is what v + N(0, tσ²) becomes if one adds the uniforms and rounds: post-processing, which costs
nothing. R differs from R' only by the mixed terms of the power: products of a(θ + 2πm_i) whose m_i are not all equal,
so that Σ (m_i − mean)² ≥ (t − 1)/t ≥ 1/2, and the exponent is π²σ² at least. Their integral over θ is below
t exp(−π²σ²), which is 3·10⁻⁶⁹ t for σ = 4. All but 10⁻⁸⁰ of both lies within 20 deviations √t σ of zero. So R and R'
are within τ = 21 t^1.5 σ exp(−π²σ²) of one another in total variation, and d numbers within d τ, which adds at most
(1 + exp(ε)) d τ to δ: below 10⁻⁵⁰ for 10⁷ numbers, 100 clients and ε ≤ 10. A deviation below 4 units is rejected
(:data:`MIN_GRID_STEPS`). The draws themselves are floating-point numbers, here as everywhere in perada: see
:func:`.secure_noise`.

The noise of further clients in the sum is added to R, which is post-processing too. If k of the t clients reveal their
noise to the server, or add none, the rest has the share (t − k)/t of the variance: the noise multiplier z √((t − k)/t).

Noise is drawn when a vector is made and is not stored: a vector leaves a client once. If the same draws were used in a
second vector, for another number of clients, the server could solve for them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import State
from perada.privacy.clipping import check_bound, check_precision, with_noise
from perada.server.sums import SecureSums

MIN_GRID_STEPS = 4.0
"""Smallest standard deviation of one client's noise, in units of the grid."""
MAX_DRAW = 18.0
"""Bound of every draw, in standard deviations: a draw of 53 bits is at most 8.6, half the sum of four at most 17.2."""
VOTE = "client privacy/short"
"""Name of a client's vote on S, with adaptive clipping, among the tensors of its change."""


class GridChange(NamedTuple):
    """A clipped change of one client.

    Attributes:
        integers: Its tensors in units of the grid (int64).
        norm: Norm of the change before clipping; NaN if the change is not finite.
    """

    integers: State
    norm: float


def floating_names(update: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the floating-point tensors that a client sends.

    Args:
        update: Tensors that the client sends.
        received: Tensors that it had received.

    Raises:
        ValueError: If a tensor was not received, if one is in half precision, whose rounding would void the guarantee,
            or if there is no floating-point tensor.
    """
    names = []
    for name, value in update.items():
        if name not in received:
            raise ValueError(f"{name!r} is sent but was not received, so its change is unknown; do not send it")
        if value.is_floating_point():
            check_precision(name, value, "client_privacy")
            names.append(name)
    if not names:
        raise ValueError(
            "the clients send no floating-point tensors, so there is nothing to protect; check the adapter"
        )
    return names


def exact_change(update: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> State:
    """Return the change of one client's floating-point tensors, in double precision on the CPU.

    Raises:
        ValueError: As :func:`floating_names` does.
    """
    change: State = {}
    for name in floating_names(update, received):
        sent = update[name].detach().to("cpu", torch.float64)
        change[name] = sent - received[name].detach().to("cpu", torch.float64)
    return change


def clip_to_grid(change: State, max_norm: float, secure: SecureSums) -> GridChange:
    """Clip the change of one client to the norm S and round it to the grid of a secure sum.

    δ ← δ · min(1, S / ‖δ‖), with the norm over all tensors together, after which each element is rounded towards zero.
    The exact norm of the result is at most S. A change that is not finite, or whose norm is not, becomes zero.

    In double precision, a sum of d squares in any order has a relative error of at most (d + 1) 2⁻⁵³ (Higham 2002,
    section 4.2). The norm is raised by more than that, and the factor is lowered by more than the error of a product.

    Args:
        change: Change of each tensor, in double precision.
        max_norm: Maximum norm S.
        secure: Options of the sum, whose grid has the spacing 2^−``fraction_bits``.
    """
    check_bound(max_norm)
    tensor_norms = torch.stack([torch.linalg.vector_norm(value) for value in change.values()])
    norm = float(tensor_norms.square().sum().sqrt())
    if not math.isfinite(norm):
        zeros = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in change.items()}
        return GridChange(zeros, math.nan)
    numel = sum(value.numel() for value in change.values())
    norm_bound = norm * (1 + (numel + 64) * 2.0**-52)
    factor = 1.0
    if norm_bound > max_norm:
        factor = min(1.0, max_norm / norm_bound * (1 - 2.0**-50))
    # Multiplying by a power of two is exact.
    factor *= 2.0**secure.fraction_bits
    integers = {name: (value * factor).trunc().to(torch.int64) for name, value in change.items()}
    return GridChange(integers, norm)


def integer_noise(shape: torch.Size, deviation: float, generator: torch.Generator | None) -> Tensor:
    """Return Gaussian noise that is rounded to integers (int64); nothing is drawn for a deviation of 0.

    Args:
        shape: Shape of the tensor.
        deviation: Standard deviation in units of the grid.
        generator: Generator on the CPU; None for the cryptographic generator.
    """
    zeros = torch.zeros(shape, dtype=torch.float64)
    return with_noise(zeros, deviation, generator).round().to(torch.int64)


def example_contribution(sent: Mapping[str, Tensor], adaptive: bool) -> State:
    """Return zeros with the names and shapes of a client's contribution to a sum.

    Args:
        sent: Tensors that the client sends, without a client axis.
        adaptive: Whether clipping is adaptive, so that the contribution includes a vote.
    """
    example: State = {}
    for name, value in sent.items():
        if value.is_floating_point():
            example[name] = torch.zeros(value.shape).double()
    if adaptive:
        example[VOTE] = torch.zeros(()).double()
    return example


def check_grid(secure: SecureSums, magnitude: float, deviation: float, sites: int, what: str) -> None:
    """Raise a ValueError if the grid of a sum is too coarse for the noise, or if the sum could overflow.

    Args:
        secure: Options of the sum.
        magnitude: Largest magnitude of an element without noise.
        deviation: Standard deviation of one client's noise.
        sites: Number of clients in the sum.
        what: Name of the summed quantity, for the message.
    """
    grid_steps = math.ldexp(deviation, secure.fraction_bits)
    if 0 < grid_steps < MIN_GRID_STEPS:
        bits = secure.fraction_bits + math.ceil(math.log2(MIN_GRID_STEPS / grid_steps))
        raise OptionError(
            f"client_privacy: the noise in {what} of one of {sites} clients has the standard deviation "
            f"{deviation:.3g}, {grid_steps:.3g} multiples of 2^-{secure.fraction_bits}, but rounding requires at "
            f"least {MIN_GRID_STEPS:g}; set secure_sums.fraction_bits={bits} or more, or a larger max_norm",
            name="client_privacy",
        )
    largest = magnitude + MAX_DRAW * deviation
    if largest >= secure.limit(sites):
        raise OptionError(
            f"client_privacy: {what} of one of {sites} clients may reach {largest:.3g}, but "
            f"fraction_bits={secure.fraction_bits} only leaves room below {secure.limit(sites):.3g}; use fewer bits, "
            "or a smaller max_norm or noise_multiplier",
            name="client_privacy",
        )
