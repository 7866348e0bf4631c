# SPDX-License-Identifier: Apache-2.0
"""Rounds of a deployed run whose updates the server sees only as a secure sum."""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load

from perada.core.rounds import RoundPlan
from perada.core.states import State
from perada.deploy.protocol import RejectionError, Request, RequestKind, Response, digest_of_message, pack, read_header
from perada.deploy.recipe import PublicImages, ServerRecipe
from perada.deploy.server.progress import RoundRecord, RunProgress, read_sum, write_sum
from perada.deploy.server.rounds import Roster, close_round
from perada.deploy.sums.progress import MAX_HEARD_ROUNDS
from perada.deploy.sums.vector import SPOILED, Contents, SumResult
from perada.federation.outliers import OUTLIER_FACTOR
from perada.federation.server import Server
from perada.federation.settings import Settings

MAX_MOVES = 20
"""Number of recent secure sums of which the server keeps how far they moved the model."""
MAX_SPOILED_ROUNDS = 2
"""After so many spoiled rounds in a row the model from before the last sum is restored."""

log = logging.getLogger("perada.deploy")


class AskForSum(Protocol):
    """Requests a step of a secure sum from sites."""

    def __call__(
        self,
        summand: str,
        record: RoundRecord,
        kind: RequestKind,
        attempt: int,
        contents: Mapping[str, dict[str, Any]],
        vector_size: int,
    ) -> dict[str, tuple[Response, State]]:
        """Request the step.

        Args:
            summand: What is added up: ``update`` or ``scores``.
            record: Record of the round, to which failures and megabytes are added.
            kind: As in :class:`.AskStep`.
            attempt: As there.
            contents: As there.
            vector_size: As there.

        Returns:
            Response and tensors of each site that answered, by name.
        """
        ...


@dataclass(frozen=True)
class _Move:
    """The size of a change of the model.

    Attributes:
        length: Euclidean norm of the change.
        norm: Euclidean norm of the model before it.
    """

    length: float
    norm: float


@dataclass(frozen=True)
class FinishedSum:
    """A secure sum over sites.

    Attributes:
        sites: Names of the sites in the sum.
        result: Its content.
    """

    sites: list[str]
    result: SumResult


