# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: the server's certificate, which sites check, and a key for each site."""

import datetime
import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from perada.core.checks import check_installed, check_integer
from perada.system.files import check_new_files, removing_new, write_new

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except (
    ImportError
):  # an optional dependency, which Flower brings; _create_key_folder() raises an error if it is missing
    pass

LOOPBACK = ("127.0.0.1", "::1")
"""Addresses of the machine itself, which every server certificate includes."""
AUTHORITY_DAYS = 3650
"""How long the authority's certificate is valid. Sites have a copy of it, so it lasts longer than the server's."""
Extension = tuple["x509.ExtensionType", bool]
"""Extension of a certificate, and whether it is critical."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?")


def check_site_name(name: str) -> None:
    """Raise a ValueError unless the name of a site can also be a file name.

    >>> check_site_name("st-marys")
    >>> check_site_name("../etc")
    Traceback (most recent call last):
    ValueError: '../etc' is not a valid site name; use up to 64 of a-z, 0-9 and, between them, '-', '_' and '.'
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid site name; use up to 64 of a-z, 0-9 and, between them, '-', '_' and '.'"
        )


def check_hosts(hosts: Sequence[str]) -> None:
    """Check that all hosts are names or addresses.

    Raises:
        ValueError: If there is none, or one is neither.
    """
    if not hosts:
        raise ValueError("--host is missing; pass the name or address by which sites reach the server")
    for host in hosts:
        if isinstance(_parse_host(host), str) and not _HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} is neither a host name nor an address; use one such as link.example.org, without a port"
            )


def write_server_keys(folder: Path, hosts: Sequence[str], days: int = 730) -> datetime.date:
    """Write the server's certificate and key, signed by the federation's own authority.

    ``ca.crt`` is sent to every site. ``server.pem`` and ``server.key`` are for the SuperLink. ``ca.key`` signs the next
    certificate: if it exists, only ``server.pem`` and ``server.key`` are written, and sites keep their copy.

    Args:
        folder: Folder, which is created with mode 0700. Private keys have mode 0600.
        hosts: Names and addresses by which sites reach the server; `LOOPBACK` is added for its own processes.
        days: How long the server's certificate is valid.

    Returns:
        The day on which it expires.

    Raises:
        ValueError: If a host or ``days`` is invalid.
        FileExistsError: If there is a certificate.
    """
    check_hosts(hosts)
    check_integer("days", days, le=AUTHORITY_DAYS)
    authority_key_file = folder / "ca.key"
    authority_file = folder / "ca.crt"
    is_renewal = authority_key_file.exists()
    new_files = ["server.pem", "server.key"]
    if not is_renewal:
        new_files.append("ca.crt")
    _create_key_folder(folder, new_files)
    contents: dict[str, bytes] = {}
    if is_renewal:
        authority = x509.load_pem_x509_certificate(authority_file.read_bytes())
        authority_key = serialization.load_pem_private_key(authority_key_file.read_bytes(), None)
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        extensions: list[Extension] = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
        authority = _sign_certificate(
            "perada federation", authority_key, None, authority_key, AUTHORITY_DAYS, extensions
        )
        contents[authority_key_file.name] = _private_bytes(authority_key, "PKCS8")
        contents[authority_file.name] = authority.public_bytes(serialization.Encoding.PEM)
    key = ec.generate_private_key(ec.SECP384R1())
    # The processes that the SuperLink starts for a run connect to it through the loopback addresses.
    alternative_names: list[x509.GeneralName] = []
    for host in dict.fromkeys(_parse_host(host) for host in [*hosts, *LOOPBACK]):
        alternative_names.append(x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host))
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(alternative_names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
    ]
    # A common name has at most 64 characters (RFC 5280).
    certificate = _sign_certificate(hosts[0][:64], key, authority.subject, authority_key, days, extensions)
    contents["server.key"] = _private_bytes(key, "PKCS8")
    contents["server.pem"] = certificate.public_bytes(serialization.Encoding.PEM)
    _write_files(folder, contents)
    expires: datetime.datetime = certificate.not_valid_after_utc
    return expires.date()


def write_site_keys(folder: Path, name: str) -> None:
    """Write a site's keys: ``NAME.key``, which never leaves the site, and ``NAME.pub``, which the server registers.

    They are ECDSA keys on the curve P-384 in OpenSSH format, as Flower needs them.

    Raises:
        ValueError: If the name cannot be a site's.
        FileExistsError: If there is a key.
    """
    check_site_name(name)
    _create_key_folder(folder, [f"{name}.key", f"{name}.pub"])
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    contents = {f"{name}.key": _private_bytes(key, "OpenSSH"), f"{name}.pub": public + f" {name}\n".encode()}
    _write_files(folder, contents)


def _create_key_folder(folder: Path, names: Sequence[str]) -> None:
    """Check that keys can be written and none of the files exists, and create the folder."""
    check_installed("a key", "flower", "cryptography")
    check_new_files(folder, names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _sign_certificate(
    name: str,
    private_key: "ec.EllipticCurvePrivateKey",
    issuer: "x509.Name | None",
    signer: "ec.EllipticCurvePrivateKey",
    days: int,
    extensions: "Sequence[Extension]",
) -> "x509.Certificate":
    """Sign a certificate.

    Args:
        name: Common name of its subject.
        private_key: Key of its subject.
        issuer: Name of the issuer; None for a certificate that the subject issues itself.
        signer: Key of the issuer.
        days: How long it is valid.
        extensions: Extensions, and whether each is critical.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of sites may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _parse_host(host: str) -> str | ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return a host's address or, if it is not an address, its name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return host


def _private_bytes(private_key: "ec.EllipticCurvePrivateKey", format_name: str) -> bytes:
    """Return the content of a private key's file."""
    private_format = getattr(serialization.PrivateFormat, format_name)
    file_bytes: bytes = private_key.private_bytes(
        serialization.Encoding.PEM, private_format, serialization.NoEncryption()
    )
    return file_bytes


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Create files, or none of them if the disk fails. Only the user can read those that end in ``.key``."""
    with removing_new([folder / name for name in contents]):
        for name, content in contents.items():
            write_new(folder / name, content, 0o600 if name.endswith(".key") else 0o644)
