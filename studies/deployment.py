# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on one machine: ``perada deploy demo``, and what tests and benchmarks of Flower start."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import yaml

from perada.deploy.flower.app import write_app
from perada.deploy.flower.keys import write_server_keys, write_site_keys
from perada.deploy.flower.running import QUIET, Link, check_flower, program, run_app, write_connection
from perada.deploy.transport import Terms

DIGITS = Path(__file__).parents[1] / "recipes" / "digits.yaml"
SITES = ("alpha", "beta", "gamma")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""One thread each: their batches are small, and there are many processes. Flower looks for a message every second."""
PROGRAM = "from perada.cli import entry_point; entry_point()"
LINK = "perada-loopback"
"""Name of the SuperLink in Flower's configuration."""
STARTS = 120.0
"""Seconds that a process may take to start."""


class Loopback:
    """A SuperLink with TLS and authentication, and one SuperNode and one worker for each site, on this machine.

    It ends all its processes when its context is left, those that they started included. The folder gets keys, Flower's
    own folder, logs and sockets, so its path must be short.
    """

    def __init__(self, folder: Path, sites: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        check_flower()
        self.folder, self.sites, self.home, self.port = folder, list(sites), folder / "flwr", 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, **QUIET, **(environment or {}), "FLWR_HOME": str(self.home)}
        self.environment["PATH"] = f"{program('flwr').parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment["NO_PROXY"] = "localhost,127.0.0.1"
        for name in ("flwr", "keys", "logs", "run"):
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def write_keys(self) -> None:
        """Write the server's certificate and each site's keys."""
        write_server_keys(self.folder / "keys", ["localhost", "127.0.0.1"])
        for site in self.sites:
            write_site_keys(self.folder / "keys", site)

    def start_link(self) -> None:
        """Start the SuperLink, on the port that it had if it ran before, and wait for its port."""
        keys = self.folder / "keys"
        if not self.port:
            self.port = free_port()
            write_connection(self.home, LINK, f"127.0.0.1:{self.port}", keys / "ca.crt")
        words = ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.pem"]
        words += ["--ssl-keyfile", keys / "server.key", "--enable-supernode-auth", "--host", "127.0.0.1"]
        words += ["--port", self.port, "--database", self.folder / "link.db"]
        self.start("link", [program("flower-superlink"), *words])
        self.wait_for(self._listens, "link", "the SuperLink's port")

    def register(self, site: str) -> None:
        """Have the SuperLink accept a site's key, under its name."""
        self.flwr("supernode", "register", self.folder / "keys" / f"{site}.pub", LINK, "--name", site)

    def start_node(self, site: str) -> None:
        """Start a site's SuperNode."""
        keys = self.folder / "keys"
        words = ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"{site}.key"]
        words += ["--superlink", f"127.0.0.1:{self.port}", "--port", free_port()]
        words += ["--node-config", f'socket="{self.socket(site)}"']
        self.start(f"node-{site}", [program("flower-supernode"), *words])

    def socket(self, site: str) -> Path:
        """Where a site's worker listens."""
        return self.folder / "run" / f"{site}.sock"

    def start(self, name: str, words: Sequence[object]) -> None:
        """Start a process in the place of the one of its name, if there is one; its output goes to a log file."""
        if name in self.processes:
            self.kill(name)
        given = {"env": self.environment, "cwd": self.folder, "start_new_session": True, "stdin": subprocess.DEVNULL}
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, **given)  # type: ignore[call-overload]  # as it takes them

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL and wait for its end."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def flwr(self, *words: object) -> str:
        """Run a command of ``flwr`` and return what it prints; a RuntimeError with what it says if it fails."""
        command = [str(program("flwr")), *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:3])} failed: {' '.join((done.stdout + done.stderr).split())}")
        return done.stdout

    def wait_for(self, ready: Callable[[], object], process: str, what: str, seconds: float = STARTS) -> None:
        """Wait until something is the case; a RuntimeError if the process ends before, or the time."""
        end = time.monotonic() + seconds
        while not ready():
            if process in self.processes and self.processes[process].poll() is not None:
                said = self.log(process).read_text(errors="replace").strip().splitlines()[-5:]
                raise RuntimeError(f"{process} ended before {what} was there: {' '.join(said)}")
            if time.monotonic() > end:
                raise RuntimeError(f"{what} was not there after {seconds:g} seconds; see {self.log(process)}")
            time.sleep(0.2)

    def end(self) -> None:
        """End all processes: by SIGTERM, and what is left after ten seconds by SIGKILL."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            # All are waited for: Flower's processes end when they see that their parent is there no more.
            if all([process.poll() is not None for process in self.processes.values()]) and not self.alive():
                break
            time.sleep(0.2)
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def alive(self) -> list[int]:
        """Ids of this federation's processes: the environment of all that descend from it names its folder."""
        mark = f"FLWR_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):  # elsewhere Flower's own watch over parents must do
            with suppress(OSError):
                if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Demo(Loopback):
    """Three sites that have the images of the clients of one recipe, and their server."""

    def begin(self, rounds: int, recipe_digest: Callable[[str], str], secure_sums: bool = False) -> None:
        """Write recipe, app and keys, and start all that runs before a run is started."""
        self.recipe, self.app = self.folder / "recipe.yaml", self.folder / "federation" / "app"
        self.recipe.write_text(demo_recipe(rounds, secure_sums), encoding="utf-8")
        self.digest = recipe_digest(str(self.recipe))
        write_app(self.app.parent, "demo", self.recipe.read_text(encoding="utf-8"), self.digest, "localhost")
        self.write_keys()
        if secure_sums:
            write_sites(self.folder / "keys")
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


