# SPDX-License-Identifier: Apache-2.0
"""The certificate that a port presents: it is read, warned of before it expires, rejected, and among the metrics."""

import contextlib
import datetime
import logging
import socket
import ssl
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perada[flower]'")

from cryptography import x509

from perada.deploy.flower import certificates, keys, running
from perada.deploy.flower.app import write_app
from perada.deploy.flower.certificates import ExpiryOf, Validity, check_presented, read_validity
from perada.deploy.flower.keys import write_server_keys
from perada.deploy.flower.running import Link, run_app, write_connection
from perada.deploy.monitoring import Monitoring
from perada.deploy.transport import Terms

DAY = 86400


@contextlib.contextmanager
def presenting(folder, pem="server.pem", key="server.key"):
    """A port that presents a certificate, as a SuperLink does; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / pem, folder / key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"localhost:{listening.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def write_keys(folder, days, monkeypatch, since=0):
    """Keys of a server whose certificate was made so many days ago, and is valid for ``days``."""
    with monkeypatch.context() as patch:

        class Then(datetime.datetime):
            @classmethod
            def now(cls, zone=None):
                return datetime.datetime.now(zone) - datetime.timedelta(days=since)

        names = {name: getattr(datetime, name) for name in ("UTC", "timedelta", "date")}
        patch.setattr(keys, "datetime", SimpleNamespace(datetime=Then, **names))
        write_server_keys(folder, ["localhost"], days)
    return x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())


def test_what_a_port_presents_is_read_and_not_the_file(tmp_path, monkeypatch):
    certificate = write_keys(tmp_path, 730, monkeypatch)
    with presenting(tmp_path) as address:
        (tmp_path / "server.pem").write_text("renewed, and the SuperLink was not restarted")
        begin, end = read_validity(address)
    assert end == certificate.not_valid_after_utc.timestamp()
    assert begin == certificate.not_valid_before_utc.timestamp()


def test_an_expired_certificate_is_rejected_although_its_authority_is_valid(tmp_path, monkeypatch):
    certificate = write_keys(tmp_path, 30, monkeypatch, since=31)
    day = certificate.not_valid_after_utc.date()
    write_app(tmp_path / "federation", "x", "seed_everything: 3\n", "ab" * 32, "localhost")
    monkeypatch.setattr(running, "check_flower", lambda: None)
    monkeypatch.setattr(running, "follow", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with presenting(tmp_path) as address:
        write_connection(tmp_path, "federation", address, tmp_path / "ca.crt")
        for link in (Link(address, tmp_path / "ca.crt"), Link("federation")):
            message = rf"the certificate presented by {address} expired on {day}; on the server, move server\.pem"
            with pytest.raises(ValueError, match=message):
                run_app(tmp_path / "federation" / "app", link, Terms())


def test_one_that_expires_soon_is_warned_of(tmp_path, monkeypatch, recwarn):
    certificate = write_keys(tmp_path, 90, monkeypatch, since=40)
    with presenting(tmp_path) as address:
        check_presented(address, tmp_path / "ca.crt")
    (warning,) = recwarn
    assert f" expires on {certificate.not_valid_after_utc.date()}; on the server" in str(warning.message)


@pytest.mark.filterwarnings("error")
def test_one_that_is_valid_for_long_is_not_spoken_of(tmp_path, monkeypatch):
    write_keys(tmp_path, 90, monkeypatch)
    with presenting(tmp_path) as address:
        check_presented(address, tmp_path / "ca.crt")


def test_one_of_the_future_of_another_authority_or_of_another_host_is_rejected(tmp_path, monkeypatch):
    write_keys(tmp_path / "future", 730, monkeypatch, since=-2)
    with (
        presenting(tmp_path / "future") as address,
        pytest.raises(ValueError, match=r"before \S+;"),
    ):
        check_presented(address, tmp_path / "future" / "ca.crt")
    write_keys(tmp_path / "now", 730, monkeypatch)
    with (
        presenting(tmp_path / "now") as address,
        pytest.raises(ValueError, match=r"trusted.*ca\.crt"),
    ):
        check_presented(address, tmp_path / "future" / "ca.crt")
    write_server_keys(tmp_path / "elsewhere", ["link.example.org"])
    with presenting(tmp_path / "elsewhere") as address:
        with pytest.raises(ValueError, match=r"trusted.*--host"):
            check_presented(address, tmp_path / "elsewhere" / "ca.crt")
        check_presented(address.replace("localhost", "127.0.0.1"), tmp_path / "elsewhere" / "ca.crt")


def test_who_does_not_answer_by_tls_is_left_to_flower(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        assert read_validity(address, timeout=0.5) is None
        assert time.monotonic() - begin < 5
    assert read_validity(address) is None  # it is closed
    check_presented(address, None)
    assert read_validity("no-such-host.invalid:8000", timeout=0.5) is None


def test_the_metric_goes_on_while_nobody_answers_and_tries_the_machine_itself(monkeypatch, caplog):
    now = [1000.0]
    asked = []
    answers = {}
    monkeypatch.setattr(certificates, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 5.0 * DAY))

    def read(address, timeout):
        asked.append(address)
        return answers.get(address)

    expiry = ExpiryOf("link.example.org:8000", pause=60, read=read)
    caplog.set_level(logging.WARNING, "perada.deploy")
    assert expiry() is None and asked == ["link.example.org:8000", "127.0.0.1:8000"]
    answers["127.0.0.1:8000"] = Validity(0, 10.0 * DAY)
    assert expiry() is None and len(asked) == 2  # a scrape does not wait for the network each time
    for _ in range(3):
        now[0] += 61
        assert expiry() == 10.0 * DAY
    answers.clear()
    now[0] += 61
    assert expiry() == 10.0 * DAY
    assert [record.getMessage() for record in caplog.records] == [
        f"the certificate presented by 127.0.0.1:8000 expires on 1970-01-11; {certificates.RENEW}"
    ]


def test_when_the_certificate_expires_is_among_the_metrics(tiny, tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client", reason="pip install 'perada[monitoring]'")
    from perada.cli.deploy import _counting_transport, _serve_metrics
    from perada.deploy.transport import LocalTransport
    from perada.studies.deployment import free_port

    from .parties import Parties
    from .test_monitoring import scraped

    certificate = write_keys(tmp_path / "keys", 90, monkeypatch)
    parties = Parties(tiny, tmp_path)
    port = free_port()
    name = "superlink_certificate_expiry_timestamp_seconds"
    with presenting(tmp_path / "keys") as address:
        for superlink in (address, ""):
            monitoring = Monitoring(port, superlink=superlink)
            transport = _counting_transport(LocalTransport({}), monitoring)
            coordinator = parties.coordinator(transport)
            with _serve_metrics(coordinator.progress, transport, monitoring):
                actual = scraped(port)
            coordinator.close()
            expected = certificate.not_valid_after_utc.timestamp() if superlink else None
            assert actual.get((name,)) == expected
            parties.folder = tmp_path / "other"
