# SPDX-License-Identifier: Apache-2.0
"""The certificate that a SuperLink presents at its port, which may be another than the one in the file."""

import logging
import math
import socket
import ssl
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

SOON = 60
"""Days before a certificate expires in which a warning says so."""
TIMEOUT = 5.0
"""Seconds that a SuperLink has to present its certificate."""
RENEW = (
    "at the server move server.pem and server.key away, run `perada deploy keys server` in the same folder, and "
    "restart the SuperLink"
)
_DATES = {9, 10}
"""OpenSSL's codes of a certificate that is not valid yet, or not any more."""
_DAY = 86400

log = logging.getLogger("perada.deploy")


class Validity(NamedTuple):
    """From when to when a certificate is valid, in seconds since 1970."""

    begin: float
    end: float


def read_validity(address: str, timeout: float = TIMEOUT) -> Validity | None:
    """When the certificate is valid that is presented at an address, such as ``link.example.org:8000``.

    Nothing is sent to whoever presents it, and it is not verified: its dates are wanted also where it has expired.

    Returns:
        None if nobody answers there, or not by TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        content = _presented(address, context, timeout)
    except (OSError, ValueError):
        return None
    if content is None:
        return None
    from cryptography import x509  # it comes with Flower

    certificate = x509.load_der_x509_certificate(content)
    return Validity(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def check_presented(address: str, authority: Path | None) -> None:
    """Refuse a SuperLink whose certificate Flower's programs would refuse, and warn of one that soon expires.

    Where nobody answers nothing is said: Flower says that itself.

    Args:
        address: Where the SuperLink listens.
        authority: Certificate of the authority that must have signed; None for those that the system trusts.

    Raises:
        ValueError: If the certificate has expired, is not valid yet, is another authority's or another host's.
    """
    validity = read_validity(address)
    if validity is None:
        return
    now = time.time()
    if now > validity.end:
        raise ValueError(f"the certificate that {address} presents expired on {_day(validity.end)}; {RENEW}")
    if now < validity.begin:
        raise ValueError(
            f"the certificate that {address} presents is valid from {_day(validity.begin)} on only; set this machine's "
            "clock, or the server's when it writes the keys"
        )
    if text := soon(address, validity):
        warnings.warn(text, stacklevel=2)
    context = ssl.create_default_context(cafile=None if authority is None else str(authority))
    try:
        _presented(address, context, TIMEOUT)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _DATES:
            raise ValueError(
                f"the certificate that {address} presents cannot be trusted ({error.verify_message}); give the ca.crt "
                "that its keys were written with, and an address that was named by --host then"
            ) from None
    except OSError:
        pass


def soon(address: str, validity: Validity) -> str:
    """What is said of a certificate that expires within `SOON` days, or has; empty of another."""
    if validity.end > time.time() + SOON * _DAY:
        return ""
    expires = "expires" if validity.end > time.time() else "expired"
    return f"the certificate that {address} presents {expires} on {_day(validity.end)}; {RENEW}"


class ExpiryOf:
    """When the certificate of a SuperLink expires, looked up at most once in a while.

    Args:
        address: Where the SuperLink listens. If nobody answers there, as where a firewall has no way back to the server
            itself, the same port of this machine is tried.
        pause: Seconds between two looks.
    """

    def __init__(
        self, address: str, pause: float = 600.0, read: Callable[..., Validity | None] = read_validity
    ) -> None:
        self._addresses = (address, f"127.0.0.1:{address.rpartition(':')[2]}")
        self._pause, self._read = pause, read
        self._last: Validity | None = None
        self._next = 0.0
        self._warned = -math.inf

    def __call__(self) -> float | None:
        """Seconds since 1970; None if it was never read. What was read last counts while nobody answers."""
        if time.monotonic() < self._next:
            return None if self._last is None else self._last.end
        for address in self._addresses:
            validity = self._read(address, timeout=2.0)
            if validity is not None:
                text = soon(address, validity)
                if text and time.monotonic() > self._warned + _DAY:
                    log.warning("%s", text)
                    self._warned = time.monotonic()
                self._last = validity
                break
        self._next = time.monotonic() + self._pause
        return None if self._last is None else self._last.end


def _presented(address: str, context: ssl.SSLContext, timeout: float) -> bytes | None:
    """The certificate that is presented, in DER. An OSError if there is none, or the context does not trust it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
