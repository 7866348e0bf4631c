# SPDX-License-Identifier: Apache-2.0
"""Who belongs to a deployed run, and who may be asked now."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from perada.core.rounds import sample_cohort
from perada.deploy.asking import PAUSE, Terms, ask
from perada.deploy.codec import pack
from perada.deploy.messages import Order
from perada.deploy.records import Member, Progress, Record
from perada.deploy.transport import Transport
from perada.federation.settings import Settings
from perada.privacy.client_level import ClientLevel

LOG = logging.getLogger("perada.deploy")
REPEAT = 10
"""Rounds after which a site that did not join is asked once more."""


class Roster:
    """Lets sites join a run, and says who is asked in a round.

    Args:
        progress: Of the run; its ``roster`` is what this changes.
        transport: To the sites.
        terms: When rounds are closed.
        settings: How the rounds go.
        level: Privacy of whole clients, which leaves out whose budget is spent; None without.
        join: The order by which a site is asked who it is.
    """

    def __init__(
        self,
        progress: Progress,
        transport: Transport,
        terms: Terms,
        settings: Settings,
        level: ClientLevel | None,
        join: Callable[[], Order],
    ) -> None:
        self.progress, self.transport, self.terms = progress, transport, terms
        self.settings, self.level = settings, level
        self._join = join
        self._turned_away: dict[str, int] = {}  # the round in which a site last did not join

    def admit(self, names: Sequence[str], seconds: float) -> None:
        """Let new sites join."""
        progress = self.progress
        known = {member.name for member in progress.roster}
        soon = {name for name, round in self._turned_away.items() if round <= progress.done < round + REPEAT}
        known |= soon if len(known) >= self.terms.min_sites else set()
        new = sorted(name for name in names if name not in known)
        if not new:
            return
        message = pack(self._join().header())
        answers, failed = ask(self.transport, dict.fromkeys(new, message), len(new), seconds, {}, Record(progress.done))
        for name in new:
            self._turned_away[name] = progress.done
            if name in failed:
                LOG.warning("site %s does not join: %s", name, failed[name])
                continue
            facts = answers[name][0].facts
            progress.labels = progress.labels or facts.get("labels", "")
            if facts.get("labels") != progress.labels:
                LOG.warning("site %s does not join: it has other classes than the sites before it", name)
                continue
            if self.settings.weighting == "samples" and "size" not in facts:
                LOG.warning("site %s does not join: weighting='samples' needs its size, which it does not send", name)
                continue
            progress.roster.append(Member(name, facts.get("size"), progress.done))

    def eligible(self, names: Sequence[str]) -> list[int]:
        """Numbers of the sites that may be asked now."""
        progress, late = self.progress, self.terms.late == "skip"
        present = [number for number, member in enumerate(progress.roster) if member.name in names and not member.left]
        if self.level is not None:
            present = self.level.affordable(present)
        ready = [
            n for n in present if not (late and progress.done > 0 and progress.roster[n].late == progress.done - 1)
        ]
        return ready if len(ready) >= self.terms.min_sites else present

    def gather(self, end: float) -> list[int]:
        """Wait until enough sites are there, and give the numbers of those that may be asked, in the order drawn."""
        progress, terms = self.progress, self.terms
        while True:
            names = self.transport.names()
            if not progress.asked:  # else sites know this round's messages, which say how many sites there are
                self.admit(names, (end - time.monotonic()) / 2)
            able = self.eligible(names)
            if len(able) >= terms.min_sites or time.monotonic() >= end:
                break
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        if len(able) < terms.min_sites:
            missing = {m.name: m.left or "unreachable" for n, m in enumerate(progress.roster) if n not in able}
            raise TimeoutError(self.too_few(len(able), missing))
        total = len(progress.roster)
        draw = total if self.sample is not None else None
        return sample_cohort(self.settings.seed, progress.done, total, draw, lambda _: able)

    @property
    def sample(self) -> int | None:
        """Sites that are asked first; None for all."""
        return self.settings.clients_per_round if self.terms.sample is None else self.terms.sample

    def too_few(self, have: int, missing: Mapping[str, str]) -> str:
        """What is said when a round cannot be closed."""
        named = ", ".join(f"{name} ({code})" for name, code in missing.items()) or "all others never joined"
        return (
            f"round {self.progress.done}: {have} of at least {self.terms.min_sites} sites answered within "
            f"{self.terms.deadline:g} s; missing: {named}. Resume when they are back, or ask for fewer (min_sites)"
        )
