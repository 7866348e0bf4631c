# SPDX-License-Identifier: Apache-2.0
"""Algorithms of several global models: FedBE and Fed-ensemble."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.algorithms.base import (
    Algorithm,
    AlgorithmWrapper,
    Average,
    Broadcast,
    ServerStep,
    Stacks,
    TensorNames,
    check_base,
)
from perada.algorithms.fedavg import FedAvg, FedDyn
from perada.algorithms.moon import Moon
from perada.algorithms.perada import APFL, MTL
from perada.algorithms.scaffold import Scaffold
from perada.core.checks import OptionError, check_choice, check_integer, check_number
from perada.core.rounds import Phase
from perada.core.seeding import generator
from perada.core.states import State, clone, expand, gather, partition, stack, unstack
from perada.server import mean

Sampler = Literal["gaussian", "dirichlet"]


class FedBE(Algorithm):
    """FedAvg with a Bayesian ensemble at the server: extra models are drawn from a fit to the clients' models.

    The ensemble of the drawn models, the clients' models and their mean is distilled into the mean on public images
    (their Algorithm 1; as everywhere in perada, the teachers' logits are averaged). The result is the average of the
    student's states along the way (stochastic weight averaging). All drawn models are in memory at once. Without
    distillation, every checkpoint holds the whole ensemble.

    Args:
        sampler: ``gaussian`` draws from N(mean, diagonal of the variances) of the clients' models, ``dirichlet`` draws
            convex combinations of them (both in their Section 3).
        samples: Number of models drawn each round.
        distill: ``False`` lets the ensemble itself predict, by the mean of its probabilities.
        average_from: Share of the distillation steps after which the student's states are averaged. 1 takes the last.
        moments: The server fits the Gaussian to means of the clients' states and of the squares of their changes, which
            they send too, and the drawn models and the mean alone are the ensemble. So it needs sums alone.
    """

    def __init__(
        self,
        sampler: Sampler = "gaussian",
        samples: int = 10,
        distill: bool = True,
        average_from: float = 0.5,
        moments: bool = False,
    ) -> None:
        check_choice("sampler", sampler, get_args(Sampler))
        check_integer("samples", samples, 0)
        check_choice("distill", distill, (True, False))
        check_number("average_from", average_from, ge=0, le=1, hint="it is the share of the steps that are left out")
        check_choice("moments", moments, (True, False))
        if moments and sampler != "gaussian":
            raise OptionError(
                f"moments=True cannot be used with sampler={sampler!r}, which mixes the clients' models",
                name="moments",
                value=True,
            )
        self.moments = self.own_teachers = moments
        self.sampler = sampler
        self.samples = samples
        self.distill = distill
        self.average_from = average_from
        self.uses_distillation = distill
        self.average = "logits" if distill else "probabilities"

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Send the trained state, and with ``moments`` the scaled squares of its changes."""
        new_client_state, sent = super().end_round(trained, client_state, received, tensor_names)
        if self.moments:
            drawn = [key for key in tensor_names.keys if sent[key].is_floating_point() and not key.endswith(UNDRAWN)]
            sent = sent | {SQUARE + key: (sent[key] - received[key]).square() * SCALE for key in drawn}
        return new_client_state, sent

    def server_step(self, server: ServerStep) -> State:
        """Average, draw, and distil or remember the ensemble."""
        random = generator(server.seed, "fedbe", server.round)
        if self.moments:
            squares = [name for name in server.updates.names if name.startswith(SQUARE)]
            models = server.updates.part(range(len(server.clients)), without=squares)
            drawn = self._draw_by_moments(server, squares, random)
            average = server.mean(models, server.weights)
            members = [drawn, expand(average, 1)]
        else:
            models = server.updates
            clients = models.gathered_all()
            drawn = sample_models(clients, server.weights, self.sampler, self.samples, random)
            average = server.mean(models, server.weights)
            members = [drawn, clients, expand(average, 1)]
        teachers = {name: torch.cat([member[name] for member in members]) for name in models.names}
        if self.uses_distillation:
            return server.distill(server.previous | average, teachers, self.average_from)
        server.state["members"] = teachers
        return average

    def _draw_by_moments(self, server: ServerStep, squares: list[str], random: torch.Generator) -> State:
        """Draw models (S, ...) from the mean and the variances of the clients' models: sums are all that is seen."""
        scaled_squares, mean = partition(server.updates.mean(server.weights), squares)
        spread = {}
        for name, value in mean.items():
            if SQUARE + name in scaled_squares:
                variance = scaled_squares[SQUARE + name] / SCALE - (value - server.previous[name]).square()
                spread[name] = variance.clamp(min=0).sqrt()  # rounding may leave less than 0
        return draw_gaussian(mean, spread, self.samples, random)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """The ensemble of the last round where it is not distilled, else the global model."""
        return server_state.get("members", super().members(global_state, server_state))

    @property
    def kind(self) -> str:
        """The class, whether the ensemble is distilled, and whether it is drawn by moments."""
        moments = ", by moments" if self.moments else ""
        return f"{type(self).__name__} {'with' if self.distill else 'without'} distillation{moments}"


SQUARE = "square/"
SCALE = 2.0**12
"""Begins the names of what clients send beside their models: squares of their changes, times ``SCALE``.

Secure sums round to multiples of 2^−``fraction_bits``, by default 6·10⁻⁸, and the square of 10⁻⁴ is less than that.
"""
UNDRAWN = "running_var"
"""Ends the names of what must not be negative, and is not drawn."""


def draw_gaussian(center: State, spread: State, samples: int, random: torch.Generator) -> State:
    """S models (S, ...) from N(center, spread²), without a client axis; what has no spread is the center."""
    drawn = {}
    for key, value in center.items():
        drawn[key] = value.unsqueeze(0).expand(samples, *value.shape)
        if key in spread:
            noise = torch.randn(samples, *value.shape, dtype=value.dtype, generator=random)
            drawn[key] = value + spread[key] * noise.to(value.device)
    return drawn


def sample_models(
    updates: Mapping[str, Tensor], weights: Tensor, sampler: Sampler, samples: int, random: torch.Generator
) -> State:
    """Draw S models (S, ...) from a distribution fitted to those of C clients, a stack (C, ...).

    The weights (C,) are those of the Gaussian's mean and variances. The Dirichlet distribution is Dir(1, ..., 1).
    Counters are the clients' maximum. The Gaussian's running variances, which must not be negative, are the clients'
    mean.
    """
    center = mean(updates, weights)
    floating = {key: value for key, value in updates.items() if value.is_floating_point()}
    # Normalised exponential variables are distributed as Dir(1, ..., 1).
    shares = torch.empty(samples, len(weights), dtype=torch.float64).exponential_(generator=random)
    shares /= shares.sum(1, keepdim=True)
    if sampler == "gaussian":
        spread = {
            key: mean({key: (value - center[key]).square()}, weights)[key].sqrt()
            for key, value in floating.items()
            if not key.endswith(UNDRAWN)
        }
        return draw_gaussian(center, spread, samples, random)
    mixed = {
        key: (shares.to(value).view(samples, len(weights), *[1] * (value.dim() - 1)) * value).sum(1)
        for key, value in floating.items()
    }
    return draw_gaussian(center, {}, samples, random) | mixed


MODE = "mode"
BEST = "best mode"
"""Integers that travel with what a client receives: the mode it trains, and the one with the least loss on its data."""
UNREPEATABLE = (APFL, FedDyn, MTL, Moon, Scaffold)
"""Algorithms whose clients keep what belongs to the only global model."""


class FedEnsemble(AlgorithmWrapper):
    """K global models (modes) in one federation: a layer over another algorithm's local updates and server step.

    Each mode starts from its own random initialisation. Clients are split once into Q strata. In an age of K rounds,
    every stratum trains each mode once, in an order drawn anew for each stratum and age, and the server aggregates each
    mode from the clients that had it (their Algorithm 1). So a client holds one mode in a round, as in FedAvg. The mean
    of the modes' outputs predicts. Models that clients keep (Ditto, PerAda) are pulled towards the mode of the round.
    With one mode this is the base algorithm.

    Args:
        base: What clients do with the mode they receive, and what the server does with what they send. Default: FedAvg.
        modes: K.
        strata: Q. Default: as many as modes, or as clients where there are fewer.
        assignment: ``permutation`` as above, or ``loss``: a client takes the mode with the least loss on its own
            training images, for which it is sent all modes.
        average: What is averaged to predict: ``logits`` or ``probabilities``.
        keeps: What a client of a base without personal models predicts with: the ``ensemble``, or the ``best`` mode,
            which had the least loss on its training images when it last took part (mode 0 before). For ``best`` it is
            sent all modes.
    """

    def __init__(
        self,
        base: Algorithm | None = None,
        modes: int = 5,
        strata: int | None = None,
        assignment: Literal["permutation", "loss"] = "permutation",
        average: Average = "logits",
        keeps: Literal["ensemble", "best"] = "ensemble",
    ) -> None:
        self.base = base or FedAvg()
        check_base(self, self.base)
        check_integer("modes", modes)
        check_integer("strata", strata, optional=True)
        check_choice("assignment", assignment, ("permutation", "loss"))
        check_choice("average", average, ("logits", "probabilities"))
        check_choice("keeps", keeps, ("ensemble", "best"))
        kind = type(self.base).__name__
        one_model = self.base.sends_updates and self.base.global_model and not self.base.is_ensemble
        if not one_model or isinstance(self.base, UNREPEATABLE) or self.base.personalization():
            raise OptionError(
                f"base={kind} cannot be repeated in modes: its server does not hold exactly one whole model, or its "
                "clients keep what belongs to that one; choose FedAvg, FedProx, FedDF, Ditto, pFedMe or PerAda",
                name="base",
                value=kind,
            )
        if keeps == "best" and self.base.inference == "personal":
            raise OptionError(
                f"keeps='best' cannot be used with base={kind}, whose clients predict with models of their own; "
                "choose keeps='ensemble'",
                name="keeps",
                value="best",
            )
        self.modes = modes
        self.strata = strata
        self.assignment = assignment
        self.average = average
        self.keeps = keeps
        self.inference = "personal" if keeps == "best" else self.base.inference
        self.uses_distillation = self.base.uses_distillation
        self.unsent = self.base.unsent
        self.merges_into_backbone = self.base.merges_into_backbone
        self.compares_models = modes > 1 and (assignment == "loss" or keeps == "best")

    @property
    def kind(self) -> str:
        """The class, the base, and the number of modes."""
        strata = self.modes if self.strata is None else self.strata
        return (
            f"{type(self).__name__} of {self.modes} modes of {self.base.kind}, {strata} strata, assigned by "
            f"{self.assignment}, keeping the {self.keeps}"
        )

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse more strata than clients, and what the base cannot work with."""
        if (self.strata or 0) > num_clients:
            raise OptionError(
                f"strata={self.strata} cannot be filled by {num_clients} clients; give at most as many",
                name="strata",
                value=self.strata,
            )
        self.base.check(tensor_names, num_clients)

    def initial(self, make: Callable[[int], State]) -> State:
        """The modes (K, ...)."""
        return _stacked([make(mode) for mode in range(self.modes)])

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Those of the base."""
        return self.base.phases(epochs, steps)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """What the base keeps of the first mode, and the number of the best mode where clients predict with it."""
        first = unstack(initial)[0]
        if self.keeps == "ensemble":
            return self.base.initial_client_state(first, tensor_names)
        best = next(iter(first.values())).new_zeros((), dtype=torch.long)
        return self.base.initial_client_state(first, tensor_names) | {BEST: {BEST: best}}

    def broadcast(self, sending: Broadcast) -> State:
        """To each client its mode."""
        losses = sending.losses
        device = next(iter(sending.global_state.values())).device
        best = torch.zeros(len(sending.clients), dtype=torch.long) if losses is None else losses.argmin(1)
        if self.assignment == "loss":
            modes = best
        else:
            strata = self.strata or min(self.modes, sending.num_clients)
            schedule = mode_schedule(sending.seed, sending.round, sending.num_clients, self.modes, strata)
            modes = schedule[list(sending.clients)]
        sent = [self.base.broadcast(replace(sending, global_state=mode)) for mode in unstack(sending.global_state)]
        received = sent[0]
        if self.modes > 1:
            rows = list(enumerate(modes.tolist()))
            received = {key: torch.stack([sent[mode][key][row] for row, mode in rows]) for key in sent[0]}
        return received | {MODE: modes.to(device)} | ({BEST: best.to(device)} if self.keeps == "best" else {})

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """As the base."""
        states = {key: value for key, value in received.items() if key not in (MODE, BEST)}
        return self.base.begin_round(client_state, states, tensor_names)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """As the base. The number of the mode goes back too."""
        new_client_state, update = self.base.end_round(trained, client_state, received, tensor_names)
        best = {BEST: {BEST: received[BEST]}} if self.keeps == "best" else {}
        return new_client_state | best, update | {MODE: received[MODE]}

    def server_step(self, server: ServerStep) -> State:
        """The base's server step for each mode that some client had. The others stay as they are."""
        mode_of_client = server.updates.gathered(MODE)
        modes = unstack(clone(server.previous))
        for mode in sorted(set(mode_of_client.tolist())):
            rows = (mode_of_client == mode).nonzero().flatten()
            weights = server.weights
            clients = server.clients
            if len(rows) < len(clients):
                weights = weights[rows.cpu()] / weights[rows.cpu()].sum()
                clients = tuple(clients[row] for row in rows.tolist())
            prefix = f"mode_{mode}/"
            mode_state = {k.removeprefix(prefix): state for k, state in server.state.items() if k.startswith(prefix)}
            mine = replace(
                server,
                clients=clients,
                previous=modes[mode],
                updates=server.updates.part(rows.tolist(), without=(MODE,)),
                weights=weights,
                state=mode_state,
            )
            modes[mode] = modes[mode] | self.base.server_step(mine)
            server.state.update({prefix + name: state for name, state in mode_state.items()})
        return _stacked(modes)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """All modes."""
        return global_state

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """The best mode, or what the base says."""
        if self.keeps == "best":
            return gather(global_state, client_state[BEST][BEST].tolist())
        return self.base.personal(client_state, global_state)


def _stacked(states: list[State]) -> State:
    """A stack. A single state keeps its memory layout, on which the last bits of a convolution depend."""
    return expand(states[0], 1) if len(states) == 1 else stack(states)


def mode_schedule(seed: int, round: int, num_clients: int, modes: int, strata: int) -> Tensor:
    """The mode (M,), one of K, that each of M clients would train in a round, counted from 0. An age is K rounds.

    The Q ``strata`` are random sets of clients, whose sizes differ by at most one.

    >>> torch.stack([mode_schedule(0, round, 4, 3, 2) for round in range(3)]).sort(0).values.tolist()
    [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]]
    """
    stratum = torch.empty(num_clients, dtype=torch.long)
    stratum[torch.randperm(num_clients, generator=generator(seed, "strata"))] = torch.arange(num_clients) % strata
    age, place = divmod(round, modes)
    orders = [torch.randperm(modes, generator=generator(seed, "modes", age, q)) for q in range(strata)]
    return torch.stack(orders)[stratum, place]
