# SPDX-License-Identifier: Apache-2.0
"""The transport of a deployed run over Flower's Grid, and messages as Flower carries them."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perada.deploy.protocol import CODES, MOST, Failure, digest

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

POLL = 0.5
"""Seconds between two looks for a reply."""
CHECK = 10 * POLL
"""Seconds between two looks whether a site's SuperNode was started anew."""
_PAYLOAD, _FAILURE = "payload", "failure"
_KIND = "perada.bytes"  # not numpy's: nothing but our own code reads it
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

log = logging.getLogger("perada.deploy")


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


@dataclass
class _Sent:
    """A message that is under way, and its reply once it is there."""

    site: str
    node: tuple[int, str]  # its number, and when the SuperLink let it in
    digest: str
    expires: float
    reply: bytes | Failure | None = None


class FlowerTransport:
    """Carries messages over a Grid, by the names under which the SuperLink's owner registered the sites' keys.

    A site has one message at a time. One that is still at work on an earlier message gets the next when it is done with
    that, or when that has expired. If the earlier message is the same, its answer is waited for instead.

    A SuperNode that was killed takes its message with it. If the SuperLink lets it in again before it is missed, nobody
    reports that. The message is then sent again; a site does no work twice.
    """

    def __init__(self, grid: "Grid", poll: float = POLL, most: int = MOST) -> None:
        self._grid, self._poll, self.most = grid, poll, most
        self._under_way: list[_Sent] = []
        self._arrived = threading.Event()
        self._warned: set[str] = set()

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now, in their order."""
        return sorted(self._nodes())

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message, as :class:`.Transport` says, and give what came in the order of ``messages``.

        What is under way at the end expires with the deadline, so that no site trains it later.
        """
        begin = checked = time.monotonic()
        end, nodes = begin + deadline, self._nodes()
        digests = {site: digest(message) for site, message in messages.items()}
        results: dict[str, bytes | Failure] = {}
        while True:
            for sent, reply in [(sent, sent.reply) for sent in self._under_way if sent.reply is not None]:
                self._under_way.remove(sent)
                if digests.get(sent.site) == sent.digest:
                    results[sent.site] = reply
            now, replies = time.monotonic(), sum(isinstance(reply, bytes) for reply in results.values())
            if replies >= enough or len(results) == len(messages) or now >= end:
                break
            if now - checked > CHECK:
                nodes, checked = self._nodes(), now
            self._under_way = [sent for sent in self._under_way if _is_open(sent, nodes)]
            busy = {sent.site for sent in self._under_way}
            for site in [site for site in messages if site not in results and site not in busy]:
                if site not in nodes or not self._push(site, nodes[site], messages[site], end - now):
                    results[site] = Failure("unreachable")
            self._arrived.wait(min(self._poll, max(0.0, end - time.monotonic())))
            self._arrived.clear()
        results = {site: results.get(site, Failure("late")) for site in messages}
        others = [f"{site} {reply.code}" for site, reply in results.items() if isinstance(reply, Failure)]
        said = ", ".join([f"{replies} of {len(messages)} sites replied", *others])
        log.info("%s in %.1f s", said, time.monotonic() - begin)
        return results

    def _nodes(self) -> dict[str, tuple[int, str]]:
        """Connected SuperNodes by registered name. A name that two keys have is nobody's."""
        nodes: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for node in self._grid.get_nodes():
            left_out = f"SuperNode {node.node_id} is left out, since it has no"
            if not node.public_key:
                remedy = "start it with --auth-supernode-private-key, and the SuperLink with --enable-supernode-auth"
                self._warn(f"{left_out} key; {remedy}")
            elif not node.name:
                self._warn(f"{left_out} name; register its key again, with --name")
            else:
                nodes[node.name].append((node.node_id, node.last_activated_at))
        for name, several in nodes.items():
            if len(several) > 1:
                self._warn(f"{name!r} is registered for {len(several)} keys and is left out; unregister all but one")
        return {name: several[0] for name, several in nodes.items() if len(several) == 1}

    def _warn(self, text: str) -> None:
        """Say something once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def _push(self, site: str, node: tuple[int, str], message: bytes, ttl: float) -> bool:
        """Hand a message to the SuperLink; whether it took it."""
        from flwr.app import Message, MessageType

        ids = list(self._grid.push_messages([Message(packed(message), node[0], MessageType.TRAIN, ttl=ttl)]))
        if not ids or not ids[0]:
            return False
        sent = _Sent(site, node, digest(message), time.monotonic() + ttl)
        self._under_way.append(sent)
        threading.Thread(target=self._watch, args=(ids[0], sent), name=f"reply of {site}", daemon=True).start()
        return True

    def _watch(self, number: str, sent: _Sent) -> None:
        """Look for the reply to one message until it is there or the message has expired, in a thread of its own.

        If a site's process ends while it hands its reply on, Flower waits for the rest for up to two hours.
        """
        while time.monotonic() < sent.expires and sent.reply is None:
            try:
                for reply in self._grid.pull_messages([number]):
                    sent.reply = self._read(reply, sent.node[0])
            except Exception:
                log.exception("the SuperLink did not hand on a reply")
                sent.reply = Failure("unreachable")
            if sent.reply is None:
                time.sleep(self._poll)
        self._arrived.set()

    def _read(self, reply: "Message", node: int) -> bytes | Failure:
        """What a reply says that is to come from a node; an error names no site."""
        if reply.has_error():
            return Failure(_CODES.get(reply.error.code, "crashed"))
        malformed = reply.metadata.src_node_id != node
        return Failure("malformed") if malformed else unpacked(reply.content, self.most)


def _is_open(sent: _Sent, nodes: Mapping[str, tuple[int, str]]) -> bool:
    """Whether a reply may still come: not if its SuperNode was let in again after the message was sent."""
    lost = sent.node != nodes.get(sent.site, sent.node)
    if lost:
        log.info("%s: its SuperNode is there anew; its message is sent again", sent.site)
    return not lost and sent.expires > time.monotonic()
