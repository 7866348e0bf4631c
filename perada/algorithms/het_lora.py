# SPDX-License-Identifier: Apache-2.0
"""HetLoRA (Cho et al., EMNLP 2024, arXiv 2401.06432): a separate LoRA rank for each client."""

import warnings
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

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
    check_outermost,
)
from perada.algorithms.branches import RestOfWorld
from perada.algorithms.fedavg import FedAvg
from perada.algorithms.lora import check_model_factors
from perada.algorithms.newcomers import joining
from perada.core.checks import OptionError, check_integer, invalid_option
from perada.core.rounds import Phase
from perada.core.states import Factors, State, cut_ranks, device_of, per_client, to_device_async, without
from perada.server.aggregate import Aggregation, ServerRule
from perada.server.low_rank import client_pairs, product_norm

RANK = "lora/rank"
"""Name under which a client receives its rank."""


class HetLoRA(AlgorithmWrapper):
    """Any algorithm, with LoRA of rank r_m at client m (HetLoRA: Cho et al., EMNLP 2024).

    The server's B and A have the adapter's rank r.

    1. A client receives the first r_m columns of B and rows of A (the paper's truncation).
    2. It trains and keeps what clients of the base do, at its rank.
    3. The server pads the client's factors with zeros to rank r (zero-padding).
    4. B and A of each layer are averaged with weights proportional to ‖B_m·A_m‖, the Frobenius norm of the product that
       the client sent (sparsity-weighted aggregation). All other tensors are averaged as in the base.

    If a client does not send a factor, that of the server is used in the product. If all products are zero, or if the
    server rule is not a function of the mean, the weights of the base are used. With ``server_rule='svd'`` this is
    FlexLoRA (Bai et al., NeurIPS 2024), where truncation removes the columns with the smallest singular values. If no
    client of a round has rank r, the remaining rows and columns become zero and (except with ``svd``) never have a
    gradient again, of which a warning is given.

    All clients use the adapter's scale s = α/r. With α/r_m, the same columns would represent different matrices at
    different clients and could not be averaged. A client also predicts with its rank: without personal models, with the
    truncated global model. All tensors have rank r and are zero beyond r_m, even with the noise of differential
    privacy. With client-level privacy the server sees only the noisy mean, so the weights are equal. The paper's
    self-pruning, a loss that lowers r_m as the last columns of B and rows of A shrink, is not implemented.

    Source: [Cho et al., EMNLP 2024](https://arxiv.org/abs/2401.06432).

    Args:
        base: Algorithm of the clients. Default: FedAvg, as in the paper.
        ranks: The ranks r_m. The entries of a list are assigned to the clients in turn, by their numbers. A dictionary
            has the rank of each client, by its name or number. Default: r, r/2 and r/4 in turn.
        sizes: Increasing numbers of training images, one fewer than ``ranks``, which must be a list. A client with
            fewer images than the first number has the first rank, one with fewer than the second has the second, and so
            on.
    """

    def __init__(
        self,
        base: Algorithm | None = None,
        ranks: list[int] | dict[str, int] | None = None,
        sizes: list[int] | None = None,
    ) -> None:
        super().__init__(FedAvg() if base is None else base)
        self.ranks = ranks
        self.sizes = sizes
        check_outermost(self)
        if self.base.is_ensemble:
            base_name = type(self.base).__name__
            raise OptionError(
                f"base={base_name} has several global models; choose a different base, such as FedAvg",
                name="base",
                value=base_name,
            )
        if isinstance(self.base, RestOfWorld):
            raise ValueError(
                "base=RestOfWorld requires the mean of complete branches; choose a different base, such as FedDPA"
            )
        _check_ranks(ranks, sizes)

    def lora_rank(self, number: int, name: str, size: int | None, most: int) -> int:
        """Return the rank that the options assign to a client; raise an OptionError if it exceeds ``most``."""
        rank = self._chosen_rank(number, name, size, most)
        if rank > most:
            raise OptionError(
                f"ranks: client {name!r} has rank {rank}, but the adapter only has r={most}; set the adapter's r to "
                f"the largest rank (adapter_options={{'r': {rank}}})",
                name="ranks",
            )
        return rank

    def _chosen_rank(self, number: int, name: str, num_images: int | None, most: int) -> int:
        """Return the rank that the options assign to a client.

        Args:
            number: Id of the client.
            name: Name of the client.
            num_images: Number of its training images; None if unknown.
            most: Rank of the adapter, from which the default is derived.
        """
        if isinstance(self.ranks, Mapping):
            rank_of = {str(key): rank for key, rank in self.ranks.items()}
            rank = rank_of.get(name, rank_of.get(str(number)))
            if rank is None:
                raise OptionError(
                    f"ranks={self.ranks!r} has no rank for client {name!r}; add it, or use a list",
                    name="ranks",
                    value=self.ranks,
                )
            return rank
        ranks = self.ranks or [max(1, most // divisor) for divisor in (1, 2, 4)]
        if self.sizes is None:
            return ranks[number % len(ranks)]
        if num_images is None:
            raise OptionError(
                f"sizes={self.sizes!r} requires the number of images of client {name!r}, which is not declared or is "
                "private; set ranks by name",
                name="sizes",
                value=self.sizes,
            )
        return ranks[bisect(self.sizes, num_images)]

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no LoRA factors, or if the base does not support it."""
        check_model_factors(type(self).__name__, tensor_names)
        self.base.check(tensor_names, num_clients)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the states of the base, cut to each client's rank, and the ranks (C,)."""
        factors = sending.tensor_names.factors
        example = sending.global_state[factors[0].down]
        lora_ranks = sending.lora_ranks or (example.shape[0],) * len(sending.clients)
        ranks = torch.tensor(lora_ranks, device=example.device)
        return cut_ranks(self.base.broadcast(sending), factors, ranks) | {RANK: ranks}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the states of the base, cut to each client's rank."""
        ranks, received = _split_ranks(received)
        # What a client keeps before its first round has rank r.
        client_state = _cut_to_ranks(client_state, tensor_names, ranks)
        return self.base.begin_round(client_state, received, tensor_names)

    def client_step(self, step: ClientStep) -> None:
        """Take the base's step; after each optimiser step, set everything beyond the ranks to zero."""
        self.base.client_step(_RankCutStep(step))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep and send the states of the base, cut to each client's rank."""
        ranks, received = _split_ranks(received)
        client_state = _cut_to_ranks(client_state, tensor_names, ranks)
        new_client_state, update = self.base.end_round(trained, client_state, received, tensor_names)
        return _cut_to_ranks(new_client_state, tensor_names, ranks), cut_ranks(update, tensor_names.factors, ranks)

    def server_step(self, server: ServerStep) -> State:
        """Take the base's server step, averaging factors with weights proportional to the norms of their products."""
        if server.rule.function_of_mean:
            rule = _NormWeightedRule(server.rule, server.tensor_names.factors, self._largest_rank())
            server = replace(server, rule=rule)
        return self.base.server_step(server)

    def _largest_rank(self) -> int | None:
        """Return the largest rank of a client; None if it is the rank of the adapter."""
        if not self.ranks:
            return None
        if isinstance(self.ranks, Mapping):
            return max(self.ranks.values())
        return max(self.ranks)

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]]:
        """Train as a client that joins a run of the base, at the adapter's rank."""
        return joining(self.base, phases)

    def personalization(self) -> tuple[Algorithm, Phase] | None:
        """Return the base's training after the last round, at the clients' ranks."""
        tuning = self.base.personalization()
        if tuning is None:
            return None
        algorithm, phase = tuning
        return HetLoRA(algorithm, self.ranks, self.sizes), phase


