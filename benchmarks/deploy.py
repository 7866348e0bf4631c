# SPDX-License-Identifier: Apache-2.0
"""What perada adds to a round of Flower's: a round that trains nothing, with its sites on this machine.

In turns, the same bytes go to three sites and back: by Flower alone, whose ClientApp returns them, and by perada's
transport, ClientApp and socket, behind which a worker returns it.
"""

import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from perada.deploy.flower.app import write_app
from perada.studies.deployment import LINK, Loopback

SITES = ("alpha", "beta", "gamma")
BYTES = 5_600_000
"""An update of a ResNet-18 with residual adapters."""
WORKER = """
import sys
from perada.deploy.flower.socket import Listener
with Listener(sys.argv[1]) as listener:
    listener.serve(lambda message, run: message)
"""
CLIENT = """
from flwr.app import Message
from perada.deploy.flower.app import client_app

app = client_app()

@app.query()
def echo(message, context):
    return Message(message.content, reply_to=message)
"""
SERVER = """
import time
from flwr.app import Message, MessageType
from flwr.serverapp import ServerApp
from perada.deploy.flower.app import pack_payload
from perada.deploy.flower.app import FlowerTransport

app = ServerApp()

@app.main()
def main(grid, context):
    transport = FlowerTransport(grid)
    while len(transport.names()) < 3:
        time.sleep(0.5)
    for number in range(ROUNDS + 1):
        payload = number.to_bytes(8, "big") + bytes(SIZE - 8)
        began = time.monotonic()
        messages = [Message(pack_payload(payload), node, MessageType.QUERY) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
        assert len(replies) == 3 and not any(reply.has_error() for reply in replies)
        flower = time.monotonic() - began
        payload = number.to_bytes(8, "little") + bytes(SIZE - 8)
        began = time.monotonic()
        replies = transport.exchange({name: payload for name in transport.names()}, 3, 600)
        assert set(replies.values()) == {payload}
        print(f"TURN {number} {flower:.3f} {time.monotonic() - began:.3f}", flush=True)
"""


def deploy(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the seconds of a round by Flower alone and by perada, medians; the first round, which warms up, is left out.

    Without Flower it gives nothing.
    """
    try:
        import flwr
    except ImportError:
        return
    with tempfile.TemporaryDirectory(prefix="fl") as folder, Loopback(Path(folder), SITES) as loopback:
        app = Path(folder) / "federation"
        write_app(app, "echo", "", "", "localhost")
        size = 1000 if quick else BYTES
        (app / "app" / "perada_app" / "client.py").write_text(CLIENT)
        server = SERVER.replace("ROUNDS", str(repeats)).replace("SIZE", str(size))
        (app / "app" / "perada_app" / "server.py").write_text(server)
        loopback.write_keys()
        loopback.start_link()
        for site in SITES:
            loopback.register(site)
            loopback.start(f"worker-{site}", [sys.executable, "-c", WORKER, loopback.socket(site)])
            loopback.start_node(site)
        said = loopback.flwr("run", app / "app", LINK, "--stream")
    turns = [(float(one), float(other)) for one, other in re.findall(r"TURN [1-9]\d* (\S+) (\S+)", said)]
    if len(turns) != repeats:
        raise RuntimeError(f"the run ended early: {' '.join(said.split()[-30:])}")
    flower, ours = (statistics.median(column) for column in zip(*turns, strict=True))
    yield {
        "sites": len(SITES),
        "bytes": size,
        "Flower s": round(flower, 2),
        "perada s": round(ours, 2),
        "perada − Flower s": round(statistics.median(b - a for a, b in turns), 2),
        "flwr": flwr.__version__,
    }
