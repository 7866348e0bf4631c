# SPDX-License-Identifier: Apache-2.0
"""Clipping and noise of DP-SGD as functions of tensors, for the per-sample gradients of many clients.

Shapes: C clients, B rows of a padded batch. A gradient (C, B, ...) belongs to one parameter of the single model. A mask
(C, B) is true for rows that are real images. Two data sets are neighbours if one has one image more.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_number
from perada.core.states import State, double, per_client
from perada.core.text import dtype_name
from perada.privacy.sampling import secure_noise

METHODS = ("flat", "per_layer", "automatic")
GAMMA = 0.01
"""The γ of ``automatic``, which keeps a zero gradient zero."""
MAX_COPIED = 2**24
"""Maximum number of elements that are converted to double precision at a time, for a sum."""
MAX_ROWS = 64
"""Maximum number of a client's rows in one matrix product, on which the bound of :func:`sum_outer_products` rests."""


def clipping_factors(norms: State, mask: Tensor, max_norm: float, method: str = "flat") -> dict[str, Tensor]:
    """Return the factors that scale each row's gradient such that no image contributes more than C to the sum.

    - ``flat``: min(1, C / ‖g‖), with the norm over all parameters (Abadi et al. 2016, algorithm 1).
    - ``per_layer``: the same for each of L parameters with its own norm, and the bound C / √L (McMahan et al. 2018,
      section 2.2).
    - ``automatic``: C / (‖g‖ + γ), with the norm over all parameters; small gradients are scaled up (AUTO-S of Bu et
      al. 2023, https://arxiv.org/abs/2206.07136).

    An image whose gradient is not finite gets the factor 0, since it would make the sum of all images not finite.

    Args:
        norms: Norm (C, B) of each row's gradient, by parameter.
        mask: Mask (C, B) of the real rows. The others get the factor 0, even if their norms are not finite.
        max_norm: The clipping bound C.
        method: ``flat``, ``per_layer`` or ``automatic``.

    Returns:
        Factors (C, B) by parameter.

    Raises:
        ValueError: If the method is unknown or the bound is not positive and finite.
    """
    check_choice("method", method, METHODS)
    check_bound(max_norm)
    norms_of_parameters = torch.stack(list(norms.values()))
    is_finite = norms_of_parameters.isfinite().all(0)
    mask = mask & is_finite
    if method == "per_layer":
        layer_bound = max_norm / math.sqrt(len(norms))
        factors_of_layers = {}
        for name, norm in norms.items():
            factors_of_layers[name] = _zero_outside(mask, _factors_to_bound(norm, layer_bound))
        return factors_of_layers
    joint_norm = norms_of_parameters.square().sum(dim=0).sqrt()
    if method == "flat":
        factors = _factors_to_bound(joint_norm, max_norm)
    else:
        factors = max_norm / (joint_norm + GAMMA)
    return dict.fromkeys(norms, _zero_outside(mask, factors))


def _zero_outside(mask: Tensor, factors: Tensor) -> Tensor:
    """Return the factors (C, B) with 0 where the mask (C, B) is false."""
    # The product with 0 is NaN for a factor that is NaN.
    return (factors * mask).nan_to_num(0, 0, 0)


