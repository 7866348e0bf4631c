# SPDX-License-Identifier: Apache-2.0
"""Start an app on a SuperLink, and follow it until it ends."""

import json
import os
import re
import selectors
import shlex
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

from perada.deploy.flower.certificates import WARNING_DAYS, check_presented
from perada.deploy.flower.keys import check_hosts
from perada.deploy.monitoring import FlowerLines, Monitoring, TextLines
from perada.deploy.transport import Terms

DEFAULT_MONITORING = Monitoring()
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment in which Flower sends no telemetry, checks for no update and installs nothing."""
RUN_SILENT = (
    "The SuperLink did not hear from the run for a minute: it was suspended or overloaded, or the run's process was "
    "killed"
)
LINK_SILENT = (
    "The SuperLink was stopped or cannot be reached from here: restart it with the same --database, unless something "
    "else does"
)
NO_SUCH_RUN = "The SuperLink was started without the --database that contains the run"
_NEW_AUTHORITY = (
    "on the server, write a new one to another folder (`perada deploy keys server FOLDER --host NAME`), restart the "
    "SuperLink with the keys in it, and send its ca.crt to all sites"
)
_PAUSE = 0.5
"""Seconds without another line after which a record of Flower's log counts as complete."""
_LIST_TIMEOUT = 60
"""Seconds that `flwr list` may take."""
_STARTED = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class Link:
    """A SuperLink.

    Args:
        where: Its name in Flower's configuration, or its address.
        authority: Certificate of the authority that signed that of the SuperLink; for an address only.

    Raises:
        ValueError: If it is unknown, or its certificate has expired.
    """

    where: str
    authority: Path | None = None

    def __post_init__(self) -> None:
        host, colon, port = self.where.rpartition(":")
        is_address = bool(colon)
        if is_address and self.authority is None:
            raise ValueError(f"link={self.where!r} is an address; pass its certificate with --root-certificates ca.crt")
        if not is_address and self.authority is not None:
            raise ValueError(
                f"link={self.where!r} is a name, and Flower's configuration sets its certificate; drop "
                "--root-certificates ca.crt"
            )
        if is_address:
            check_hosts([host])
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"link={self.where!r} needs a port from 1 to 65535, such as 8000")
        else:
            names = sorted(_read_connections())
            if self.where not in names:
                raise ValueError(
                    f"link={self.where!r} is not defined in {_config_file()}, which has {', '.join(names) or 'none'}; "
                    "use one of them, or an address such as link.example.org:8000"
                )
        if self.certificates is not None:
            _check_expiry(self.certificates)

    @property
    def address(self) -> str:
        """Address at which the SuperLink presents a certificate; "" if it presents none or the address is unknown."""
        if self.authority is not None:
            return self.where
        connection = _read_connections()[self.where]
        address = connection.get("address")
        if not isinstance(address, str) or ":" not in address or connection.get("insecure"):
            return ""
        return address

    @property
    def certificates(self) -> Path | None:
        """The authority's certificate; None to use those that the system trusts, or without TLS."""
        if self.authority is not None:
            return self.authority
        file = _read_connections()[self.where].get("root-certificates")
        if not isinstance(file, str) or not Path(file).is_file():
            return None
        return Path(file)

    def command(self, run: str = "") -> str:
        """Return the command that stops a run, or lists all runs."""
        words = ["perada", "deploy", "runs", "--link", self.where]
        if self.authority is not None:
            words += ["--root-certificates", str(self.authority)]
        if run:
            words += ["--stop", run]
        return shlex.join(words)

    @contextmanager
    def connection(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the name of the connection, and the environment in which Flower's commands find it."""
        environment = {**os.environ, **QUIET}
        if self.authority is None:
            yield self.where, environment
            return
        with tempfile.TemporaryDirectory(prefix="perada-") as home:
            write_connection(Path(home), "perada", self.where, self.authority.resolve())
            yield "perada", environment | {"FLWR_HOME": home}


def _config_file() -> Path:
    """Return Flower's configuration file, which defines SuperLinks by name."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def _read_connections() -> dict[str, dict[str, object]]:
    """Return the options of all SuperLinks in Flower's configuration, by name."""
    file = _config_file()
    if not file.is_file():
        return {}
    section = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {})
    # The section also contains the name of the default connection.
    return {name: value for name, value in section.items() if isinstance(value, dict)}


