# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: a certificate of the server's, which the sites check, and a key for each site."""

import datetime
import ipaddress
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perada.core.checks import check_whole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

SOON = 60
"""Days before a certificate expires in which a warning says so."""
AUTHORITY_YEARS = 10
"""How long the authority's certificate is valid: sites have a copy of it."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?")


def check_site_name(name: str) -> None:
    """Refuse a name of a site that cannot also be a file's.

    Raises:
        ValueError: With the characters that are allowed.

    >>> check_site_name("st-marys")
    >>> check_site_name("../etc")
    Traceback (most recent call last):
    ValueError: '../etc' is not a name of a site; give up to 64 of a-z, 0-9 and, between them, '-', '_' and '.'
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name of a site; give up to 64 of a-z, 0-9 and, between them, '-', '_' and '.'"
        )


def check_hosts(hosts: Sequence[str]) -> None:
    """Refuse what is neither a host's name nor an address.

    Raises:
        ValueError: For the first that is neither, or if there is none.
    """
    if not hosts:
        raise ValueError("no host is named; give the name or address by which sites reach the server, with --host")
    for host in hosts:
        if not _is_address(host) and not _HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} is neither a host's name nor an address; give one such as link.example.org, without a port"
            )


def write_server_keys(folder: Path, hosts: Sequence[str], days: int = 730) -> datetime.date:
    """Write the server's certificate and key, signed by an authority of the federation's own.

    ``ca.crt`` goes to every site. ``server.pem`` and ``server.key`` are for the SuperLink. ``ca.key`` signs the next
    certificate: if it is there already, only ``server.pem`` and ``server.key`` are written, and sites keep their copy.

    Args:
        folder: Made with mode 0700 if it is not there. Private keys have mode 0600.
        hosts: Names and addresses by which sites reach the server.
        days: How long the server's certificate is valid.

    Returns:
        The day on which it expires.

    Raises:
        ValueError: If a host is none, or ``days`` is not a number of days.
        FileExistsError: If there is a certificate already.
    """
    check_hosts(hosts)
    check_whole("days", days, most=365 * AUTHORITY_YEARS)
    x509, ec, serialization = _cryptography()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca_file, ca_key_file = folder / "ca.crt", folder / "ca.key"
    _check_absent(folder / "server.pem", folder / "server.key")
    if ca_key_file.exists():
        authority = x509.load_pem_x509_certificate(ca_file.read_bytes())
        ca_key = serialization.load_pem_private_key(ca_key_file.read_bytes(), None)
    else:
        _check_absent(ca_file)
        ca_key = ec.generate_private_key(ec.SECP384R1())
        authority = _certificate("perada federation", ca_key, None, ca_key, 365 * AUTHORITY_YEARS, [])
        _write(ca_key_file, _private(ca_key, "PKCS8"), 0o600)
        _write(ca_file, authority.public_bytes(serialization.Encoding.PEM), 0o644)
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(hosts[0], key, authority, ca_key, days, hosts)
    _write(folder / "server.key", _private(key, "PKCS8"), 0o600)
    _write(folder / "server.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    last: datetime.datetime = certificate.not_valid_after_utc
    return last.date()


def expiry(file: Path) -> datetime.date:
    """The day on which a certificate in a PEM file expires; a ValueError if the file is none."""
    x509, _, _ = _cryptography()
    try:
        last: datetime.datetime = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except ValueError:
        raise ValueError(f"{str(file)!r} is not a certificate; give one in PEM, such as ca.crt") from None
    return last.date()


def warn_of_expiry(file: Path) -> None:
    """Refuse a certificate that has expired, by a ValueError, and warn of one that soon will.

    Nothing is said where cryptography is not installed, which Flower brings.
    """
    try:
        _cryptography()
    except ImportError:
        return
    last, today = expiry(file), datetime.datetime.now(datetime.UTC).date()
    if last < today:
        raise ValueError(f"{str(file)!r} expired on {last}; write another by `perada deploy keys server`")
    if (last - today).days < SOON:
        warnings.warn(f"{str(file)!r} expires on {last}; write another by `perada deploy keys server`", stacklevel=2)


def write_site_keys(folder: Path, name: str) -> None:
    """Write a site's keys: ``NAME.key``, which never leaves the site, and ``NAME.pub``, which the server registers.

    They are ECDSA keys on the curve P-384 in the format of OpenSSH, as Flower wants them.

    Args:
        folder: Made with mode 0700 if it is not there. The private key has mode 0600.
        name: Name of the site.

    Raises:
        ValueError: If the name cannot be one.
        FileExistsError: If there is a key already.
    """
    check_site_name(name)
    _, ec, serialization = _cryptography()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    _check_absent(private, public)
    key = ec.generate_private_key(ec.SECP384R1())
    _write(private, _private(key, "OpenSSH"), 0o600)
    formats = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    _write(public, key.public_key().public_bytes(*formats) + f" {name}\n".encode(), 0o644)


def _cryptography() -> tuple[Any, Any, Any]:
    """The modules of `cryptography` that are used, which comes with Flower."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ImportError("keys need the package cryptography; pip install 'perada[flower]'") from error
    return x509, ec, serialization


def _certificate(
    name: str,
    key: "ec.EllipticCurvePrivateKey",
    issuer: "x509.Certificate | None",
    signer: "ec.EllipticCurvePrivateKey",
    days: int,
    hosts: Sequence[str],
) -> "x509.Certificate":
    """A certificate of the authority (without an issuer) or of a server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    authority = issuer is None
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    usage |= {"decipher_only": False, "digital_signature": not authority}
    usage |= {"key_cert_sign": authority, "crl_sign": authority}
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not authority:
        names = [x509.IPAddress(ipaddress.ip_address(h)) if _is_address(h) else x509.DNSName(h) for h in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _private(key: "ec.EllipticCurvePrivateKey", form: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    content: bytes = key.private_bytes(
        serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), serialization.NoEncryption()
    )
    return content


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_absent(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise FileExistsError(f"{str(file)!r} is there already; give another folder, or move it away")


def _write(file: Path, content: bytes, mode: int) -> None:
    """Write a new file that has its mode from the start."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
