# SPDX-License-Identifier: Apache-2.0
"""What carries messages between a server and its sites, on which terms, and what may come instead of a reply."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol, Self

from perada.core.checks import check_choice, check_number, check_whole

FAILURE_CODES = ("unreachable", "late", "crashed", "refused", "malformed")
"""What may come instead of a reply; all that is said about a failure on the way."""
MAX_MESSAGE_BYTES = 2**30
"""Bytes of a message, by default."""


@dataclass(unsafe_hash=True)
class Failure(Exception):
    """What came instead of a reply: one of `FAILURE_CODES`, never a text of the site's."""

    code: str


@dataclass(frozen=True)
class Terms:
    """When a round is closed, and where the server's state is.

    Args:
        min_sites: k, the least number of sites whose answers make a round.
        sample: m, the sites asked in a round; 0 for those that the recipe draws, or all.
        deadline: Seconds that a round may take.
        late: ``wait`` closes a round when all who were asked have answered, or at the deadline. ``skip`` closes it
            with the first k, and leaves the others out of the next round.
        resume: Whether to continue from what the state folder holds.
        state: Folder for the server's state, on the SuperLink's machine; "" for one in Flower's own folder.

    Raises:
        ValueError: If an option cannot be used.
    """

    min_sites: int = 2
    sample: int = 0
    deadline: float = 600.0
    late: Literal["wait", "skip"] = "wait"
    resume: bool = False
    state: str = ""

    def __post_init__(self) -> None:
        check_whole("min_sites", self.min_sites)
        least, hint = self.min_sites, f"min_sites is {self.min_sites}"
        check_whole("sample", self.sample or None, least, optional=True, hint=hint)
        check_number("deadline", self.deadline, above=0, hint="in seconds")
        check_choice("late", self.late, ("wait", "skip"))
        if self.state and not Path(self.state).is_absolute():
            raise ValueError(f"state={self.state!r} is relative; give the path from / on, on the SuperLink's machine")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The terms among the options that Flower hands on."""
        return cls(**{each.name: config[each.name] for each in fields(cls) if each.name in config})


class Transport(Protocol):
    """Carries messages to sites by their registered names."""

    most: int  # bytes that a reply may have; a longer one is "malformed"

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now."""

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; return when ``enough`` replies came or ``deadline`` seconds passed.

        Sites that did not answer are ``Failure("late")``.
        """


class LocalTransport:
    """Carries messages to workers in this process (:class:`.SiteWorker`, by name), one after another."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self.workers, self.most = dict(workers), sys.maxsize

    def names(self) -> list[str]:
        """The names of the workers."""
        return list(self.workers)

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Have each site answer in turn, until ``enough`` did or ``deadline`` seconds passed."""
        found: dict[str, bytes | Failure] = {}
        end, answered = monotonic() + deadline, 0
        for name, message in messages.items():
            if answered >= enough or monotonic() > end:
                found[name] = Failure("late")
            elif name not in self.workers:
                found[name] = Failure("unreachable")
            else:
                try:
                    reply = self.workers[name].answer(message, "local")
                except OSError as error:  # it cannot write its audit log, and nothing may leave
                    found[name] = Failure("crashed")
                    logging.getLogger("perada.deploy").warning("site %s: %s", name, error)
                    continue
                found[name] = reply if len(reply) <= self.most else Failure("malformed")
                answered += 1
        return found
