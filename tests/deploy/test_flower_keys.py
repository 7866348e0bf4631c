# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates, read by Python's TLS and OpenSSH, which did not write them."""

import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading

import pytest

from perada.cli.main import main
from perada.deploy.flower.keys import check_hosts, check_site_name, write_server_keys, write_site_keys
from tests.rejections import rejects


@pytest.fixture
def _cryptography():
    pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perada[flower]'")


def connects(folder, host, authority=None):
    """Whether a client that knows the authority alone accepts the server as ``host``."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=authority or folder / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
    near, far = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(near, server_hostname=host).close()
        return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        near.close()
        thread.join(5)


@pytest.mark.usefixtures("_cryptography")
def test_sites_accept_the_server_by_its_names_only(tmp_path):
    write_server_keys(tmp_path / "keys", ["link.example.org", "127.0.0.1", "::1"])
    assert [connects(tmp_path / "keys", host) for host in ("link.example.org", "127.0.0.1", "::1")] == [True] * 3
    assert not connects(tmp_path / "keys", "other.example.org")
    write_server_keys(tmp_path / "other", ["link.example.org"])
    assert not connects(tmp_path / "keys", "link.example.org", tmp_path / "other" / "ca.crt")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "keys").iterdir()}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "server.pem": 0o644, "server.key": 0o600}


@pytest.mark.usefixtures("_cryptography")
def test_the_servers_own_processes_accept_it(tmp_path):
    """Flower's SuperExec, which starts the ServerApp, connects to 127.0.0.1 whatever name sites know."""
    write_server_keys(tmp_path, ["link.example.org"])
    assert connects(tmp_path, "127.0.0.1")
    assert connects(tmp_path, "::1")
    assert not connects(tmp_path, "127.0.0.2")


@pytest.mark.usefixtures("_cryptography")
def test_a_certificate_is_renewed_and_sites_keep_what_they_have(tmp_path):
    write_server_keys(tmp_path, ["link.example.org"])
    authority = (tmp_path / "ca.crt").read_bytes()
    before = (tmp_path / "server.pem").read_bytes()
    with pytest.raises(FileExistsError, match="already exists"):
        write_server_keys(tmp_path, ["new.example.org"])
    (tmp_path / "server.pem").unlink()
    (tmp_path / "server.key").unlink()
    write_server_keys(tmp_path, ["new.example.org"])
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "server.pem").read_bytes() != before
    assert connects(tmp_path, "new.example.org")


@pytest.mark.usefixtures("_cryptography")
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
def test_openssh_reads_a_sites_keys(tmp_path):
    write_site_keys(tmp_path, "st-marys")
    private = tmp_path / "st-marys.key"
    public = tmp_path / "st-marys.pub"
    derived = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, text=True, check=True).stdout
    assert derived.split()[:2] == public.read_text().split()[:2]
    assert derived.startswith("ecdsa-sha2-nistp384 ")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes()
    with pytest.raises(FileExistsError, match="already exists"):
        write_site_keys(tmp_path, "st-marys")
    assert private.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["site", "keys", "--name", "north"],
        ["server", "keys", "--host", "link.example.org"],
        ["identity", "keys", "--name", "north"],
        ["sign", "sites.txt", "--identity", "north.id"],
    ],
    ids=lambda words: words[0],
)
def test_without_cryptography_the_extra_is_named(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for module in [name for name in sys.modules if name.startswith("perada.deploy.sums.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModuleNotFoundError, match=r"cryptography.*'perada\[flower\]'"):
        main(["deploy", "keys", *words])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="0"):
        main(["deploy", "keys", words[0], "--help"])


@pytest.mark.parametrize("name", ["", "St-Marys", "../up", "a b", "-a", "a.", "x" * 65, "a\n"])
def test_names_that_cannot_be_a_sites(name):
    with pytest.raises(ValueError, match="site name"):
        check_site_name(name)


@pytest.mark.parametrize("host", ["link.example.org:8000", "https://link.example.org", "a b", "-a.org", "*", ""])
def test_what_is_no_host(host):
    with pytest.raises(ValueError, match="neither a host name nor an address"):
        check_hosts([host])
    with pytest.raises(ValueError, match="--host"):
        check_hosts([])


def test_days_that_cannot_be(tmp_path):
    with rejects("days", 0):
        write_server_keys(tmp_path, ["localhost"], days=0)
