# SPDX-License-Identifier: Apache-2.0
"""The ClientApp at a site: passes a message on to the worker, and the answer back. It sees neither data nor model.

Flower starts a process for each message. This one imports no torch, and needs the worker's socket in the SuperNode's
configuration: ``--node-config 'socket="/run/perada/site.sock"'``. Whatever goes wrong leaves as a code.
"""

import sys
import time
from typing import TYPE_CHECKING

from perada.deploy.flower.socket import ask
from perada.deploy.flower.transport import packed, unpacked
from perada.deploy.protocol import Failure

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp


def client_app() -> "ClientApp":
    """The app of the folder that `perada deploy init` writes."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(pass_on)
    return app


def pass_on(message: "Message", context: "Context") -> "Message":
    """Have the worker answer. A text that Flower would send of an exception is never made."""
    from flwr.app import Message

    try:
        reply = _answer(message, context)
    except Exception:
        reply = Failure("crashed")
    return Message(packed(reply), reply_to=message)


def _answer(message: "Message", context: "Context") -> bytes | Failure:
    path = context.node_config.get("socket")
    if not isinstance(path, str):
        return Failure("unreachable")
    payload = unpacked(message.content, sys.maxsize)  # the worker knows how long it may be
    if isinstance(payload, Failure):
        return Failure("malformed")
    remaining = message.metadata.created_at + message.metadata.ttl - time.time()
    return ask(path, payload, str(context.run_id), remaining, sys.maxsize)
