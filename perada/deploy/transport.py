# SPDX-License-Identifier: Apache-2.0
"""What lies between the server and its sites: bytes one way, bytes or a code the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Failure:
    """What came instead of a reply.

    Attributes:
        code: ``unreachable``, ``late``, ``crashed``, ``refused`` or ``malformed``; never a text of the site's.
    """

    code: str


class Transport(Protocol):
    """Carries messages to sites by their registered names.

    Attributes:
        most: Bytes that a reply may have; a longer one is ``malformed``.
    """

    most: int

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now."""
        ...

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; return when ``enough`` replies came or ``deadline`` seconds passed.

        Sites that did not answer are ``Failure("late")``.
        """
        ...