def _check_ranks(ranks: object, sizes: object) -> None:
    """Raise an OptionError if ``ranks`` or ``sizes`` is invalid; there must be one rank more than sizes."""
    if ranks is not None and (not isinstance(ranks, list | tuple | Mapping) or not ranks):
        raise invalid_option("ranks", ranks, "a list such as [2, 4, 8] or a dictionary {client: rank}")
    values = ranks.values() if isinstance(ranks, Mapping) else ranks
    for rank in values or ():
        check_integer("ranks", rank, hint="it is the rank of a client's LoRA")
    if sizes is None:
        return
    if not isinstance(sizes, list | tuple) or not sizes:
        raise invalid_option("sizes", sizes, "a list of numbers of images such as [100, 1000]")
    for size in sizes:
        check_integer("sizes", size, hint="it is a number of images")
    increasing = sorted(set(sizes)) == [*sizes]
    if not increasing or not isinstance(ranks, list | tuple) or len(ranks) != len(sizes) + 1:
        requirement = "increasing numbers of images, one fewer than the ranks in the list"
        raise invalid_option("sizes", sizes, requirement, f"ranks are {ranks!r}")


def _split_ranks(received: State) -> tuple[Tensor, State]:
    """Split the states (C, ...) that clients received into their ranks (C,) and the states of the base."""
    sent_by_base = without(received, {RANK})
    return received[RANK], sent_by_base


