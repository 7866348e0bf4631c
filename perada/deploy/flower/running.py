# SPDX-License-Identifier: Apache-2.0
"""Starting an app on a SuperLink, and following it to its end."""

import json
import os
import re
import selectors
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TextIO

from perada.deploy.flower.certificates import SOON, check_presented
from perada.deploy.flower.keys import check_hosts
from perada.deploy.monitoring import FlowerLines, Monitoring, TextLines
from perada.deploy.transport import Terms

WATCH = Monitoring()
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower reports nothing home, asks for no update and installs nothing."""
SILENT = (
    "The SuperLink did not hear from the run for a minute: it was suspended or overloaded, or the process of the run "
    "was killed"
)
UNANSWERED = (
    "The SuperLink was stopped, or cannot be reached from here: start it again with the same --database, if nothing "
    "else does"
)
NO_SUCH_RUN = "The SuperLink was started without the --database in which the run is"
_PAUSE = 0.5
"""Seconds without another line after which a record of Flower's log is taken to be complete."""
_LIST_TIMEOUT = 60
"""Seconds that `flwr list` may take."""
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
            known = sorted(_configured())
            if self.where not in known:
                raise ValueError(
                    f"link={self.where!r} is unknown to {_configuration()}, which has {', '.join(known) or 'none'}; "
                    "give one of them, or an address such as link.example.org:8000"
                )
        else:
            check_hosts([host])
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"link={self.where!r} has no port from 1 to 65535; give one, such as 8000")
        if self.certificates is not None:
            _check_expiry(self.certificates)

    @property
    def address(self) -> str:
        """Where the SuperLink presents a certificate; empty if it does not, or Flower's configuration does not say."""
        if self.authority is not None:
            return self.where
        connection = _configured()[self.where]
        address = connection.get("address")
        return address if isinstance(address, str) and ":" in address and not connection.get("insecure") else ""

    @property
    def certificates(self) -> Path | None:
        """The authority's certificate; None for those that the system trusts, or without TLS."""
        if self.authority is not None:
            return self.authority
        file = _configured()[self.where].get("root-certificates")
        return Path(file) if isinstance(file, str) and Path(file).is_file() else None

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


def _configuration() -> Path:
    """The file in which Flower's commands know SuperLinks by name."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def _configured() -> dict[str, dict[str, object]]:
    """The connections in that file, by name."""
    file = _configuration()
    links = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {}) if file.is_file() else {}
    return {name: value for name, value in links.items() if isinstance(value, dict)}


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
    if link.address:
        check_presented(link.address, link.certificates)
    if watch.metrics_port:
        watch = replace(watch, superlink=link.address)
    config = _config(app, vars(terms) | vars(watch))
    lines = FlowerLines() if watch.log_format == "json" else TextLines()

    def show(text: str, file: TextIO | None = None) -> None:
        for line in [*lines.feed(text), *lines.flush()]:
            print(line, file=file or sys.stdout, flush=True)

    with link.connection() as (name, environment):
        run, interrupted = follow(["run", str(app), name, "--stream", "--run-config", config], environment, lines)
        if interrupted:
            still = f"The run continues at the SuperLink {link.where}; stop it with: flwr stop {run}"
            show(still if run else "Stopped before the run had a number; flwr list says if it began", sys.stderr)
            return 130
        if run is None:
            return 1
        status, reason = _status(name, run, environment)
    show(f"Flower's run {run} is {status}")
    if status == "finished:completed":
        return 0
    show(f"{reason}. The same command with --resume continues after the last round that was closed")
    return 1


def _status(name: str, run: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """The state of a run, such as ``finished:failed``, and in words why it ended.

    A SuperLink that does not answer is such a state, too. ``flwr list --format json`` ends with status 0 then, and
    prints an object with ``"success": false`` and without runs.
    """
    words = [str(program("flwr")), "list", name, "--run-id", run, "--format", "json"]
    output = ""
    with suppress(subprocess.TimeoutExpired):
        listed = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=_LIST_TIMEOUT
        )
        output = listed.stdout
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    rows = answer.get("runs") if isinstance(answer, dict) else None
    if rows is None:
        return "unknown: the SuperLink does not answer", UNANSWERED
    if not rows:
        return "unknown: the SuperLink has no such run", NO_SUCH_RUN
    reason = " ".join(str(rows[0].get("status-details") or SILENT).split())
    return str(rows[0].get("status", "unknown")), reason


def _config(app: Path, options: Mapping[str, object]) -> str:
    """The options for Flower, which refuses those that the app does not list, as one of another version may."""
    listed = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    usual = vars(Monitoring())
    unknown = [key for key, value in options.items() if key not in listed and usual.get(key) != value]
    if unknown:
        raise ValueError(f"{str(app)!r} does not know {unknown[0]}; write it anew by `perada deploy init`")
    return " ".join(f"{key}={json.dumps(value)}" for key, value in options.items() if key in listed)


def follow(
    words: Sequence[str], environment: Mapping[str, str], lines: TextLines | None = None
) -> tuple[str | None, bool]:
    """Run a command of ``flwr``, and print its lines until it ends.

    Args:
        words: The command's arguments.
        environment: Its environment.
        lines: How they are printed; as they are by default.

    Returns:
        The id of the run that it started, None if it did not say one, and whether Ctrl-C ended it.
    """
    lines = TextLines() if lines is None else lines
    started = None
    interrupted = False
    command = [str(program("flwr")), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, env=environment
    ) as process:
        assert process.stdout is not None
        reader = _LineReader(process.stdout)
        try:
            for line in reader:
                started = started or _STARTED.search(line or "")
                for text in lines.flush() if line is None else lines.feed(line):
                    print(text, flush=True)
        except KeyboardInterrupt:
            process.terminate()
            interrupted = True
            started = started or _STARTED.search(reader.rest())  # what was said before it was stopped
        except SystemExit:  # a signal: else leaving the context would wait for the run's end
            process.terminate()
            raise
    for text in lines.flush():
        print(text, flush=True)
    return (started[1] if started else None), interrupted


class _LineReader:
    """Lines of a pipe as they come, and None whenever none has come for a moment."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._left = b""  # the beginning of a line

    def __iter__(self) -> Iterator[str | None]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(_PAUSE):
                    yield None
                    selector.select()
                content = os.read(self._pipe.fileno(), 65536)
                if not content:
                    break
                *complete, self._left = (self._left + content).split(b"\n")
                for line in complete:
                    yield line.decode(errors="replace")
        if self._left:
            yield self._left.decode(errors="replace")

    def rest(self) -> str:
        """All that comes until the pipe is closed, with the beginning of its first line."""
        return (self._left + self._pipe.read()).decode(errors="replace")
