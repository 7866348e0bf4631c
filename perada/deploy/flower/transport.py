# SPDX-License-Identifier: Apache-2.0
"""The transport of a deployed run over Flower's Grid."""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perada.deploy.flower.messages import packed, unpacked
from perada.deploy.flower.socket import MOST
from perada.deploy.transport import Failure

if TYPE_CHECKING:
    from flwr.serverapp import Grid

POLL = 0.5
"""Seconds between two looks for replies."""
_CODES = {
    1: "crashed",  # the ClientApp could not be loaded
    2: "crashed",  # it raised an exception
    3: "unreachable",  # the SuperLink does not know the message any more
    4: "late",  # the message expired before a reply came
    5: "unreachable",  # the SuperNode is not heard from
    6: "refused",  # by a mod
    7: "refused",  # the site did not trust the app
    8: "crashed",  # the ClientApp's process ended
}
"""What Flower's codes mean. The texts beside them are a site's and are not read."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sent:
    """A message that is under way."""

    site: str
    node: int
    digest: bytes
    expires: float


class FlowerTransport:
    """Carries messages over a Grid, by the names under which the SuperLink's owner registered the sites' keys.

    A site has one message at a time. One that is still at work on an earlier message gets the next when it is done with
    that, or when that has expired. If the earlier message is the same, its answer is waited for instead.

    Args:
        grid: Flower's way to the SuperNodes.
        poll: Seconds between two looks for replies.
        most: Bytes that a reply may have.
    """

    def __init__(self, grid: "Grid", poll: float = POLL, most: int = MOST) -> None:
        self._grid = grid
        self._poll = poll
        self._most = most
        self._under_way: dict[str, _Sent] = {}  # by Flower's id of the message
        self._warned: set[str] = set()

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now, in their order."""
        return sorted(self._nodes())

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; return when ``enough`` replies came or ``deadline`` seconds passed.

        What is under way by then expires with the deadline, so that no site trains it later.

        Args:
            messages: By registered name.
            enough: Replies to wait for.
            deadline: Seconds.

        Returns:
            By name, in the order of ``messages``: the reply, or what came instead. Sites that did not answer in time
            are ``late``.
        """
        end = time.monotonic() + deadline
        digests = {site: hashlib.sha256(message).digest() for site, message in messages.items()}
        results: dict[str, bytes | Failure] = {}
        nodes = self._nodes()
        while True:
            self._under_way = {id_: sent for id_, sent in self._under_way.items() if sent.expires > time.monotonic()}
            busy = {sent.site for sent in self._under_way.values()}
            for site in [site for site in messages if site not in results and site not in busy]:
                remaining = end - time.monotonic()
                if site not in nodes:
                    results[site] = Failure("unreachable")
                elif remaining > 0 and not self._push(site, nodes[site], messages[site], digests[site], remaining):
                    results[site] = Failure("unreachable")
            for sent, reply in self._pull():
                if digests.get(sent.site) == sent.digest:
                    results[sent.site] = reply
            replies = sum(isinstance(reply, bytes) for reply in results.values())
            if replies >= enough or len(results) == len(messages) or time.monotonic() >= end:
                return {site: results.get(site, Failure("late")) for site in messages}
            time.sleep(min(self._poll, max(0.0, end - time.monotonic())))

    def _nodes(self) -> dict[str, int]:
        """Node ids by registered name. A name that two keys have is nobody's."""
        nodes = [node for node in self._grid.get_nodes() if node.name and node.public_key]
        counts = Counter(node.name for node in nodes)
        for name in sorted(name for name, count in counts.items() if count > 1 and name not in self._warned):
            self._warned.add(name)
            log.warning("%r is registered for %d keys and is left out; unregister all but one", name, counts[name])
        return {node.name: node.node_id for node in nodes if counts[node.name] == 1}

    def _push(self, site: str, node: int, message: bytes, digest: bytes, ttl: float) -> bool:
        """Hand a message to the SuperLink; whether it took it."""
        from flwr.app import Message, MessageType

        ids = list(self._grid.push_messages([Message(packed(message), node, MessageType.TRAIN, ttl=ttl)]))
        if not ids or not ids[0]:
            return False
        self._under_way[ids[0]] = _Sent(site, node, digest, time.monotonic() + ttl)
        return True

    def _pull(self) -> list[tuple[_Sent, bytes | Failure]]:
        """Replies that have come, each with what it answers, by the id of the message: errors name no site."""
        if not self._under_way:
            return []
        found: list[tuple[_Sent, bytes | Failure]] = []
        for reply in self._grid.pull_messages(list(self._under_way)):
            sent = self._under_way.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            if reply.has_error():
                found.append((sent, Failure(_CODES.get(reply.error.code, "crashed"))))
            elif reply.metadata.src_node_id != sent.node:
                found.append((sent, Failure("malformed")))
            else:
                found.append((sent, unpacked(reply.content, self._most)))
        return found