def _cut_to_ranks(stacks: Stacks, tensor_names: TensorNames, lora_ranks: Tensor) -> Stacks:
    """Cut the states (C, ...) of all roles to the clients' ranks (C,)."""
    return {role: cut_ranks(stack, tensor_names.factors, lora_ranks) for role, stack in stacks.items()}


class _RankCutStep:
    """A local step (:class:`ClientStep`) whose states are always zero beyond the clients' ranks.

    The states that clients kept are cut to their ranks, and so are the states after every optimiser step. All other
    calls are forwarded.

    Args:
        step: The step to wrap.
    """

    def __init__(self, step: ClientStep) -> None:
        self._step = step
        self._ranks = step.received[RANK]
        self.states = step.states
        self.received = step.received
        self.round = step.round
        self.phase = step.phase
        self.tensor_names = step.tensor_names

    @cached_property
    def client_state(self) -> Stacks:
        return _cut_to_ranks(self._step.client_state, self.tensor_names, self._ranks)

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        return self._step.logits(states, stream)

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        return self._step.outputs(states, stream, training)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        return self._step.loss(states, stream)

    def class_counts(self, num_classes: int) -> Tensor:
        return self._step.class_counts(num_classes)

    @property
    def labels(self) -> Tensor:
        return self._step.labels

    def mean(self, values: Tensor) -> Tensor:
        return self._step.mean(values)

    def restart(self, role: str, start: State) -> None:
        self._step.restart(role, start)

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """Take an optimiser step, then zero everything beyond the ranks."""
        self._step.descend(role, loss, pull=pull, slope=slope)
        roles = (role,) if isinstance(role, str) else role
        with torch.no_grad():
            for name in roles:
                state = self.states[name]
                for key, value in cut_ranks(state, self.tensor_names.factors, self._ranks).items():
                    # Tensors that are not factors are returned as they are.
                    if value is not state[key]:
                        state[key].copy_(value)