def write_connection(home: Path, name: str, address: str, authority: Path) -> None:
    """Write a configuration for Flower's commands with a single SuperLink."""
    lines = [
        "[superlink]",
        f'default = "{name}"',
        "",
        f"[superlink.{name}]",
        f"address = {json.dumps(address)}",
        f"root-certificates = {json.dumps(str(authority))}",
        "",
    ]
    (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")


def _check_expiry(file: Path) -> None:
    """Check that a file is an authority's certificate that is valid, and warn if it expires soon.

    Raises:
        ValueError: If it is not, or has expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
        expires = min(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs())
    except (OSError, ValueError):
        raise ValueError(
            f"{str(file)!r} is not an authority's certificate; pass the ca.crt of the server's keys"
        ) from None
    day = time.strftime("%Y-%m-%d", time.gmtime(expires))
    if expires < time.time():
        raise ValueError(f"{str(file)!r} expired on {day}; {_NEW_AUTHORITY}")
    if expires < time.time() + WARNING_DAYS * 86400:
        warnings.warn(f"{str(file)!r} expires on {day}; {_NEW_AUTHORITY}", stacklevel=2)


def check_flower() -> None:
    """Raise an ImportError unless Flower is installed."""
    if not program("flower-superlink").is_file():
        raise ImportError("Flower is not installed; pip install 'perada[flower]'")


def program(name: str) -> Path:
    """Return the path of one of Flower's programs, preferably from this Python environment."""
    environment = Path(sys.executable).parent
    search_path = f"{environment}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return Path(shutil.which(name, path=search_path) or environment / name)


def run_app(app: Path, link: Link, terms: Terms, monitoring: Monitoring = DEFAULT_MONITORING) -> int:
    """Start an app, print its output, and wait until it ends.

    Args:
        app: Folder of the app.
        link: SuperLink that runs it.
        terms: Terms of the run.
        monitoring: How the run is monitored.

    Returns:
        0 if the run was completed; 130 after Ctrl-C, which leaves the run going; else 1.
    """
    if not (app / "pyproject.toml").is_file() or not (app / "perada_app" / "recipe.yaml").is_file():
        raise FileNotFoundError(f"{str(app)!r} is not an app; pass the folder `app` written by `perada deploy init`")
    check_flower()
    if link.address:
        check_presented(link.address, link.certificates)
    if monitoring.metrics_port:
        monitoring = replace(monitoring, superlink=link.address)
    config = _run_config(app, vars(terms) | vars(monitoring))
    lines = FlowerLines() if monitoring.log_format == "json" else TextLines()

    def print_lines(text: str, stream: TextIO | None = None) -> None:
        for line in [*lines.feed(text), *lines.flush()]:
            print(line, file=stream or sys.stdout, flush=True)

    with link.connection() as (name, environment):
        run_command = ["run", str(app), name, "--stream", "--run-config", config]
        outcome = follow(run_command, environment, lines)
        run = outcome.run
        if outcome.interrupted:
            if run is None:
                message = f"Stopped before the run had a number; check whether it started with: {link.command()}"
            else:
                message = f"The run continues on the SuperLink {link.where}; stop it with: {link.command(run)}"
            print_lines(message, sys.stderr)
            return 130
        if run is None:
            return 1
        end = _read_run_status(name, run, environment)
    print_lines(f"Flower's run {run} has the status {end.status}")
    if end.status == "finished:completed":
        return 0
    print_lines(f"{end.reason}. Run the same command with --resume to continue after the last closed round")
    return 1


def list_runs(link: Link, stop: str = "") -> int:
    """Print the runs of a SuperLink, or stop one of them, by Flower's command.

    Args:
        link: The SuperLink.
        stop: Id of the run to stop; empty to print all runs.

    Returns:
        The exit status of Flower's command.
    """
    check_flower()
    with link.connection() as (name, environment):
        words = ["stop", stop, name] if stop else ["list", name]
        return subprocess.run([str(program("flwr")), *words], env=environment, check=False).returncode


@dataclass(frozen=True)
class _RunStatus:
    """Status of a run that is no longer followed.

    Attributes:
        status: Flower's status, such as ``finished:failed``.
        reason: Why the run ended.
    """

    status: str
    reason: str


def _read_run_status(name: str, run: str, environment: Mapping[str, str]) -> _RunStatus:
    """Return the status of a run.

    If the SuperLink does not answer, ``flwr list --format json`` exits with 0, and prints an object with
    ``"success": false`` and without runs (flwr 1.41).
    """
    command = [str(program("flwr")), "list", name, "--run-id", run, "--format", "json"]
    output = ""
    with suppress(subprocess.TimeoutExpired):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_LIST_TIMEOUT
        )
        output = result.stdout
    rows = None
    with suppress(ValueError):
        answer = json.loads(output)
        if isinstance(answer, dict):
            rows = answer.get("runs")
    if rows is None:
        return _RunStatus("unknown: the SuperLink does not answer", LINK_SILENT)
    if not rows:
        return _RunStatus("unknown: the SuperLink has no such run", NO_SUCH_RUN)
    reason = " ".join(str(rows[0].get("status-details") or RUN_SILENT).split())
    return _RunStatus(str(rows[0].get("status", "unknown")), reason)


