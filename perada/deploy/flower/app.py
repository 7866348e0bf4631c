# SPDX-License-Identifier: Apache-2.0
"""The Flower app of a recipe: its folder, written by `perada deploy init`, and its two sides at server and site.

At a site Flower starts a process for each message. It imports no torch, and needs the path of the worker's socket in
the SuperNode's configuration: ``--node-config 'socket="/run/perada/site.sock"'``. Any failure leaves as a code.
"""

import hashlib
import json
import logging
import re
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from perada.deploy.flower.socket import ask_worker
from perada.deploy.monitoring import Monitoring
from perada.deploy.protocol import digest_of_message
from perada.deploy.transport import FAILURE_CODES, MAX_MESSAGE_BYTES, Failure, Terms, Transport
from perada.system.files import check_output_folder, writing
from perada.system.yaml_files import iterate_strings, parse_yaml

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

TEMPLATES = Path(__file__).with_name("files")
"""Templates of the files that are written, at their places in the folder."""
Serve = Callable[[Path, Transport, Terms, Path, Monitoring], None]
"""Runs a recipe: its file, the transport, the terms, the server's state folder, and how the run is monitored."""
POLL_INTERVAL = 0.5
"""Seconds between two looks for a reply."""
NODE_CHECK_INTERVAL = 10 * POLL_INTERVAL
"""Seconds between two looks for SuperNodes that were restarted."""
_APP_NAME = "[a-z][a-z0-9-]{0,40}"
_PAYLOAD = "payload"
_ARRAY_TYPE = "perada.bytes"  # not numpy's: only perada's own code reads it
_FAILURE_OF_FLOWER_CODE = {
    3: "unreachable",  # the SuperLink no longer has the message
    4: "late",  # the message expired before a reply came
    5: "unreachable",  # the SuperNode is not heard from
    6: "rejected",  # by a mod
    7: "rejected",  # the site did not trust the app
}
"""Meaning of Flower's error codes (flwr 1.41); all others are of a ClientApp that crashed.

The texts beside them come from a site, and are not read.
"""
Node = tuple[int, str]
"""Id of a SuperNode, and when the SuperLink activated it."""

log = logging.getLogger("perada.deploy")


def write_app(folder: Path, name: str, recipe_text: str, digest: str, host: str) -> None:
    """Write the app of a recipe, together with systemd unit files, a ``site.yaml`` and a README.

    Args:
        folder: Folder to write, which must not exist.
        name: Name of the app.
        recipe_text: Content of the recipe's file.
        digest: Digest that sites approve.
        host: Name or address by which sites reach the server.
    """
    check_app_target(folder, name)
    recipe = parse_yaml(recipe_text, "the recipe")
    # A job without training is always a secure sum.
    uses_secure_sums = recipe.get("secure_sums") is not None or not {"survey", "evaluate"}.isdisjoint(recipe)
    layout_line = 'layout: "{class}/*"              # "{class}/{group}_*" keeps all images of a patient on one side'
    if _uses_class(recipe, "ImageMasks"):
        layout_line = "# root has the folders images and masks, with the same names in both"
    options = vars(Terms()) | vars(Monitoring())
    values = {
        "name": name,
        "sha256": hashlib.sha256(recipe_text.encode()).hexdigest(),
        "digest": digest,
        "host": host,
        "layout_line": layout_line,
        # Comments the section out if the recipe has none.
        "secure_sums_prefix": "" if uses_secure_sums else "# ",
        "config": "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items()),  # JSON is TOML here
    }
    try:
        for template in sorted(path for path in TEMPLATES.rglob("*") if path.is_file()):
            target = folder / template.relative_to(TEMPLATES).with_suffix("")  # NAME.tmpl
            target.parent.mkdir(parents=True, exist_ok=True)
            content = Template(template.read_text(encoding="utf-8")).substitute(values)
            with writing(target):
                target.write_text(content, encoding="utf-8")
        for subfolder in (folder / "app" / "perada_app", folder / "site"):
            with writing(subfolder):
                (subfolder / "recipe.yaml").write_text(recipe_text, encoding="utf-8")
    except OSError:
        # A second attempt needs a new folder.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _uses_class(recipe: dict[str, Any], class_name: str) -> bool:
    """Return whether a recipe names a class, with or without its module."""
    return any(text.rpartition(".")[2] == class_name for _, text in iterate_strings(recipe))