class _NormWeightedRule(ServerRule):
    """A server rule that averages factors with weights proportional to ‖B_m·A_m‖, by another rule on the mean.

    The other rule averages with the clients' aggregation weights p_m. To give client m the weight
    w_m = ‖B_m·A_m‖ / Σ_k ‖B_k·A_k‖, its factors are multiplied by w_m / p_m before.

    Args:
        rule: The other rule.
        factors: Names of each layer's factors.
        largest_rank: The largest rank of a client; None if it is the rank of the adapter.
    """

    function_of_mean = True

    def __init__(self, rule: ServerRule, factors: tuple[Factors, ...], largest_rank: int | None) -> None:
        self.rule = rule
        self._factors = factors
        self._largest_rank = largest_rank

    def check(self, num_clients: int) -> None:
        """Raise a ValueError if the rule does not support this number of clients."""
        self.rule.check(num_clients)

    def __call__(self, aggregation: Aggregation) -> State:
        updates = aggregation.updates
        scaled = dict(updates.local_rows)
        for pair, norms in zip(self._factors, self._product_norms(aggregation), strict=True):
            total_norm = norms.sum()
            if total_norm <= 0:
                # Nothing is scaled, so the mean has the weights p_m.
                continue
            scale = norms / total_norm / aggregation.weights.to(norms)
            local_scale = scale[updates.places]
            for name in (pair.down, pair.up):
                if name in updates:
                    value = scaled[name]
                    factors = to_device_async(local_scale.to(value.dtype), value.device)
                    scaled[name] = value * per_client(factors, value)
        result = self.rule(replace(aggregation, updates=updates.replace(scaled)))
        self._warn_of_lost_ranks(aggregation, result)
        return result

    def _product_norms(self, aggregation: Aggregation) -> Tensor:
        """Compute ‖B_m·A_m‖ for each layer and client. A collective: all ranks must call this.

        Returns:
            The norms (layers, C) in float64 on the CPU, of the clients of all ranks.
        """
        updates = aggregation.updates
        factors: State = {}
        for pair in self._factors:
            for name in (pair.down, pair.up):
                if name in updates:
                    factors[name] = updates.local_rows[name].detach()
                else:
                    # Clients do not send this factor, so all have that of the server.
                    value = aggregation.previous[name].detach()
                    factors[name] = value.expand(len(updates.places), *value.shape)
        factors = _to_cpu(factors)
        norms = torch.zeros(len(self._factors), updates.num_clients, dtype=torch.float64)
        for layer, pair in enumerate(self._factors):
            products = client_pairs(factors[pair.up], factors[pair.down])
            for place, product in zip(updates.places, products, strict=True):
                norms[layer, place] = product_norm(product)
        # Each rank has filled in its clients; the others are zero.
        updates.ranks.sum_([norms])
        return norms

    def _warn_of_lost_ranks(self, aggregation: Aggregation, result: State) -> None:
        """Warn if rows of A and the corresponding columns of B became zero, which never have a gradient again."""
        before = _used_ranks(aggregation.previous, self._factors, self._largest_rank)
        after = _used_ranks(aggregation.previous | result, self._factors, self._largest_rank)
        for rank_before, rank_after in zip(before, after, strict=True):
            if rank_after < rank_before:
                warnings.warn(
                    f"round {aggregation.round + 1}: none of its clients has a LoRA rank above {rank_after}: the "
                    "server's factors beyond that rank are now zero and stay so, since they have no gradient; draw "
                    "more clients per round, or choose server_rule='svd'",
                    stacklevel=2,
                )
                return


def _to_cpu(state: State) -> State:
    """Return a state on the CPU, copied as one buffer for each dtype, since the host waits for every copy."""
    if not state or device_of(state).type == "cpu":
        return state
    names_by_dtype: dict[torch.dtype, list[str]] = {}
    for name, value in state.items():
        names_by_dtype.setdefault(value.dtype, []).append(name)
    on_cpu = {}
    for names in names_by_dtype.values():
        buffer = torch.cat([state[name].reshape(-1) for name in names]).cpu()
        parts = torch.split(buffer, [state[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            on_cpu[name] = part.view(state[name].shape)
    return on_cpu


def _used_ranks(state: State, factors: Sequence[Factors], largest_rank: int | None) -> list[int]:
    """Return for each layer the number of rows of A and columns of B, with the same index, that are not both zero.

    Args:
        state: A state without a client axis.
        factors: Names of each layer's factors.
        largest_rank: Number of rows and columns to look at, from the first; None for all.
    """
    if not factors:
        return []
    num_used = []
    for pair in factors:
        rows = state[pair.down][:largest_rank].flatten(1)
        columns = state[pair.up].transpose(0, 1)[:largest_rank].flatten(1)
        num_used.append((rows.any(1) | columns.any(1)).sum())
    # One copy for all layers, since the host waits for it.
    return torch.stack(num_used).tolist()
