# SPDX-License-Identifier: Apache-2.0
"""A site's SuperNode: tests of its connection, and a process that ends when the connection is lost for good.

When a SuperLink presents an expired certificate, or a TLS handshake fails for another reason, Flower's SuperNode gives
up but its process stays alive, since a thread of it still serves ClientApps (flwr 1.41 and 1.42). A supervisor such as
systemd would never restart it.
"""

import logging
import os
import socket
import ssl
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from perada.core.checks import check_installed
from perada.deploy.flower.certificates import TIMEOUT, check_presented, read_validity
from perada.deploy.flower.running import QUIET, Link, check_flower, program
from perada.system.files import check_owner_only

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

MAX_SECONDS_AHEAD = 5.0
MAX_SECONDS_BEHIND = 300.0
"""How far a site's clock may be ahead of the SuperLink's, or behind it, before Flower rejects the site."""
CLOCK_WARNING = 2.0
"""Difference of the clocks in seconds above which a warning is given. The SuperLink states whole seconds."""
GAVE_UP = (
    "the SuperNode lost the SuperLink and gave up, usually since the SuperLink's certificate expired; restart the "
    "SuperNode, as systemd does by Restart=always"
)
_NOT_REGISTERED = 2004
_INVALID_INTERVAL = 2003
"""Flower's codes of the errors that the SuperNode's key is not registered, and that an interval is out of range."""

log = logging.getLogger("perada.deploy")


class ConnectionCheck(NamedTuple):
    """Result of a test of the connection. A SuperNode cannot connect if one fails."""

    status: Literal["pass", "warn", "fail"]
    text: str


@dataclass(frozen=True)
class Node:
    """What a SuperNode needs.

    Args:
        superlink: Address of the SuperLink, such as ``link.example.org:8000``.
        authority: Certificate of the authority that signed that of the SuperLink.
        key: The site's private key.
        socket: Socket on which the site's worker listens.
        port: Port of the loopback interface for the SuperNode's own processes.

    Raises:
        ValueError: If an option is not of that kind.
    """

    superlink: str
    authority: Path
    key: Path
    socket: Path
    port: int = 9094

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port={self.port} is not a port; use one from 1 to 65535, such as 9094")
        if not self.socket.is_absolute():
            raise ValueError(
                f"socket={str(self.socket)!r} is a relative path, but Flower changes the folder; use an absolute one"
            )


def check_node(node: Node) -> list[ConnectionCheck]:
    """Test everything that a SuperNode needs to connect, without connecting it.

    The tests are independent where that is possible, so that all problems are reported at once. The SuperLink is sent
    one request, which is signed like a SuperNode's and changes nothing.
    """
    checks = list(_check_files(node))
    files_are_valid = not any(check.status == "fail" for check in checks)
    reachable = _check_port(node.superlink)
    checks.append(reachable)
    if reachable.status == "fail":
        return checks
    checks.append(_check_clock(node.superlink))
    presented = _check_certificate(node)
    checks.append(presented)
    if files_are_valid and presented.status != "fail":
        checks.append(_check_registration(node))
    return checks


def run_node(node: Node) -> NoReturn:
    """Run a SuperNode in this process until it is stopped, or gives up, which ends the process with status 1."""
    check_flower()
    # Flower starts programs of its own by their names.
    environment_path = f"{program('flower-supernode').parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ |= QUIET | {"PATH": environment_path}
    sys.argv = [
        "flower-supernode",
        *("--superlink", node.superlink),
        *("--root-certificates", str(node.authority)),
        *("--auth-supernode-private-key", str(node.key)),
        *("--port", str(node.port)),
        *("--node-config", f'socket="{node.socket}"'),
    ]
    (entry,) = entry_points(group="console_scripts", name="flower-supernode")
    flower_supernode = entry.load()
    threading.excepthook = _end_with_thread
    # It returns only if the connection is lost for good; a signal or an error at the start raises a SystemExit.
    flower_supernode()
    _end_process(GAVE_UP)


def _end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """End the process if one of its threads broke, such as the one whose heartbeats keep the SuperNode admitted."""
    error = arguments.exc_value
    _end_process(f"a thread of the SuperNode broke ({type(error).__name__}: {error}); restart the SuperNode")


def _end_process(reason: str) -> NoReturn:
    """Print why the process ends, and end it although threads are running."""
    print(f"perada: error: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _check_files(node: Node) -> Iterator[ConnectionCheck]:
    """Test the authority's certificate, the private key and the worker's socket."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Link(node.superlink, node.authority)
        yield from [ConnectionCheck("warn", str(warning.message)) for warning in caught]
        yield ConnectionCheck("pass", f"{str(node.authority)!r} is a valid authority's certificate")
    except ValueError as error:
        yield ConnectionCheck("fail", str(error))
    try:
        load_key(node.key)
        yield ConnectionCheck("pass", f"{str(node.key)!r} is a site's private key")
    except (ValueError, OSError) as error:
        yield ConnectionCheck("fail", str(error))
    yield _check_socket(node.socket)


def _check_socket(path: Path) -> ConnectionCheck:
    """Test whether a worker's socket exists that this user may connect to. Nothing is sent to the worker."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return ConnectionCheck(
            "warn", f"the worker's socket {str(path)!r} cannot be found ({reason}); start the worker"
        )
    if not is_socket:
        return ConnectionCheck("fail", f"{str(path)!r} is not a socket; pass the path in the site's file")
    if not os.access(path, os.R_OK | os.W_OK):
        return ConnectionCheck(
            "fail", f"this user may not use the socket {str(path)!r}; run this as the SuperNode's user"
        )
    return ConnectionCheck("pass", f"the worker's socket is {str(path)!r}")


