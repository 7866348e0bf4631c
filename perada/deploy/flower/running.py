# SPDX-License-Identifier: Apache-2.0
"""Starting an app on a SuperLink, and following it to its end."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perada.deploy.flower.keys import check_hosts, warn_of_expiry
from perada.deploy.flower.server_app import RunOptions

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower reports nothing home, asks for no update and installs nothing."""
_ADDRESS = re.compile(r"(.+):(\d{1,5})")
_STARTED = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class Link:
    """A SuperLink: its name in Flower's configuration, or its address with the authority's certificate.

    Raises:
        ValueError: If the name is unknown, the address is none, or a certificate is given for a name or lacks for an
            address.
        FileNotFoundError: If the certificate is not there.
    """

    where: str
    authority: Path | None = None

    def __post_init__(self) -> None:
        address = _ADDRESS.fullmatch(self.where)
        if address is None:
            if self.authority is not None:
                raise ValueError(
                    f"link={self.where!r} is a name, whose certificate Flower's configuration says; leave out "
                    "--root-certificates, or give an address with its port"
                )
            known = _known()
            if self.where not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ValueError(
                    f"link={self.where!r} is unknown to {_home() / 'config.toml'}, which has {names}; give one of "
                    "them, or an address such as link.example.org:8000"
                )
            return
        check_hosts([address[1]])
        if not 0 < int(address[2]) < 65536:
            raise ValueError(f"link={self.where!r} has no port from 1 to 65535; give one, such as 8000")
        if self.authority is None:
            raise ValueError(f"link={self.where!r} is an address; give its certificate with --root-certificates ca.crt")
        if not self.authority.is_file():
            raise FileNotFoundError(f"{str(self.authority)!r} is not a file; give the ca.crt of the server's keys")
        warn_of_expiry(self.authority)

    @contextmanager
    def connection(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Name of the connection and the environment in which Flower's commands know it."""
        environment = {**os.environ, **QUIET}
        if self.authority is None:
            yield self.where, environment
            return
        with tempfile.TemporaryDirectory(prefix="perada-") as home:
            write_connection(Path(home), "perada", self.where, self.authority.resolve())
            yield "perada", environment | {"FLWR_HOME": home}


def write_connection(home: Path, name: str, address: str, authority: Path) -> None:
    """Write a configuration of Flower's commands with one SuperLink."""
    lines = ["[superlink]", f'default = "{name}"', "", f"[superlink.{name}]"]
    lines += [f"address = {json.dumps(address)}", f"root-certificates = {json.dumps(str(authority))}", ""]
    (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")


def check_app(app: Path) -> None:
    """Refuse a folder that is not an app of perada's.

    Raises:
        FileNotFoundError: If there is no such folder, or it is not what `perada deploy init` wrote.
        ImportError: If Flower is not installed.
    """
    if not (app / "pyproject.toml").is_file() or not (app / "perada_app" / "recipe.yaml").is_file():
        raise FileNotFoundError(f"{str(app)!r} is not an app; give the folder `app` that `perada deploy init` wrote")
    check_flower()


def check_flower() -> None:
    """Refuse to continue without Flower.

    Raises:
        ImportError: With the way to install it.
    """
    if not program("flower-superlink").is_file():
        raise ImportError("Flower is not installed; pip install 'perada[flower]'")


def run_app(app: Path, link: Link, options: RunOptions) -> int:
    """Start an app, print what it prints, and wait for its end.

    Returns:
        0 if the run was completed; 130 after Ctrl-C, which leaves the run going; else 1.
    """
    check_app(app)
    with link.connection() as (name, environment):
        words = ["run", str(app), name, "--stream", "--run-config", _run_config(options)]
        run, interrupted = _shown(words, environment)
        if interrupted:
            still = f"The run continues at the SuperLink {link.where}; stop it with: flwr stop {run}"
            print(still if run else "Stopped before the run had a number; flwr list says if it began", file=sys.stderr)
            return 130
        if run is None:
            return 1
        listed = subprocess.run(
            [program("flwr"), "list", name, "--run-id", run, "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        rows = json.loads(listed.stdout)["runs"] if listed.returncode == 0 else []
        status = rows[0]["status"] if rows else "unknown: the SuperLink does not answer"
        done = status == "finished:completed"
        print(f"Flower's run {run} is {status}" + ("" if done else f"\n{_reason(rows)}"))
        return 0 if done else 1


def _reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why a run did not complete, as far as the SuperLink says it, and what to do."""
    said = " ".join(str(rows[0].get("status-details") or "").split()) if rows else ""
    silent = (
        "The SuperLink did not hear from the run for a minute: it was suspended or overloaded, or the process of the "
        "run was killed"
    )
    return f"{said or silent}. The same command with --resume continues after the last round that was closed"


def _shown(words: Sequence[str], environment: dict[str, str]) -> tuple[str | None, bool]:
    """Run a command of ``flwr`` and print its lines as they come.

    Returns:
        The id of the run that it started, if it did, and whether Ctrl-C ended it.
    """
    run, interrupted = None, False
    command = [str(program("flwr")), *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                run = found[1] if (found := _STARTED.search(line)) else run
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            process.terminate()
            interrupted = True
            rest = _STARTED.search(process.stdout.read())  # what was said before it was stopped
            run = rest[1] if rest else run
        except SystemExit:  # a signal: else leaving the context would wait for the run's end
            process.terminate()
            raise
    return run, interrupted


def _run_config(options: RunOptions) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in options.config().items())


def _home() -> Path:
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def _known() -> set[str]:
    """Names of the SuperLinks in Flower's configuration."""
    try:
        links = tomllib.loads((_home() / "config.toml").read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return set()
    return {name for name, value in links.items() if isinstance(value, dict)}


def program(name: str) -> Path:
    """A program of Flower's in the environment that runs this one."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    return beside if beside.is_file() or found is None else Path(found)
