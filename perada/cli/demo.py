# SPDX-License-Identifier: Apache-2.0
"""`perada deploy demo`: a SuperLink, three SuperNodes and three workers on this machine, and a run of the digits."""

import hashlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from perada.cli.flower import recipe_digest
from perada.cli.recipes import whole
from perada.core.checks import check_whole
from perada.deploy.flower.app import write_app
from perada.deploy.flower.loopback import Loopback
from perada.deploy.flower.running import Link, check_flower, run_app
from perada.deploy.flower.server_app import RunOptions

SITES = ("alpha", "beta", "gamma")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""One thread each: their batches are small, and there are many processes."""
PROGRAM = "from perada.cli import entry_point; entry_point()"


def demo(parser: ArgumentParser, words: list[str]) -> None:
    """Run a federation of three sites on this machine, with TLS and authentication, and leave nothing."""
    parser.add_argument("--rounds", type=int, default=3, help="Rounds.")
    given = parser.parse_args(words)
    check_whole("rounds", given.rounds)
    sys.exit(run_demo(given.rounds))


def demo_recipe(rounds: int) -> str:
    """The quickstart for three clients, scored after each of a few short rounds."""
    recipe: dict[str, Any] = yaml.safe_load(whole("quickstart"))
    recipe["trainer"] |= {"max_epochs": rounds, "check_val_every_n_epoch": 1}
    recipe["model"] |= {"engine": "loop", "cache_features": False}
    recipe["data"]["partition"]["init_args"] |= {"num_clients": len(SITES)}
    recipe["federated"] |= {"clients_per_round": None, "local_epochs": 1}
    recipe["federated"]["distillation"] |= {"steps": 10}
    return "# The quickstart with three clients.\n" + yaml.safe_dump(recipe, sort_keys=False)


def site_file(folder: Path, place: int, recipe: Path, digest: str) -> Path:
    """Write the file of a site that has the images of one of the recipe's clients."""
    site = SITES[place]
    text = recipe.read_bytes()
    data = yaml.safe_load(text)["data"]
    content = {
        "name": site,
        "data": {"dataset": data["dataset"], "partition": data["partition"], "client": place},
        "state": f"state-{site}",
        "socket": f"run/{site}.sock",
        "recipes": [{"recipe": str(recipe), "sha256": hashlib.sha256(text).hexdigest(), "digest": digest}],
        "may_send": ["sizes", "counts", "scores"],
    }
    path = folder / f"{site}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


class Demo(Loopback):
    """Three sites that have the images of the clients of one recipe, and their server."""

    def begin(self, rounds: int) -> None:
        """Write recipe, app and keys, and start all that runs before a run is started."""
        self.recipe, self.app = self.folder / "recipe.yaml", self.folder / "federation" / "app"
        self.recipe.write_text(demo_recipe(rounds), encoding="utf-8")
        self.digest = recipe_digest(str(self.recipe))
        write_app(self.app.parent, "demo", self.recipe.read_text(encoding="utf-8"), self.digest, "localhost")
        self.write_keys()
        self.start_link()
        for site in SITES:
            self.work(site)
        for site in SITES:
            self.register(site)
            self.start_node(site)
            print(f"site {site}: key registered, SuperNode and worker started", flush=True)
        for site in SITES:
            self.wait_for(self.socket(site).exists, f"worker-{site}", "the worker's socket")

    def work(self, site: str) -> None:
        """Start a site's worker."""
        file = site_file(self.folder, SITES.index(site), self.recipe, self.digest)
        self.start(f"worker-{site}", [sys.executable, "-c", PROGRAM, "deploy", "site", file])


def run_demo(rounds: int, keep: Path | None = None) -> int:
    """Run the demonstration, print its rounds and scores, end all processes and remove all files.

    Args:
        rounds: How many.
        keep: Folder for the server's state, which is then left there.

    Returns:
        0 if the run was completed.
    """
    check_flower()
    began = time.monotonic()
    temporary = tempfile.TemporaryDirectory(prefix="pd")
    with _unwound(), temporary as folder, Demo(Path(folder), SITES, ENVIRONMENT) as running:
        running.begin(rounds)
        link = Link(f"127.0.0.1:{running.port}", running.folder / "keys" / "ca.crt")
        state = keep or running.folder / "server"
        code = run_app(running.app, link, RunOptions(len(SITES), state=str(state)))
    print(f"All processes have ended, and nothing is left; {time.monotonic() - began:.0f} s")
    return code


@contextmanager
def _unwound() -> Iterator[None]:
    """Leave contexts at SIGTERM and SIGHUP, as at Ctrl-C; a second signal does not disturb that."""
    kinds = (signal.SIGTERM, signal.SIGHUP)

    def leave(kind: int, _: FrameType | None) -> None:
        for one in kinds:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + kind)

    before = {kind: signal.signal(kind, leave) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
