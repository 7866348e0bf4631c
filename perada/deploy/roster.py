# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a deployed run: who is let in, who may be asked now, and who is asked no more."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from perada.core.rounds import BatchSize, RoundPlan, make_plan
from perada.deploy.asking import PASSING, Terms
from perada.deploy.messages import STEPS, Answer
from perada.deploy.records import Member, Progress, Record
from perada.federation.settings import Settings
from perada.privacy.client_level import ClientLevel

REPEAT = 10
"""Rounds after which a site that could not be let in is asked once more; one that did not answer, in the next."""

log = logging.getLogger("perada.deploy")


class Roster:
    """The sites of a run, whose numbers are their places in ``progress.roster``.

    Args:
        progress: Of the run; sites that join are written into it.
        terms: When rounds are closed.
        settings: How rounds go.
        batch_size: Of the recipe's data.
        level: Privacy of whole clients, if there is one.
    """

    def __init__(
        self, progress: Progress, terms: Terms, settings: Settings, batch_size: BatchSize, level: ClientLevel | None
    ) -> None:
        self.progress, self.terms, self.settings = progress, terms, settings
        self.batch_size, self.level = batch_size, level
        self._turned_away: dict[str, int] = {}  # the round in which a site was last not let in
        self.outside: dict[str, str] = {}  # why a site that is connected has not joined

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each site."""
        return {member.name: number for number, member in enumerate(self.progress.roster)}

    def newcomers(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are to be asked to join now."""
        progress = self.progress
        known = set(self.numbers)
        soon = {name for name, round in self._turned_away.items() if round <= progress.done < round + REPEAT}
        known |= soon if len(known) >= self.terms.min_sites else set()
        return sorted(name for name in names if name not in known)

    def admit(self, answers: Mapping[str, Answer], failed: Mapping[str, str]) -> None:
        """Let those of the newcomers join who answered as they should."""
        progress = self.progress
        for name in sorted({*answers, *failed}):
            reason = failed.get(name) or self._objection(answers[name])
            if reason:
                if reason not in PASSING:
                    self._turned_away[name] = progress.done
                self.outside[name] = reason
                log.warning("site %s does not join: %s", name, reason)
                continue
            self.outside.pop(name, None)
            facts = answers[name].facts
            progress.labels = facts["labels"]
            progress.roster.append(Member(name, facts.get("size"), progress.done))

    def _objection(self, answer: Answer) -> str:
        """Why a site is not let in; empty if it is."""
        labels, size = answer.facts.get("labels"), answer.facts.get("size")
        if labels is None or self.progress.labels not in ("", labels):
            return "it has other classes than the recipe, or the sites before it"
        if size is None:
            weighted = self.settings.weighting == "samples"
            return "weighting='samples' needs its size, which it does not send" if weighted else ""
        steps = sum(make_plan(0, [0], [size], self.settings.phases, self.batch_size).lengths) if size else 0
        return "" if 0 < steps <= STEPS else f"it says that it has {size} images, which cannot be"

    def eligible(self, names: Sequence[str]) -> list[int]:
        """Numbers of the sites that may be asked, of those that are connected."""
        progress, late = self.progress, self.terms.late == "skip"
        present = [number for number, member in enumerate(progress.roster) if member.name in names and not member.left]
        if self.level is not None:
            present = self.level.affordable(present)
        ready = [
            n for n in present if not (late and progress.done > 0 and progress.roster[n].late == progress.done - 1)
        ]
        return ready if len(ready) >= self.terms.min_sites else present

    def plan(self, clients: Sequence[int]) -> RoundPlan:
        """A round of so many of the sites; those that do not say their size count as one image."""
        sizes = [member.size or 1 for member in self.progress.roster]
        return make_plan(self.progress.done, clients, sizes, self.settings.phases, self.batch_size)

    def lengths(self, clients: Sequence[int]) -> list[int]:
        """Steps of each phase of the longest of ``clients``, if all of them say their sizes."""
        sizes = [self.progress.roster[client].size for client in clients]
        if self.settings.privacy is not None or any(size is None for size in sizes):
            return []
        return list(self.plan(clients).lengths)

    def note(self, record: Record, got: Mapping[int, Answer]) -> None:
        """Write down who took part, who was late and who is not to be asked any more."""
        for client, answer in got.items():
            member = self.progress.roster[client]
            member.rounds += 1
            member.epsilon = answer.facts.get("epsilon", member.epsilon)
        for member in self.progress.roster:
            code = record.failed.get(member.name)
            if code in ("exhausted", "unapproved"):
                member.left = code
            if code in ("late", "busy"):
                member.late = record.round
