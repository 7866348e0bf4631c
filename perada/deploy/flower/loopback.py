# SPDX-License-Identifier: Apache-2.0
"""A whole federation on one machine, over the loopback interface: for `perada deploy demo`, tests and benchmarks."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perada.deploy.flower.keys import write_server_keys, write_site_keys
from perada.deploy.flower.running import QUIET, check_flower, program, write_connection

LINK = "perada-loopback"
"""Name of the SuperLink in Flower's configuration."""
STARTS = 120.0
"""Seconds that a process may take to start."""


class Loopback:
    """A SuperLink with TLS and authentication, and one SuperNode and one worker for each site.

    It ends all its processes when its context is left, those that they started included.

    Args:
        folder: Where keys, Flower's own folder, logs and sockets go. It must be short: a socket's path has 100 bytes.
        sites: Names of the sites.
        environment: Environment variables of all processes, beside this process's own.
    """

    def __init__(self, folder: Path, sites: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        check_flower()
        self.folder = folder
        self.sites = list(sites)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.home = folder / "flwr"
        self.port = 0
        self.environment = {
            **os.environ,
            **QUIET,
            **(environment or {}),
            "FLWR_HOME": str(self.home),
            "PATH": f"{program('flwr').parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "NO_PROXY": "localhost,127.0.0.1",
        }
        for name in ("flwr", "keys", "logs", "run"):
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
        self.wait_for(lambda: _listens(self.port), "link", "the SuperLink's port")

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
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL and wait for its end."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def flwr(self, *words: object) -> str:
        """Run a command of ``flwr`` and return what it prints.

        Raises:
            RuntimeError: If it fails, with what it says.
        """
        command = [str(program("flwr")), *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:3])} failed: {' '.join((done.stdout + done.stderr).split())}")
        return done.stdout

    def online(self) -> int:
        """Number of SuperNodes that the SuperLink hears from."""
        listed = json.loads(self.flwr("supernode", "list", LINK, "--format", "json"))
        return sum(node["status"] == "online" for node in listed["nodes"])

    def runs(self) -> dict[str, str]:
        """States of Flower's runs by their id, such as ``finished:completed``."""
        return {
            str(run["run-id"]): run["status"] for run in json.loads(self.flwr("list", LINK, "--format", "json"))["runs"]
        }

    def wait_for(self, ready: Any, process: str, what: str, seconds: float = STARTS) -> None:  # noqa: ANN401  # a test
        """Wait until something is the case while a process runs.

        Raises:
            RuntimeError: If the process ended, with the end of its log, or if the time ran out.
        """
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
            with suppress(ProcessLookupError):
                process.terminate()
        end = time.monotonic() + 10
        while time.monotonic() < end and (self.alive() or any(p.poll() is None for p in self.processes.values())):
            time.sleep(0.2)
        for pid in [*self.alive(), *(p.pid for p in self.processes.values() if p.poll() is None)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
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

    def children(self, pid: int, name: str) -> list[int]:
        """Ids of the processes of a program that descend from a process."""
        parents, words = {}, {}
        for one in self.alive():
            with suppress(FileNotFoundError):  # it may end meanwhile
                parents[one] = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
                words[one] = Path(f"/proc/{one}/cmdline").read_text().split("\0")[:3]
        below = {pid}
        while more := {one for one, parent in parents.items() if parent in below} - below:
            below |= more
        return [one for one in below - {pid} if any(word.endswith(name) for word in words[one])]


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
