# SPDX-License-Identifier: Apache-2.0
"""Server rules that compare clients' updates as a whole, and so withstand some that are wrong or hostile."""

import itertools
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number, floor_share
from perada.core.states import State
from perada.server.aggregate import Aggregation, ComposedRule, ServerRule, Updates, client_weights, double, mean

_STEPS = 1000
_TOLERANCE = 1e-12


class Krum(ServerRule):
    """The mean of the updates that have close neighbours (multi-Krum; Blanchard et al., NeurIPS 2017).

    Of C clients, f are suspected. A client's score is the sum of the squared distances to its C − f − 2 closest others;
    those with the lowest scores are averaged. The distances are those of all floating-point tensors together.

    Args:
        suspected: Share of the clients that may be hostile: f is ``floor(suspected * C)``, and C at least 2 f + 3.
        keep: How many are averaged. Default: C − f. With 1 it is Krum.
    """

    weighted = False

    def __init__(self, suspected: float = 0.2, keep: int | None = None) -> None:
        check_number("suspected", suspected, gt=0, lt=0.5, hint="it is the share of the clients that may be hostile")
        check_integer("keep", keep, optional=True)
        self.suspected = suspected
        self.keep = keep

    def check(self, clients: int) -> None:
        """Refuse so few clients a round that none is suspected, or that the suspected ones could be close together."""
        share = self.suspected
        enough = next(count for count in itertools.count(clients) if 1 <= floor_share(share, count) <= (count - 3) / 2)
        if enough != clients:
            raise OptionError(
                f"suspected={share!r} suspects {floor_share(share, clients)} of {clients} clients a round; Krum "
                f"must suspect one at least and needs 2 f + 3 clients to suspect f, here {enough}; sample more, or "
                "change suspected",
                name="suspected",
                value=share,
            )

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        distances = squared_distances(inner_products(aggregation)).nan_to_num(torch.inf)
        clients = len(distances)
        suspects = floor_share(self.suspected, clients)
        distances.fill_diagonal_(torch.inf)  # no neighbour of its own
        scores = distances.sort(1)[0][:, : max(1, clients - suspects - 2)].sum(1)
        kept = clients - suspects if self.keep is None else min(self.keep, clients)
        chosen = scores.argsort(stable=True)[:kept].sort()[0]
        return mean(_rows(aggregation, chosen), client_weights("uniform", [1] * kept))


class GeometricMedian(ServerRule):
    """The state whose weighted sum of distances to the clients' is smallest (RFA; Pillutla et al., IEEE TSP 2022).

    It withstands clients of less than half of the weight. The distances are those of all floating-point tensors
    together. It is found by Weiszfeld's steps, smoothed as in the paper.

    Args:
        smoothing: Distances below it count as it, as a share of the median distance.
    """

    def __init__(self, smoothing: float = 1e-6) -> None:
        check_number("smoothing", smoothing, gt=0, le=1)
        self.smoothing = smoothing

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        products = inner_products(aggregation)
        sound = products.diagonal().isfinite()
        if not sound.any():
            return mean(aggregation.updates, aggregation.weights)
        chosen = sound.nonzero().flatten()
        products = products[chosen][:, chosen]
        own_weights = aggregation.weights.to(products)[chosen]
        first = (
            squared_distances(products).clamp(min=0).sqrt() @ own_weights
        ).argmin()  # a far update would blur the mean
        share = torch.eye(len(own_weights), dtype=own_weights.dtype)[first]
        for _ in range(_STEPS):  # the state is a mean of the updates, so its distances follow from their products
            squares = products.diagonal() - 2 * products @ share + share @ products @ share
            distances = squares.clamp(min=0).sqrt()
            least = self.smoothing * distances.median()
            pull = own_weights / distances.clamp(min=least) if least > 0 else own_weights * (distances <= 0)
            before = share
            share = pull / pull.sum()
            if (share - before).abs().max() <= _TOLERANCE:
                break
        return mean(_rows(aggregation, chosen), share.cpu())