def _factors_to_bound(norms: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm); a norm of 0 is avoided by adding 1e-6, as Opacus does."""
    return (bound / (norms + 1e-6)).clamp(max=1.0)


def sum_outer_products(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """Return Σ_r f_r Σ_n b_rn a_rnᵀ over each client's rows r, with N positions n.

    Rows are summed in blocks of at most 64, in double precision where the device supports it. The contribution of a row
    therefore has a rounding error of at most 64 N 2⁻⁵³ f_r Σ_n ‖a_rn‖‖b_rn‖ (Higham 2002, section 3.1).

    Args:
        a: Inputs (C·B, N, I).
        b: Gradients (C·B, N, O) of the outputs.
        factors: Factor f (C, B) of each row. A row with factor 0 is left out, even if it is not finite.

    Returns:
        The sums (C, O, I).
    """
    clients, rows = factors.shape
    _, positions, inputs = a.shape
    outputs = b.shape[2]
    a = _zero_excluded_rows(a, factors).view(clients, rows, positions, inputs)
    b = _zero_excluded_rows(b, factors).view(clients, rows, positions, outputs)
    # Fewer rows if they are long, which limits the memory of the copies in double precision.
    affordable_rows = MAX_COPIED // max(1, clients * positions * (inputs + outputs))
    block = max(1, min(MAX_ROWS, affordable_rows))
    total = double(a.new_zeros(clients, outputs, inputs))
    for start in range(0, rows, block):
        block_rows = slice(start, start + block)
        block_a = double(a[:, block_rows])
        block_b = double(b[:, block_rows])
        block_factors = double(factors[:, block_rows])
        weighted_b = block_b * block_factors[..., None, None]
        # One matrix product per client sums over rows and positions: (O, B·N) times (B·N, I).
        b_matrix = weighted_b.flatten(1, 2).transpose(1, 2)
        a_matrix = block_a.flatten(1, 2)
        total.baddbmm_(b_matrix, a_matrix)
    return total


def _zero_excluded_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Return rows (C·B, ...) with zeros where the factor (C, B) is 0, since NaN times 0 would be NaN."""
    is_excluded = factors.flatten() == 0
    # any() would make the host wait for a GPU, so only a CPU asks.
    if rows.device.type == "cpu" and not is_excluded.any():
        return rows
    return rows.masked_fill(per_client(is_excluded, rows), 0)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor of half precision to float32; return any other unchanged."""
    if x.dtype.itemsize < 4:
        return x.float()
    return x


def check_bound(max_norm: float) -> None:
    """Raise a ValueError if a clipping bound is not positive and finite."""
    check_number("max_norm", max_norm, gt=0, hint="typical values are 0.1 to 10")


def noisy_mean(
    summed: State,
    std: float | Sequence[float],
    expected_batch: Sequence[float],
    generators: Sequence[torch.Generator] | None,
    added: State | None = None,
) -> State:
    """Add each client's Gaussian noise to its sum, and divide by the expected batch size.

    The result of a client is (sum + std · N(0, 1)) / expected_batch. This is the gradient of DP-SGD (Abadi et al. 2016,
    algorithm 1) if std = noise multiplier · bound. It is computed in double precision and rounded once, after the noise
    was added.

    Args:
        summed: Sums (C, ...) by parameter, such as sums of clipped gradients.
        std: Standard deviation of the noise: one number for all clients, or one for each.
        expected_batch: Expected batch size of each client.
        generators: Generator of each client's noise, on the CPU; None for the cryptographic generator.
        added: Tensors (C, ...) that are added to the sums before rounding.

    Returns:
        The noisy means (C, ...), in the order and dtypes of ``summed``.

    Raises:
        ValueError: If the arguments are for different numbers of clients, two clients share a generator, a number is
            out of range, or a sum is in half precision.
    """
    clients = len(expected_batch)
    stds = list(std) if isinstance(std, Sequence) else [std] * clients
    sources: list[torch.Generator | None] = [None] * clients
    if generators is not None:
        sources = list(generators)
    lengths = {len(stds), len(sources)}
    for value in summed.values():
        lengths.add(len(value))
    if lengths != {clients}:
        raise ValueError(
            "the numbers of standard deviations, generators and sums must be that of the clients, "
            f"{clients}; pass one of each per client"
        )
    if generators is not None and len({id(source) for source in generators}) < clients:
        raise ValueError(
            "two clients share a generator, so their noise would be correlated; pass a separate generator for each"
        )
    for deviation, size in zip(stds, expected_batch, strict=True):
        check_number("std", deviation, ge=0)
        check_number("expected_batch", size, gt=0, hint="a client without images cannot take part")
    for name, value in summed.items():
        check_precision(name, value, "privacy")
    result = {name: torch.empty_like(value) for name, value in summed.items()}
    # Noise is drawn in the order of names, so that it does not depend on the order of the dictionary.
    for name in sorted(summed):
        for client, size in enumerate(expected_batch):
            addend = None if added is None else added[name][client]
            noisy = with_noise(summed[name][client], stds[client], sources[client], addend)
            result[name][client] = noisy / size
    return result


def with_noise(values: Tensor, std: float, generator: torch.Generator | None, added: Tensor | None = None) -> Tensor:
    """Return ``values`` + ``added`` + std · N(0, 1) in double precision, not yet rounded to the dtype of ``values``.

    Args:
        values: Tensor of any shape.
        std: Standard deviation of the noise; nothing is drawn if it is 0.
        generator: Generator on the CPU; None for the cryptographic generator.
        added: Tensor of the same shape; None for 0.
    """
    exact = double(values)
    if added is not None:
        exact = exact + double(added)
    if not std:
        return exact
    if generator is None:
        noise = secure_noise(values)
    else:
        noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    return exact + std * noise.to(exact)


def check_precision(name: str, value: Tensor, option_names: str) -> None:
    """Raise a ValueError if a tensor is in half precision, whose rounding errors may be larger than the noise.

    Args:
        name: Name of the tensor.
        value: The tensor.
        option_names: The options that request privacy, for the message.
    """
    if value.dtype.itemsize < 4:
        raise OptionError(
            f"{option_names}: {name!r} is {dtype_name(value.dtype)}, where rounding would swallow the noise; train it "
            "in float32 (frozen weights may stay as they are, and precision='bf16-mixed' computes in half precision)",
            name=option_names,
        )
