# SPDX-License-Identifier: Apache-2.0
"""Differential privacy for a client as a whole: what it sends is clipped and gets its share of the noise.

Two federations are neighbours if one client's part in every round is taken out of the sums: neither a change nor, with
adaptive clipping, a vote. The number of clients of a round, by which sums are divided, is the same in both. A client
whose data are exchanged for others' counts as two such steps. Clients are drawn in fixed number, for which no
amplification is claimed: the sample rate is 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.seeding import generator
from perada.core.states import State
from perada.privacy.account import Budget, Cost, Planned
from perada.privacy.accounting import calibrate
from perada.privacy.client_sums import VOTE, change_of, check_grid, clipped, example_of, floating_pairs, whole_noise
from perada.privacy.clipping import check_bound, noisy_mean, with_noise
from perada.privacy.options import ClientPrivacy
from perada.server import SecureSums, Updates
from perada.server.aggregate import double, double_dtype


def clip_updates(updates: State, received: State, max_norm: float) -> tuple[State, Tensor]:
    """Change that each client sends, scaled down to the norm S where it is longer.

    δ ← δ · min(1, S / ‖δ‖) with the norm over all floating tensors together (McMahan et al., ICLR 2018, section 2.2,
    flat clipping): parameters and running statistics. A client with anything that is not finite sends no change.

    The states are stacks (C, ...). The clipped changes of the floating tensors come in the dtype of ``updates``, the
    norms (C,) before clipping in float64 (where the device has it), NaN for a client that is not finite. Errors
    are as of :func:`.floating_pairs`.
    """
    check_bound(max_norm)
    changes = {key: own - given for key, (own, given) in floating_pairs(updates, received).items()}
    rows = {key: delta.reshape(len(delta), math.prod(delta.shape[1:])) for key, delta in changes.items()}
    parts = [torch.linalg.vector_norm(row, dim=1, dtype=double_dtype(row.device)) for row in rows.values()]
    norms = torch.stack(parts).square().sum(0).sqrt()
    finite = norms.isfinite()  # a NaN or infinity in a tensor is one in its norm
    norms = norms.where(finite, math.nan)
    factors = (max_norm / norms).clamp(max=1.0)
    clipped = {}
    for key, delta in changes.items():
        shape = [-1] + [1] * (delta.ndim - 1)
        clipped[key] = (factors.to(delta).view(shape) * delta).where(finite.view(shape), 0)
    return clipped, norms


def noisy_updates(
    updates: State, received: State, clipped: State, std: float, generators: Sequence[torch.Generator] | None
) -> State:
    """Received + clipped change + noise of the standard deviation ``std`` in each row; all are stacks (C, ...).

    The generators are as of :func:`.noisy_mean`.
    """
    ones = [1.0] * len(next(iter(clipped.values())))
    noisy = noisy_mean({key: received[key].detach() for key in clipped}, std, ones, generators, clipped)
    return {key: received[key].detach().clone() for key in updates} | noisy


def split_noise(noise_multiplier: float, count_noise: float) -> float:
    """Noise multiplier z_Δ of the clipped updates, where the noisy count of short ones takes its part of z.

    z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2) (Andrew et al., NeurIPS 2021, theorem 1), so that both together cost what z costs.
    σ_b is the standard deviation of the noise in the count. A ValueError if the count alone costs as much as z allows.

    >>> round(split_noise(0.6, 0.5), 9)
    0.75
    """
    if noise_multiplier == 0:
        return 0.0
    if not 2 * count_noise > noise_multiplier:
        raise OptionError(
            f"count_noise={count_noise} is too little for noise_multiplier={noise_multiplier}: the count of short "
            f"updates alone would cost more; give more than {noise_multiplier / 2} (by default it is a twentieth of "
            "the clients of a round, so more clients help too), or clipping='fixed'",
            name="count_noise",
            value=count_noise,
        )
    return float((noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5)


def noisy_share(norms: Tensor, max_norm: float, count_noise: float, generator: torch.Generator | None) -> float:
    """Share of clients whose update is not longer than S, with noise (Andrew et al., NeurIPS 2021, algorithm 1).

    1/2 + (Σ (b_i − 1/2) + noise) / C with b_i = 1 for a short update and 0 for a long one; so a client changes the sum
    by 1/2 at most. One that is not finite, whose norm (C,) is NaN, changes nothing. Noise may take the share below 0 or
    above 1. The generator is on the CPU; ``None`` is the cryptographic one.
    """
    votes = torch.where(norms.isnan(), 0.0, torch.where(norms <= max_norm, 0.5, -0.5))
    return 0.5 + float(with_noise(votes.sum(dtype=torch.float64), count_noise, generator)) / len(norms)


def floor_variances(state: State) -> State:
    """``state`` with running variances that noise took below 0 set to 0; post-processing, which costs nothing."""
    return {key: value.clamp(min=0) if key.endswith("running_var") else value for key, value in state.items()}


class ClientLevel(Budget):
    """Client-level privacy of a run: makes each round's updates private and keeps the account.

    At least ``clients`` are in a round, and a client takes part in ``rounds`` rounds, for which a target is calibrated.
    With secure ``sums`` each client adds its part of the noise itself. A ValueError if there is a target and no number
    of rounds, if the count's noise is too little, or the sums' grid too coarse for the noise.

    Attributes:
        noise_multiplier: z of a round: of the updates and, with adaptive clipping, the count together.
        norm: S of the next round.
        hidden: Whether the server was given noisy sums alone in all rounds so far.
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
        self.sums, self.hidden = sums, sums is not None
        self.noise_multiplier, self._seed, self.norm = options.noise_multiplier or 0.0, seed, options.max_norm
        self._count_noise = clients / 20 if options.count_noise is None else options.count_noise
        if options.target_epsilon is not None:
            self.check_planned(rounds > 0)
            self.noise_multiplier = calibrate(options.target_epsilon, options.delta, 1.0, rounds, options.accountant)
        self._split()
        if sums is not None:
            self.deviations(max(clients, sums.min_sites))

    def _split(self) -> tuple[float, float]:
        """z_Δ of the updates and σ_b of the count; σ_b is 0 where there is no count."""
        if self.options.clipping == "fixed":
            return self.noise_multiplier, 0.0
        return split_noise(self.noise_multiplier, self._count_noise), self._count_noise

    def costs(self, client: int, tuning: bool = False) -> list[Cost]:
        """A round is one step; fine-tuning sends nothing."""
        return [] if tuning else [(self.noise_multiplier, 1.0, 1, True)]

    def privatized(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """Make the updates of a round that has been counted private, and move S.

        received + clipped change + the client's share of the noise, whose standard deviation is z · S / √C. The sum
        over the C ``clients`` then has noise z · S, so that z is the noise multiplier of any function of the uniform
        mean. A single row has less noise than that. Integer tensors are those received.

        Names, order and dtypes stay those of ``updates``, of whose clients here the ``received`` (c, ...) and the
        result are. They may hold what is not finite: whether they do depends on data.
        """
        secure, ranks = self.options.secure_rng, updates.ranks
        noise, count_noise = self._split()
        sources = (
            None
            if secure
            else [generator(self._seed, "client privacy", round, clients[place]) for place in updates.places]
        )
        clipped, lengths = clip_updates(updates.own, received, self.norm)
        norms = torch.zeros(len(clients), dtype=torch.float64)
        norms[updates.places] = lengths.cpu()
        ranks.sum_([norms])
        result = noisy_updates(updates.own, received, clipped, self.norm * noise / math.sqrt(len(clients)), sources)
        if self.options.clipping == "adaptive":
            source = None if secure else generator(self._seed, "client privacy/count", round)
            share = noisy_share(norms, self.norm, count_noise if self.noise_multiplier else 0.0, source)
            share = ranks.gather(share)[0]  # a secure generator draws another on each rank
            self._follow(share, len(clients))
        return result

    def deviations(self, clients: int) -> dict[str, float]:
        """Standard deviations of the noise of each of n clients of a secure sum: of its change, and of its vote.

        They are those of the whole noise, divided by √t, where at least t clients are in the sum.

        Raises:
            ValueError: If the sum's grid is too coarse for them, or too small.
        """
        assert self.sums is not None
        of_change, of_vote = self._split()
        share = math.sqrt(self.sums.least(clients))
        found = {"": self.norm * of_change / share}
        check_grid(self.sums, self.norm, found[""], clients, "the change")
        if self.options.clipping == "adaptive":
            found[VOTE] = of_vote / share if self.noise_multiplier else 0.0
            check_grid(self.sums, 0.5, found[VOTE], clients, "the vote")
        return found

    def part(self, update: State, received: State, clients: int, round: int, client: int) -> dict[str, Tensor]:
        """What a client adds to the secure sum over n ``clients``: its clipped change with its noise, in whole numbers.

        ``update`` and ``received`` are one client's (no client axis). With adaptive clipping its vote is added. A
        client that is not finite adds noise alone. A ValueError is as of :meth:`deviations`.
        """
        assert self.sums is not None
        deviations = self.deviations(clients)
        found, norm = clipped(change_of(update, received), self.norm, self.sums)
        if VOTE in deviations:
            vote = 0.0 if math.isnan(norm) else 0.5 if norm <= self.norm else -0.5
            found[VOTE] = self.sums.to_integers(torch.tensor(vote), clients)
        source = self._source(round, client)
        for key in sorted(found):
            deviation = math.ldexp(deviations.get(key, deviations[""]), self.sums.fraction_bits)
            found[key] = found[key] + whole_noise(found[key].shape, deviation, source)
        return found

    def _source(self, round: int, client: int) -> torch.Generator | None:
        """What a client's noise in a round is drawn from; None for the cryptographic generator."""
        return None if self.options.secure_rng else generator(self._seed, "client privacy", round, client)

    def summed(self, updates: Updates, received: State, round: int, clients: Sequence[int]) -> State:
        """The mean change that a secure sum over a round's ``clients`` gives, computed as sites compute it.

        The arguments are as of :meth:`privatized`.
        """
        assert self.sums is not None
        totals: State = {}
        for row, place in enumerate(updates.places):
            own, given = ({key: value[row] for key, value in stack.items()} for stack in (updates.own, received))
            for key, value in self.part(own, given, len(clients), round, clients[place]).items():
                totals[key] = totals[key] + value if key in totals else value
        if not updates.places:
            example = {key: value.new_zeros(value.shape[1:]) for key, value in updates.own.items()}
            example = example_of(example, self.options.clipping == "adaptive")
            totals = {key: value.long() for key, value in example.items()}
        updates.ranks.sum_([totals[key] for key in sorted(totals)])
        return {key: self.sums.real(total) / len(clients) for key, total in totals.items()}

    def moved(self, base: State, change: Mapping[str, Tensor], clients: int) -> State:
        """The state after a round in which a secure sum over n ``clients`` gave the mean ``change``; S moves too.

        ``base`` is what they received; tensors that have no change stay. S stays, too, where the sum would have no
        room for the new one.
        """
        if VOTE in change:
            self._follow(0.5 + float(change[VOTE]), clients)
        return {
            key: (double(value) + change[key].to(value.device, double_dtype(value.device))).to(value.dtype)
            if key in change
            else value
            for key, value in base.items()
        }

    def _follow(self, share: float, clients: int) -> None:
        """The geometric update of S (Andrew et al., NeurIPS 2021, section 2.2), from the noisy share of short ones."""
        before = self.norm
        self.norm *= math.exp(-self.options.clip_lr * (share - self.options.quantile))
        if self.sums is not None:
            try:
                self.deviations(clients)
            except ValueError:
                self.norm = before

    def metrics(self) -> dict[str, float]:
        """S of the next round, and the largest ε of a client so far."""
        spent = self.ledgers.server.summary(self.options.delta, self.options.accountant)
        return {"privacy/client_norm": self.norm, "privacy/client_epsilon_max": spent["max"]}

    def record(self, num_clients: int) -> dict[str, Any]:
        """Options, noise and ε of each client, in plain types; the noise is the least that a round ever had."""
        noises = [sigma for _, sigma, *_ in self.ledgers.server.state_dict()["rows"]]
        noise, spent = min([self.noise_multiplier, *noises]), self.epsilons(range(num_clients))["server"]
        found = {"options": asdict(self.options), "noise_multiplier": noise, "epsilon": spent}
        if self.hidden and self.sums is not None:
            found["sums"] = {"min_sites": self.sums.min_sites, "threshold": self.sums.threshold}
        return found

    def state_dict(self) -> dict[str, Any]:
        """S, z, the ledgers, and whether all was hidden in sums, in plain types."""
        own = {"norm": self.norm, "noise_multiplier": self.noise_multiplier, "hidden": self.hidden}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """As of :class:`.Budget`; a calibrated z stays what it was. What :meth:`state_dict` did not give is refused."""
        names = sorted(self.state_dict())
        if sorted(state) != names:
            raise ValueError(f"client-level privacy has {names}, not {sorted(state)}; load its state_dict()")
        check_bound(state["norm"])
        if self.options.target_epsilon is not None:
            self.noise_multiplier = state["noise_multiplier"]
        super().load_state_dict(state, rounds_done, tuned)
        self.norm, self.hidden = float(state["norm"]), bool(state["hidden"]) and self.sums is not None
