# SPDX-License-Identifier: Apache-2.0
"""Waiting times of the server while a disk fails: its own, or that of a site."""

from collections.abc import Iterable

FIRST_WAIT = 0.5
"""Seconds to wait after the first failure."""
MAX_WAIT = 30.0
"""Largest number of seconds to wait after a failure."""
MIN_ATTEMPTS = 20
"""Number of attempts for which a deadline leaves time, once the waits have grown."""


def next_wait(wait: float | None, deadline: float) -> float:
    """Return how long to wait after a failure: twice as long as after the one before, up to a limit.

    Args:
        wait: Seconds waited after the failure before; None if it is the first one.
        deadline: Seconds after which the attempts end.
    """
    if wait is None:
        return FIRST_WAIT
    longest = max(FIRST_WAIT, min(MAX_WAIT, deadline / MIN_ATTEMPTS))
    return min(2 * wait, longest)


class SiteWaits:
    """When sites whose disk failed may be asked again.

    Args:
        deadline: Longest duration of a round in seconds.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        # How long each site was left alone after its last failure, and when it may be asked again.
        self._wait: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def note_failure(self, name: str, now: float) -> float:
        """Record that the disk of a site failed, and return for how many seconds it is not asked.

        Args:
            name: Name of the site.
            now: Current time, as of ``time.monotonic``.
        """
        wait = next_wait(self._wait.get(name), self._deadline)
        self._wait[name] = wait
        self._due[name] = now + wait
        return wait

    def note_answer(self, name: str) -> None:
        """Record that a site has answered."""
        self._wait.pop(name, None)
        self._due.pop(name, None)

    def due(self, names: Iterable[str], now: float) -> list[str]:
        """Return the sites that may be asked now."""
        return [name for name in names if self._due.get(name, now) <= now]

    def next_due(self, names: Iterable[str], now: float) -> float:
        """Return when the first of some sites may be asked."""
        return min((self._due.get(name, now) for name in names), default=now)
