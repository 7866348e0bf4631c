# SPDX-License-Identifier: Apache-2.0
"""Clipping and noise of DP-SGD as functions of tensors, for the per-sample gradients of many clients at once.

Shapes: C clients, B rows of a padded batch. A gradient has shape (C, B, ...) and belongs to one parameter of the single
model; the mask (C, B) is true where a row is a real image. Two data sets are neighbours if one has one image more.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_number
from perada.core.states import State
from perada.privacy.sampling import secure_noise
from perada.server.aggregate import double

METHODS = ("flat", "per_layer", "automatic")
GAMMA = 0.01
"""The γ of ``automatic``, which keeps a zero gradient zero."""
COPIED = 2**24
"""Numbers that are copied in double precision at a time, for a sum."""


def factors_of(norms: State, mask: Tensor, max_norm: float, method: str = "flat") -> dict[str, Tensor]:
    """What to multiply each row's gradient with, so that no image has more than its share C in the sum.

    - ``flat``: min(1, C / ‖g‖), with the norm over all parameters (Abadi et al. 2016, algorithm 1).
    - ``per_layer``: the same for each of L parameters with its own norm, and the bound C / √L (McMahan et al. 2018,
      section 2.2).
    - ``automatic``: C / (‖g‖ + γ), with the norm over all parameters, whether it is large or small (AUTO-S of Bu et al.
      2023, https://arxiv.org/abs/2206.07136).

    An image whose gradient is not finite is left out, factor 0: else it alone would decide what the sum is.

    The norms and factors (C, B) are of each parameter and row. A row that is not in the mask, bool (C, B), has the
    factor 0, whatever stands there. A method or a bound that is not as above is a ValueError.
    """
    check_choice("method", method, METHODS)
    check_bound(max_norm)
    mask = mask & torch.stack([norm.isfinite() for norm in norms.values()]).all(0)
    if method == "per_layer":
        bound = max_norm / math.sqrt(len(norms))
        return {name: (_shrink(norm, bound) * mask).nan_to_num(0, 0, 0) for name, norm in norms.items()}
    joint = torch.stack([norm.square() for norm in norms.values()]).sum(dim=0).sqrt()
    factors = _shrink(joint, max_norm) if method == "flat" else max_norm / (joint + GAMMA)
    return dict.fromkeys(norms, (factors * mask).nan_to_num(0, 0, 0))


def summed_products(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """Σ_r f_r Σ_n b_rn a_rnᵀ (C, O, I) over each client's rows r, of a (C·B, N, I), b (C·B, N, O) and factors f (C, B).

    In double precision where the device has it, at most 64 rows at a time, fewer where they are long. So the part of a
    row is rounded by at most 64 N 2⁻⁵³ f_r Σ_n ‖a_rn‖‖b_rn‖ (Higham 2002, section 3.1).
    """
    (clients, rows), (_, positions, inputs), outputs = factors.shape, a.shape, b.shape[2]
    a, b = (left_out(x, factors).view(clients, rows, positions, -1) for x in (a, b))
    size = max(1, min(64, COPIED // max(1, clients * positions * (inputs + outputs))))
    total = double(a.new_zeros(clients, outputs, inputs))
    for start in range(0, rows, size):
        part_a, part_b, part_f = (double(x[:, start : start + size]) for x in (a, b, factors))
        part_b = part_b * part_f[..., None, None]
        total.baddbmm_(part_b.flatten(1, 2).transpose(1, 2), part_a.flatten(1, 2))
    return total


def wide(x: Tensor) -> Tensor:
    """In single precision at least."""
    return x.float() if x.dtype.itemsize < 4 else x


def left_out(rows: Tensor, factors: Tensor) -> Tensor:
    """``rows`` (C·B, ...) with zeros where the factor (C, B) is 0, whatever stands there."""
    wrong = factors.flatten() == 0
    if rows.device.type == "cpu" and not wrong.any():  # elsewhere to ask would be to wait
        return rows
    return rows.masked_fill(wrong.view(-1, *[1] * (rows.dim() - 1)), 0)


def check_bound(max_norm: float) -> None:
    """Refuse, by a ValueError, a bound that is not positive and finite."""
    check_number("max_norm", max_norm, gt=0, hint="usual values lie from 0.1 to 10")


def noisy_mean(
    summed: State,
    std: float | Sequence[float],
    expected_batch: Sequence[float],
    generators: Sequence[torch.Generator] | None,
    added: State | None = None,
) -> State:
    """Add each client's Gaussian noise to its sum, and divide by the batch size that was expected.

    The client c gets (sum + std · N(0, 1)) / expected_batch, the gradient of DP-SGD (Abadi et al. 2016, algorithm 1)
    when std = noise multiplier · bound. It is computed in double precision and rounded once, with the noise in it, as
    is what is ``added`` to the sum. Parameters take their noise in the order of their names, whatever that of the
    dictionary. The sums are ``{parameter: (C, ...)}``, such as of clipped gradients; the result has their order and
    dtypes. There is one ``std`` for all clients, or one for each. Without generators, one for each client, a
    cryptographic one is drawn from.

    Raises:
        ValueError: If there are not C of them, two clients share a generator, a number is out of its range, or a sum is
            in half precision.
    """
    clients = len(expected_batch)
    stds = list(std) if isinstance(std, Sequence) else [std] * clients
    sources = [None] * clients if generators is None else list(generators)
    if {len(stds), len(sources), *map(len, summed.values())} != {clients}:
        raise ValueError(f"there are not as many deviations, generators and sums as {clients} clients; give each one")
    if generators is not None and len({id(source) for source in generators}) < clients:
        raise ValueError("two clients share a generator: their noise would depend on one another; give each its own")
    for deviation, size in zip(stds, expected_batch, strict=True):
        check_number("std", deviation, ge=0)
        check_number("expected_batch", size, gt=0, hint="a client without images cannot take part")
    for name, value in summed.items():
        check_precision(name, value)
    result = {name: torch.empty_like(value) for name, value in summed.items()}
    for name in sorted(summed):
        for client, size in enumerate(expected_batch):
            more = None if added is None else added[name][client]
            noisy = with_noise(summed[name][client], stds[client], sources[client], more)
            result[name][client] = noisy / size
    return result


def with_noise(row: Tensor, std: float, source: torch.Generator | None, added: Tensor | None = None) -> Tensor:
    """``row`` + ``added`` + std · N(0, 1), in double precision: to be rounded by whoever stores it.

    ``source`` is a generator on the CPU, ``None`` the cryptographic one; with the deviation 0 nothing is drawn.
    """
    exact = double(row) if added is None else double(row) + double(added)
    if not std:
        return exact
    noise = secure_noise(row) if source is None else torch.randn(row.shape, generator=source, dtype=row.dtype)
    return exact + std * noise.to(exact)


def check_precision(name: str, value: Tensor) -> None:
    """Refuse what is in half precision, where sums are rounded by more than the noise may be."""
    if value.dtype.itemsize < 4:
        raise OptionError(
            f"privacy: {name!r} is {value.dtype}, in which the noise would be rounded away; train it in float32 "
            "(frozen weights may stay as they are, and precision='bf16-mixed' computes in half precision)",
            name="privacy",
        )


def _shrink(norms: Tensor, bound: float) -> Tensor:
    """min(1, bound / norm), with Opacus's 1e-6 for a zero gradient."""
    return (bound / (norms + 1e-6)).clamp(max=1.0)