class NormClipping(ComposedRule):
    """Shortens each client's change to a norm, and aggregates what is left (Sun et al., 2019).

    The norm is that of all parameters together. Running statistics are shortened by themselves, to the median of their
    norms: honest ones may be far longer than any change of parameters.

    Args:
        max_norm: The largest norm of a change of parameters. Default: the median of the round's.
        aggregate: What is done with the shortened updates. Default: the mean.
    """

    def __init__(self, max_norm: float | None = None, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("max_norm", max_norm, gt=0, optional=True)
        self.max_norm = max_norm

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        updates = aggregation.updates.gathered_all()
        floating = {
            name for name, value in updates.items() if value.is_floating_point() and name in aggregation.previous
        }
        parameters = floating & aggregation.parameters
        statistics = floating - aggregation.parameters
        for names, max_norm in ((parameters, self.max_norm), (statistics, None)):
            norms = inner_products(aggregation, names).diagonal().clamp(min=0).sqrt()
            limit = norms.nanmedian() if max_norm is None else max_norm
            scale = (limit / norms).clamp(max=1).nan_to_num(1.0).where(norms.isfinite(), 0)
            updates |= {name: _shortened(updates[name], aggregation.previous[name], scale) for name in names}
        return self._aggregate(replace(aggregation, updates=Updates(updates)))


class FLTrust(ServerRule):
    """The mean, in which a client counts as much as its predictions move where the server knows that they should.

    After Cao et al. (NDSS 2021), whose server trains on a few images with labels, and gives a client the cosine of its
    change and the server's, if it is above 0. Here the change is that of the predictions, so that nothing is trained:
    with p_c the probabilities of client c's model on N images of the server, p those of the global model before the
    round, and q the labels as 0 and 1, client c has the weight max(0, cos(p_c − p, q − p)). Its change is shortened by
    :class:`NormClipping` to the median of the round's norms. If no client has a weight, the state stays as it was.

    Args:
        labels: Whether the images are those of ``server_validation``. Any number of clients may then be hostile. If
            not, they are public ones, and q is the median of the p_c: it takes fewer hostile clients to mislead it.
        images: N, at most.
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
        if trust.sum() <= 0:
            updates = aggregation.updates.gathered_all()
            return {name: aggregation.previous.get(name, value[0]).clone() for name, value in updates.items()}
        return NormClipping()(replace(aggregation, weights=trust / trust.sum()))

    def trust(self, aggregation: Aggregation) -> Tensor:
        """The clients' weights (C,) from 0 to 1, before they are divided by their sum."""
        if aggregation.predict is None:
            raise ValueError("FLTrust needs predictions on images, and Aggregation.predict is None; give it")
        before, _ = aggregation.predict(
            {key: value[None] for key, value in aggregation.previous.items()}, self.images, self.labels
        )
        after, targets = aggregation.predict(aggregation.updates, self.images, self.labels)
        moved = (double(after) - double(before)).flatten(1).cpu()
        sound = moved.isfinite().all(1)
        if not sound.any():
            return torch.zeros(len(moved), dtype=torch.float64)
        if targets is None:
            towards = moved[sound].quantile(0.5, dim=0)
        else:
            towards = (double(targets) - double(before[0])).flatten().cpu()
        return F.cosine_similarity(moved, towards[None]).clamp(min=0).where(sound, 0)


def inner_products(aggregation: Aggregation, names: Collection[str] | None = None) -> Tensor:
    """Compute the inner products (C, C) of the clients' changes, of all floating-point tensors together.

    Args:
        aggregation: The updates and the state before the round.
        names: Names that count; all by default.

    Returns:
        The products in double precision, on the CPU.
    """
    clients = len(aggregation.weights)
    products = torch.zeros(clients, clients, dtype=torch.float64)
    for name, value in aggregation.updates.gathered_all().items():
        if not value.is_floating_point() or name not in aggregation.previous:
            continue
        if names is not None and name not in names:
            continue
        # From the state before the round: between rows far from zero, differences would be lost.
        change = (double(value) - double(aggregation.previous[name]).to(value.device)).flatten(1)
        with torch.autocast(value.device.type, enabled=False):  # it would multiply in half precision
            products += (change @ change.T).to("cpu", torch.float64)
    return products


def squared_distances(products: Tensor) -> Tensor:
    """Squared distances (C, C) of vectors whose inner products (C, C) are aggregation."""
    squares = products.diagonal()
    return squares[:, None] + squares - 2 * products


def _rows(aggregation: Aggregation, chosen: Tensor) -> State:
    return {name: value[chosen.to(value.device)] for name, value in aggregation.updates.gathered_all().items()}


def _shortened(value: Tensor, previous: Tensor, scale: Tensor) -> Tensor:
    start = double(previous).to(value.device)
    share = scale.to(start).view(-1, *[1] * start.dim())
    change = (double(value) - start).where(share > 0, 0)  # of what is not finite, nothing is left
    return (start + share * change).to(value.dtype)