def load_key(file: Path) -> "ec.EllipticCurvePrivateKey":
    """Read a site's private key.

    Raises:
        ValueError: If the file contains no such key, or other users may read it.
        OSError: If it cannot be read.
    """
    check_installed("a site's key", "flower", "cryptography")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    check_owner_only(file)
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{str(file)!r} is not a site's private key; pass the NAME.key of `perada deploy keys site`")
    return key


def _check_port(address: str) -> ConnectionCheck:
    """Test whether a TLS server answers at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT):
            pass
    except socket.gaierror:
        return ConnectionCheck("fail", f"the name {host!r} is unknown; correct --superlink, or the name server")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConnectionCheck(
            "fail",
            f"port {port} of {host} cannot be reached ({reason}); start the SuperLink, or let the firewall pass "
            "outbound TCP to it",
        )
    if read_validity(address) is None:
        return ConnectionCheck(
            "fail",
            f"{address} does not answer by TLS; correct --superlink, or start the SuperLink with its --ssl files",
        )
    return ConnectionCheck("pass", f"port {port} of {host} answers by TLS")


def _check_clock(address: str) -> ConnectionCheck:
    """Compare this machine's clock with that of the SuperLink."""
    ahead = read_clock_difference(address)
    if ahead is None:
        return ConnectionCheck("warn", f"{address} does not state its time, so the clock was not tested")
    direction = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's clock is {abs(ahead):.0f} s {direction} the SuperLink's"
    if not -MAX_SECONDS_BEHIND < ahead < MAX_SECONDS_AHEAD:
        return ConnectionCheck(
            "fail", f"{text}; set both by NTP, since Flower then rejects the site without a message to it"
        )
    if abs(ahead) > CLOCK_WARNING:
        return ConnectionCheck("warn", f"{text}; set both by NTP")
    return ConnectionCheck("pass", "this machine's clock agrees with the SuperLink's")


def read_clock_difference(address: str, timeout: float = TIMEOUT) -> float | None:
    """Return by how many seconds this machine's clock is ahead of that of a SuperLink; None if it does not state it.

    The SuperLink's clock is read from the header ``Date`` of a response. Its certificate is not verified, since a
    wrong clock makes it look expired.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=timeout, context=context)
    try:
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date")
        now = time.time()
        if date is None:
            return None
        # A time in whole seconds that were cut off is half a second early on average.
        return now - (parsedate_to_datetime(date).timestamp() + 0.5)
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _check_certificate(node: Node) -> ConnectionCheck:
    """Test whether the SuperLink's certificate is valid and signed by the authority."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_presented(node.superlink, node.authority)
    except (ValueError, OSError) as error:
        return ConnectionCheck("fail", str(error))
    if caught:
        return ConnectionCheck("warn", str(caught[0].message))
    return ConnectionCheck(
        "pass", f"the certificate presented by {node.superlink} is valid, and signed by {node.authority}"
    )


def _check_registration(node: Node) -> ConnectionCheck:
    """Test whether the site's key is registered, by a signed request that the SuperLink always rejects.

    The request would activate the SuperNode, but its interval of heartbeats is out of range, which the SuperLink looks
    at after the signature and the key, and before it changes anything.
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import FlowerError
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_key(node.key)
    public_key = key.public_key()
    interceptors = [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, public_key)]
    register = "register its NAME.pub at the server: flwr supernode register NAME.pub LINK --name NAME"
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public_key), heartbeat_interval=0)
    try:
        with warnings.catch_warnings():
            # Flower passes the certificate to httpx in a way that httpx 0.28 deprecates.
            warnings.simplefilter("ignore", DeprecationWarning)
            client = FleetHttpClient.from_server_address(
                node.superlink, False, str(node.authority), interceptors=interceptors
            )
        with client:
            client.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            return ConnectionCheck("fail", "the SuperLink rejects the site's signature (401); set both clocks by NTP")
        flower_error = FlowerError.from_json(error.response.text)
        code = None if flower_error is None else flower_error.code
        if code == _INVALID_INTERVAL:
            return ConnectionCheck("pass", "the site's key is registered")
        if code == _NOT_REGISTERED:
            return ConnectionCheck("fail", f"the site's key {str(node.key)!r} is not registered; {register}")
        return ConnectionCheck(
            "warn", f"the registration was not tested: the SuperLink answered {error.response.status_code}"
        )
    except httpx.HTTPError as error:
        return ConnectionCheck("warn", f"the registration was not tested: {type(error).__name__}")
    return ConnectionCheck("warn", "the registration was not tested: the SuperLink is of an unknown version")
