# SPDX-License-Identifier: Apache-2.0
"""Client-level differential privacy: each client's update is clipped and receives its share of the noise.

Two federations are neighbours if one client's part in every round is taken out of the sums: neither a change nor, with
adaptive clipping, a vote. The number of clients of a round, by which sums are divided, is the same in both. A client
whose data are exchanged for others' counts as two such steps. Clients are drawn in fixed number, for which no
amplification is claimed: the sample rate is 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.seeding import generator
from perada.core.states import State, per_client
from perada.privacy.account import Budget, Cost, Planned
from perada.privacy.accounting import calibrate
from perada.privacy.client_sums import (
    VOTE,
    check_grid,
    clip_to_grid,
    exact_change,
    example_contribution,
    floating_names,
    integer_noise,
)
from perada.privacy.clipping import check_bound, noisy_mean, with_noise
from perada.privacy.options import ClientPrivacy
from perada.server import SecureSums, Updates
from perada.server.aggregate import double, double_dtype


class ClippedUpdates(NamedTuple):
    """Clipped changes of C clients.

    Attributes:
        changes: The changes (C, ...) of the floating-point tensors, in their dtypes.
        norms: Their norms (C,) before clipping in float64 (where the device has it), NaN where they are not finite.
    """

    changes: State
    norms: Tensor


def clip_updates(updates: State, received: State, max_norm: float) -> ClippedUpdates:
    """Return the change that each client sends, scaled down to the norm S where it is longer.

    δ ← δ · min(1, S / ‖δ‖) with the norm over all floating tensors together (McMahan et al., ICLR 2018, section 2.2,
    flat clipping): parameters and running statistics. A client with anything that is not finite sends no change.

    Args:
        updates: States (C, ...) that clients send.
        received: States (C, ...) that they had received.
        max_norm: The norm S.

    Raises:
        ValueError: As :func:`.floating_names`.
    """
    check_bound(max_norm)
    changes: State = {}
    tensor_norms = []
    for key in floating_names(updates, received):
        change = updates[key].detach() - received[key].detach()
        changes[key] = change
        rows = change.reshape(len(change), math.prod(change.shape[1:]))
        tensor_norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=double_dtype(rows.device)))
    norms = torch.stack(tensor_norms).square().sum(0).sqrt()
    is_finite = norms.isfinite()  # a NaN or infinity in a tensor is one in its norm
    norms = norms.where(is_finite, math.nan)
    factors = (max_norm / norms).clamp(max=1.0)
    clipped: State = {}
    for key, change in changes.items():
        scaled = per_client(factors.to(change), change) * change
        clipped[key] = scaled.where(per_client(is_finite, change), 0)
    return ClippedUpdates(clipped, norms)


def noisy_updates(
    updates: State,
    received: State,
    clipped: State,
    std: float,
    generators: Sequence[torch.Generator] | None,
) -> State:
    """Return received + clipped change + noise in each row; all states are stacks (C, ...).

    Args:
        updates: States that clients send, for the names and their order.
        received: States that they had received. Tensors that are not in ``clipped`` are returned as they are here.
        clipped: Clipped changes.
        std: Standard deviation of the noise in each row.
        generators: Generator of each row's noise; None for the cryptographic generator. See :func:`.noisy_mean`.
    """
    base = {key: received[key].detach() for key in clipped}
    # Changes are added to what was received in double precision, together with the noise, and rounded once.
    clients = len(next(iter(clipped.values())))
    noisy = noisy_mean(base, std, [1.0] * clients, generators, added=clipped)
    unchanged = {key: received[key].detach().clone() for key in updates}
    return unchanged | noisy


def split_noise(noise_multiplier: float, count_noise: float) -> float:
    """Return the noise multiplier z_Δ of the clipped updates, given that the noisy count of short ones takes part of z.

    z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2) (Andrew et al., NeurIPS 2021, theorem 1), so that both together cost what z costs.

    Args:
        noise_multiplier: z of updates and count together.
        count_noise: σ_b, the standard deviation of the noise in the count.

    Raises:
        ValueError: If the count on its own costs as much as z allows.

    >>> round(split_noise(0.6, 0.5), 9)
    0.75
    """
    if noise_multiplier == 0:
        return 0.0
    if not 2 * count_noise > noise_multiplier:
        raise OptionError(
            f"count_noise={count_noise} is too small for noise_multiplier={noise_multiplier}: counting the short "
            f"updates would by itself exceed the budget; choose more than {noise_multiplier / 2} (the default is a "
            "twentieth of the clients of a round, so drawing more clients helps too), or clipping='fixed'",
            name="count_noise",
            value=count_noise,
        )
    return float((noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5)


def noisy_share(norms: Tensor, max_norm: float, count_noise: float, generator: torch.Generator | None) -> float:
    """Return the noisy share of clients whose update norm is at most S (Andrew et al. 2021, algorithm 1).

    1/2 + (Σ (b_i − 1/2) + noise) / C with b_i = 1 for a short update and 0 for a long one; so a client changes the sum
    by 1/2 at most. Noise may take the share below 0 or above 1.

    Args:
        norms: Norms (C,) of the updates. A client that is not finite, whose norm is NaN, changes nothing.
        max_norm: The norm S.
        count_noise: Standard deviation of the noise in the sum.
        generator: A generator on the CPU; None for the cryptographic one.
    """
    votes = torch.where(norms.isnan(), 0.0, torch.where(norms <= max_norm, 0.5, -0.5))
    noisy_votes = with_noise(votes.sum(dtype=torch.float64), count_noise, generator)
    return 0.5 + float(noisy_votes) / len(norms)


def floor_variances(state: State) -> State:
    """Set running variances that noise made negative to 0; this is post-processing and costs nothing."""
    floored = dict(state)
    for key, value in state.items():
        if key.endswith("running_var"):
            floored[key] = value.clamp(min=0)
    return floored


@dataclass(frozen=True)
class _NoiseSplit:
    """The split of a round's noise between the updates and the count of short ones.

    Attributes:
        update_multiplier: z_Δ, the noise multiplier of the updates.
        count_std: σ_b, the standard deviation of the noise in the count; 0 where there is no count.
    """

    update_multiplier: float
    count_std: float


@dataclass(frozen=True)
class ContributionNoise:
    """Standard deviations of the noise that one client adds to a secure sum.

    Attributes:
        change: Standard deviation for each element of its change.
        vote: Standard deviation for its vote; None unless clipping is adaptive.
    """

    change: float
    vote: float | None = None

    def of(self, name: str) -> float:
        """Return the standard deviation for the tensor with this name."""
        return self.vote if name == VOTE and self.vote is not None else self.change


class ClientLevel(Budget):
    """Client-level privacy of a run: makes each round's updates private and accounts for the cost.

    Args:
        options: The section ``client_privacy``.
        seed: Seed of the run, from which the noise follows in the test mode.
        clients: Smallest number of clients in a round.
        rounds: Rounds in which a client takes part, for which a target is calibrated.
        planned: In how many of the planned rounds each client takes part.
        sums: Options of secure sums, in which each client adds its part of the noise itself.

    Attributes:
        noise_multiplier: z of a round: of the updates and, with adaptive clipping, the count together.
        norm: S of the next round.
        hidden: Whether the server was given only noisy sums in all rounds so far.

    Raises:
        ValueError: If there is a target and no number of rounds, if the count's noise is too little, or the sums' grid
            is too coarse for the noise.
    """

    section = "client_privacy"
    options: ClientPrivacy

    def __init__(
        self,
        options: ClientPrivacy,
        seed: int,
        clients: int,
        rounds: int = 0,
        planned: Planned | None = None,
        sums: SecureSums | None = None,
    ) -> None:
        super().__init__(options, planned)
        self.sums = sums
        self.hidden = sums is not None
        self.norm = options.max_norm
        self.noise_multiplier = options.noise_multiplier or 0.0
        self._seed = seed
        self._count_std = clients / 20 if options.count_noise is None else options.count_noise
        if options.target_epsilon is not None:
            self.check_planned(rounds > 0)
            self.noise_multiplier = calibrate(options.target_epsilon, options.delta, 1.0, rounds, options.accountant)
        self._noise_split()  # rejects too little noise of the count
        if sums is not None:
            self.contribution_noise(max(clients, sums.min_sites))  # rejects a grid that is too coarse

    def _noise_split(self) -> _NoiseSplit:
        """Divide z between the updates and the count."""
        if self.options.clipping == "fixed":
            return _NoiseSplit(self.noise_multiplier, 0.0)
        return _NoiseSplit(split_noise(self.noise_multiplier, self._count_std), self._count_std)

    def costs(self, client: int, tuning: bool = False) -> list[Cost]:
        """Return the single step of a round; fine-tuning sends nothing."""
        if tuning:
            return []
        return [Cost(client, self.noise_multiplier, sample_rate=1.0, steps=1, sent=True)]

    def privatized(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """Make the updates of a round private, and move S. The round must have been counted; all ranks must call this.

        received + clipped change + the client's share of the noise, whose standard deviation is z · S / √C. The sum
        over the C ``clients`` then has noise z · S, so that z is the noise multiplier of any function of the uniform
        mean. A single row has less noise than that. Integer tensors are those received.

        Args:
            updates: Updates of the clients. They may be NaN or infinite, which depends on the data.
            received: States (c, ...) that the clients on this rank had received.
            round: Number of the round.
            clients: All clients of the round.

        Returns:
            Private states (c, ...), in the names, order and dtypes of ``updates``.
        """
        generators = None
        if not self.options.secure_rng:
            generators = [generator(self._seed, "client privacy", round, clients[place]) for place in updates.places]
        split = self._noise_split()
        clipped = clip_updates(updates.local_rows, received, self.norm)
        norms = torch.zeros(len(clients), dtype=torch.float64)
        norms[updates.places] = clipped.norms.cpu()
        # A collective: every rank has the norms of all clients after it.
        updates.ranks.sum_([norms])
        std = self.norm * split.update_multiplier / math.sqrt(len(clients))
        result = noisy_updates(updates.local_rows, received, clipped.changes, std, generators)
        if self.options.clipping == "adaptive":
            source = None
            if not self.options.secure_rng:
                source = generator(self._seed, "client privacy/count", round)
            count_std = split.count_std if self.noise_multiplier else 0.0
            share = noisy_share(norms, self.norm, count_std, source)
            # A cryptographic generator draws something else on each rank: all take that of the first.
            share = updates.ranks.gather(share)[0]
            self._move_norm(share, len(clients))
        return result

    def contribution_noise(self, clients: int) -> ContributionNoise:
        """Return the noise that each of n ``clients`` adds to a secure sum: that of the full sum, divided by √t.

        At least t of the clients are in the sum (:meth:`.SecureSums.least`).

        Raises:
            ValueError: If the sum's grid is too coarse for the noise, or too small.
        """
        assert self.sums is not None
        split = self._noise_split()
        root = math.sqrt(self.sums.least(clients))
        change_std = self.norm * split.update_multiplier / root
        check_grid(self.sums, self.norm, change_std, clients, "the change")
        if self.options.clipping != "adaptive":
            return ContributionNoise(change_std)
        vote_std = split.count_std / root if self.noise_multiplier else 0.0
        check_grid(self.sums, 0.5, vote_std, clients, "the vote")
        return ContributionNoise(change_std, vote_std)

    def contribution(self, update: State, received: State, clients: int, round: int, client: int) -> State:
        """Return a client's contribution to a secure sum over n ``clients``: its noisy clipped change, in integers.

        With adaptive clipping its vote is added. A client that is not finite adds only noise.

        Args:
            update: State that the client sends, without a client axis.
            received: State that it had received.
            clients: Number of clients in the sum.
            round: Number of the round.
            client: Number of the client.

        Raises:
            ValueError: As :meth:`contribution_noise`.
        """
        assert self.sums is not None
        noise = self.contribution_noise(clients)
        integers, norm = clip_to_grid(exact_change(update, received), self.norm, self.sums)
        if self.options.clipping == "adaptive":
            if math.isnan(norm):
                vote = 0.0
            else:
                vote = 0.5 if norm <= self.norm else -0.5
            integers[VOTE] = self.sums.to_integers(torch.tensor(vote), clients)
        source = self._noise_source(round, client)
        # Noise is drawn in the order of names, which a simulation and the sites share.
        for name in sorted(integers):
            deviation = math.ldexp(noise.of(name), self.sums.fraction_bits)  # in multiples of the grid
            integers[name] = integers[name] + integer_noise(integers[name].shape, deviation, source)
        return integers

    def _noise_source(self, round: int, client: int) -> torch.Generator | None:
        """Return the generator of a client's noise in a round; None for the cryptographic generator."""
        if self.options.secure_rng:
            return None
        return generator(self._seed, "client privacy", round, client)

    def mean_change(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """Return the mean change from a secure sum over a round's ``clients``, computed as sites compute it.

        The arguments are as those of :meth:`privatized`; all ranks call it.
        """
        assert self.sums is not None
        totals: State = {}
        for row, place in enumerate(updates.places):
            sent = {key: value[row] for key, value in updates.local_rows.items()}
            base = {key: value[row] for key, value in received.items()}
            contribution = self.contribution(sent, base, len(clients), round, clients[place])
            for name, value in contribution.items():
                totals[name] = totals[name] + value if name in totals else value
        if not updates.places:
            # A rank without clients takes part in the collective with zeros.
            sent = {key: value.new_zeros(value.shape[1:]) for key, value in updates.local_rows.items()}
            example = example_contribution(sent, self.options.clipping == "adaptive")
            totals = {name: value.long() for name, value in example.items()}
        # Ranks must sum tensors in the same order.
        updates.ranks.sum_([totals[name] for name in sorted(totals)])
        return {name: self.sums.real(total) / len(clients) for name, total in totals.items()}

    def apply_mean_change(self, base: State, change: Mapping[str, Tensor], clients: int) -> State:
        """Return the state after a round of secure sums, and move S.

        Args:
            base: State that clients received, without a client axis. Tensors without a change are kept.
            change: Mean change that a secure sum gave, with the mean vote if clipping is adaptive.
            clients: Number of clients of the round.
        """
        if VOTE in change:
            self._move_norm(0.5 + float(change[VOTE]), clients)
        moved: State = {}
        for key, value in base.items():
            if key in change:
                exact = double(value) + change[key].to(value.device, double_dtype(value.device))
                moved[key] = exact.to(value.dtype)
            else:
                moved[key] = value
        return moved

    def _move_norm(self, share: float, clients: int) -> None:
        """Update S geometrically, from the noisy ``share`` of short updates (Andrew et al. 2021, section 2.2).

        S stays where a secure sum over n ``clients`` would have no room for the new one.
        """
        previous_norm = self.norm
        self.norm *= math.exp(-self.options.clip_lr * (share - self.options.quantile))
        if self.sums is not None:
            try:
                self.contribution_noise(clients)
            except ValueError:
                self.norm = previous_norm

    def metrics(self) -> dict[str, float]:
        """Return S for the next round, and the largest ε of any client so far."""
        epsilon = self.ledgers.server.summary(self.options.delta, self.options.accountant)
        return {"privacy/client_norm": self.norm, "privacy/client_epsilon_max": epsilon["max"]}

    def record(self, num_clients: int) -> dict[str, Any]:
        """Return the options, the smallest noise of any round, and each client's ε, in plain types."""
        past_noise = [sigma for _, sigma, *_ in self.ledgers.server.state_dict()["rows"]]
        record: dict[str, Any] = {
            "options": asdict(self.options),
            "noise_multiplier": min([self.noise_multiplier, *past_noise]),
            "epsilon": self.epsilons(range(num_clients))["server"],
        }
        if self.hidden and self.sums is not None:
            record["sums"] = {"min_sites": self.sums.min_sites, "threshold": self.sums.threshold}
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return S, z, the ledgers, and whether everything was hidden in sums, in plain types."""
        return super().state_dict() | {
            "norm": self.norm,
            "noise_multiplier": self.noise_multiplier,
            "hidden": self.hidden,
        }

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """Resume like :meth:`.Budget.load_state_dict`; a calibrated z keeps its value.

        Raises:
            ValueError: Also if :meth:`state_dict` did not return this.
        """
        names = sorted(self.state_dict())
        if sorted(state) != names:
            raise ValueError(
                f"the state of client-level privacy must have the keys {names}, got {sorted(state)}; "
                "load what its state_dict() returned"
            )
        check_bound(state["norm"])
        if self.options.target_epsilon is not None:
            self.noise_multiplier = state["noise_multiplier"]
        super().load_state_dict(state, rounds_done, tuned)
        self.norm = float(state["norm"])
        # Once the server saw more than sums, no later round can hide that.
        self.hidden = bool(state["hidden"]) and self.sums is not None
