# SPDX-License-Identifier: Apache-2.0
"""`perada deploy node`: what it finds before anything runs, and that it ends when Flower's SuperNode gives up."""

import contextlib
import datetime
import json
import os
import re
import socket
import ssl
import sys
import tempfile
import threading
import time
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perada[flower]'")

from perada.cli import main
from perada.deploy.flower import node as module
from perada.deploy.flower.keys import write_server_keys, write_site_keys
from perada.deploy.flower.node import Node, check_node, load_key, read_clock_difference, run_node
from perada.deploy.sums.identity import write_identity

from .test_flower_certificates import write_keys


@contextlib.contextmanager
def superlink(keys, seconds_behind=0, status=400, code=2003):
    """Serve HTTPS like a SuperLink whose clock is behind by so many seconds; yields its address and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp=None):
            now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_behind)
            return format_datetime(now, usegmt=True)

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(200, b"{}")

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, dict(self.headers)))
            error = {"code": code, "detail": "as Flower"}
            self.answer(status, json.dumps(error).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # a look at the certificate ends without a request
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.pem", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    write_server_keys(folder, ["localhost"])
    write_site_keys(folder, "alpha")
    return folder


@pytest.fixture
def worker_socket():
    """Path of a socket at which a worker listens."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder) / "site.sock"
        listening.bind(str(path))
        yield path


def site_node(keys, address, path):
    return Node(address, keys / "ca.crt", keys / "alpha.key", path)


def texts(checks, state):
    return [check.text for check in checks if check.status == state]


@pytest.mark.parametrize(
    ("behind", "state", "text"),
    [
        (0, "pass", "agrees"),
        (3, "warn", "s ahead of"),
        (20, "fail", "s ahead of"),
        (-250, "warn", "s behind"),
        (-400, "fail", "s behind"),
    ],
)
def test_the_clock_is_compared_with_the_superlinks(keys, behind, state, text):
    with superlink(keys, seconds_behind=behind) as (address, _):
        check = module._check_clock(address)
        # A busy machine may answer a second later.
        assert read_clock_difference(address) == pytest.approx(behind, abs=2)
    assert check.status == state
    assert text in check.text


def test_a_clock_is_read_although_the_certificate_has_expired(tmp_path, monkeypatch):
    write_keys(tmp_path, 30, monkeypatch, since=31)
    with superlink(tmp_path, seconds_behind=100) as (address, _):
        assert read_clock_difference(address) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("status", "code", "state", "text"),
    [
        (400, 2003, "pass", "is registered"),
        (412, 2004, "fail", "flwr supernode register NAME.pub LINK --name NAME"),
        (401, 0, "fail", "401"),
        (503, 0, "warn", "503"),
    ],
)
def test_a_signed_request_that_changes_nothing_shows_whether_the_key_is_registered(
    keys, worker_socket, status, code, state, text
):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")
    with superlink(keys, status=status, code=code) as (address, requests):
        checks = check_node(site_node(keys, address, worker_socket))
    assert text in checks[-1].text
    assert checks[-1].status == state
    assert all(check.status == "pass" for check in checks[:-1])
    ((path, headers),) = requests
    assert path == "/v1/fleet/activate-node"
    assert any("signature" in name.lower() for name in headers)


