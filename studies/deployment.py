# SPDX-License-Identifier: Apache-2.0
"""A complete deployment on one machine, for ``perada deploy demo`` and for the tests and benchmarks of Flower."""

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
"""One thread each, since batches are small and processes many. By default Flower polls for messages every second."""
PROGRAM = "from perada.cli import entry_point; entry_point()"
LINK = "perada-loopback"
"""Name of the SuperLink in Flower's configuration."""
START_TIMEOUT = 120.0
"""Seconds that a process may take to start."""
TERM_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""


class Loopback:
    """A SuperLink with TLS and authentication, and a SuperNode and a worker for each site, on this machine.

    Leaving the context ends all processes, also those that they started.

    Args:
        folder: Folder for keys, Flower's own folder, logs and sockets. Its path must be short, since the path of a
            socket is limited to about a hundred characters.
        sites: Names of the sites.
        environment: Environment variables of the processes, beside those of this process.
    """

    def __init__(self, folder: Path, sites: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        check_flower()
        self.folder = folder
        self.sites = list(sites)
        self.home = folder / "flwr"
        self.port = 0  # chosen at the first start of the SuperLink
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
        command = [
            program("flower-superlink"),
            "--enable-supernode-auth",
            *("--ssl-ca-certfile", keys / "ca.crt"),
            *("--ssl-certfile", keys / "server.pem"),
            *("--ssl-keyfile", keys / "server.key"),
            *("--host", "127.0.0.1"),
            *("--port", self.port),
            *("--database", self.folder / "link.db"),
        ]
        self.start("link", command)
        self.wait_for(self._is_listening, "link", "the SuperLink's port")

    def register(self, site: str) -> None:
        """Register a site's key with the SuperLink, under the site's name."""
        self.flwr("supernode", "register", self.folder / "keys" / f"{site}.pub", LINK, "--name", site)

    def start_node(self, site: str) -> None:
        """Start a site's SuperNode."""
        keys = self.folder / "keys"
        command = [
            *(sys.executable, "-c", PROGRAM),
            *("deploy", "node", f"127.0.0.1:{self.port}"),
            *("--root-certificates", keys / "ca.crt"),
            *("--key", keys / f"{site}.key"),
            *("--socket", self.socket(site)),
            *("--port", free_port()),
        ]
        self.start(f"node-{site}", command)

    def socket(self, site: str) -> Path:
        """Return the path of the socket on which a site's worker listens."""
        return self.folder / "run" / f"{site}.sock"

    def start(self, name: str, command: Sequence[object]) -> None:
        """Start a process that writes to a log file, after killing any earlier process of this name."""
        if name in self.processes:
            self.kill(name)
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command],
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and wait for its end."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def flwr(self, *words: object) -> str:
        """Run a command of ``flwr``, and return its standard output.

        Raises:
            RuntimeError: If it fails, with its output.
        """
        command = [str(program("flwr")), *(str(word) for word in words)]
        completed = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if completed.returncode:
            output = " ".join((completed.stdout + completed.stderr).split())
            raise RuntimeError(f"{' '.join(command[1:3])} failed: {output}")
        return completed.stdout

    def wait_for(self, ready: Callable[[], object], process: str, what: str, seconds: float = START_TIMEOUT) -> None:
        """Wait for something that a process makes.

        Args:
            ready: Returns whether it is there.
            process: Name of the process.
            what: Its name, for messages.
            seconds: Longest time to wait.

        Raises:
            RuntimeError: If the process ends before it is there, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if process in self.processes and self.processes[process].poll() is not None:
                last_lines = self.log(process).read_text(errors="replace").strip().splitlines()[-5:]
                raise RuntimeError(f"{process} ended before {what} was there: {' '.join(last_lines)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} was not available after {seconds:g} seconds; see {self.log(process)}")
            time.sleep(0.2)

    def end(self) -> None:
        """End all processes with SIGTERM, and with SIGKILL those that are alive :data:`TERM_TIMEOUT` seconds later."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + TERM_TIMEOUT
        while time.monotonic() < deadline:
            # Every process is polled, since one that ended stays a zombie until then. The processes that Flower's
            # processes started end by themselves, when they see that their parent has ended.
            exit_codes = [process.poll() for process in self.processes.values()]
            if None not in exit_codes and not self.alive():
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
        """Return the ids of this deployment's processes, whose environment names its folder.

        Only Linux has ``/proc``; elsewhere Flower's processes end by themselves when their parents have ended.
        """
        mark = f"FLWR_HOME={self.home}".encode()
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            with suppress(OSError):  # it may have ended meanwhile, or be another user's
                variables = (entry / "environ").read_bytes().split(b"\0")
                if pid != os.getpid() and mark in variables:
                    pids.append(pid)
        return pids

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def free_port() -> int:
    """Return a port of the loopback interface that is not in use."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Demo(Loopback):
    """Three sites that have the images of the clients of one recipe, and their server."""

    def begin(self, rounds: int, recipe_digest: Callable[[str], str], secure_sums: bool = False) -> None:
        """Write recipe, app and keys, and start the SuperLink and the sites.

        Args:
            rounds: Rounds of the run.
            recipe_digest: Returns the digest of a recipe, given its path.
            secure_sums: Whether the server only sees sums.
        """
        self.recipe = self.folder / "recipe.yaml"
        self.app = self.folder / "federation" / "app"
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
    """Write an identity for each site, and the list of all identities."""
    from perada.deploy.sums.identity import write_identity

    for site in SITES:
        write_identity(folder, site)
    lines = [(folder / f"{site}.id.pub").read_text(encoding="utf-8") for site in SITES]
    (folder / "sites.txt").write_text("".join(lines), encoding="utf-8")


def demo_recipe(rounds: int, secure_sums: bool = False) -> str:
    """Return the recipe ``digits`` for three clients and a few short rounds; with sums only the last one is scored."""
    recipe: dict[str, Any] = yaml.safe_load(DIGITS.read_text(encoding="utf-8"))
    recipe["trainer"] |= {"max_epochs": rounds, "check_val_every_n_epoch": rounds if secure_sums else 1}
    recipe["data"]["partition"]["init_args"] |= {"num_clients": len(SITES)}
    recipe["federated"] |= {"clients_per_round": None}
    recipe["training"] |= {"engine": "loop", "cache_features": False, "local_epochs": 1}
    recipe["distillation"] |= {"steps": 10}
    if secure_sums:
        recipe["secure_sums"] = {"fraction_bits": 24}
    return "# The recipe digits with three clients.\n" + yaml.safe_dump(recipe, sort_keys=False)


def site_file(folder: Path, client: int, recipe: Path, digest: str) -> Path:
    """Write the file of the site that has the images of one of the recipe's clients.

    Args:
        folder: Folder of the deployment.
        client: Number of the client.
        recipe: File of the recipe.
        digest: Digest of the recipe.
    """
    site = SITES[client]
    text = recipe.read_bytes()
    data = yaml.safe_load(text)["data"]
    content = {
        "name": site,
        "data": {"dataset": data["dataset"], "partition": data["partition"], "client": client},
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
    """Run the demonstration: print its rounds and scores, end all processes, and remove all files.

    Args:
        rounds: Rounds of the run.
        recipe_digest: Returns the digest of a recipe, given its path.
        keep: Folder of the server's state, which is not removed; None to remove the state too.
        secure_sums: Whether the server only sees sums.

    Returns:
        0 if the run was completed.
    """
    check_flower()
    started_at = time.monotonic()
    temporary = tempfile.TemporaryDirectory(prefix="pd")
    print(
        f"Three sites on this machine train the recipe digits, with TLS and signed keys; rounds: {rounds}. "
        "This takes a few minutes.",
        flush=True,
    )
    with _exit_on_signals(), temporary as folder, Demo(Path(folder), SITES, ENVIRONMENT) as running:
        running.begin(rounds, recipe_digest, secure_sums)
        link = Link(f"127.0.0.1:{running.port}", running.folder / "keys" / "ca.crt")
        code = run_app(running.app, link, Terms(len(SITES), state=str(keep or running.folder / "server")))
    seconds = time.monotonic() - started_at
    print(f"Finished in {seconds:.0f} s. All processes have ended, and all files were removed.")
    return code


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Leave contexts at SIGTERM and SIGHUP, as at Ctrl-C. Further signals are ignored, so all are left cleanly."""
    signals = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _: FrameType | None) -> None:
        for each_signal in signals:
            signal.signal(each_signal, signal.SIG_IGN)
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
