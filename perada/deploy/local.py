# SPDX-License-Identifier: Apache-2.0
"""Sites in this process, for dry runs and tests: the messages are those that real sites get."""

import sys
from collections.abc import Mapping
from time import monotonic

from perada.deploy.transport import Failure
from perada.deploy.worker import SiteWorker


class LocalTransport:
    """Carries messages to workers in this process, one after another.

    Args:
        workers: By name.

    Attributes:
        most: Bytes that a reply may have.
    """

    def __init__(self, workers: Mapping[str, SiteWorker]) -> None:
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
                reply = self.workers[name].answer(message, "local")
                found[name] = reply if len(reply) <= self.most else Failure("malformed")
                answered += 1
        return found