def write_sites(folder: Path) -> None:
    """Write an identity for each site, and the list of all."""
    from perada.deploy.sums.identity import write_identity

    for site in SITES:
        write_identity(folder, site)
    lines = [(folder / f"{site}.id.pub").read_text(encoding="utf-8") for site in SITES]
    (folder / "sites.txt").write_text("".join(lines), encoding="utf-8")


def demo_recipe(rounds: int, secure_sums: bool = False) -> str:
    """The recipe ``digits`` for three clients and a few short rounds; by a sum only the last one is scored."""
    recipe: dict[str, Any] = yaml.safe_load(DIGITS.read_text(encoding="utf-8"))
    recipe["trainer"] |= {"max_epochs": rounds, "check_val_every_n_epoch": rounds if secure_sums else 1}
    recipe["model"] |= {"engine": "loop", "cache_features": False}
    recipe["data"]["partition"]["init_args"] |= {"num_clients": len(SITES)}
    recipe["federated"] |= {"clients_per_round": None, "local_epochs": 1}
    recipe["federated"]["distillation"] |= {"steps": 10}
    if secure_sums:
        recipe["federated"]["secure_sums"] = {"fraction_bits": 24}
    return "# The recipe digits with three clients.\n" + yaml.safe_dump(recipe, sort_keys=False)


def site_file(folder: Path, place: int, recipe: Path, digest: str) -> Path:
    """Write the file of a site that has the images of one of the recipe's clients."""
    site, text = SITES[place], recipe.read_bytes()
    data = yaml.safe_load(text)["data"]
    content = {
        "name": site,
        "data": {"dataset": data["dataset"], "partition": data["partition"], "client": place},
        "state": f"state-{site}",
        "socket": f"run/{site}.sock",
        "recipes": [{"recipe": str(recipe), "sha256": hashlib.sha256(text).hexdigest(), "digest": digest}],
        "may_send": ["sizes", "counts", "scores"],
    }
    if (folder / "keys" / "sites.txt").exists():
        content["secure_sums"] = {"identity": f"keys/{site}.id", "sites": "keys/sites.txt"}
    path = folder / f"{site}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def run_demo(
    rounds: int, recipe_digest: Callable[[str], str], keep: Path | None = None, secure_sums: bool = False
) -> int:
    """Run the demonstration, print its rounds and scores, end all processes and remove all files but those to ``keep``.

    Returns:
        0 if the run was completed.
    """
    check_flower()
    began = time.monotonic()
    temporary = tempfile.TemporaryDirectory(prefix="pd")
    with _unwound(), temporary as folder, Demo(Path(folder), SITES, ENVIRONMENT) as running:
        running.begin(rounds, recipe_digest, secure_sums)
        link = Link(f"127.0.0.1:{running.port}", running.folder / "keys" / "ca.crt")
        code = run_app(running.app, link, Terms(len(SITES), state=str(keep or running.folder / "server")))
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
