# SPDX-License-Identifier: Apache-2.0
"""Robust server rules, which compare the complete updates of clients with one another or with trusted images."""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number, floor_share
from perada.core.states import State, double, expand, per_client, without_autocast
from perada.server.aggregate import Aggregation, ComposedRule, ServerRule, Updates, client_weights, mean

_STEPS = 1000
"""Maximum number of Weiszfeld steps."""
_TOLERANCE = 1e-12
"""Weight change below which the Weiszfeld iteration stops."""


class Krum(ServerRule):
    """Average the updates that have close neighbours (multi-Krum; Blanchard et al., NeurIPS 2017).

    Of C clients, f are assumed to be hostile. A client's score is the sum of the squared distances to its C − f − 2
    closest neighbours, and the updates with the lowest scores are averaged. Distances are over all floating-point
    tensors together.

    It ignores the clients' weights. Source: [Blanchard et al., NeurIPS 2017](https://arxiv.org/abs/1703.02757).

    Args:
        suspected: Share of the clients that may be hostile: f is ``floor(suspected * C)``, and C must be at least
            2 f + 3.
        keep: Number of updates that are averaged. Default: C − f. With 1 it is Krum.
    """

    weighted = False

    def __init__(self, suspected: float = 0.2, keep: int | None = None) -> None:
        check_number("suspected", suspected, gt=0, lt=0.5, hint="it is the share of the clients that may be hostile")
        check_integer("keep", keep, optional=True)
        self.suspected = suspected
        self.keep = keep

    def check(self, num_clients: int) -> None:
        """Raise an OptionError if a round has too few clients to suspect any, or fewer than 2 f + 3."""
        share = self.suspected
        suspects = floor_share(share, num_clients)
        # The smallest sufficient number of clients, which the message suggests.
        enough = num_clients
        while not 1 <= floor_share(share, enough) <= (enough - 3) / 2:
            enough += 1
        if enough != num_clients:
            raise OptionError(
                f"suspected={share!r} suspects {suspects} of {num_clients} clients per round, but Krum must suspect at "
                f"least one and requires 2 f + 3 clients to suspect f, here {enough}; sample more clients, or change "
                "suspected",
                name="suspected",
                value=share,
            )

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        # An update that is not finite is infinitely far from all others.
        distances = squared_distances(inner_products(aggregation)).nan_to_num(torch.inf)
        clients = len(distances)
        suspects = floor_share(self.suspected, clients)
        # No client is its own neighbour.
        distances.fill_diagonal_(torch.inf)
        num_neighbours = max(1, clients - suspects - 2)
        closest = distances.sort(1).values[:, :num_neighbours]
        scores = closest.sum(1)
        num_averaged = clients - suspects
        if self.keep is not None:
            num_averaged = min(self.keep, clients)
        # A stable sort, so that the order of clients with equal scores is the same on every device.
        best = scores.argsort(stable=True)[:num_averaged]
        # In the order of the clients, so that the last bits of the mean do not depend on their scores.
        averaged = best.sort().values
        return mean(_gather_updates(aggregation, averaged), client_weights("uniform", [1] * num_averaged))


