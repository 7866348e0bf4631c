# SPDX-License-Identifier: Apache-2.0
"""Client-level differential privacy: each client's update is clipped and receives its share of the noise.

Two federations are neighbours if one of them lacks one client's contribution to the sums of all rounds: its change and,
with adaptive clipping, its vote. The number of clients of a round, by which sums are divided, is the same in both.
Replacing a client's data by other data is two such steps. A fixed number of clients is drawn in each round, for which
no amplification is claimed: the sample rate is 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.seeding import generator
from perada.core.states import State, double, double_dtype, per_client, stack_size
from perada.core.text import quoted
from perada.privacy.account import Budget, CountRemainingRounds, StepCost
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


class ClippedUpdates(NamedTuple):
    """Clipped changes of C clients.

    Attributes:
        changes: Clipped changes (C, ...) of the floating-point tensors, in their dtypes.
        norms: Norm (C,) of each client's change before clipping; NaN if the change is not finite. In float64 where the
            device supports it.
    """

    changes: State
    norms: Tensor


def clip_updates(sent: State, received: State, max_norm: float) -> ClippedUpdates:
    """Return the change of each client, scaled down to a maximum norm S.

    δ ← δ · min(1, S / ‖δ‖), with the norm over all floating-point tensors together, parameters and running statistics
    (flat clipping: McMahan et al., ICLR 2018, section 2.2). If any element of a client's change is not finite, its
    change is 0.

    Args:
        sent: States (C, ...) that C clients send.
        received: States (C, ...) that they had received.
        max_norm: Maximum norm S.

    Raises:
        ValueError: As :func:`.floating_names` does.
    """
    check_bound(max_norm)
    changes: State = {}
    tensor_norms = []
    for key in floating_names(sent, received):
        change = sent[key].detach() - received[key].detach()
        changes[key] = change
        # flatten(1) raises an error for tensors whose only axis is that of the clients.
        rows = change.reshape(len(change), math.prod(change.shape[1:]))
        tensor_norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=double_dtype(rows.device)))
    norms = torch.stack(tensor_norms).square().sum(0).sqrt()
    # A NaN or infinity in any tensor makes the norm NaN or infinite.
    is_finite = norms.isfinite()
    norms = norms.where(is_finite, math.nan)
    factors = (max_norm / norms).clamp(max=1.0)
    clipped: State = {}
    for key, change in changes.items():
        scaled = per_client(factors.to(change), change) * change
        # A factor of 0 would not do, since 0 · NaN is NaN.
        clipped[key] = scaled.where(per_client(is_finite, change), 0)
    return ClippedUpdates(clipped, norms)


def noisy_updates(
    sent: State,
    received: State,
    clipped: State,
    std: float,
    generators: Sequence[torch.Generator] | None,
) -> State:
    """Return received + clipped change + noise for each of C clients.

    Args:
        sent: States (C, ...) that clients send, for the names and their order.
        received: States (C, ...) that they had received. Tensors without a clipped change are returned unchanged.
        clipped: Clipped changes (C, ...).
        std: Standard deviation of the noise of one client.
        generators: Generator of each row's noise; None for the cryptographic generator. See :func:`.noisy_mean`.
    """
    base = {key: received[key].detach() for key in clipped}
    # noisy_mean adds changes and noise in double precision, and rounds once.
    num_clients = stack_size(clipped)
    noisy = noisy_mean(base, std, [1.0] * num_clients, generators, added=clipped)
    unchanged = {key: received[key].detach().clone() for key in sent}
    return unchanged | noisy


def split_noise(noise_multiplier: float, count_noise: float) -> float:
    """Return the noise multiplier of clipped updates that are released together with a noisy count of short ones.

    z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2) (Andrew et al., NeurIPS 2021, theorem 1), so that both together cost as much privacy
    as a single release with z.

    Args:
        noise_multiplier: z, the noise multiplier of updates and count together.
        count_noise: σ_b, the standard deviation of the noise in the count.

    Returns:
        z_Δ, the noise multiplier of the updates.

    Raises:
        ValueError: If the count by itself costs as much as z allows.

    >>> round(split_noise(0.6, 0.5), 9)
    0.75
    """
    # A round without noise is not private, and has nothing to split.
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

    It is 1/2 + (Σ v_i + noise) / C, where the vote v_i is 1/2 for a short update and −1/2 for a long one, so that a
    client changes the sum by 1/2 at most. Because of the noise, the share can be below 0 or above 1.

    Args:
        norms: Norm (C,) of each update. NaN marks an update that is not finite, whose vote is 0.
        max_norm: Maximum norm S.
        count_noise: Standard deviation of the noise in the sum.
        generator: Generator of the noise, on the CPU; None for the cryptographic generator.
    """
    votes = torch.where(norms <= max_norm, 0.5, -0.5)
    votes = votes.where(~norms.isnan(), 0.0)
    noisy_votes = with_noise(votes.sum(dtype=torch.float64), count_noise, generator)
    return 0.5 + float(noisy_votes) / len(norms)


