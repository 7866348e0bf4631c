# SPDX-License-Identifier: Apache-2.0
"""Server rules that average the products s·B·A that LoRA adds to the weights, instead of B and A separately.

s·mean(B)·mean(A) is not the mean of the products s·B·A. A :class:`FactorPair` (B, A) represents its product, which is
as large as the layer's weight and is never formed here. A sum of products is one product of concatenated factors. The
norm and the singular values of a product are those of a small matrix, made from the triangular factors of two QR
decompositions. Everything is computed in float64 on the CPU.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_number
from perada.core.states import Factors, State
from perada.server.aggregate import Aggregation, ComposedRule, ServerRule, Updates


class FactorPair(NamedTuple):
    """A pair of LoRA factors, which represents their product B·A (..., out, in).

    Attributes:
        up: B, of shape (..., out, r).
        down: A, of shape (..., r, in).
    """

    up: Tensor
    down: Tensor


def client_pairs(up: Tensor, down: Tensor) -> list[FactorPair]:
    """Split the stacked factors of a layer into one pair for each of C clients, in float64 on the CPU.

    Args:
        up: B of each client in PEFT's layout: (C, out, r), or (C, out, r/g, 1, 1) for a convolution with g groups.
        down: A of each client in PEFT's layout: (C, r, in), or (C, r, in/g, height, width).

    Returns:
        A pair for each client, whose leading axis is that of the g groups: B is (g, out/g, r/g) and A is (g, r/g, in),
        where ``in`` counts the weights of a kernel.
    """
    ups = _as_matrices(up)  # (C, out, r/g)
    downs = _as_matrices(down)  # (C, r, in)
    # A convolution with g groups has r/g columns in B but all r rows in A.
    groups = downs.shape[1] // ups.shape[2]
    pairs = []
    for client_up, client_down in zip(ups, downs, strict=True):
        grouped_up = client_up.unflatten(0, (groups, -1))
        grouped_down = client_down.unflatten(0, (groups, -1))
        pairs.append(FactorPair(grouped_up, grouped_down))
    return pairs


def _as_matrices(factor: Tensor) -> Tensor:
    """Return factors (C, rows, ...) as matrices (C, rows, columns), in float64 on the CPU."""
    return factor.detach().to("cpu", torch.float64).flatten(2)


def weighted_sum(pairs: Sequence[FactorPair], weights: Sequence[float]) -> FactorPair:
    """Compute the weighted sum of the pairs' products, as one pair.

    Args:
        pairs: Pairs whose products are summed; their ranks may differ.
        weights: Weight of each pair, >= 0.

    Returns:
        A pair whose rank is the sum of all ranks.

    >>> first = FactorPair(torch.ones(2, 1), torch.ones(1, 3))
    >>> second = FactorPair(torch.ones(2, 2), torch.ones(2, 3))
    >>> total = weighted_sum([first, second], [1.0, 4.0])
    >>> total.up.shape, (total.up @ total.down)[0]
    (torch.Size([2, 3]), tensor([9., 9., 9.]))
    """
    ups = []
    downs = []
    for pair, weight in zip(pairs, weights, strict=True):
        # Half of the weight goes to each factor, so that neither becomes much smaller than the other.
        root = math.sqrt(weight)
        ups.append(root * pair.up)
        downs.append(root * pair.down)
    return FactorPair(torch.cat(ups, -1), torch.cat(downs, -2))


def product_norm(pair: FactorPair) -> float:
    """Return the Frobenius norm of a pair's product."""
    # ‖B·A‖ = ‖R_B·R_Aᵀ‖, since the orthogonal factors of the QR decompositions do not change the norm.
    up_r = torch.linalg.qr(pair.up).R
    down_r = torch.linalg.qr(pair.down.mT).R
    return float((up_r @ down_r.mT).norm())


def product_difference(minuend: FactorPair, subtrahend: FactorPair) -> FactorPair:
    """Compute the difference of two products, as one pair whose rank is the sum of theirs."""
    up = torch.cat([minuend.up, subtrahend.up], -1)
    down = torch.cat([minuend.down, -subtrahend.down], -2)
    return FactorPair(up, down)


def mean_factors(pairs: Sequence[FactorPair], weights: Sequence[float]) -> FactorPair:
    """Average B and A separately, for pairs of equal rank.

    This is FedAvg of LoRA's factors. The product of the means is not the mean of the products: see :func:`residual`.
    """
    up = _weighted_mean([pair.up for pair in pairs], weights)
    down = _weighted_mean([pair.down for pair in pairs], weights)
    return FactorPair(up, down)


