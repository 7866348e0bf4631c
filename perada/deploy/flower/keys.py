# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: a certificate of the server's, which the sites check, and a key for each site."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from perada.core.checks import check_installed, check_whole

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:  # it comes with Flower; who writes keys without it is told
    pass

LOOPBACK = ("127.0.0.1", "::1")
"""Addresses of the machine itself, which every certificate of a server has."""
AUTHORITY_DAYS = 3650
"""How long the authority's certificate is valid: sites have a copy of it."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?")


def check_site_name(name: str) -> None:
    """Refuse, by a ValueError, a name of a site that cannot also be a file's.

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
    """Refuse, by a ValueError, what is neither a host's name nor an address, and no host at all."""
    if not hosts:
        raise ValueError("no host is named; give the name or address by which sites reach the server, with --host")
    for host in hosts:
        if isinstance(_general_name(host), str) and not _HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} is neither a host's name nor an address; give one such as link.example.org, without a port"
            )


def write_server_keys(folder: Path, hosts: Sequence[str], days: int = 730) -> datetime.date:
    """Write the server's certificate and key, signed by an authority of the federation's own.

    ``ca.crt`` goes to every site. ``server.pem`` and ``server.key`` are for the SuperLink. ``ca.key`` signs the next
    certificate: if it is there already, only ``server.pem`` and ``server.key`` are written, and sites keep their copy.

    Args:
        folder: Made with mode 0700 if it is not there. Private keys have mode 0600.
        hosts: Names and addresses by which sites reach the server. The server's own processes need `LOOPBACK` too.
        days: How long the server's certificate is valid.

    Returns:
        The day on which it expires.

    Raises:
        ValueError: If a host is none, or ``days`` is not a number of days.
        FileExistsError: If there is a certificate already.
    """
    check_hosts(hosts)
    check_whole("days", days, most=AUTHORITY_DAYS)
    authority_key_file, authority_file = folder / "ca.key", folder / "ca.crt"
    renewed = authority_key_file.exists()
    _begin(folder, "server.pem", "server.key", *([] if renewed else ["ca.crt"]))
    if renewed:
        authority = x509.load_pem_x509_certificate(authority_file.read_bytes())
        authority_key = serialization.load_pem_private_key(authority_key_file.read_bytes(), None)
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        usage = x509.KeyUsage(*[False] * 5, True, True, False, False)  # signs certificates and lists of revoked ones
        extensions = [(x509.BasicConstraints(True, 0), True), (usage, True)]
        authority = _certificate("perada federation", authority_key, None, authority_key, AUTHORITY_DAYS, extensions)
        _write_private(authority_key_file, authority_key, "PKCS8")
        _write(authority_file, authority.public_bytes(serialization.Encoding.PEM), 0o644)
    key = ec.generate_private_key(ec.SECP384R1())
    # What the SuperLink starts at the server reaches it there, and would start no run without.
    addresses = list(dict.fromkeys(_general_name(host) for host in [*hosts, *LOOPBACK]))
    names = [x509.DNSName(one) if isinstance(one, str) else x509.IPAddress(one) for one in addresses]
    extensions = [(x509.BasicConstraints(False, None), True), (x509.SubjectAlternativeName(names), False)]
    extensions.append((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False))
    certificate = _certificate(hosts[0][:64], key, authority.subject, authority_key, days, extensions)
    _write_private(folder / "server.key", key, "PKCS8")
    _write(folder / "server.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    last: datetime.datetime = certificate.not_valid_after_utc
    return last.date()


def write_site_keys(folder: Path, name: str) -> None:
    """Write a site's keys: ``NAME.key``, which never leaves the site, and ``NAME.pub``, which the server registers.

    They are ECDSA keys on the curve P-384 in the format of OpenSSH, as Flower wants them. A ValueError if the name
    cannot be a site's, a FileExistsError if there is a key already.
    """
    check_site_name(name)
    _begin(folder, f"{name}.key", f"{name}.pub")
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(folder / f"{name}.key", key, "OpenSSH")
    formats = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    _write(folder / f"{name}.pub", key.public_key().public_bytes(*formats) + f" {name}\n".encode(), 0o644)


def _begin(folder: Path, *names: str) -> None:
    """Make a folder in which none of the files is there yet, if they can be written at all."""
    check_installed("a key", "flower", "cryptography")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in (folder / name for name in names):
        if file.exists():
            raise FileExistsError(f"{str(file)!r} is there already; give another folder, or move it away")


def _certificate(
    name: str,
    key: "ec.EllipticCurvePrivateKey",
    issuer: "x509.Name | None",
    signer: "ec.EllipticCurvePrivateKey",
    days: int,
    extensions: Sequence[tuple["x509.ExtensionType", bool]],
) -> "x509.Certificate":
    """A certificate that is valid for some days, with extensions of which some are critical; its own without issuer."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _general_name(host: str) -> str | ipaddress.IPv4Address | ipaddress.IPv6Address:
    """A host's address or, where it is none, its name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return host


def _write_private(file: Path, key: "ec.EllipticCurvePrivateKey", form: str) -> None:
    formats = serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), serialization.NoEncryption()
    _write(file, key.private_bytes(*formats), 0o600)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Write a new file that has its mode from the start."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