def test_flower_names_these_codes_and_tolerances():
    error = pytest.importorskip("flwr.supercore.error", reason="Flower is not installed: pip install 'perada[flower]'")
    from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert error.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED == module._NOT_REGISTERED
    assert error.ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL == module._INVALID_INTERVAL
    assert HEARTBEAT_MIN_INTERVAL > 0  # so that 0 is out of range
    assert SYSTEM_TIME_TOLERANCE == module.MAX_SECONDS_AHEAD
    assert module.MAX_SECONDS_BEHIND <= TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def test_all_problems_are_reported_at_once(keys, tmp_path, monkeypatch, capsys):
    """An expired certificate, a wrong clock, another kind of key, and no worker; and the command fails."""
    write_keys(tmp_path / "old", 30, monkeypatch, since=31)
    write_identity(tmp_path, "alpha")
    with superlink(tmp_path / "old", seconds_behind=60) as (address, requests):
        words = ["--root-certificates", str(keys / "ca.crt"), "--key", str(tmp_path / "alpha.id")]
        with pytest.raises(SystemExit) as ended:
            main(["deploy", "node", address, *words, "--socket", str(tmp_path / "none.sock"), "--check"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    failed = [line for line in out.splitlines() if line.startswith("fail")]
    assert len(failed) == 3
    assert "alpha.id' is not a site's private key" in failed[0]
    # On a busy machine some seconds pass before the clocks are compared.
    (seconds_ahead,) = re.findall(r"(\d+) s ahead of", failed[1])
    assert 60 <= int(seconds_ahead) < 70
    assert "expired on" in failed[2]
    assert "none.sock' cannot be found" in out
    assert requests == []


def test_a_port_that_is_closed_or_without_tls_is_reported(keys, worker_socket, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"127.0.0.1:{plain.getsockname()[1]}"
    checks = check_node(site_node(keys, address, worker_socket))
    assert "cannot be reached (Connection refused)" in texts(checks, "fail")[0]
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"127.0.0.1:{plain.getsockname()[1]}"

        def close_connections():
            with contextlib.suppress(OSError):
                while True:
                    plain.accept()[0].close()

        threading.Thread(target=close_connections, daemon=True).start()
        checks = check_node(site_node(keys, address, worker_socket))
        plain.shutdown(socket.SHUT_RDWR)
    assert texts(checks, "fail") == [
        f"{address} does not answer by TLS; correct --superlink, or start the SuperLink with its --ssl files"
    ]


def test_a_key_that_others_may_read_is_rejected(keys, tmp_path):
    file = tmp_path / "alpha.key"
    file.write_bytes((keys / "alpha.key").read_bytes())
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"alpha\.key' is readable"):
        load_key(file)
    file.chmod(0o400)
    assert load_key(file).curve.name == "secp384r1"


@pytest.mark.parametrize(("option", "value"), [("port", 0), ("port", 65536), ("socket", Path("site.sock"))])
def test_options_that_flower_would_misread_are_rejected(keys, option, value):
    options = {"socket": Path("/run/site.sock"), "port": 9094} | {option: value}
    with pytest.raises(ValueError, match=f"{option}="):
        Node("localhost:8000", keys / "ca.crt", keys / "alpha.key", **options)


class _Ended(BaseException):
    """Raised in place of the end of the process."""


def _run_with(monkeypatch, keys, supernode):
    """Run a node whose program of Flower is a function; return the words of its command line."""

    def end(status):
        raise _Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "check_flower", lambda: None)
    monkeypatch.setattr(module, "entry_points", lambda **_: [SimpleNamespace(load=lambda: supernode)])
    with pytest.raises(_Ended) as ended:
        run_node(Node("localhost:8000", keys / "ca.crt", keys / "alpha.key", Path("/run/site.sock"), 9095))
    assert ended.value.args == (1,)
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    return sys.argv


def test_the_process_ends_when_flower_gives_up_although_a_thread_lives_on(monkeypatch, keys, capsys):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)

    # Flower's SuperNode returns from its loop, and the thread that serves ClientApps stays (flwr 1.42).
    words = _run_with(monkeypatch, keys, thread.start)
    assert thread.is_alive()
    stop.set()
    thread.join()
    assert "gave up" in capsys.readouterr().err
    assert words[1:3] == ["--superlink", "localhost:8000"]
    assert words[-4:] == ["--port", "9095", "--node-config", 'socket="/run/site.sock"']


def test_the_process_ends_when_the_thread_of_heartbeats_breaks(monkeypatch, keys, capsys):
    statuses = []

    def supernode():
        def break_down():
            raise RuntimeError("the SuperLink does not recognize this SuperNode")

        monkeypatch.setattr(os, "_exit", statuses.append)
        thread = threading.Thread(target=break_down)
        thread.start()
        thread.join()
        raise _Ended(1)

    _run_with(monkeypatch, keys, supernode)
    assert statuses == [1]
    assert "does not recognize" in capsys.readouterr().err


@pytest.mark.slow
def test_a_supernode_ends_after_an_expired_certificate_and_connects_with_a_renewed_one(tmp_path, monkeypatch):
    """With real Flower: the SuperLink is restarted with a certificate that expired yesterday, then with a new one."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")
    from perada.studies.deployment import ENVIRONMENT, Loopback

    with tempfile.TemporaryDirectory(prefix="pd") as folder, Loopback(Path(folder), ["alpha"], ENVIRONMENT) as loop:
        loop.write_keys()
        loop.start_link()
        loop.register("alpha")
        loop.start_node("alpha")

        def connected():
            return "SuperNode ID" in loop.log("node-alpha").read_text()

        loop.wait_for(connected, "node-alpha", "the connection", 60)
        keys = Path(folder) / "keys"
        for name in ("server.pem", "server.key"):
            (keys / name).unlink()
        write_keys(keys, 30, monkeypatch, since=31)
        loop.start_link()
        assert loop.processes["node-alpha"].wait(60) == 1
        assert "gave up" in loop.log("node-alpha").read_text()
        for name in ("server.pem", "server.key"):
            (keys / name).unlink()
        write_server_keys(keys, ["localhost"])
        loop.start_link()
        loop.log("node-alpha").write_text("")
        deadline = time.monotonic() + 120
        while not connected() and time.monotonic() < deadline:
            if "node-alpha" not in loop.processes or loop.processes["node-alpha"].poll() is not None:
                loop.start_node("alpha")
            time.sleep(1)
        assert connected()
