# SPDX-License-Identifier: Apache-2.0
"""The transport of a deployed run over Flower's Grid, and messages as Flower carries them."""

import hashlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perada.deploy.flower.socket import CODES, MOST
from perada.deploy.protocol import Failure

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

_PAYLOAD, _FAILURE = "payload", "failure"
_KIND = "perada.bytes"  # not numpy's: nothing but our own code reads it


def packed(payload: bytes | Failure) -> "RecordDict":
    """A payload or a code as content of a message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if isinstance(payload, Failure):
        return RecordDict({_FAILURE: ConfigRecord({"code": CODES.index(payload.code)})})
    array = Array(dtype="uint8", shape=(len(payload),), stype=_KIND, data=payload)
    return RecordDict({_PAYLOAD: ArrayRecord({_PAYLOAD: array})})


def unpacked(content: "RecordDict", most: int) -> bytes | Failure:
    """The payload or code of a message's content; ``malformed`` where it has neither, or one of over ``most`` bytes."""
    codes = content.config_records.get(_FAILURE)
    if codes is not None:
        code = codes.get("code")
        return Failure(CODES[code] if type(code) is int and 0 <= code < len(CODES) else "malformed")
    record = content.array_records.get(_PAYLOAD)
    array = None if record is None else record.get(_PAYLOAD)
    if array is None or array.stype != _KIND or len(array.data) > most:
        return Failure("malformed")
    payload: bytes = array.data
    return payload


POLL = 0.5
"""Seconds between two looks for a reply."""
CHECK = 10 * POLL
"""Seconds between two looks whether a site's SuperNode was started anew."""
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

_REMEDIES = {
    "no name": "register its key again, with --name",
    "no key": "start it with --auth-supernode-private-key, and the SuperLink with --enable-supernode-auth",
}

log = logging.getLogger("perada.deploy")


@dataclass(frozen=True)
class _Node:
    """A connected SuperNode, and when the SuperLink let it in."""

    number: int
    since: str


@dataclass(frozen=True)
class _Sent:
    """A message that is under way."""

    site: str
    node: _Node
    digest: bytes
    expires: float


