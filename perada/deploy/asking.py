# SPDX-License-Identifier: Apache-2.0
"""When a deployed round is closed, and one exchange of messages, whose replies are checked."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perada.core.checks import check_choice, check_number, check_whole
from perada.core.states import State
from perada.deploy.codec import Spec, digest, header_of, unpack
from perada.deploy.messages import Answer, Malformed
from perada.deploy.records import Record
from perada.deploy.transport import Failure, Transport

PASSING = ("late", "unreachable", "crashed", "busy")
"""Codes after which a site may be asked again in the same round."""
PAUSE = 0.5
"""Seconds between two attempts."""


@dataclass(frozen=True)
class Terms:
    """When a round is closed.

    Args:
        min_sites: k, the least number of sites whose answers make a round.
        sample: m, the sites asked in a round; by default those that the recipe draws, or all.
        deadline: Seconds that a round may take.
        late: ``wait`` closes a round when all who were asked have answered, or at the deadline. ``skip`` closes it
            with the first k, and leaves the others out of the next round.

    Raises:
        ValueError: If an option cannot be used.
    """

    min_sites: int = 1
    sample: int | None = None
    deadline: float = 600.0
    late: Literal["wait", "skip"] = "wait"

    def __post_init__(self) -> None:
        check_whole("min_sites", self.min_sites)
        check_whole("sample", self.sample, self.min_sites, optional=True, hint=f"min_sites is {self.min_sites}")
        check_number("deadline", self.deadline, above=0, hint="in seconds")
        check_choice("late", self.late, ("wait", "skip"))


def ask(
    transport: Transport,
    messages: Mapping[str, bytes],
    enough: int,
    seconds: float,
    expected: Spec,
    record: Record,
) -> tuple[dict[str, tuple[Answer, State]], dict[str, str]]:
    """Send messages to sites by name, and take what comes back within so many ``seconds``.

    Args:
        transport: To the sites.
        messages: By name.
        enough: Replies after which there is no need to wait.
        seconds: To wait at most.
        expected: The tensors of a reply that is fine.
        record: Its megabytes are added to.

    Returns:
        The answers that are what they should be, in the order in which they came, and the codes of all other sites.
    """
    answers, failed = {}, {}
    record.down += sum(map(len, messages.values())) / 1e6
    found = transport.exchange(messages, enough, max(0.001, seconds))
    for name in messages:
        if name not in found:
            failed[name] = "late"
    for name, reply in found.items():
        if name not in messages:
            continue
        if isinstance(reply, Failure):
            failed[name] = reply.code
            continue
        record.up += len(reply) / 1e6
        try:
            header, state = unpack(reply, expected if header_of(reply).get("code") == "ok" else {})
            answer = Answer.read(header, digest(messages[name]))
        except Malformed as error:
            logging.getLogger("perada.deploy").warning("site %s: malformed: %s", name, error)
            failed[name] = "malformed"
            continue
        if answer.code == "ok":
            answers[name] = answer, state
        else:
            failed[name] = answer.code
    return answers, failed
