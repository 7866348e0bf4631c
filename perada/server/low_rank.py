# SPDX-License-Identifier: Apache-2.0
"""Server rules that average what LoRA's factors add to the weights, s·B·A, and not B and A by name.

s·mean(B)·mean(A) is not the mean of the s·B·A. A *pair* is (B, A), of shapes (..., out, r) and (..., r, in), and stands
for its product (..., out, in), which is not formed here: a mean of products is a product of stacked factors, and its
norm and its singular values are those of the triangular factors of their QR. All is computed in float64 on the CPU.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_number
from perada.core.states import Factors, State
from perada.server.aggregate import Aggregation, ComposedRule, ServerRule, Updates

Pair = tuple[Tensor, Tensor]
"""B (..., out, r) and A (..., r, in)."""


def pairs_of(up: Tensor, down: Tensor) -> list[Pair]:
    """The pair of each of C clients, of factors (C, out, r, ...) and (C, r, in, ...) as PEFT shapes them.

    With g groups the B of a convolution is (C, out, r/g, 1, 1): each group is a pair of its own, of rank r/g.
    """
    ups, downs = (value.detach().to("cpu", torch.float64).flatten(2) for value in (up, down))
    groups = downs.shape[1] // ups.shape[2]
    return [(b.unflatten(0, (groups, -1)), a.unflatten(0, (groups, -1))) for b, a in zip(ups, downs, strict=True)]


def stacked(pairs: Sequence[Pair], weights: Sequence[float]) -> Pair:
    """The weighted sum of the pairs' products as one pair, whose rank is the sum of theirs, which may differ.

    Weights are at least 0. Their roots go into both factors.

    >>> b, a = stacked([(torch.ones(2, 1), torch.ones(1, 3)), (torch.ones(2, 2), torch.ones(2, 3))], [1.0, 4.0])
    >>> b.shape, (b @ a)[0]
    (torch.Size([2, 3]), tensor([9., 9., 9.]))
    """
    roots = [math.sqrt(weight) for weight in weights]
    ups, downs = zip(*pairs, strict=True)
    return (
        torch.cat([root * up for root, up in zip(roots, ups, strict=True)], -1),
        torch.cat([root * down for root, down in zip(roots, downs, strict=True)], -2),
    )


def norm(pair: Pair) -> float:
    """Frobenius norm of a pair's product."""
    up, down = pair
    return float((torch.linalg.qr(up)[1] @ torch.linalg.qr(down.mT)[1].mT).norm())


def minus(minuend: Pair, subtrahend: Pair) -> Pair:
    """The difference of two products as one pair."""
    return torch.cat([minuend[0], subtrahend[0]], -1), torch.cat([minuend[1], -subtrahend[1]], -2)


def by_name(pairs: Sequence[Pair], weights: Sequence[float]) -> Pair:
    """The means of the Bs and of the As, of one rank; their product is not the mean of the products."""
    ups, downs = zip(*pairs, strict=True)
    return _sum(ups, weights), _sum(downs, weights)


def residual(pairs: Sequence[Pair], weights: Sequence[float]) -> Pair:
    """mean(B·A) − mean(B)·mean(A) as one pair: the sum of w_m (B_m − mean(B)) (A_m − mean(A)), which cancels nothing.

    The weights sum to one.
    """
    up, down = by_name(pairs, weights)
    return stacked([(b - up, a - down) for b, a in pairs], weights)


def lora_residual(factors: Iterable[Factors], updates: Updates, weights: Tensor) -> float:
    """Compute ‖mean(s·B·A) − s·mean(B)·mean(A)‖ / ‖mean(s·B·A)‖ of what clients sent, over all layers together.

    Layers of which there are not both factors do not count. It is 0 where all products are 0.
    """
    shares = weights.tolist()
    squared_error = 0.0
    squared_norm = 0.0
    for down, up, scale in factors:
        if down in updates and up in updates:
            pairs = pairs_of(updates.gathered(up), updates.gathered(down))
            squared_error += (scale * norm(residual(pairs, shares))) ** 2
            squared_norm += (scale * norm(stacked(pairs, shares))) ** 2
    return math.sqrt(squared_error / squared_norm) if squared_norm else 0.0


def truncated(pair: Pair, rank: int, before: Tensor) -> Pair:
    """The best approximation of a product by one of rank at most ``rank``, by its singular value decomposition U·S·Vᵀ.

    It is B = U·S and A = Vᵀ, cut off behind the largest ``rank`` singular values, of which the largest come first; so
    the first q columns of B and rows of A are the best approximation of rank q. In each row of A, the number that is
    largest in magnitude is positive. Where there are fewer singular values, the rest of both is zero.

    Rows of A whose singular value is 0, but for rounding, may be any that are orthogonal to the others. They are those
    of A ``before`` (..., rank, in), made orthogonal: otherwise rounding would choose what is trained next.
    """
    (left_q, up_r) = torch.linalg.qr(pair[0])
    (right_q, down_r) = torch.linalg.qr(pair[1].mT)
    u, s, vt = torch.linalg.svd(up_r @ down_r.mT, full_matrices=False)
    kept = min(rank, s.shape[-1])
    noise = max(*left_q.shape, *right_q.shape) * torch.finfo(s.dtype).eps
    size = torch.linalg.matrix_norm(up_r) * torch.linalg.matrix_norm(down_r)
    free = (s <= noise * size.unsqueeze(-1)).unsqueeze(-1)[..., :kept, :]
    new_up = left_q @ (u * s.unsqueeze(-2))[..., :kept].where(~free.mT, 0)
    new_down = vt[..., :kept, :] @ right_q.mT
    new_down = torch.linalg.qr(before[..., :kept, :].where(free, new_down).mT)[0].mT.where(free, new_down)
    signs = new_down.gather(-1, new_down.abs().argmax(-1, keepdim=True)).sign()
    more = rank - kept
    return (
        F.pad(new_up * signs.mT, (0, more)),
        F.pad(new_down * signs, (0, 0, 0, more)),
    )