def _run_config(app: Path, options: Mapping[str, object]) -> str:
    """Format options for Flower, which rejects those that the app does not list.

    An app that another version of perada wrote may lack options; they are left out if they have their defaults.
    """
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    app_options = project["tool"]["flwr"]["app"]["config"]
    defaults = vars(Monitoring())
    config = []
    for key, value in options.items():
        if key in app_options:
            config.append(f"{key}={json.dumps(value)}")
        elif defaults.get(key) != value:
            raise ValueError(f"{str(app)!r} has no option {key}; rewrite it with `perada deploy init RECIPE FOLDER`")
    return " ".join(config)


@dataclass(frozen=True)
class CommandOutcome:
    """How a ``flwr`` command ended.

    Attributes:
        run: Id of the run that it started; None if it did not print one.
        interrupted: Whether Ctrl-C ended it.
    """

    run: str | None
    interrupted: bool


def follow(
    command_words: Sequence[str],
    environment: Mapping[str, str],
    lines: TextLines | None = None,
) -> CommandOutcome:
    """Run a ``flwr`` command, and print its output until it ends.

    Args:
        command_words: The command's arguments.
        environment: Its environment.
        lines: How its lines are converted; by default not at all.
    """
    lines = TextLines() if lines is None else lines
    started = None
    interrupted = False
    command = [str(program("flwr")), *command_words]
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
            started = started or _STARTED.search(reader.read_rest())  # what it printed before it was stopped
        except SystemExit:  # a signal; otherwise leaving the context would wait for the end of the run
            process.terminate()
            raise
    for text in lines.flush():
        print(text, flush=True)
    return CommandOutcome(started[1] if started else None, interrupted)


class _LineReader:
    """Yields the lines of a pipe as they arrive, and None whenever none has arrived for a moment."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        # A line that has begun, but not ended.
        self._incomplete = b""

    def __iter__(self) -> Iterator[str | None]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(_PAUSE):
                    yield None
                    selector.select()  # without a limit: None is yielded once
                content = os.read(self._pipe.fileno(), 65536)
                if not content:
                    break
                *complete, self._incomplete = (self._incomplete + content).split(b"\n")
                for line in complete:
                    yield line.decode(errors="replace")
        if self._incomplete:
            yield self._incomplete.decode(errors="replace")

    def read_rest(self) -> str:
        """Return everything until the pipe is closed, including an incomplete line that was read before."""
        return (self._incomplete + self._pipe.read()).decode(errors="replace")