def check_app_target(folder: Path, name: str) -> None:
    """Check that an app can be written.

    Raises:
        ValueError: If the name cannot be an app's.
        FileExistsError: If the folder is not empty.
        NotADirectoryError: If a folder above it is a file.
        PermissionError: If this user may not create it.
    """
    if not re.fullmatch(_APP_NAME, name):
        raise ValueError(
            f"{name!r} is not a valid app name; use lowercase letters, digits and dashes, starting with a letter"
        )
    check_output_folder("folder", folder.parent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{str(folder)!r} already exists; choose a different folder")


def server_app(serve: Serve, recipe_file: Path) -> "ServerApp":
    """Return the app's server side, which reads the terms of the run and serves it over Flower's grid."""
    from flwr.serverapp import ServerApp

    def main(grid: "Grid", context: "Context") -> None:
        from flwr.supercore.utils import get_flwr_home

        terms = Terms.of(context.run_config)
        default_state = get_flwr_home() / "perada" / str(context.run_config["digest"])
        state = Path(terms.state or default_state)
        serve(recipe_file, FlowerTransport(grid), terms, state, Monitoring.of(context.run_config))

    app = ServerApp()
    app.main()(main)
    return app


def client_app() -> "ClientApp":
    """Return the app's side at a site, which passes messages to the worker and its replies back."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(pass_on)
    return app


def pass_on(message: "Message", context: "Context") -> "Message":
    """Have the worker answer a message. Never raises: Flower would send the text of the error to the server."""
    from flwr.app import Message

    try:
        # No length limit here: the worker limits requests.
        payload = unpack_payload(message.content, sys.maxsize)
        if isinstance(payload, bytes):
            path = str(context.node_config.get("socket", ""))
            # After its time to live nobody waits for the reply any more.
            expires_at = message.metadata.created_at + message.metadata.ttl
            remaining = expires_at - time.time()
            reply = ask_worker(path, payload, str(context.run_id), remaining, sys.maxsize)
        else:
            # A failure is what a site replies, and no request.
            reply = Failure("malformed")
    except Exception:  # Flower would send its text to the server
        reply = Failure("crashed")
    return Message(pack_payload(reply), reply_to=message)


def pack_payload(payload: bytes | Failure) -> "RecordDict":
    """Return the content of a Flower message: a byte, 0 or 1 + the index of a failure's code, and the payload."""
    from flwr.app import Array, ArrayRecord, RecordDict

    if isinstance(payload, bytes):
        data = b"\0" + payload
    else:
        data = bytes([1 + FAILURE_CODES.index(payload.code)])
    array = Array(dtype="uint8", shape=(len(data),), stype=_ARRAY_TYPE, data=data)
    return RecordDict({_PAYLOAD: ArrayRecord({_PAYLOAD: array})})


def unpack_payload(record_dict: "RecordDict", max_bytes: int) -> bytes | Failure:
    """Read what :func:`pack_payload` wrote; any other content, or a payload over the limit, is ``malformed``."""
    array = record_dict.array_records.get(_PAYLOAD, {}).get(_PAYLOAD)
    if array is None or array.stype != _ARRAY_TYPE or not 0 < len(array.data) <= 1 + max_bytes:
        return Failure("malformed")
    kind = array.data[0]
    if kind == 0:
        payload: bytes = array.data[1:]
        return payload
    return Failure(FAILURE_CODES[kind - 1]) if kind <= len(FAILURE_CODES) else Failure("malformed")


@dataclass
class _PendingMessage:
    """A message that was sent, and its reply once it has arrived."""

    site: str
    node: Node
    digest: str
    expires: float  # as of time.monotonic
    reply: bytes | Failure | None = None


class FlowerTransport:
    """Carries messages over Flower's grid, by the names under which sites' keys are registered at the SuperLink.

    A site has one message at a time. A site that still works on an earlier message gets the next one when it is done
    with it, or when it has expired. If the earlier message is the same one, its reply is awaited instead.

    A SuperNode that is killed takes its message with it. If the SuperLink activates it again before it is missed,
    Flower reports nothing. The message is then sent again; a site does no work twice.

    Args:
        grid: Flower's grid.
        poll_interval: Seconds between polls for a reply.
        max_bytes: Largest size of a reply.
    """

    def __init__(self, grid: "Grid", poll_interval: float = POLL_INTERVAL, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._grid = grid
        self._poll_interval = poll_interval
        self.max_bytes = max_bytes
        self._pending: list[_PendingMessage] = []
        self._arrived = threading.Event()

    def names(self) -> list[str]:
        """Return the registered names of the sites that are connected now, in order."""
        return sorted(self._connected_nodes())

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; see :meth:`.Transport.exchange`.

        Messages expire with the deadline, so that no site works on one later.
        """
        last_check = time.monotonic()
        nodes = self._connected_nodes()
        end = last_check + deadline
        digests = {site: digest_of_message(message) for site, message in messages.items()}
        replies: dict[str, bytes | Failure] = {}
        while True:
            self._collect_replies(digests, replies)
            now = time.monotonic()
            num_replies = sum(isinstance(reply, bytes) for reply in replies.values())
            if num_replies >= enough or len(replies) == len(messages) or now >= end:
                break
            if now - last_check > NODE_CHECK_INTERVAL:
                nodes = self._connected_nodes()
                last_check = now
            self._pending = [pending for pending in self._pending if _may_be_answered(pending, nodes)]
            busy = {pending.site for pending in self._pending}
            for site, message in messages.items():
                if site in replies or site in busy:
                    continue
                if site not in nodes or not self._push_message(site, nodes[site], message, end - now):
                    replies[site] = Failure("unreachable")
            self._arrived.wait(min(self._poll_interval, max(0.0, end - time.monotonic())))
            self._arrived.clear()
        return {site: replies.get(site, Failure("late")) for site in messages}

    def _collect_replies(self, digests: Mapping[str, str], replies: dict[str, bytes | Failure]) -> None:
        """Move replies that have arrived to the results, and drop those to other messages."""
        for pending in list(self._pending):
            if pending.reply is None:
                continue
            self._pending.remove(pending)
            if digests.get(pending.site) == pending.digest:
                replies[pending.site] = pending.reply

    def _connected_nodes(self) -> dict[str, Node]:
        """Return the connected SuperNodes by registered name, without names that are registered for several keys."""
        nodes: dict[str, list[Node]] = defaultdict(list)
        for node in self._grid.get_nodes():
            if not node.public_key:
                _warn_once(
                    f"SuperNode {node.node_id} is ignored because it has no key; start it with "
                    "--auth-supernode-private-key, and the SuperLink with --enable-supernode-auth"
                )
            elif not node.name:
                _warn_once(
                    f"SuperNode {node.node_id} is ignored because it has no name; register its key again, with --name"
                )
            else:
                nodes[node.name].append((node.node_id, node.last_activated_at))
        for name, same_name in nodes.items():
            if len(same_name) > 1:
                _warn_once(f"{name!r} is registered for {len(same_name)} keys and is ignored; unregister all but one")
        return {name: same_name[0] for name, same_name in nodes.items() if len(same_name) == 1}

    def _push_message(self, site: str, node: Node, message: bytes, ttl: float) -> bool:
        """Push a message to the SuperLink, and return whether it was accepted."""
        from flwr.app import Message, MessageType

        node_id, _ = node
        flower_message = Message(pack_payload(message), node_id, MessageType.TRAIN, ttl=ttl)
        message_ids = list(self._grid.push_messages([flower_message]))
        if not message_ids or not message_ids[0]:
            return False
        pending = _PendingMessage(site, node, digest_of_message(message), time.monotonic() + ttl)
        self._pending.append(pending)
        threading.Thread(
            target=self._poll_reply, args=(message_ids[0], pending), name=f"reply of {site}", daemon=True
        ).start()
        return True

    def _poll_reply(self, message_id: str, pending: _PendingMessage) -> None:
        """Poll for the reply to a message until it arrives or the message expires.

        It has its own thread: if a site's process ends while it hands its reply on, Flower waits for the rest of it for
        up to two hours.
        """
        while time.monotonic() < pending.expires and pending.reply is None:
            try:
                for reply in self._grid.pull_messages([message_id]):
                    pending.reply = self._read_reply(reply, pending.node)
            except Exception:  # gRPC's and Flower's errors, which must not end the run
                log.exception("the SuperLink did not forward a reply")
                pending.reply = Failure("unreachable")
            if pending.reply is None:
                time.sleep(self._poll_interval)
        self._arrived.set()

    def _read_reply(self, reply: "Message", node: Node) -> bytes | Failure:
        """Return the payload of a reply, which must come from a node."""
        if reply.has_error():
            return Failure(_FAILURE_OF_FLOWER_CODE.get(reply.error.code, "crashed"))
        node_id, _ = node
        if reply.metadata.src_node_id != node_id:
            return Failure("malformed")
        return unpack_payload(reply.content, self.max_bytes)


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _may_be_answered(pending: _PendingMessage, nodes: Mapping[str, Node]) -> bool:
    """Return whether a reply may still arrive: not if its SuperNode was activated again after the message was sent."""
    if pending.node != nodes.get(pending.site, pending.node):
        log.info("%s: its SuperNode was activated again; resending its message", pending.site)
        return False
    return pending.expires > time.monotonic()