def corrected(pairs: Sequence[Pair], weights: Sequence[float], strength: float) -> Pair:
    """B' and mean(A), where B' minimises ‖mean(B·A) − B'·mean(A)‖² + ``strength`` · ‖B' − mean(B)‖² (a ridge).

    With A for mean(A), B' = mean(B) + (mean(B·A) − mean(B)·A)·Aᵀ·(A·Aᵀ + strength)⁻¹.
    """
    up, down = by_name(pairs, weights)
    residual_up, residual_down = residual(pairs, weights)
    gram = down @ down.mT + strength * torch.eye(down.shape[-2], dtype=down.dtype)
    return up + torch.linalg.solve(gram, (residual_up @ (residual_down @ down.mT)).mT).mT, down


def _sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)


class _OnProducts(ComposedRule):
    """A rule on the products of LoRA's factors, of which clients must send both; all else is the inner rule's.

    ``updates/lora_error`` in the metrics is ‖mean(s·B·A) − s·B'·A'‖ / ‖mean(s·B·A)‖ over all layers together, for the
    result (B', A').
    """

    needs_factors = True

    def __call__(self, aggregation: Aggregation) -> State:
        factors = [
            pair for pair in aggregation.factors if pair.down in aggregation.updates and pair.up in aggregation.updates
        ]
        if not factors:
            raise OptionError(
                f"server_rule={type(self).__name__} averages products of LoRA's factors, and clients send no pair of "
                "them; choose server_rule='mean'",
                name="server_rule",
                value=type(self).__name__,
            )
        factor_names = {name for pair in factors for name in (pair.down, pair.up)}
        rest = aggregation.updates.part(range(len(aggregation.weights)), without=factor_names)
        result = self._aggregate(replace(aggregation, updates=rest)) if rest.names else {}
        weights = aggregation.weights.tolist()
        squared_error = 0.0
        squared_norm = 0.0
        for down, up, scale in factors:
            sent = {name: aggregation.updates.gathered(name) for name in (up, down)}
            pairs = pairs_of(sent[up], sent[down])
            ((_, before),) = pairs_of(aggregation.previous[up][None], aggregation.previous[down][None])
            merged = self._merged(pairs, weights, before)
            for name, value in zip((up, down), merged, strict=True):
                # The memory layout stays that of the previous state: the last bits of a convolution depend on it.
                row = torch.empty_like(aggregation.previous[name], dtype=sent[name].dtype, device=sent[name].device)
                result[name] = row.copy_(value.reshape(row.shape))
            product = stacked(pairs, weights)
            squared_error += (scale * norm(minus(product, merged))) ** 2
            squared_norm += (scale * norm(product)) ** 2
        aggregation.metrics["updates/lora_error"] = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
        return {name: result[name] for name in aggregation.updates.names}

    @abstractmethod
    def _merged(self, pairs: Sequence[Pair], weights: Sequence[float], before: Tensor) -> Pair:
        """The layer's next pair, given those of the clients, and its A before the round."""


class SVD(_OnProducts):
    """The mean of the products of LoRA's factors, cut back to their rank r by singular values (FlexLoRA).

    Bai et al., NeurIPS 2024 (arXiv 2402.11505), whose server forms and decomposes the whole weight. Here C clients'
    factors are stacked, and a matrix of at most C·r × C·r is decomposed. The result is the matrix of rank r that is
    closest to the mean, and the mean itself where that has no larger rank. Of U·S·Vᵀ, B gets U·S and A gets Vᵀ, largest
    singular values first: A has rows of length 1, so that B is trained however small it is. Where the mean has a lower
    rank, as of clients of low ranks, the rest of A is w's, made orthogonal.

    Args:
        aggregate: What is done with all other tensors, such as the head. Default: the mean.
    """

    def __init__(self, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)

    def _merged(self, pairs: Sequence[Pair], weights: Sequence[float], before: Tensor) -> Pair:
        return truncated(stacked(pairs, weights), before.shape[-2], before)


class LoRAFair(_OnProducts):
    """The means of LoRA's factors, of which that of B is corrected towards the mean of their products (LoRA-FAIR).

    Bian et al., ICCV 2025 (arXiv 2411.14961), equation 8: B' = mean(B) + ΔB is to make B'·mean(A) like mean(B·A),
    by cosine similarity, at a price of λ ‖ΔB‖; it is found by steps of SGD. Here ‖mean(B·A) − B'·mean(A)‖² + λ ‖ΔB‖²
    is minimised, in Frobenius's norm: a ridge regression, which is solved exactly. So the same λ may pull more or less
    than theirs. A is the mean of the clients' A.

    Args:
        strength: λ, the pull of B' towards mean(B); the paper's is 0.01. A large one gives the means.
        aggregate: What is done with all other tensors, such as the head. Default: the mean.
    """

    def __init__(self, strength: float = 0.01, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("strength", strength, gt=0)
        self.strength = strength

    def _merged(self, pairs: Sequence[Pair], weights: Sequence[float], before: Tensor) -> Pair:
        return corrected(pairs, weights, self.strength)