def floor_variances(state: State) -> State:
    """Set running variances that noise made negative to 0. This is post-processing, which costs no privacy."""
    floored = dict(state)
    for key, value in state.items():
        if key.endswith("running_var"):
            floored[key] = value.clamp(min=0)
    return floored


@dataclass(frozen=True)
class _NoiseSplit:
    """Noise of a round, split between the updates and the count of short updates.

    Attributes:
        update_multiplier: z_Δ, the noise multiplier of the updates.
        count_std: σ_b, the standard deviation of the noise in the count; 0 without a count.
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
        """Return the standard deviation for a tensor of the contribution."""
        if name == VOTE and self.vote is not None:
            return self.vote
        return self.change


class ClientLevel(Budget):
    """Client-level privacy of a run: makes each round's updates private and accounts for the cost.

    Args:
        client_privacy: The section ``client_privacy``.
        seed: Seed of the run, from which the noise is derived in the test mode.
        num_clients: Smallest number of clients in a round.
        rounds: Number of rounds in which a client takes part, for which the noise of a target ε is calibrated.
        planned: In how many of the planned rounds each client takes part.
        secure_sums: Options of secure sums, in which each client adds its share of the noise itself; None without them.

    Attributes:
        noise_multiplier: z of a round, for the updates and, with adaptive clipping, the count together.
        norm: Maximum norm S of the next round.
        hidden: Whether the server saw nothing but noisy sums in all rounds so far.

    Raises:
        ValueError: If a target is set without a number of rounds, if the count has too little noise, or if the grid of
            the sums is too coarse for the noise.
    """

    section = "client_privacy"
    options: ClientPrivacy

    def __init__(
        self,
        client_privacy: ClientPrivacy,
        seed: int,
        num_clients: int,
        rounds: int = 0,
        planned: CountRemainingRounds | None = None,
        secure_sums: SecureSums | None = None,
    ) -> None:
        super().__init__(client_privacy, planned)
        self.sums = secure_sums
        self.hidden = secure_sums is not None
        self.norm = client_privacy.max_norm
        self.noise_multiplier = client_privacy.noise_multiplier or 0.0
        self._seed = seed
        self._count_std = num_clients / 20 if client_privacy.count_noise is None else client_privacy.count_noise
        if client_privacy.target_epsilon is not None:
            self.check_planned(rounds > 0)
            self.noise_multiplier = calibrate(
                client_privacy.target_epsilon, client_privacy.delta, 1.0, rounds, client_privacy.accountant
            )
        # Both are called for their errors: the first rejects too little noise of the count, the second a coarse grid.
        self._noise_split()
        if secure_sums is not None:
            self.contribution_noise(max(num_clients, secure_sums.min_sites))

    def _noise_split(self) -> _NoiseSplit:
        """Split z between the updates and the count of short updates."""
        if self.options.clipping == "fixed":
            return _NoiseSplit(self.noise_multiplier, 0.0)
        return _NoiseSplit(split_noise(self.noise_multiplier, self._count_std), self._count_std)

    def costs(self, client: int, is_tuning: bool = False) -> list[StepCost]:
        """Return the cost of a round, a single step, for one client."""
        # Fine-tuning sends nothing.
        if is_tuning:
            return []
        return [StepCost(client, self.noise_multiplier, sample_rate=1.0, steps=1, sent=True)]

    def privatized(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """Make the updates of a round private, and update S. A collective: all ranks must call this.

        A private update is received + clipped change + the client's share of the noise, whose standard deviation is
        z · S / √C. The sum over all C clients then has noise z · S, so that z is the noise multiplier of any function
        of their uniform mean. A single update has less noise than that. Integer tensors are returned as received.

        The cost of the round must have been recorded before.

        Args:
            updates: Updates of the clients. They may be NaN or infinite, which depends on the data.
            received: States (c, ...) that the clients on this rank had received.
            round: Number of the round.
            clients: All C clients of the round, on all ranks.

        Returns:
            Private states (c, ...) of the clients on this rank, with the names, order and dtypes of ``updates``.
        """
        generators = None
        if not self.options.secure_rng:
            generators = [generator(self._seed, "client privacy", round, clients[place]) for place in updates.places]
        split = self._noise_split()
        clipped = clip_updates(updates.local_rows, received, self.norm)
        norms = torch.zeros(len(clients), dtype=torch.float64)
        norms[updates.places] = clipped.norms.cpu()
        # A collective: each rank filled in the norms of its clients, and the sum has those of all.
        updates.ranks.sum_([norms])
        std = self.norm * split.update_multiplier / math.sqrt(len(clients))
        result = noisy_updates(updates.local_rows, received, clipped.changes, std, generators)
        if self.options.clipping == "adaptive":
            source = None
            if not self.options.secure_rng:
                source = generator(self._seed, "client privacy/count", round)
            count_std = split.count_std if self.noise_multiplier else 0.0
            share = noisy_share(norms, self.norm, count_std, source)
            # The cryptographic generator draws different noise on each rank, so all use the share of rank 0.
            share = updates.ranks.gather(share)[0]
            self._move_norm(share, len(clients))
        return result

    def contribution_noise(self, num_clients: int) -> ContributionNoise:
        """Return the noise that each of n clients adds to a secure sum: the noise of the sum divided by √t.

        At least t of the clients are in the sum (:meth:`.SecureSums.least`), so its noise is sufficient even if the
        others drop out.

        Args:
            num_clients: Number n of clients.

        Raises:
            ValueError: If the grid of the sum is too coarse for the noise, or too small.
        """
        assert self.sums is not None
        split = self._noise_split()
        root = math.sqrt(self.sums.least(num_clients))
        change_std = self.norm * split.update_multiplier / root
        check_grid(self.sums, self.norm, change_std, num_clients, "the change")
        if self.options.clipping != "adaptive":
            return ContributionNoise(change_std)
        vote_std = split.count_std / root if self.noise_multiplier else 0.0
        check_grid(self.sums, 0.5, vote_std, num_clients, "the vote")
        return ContributionNoise(change_std, vote_std)

    def contribution(self, update: State, received: State, num_clients: int, round: int, client: int) -> State:
        """Return a client's contribution to a secure sum: its noisy clipped change in integers.

        With adaptive clipping its vote is included (see :func:`noisy_share`). A client whose change is not finite
        contributes noise only.

        Args:
            update: State that the client sends, without a client axis.
            received: State that it had received, without a client axis.
            num_clients: Number of clients in the sum.
            round: Number of the round.
            client: Number of the client.

        Raises:
            ValueError: As :meth:`contribution_noise` does.
        """
        assert self.sums is not None
        noise = self.contribution_noise(num_clients)
        integers, norm = clip_to_grid(exact_change(update, received), self.norm, self.sums)
        if self.options.clipping == "adaptive":
            if math.isnan(norm):
                vote = 0.0
            else:
                vote = 0.5 if norm <= self.norm else -0.5
            integers[VOTE] = self.sums.to_integers(torch.tensor(vote), num_clients)
        source = self._noise_source(round, client)
        # Noise is drawn in the order of names, so that it is the same in a simulation and at the sites.
        for name in sorted(integers):
            # The deviation is in units of the grid, which are 2**-fraction_bits.
            deviation = math.ldexp(noise.of(name), self.sums.fraction_bits)
            integers[name] = integers[name] + integer_noise(integers[name].shape, deviation, source)
        return integers

    def _noise_source(self, round: int, client: int) -> torch.Generator | None:
        """Return the generator of a client's noise in a round; None for the cryptographic generator."""
        if self.options.secure_rng:
            return None
        return generator(self._seed, "client privacy", round, client)

    def mean_change(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """Return the mean change from a secure sum over a round's clients, computed as in a deployment.

        A collective: all ranks must call this.

        Args:
            updates: Updates of the clients.
            received: States (c, ...) that the clients on this rank had received.
            round: Number of the round.
            clients: All clients of the round, on all ranks.

        Returns:
            The mean change without a client axis and, with adaptive clipping, the mean vote.
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
            # A rank without clients contributes zeros to the collective below.
            sent = {key: value.new_zeros(value.shape[1:]) for key, value in updates.local_rows.items()}
            example = example_contribution(sent, self.options.clipping == "adaptive")
            totals = {name: value.long() for name, value in example.items()}
        # All ranks must pass the tensors in the same order.
        updates.ranks.sum_([totals[name] for name in sorted(totals)])
        return {name: self.sums.real(total) / len(clients) for name, total in totals.items()}

    def apply_mean_change(self, base_state: State, change: Mapping[str, Tensor], num_clients: int) -> State:
        """Return the state after a round of secure sums, and update S.

        Args:
            base_state: State that clients received, without a client axis. Tensors without a change are kept.
            change: Result of :meth:`mean_change`.
            num_clients: Number of clients of the round.
        """
        if VOTE in change:
            self._move_norm(0.5 + float(change[VOTE]), num_clients)
        moved: State = {}
        for key, value in base_state.items():
            if key in change:
                # The noise is added in double precision, so that the sum is rounded once.
                exact = double(value) + change[key].to(value.device, double_dtype(value.device))
                moved[key] = exact.to(value.dtype)
            else:
                moved[key] = value
        return moved

    def _move_norm(self, share: float, num_clients: int) -> None:
        """Update S geometrically: S ← S · exp(−η (share − γ)) (Andrew et al. 2021, section 2.2).

        Args:
            share: Noisy share of short updates.
            num_clients: Number of clients in a secure sum. If its grid has no room for the new S, S stays as it is.
        """
        previous_norm = self.norm
        self.norm *= math.exp(-self.options.clip_lr * (share - self.options.quantile))
        if self.sums is not None:
            try:
                self.contribution_noise(num_clients)
            except ValueError:
                self.norm = previous_norm

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a round: S of the next round, and the largest ε of any client so far."""
        epsilon = self.ledgers.server.summary(self.options.delta, self.options.accountant)
        return {"privacy/client_norm": self.norm, "privacy/client_epsilon_max": epsilon["max"]}

    def record(self, num_clients: int) -> dict[str, Any]:
        """Return the options, the smallest noise multiplier of any round, and each client's ε, in plain types."""
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
        """Return S, z, the ledgers and :attr:`hidden`, in plain types."""
        return super().state_dict() | {
            "norm": self.norm,
            "noise_multiplier": self.noise_multiplier,
            "hidden": self.hidden,
        }

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """Restore a state like :meth:`.Budget.load_state_dict`.

        Raises:
            ValueError: As :meth:`.Budget.load_state_dict` does, and if :meth:`state_dict` did not return this state.
        """
        names = sorted(self.state_dict())
        if sorted(state) != names:
            raise ValueError(
                f"the state of client-level privacy must have the keys {names}, got {quoted(sorted(state))}; "
                "load what its state_dict() returned"
            )
        check_bound(state["norm"])
        # A resumed run may have more rounds, for which a new calibration would give another z.
        if self.options.target_epsilon is not None:
            self.noise_multiplier = state["noise_multiplier"]
        super().load_state_dict(state, rounds_done, tuned)
        self.norm = float(state["norm"])
        # If the server once saw more than sums, later rounds cannot undo that.
        self.hidden = bool(state["hidden"]) and self.sums is not None