def _weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute the mean of tensors of equal shape with weights that sum to one."""
    terms = [weight * value for weight, value in zip(weights, tensors, strict=True)]
    return torch.stack(terms).sum(0)


def residual(pairs: Sequence[FactorPair], weights: Sequence[float]) -> FactorPair:
    """Compute mean(B·A) − mean(B)·mean(A), as one pair, with weights that sum to one.

    It equals the covariance Σ w_m (B_m − mean(B)) (A_m − mean(A)), which is computed here because it does not subtract
    large numbers that are nearly equal.
    """
    mean = mean_factors(pairs, weights)
    deviations = [FactorPair(pair.up - mean.up, pair.down - mean.down) for pair in pairs]
    return weighted_sum(deviations, weights)


def lora_residual(factors: Iterable[Factors], updates: Updates, weights: Tensor) -> float:
    """Compute the relative error of averaging B and A separately: ‖mean(s·B·A) − s·mean(B)·mean(A)‖ / ‖mean(s·B·A)‖.

    The norms are over all layers together. A collective: all ranks must call this.

    Args:
        factors: Names of each layer's factors. Layers of which clients do not send both are skipped.
        updates: Tensors that the C clients sent.
        weights: Weight (C,) of each client; they sum to one.

    Returns:
        The ratio; 0 if all products are 0.
    """
    client_weights = weights.tolist()
    error = _RelativeError()
    for layer in factors:
        if layer.down in updates and layer.up in updates:
            # The order of these two collectives must be the same on all ranks.
            up = updates.gathered(layer.up)
            down = updates.gathered(layer.down)
            pairs = client_pairs(up, down)
            error.add(
                difference=residual(pairs, client_weights),
                reference=weighted_sum(pairs, client_weights),
                scale=layer.scale,
            )
    return error.value


class _RelativeError:
    """Accumulates ‖difference‖ / ‖reference‖ over layers, with the norms over all layers together."""

    def __init__(self) -> None:
        self._squared_error = 0.0
        self._squared_norm = 0.0

    def add(self, *, difference: FactorPair, reference: FactorPair, scale: float) -> None:
        """Add a layer.

        Args:
            difference: The layer's deviation from the reference.
            reference: What the deviation is relative to.
            scale: The layer's s, which multiplies both products.
        """
        self._squared_error += (scale * product_norm(difference)) ** 2
        self._squared_norm += (scale * product_norm(reference)) ** 2

    @property
    def value(self) -> float:
        """The ratio over all layers that were added; 0 if all references are 0."""
        if not self._squared_norm:
            return 0.0
        return math.sqrt(self._squared_error / self._squared_norm)


def truncate(pair: FactorPair, rank: int, previous_down: Tensor) -> FactorPair:
    """Compute the best approximation of a product by one of lower rank, from its singular value decomposition U·S·Vᵀ.

    B is U·S and A is Vᵀ, truncated to the largest ``rank`` singular values. These are in descending order, so the first
    q columns of B and rows of A are in turn the best approximation of rank q. If there are fewer than ``rank`` singular
    values, the remaining columns of B and rows of A are zero.

    A decomposition leaves two things open, which are fixed here so that rounding errors do not decide what clients
    train next. The sign of each row of A is chosen such that its entry of largest magnitude is positive. Rows of A
    whose singular value is 0 (up to rounding) may be any that are orthogonal to the others; they continue the rows of
    the previous round.

    Args:
        pair: The product to approximate, (..., out, in).
        rank: Rank r of the result.
        previous_down: A (..., r, in) of the previous round.

    Returns:
        B (..., out, r) and A (..., r, in).
    """
    # B·A = Q_B·(R_B·R_Aᵀ)·Q_Aᵀ has the singular values of the small matrix R_B·R_Aᵀ.
    up_q, up_r = torch.linalg.qr(pair.up)
    down_q, down_r = torch.linalg.qr(pair.down.mT)
    u, singular_values, vt = torch.linalg.svd(up_r @ down_r.mT, full_matrices=False)
    num_values = min(rank, singular_values.shape[-1])

    # Singular values below the decomposition's rounding error count as 0, so their rows of A can be chosen freely. This
    # is the usual threshold of a numerical rank, max(m, n) · ε · σ_max, with a bound ‖R_B‖·‖R_A‖ for σ_max.
    epsilon = torch.finfo(singular_values.dtype).eps
    relative_error = max(*up_q.shape, *down_q.shape) * epsilon
    magnitude = torch.linalg.matrix_norm(up_r) * torch.linalg.matrix_norm(down_r)
    is_zero = singular_values <= relative_error * magnitude.unsqueeze(-1)
    free_rows = is_zero[..., :num_values].unsqueeze(-1)  # (..., q, 1)
    free_columns = free_rows.mT

    scaled_u = (u * singular_values.unsqueeze(-2))[..., :num_values]
    up = up_q @ scaled_u.where(~free_columns, 0)
    down = vt[..., :num_values, :] @ down_q.mT

    # QR orthogonalises the rows one after another. Rows that are not free come first, since their singular values are
    # the largest, and are orthogonal already: the free ones are made orthogonal to them.
    candidates = previous_down[..., :num_values, :].where(free_rows, down)
    orthogonal = torch.linalg.qr(candidates.mT).Q.mT
    down = orthogonal.where(free_rows, down)

    # Negating a column of B and the corresponding row of A leaves the product as it is.
    largest_entries = down.abs().argmax(-1, keepdim=True)
    signs = down.gather(-1, largest_entries).sign()
    up = up * signs.mT
    down = down * signs

    num_missing = rank - num_values
    padded_up = F.pad(up, (0, num_missing))
    padded_down = F.pad(down, (0, 0, 0, num_missing))
    return FactorPair(padded_up, padded_down)


def correct_up(pairs: Sequence[FactorPair], weights: Sequence[float], strength: float) -> FactorPair:
    """Correct the mean of B by a ridge regression such that its product with mean(A) is close to the mean product.

    B' minimises ‖mean(B·A) − B'·mean(A)‖² + λ·‖B' − mean(B)‖². With A for mean(A), the solution is
    B' = mean(B) + (mean(B·A) − mean(B)·A)·Aᵀ·(A·Aᵀ + λ·I)⁻¹.

    Args:
        pairs: The clients' factors, of equal rank.
        weights: Weight of each client; they sum to one.
        strength: λ, > 0.

    Returns:
        B' and mean(A).
    """
    mean = mean_factors(pairs, weights)
    # mean(B·A) − mean(B)·mean(A), as a pair whose product is never formed.
    error = residual(pairs, weights)
    rank = mean.down.shape[-2]
    identity = torch.eye(rank, dtype=mean.down.dtype)
    gram = mean.down @ mean.down.mT + strength * identity
    right_side = error.up @ (error.down @ mean.down.mT)
    # X·gram = right_side is solved as gram·Xᵀ = right_sideᵀ; the Gram matrix is symmetric.
    correction = torch.linalg.solve(gram, right_side.mT).mT
    return FactorPair(mean.up + correction, mean.down)


class _ProductRule(ComposedRule):
    """Base class of rules that merge the products of LoRA factors, both of which clients must send.

    All other tensors are aggregated by the inner rule. The metric ``updates/lora_error`` is
    ‖mean(s·B·A) − s·B'·A'‖ / ‖mean(s·B·A)‖ over all layers together, for the merged factors B' and A'.
    """

    needs_factors = True

    def __call__(self, aggregation: Aggregation) -> State:
        updates = aggregation.updates
        layers = []
        for layer in aggregation.factors:
            if layer.down in updates and layer.up in updates:
                layers.append(layer)
        if not layers:
            raise OptionError(
                f"server_rule={type(self).__name__} averages products of LoRA factors, but clients do not send both "
                "factors of any layer; choose server_rule='mean'",
                name="server_rule",
                value=type(self).__name__,
            )
        result = self._aggregate_others(aggregation, layers)
        weights = aggregation.weights.tolist()
        error = _RelativeError()
        for layer in layers:
            # The order of these two collectives must be the same on all ranks.
            up = updates.gathered(layer.up)
            down = updates.gathered(layer.down)
            pairs = client_pairs(up, down)
            previous_up = aggregation.previous[layer.up]
            previous_down = aggregation.previous[layer.down]
            # The global state is split into groups like a stack of one client.
            previous_pair = client_pairs(previous_up.unsqueeze(0), previous_down.unsqueeze(0))[0]

            merged = self._merge_factors(pairs, weights, previous_pair.down)
            result[layer.up] = _in_layout_of(previous_up, merged.up, up)
            result[layer.down] = _in_layout_of(previous_down, merged.down, down)

            mean_product = weighted_sum(pairs, weights)
            lost = product_difference(mean_product, merged)
            error.add(difference=lost, reference=mean_product, scale=layer.scale)
        aggregation.metrics["updates/lora_error"] = error.value
        # Tensors are in the order of the updates, as the other rules return them.
        return {name: result[name] for name in updates.names}

    def _aggregate_others(self, aggregation: Aggregation, layers: Iterable[Factors]) -> State:
        """Aggregate all tensors but the factors of ``layers`` by the inner rule."""
        factor_names = set()
        for layer in layers:
            factor_names.add(layer.down)
            factor_names.add(layer.up)
        all_clients = range(len(aggregation.weights))
        others = aggregation.updates.part(all_clients, without=factor_names)
        if not others.names:
            return {}
        return self._aggregate_inner(replace(aggregation, updates=others))

    @abstractmethod
    def _merge_factors(
        self, pairs: Sequence[FactorPair], weights: Sequence[float], previous_down: Tensor
    ) -> FactorPair:
        """Compute the factors of a layer's next global state.

        Args:
            pairs: The clients' factors, each with an axis of g groups in front.
            weights: Weight of each client; they sum to one.
            previous_down: A (g, r/g, in) of the previous round.
        """


def _in_layout_of(previous: Tensor, value: Tensor, sent: Tensor) -> Tensor:
    """Copy a factor into a tensor with the shape and strides of the previous state.

    The strides matter because the last bits of a convolution depend on the memory layout of its weight.

    Args:
        previous: The factor in the previous global state.
        value: Values of the new factor, of any shape with as many elements.
        sent: The factor as clients sent it, which gives the dtype and device.
    """
    result = torch.empty_like(previous, dtype=sent.dtype, device=sent.device)
    result.copy_(value.reshape(result.shape))
    return result


class SVD(_ProductRule):
    """Average the products of LoRA's factors and cut the mean back to rank r by singular values (FlexLoRA).

    Bai et al., NeurIPS 2024 (arXiv 2402.11505), whose server forms and decomposes the full weight. Here the factors of
    C clients are concatenated, and a matrix of at most C·r × C·r is decomposed. The result is the matrix of rank r
    closest to the mean, which is the mean itself if its rank is at most r. Of U·S·Vᵀ, B gets U·S and A gets Vᵀ, largest
    singular values first. The rows of A have length 1, so B receives gradients however small the product is. If the
    mean has a lower rank than r, as with clients of low ranks, the remaining rows of A are those of the previous round,
    made orthogonal to the others.

    As w's factors turn from round to round, a pull towards w of a state that clients keep (PerAda, Ditto) compares
    factors that mean different things. Source: [Bai et al., NeurIPS 2024](https://arxiv.org/abs/2402.11505).

    Args:
        aggregate: Rule for all other tensors, such as the head. Default: the mean.
    """

    def __init__(self, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)

    def _merge_factors(
        self, pairs: Sequence[FactorPair], weights: Sequence[float], previous_down: Tensor
    ) -> FactorPair:
        mean_product = weighted_sum(pairs, weights)
        rank = previous_down.shape[-2]
        return truncate(mean_product, rank, previous_down)


class LoRAFair(_ProductRule):
    """Average LoRA's factors, and correct the mean of B towards the mean of their products (LoRA-FAIR).

    Bian et al., ICCV 2025 (arXiv 2411.14961), equation 8, choose B' = mean(B) + ΔB such that B'·mean(A) resembles
    mean(B·A) by cosine similarity, with a penalty of λ ‖ΔB‖, and find it by SGD. Here ‖mean(B·A) − B'·mean(A)‖² +
    λ ‖ΔB‖² is minimised in the Frobenius norm: a ridge regression, which is solved exactly. The same λ may therefore
    pull more or less than theirs. A is the mean of the clients' A.

    Source: [Bian et al., ICCV 2025](https://arxiv.org/abs/2411.14961).

    Args:
        strength: λ, the pull of B' towards mean(B); the paper uses 0.01. A large value gives the means.
        aggregate: Rule for all other tensors, such as the head. Default: the mean.
    """

    def __init__(self, strength: float = 0.01, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("strength", strength, gt=0)
        self.strength = strength

    def _merge_factors(
        self, pairs: Sequence[FactorPair], weights: Sequence[float], previous_down: Tensor
    ) -> FactorPair:
        return correct_up(pairs, weights, self.strength)
