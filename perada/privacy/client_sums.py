# SPDX-License-Identifier: Apache-2.0
"""The noise of clients in secure sums: each adds a part of it, on the sum's grid, before anybody sees its change.

Of n clients who are asked, t at least must be in the sum (:meth:`.SecureSums.least`), or nothing of it can be read.
Each clips its change to the norm S, rounds it towards zero to multiples of u = 2^−``fraction_bits``, and adds Gaussian
noise of the variance z²S²/t, rounded to the nearest multiple. So a sum of t of them or more has the noise of z, or
more, and z is what the ledgers count. Two things have to be shown: that rounding makes no change longer than S, and
that a sum of rounded Gaussians protects as a Gaussian does.

**Rounding of changes.** Of every number the size is rounded down, so the norm cannot grow. That the norm was at most S
before is not left to floating-point arithmetic: its computed value is raised by more than the sum of squares can be
wrong, and the factor is lowered by more than a product can be (:func:`clipped`).

**Rounding of noise.** In units of u, let σ = zS/(u√t) be the deviation of one client's noise, and a(ω) = exp(−σ²ω²/2)
sin(ω/2)/(ω/2) the characteristic function of N(0, σ²) + U with U uniform on [−1/2, 1/2]. A rounded Gaussian takes the
whole number k with the density of that variable at k. So by Poisson's summation its characteristic function is
Σ_m a(θ + 2πm), and that of the sum R of t independent ones is the t-th power of it. Let R' be N(0, tσ²) plus t − 1 such
uniforms, rounded; its characteristic function is Σ_m a(θ + 2πm)^t by the same argument. As clipped changes are whole
numbers v, v + R' is what v + N(0, tσ²) becomes if one adds the uniforms and rounds: post-processing, which costs
nothing. R differs from R' by the mixed terms of the power alone: products of a(θ + 2πm_i) whose m_i are not all equal,
so that Σ (m_i − mean)² ≥ (t − 1)/t ≥ 1/2, and the exponent is π²σ² at least. Their integral over θ is below
t exp(−π²σ²), which is 3·10⁻⁶⁹ t for σ = 4. All but 10⁻⁸⁰ of both lies within 20 deviations √t σ of zero. So R and R'
are within τ = 21 t^1.5 σ exp(−π²σ²) of one another in total variation, and d numbers within d τ, which adds at most
(1 + exp(ε)) d τ to δ: below 10⁻⁵⁰ for 10⁷ numbers, 100 clients and ε ≤ 10. A deviation below 4 units (:data:`LEAST`) is
refused. The draws themselves are floating-point numbers, here as everywhere in perada: see :func:`.secure_noise`.

Noise of further clients in the sum is added to R, and so is post-processing. If k of the t clients tell the server
their noise, or add none, what is left has the part (t − k)/t of the variance: the noise multiplier z √((t − k)/t).

Noise is drawn when a vector is made, and never kept: a vector leaves a client once. If the draws of one vector were
used in a second one, for another number of clients, the server could solve for them.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import State
from perada.privacy.clipping import check_bound, check_precision, with_noise
from perada.server.sums import SecureSums

LEAST = 4.0
"""Multiples of the grid that the deviation of one client's noise has at least."""
FARTHEST = 18.0
"""Deviations that no draw is away from zero: of 53 bits, one is at most 8.6, and half of four at most 17.2."""
VOTE = "client privacy/short"
"""Name of a client's vote on S, with adaptive clipping, among the tensors of its change."""


