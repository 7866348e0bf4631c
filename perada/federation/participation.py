# SPDX-License-Identifier: Apache-2.0
"""The last round in which each client took part, which determines how old its personal model is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perada.core.text import abbreviated

STALE = r"\d+ of \d+ clients have not taken part for more than half"
"""Pattern of the warning of :meth:`Participation.warning`, for warning filters."""


@dataclass(frozen=True)
class Participation:
    """The last participation of each client.

    Attributes:
        last_rounds: Last round of each client, counted from 1; 0 for a client that never took part.
        rounds: Number of completed rounds.
        clients_per_round: Number of clients drawn for a round; None for all.
    """

    last_rounds: Sequence[int]
    rounds: int
    clients_per_round: int | None = None

    @property
    def span(self) -> int:
        """Number of rounds that count as recent, in which as many clients are drawn as there are in total.

        It is ceil(M / clients_per_round), but at most the number of completed rounds.

        >>> Participation([0] * 20, 8, clients_per_round=8).span, Participation([0] * 20, 8).span
        (3, 1)
        """
        clients = len(self.last_rounds)
        rounds_for_all = math.ceil(clients / (self.clients_per_round or clients))
        return min(rounds_for_all, self.rounds)

    @property
    def recent(self) -> list[bool]:
        """Whether each client took part in one of the last :attr:`span` rounds.

        >>> Participation([8, 5, 6, 0], 8, clients_per_round=2).recent
        [True, False, False, False]
        """
        return [last > self.rounds - self.span for last in self.last_rounds]

    @property
    def stale(self) -> list[int]:
        """Clients that have been absent for more than half of all rounds.

        >>> Participation([8, 4, 3, 0], 8, clients_per_round=2).stale
        [2, 3]
        """
        stale = []
        for client, last_round in enumerate(self.last_rounds):
            rounds_absent = self.rounds - last_round
            if 2 * rounds_absent > self.rounds:
                stale.append(client)
        return stale

    def warning(self, client_names: Sequence[str] | None = None, anonymous: bool = False) -> str | None:
        """Return a warning about clients with stale personal models, with a remedy; None if there are none.

        Args:
            client_names: Names of the clients; by default their numbers.
            anonymous: Whether to state only the number of such clients, as in private runs.
        """
        stale = self.stale
        if not stale:
            return None
        which = ""
        if not anonymous:
            descriptions = []
            for client in stale:
                name = client_names[client] if client_names else str(client)
                last_round = self.last_rounds[client]
                descriptions.append(f"{name} since round {last_round}" if last_round else f"{name} never")
            which = f" (client {abbreviated(descriptions, 10)})"
        drawn = self.clients_per_round
        if drawn is None or drawn >= len(self.last_rounds):
            remedy = "all clients are drawn in each round, so their training failed or their privacy budget is spent"
        else:
            remedy = f"train more rounds, or draw more clients per round with clients_per_round (now {drawn})"
        return (
            f"{len(stale)} of {len(self.last_rounds)} clients have not taken part for more than half of the "
            f"{self.rounds} rounds{which}: their personal models are stale but included in the means over clients; "
            f"{remedy}"
        )
