# SPDX-License-Identifier: Apache-2.0
"""Transports, which carry messages between a server and its sites, and the terms of a run."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol, Self

from perada.core.checks import check_choice, check_integer, check_number
from perada.system.disk_errors import DiskError

FAILURE_CODES = ("unreachable", "late", "crashed", "rejected", "malformed", "disk")
"""Codes in place of a reply; a failure on the way has no further details."""
MAX_MESSAGE_BYTES = 2**30
"""Default limit of the size of a message."""


@dataclass(unsafe_hash=True)
class Failure(Exception):
    """Failure in place of a reply: one of `FAILURE_CODES`, never text from the site."""

    code: str


@dataclass(frozen=True)
class Terms:
    """When a round is closed, and where the server's state is.

    Args:
        min_sites: Smallest number of sites whose updates make a round.
        sample: Number of sites that are asked in a round; 0 for those that the recipe draws, or all.
        deadline: Longest duration of a round in seconds.
        late: ``wait`` closes a round when all sites that were asked have answered, or at the deadline. ``skip`` closes
            it after the first ``min_sites`` answers, and leaves the other sites out of the next round.
        resume: Whether to continue from the state folder.
        state: Folder for the server's state on the SuperLink's machine; "" for one in Flower's own folder.

    Raises:
        ValueError: If an option is invalid.
    """

    min_sites: int = 2
    sample: int = 0
    deadline: float = 600.0
    late: Literal["wait", "skip"] = "wait"
    resume: bool = False
    state: str = ""

    def __post_init__(self) -> None:
        check_integer("min_sites", self.min_sites)
        hint = f"min_sites is {self.min_sites}"
        check_integer("sample", self.sample or None, self.min_sites, optional=True, hint=hint)
        check_number("deadline", self.deadline, gt=0, hint="it is in seconds")
        check_choice("late", self.late, ("wait", "skip"))
        if self.state and not Path(self.state).is_absolute():
            raise ValueError(
                f"state must be an absolute path on the SuperLink's machine, got the relative path {self.state!r}"
            )

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> Self:
        """Select the terms from the options that Flower passes on."""
        return cls(**{each.name: run_config[each.name] for each in fields(cls) if each.name in run_config})


class Transport(Protocol):
    """Carries messages to sites by their registered names.

    Attributes:
        max_bytes: Largest size of a reply; a larger one becomes the failure ``malformed``.
    """

    max_bytes: int

    def names(self) -> list[str]:
        """Return the registered names of the sites that are connected now."""

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message, and wait for ``enough`` replies or ``deadline`` seconds.

        Returns:
            The replies by the name of the site. Sites that did not answer are ``Failure("late")``.
        """


class LocalTransport:
    """Carries messages to workers in this process, one after another.

    Args:
        workers: A :class:`.SiteWorker` for each name.
    """

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self.workers = dict(workers)
        self.max_bytes = sys.maxsize

    def names(self) -> list[str]:
        """Return the names of the workers."""
        return list(self.workers)

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Have sites answer one after another, until ``enough`` have answered or ``deadline`` seconds have passed."""
        replies: dict[str, bytes | Failure] = {}
        end = monotonic() + deadline
        num_answered = 0
        for name, message in messages.items():
            if num_answered >= enough or monotonic() > end:
                replies[name] = Failure("late")
                continue
            if name not in self.workers:
                replies[name] = Failure("unreachable")
                continue
            try:
                reply = self.workers[name].answer(message, "local")
            except DiskError:  # which the worker has logged
                replies[name] = Failure("disk")
                continue
            except OSError as error:  # the audit log is not the worker's own any more, so nothing may leave the site
                replies[name] = Failure("crashed")
                logging.getLogger("perada.deploy").warning("site %s: %s", name, error)
                continue
            replies[name] = reply if len(reply) <= self.max_bytes else Failure("malformed")
            num_answered += 1
        return replies