class GeometricMedian(ServerRule):
    """Find the state with the smallest weighted sum of distances to the updates (RFA; Pillutla et al., IEEE TSP 2022).

    It is robust as long as hostile clients have less than half of the weight. Distances are over all floating-point
    tensors together. The minimum is found by Weiszfeld's iteration, smoothed as in the paper.

    Source: [Pillutla et al., 2022](https://arxiv.org/abs/1912.13445).

    Args:
        smoothing: Smallest distance that is divided by, as a share of the median distance.
    """

    def __init__(self, smoothing: float = 1e-6) -> None:
        check_number("smoothing", smoothing, gt=0, le=1)
        self.smoothing = smoothing

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        products = inner_products(aggregation)
        finite = products.diagonal().isfinite()
        # Without a finite update there is nothing to choose; the mean is then not finite either.
        if not finite.any():
            return mean(aggregation.updates, aggregation.weights)
        clients = finite.nonzero().flatten()
        products = products[clients][:, clients]
        weights = aggregation.weights.to(products)[clients]
        shares = self._compute_weights(products, weights)
        return mean(_gather_updates(aggregation, clients), shares.cpu())

    def _compute_weights(self, products: Tensor, weights: Tensor) -> Tensor:
        """Compute the geometric median as a weighted mean of the updates.

        Args:
            products: Inner products (C, C) of the clients' changes x_c, which are finite.
            weights: Weight w_c (C,) of each client.

        Returns:
            Share (C,) of each update in the mean; they sum to one.
        """
        # The start is the most central update. From the mean, which distant updates can move anywhere, small distances
        # would be differences of large numbers.
        pairwise = squared_distances(products).clamp(min=0).sqrt()
        start = (pairwise @ weights).argmin()
        shares = torch.eye(len(weights), dtype=weights.dtype)[start]
        for _ in range(_STEPS):
            # ‖x_c − z‖² = ⟨x_c, x_c⟩ − 2⟨x_c, z⟩ + ⟨z, z⟩, where z is the mean of the updates with these shares.
            squares = products.diagonal() - 2 * products @ shares + shares @ products @ shares
            distances = squares.clamp(min=0).sqrt()
            # Weiszfeld's step: new shares in proportion to w_c / ‖x_c − z‖.
            limit = self.smoothing * distances.median()
            if limit > 0:
                attraction = weights / distances.clamp(min=limit)
            else:
                # At least half of the updates are equal to z, which is the median then.
                attraction = weights * (distances <= 0)
            previous_shares = shares
            shares = attraction / attraction.sum()
            largest_change = (shares - previous_shares).abs().max()
            if largest_change <= _TOLERANCE:
                break
        return shares