class FlowerTransport:
    """Carries messages over a Grid, by the names under which the SuperLink's owner registered the sites' keys.

    A site has one message at a time. One that is still at work on an earlier message gets the next when it is done with
    that, or when that has expired. If the earlier message is the same, its answer is waited for instead.

    A SuperNode that was killed takes its message with it. If the SuperLink lets it in again before it is missed, nobody
    reports that. The message is then sent again; a site does no work twice.

    Args:
        grid: Flower's way to the SuperNodes.
        poll: Seconds between two looks for a reply.
        most: Bytes that a reply may have, until the coordinator says what the recipe's have.
    """

    def __init__(self, grid: "Grid", poll: float = POLL, most: int = MOST) -> None:
        self._grid = grid
        self._poll = poll
        self.most = most
        self._under_way: dict[str, _Sent] = {}  # by Flower's id of the message
        self._arrived: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()
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
        nodes, checked = self._nodes(), time.monotonic()
        while True:
            if time.monotonic() - checked > CHECK:
                nodes, checked = self._nodes(), time.monotonic()
                self._forget_lost(nodes)
            self._under_way = {id_: sent for id_, sent in self._under_way.items() if sent.expires > time.monotonic()}
            busy = {sent.site for sent in self._under_way.values()}
            for site in [site for site in messages if site not in results and site not in busy]:
                remaining = end - time.monotonic()
                if site not in nodes:
                    results[site] = Failure("unreachable")
                elif remaining > 0 and not self._push(site, nodes[site], messages[site], digests[site], remaining):
                    results[site] = Failure("unreachable")
            for sent, reply in self._pull(max(0.0, min(self._poll, end - time.monotonic()))):
                if digests.get(sent.site) == sent.digest:
                    results[sent.site] = reply
            replies = sum(isinstance(reply, bytes) for reply in results.values())
            if replies >= enough or len(results) == len(messages) or time.monotonic() >= end:
                break
        results = {site: results.get(site, Failure("late")) for site in messages}
        others = [f"{site} {reply.code}" for site, reply in results.items() if isinstance(reply, Failure)]
        took = time.monotonic() - end + deadline
        log.info("%s in %.1f s", ", ".join([f"{replies} of {len(messages)} sites replied", *others]), took)
        return results

    def _forget_lost(self, nodes: Mapping[str, _Node]) -> None:
        """Forget messages whose SuperNodes were let in again after they were sent."""
        for number, sent in list(self._under_way.items()):
            if sent.node != nodes.get(sent.site, sent.node):
                del self._under_way[number]
                log.info("%s: its SuperNode is there anew; its message is sent again", sent.site)

    def _nodes(self) -> dict[str, _Node]:
        """Connected SuperNodes by registered name. A name that two keys have is nobody's."""
        connected = list(self._grid.get_nodes())
        nodes = [node for node in connected if node.name and node.public_key]
        for node in connected:
            fault = "" if node.name and node.public_key else "no name" if node.public_key else "no key"
            if fault and f"{node.node_id}" not in self._warned:
                self._warned.add(f"{node.node_id}")
                log.warning("SuperNode %d has %s and is left out; %s", node.node_id, fault, _REMEDIES[fault])
        counts = Counter(node.name for node in nodes)
        for name in sorted(name for name, count in counts.items() if count > 1 and name not in self._warned):
            self._warned.add(name)
            log.warning("%r is registered for %d keys and is left out; unregister all but one", name, counts[name])
        return {node.name: _Node(node.node_id, node.last_activated_at) for node in nodes if counts[node.name] == 1}

    def _push(self, site: str, node: _Node, message: bytes, digest: bytes, ttl: float) -> bool:
        """Hand a message to the SuperLink; whether it took it."""
        from flwr.app import Message, MessageType

        ids = list(self._grid.push_messages([Message(packed(message), node.number, MessageType.TRAIN, ttl=ttl)]))
        if not ids or not ids[0]:
            return False
        sent = _Sent(site, node, digest, time.monotonic() + ttl)
        self._under_way[ids[0]] = sent
        threading.Thread(target=self._watch, args=(ids[0], sent.expires), name=f"reply of {site}", daemon=True).start()
        return True

    def _watch(self, number: str, expires: float) -> None:
        """Look for the reply to one message until it is there or the message has expired.

        In a thread of its own: if a site's process ends while it hands its reply on, Flower waits for the rest of that
        reply for up to two hours, and would not hear the other sites meanwhile.
        """
        while time.monotonic() < expires:
            try:
                for reply in self._grid.pull_messages([number]):
                    self._arrived.put((number, reply))
                    return
            except Exception:
                log.exception("the SuperLink did not hand on a reply")
                self._arrived.put((number, None))
                return
            time.sleep(self._poll)

    def _pull(self, seconds: float) -> list[tuple[_Sent, bytes | Failure]]:
        """Replies that came within some seconds, each with what it answers: errors name no site, but the message."""
        found: list[tuple[_Sent, bytes | Failure]] = []
        end = time.monotonic() + seconds
        with suppress(queue.Empty):
            while True:
                number, reply = self._arrived.get(timeout=0 if found else max(0.0, end - time.monotonic()))
                sent = self._under_way.pop(number, None)
                if sent is None:
                    continue
                if reply is None:
                    found.append((sent, Failure("unreachable")))
                elif reply.has_error():
                    found.append((sent, Failure(_CODES.get(reply.error.code, "crashed"))))
                elif reply.metadata.src_node_id != sent.node.number:
                    found.append((sent, Failure("malformed")))
                else:
                    found.append((sent, unpacked(reply.content, self.most)))
        return found
