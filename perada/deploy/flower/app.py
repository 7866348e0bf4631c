# SPDX-License-Identifier: Apache-2.0
"""The Flower app of a recipe: its folder, which `perada deploy init` writes, and its halves at the server and a site.

Flower starts a process for each message at a site. It imports no torch, and needs the worker's socket in the
SuperNode's configuration: ``--node-config 'socket="/run/perada/site.sock"'``. Whatever goes wrong leaves as a code.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from perada.deploy.flower.socket import ask
from perada.deploy.flower.transport import FlowerTransport, packed, unpacked
from perada.deploy.protocol import Failure, Terms, Transport

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

FILES = Path(__file__).with_name("files")
"""Templates of what is written, at their places in the folder."""
SERVE = "perada.cli.flower:serve"
"""What runs a recipe at the server; the app names it, since this package knows no command."""
Serve = Callable[[Path, Transport, Terms, Path], None]
"""Runs a recipe over a transport: the recipe's file, the transport, the terms, the folder for the server's state."""
_APP = "[a-z][a-z0-9-]{0,40}"


def write_app(folder: Path, name: str, recipe: str, digest: str, host: str) -> None:
    """Write the app of a recipe, whose ``digest`` sites approve; ``name`` is the app's.

    Beside it there are unit files for systemd, a ``site.yaml`` of sites that reach the server as ``host``, a README.
    """
    check_target(folder, name)
    module, function = SERVE.split(":")
    sha256 = hashlib.sha256(recipe.encode()).hexdigest()
    values = {"name": name, "sha256": sha256, "digest": digest, "host": host, "module": module, "function": function}
    values["config"] = "\n".join(f"{key} = {json.dumps(value)}" for key, value in Terms().config().items())  # in TOML
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
        serve(recipe, FlowerTransport(grid), terms, state)

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