class NormClipping(ComposedRule):
    """Clip each client's change to a norm, and aggregate the clipped updates (Sun et al., 2019).

    The norm is over all parameters together. Running statistics are clipped separately, to the median of their norms:
    those of honest clients may change far more than any parameter.

    Source: [Sun et al., 2019](https://arxiv.org/abs/1911.07963).

    Args:
        max_norm: Maximum norm of a client's change of the parameters. Default: the median of the round's norms.
        aggregate: Rule for the clipped updates. Default: the mean.
    """

    def __init__(self, max_norm: float | None = None, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("max_norm", max_norm, gt=0, optional=True)
        self.max_norm = max_norm

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        updates = aggregation.updates.gathered_all()
        parameters = set()
        statistics = set()
        for name, value in updates.items():
            if not value.is_floating_point() or name not in aggregation.previous:
                continue
            if name in aggregation.parameters:
                parameters.add(name)
            else:
                statistics.add(name)
        clipped = (
            updates | _clip_changes(aggregation, parameters, self.max_norm) | _clip_changes(aggregation, statistics)
        )
        return self._aggregate_inner(replace(aggregation, updates=Updates(clipped)))


def _clip_changes(aggregation: Aggregation, tensor_names: Collection[str], max_norm: float | None = None) -> State:
    """Clip the clients' changes of some tensors, with the norm over these tensors together. A collective.

    Args:
        aggregation: The updates and the state before the round.
        tensor_names: Names of the tensors.
        max_norm: Maximum norm; None for the median of the clients' norms.

    Returns:
        The updates (C, ...) of these tensors, clipped.
    """
    norms = inner_products(aggregation, tensor_names).diagonal().clamp(min=0).sqrt()
    limit = norms.nanmedian() if max_norm is None else max_norm
    # 0 / 0 is NaN: a client that changed nothing, where the limit is 0 too.
    scale = (limit / norms).clamp(max=1).nan_to_num(1.0)
    # A client whose change is not finite keeps the state before the round.
    scale = scale.where(norms.isfinite(), 0)
    clipped = {}
    for name in tensor_names:
        update = aggregation.updates.gathered(name)
        clipped[name] = _scale_change(update, aggregation.previous[name], scale)
    return clipped


class FLTrust(ServerRule):
    """Weight each update by how well its change of predictions agrees with labels that the server trusts.

    After Cao et al. (NDSS 2021), whose server trains on a few labelled images and weights a client by the cosine of its
    change and the server's, or 0 if that is negative. Here predictions are compared instead, so that the server trains
    nothing. Let p_c be the probabilities that client c's model gives for N images of the server, p those of the global
    model before the round, and q the labels, one-hot. Client c has the weight max(0, cos(p_c − p, q − p)), and its
    change is clipped by :class:`NormClipping` to the median of the round's norms. If all weights are 0, the state stays
    as it was.

    It ignores the clients' weights, and clients must send whole models. Source: [Cao et al., NDSS
    2021](https://arxiv.org/abs/2012.13995).

    Args:
        labels: Use the labelled images of ``server_validation``, with which any number of clients may be hostile.
            Otherwise q is the median of the p_c on public images, which a smaller number of hostile clients can
            mislead.
        images: Maximum number N of images.
    """

    weighted = False

    def __init__(self, labels: bool = True, images: int = 256) -> None:
        check_choice("labels", labels, [False, True])
        check_integer("images", images)
        self.labels = labels
        self.images = images
        self.needs = "labelled" if labels else "public"

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        trust = self.trust(aggregation)
        total_trust = trust.sum()
        if total_trust <= 0:
            unchanged = {}
            for name, value in aggregation.updates.gathered_all().items():
                # Tensors that the state before the round does not have are those of the first client.
                unchanged[name] = aggregation.previous.get(name, value[0]).clone()
            return unchanged
        return NormClipping()(replace(aggregation, weights=trust / total_trust))

    def trust(self, aggregation: Aggregation) -> Tensor:
        """Return each client's weight (C,), from 0 to 1 and not yet divided by their sum."""
        if aggregation.predict is None:
            raise ValueError("FLTrust requires predictions on images, but Aggregation.predict is None; set it")
        # The state before the round as a stack of one client.
        previous = expand(aggregation.previous, 1)
        # Probabilities p (1, N, K) of the state before the round. The labels are taken from the next call.
        before = aggregation.predict(previous, self.images, self.labels)[0]
        # Probabilities p_c (C, N, K) of the clients' models, and labels q (N, K).
        probabilities, targets = aggregation.predict(aggregation.updates, self.images, self.labels)
        moved = (double(probabilities) - double(before)).flatten(1).cpu()  # p_c − p: (C, N·K)
        finite = moved.isfinite().all(1)
        if not finite.any():
            return torch.zeros(len(moved), dtype=torch.float64)
        if targets is None:
            direction = moved[finite].quantile(0.5, dim=0)
        else:
            direction = (double(targets) - double(before[0])).flatten().cpu()  # q − p: (N·K,)
        cosines = F.cosine_similarity(moved, direction.unsqueeze(0))
        return cosines.clamp(min=0).where(finite, 0)


def inner_products(aggregation: Aggregation, tensor_names: Collection[str] | None = None) -> Tensor:
    """Compute the inner products of the clients' changes, over all floating-point tensors together. A collective.

    Args:
        aggregation: The updates of C clients and the state before the round.
        tensor_names: Names of the tensors to include; None for all.

    Returns:
        The products (C, C), in double precision on the CPU.
    """
    clients = len(aggregation.weights)
    products_of_tensors = []
    for name, value in aggregation.updates.gathered_all().items():
        if not value.is_floating_point() or name not in aggregation.previous:
            continue
        if tensor_names is not None and name not in tensor_names:
            continue
        # The products of changes rather than of states: those are nearly equal, and their differences would be lost.
        previous = double(aggregation.previous[name]).to(value.device)
        change = (double(value) - previous).flatten(1)
        # Autocast would multiply in half precision.
        with without_autocast(value.device):
            products_of_tensors.append(change @ change.T)

    products = torch.zeros(clients, clients, dtype=torch.float64)
    if products_of_tensors:
        # One copy from the device, for which the host waits, whatever the number of tensors.
        for product in torch.stack(products_of_tensors).to("cpu", torch.float64):
            products += product
    return products


def squared_distances(products: Tensor) -> Tensor:
    """Compute the squared distances (C, C) between vectors from their inner products (C, C)."""
    squares = products.diagonal()
    return squares.unsqueeze(1) + squares - 2 * products


def _gather_updates(aggregation: Aggregation, places: Tensor) -> State:
    """Return the updates of some clients, given their indices. A collective."""
    selected = {}
    for name, value in aggregation.updates.gathered_all().items():
        selected[name] = value[places.to(value.device)]
    return selected


def _scale_change(value: Tensor, previous: Tensor, scale: Tensor) -> Tensor:
    """Multiply the clients' changes of a tensor by factors.

    Args:
        value: Updates (C, ...) of the tensor.
        previous: The tensor before the round, without a client axis.
        scale: Factor (C,) of each client.

    Returns:
        previous + factor · change, (C, ...) in the dtype of ``value``.
    """
    start = double(previous).to(value.device)
    factors = per_client(scale.to(start), value)
    # A change that is not finite has the factor 0, but 0 · NaN is NaN.
    change = (double(value) - start).where(factors > 0, 0)
    return (start + factors * change).to(value.dtype)
