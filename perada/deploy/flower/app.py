# SPDX-License-Identifier: Apache-2.0
"""The Flower app of a recipe: its folder, which `perada deploy init` writes, and its halves at the server and a site.

Flower starts a process for each message at a site. It imports no torch, and needs the worker's socket in the
SuperNode's configuration: ``--node-config 'socket="/run/perada/site.sock"'``. Whatever goes wrong leaves as a code.
"""

import hashlib
import json
import logging
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from perada.deploy.flower.socket import ask
from perada.deploy.monitoring import Monitoring
from perada.deploy.protocol import digest
from perada.deploy.transport import FAILURE_CODES, MAX_MESSAGE_BYTES, Failure, Terms, Transport

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

FILES = Path(__file__).with_name("files")
"""Templates of what is written, at their places in the folder."""
Serve = Callable[[Path, Transport, Terms, Path, Monitoring], None]
"""Runs a recipe over a transport: its file, the transport, the terms, the folder for the server's state, how it is
watched."""
_APP = "[a-z][a-z0-9-]{0,40}"
POLL = 0.5
"""Seconds between two looks for a reply."""
CHECK = 10 * POLL
"""Seconds between two looks whether a site's SuperNode was started anew."""
_PAYLOAD = "payload"
_KIND = "perada.bytes"  # not numpy's: nothing but our own code reads it
_CODES = {
    3: "unreachable",  # the SuperLink does not know the message any more
    4: "late",  # the message expired before a reply came
    5: "unreachable",  # the SuperNode is not heard from
    6: "refused",  # by a mod
    7: "refused",  # the site did not trust the app
}
"""What Flower's codes mean; others are of a ClientApp that crashed. The texts beside them are a site's and not read."""

log = logging.getLogger("perada.deploy")


def write_app(folder: Path, name: str, recipe: str, digest: str, host: str) -> None:
    """Write the app of a recipe, whose ``digest`` sites approve; ``name`` is the app's.

    Beside it there are unit files for systemd, a ``site.yaml`` of sites that reach the server as ``host``, a README.
    """
    check_target(folder, name)
    sha256 = hashlib.sha256(recipe.encode()).hexdigest()
    values = {"name": name, "sha256": sha256, "digest": digest, "host": host}
    values["hides"] = "" if re.search(r"^[^#\n]*secure_sums", recipe, re.MULTILINE) else "# "
    options = vars(Terms()) | vars(Monitoring())
    values["config"] = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())  # in TOML
    for template in sorted(path for path in FILES.rglob("*") if path.is_file()):
        target = folder / template.relative_to(FILES).with_suffix("")  # NAME.tmpl
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    for place in (folder / "app" / "perada_app", folder / "site"):
        (place / "recipe.yaml").write_text(recipe, encoding="utf-8")


def check_target(folder: Path, name: str) -> None:
    """Refuse a name that no app can have, by a ValueError, and a folder that has something, by a FileExistsError."""
    if not re.fullmatch(_APP, name):
        raise ValueError(f"{name!r} is not a name of an app; give small letters, digits and dashes, a letter first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{str(folder)!r} is there already; give another folder")


def server_app(serve: Serve, recipe: Path) -> "ServerApp":
    """What the folder's app is at the server: it reads the terms of the run and hands Flower's grid on."""
    from flwr.serverapp import ServerApp

    def main(grid: "Grid", context: "Context") -> None:
        from flwr.supercore.utils import get_flwr_home

        terms = Terms.of(context.run_config)
        state = Path(terms.state or get_flwr_home() / "perada" / str(context.run_config["digest"]))
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        serve(recipe, FlowerTransport(grid), terms, state, Monitoring.of(context.run_config))

    app = ServerApp()
    app.main()(main)
    return app


def client_app() -> "ClientApp":
    """What the folder's app is at a site: it passes a message on to the worker, and the answer back."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(pass_on)
    return app


def pass_on(message: "Message", context: "Context") -> "Message":
    """Have the worker answer. A text that Flower would send of an exception is never made."""
    from flwr.app import Message

    try:
        reply: bytes | Failure = Failure("malformed")
        payload = unpacked(message.content, sys.maxsize)  # the worker knows how long it may be
        if isinstance(payload, bytes):
            path = str(context.node_config.get("socket", ""))
            remaining = message.metadata.created_at + message.metadata.ttl - time.time()
            reply = ask(path, payload, str(context.run_id), remaining, sys.maxsize)
    except Exception:
        reply = Failure("crashed")
    return Message(packed(reply), reply_to=message)


def packed(payload: bytes | Failure) -> "RecordDict":
    """A payload or a code, after a byte that is 0 or the place of the code, as content of a message."""
    from flwr.app import Array, ArrayRecord, RecordDict

    data = b"\0" + payload if isinstance(payload, bytes) else bytes([1 + FAILURE_CODES.index(payload.code)])
    array = Array(dtype="uint8", shape=(len(data),), stype=_KIND, data=data)
    return RecordDict({_PAYLOAD: ArrayRecord({_PAYLOAD: array})})


def unpacked(content: "RecordDict", most: int) -> bytes | Failure:
    """The payload or code of a message's content; ``malformed`` where it has neither, or one of over ``most`` bytes."""
    array = content.array_records.get(_PAYLOAD, {}).get(_PAYLOAD)
    if array is None or array.stype != _KIND or not 0 < len(array.data) <= 1 + most:
        return Failure("malformed")
    place, payload = array.data[0], array.data[1:]
    return payload if place == 0 else Failure(dict(enumerate(FAILURE_CODES, 1)).get(place, "malformed"))


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

    def __init__(self, grid: "Grid", poll: float = POLL, most: int = MAX_MESSAGE_BYTES) -> None:
        self._grid, self._poll, self.most = grid, poll, most
        self._under_way: list[_Sent] = []
        self._arrived = threading.Event()

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now, in their order."""
        return sorted(self._nodes())

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message, as :class:`.Transport` says, and give what came in the order of ``messages``.

        What is under way at the end expires with the deadline, so that no site trains it later.
        """
        checked, nodes = time.monotonic(), self._nodes()
        end = checked + deadline
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
        return {site: results.get(site, Failure("late")) for site in messages}

    def _nodes(self) -> dict[str, tuple[int, str]]:
        """Connected SuperNodes by registered name. A name that two keys have is nobody's."""
        nodes: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for node in self._grid.get_nodes():
            left_out = f"SuperNode {node.node_id} is left out, since it has no"
            if not node.public_key:
                remedy = "start it with --auth-supernode-private-key, and the SuperLink with --enable-supernode-auth"
                _warn(f"{left_out} key; {remedy}")
            elif not node.name:
                _warn(f"{left_out} name; register its key again, with --name")
            else:
                nodes[node.name].append((node.node_id, node.last_activated_at))
        for name, several in nodes.items():
            if len(several) > 1:
                _warn(f"{name!r} is registered for {len(several)} keys and is left out; unregister all but one")
        return {name: several[0] for name, several in nodes.items() if len(several) == 1}

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


@cache
def _warn(text: str) -> None:
    log.warning("%s", text)


def _is_open(sent: _Sent, nodes: Mapping[str, tuple[int, str]]) -> bool:
    """Whether a reply may still come: not if its SuperNode was let in again after the message was sent."""
    lost = sent.node != nodes.get(sent.site, sent.node)
    if lost:
        log.info("%s: its SuperNode is there anew; its message is sent again", sent.site)
    return not lost and sent.expires > time.monotonic()