def floating_pairs(update: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The floating tensors that are sent, each with what was received in its place.

    A tensor that was not received, or is in half precision, where rounding would undo what is proved of the sum, or
    none at all, is a ValueError.
    """
    found = {}
    for key, value in update.items():
        if key not in received:
            raise ValueError(f"{key!r} is sent but was not received, so that its change is unknown; leave it out")
        if value.is_floating_point():
            check_precision(key, value)
            found[key] = value.detach(), received[key].detach()
    if not found:
        raise ValueError("the clients send no floating tensors, so that there is nothing to protect; check the adapter")
    return found


def change_of(update: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> State:
    """The change of one client's floating tensors, in double precision on the CPU; errors as :func:`floating_pairs`."""
    pairs = floating_pairs(update, received)
    return {key: own.to("cpu", torch.float64) - given.to("cpu", torch.float64) for key, (own, given) in pairs.items()}


def clipped(change: State, max_norm: float, secure: SecureSums) -> tuple[State, float]:
    """A change of one client as multiples of the grid (int64), whose norm is at most S, and its norm before.

    δ ← δ · min(1, S / ‖δ‖), with the norm over all tensors together, each number then rounded towards zero. The norm of
    the result is at most S, exactly. One that is not finite, or has no finite norm, becomes no change, and NaN.

    A sum of d squares in double precision, in whatever order, is off by at most (d + 1) 2⁻⁵³ of itself (Higham 2002,
    section 4.2); the norm is raised by more than that, and the factor lowered by more than a product can be off.
    """
    check_bound(max_norm)
    parts = [torch.linalg.vector_norm(value) for value in change.values()]
    norm = float(torch.stack(parts).square().sum().sqrt())
    if not math.isfinite(norm):
        return {key: torch.zeros_like(value, dtype=torch.int64) for key, value in change.items()}, math.nan
    numbers = sum(value.numel() for value in change.values())
    longest = norm * (1 + (numbers + 64) * 2.0**-52)
    factor = min(1.0, max_norm / longest * (1 - 2.0**-50)) if longest > max_norm else 1.0
    factor *= 2.0**secure.fraction_bits  # a power of two, by which products stay as exact
    return {key: (value * factor).trunc().to(torch.int64) for key, value in change.items()}, norm


def whole_noise(shape: torch.Size, deviation: float, source: torch.Generator | None) -> Tensor:
    """Gaussian noise of a ``deviation`` in units of the grid, rounded to whole numbers (int64); for 0, none is drawn.

    ``source`` is a generator on the CPU, ``None`` the cryptographic one.
    """
    return with_noise(torch.zeros(shape, dtype=torch.float64), deviation, source).round().to(torch.int64)


def example_of(sent: Mapping[str, Tensor], adaptive: bool) -> State:
    """The shapes of what a client adds to a sum, where it sends such tensors (no client axis), in the sum's dtype."""
    found = {key: torch.zeros(value.shape).double() for key, value in sent.items() if value.is_floating_point()}
    return found | ({VOTE: torch.zeros(()).double()} if adaptive else {})


def check_grid(secure: SecureSums, size: float, deviation: float, sites: int, what: str) -> None:
    """Refuse, by a ValueError, noise that the grid is too coarse for, or a sum that would wrap around.

    The ``size`` is the largest that a number has without noise, the ``deviation`` that of one client's noise, both as
    real numbers.
    """
    units = math.ldexp(deviation, secure.fraction_bits)
    if 0 < units < LEAST:
        bits = secure.fraction_bits + math.ceil(math.log2(LEAST / units))
        raise OptionError(
            f"client_privacy: the noise in {what} of one of {sites} clients has the deviation {deviation:.3g}, "
            f"{units:.3g} multiples of 2^-{secure.fraction_bits}, and rounding needs {LEAST:g}; give "
            f"secure_sums.fraction_bits={bits} or more, or a larger max_norm",
            name="client_privacy",
        )
    if size + FARTHEST * deviation >= secure.limit(sites):
        raise OptionError(
            f"client_privacy: {what} of one of {sites} clients may be {size + FARTHEST * deviation:.3g}, and "
            f"fraction_bits={secure.fraction_bits} leaves room below {secure.limit(sites):.3g}; give fewer bits, or a "
            "smaller max_norm or noise_multiplier",
            name="client_privacy",
        )
