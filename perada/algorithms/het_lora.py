# SPDX-License-Identifier: Apache-2.0
"""HetLoRA (Cho et al., EMNLP 2024, arXiv 2401.06432): clients whose LoRA has ranks of their own."""

import warnings
from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from perada.algorithms.base import (
    Algorithm,
    AlgorithmWrapper,
    Broadcast,
    ClientStep,
    ServerStep,
    Stacks,
    TensorNames,
    check_base,
)
from perada.algorithms.branches import RestOfWorld
from perada.algorithms.fedavg import FedAvg
from perada.algorithms.lora import check_factors
from perada.core.checks import OptionError, check_integer, invalid_option
from perada.core.rounds import Phase
from perada.core.states import Factors, State, cut_ranks, expand, partition, per_client
from perada.server.aggregate import Aggregation, ServerRule
from perada.server.low_rank import client_pairs, product_norm

RANK = "lora/rank"
"""A client's rank, which travels with what it receives."""


class HetLoRA(AlgorithmWrapper):
    """Any algorithm, whose clients m have LoRA of rank r_m (HetLoRA: Cho et al., EMNLP 2024).

    The server's B and A have the adapter's rank r. A client receives the first r_m columns of B and rows of A
    (truncation), and the server takes what it sends as zero beyond them (zero-padding). Each layer's B and A are
    averaged with weights in proportion to ‖B_m·A_m‖, Frobenius's norm of what the client sent (sparsity-weighted
    aggregation); all else that is trained is averaged as in the base. A factor that a client does not send counts as
    the server has it. Where all products are zero, or the server's rule is not a function of the mean, the base's
    weights count: with ``svd`` the server is FlexLoRA's (Bai et al., NeurIPS 2024), and the columns that are cut off
    are those of the smallest singular values. A round whose clients all have less than rank r leaves the rest of B and
    A zero, which has no gradient any more (but with ``svd``): a warning says so.

    A client has the adapter's scale s = α/r, whatever its r_m: with α/r_m, the same columns would mean another matrix
    to each client, and their average none. A client predicts with its rank too, in a base without personal models
    with the global one, cut. All clients have tensors of rank r, of which nothing beyond r_m is ever other than zero,
    under noise of differential privacy as well. With privacy of whole clients, of whom the server sees the noisy mean
    alone, the weights are equal. The paper's self-pruning, a loss on the last columns of B and rows of A that lowers
    r_m as they shrink, is left out.

    Args:
        base: What clients do. Default: FedAvg, as in the paper.
        ranks: The r_m. A list is dealt to the clients in turn, by their numbers; a mapping has the rank of each client,
            by its name or number. Default: r, r/2 and r/4 in turn.
        sizes: Rising numbers of training images. A client with fewer than the first has the first of the ``ranks``, one
            with fewer than the second has the second, and so on; ``ranks`` then is a list with one entry more.
    """

    def __init__(
        self,
        base: Algorithm | None = None,
        ranks: list[int] | dict[str, int] | None = None,
        sizes: list[int] | None = None,
    ) -> None:
        self.base = base or FedAvg()
        self.ranks = ranks
        self.sizes = sizes
        check_base(self, self.base)
        if self.base.is_ensemble:
            raise OptionError(
                f"base={type(self.base).__name__} has several global models; choose another, such as FedAvg",
                name="base",
                value=type(self.base).__name__,
            )
        if isinstance(self.base, RestOfWorld):
            raise ValueError("base=RestOfWorld needs the mean of whole branches; choose another, such as FedDPA")
        _check_ranks(ranks, sizes)
        vars(self).update({name: getattr(self.base, name) for name in (*Algorithm.__annotations__, *_OF_BASE)})

    @property
    def kind(self) -> str:
        """The class and the base."""
        return f"{type(self).__name__} of {self.base.kind}"

    def lora_rank(self, number: int, name: str, size: int | None, most: int) -> int:
        """What the options say of a client."""
        if isinstance(self.ranks, Mapping):
            rank_of = {str(key): value for key, value in self.ranks.items()}
            rank = rank_of.get(name, rank_of.get(str(number)))
            if rank is None:
                raise OptionError(
                    f"ranks={self.ranks!r} has no rank of client {name!r}; add it, or give a list",
                    name="ranks",
                    value=self.ranks,
                )
        else:
            turns = self.ranks or [max(1, most // part) for part in (1, 2, 4)]
            if self.sizes is not None and size is None:
                raise OptionError(
                    f"sizes={self.sizes!r} needs the number of images of client {name!r}, which it does not say, or "
                    "which is private; give ranks by name",
                    name="sizes",
                    value=self.sizes,
                )
            rank = turns[number % len(turns) if self.sizes is None or size is None else bisect(self.sizes, size)]
        if rank > most:
            raise OptionError(
                f"ranks: client {name!r} has {rank}, and the adapter has r={most}; give the adapter the largest rank "
                f"(adapter_options={{'r': {rank}}})",
                name="ranks",
            )
        return rank

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without factors, and what the base cannot work with."""
        check_factors(type(self).__name__, tensor_names)
        self.base.check(tensor_names, num_clients)

    def broadcast(self, sending: Broadcast) -> State:
        """As the base, cut to each client's rank, and the rank."""
        example = sending.global_state[sending.tensor_names.factors[0].down]
        ranks = sending.lora_ranks or (example.shape[0],) * len(sending.clients)
        rank_tensor = torch.tensor(ranks, device=example.device)
        return cut_ranks(self.base.broadcast(sending), sending.tensor_names.factors, rank_tensor) | {RANK: rank_tensor}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """As the base, with what a client keeps cut, too: at first it keeps factors of rank r."""
        ranks = received[RANK]
        received = partition(received, {RANK})[1]
        return self.base.begin_round(_cut(client_state, tensor_names, ranks), received, tensor_names)

    def client_step(self, step: ClientStep) -> None:
        """The base's step, which noise and pulls do not leave with more than the rank."""
        self.base.client_step(cast(ClientStep, _CutStep(step)))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """As the base."""
        ranks = received[RANK]
        received = partition(received, {RANK})[1]
        new_client_state, update = self.base.end_round(
            trained, _cut(client_state, tensor_names, ranks), received, tensor_names
        )
        return _cut(new_client_state, tensor_names, ranks), cut_ranks(update, tensor_names.factors, ranks)

    def server_step(self, server: ServerStep) -> State:
        """As the base, with means of factors weighted by the norms of their products."""
        if server.rule.function_of_mean:
            given = self.ranks.values() if isinstance(self.ranks, Mapping) else self.ranks
            server = replace(
                server, rule=_ByNorm(server.rule, server.tensor_names.factors, max(given) if given else None)
            )
        return self.base.server_step(server)

    def personalization(self) -> tuple[Algorithm, Phase] | None:
        """As the base, at each client's rank."""
        tuning = self.base.personalization()
        return None if tuning is None else (HetLoRA(tuning[0], self.ranks, self.sizes), tuning[1])


def _check_ranks(ranks: object, sizes: object) -> None:
    """Refuse, by a ValueError, what are no ranks of clients, or no numbers of images that tell who has which."""
    if ranks is not None and (not isinstance(ranks, list | tuple | Mapping) or not ranks):
        raise invalid_option("ranks", ranks, "a list such as [2, 4, 8] or a dictionary {client: rank}")
    for rank in (ranks.values() if isinstance(ranks, Mapping) else ranks) or ():
        check_integer("ranks", rank, hint="it is the rank of a client's LoRA")
    if sizes is None:
        return
    if not isinstance(sizes, list | tuple) or not sizes:
        raise invalid_option("sizes", sizes, "a list of numbers of images such as [100, 1000]")
    for size in sizes:
        check_integer("sizes", size, hint="it is a number of images")
    if sorted(set(sizes)) != [*sizes] or not isinstance(ranks, list | tuple) or len(ranks) != len(sizes) + 1:
        requirement = "increasing numbers of images, one fewer than there are ranks in a list"
        raise invalid_option("sizes", sizes, requirement, f"ranks are {ranks!r}")


_OF_BASE = ("phases", "initial", "initial_client_state", "members", "personal")
"""Methods that are the base's."""


def _cut(stacks: Stacks, tensor_names: TensorNames, ranks: Tensor) -> Stacks:
    return {role: cut_ranks(state, tensor_names.factors, ranks) for role, state in stacks.items()}


class _CutStep:
    """A local step in which all states stay cut to the clients' ranks."""

    def __init__(self, step: ClientStep) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever a step has
        return getattr(self._step, name)

    @property
    def client_state(self) -> Stacks:
        """What the clients kept, cut."""
        return _cut(self._step.client_state, self._step.tensor_names, self._step.received[RANK])

    def descend(self, role: str | tuple[str, ...], *given: Any, **named: Any) -> None:
        """A step of the optimiser, after which what is beyond the ranks is zero again."""
        step = self._step
        step.descend(role, *given, **named)
        with torch.no_grad():
            for one in (role,) if isinstance(role, str) else role:
                state = step.states[one]
                for key, value in cut_ranks(state, step.tensor_names.factors, step.received[RANK]).items():
                    if value is not state[key]:
                        state[key].copy_(value)


class _ByNorm(ServerRule):
    """A rule on the mean, in which factors have weights as ‖B_m·A_m‖: each is scaled by that over the given weight."""

    function_of_mean = True

    def __init__(self, rule: ServerRule, factors: tuple[Factors, ...], most: int | None) -> None:
        # The largest rank of a client; None for all.
        self.rule = rule
        self._factors = factors
        self._most = most

    def check(self, clients: int) -> None:
        """Refuse what the rule refuses."""
        self.rule.check(clients)

    def __call__(self, aggregation: Aggregation) -> State:
        updates = aggregation.updates
        scaled = dict(updates.own)
        for pair in self._factors:
            # A factor that clients do not send is the server's.
            previous = {name: aggregation.previous[name] for name in (pair.down, pair.up)}
            factors = expand(previous, len(updates.places)) | scaled
            norms = torch.zeros(updates.clients, dtype=torch.float64)
            for place, product in zip(updates.places, client_pairs(factors[pair.up], factors[pair.down]), strict=True):
                norms[place] = product_norm(product)
            updates.ranks.sum_([norms])
            if norms.sum() <= 0:
                continue
            factor = (norms / norms.sum() / aggregation.weights.to(norms))[updates.places]
            for name in (pair.down, pair.up):
                if name in updates:
                    value = scaled[name]
                    scaled[name] = value * per_client(factor.to(value), value)
        result = self.rule(replace(aggregation, updates=updates.replace(scaled)))
        self._warn_of_lost(aggregation, result)
        return result

    def _warn_of_lost(self, aggregation: Aggregation, result: State) -> None:
        """Say where rows of A and columns of B became zero alike: neither ever has a gradient again."""
        for pair in self._factors:
            rank_before = _used(aggregation.previous, pair, self._most)
            rank_after = _used(aggregation.previous | result, pair, self._most)
            if rank_after < rank_before:
                warnings.warn(
                    f"round {aggregation.round + 1}: none of its clients has LoRA of a rank above {rank_after}: "
                    "what the server has beyond is zero now, and stays so, as it has no gradient; draw more clients a "
                    "round, or choose server_rule='svd'",
                    stacklevel=2,
                )
                return


def _used(state: State, pair: Factors, most: int | None) -> int:
    """How many of the first columns of B, or rows of A, are not zero."""
    down = state[pair.down][:most].flatten(1)
    up = state[pair.up].transpose(0, 1)[:most].flatten(1)
    return int((down.any(1) | up.any(1)).sum())
