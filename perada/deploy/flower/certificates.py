# SPDX-License-Identifier: Apache-2.0
"""The certificate that a SuperLink presents at its port, which may differ from the one in the file."""

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

WARNING_DAYS = 60
"""How many days before a certificate expires a warning is given."""
TIMEOUT = 5.0
"""Seconds to wait for a SuperLink's certificate."""
RENEW = (
    "on the server, move server.pem and server.key away, run `perada deploy keys server FOLDER --host NAME` with the "
    "same folder and name, and restart the SuperLink"
)
_DATE_ERRORS = {9, 10}
"""OpenSSL's codes of a certificate that is not valid yet, or has expired."""
_DAY = 86400

log = logging.getLogger("perada.deploy")


class Validity(NamedTuple):
    """Validity period of a certificate, in seconds since 1970."""

    begin: float
    end: float


def read_validity(address: str, timeout: float = TIMEOUT) -> Validity | None:
    """Read the validity period of the certificate presented at an address.

    The certificate is not verified, since an expired one has dates too. Nothing is sent over the connection.

    Args:
        address: Host and port, such as ``link.example.org:8000``.
        timeout: Seconds to wait.

    Returns:
        Its dates; None if no TLS server answers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        content = _fetch_certificate(address, context, timeout)
    except (OSError, ValueError):
        return None
    if content is None:
        return None
    from cryptography import x509  # an optional dependency, which Flower brings

    certificate = x509.load_der_x509_certificate(content)
    return Validity(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def check_presented(address: str, authority: Path | None) -> None:
    """Check a SuperLink's certificate as Flower's programs do, and warn if it expires soon.

    If there is no answer, nothing happens: Flower reports that itself.

    Args:
        address: Where the SuperLink listens.
        authority: Certificate of the authority that must have signed it; None for those that the system trusts.

    Raises:
        ValueError: If the certificate has expired, is not valid yet, or is for another authority or host.
    """
    validity = read_validity(address)
    if validity is None:
        return
    now = time.time()
    if now > validity.end:
        raise ValueError(f"the certificate presented by {address} expired on {_format_day(validity.end)}; {RENEW}")
    if now < validity.begin:
        raise ValueError(
            f"the certificate presented by {address} is not valid before {_format_day(validity.begin)}; correct this "
            "machine's clock, or the server's before it writes the keys"
        )
    warning = expiry_warning(address, validity)
    if warning:
        warnings.warn(warning, stacklevel=2)
    context = ssl.create_default_context(cafile=None if authority is None else str(authority))
    try:
        _fetch_certificate(address, context, TIMEOUT)
    except ssl.SSLCertVerificationError as error:
        # Dates were checked above, with plainer messages.
        if error.verify_code not in _DATE_ERRORS:
            raise ValueError(
                f"the certificate presented by {address} cannot be trusted ({error.verify_message}); use the ca.crt "
                "that was written with its keys, and an address that was passed to --host at that time"
            ) from None
    except OSError:
        pass


def expiry_warning(address: str, validity: Validity) -> str:
    """Return a warning if a certificate has expired or expires within `WARNING_DAYS`; "" otherwise."""
    if validity.end > time.time() + WARNING_DAYS * _DAY:
        return ""
    expires = "expires" if validity.end > time.time() else "expired"
    return f"the certificate presented by {address} {expires} on {_format_day(validity.end)}; {RENEW}"


class ExpiryOf:
    """Looks up when a SuperLink's certificate expires, and keeps the result for a while.

    Args:
        address: Address of the SuperLink. If there is no answer, as behind a firewall that does not let the server
            reach itself, the same port of this machine is tried.
        pause: Seconds between two look-ups.
        read: Reads when a certificate is valid.
    """

    def __init__(
        self,
        address: str,
        pause: float = 600.0,
        read: Callable[..., Validity | None] = read_validity,
    ) -> None:
        self._addresses = (address, f"127.0.0.1:{address.rpartition(':')[2]}")
        self._pause = pause
        self._read = read
        self._last: Validity | None = None
        self._next_look_up = 0.0
        self._last_warning = -math.inf

    def __call__(self) -> float | None:
        """Return when the certificate expires, in seconds since 1970.

        If there is no answer, this is the result of the last successful look-up; None before the first one.
        """
        if time.monotonic() < self._next_look_up:
            return None if self._last is None else self._last.end
        for address in self._addresses:
            validity = self._read(address, timeout=2.0)
            if validity is not None:
                warning = expiry_warning(address, validity)
                if warning and time.monotonic() > self._last_warning + _DAY:
                    log.warning("%s", warning)
                    self._last_warning = time.monotonic()
                self._last = validity
                break
        self._next_look_up = time.monotonic() + self._pause
        return None if self._last is None else self._last.end


def _fetch_certificate(address: str, context: ssl.SSLContext, timeout: float) -> bytes | None:
    """Return the certificate presented at an address, in DER format.

    Raises:
        OSError: If there is none, or the context does not trust it.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True)


def _format_day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
