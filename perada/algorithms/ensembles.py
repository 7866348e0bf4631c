# SPDX-License-Identifier: Apache-2.0
"""Algorithms of several global models: FedBE and Fed-ensemble."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.algorithms.base import (
    Algorithm,
    AlgorithmWrapper,
    Broadcast,
    ServerStep,
    Stacks,
    TensorNames,
    check_outermost,
)
from perada.algorithms.fedavg import FedAvg, FedDyn
from perada.algorithms.moon import Moon
from perada.algorithms.perada import APFL, MTL
from perada.algorithms.scaffold import Scaffold
from perada.core.checks import OptionError, check_choice, check_integer, check_number, without_effect
from perada.core.seeding import generator
from perada.core.states import State, clone, device_of, expand, gather, select, stack, unstack, without
from perada.server import mean
from perada.tasks.base import Average

Sampler = Literal["gaussian", "dirichlet"]


class FedBE(Algorithm):
    """FedAvg with a Bayesian ensemble at the server: extra models are drawn from a fit to the clients' models.

    Chen and Chao, ICLR 2021. Clients train and send their models, and keep nothing. The ensemble of the drawn models,
    the clients' models and their mean is distilled into the mean on public images (their Algorithm 1; as everywhere in
    perada, the teachers' logits are averaged). The result is the average of the student's states during distillation
    (stochastic weight averaging). All drawn models are in memory at the same time. Without distillation, every
    checkpoint contains the complete ensemble.

    With ``moments``, the squares are sent times 2¹², so that secure sums do not round them away. Distilling one
    model into itself is skipped. Source: [Chen and Chao, ICLR 2021](https://arxiv.org/abs/2009.01974).

    Args:
        sampler: ``gaussian`` draws from N(mean, diagonal of the variances) of the clients' models, ``dirichlet`` draws
            convex combinations of them (both in their Section 3).
        samples: Number of models drawn in each round.
        distill: Whether the ensemble is distilled. Otherwise the ensemble predicts, by the mean of its probabilities.
        average_from: Share of the distillation steps after which the student's states are averaged; 1 for the last
            state only.
        moments: Whether the Gaussian is fitted to the means of the clients' states and of the squares of their changes,
            which clients also send. The server then requires only sums over clients, and the ensemble has only the
            drawn models and the mean.
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
        check_number("average_from", average_from, ge=0, le=1, hint="it is the share of steps to leave out")
        check_choice("moments", moments, (True, False))
        if average_from != 0.5 and not distill:
            raise without_effect("average_from", average_from, "distill=False", "set distill=True")
        if moments and sampler != "gaussian":
            raise OptionError(
                f"sampler={sampler!r} does not support moments=True: it mixes the clients' models; set moments=False "
                "or choose sampler='gaussian'",
                name="moments",
                value=True,
            )
        self.moments = moments
        self.builds_teachers = moments
        self.sampler = sampler
        self.samples = samples
        self.distill = distill
        self.average_from = average_from
        self.uses_distillation = distill
        self.average = "logits" if distill else "probabilities"

    def beyond_client_privacy(self) -> str:
        """Return that squares of changes, and an ensemble of updates, are not covered."""
        if self.moments:
            return (
                "FedBE(moments=True): its clients also send squares of their changes, which clipping does not cover; "
                "choose FedAvg"
            )
        if not self.distill:
            return (
                "FedBE(distill=False): its ensemble holds single clients' updates and models drawn from them; choose "
                "FedAvg"
            )
        return ""

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing; send the trained state and, with ``moments``, the scaled squares of its change."""
        new_client_state, update = super().end_round(trained, client_state, received, tensor_names)
        squares = {}
        if self.moments:
            for key in tensor_names.keys:
                if update[key].is_floating_point() and not key.endswith(UNDRAWN):
                    squares[SQUARE + key] = (update[key] - received[key]).square() * SCALE
        return new_client_state, update | squares

    def server_step(self, server: ServerStep) -> State:
        """Average the updates and draw models; then distil the ensemble into the average, or store it."""
        random = generator(server.seed, "fedbe", server.round)
        clients_of_models: list[int | None]
        if self.moments:
            squares = [name for name in server.updates.names if name.startswith(SQUARE)]
            models = server.updates.part(range(len(server.clients)), without=squares)
            drawn = self._draw_by_moments(server, squares, random)
            average = server.mean(models, server.weights)
            stacks = [drawn, expand(average, 1)]
            clients_of_models = [None] * (self.samples + 1)
        else:
            models = server.updates
            client_models = models.gathered_all()
            drawn = sample_models(client_models, server.weights, self.sampler, self.samples, random)
            average = server.mean(models, server.weights)
            stacks = [drawn, client_models, expand(average, 1)]
            clients_of_models = [*[None] * self.samples, *server.clients, None]
        teachers = {name: torch.cat([stacked[name] for stacked in stacks]) for name in models.names}
        if self.uses_distillation:
            return server.distill(server.previous | average, teachers, self.average_from, clients_of_models)
        server.state["members"] = teachers
        return average

    def _draw_by_moments(self, server: ServerStep, squares: list[str], random: torch.Generator) -> State:
        """Draw models from the mean and the variances of the clients' models, computed from sums over clients only.

        With the change d_m of client m from the previous state, the variance is mean(d_m²) − mean(d_m)².

        Args:
            server: The server's side of the round.
            squares: Names of the updates that are squares of changes.
            random: Generator of the draws.

        Returns:
            The models (S, ...).
        """
        means = server.updates.mean(server.weights)
        mean_squares = select(means, squares)
        mean_model = without(means, squares)
        spread = {}
        for name, value in mean_model.items():
            if SQUARE + name in mean_squares:
                mean_of_squares = mean_squares[SQUARE + name] / SCALE
                mean_change = value - server.previous[name]
                variance = mean_of_squares - mean_change.square()
                # Rounding errors may make it negative.
                spread[name] = variance.clamp(min=0).sqrt()
        return draw_gaussian(mean_model, spread, self.samples, random)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the ensemble of the last round or, if it was distilled, the global model."""
        if "members" in server_state:
            return server_state["members"]
        return super().members(global_state, server_state)

    @property
    def kind(self) -> str:
        """Name of the class, with whether the ensemble is distilled and whether it is drawn by moments."""
        distillation = "with distillation" if self.distill else "without distillation"
        moments = ", by moments" if self.moments else ""
        return f"{type(self).__name__} {distillation}{moments}"


SQUARE = "square/"
"""Prefix of the names of the squares of changes, which clients send in addition to their models."""
SCALE = 2.0**12
"""Factor of these squares.

Secure sums round to multiples of 2^−``fraction_bits``, by default 6·10⁻⁸. The square of a change of 10⁻⁴ is less.
"""
UNDRAWN = "running_var"
"""Suffix of the names of tensors that must not be negative, and are therefore not drawn."""


def draw_gaussian(center: State, spread: State, samples: int, random: torch.Generator) -> State:
    """Draw models from N(center, spread²); tensors without a spread are copies of the center.

    Args:
        center: Means, without a client axis.
        spread: Standard deviations of the tensors to draw.
        samples: Number S of models.
        random: Generator on the CPU, so that all devices get the same models.

    Returns:
        The models (S, ...).
    """
    drawn = {}
    for key, value in center.items():
        drawn[key] = value.unsqueeze(0).expand(samples, *value.shape)
        if key in spread:
            noise = torch.randn(samples, *value.shape, dtype=value.dtype, generator=random)
            drawn[key] = value + spread[key] * noise.to(value.device)
    return drawn


def sample_models(
    client_models: Mapping[str, Tensor],
    weights: Tensor,
    sampler: Sampler,
    samples: int,
    random: torch.Generator,
) -> State:
    """Draw models from a distribution that is fitted to the models of C clients.

    Counters are the clients' maximum. For the Gaussian, running variances, which must not be negative, are the clients'
    mean.

    Args:
        client_models: The clients' models (C, ...).
        weights: Weight (C,) of each client in the Gaussian's mean and variances.
        sampler: ``gaussian``, or ``dirichlet`` for the distribution Dir(1, ..., 1).
        samples: Number S of models.
        random: Generator on the CPU.

    Returns:
        The models (S, ...).
    """
    center = mean(client_models, weights)
    floating = {key: value for key, value in client_models.items() if value.is_floating_point()}
    # Normalised exponential variables have the distribution Dir(1, ..., 1). They are drawn for the Gaussian too, so
    # that its numbers stay those that come next in the generator's stream.
    shares = torch.empty(samples, len(weights), dtype=torch.float64).exponential_(generator=random)
    shares /= shares.sum(1, keepdim=True)
    if sampler == "gaussian":
        spread = {}
        for key, value in floating.items():
            if not key.endswith(UNDRAWN):
                squared_deviations = (value - center[key]).square()
                variance = mean({key: squared_deviations}, weights)[key]
                spread[key] = variance.sqrt()
        return draw_gaussian(center, spread, samples, random)
    mixed = {}
    for key, value in floating.items():
        axes_of_one_model = [1] * (value.dim() - 1)
        shares_of_clients = shares.to(value).view(samples, len(weights), *axes_of_one_model)
        mixed[key] = (shares_of_clients * value).sum(1)
    # Without a spread these are copies of the center, from which only the counters are used.
    copies_of_center = draw_gaussian(center, {}, samples, random)
    return copies_of_center | mixed


MODE = "mode"
"""Name under which a client receives and sends the index of the mode that it trains."""
BEST = "best mode"
"""Name under which a client receives the index of the mode with the smallest loss on its data."""
UNREPEATABLE = (APFL, FedDyn, MTL, Moon, Scaffold)
"""Algorithms whose clients keep states that belong to a single global model."""


class FedEnsemble(AlgorithmWrapper):
    """K global models (modes) in one federation, each trained by another algorithm (Shi et al., 2021).

    Each mode starts from its own random initialisation. Clients are divided once into Q strata. In an age of K rounds,
    every stratum trains each mode once, in an order that is drawn for each stratum and age. The server aggregates each
    mode from the clients that trained it (their Algorithm 1). A client thus trains one model in a round, as in FedAvg.
    Predictions are the average of the modes' outputs. Personal models (Ditto, PerAda) are pulled towards the mode of
    the round. With one mode this is the base algorithm.

    Source: [Shi et al., 2021](https://arxiv.org/abs/2107.10663).

    Args:
        base: Algorithm of the clients' training and of the server step of each mode. Default: FedAvg.
        modes: Number K of modes.
        strata: Number Q of strata. Default: the number of modes, or of clients if there are fewer.
        assignment: ``permutation`` as above; with ``loss`` a client trains the mode with the smallest loss on its
            training images, for which it receives all modes.
        average: Which outputs are averaged to predict: ``logits`` or ``probabilities``.
        keeps: Which model clients without personal models predict with: the ``ensemble``, or the ``best`` mode, which
            had the smallest loss on the client's training images when it last took part (mode 0 before). For ``best``,
            clients receive all modes.
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
        super().__init__(FedAvg() if base is None else base)
        check_outermost(self)
        check_integer("modes", modes)
        check_integer("strata", strata, optional=True)
        check_choice("assignment", assignment, ("permutation", "loss"))
        check_choice("average", average, ("logits", "probabilities"))
        check_choice("keeps", keeps, ("ensemble", "best"))
        self._check_repeatable()
        base_name = type(self.base).__name__
        if keeps == "best" and self.base.inference == "personal":
            raise OptionError(
                f"base={base_name} does not support keeps='best': its clients predict with personal models; choose "
                "keeps='ensemble'",
                name="keeps",
                value="best",
            )
        self.modes = modes
        self.strata = strata
        self.assignment = assignment
        self.average = average
        self.keeps = keeps
        if keeps == "best":
            self.inference = "personal"
        self.compares_models = modes > 1 and (assignment == "loss" or keeps == "best")

    def _check_repeatable(self) -> None:
        """Raise an OptionError if the base does not support several global models with different clients in a round."""
        base = self.base
        has_one_model = base.sends_updates and base.global_model and not base.is_ensemble
        if not has_one_model or isinstance(base, UNREPEATABLE) or base.personalization():
            base_name = type(base).__name__
            raise OptionError(
                f"base={base_name} cannot be repeated in modes: its server does not hold exactly one complete model, "
                "or its clients keep state that belongs to that model; choose FedAvg, FedProx, FedDF, Ditto, pFedMe "
                "or PerAda",
                name="base",
                value=base_name,
            )

    @property
    def kind(self) -> str:
        """Name of the class, with the base and the options that determine the saved states."""
        strata = self.modes if self.strata is None else self.strata
        return (
            f"{type(self).__name__} of {self.modes} modes of {self.base.kind}, {strata} strata, assigned by "
            f"{self.assignment}, keeping the {self.keeps}"
        )

    @property
    def is_ensemble(self) -> bool:
        """Always true, since the modes predict together."""
        return True

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if there are more strata than clients, or if the base does not support the tensors."""
        if self.strata is not None and self.strata > num_clients:
            raise OptionError(
                f"strata={self.strata} exceeds the number of clients, {num_clients}; set strata to at most "
                f"{num_clients}",
                name="strata",
                value=self.strata,
            )
        self.base.check(tensor_names, num_clients)

    def initial(self, make: Callable[[int], State]) -> State:
        """Return the modes (K, ...), each from its own random initialisation."""
        return _stack_states([make(mode) for mode in range(self.modes)])

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep what the base keeps, with the first mode as its global state, and the index of the best mode if used."""
        first_mode = unstack(initial)[0]
        client_state = self.base.initial_client_state(first_mode, tensor_names)
        if self.keeps == "best":
            best = torch.zeros((), dtype=torch.long, device=device_of(first_mode))
            client_state = client_state | {BEST: {BEST: best}}
        return client_state

    def broadcast(self, sending: Broadcast) -> State:
        """Send each client its mode as the base sends a global state, and the indices of that and of its best mode."""
        best_modes = torch.zeros(len(sending.clients), dtype=torch.long)
        if sending.losses is not None:
            best_modes = sending.losses.argmin(1)
        if self.assignment == "loss":
            modes = best_modes
        else:
            strata = self.strata or min(self.modes, sending.num_clients)
            schedule = mode_schedule(sending.seed, sending.round, sending.num_clients, self.modes, strata)
            modes = schedule[list(sending.clients)]
        device = device_of(sending.global_state)
        indices = {MODE: modes.to(device)}
        if self.keeps == "best":
            indices[BEST] = best_modes.to(device)
        return self._broadcast_modes(sending, modes) | indices

    def _broadcast_modes(self, sending: Broadcast, modes: Tensor) -> State:
        """Return the states (C, ...) that the base sends to clients with different modes.

        Args:
            sending: The server's knowledge, with all modes as its global state.
            modes: Index (C,) of each client's mode.
        """
        # For each mode, the states that all clients would receive if it were theirs.
        sent_by_mode = []
        for mode in unstack(sending.global_state):
            sent_by_mode.append(self.base.broadcast(replace(sending, global_state=mode)))
        if self.modes == 1:
            return sent_by_mode[0]
        received = {}
        for key in sent_by_mode[0]:
            rows = [sent_by_mode[mode][key][client] for client, mode in enumerate(modes.tolist())]
            received[key] = torch.stack(rows)
        return received

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the states that the base trains."""
        sent_by_base = without(received, (MODE, BEST))
        return self.base.begin_round(client_state, sent_by_base, tensor_names)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep and send the states of the base, keep the index of the best mode, and send that of the trained one."""
        new_client_state, update = self.base.end_round(trained, client_state, received, tensor_names)
        if self.keeps == "best":
            new_client_state = new_client_state | {BEST: {BEST: received[BEST]}}
        return new_client_state, update | {MODE: received[MODE]}

    def server_step(self, server: ServerStep) -> State:
        """Take the base's server step for each mode that a client trained; the others are unchanged."""
        # The host waits for the device only here, once for all modes.
        mode_of_client = server.updates.gathered(MODE).tolist()
        modes = unstack(clone(server.previous))
        for mode in sorted(set(mode_of_client)):
            rows = [row for row, trained_mode in enumerate(mode_of_client) if trained_mode == mode]
            # Each mode has its own server tensors, whose names have a prefix.
            prefix = f"mode_{mode}/"
            step_of_mode = _part_of_step(server, rows, modes[mode], prefix)
            modes[mode] = modes[mode] | self.base.server_step(step_of_mode)
            for name, state in step_of_mode.state.items():
                server.state[prefix + name] = state
        return _stack_states(modes)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return all modes."""
        return global_state

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with the best mode of each client, or as the base does."""
        if self.keeps == "best":
            return gather(global_state, client_state[BEST][BEST].tolist())
        return self.base.personal(client_state, global_state)


def _part_of_step(server: ServerStep, places: Sequence[int], mode: State, prefix: str) -> ServerStep:
    """Return the server step of a single mode.

    Args:
        server: The server step of all modes.
        places: Indices, among the round's clients, of those that trained the mode.
        mode: State of the mode before the round.
        prefix: Prefix of the names of the mode's server tensors.
    """
    clients = server.clients
    weights = server.weights
    # With all clients the weights stay as they are, to the last bit.
    if len(places) < len(clients):
        clients = tuple(clients[row] for row in places)
        weights = weights[places] / weights[places].sum()
    mode_state: dict[str, State] = {}
    for name, state in server.state.items():
        if name.startswith(prefix):
            mode_state[name.removeprefix(prefix)] = state
    return replace(
        server,
        clients=clients,
        previous=mode,
        updates=server.updates.part(places, without=(MODE,)),
        weights=weights,
        state=mode_state,
    )


def _stack_states(states: list[State]) -> State:
    """Stack states (K, ...)."""
    if len(states) == 1:
        # A view, which keeps the memory layout: the last bits of a convolution depend on it.
        return expand(states[0], 1)
    return stack(states)


def mode_schedule(seed: int, round: int, num_clients: int, modes: int, strata: int) -> Tensor:
    """Return the mode that each client would train in a round.

    Strata are random sets of clients, whose sizes differ by at most one. In each age of K rounds, a stratum trains
    every mode once.

    Args:
        seed: Seed of the run.
        round: Number of the round, counted from 0.
        num_clients: Number M of all clients.
        modes: Number K of modes.
        strata: Number Q of strata.

    Returns:
        Index (M,) of the mode of each client.

    >>> torch.stack([mode_schedule(0, round, 4, 3, 2) for round in range(3)]).sort(0).values.tolist()
    [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]]
    """
    stratum_of_client = torch.empty(num_clients, dtype=torch.long)
    order_of_clients = torch.randperm(num_clients, generator=generator(seed, "strata"))
    stratum_of_client[order_of_clients] = torch.arange(num_clients) % strata
    age, round_in_age = divmod(round, modes)
    orders = []
    for stratum in range(strata):
        orders.append(torch.randperm(modes, generator=generator(seed, "modes", age, stratum)))
    return torch.stack(orders)[stratum_of_client, round_in_age]
