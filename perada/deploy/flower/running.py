# SPDX-License-Identifier: Apache-2.0
"""Starting an app on a SuperLink, and following it to its end."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perada.deploy.flower.keys import check_hosts
from perada.deploy.monitoring import Monitoring, as_json_line
from perada.deploy.transport import Terms

WATCH = Monitoring()
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower reports nothing home, asks for no update and installs nothing."""
SOON = 60
"""Days before a certificate expires in which a warning says so."""
SILENT = (
    "The SuperLink did not hear from the run for a minute: it was suspended or overloaded, or the process of the run "
    "was killed"
)
_STARTED = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class Link:
    """A SuperLink: its name in Flower's configuration, or its address with the authority's certificate."""

    where: str
    authority: Path | None = None

    def __post_init__(self) -> None:
        host, colon, port = self.where.rpartition(":")
        if bool(colon) != (self.authority is not None):
            what = "an address; give its certificate with" if colon else "a name, whose certificate Flower knows; drop"
            raise ValueError(f"link={self.where!r} is {what} --root-certificates ca.crt")
        if self.authority is None:
            file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
            links = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {}) if file.is_file() else {}
            known = sorted(name for name, value in links.items() if isinstance(value, dict))
            if self.where not in known:
                raise ValueError(
                    f"link={self.where!r} is unknown to {file}, which has {', '.join(known) or 'none'}; give one of "
                    "them, or an address such as link.example.org:8000"
                )
            return
        check_hosts([host])
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"link={self.where!r} has no port from 1 to 65535; give one, such as 8000")
        _check_expiry(self.authority)

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


def _check_expiry(file: Path) -> None:
    """Refuse what is not an authority's certificate, or has expired, and warn of one that soon will."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
        last = min(ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs())
    except (OSError, ValueError):
        raise ValueError(
            f"{str(file)!r} is not an authority's certificate; give the ca.crt of the server's keys"
        ) from None
    day = time.strftime("%Y-%m-%d", time.gmtime(last))
    if last < time.time():
        raise ValueError(f"{str(file)!r} expired on {day}; write another by `perada deploy keys server`")
    if last < time.time() + SOON * 86400:
        warnings.warn(f"{str(file)!r} expires on {day}; write another by `perada deploy keys server`", stacklevel=2)


def check_flower() -> None:
    """Refuse to continue without Flower, by an ImportError with the way to install it."""
    if not program("flower-superlink").is_file():
        raise ImportError("Flower is not installed; pip install 'perada[flower]'")


def program(name: str) -> Path:
    """A program of Flower's in the environment that runs this one."""
    beside = Path(sys.executable).parent
    return Path(shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}") or beside / name)


def run_app(app: Path, link: Link, terms: Terms, watch: Monitoring = WATCH) -> int:
    """Start an app, print what it prints, and wait for its end.

    Returns:
        0 if the run was completed; 130 after Ctrl-C, which leaves the run going; else 1.
    """
    if not (app / "pyproject.toml").is_file() or not (app / "perada_app" / "recipe.yaml").is_file():
        raise FileNotFoundError(f"{str(app)!r} is not an app; give the folder `app` that `perada deploy init` wrote")
    check_flower()
    config, show = _config(app, vars(terms) | vars(watch)), as_json_line if watch.log_format == "json" else str.rstrip
    with link.connection() as (name, environment):
        run, interrupted = follow(["run", str(app), name, "--stream", "--run-config", config], environment, show)
        if interrupted:
            still = f"The run continues at the SuperLink {link.where}; stop it with: flwr stop {run}"
            print(still if run else "Stopped before the run had a number; flwr list says if it began", file=sys.stderr)
            return 130
        if run is None:
            return 1
        words = [str(program("flwr")), "list", name, "--run-id", run, "--format", "json"]
        listed = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    rows = json.loads(listed.stdout)["runs"] if listed.returncode == 0 else []
    row = rows[0] if rows else {"status": "unknown: the SuperLink does not answer"}
    print(show(f"Flower's run {run} is {row['status']}"))
    if row["status"] == "finished:completed":
        return 0
    reason = " ".join(str(row.get("status-details") or SILENT).split())
    print(show(f"{reason}. The same command with --resume continues after the last round that was closed"))
    return 1


def _config(app: Path, options: Mapping[str, object]) -> str:
    """The options for Flower, which refuses those that the app does not list, as one of another version may."""
    listed = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    usual = vars(Monitoring())
    unknown = [key for key, value in options.items() if key not in listed and usual.get(key) != value]
    if unknown:
        raise ValueError(f"{str(app)!r} does not know {unknown[0]}; write it anew by `perada deploy init`")
    return " ".join(f"{key}={json.dumps(value)}" for key, value in options.items() if key in listed)


def follow(
    words: Sequence[str], environment: Mapping[str, str], show: Callable[[str], str] = str.rstrip
) -> tuple[str | None, bool]:
    """Run a command of ``flwr``, print its lines; give the id of the run that it started, and if Ctrl-C ended it."""
    said, interrupted = "", False
    command = [str(program("flwr")), *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]  # as it takes them
        try:
            for line in process.stdout:
                said += line if _STARTED.search(line) else ""
                print(show(line), flush=True)
        except KeyboardInterrupt:
            process.terminate()
            interrupted = True
            said += process.stdout.read()  # what was said before it was stopped
        except SystemExit:  # a signal: else leaving the context would wait for the run's end
            process.terminate()
            raise
    found = _STARTED.search(said)
    return (found[1] if found else None), interrupted