@dataclass
class SummedRounds:
    """Makes secure sums over the sites, closes rounds with them, and guards the model against spoiled ones.

    Attributes:
        recipe: Recipe of the run.
        settings: Its settings.
        server: Server with the global state.
        roster: Sites of the run.
        progress: Progress of the run.
        public_images: The server's public images.
        folder: State folder, which has the state of a sum under way.
        ask: Requests a step of a sum from sites.
        retry_on_disk_failure: Runs a function that reads or writes files of the run, and waits while the disk fails.
        states_before: States of the server from before the last sum; empty if there are none.
    """

    recipe: ServerRecipe
    settings: Settings
    server: Server
    roster: Roster
    progress: RunProgress
    public_images: PublicImages
    folder: Path
    ask: AskForSum
    retry_on_disk_failure: Callable[[Callable[[], Any]], Any]
    states_before: dict[str, Any] = field(default_factory=dict)

    def close(self, record: RoundRecord, answered: Mapping[str, tuple[Response, State]]) -> None:
        """Close a round with the secure sum of the sites' updates; sites that trained have ``answered``."""
        result = self._sum_of_updates(record, answered)
        summed_updates: dict[int, tuple[Response, State]] = {}
        summed_logits = None
        if result is not None:
            summed_updates = self._summed_updates(record, answered, result.mean)
            summed_logits = torch.empty(0) if result.logits is None else result.logits
        states_before = deepcopy(self.server.state_dict())
        close_round(self.recipe, self.server, self.roster, self.public_images, record, summed_updates, summed_logits)
        self._keep_or_restore(record, states_before)
        if result is not None:
            for role, loss in result.metrics.items():
                self.progress.history[-1][f"train/{role}_loss"] = loss

    def _sum_of_updates(self, record: RoundRecord, answered: Mapping[str, tuple[Response, State]]) -> SumResult | None:
        """Return the secure sum of the sites' updates; None, and the reason in the record, if it cannot be used."""
        try:
            contents = self.recipe.contents(record.round, self.public_images)
            finished_sum = self.add_up("update", record, answered, contents)
            record.summed = finished_sum.sites
            self._check_move(finished_sum.result.mean)
        except RejectionError as rejection:
            record.summed = []
            record.void = str(rejection)
            return None
        return finished_sum.result

    def _summed_updates(
        self, record: RoundRecord, answered: Mapping[str, tuple[Response, State]], mean: State
    ) -> dict[int, tuple[Response, State]]:
        """Return the mean of a secure sum as the update of each site in it, by the number of the site."""
        # After a restart, the sum may include a site that never answered the repeated training request.
        no_facts = Response("ok", digest_of_message(b""))
        updates = {}
        for name in record.summed:
            response = answered[name][0] if name in answered else no_facts
            updates[self.roster.numbers[name]] = (response, mean)
        return updates

    def _check_move(self, mean: State) -> None:
        """Check the size of the mean of a secure sum, which a single site may have made huge.

        A mean of plausible numbers may still be a model that no site can train, so that all later rounds would be void.
        It is rejected if it moves the model by many times its own norm, and, if there were sums before, by many times
        as much as the largest of those. Noisy sums may have any size.

        Raises:
            RejectionError: If it is out of proportion.
        """
        progress = self.progress
        if self.recipe.noisy:
            return
        move = self._measure_move(mean)
        rate_factor = self.recipe.loop.training.rate_factor(progress.done, progress.rounds)
        multiple = OUTLIER_FACTOR if progress.moves else OUTLIER_FACTOR**2
        limit = multiple * max(1.0, move.norm)
        if progress.moves and rate_factor > 0:
            limit = max(limit, OUTLIER_FACTOR * rate_factor * max(progress.moves))
        if move.length > limit:
            raise RejectionError(
                f"{SPOILED} it moves the model by {move.length:.3g}, more than {limit:.3g}, which is {multiple:g} "
                "times its norm or earlier moves",
                "other",
            )
        if rate_factor > 0:
            progress.moves = [*progress.moves, move.length / rate_factor][-MAX_MOVES:]

    def _measure_move(self, mean: State) -> _Move:
        """Measure how far a mean of updates is from what sites received, without statistics of images.

        Running statistics may have any size. If what a site receives depends on its images, the distance is from zero.
        """
        progress = self.progress
        received: State = {}
        if not self.settings.algorithm.compares_models:
            plan = RoundPlan(progress.done, (0,), ((0,),))
            received = self.server.broadcast(plan, max(1, len(progress.roster)))
        squared_length = 0.0
        squared_norm = 0.0
        for key, value in mean.items():
            if not value.is_floating_point() or key.endswith(("running_mean", "running_var")):
                continue
            before = torch.zeros_like(value, dtype=torch.float64)
            if key in received and received[key][0].shape == value.shape:
                before = received[key][0].to("cpu", torch.float64)
            squared_length += float((value.double() - before).square().sum())
            squared_norm += float(before.square().sum())
        return _Move(length=squared_length**0.5, norm=squared_norm**0.5)

    def _keep_or_restore(self, record: RoundRecord, states_before: dict[str, Any]) -> None:
        """Keep the states before a secure sum, and restore them if the new ones turn out to be spoiled.

        New states are spoiled if most sites cannot train them. A sum that cannot be read may also be the fault of a
        single site in this round, so it takes several such rounds in a row.
        """
        progress = self.progress
        if not record.void:
            self.states_before = states_before
            progress.spoiled = 0
            return
        num_broken = sum(code == "broken" for code in record.failed.values())
        most_broke = 2 * num_broken > len(record.selected)
        if most_broke or record.void.startswith(SPOILED):
            progress.spoiled += 1
        if self.states_before and (most_broke or progress.spoiled >= MAX_SPOILED_ROUNDS):
            self.server.load_state_dict(self.states_before)
            self.states_before = {}
            progress.spoiled = 0
            record.void += "; the model from before the last sum was restored"
            log.warning("round %d: the model from before the last secure sum was restored", record.round + 1)

    def check_honest_sites(self) -> None:
        """Raise if too few honest sites are left for a secure sum, before any site trains for it.

        Raises:
            TimeoutError: If there are too few.
        """
        options = self.settings.secure_sums
        lies = {member.name: member.lie for member in self.progress.roster if member.lie}
        if options is None or not lies or len(self.progress.roster) - len(lies) >= options.min_sites:
            return
        reasons = "; ".join(f"site {name}: {lie}" for name, lie in lies.items())
        raise TimeoutError(
            f"round {self.progress.done + 1}: a secure sum needs {options.min_sites} sites, but too few are left "
            f"without those that lied ({reasons}). Find out why they lied, then resume the run: they are asked again"
        )

    def note_sent(self, message: bytes) -> None:
        """Record the digest of what sites are sent in this round, which they state in later rounds.

        Args:
            message: The message to one of them; only the number of the site differs in the others.
        """
        request = replace(Request.read(read_header(message)), client=0)
        sent_digests = self.progress.sent_digests
        sent_digests[str(request.round)] = digest_of_message(pack(request, load(message)))
        for round in sorted(sent_digests, key=int)[:-MAX_HEARD_ROUNDS]:
            del sent_digests[round]

    def add_up(
        self,
        summand: str,
        record: RoundRecord,
        answered: Mapping[str, tuple[Response, State]],
        contents: Contents,
    ) -> FinishedSum:
        """Make a secure sum over sites that have trained, or scored.

        Args:
            summand: What is added up: ``update`` or ``scores``.
            record: Record that gets the codes of sites that are not in the sum.
            answered: Responses of the sites, with their keys.
            contents: Layout of the vectors.

        Returns:
            The sites in the sum, and its content.

        Raises:
            RejectionError: If too few sites remain at a step.
        """
        from perada.deploy.server.summing import SecureSum
        from perada.deploy.sums.keys import SumTerms

        progress = self.progress

        def terms(attempt: int) -> SumTerms:
            return SumTerms(progress.run, progress.done, progress.recipe, contents.secure_sums, attempt, of=summand)

        state = self.retry_on_disk_failure(lambda: read_sum(self.folder, progress.run, progress.done, summand))
        if state is not None:
            # Before the restart, they may have sent the vectors whose cost is counted.
            record.masked = list(state.senders)
        secure_sum = SecureSum(
            partial(self.ask, summand, record),
            terms,
            self._without_liars(answered, record),
            contents.size,
            sum_state=state,
            save=lambda state: self.retry_on_disk_failure(lambda: write_sum(self.folder, progress.run, state)),
            sent_digests=progress.sent_digests,
        )
        try:
            vector_sum = secure_sum.run()
            for name in vector_sum.survivors:
                record.failed.pop(name, None)
        finally:
            record.failed |= secure_sum.failed
            for member in progress.roster:
                member.lie = secure_sum.lies.get(member.name, member.lie)
        survivors = vector_sum.survivors
        return FinishedSum(survivors, contents.decode(vector_sum.total, len(survivors)))

    def _without_liars(
        self, answered: Mapping[str, tuple[Response, State]], record: RoundRecord
    ) -> dict[str, tuple[Response, State]]:
        """Return the answers of sites that are not known to have lied, and record the other sites as failed."""
        from perada.deploy.server.summing import LIE_CODE

        liars = {member.name for member in self.progress.roster if member.lie}
        honest = {}
        for name, answer in answered.items():
            if name in liars:
                record.failed[name] = LIE_CODE
            else:
                honest[name] = answer
        return honest
