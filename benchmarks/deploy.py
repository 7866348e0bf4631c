# SPDX-License-Identifier: Apache-2.0
"""Seconds that perada adds to a round of Flower's: a round that trains nothing, with its sites on this machine.

In turns, the same bytes go to three sites and back: by Flower only, whose ClientApp returns them, and by perada's
transport, ClientApp and socket, behind which a worker returns them.
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
    """Yield the median seconds of a round by Flower only and by perada; nothing without Flower.

    The first round, which warms up, is left out.
    """
    try:
        import flwr
    except ImportError:
        return
    size = 1000 if quick else BYTES
    with tempfile.TemporaryDirectory(prefix="fl") as folder, Loopback(Path(folder), SITES) as loopback:
        app = Path(folder) / "federation"
        write_app(app, "echo", "trainer: {max_epochs: 1}\n", "", "localhost")
        (app / "app" / "perada_app" / "client.py").write_text(CLIENT)
        server = SERVER.replace("ROUNDS", str(repeats)).replace("SIZE", str(size))
        (app / "app" / "perada_app" / "server.py").write_text(server)
        loopback.write_keys()
        loopback.start_link()
        for site in SITES:
            loopback.register(site)
            loopback.start(f"worker-{site}", [sys.executable, "-c", WORKER, loopback.socket(site)])
            loopback.start_node(site)
        log = loopback.flwr("run", app / "app", LINK, "--stream")
    flower_seconds: list[float] = []
    perada_seconds: list[float] = []
    added_seconds: list[float] = []
    # Turn 0 warms up.
    for flower, with_perada in re.findall(r"TURN [1-9]\d* (\S+) (\S+)", log):
        flower_seconds.append(float(flower))
        perada_seconds.append(float(with_perada))
        added_seconds.append(float(with_perada) - float(flower))
    if len(added_seconds) != repeats:
        raise RuntimeError(f"the run ended early: {' '.join(log.split()[-30:])}")
    yield {
        "sites": len(SITES),
        "bytes": size,
        "Flower s": round(statistics.median(flower_seconds), 2),
        "perada s": round(statistics.median(perada_seconds), 2),
        "perada − Flower s": round(statistics.median(added_seconds), 2),
        "flwr": flwr.__version__,
    }
