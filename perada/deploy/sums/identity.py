# SPDX-License-Identifier: Apache-2.0
"""Identities of sites in secure sums: their keys, and the lists of sites to hide among.

A public key is a line in OpenSSH format, ``ssh-ed25519 AAAA… NAME``; a list of sites is a file of such lines.
"""

import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from perada.deploy.sums.keys import is_signed, sign
from perada.system.files import check_new_files, check_owner_only, removing_new, write_atomic, write_new

SIGNATURE_SUFFIX = ".sig"
"""Suffix of the file with the signature of a list."""
_LIST = "sites"
"""Kind of the statement that an authority signs."""


def private_key_file(folder: Path, name: str) -> Path:
    """Return the file of a private key."""
    return folder / f"{name}.id"


def public_key_file(folder: Path, name: str) -> Path:
    """Return the file of a public key."""
    return folder / f"{name}.id.pub"


def write_identity(folder: Path, name: str) -> None:
    """Write a new Ed25519 key pair: ``NAME.id``, which only its owner may read, and ``NAME.id.pub``.

    Raises:
        FileExistsError: If one of the files exists.
    """
    private_file = private_key_file(folder, name)
    public_file = public_key_file(folder, name)
    check_new_files(folder, (private_file.name, public_file.name))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    private_content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public_content = f"{format_public_key(key.public_key())} {name}\n".encode()
    with removing_new([private_file, public_file]):
        write_new(private_file, private_content, 0o600)
        write_new(public_file, public_content, 0o666)


def format_public_key(public_key: Ed25519PublicKey) -> str:
    """Return a public key as text in OpenSSH format."""
    return bytes(public_key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)).decode()


def read_identity(file: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it holds no Ed25519 key, or other users may read it, such as an app that the server ships.
    """
    check_owner_only(file)
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"{str(file)!r} contains no identity ({error}); use the NAME.id from `perada deploy keys site`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{str(file)!r} contains a different kind of key; use the NAME.id from `perada deploy keys site`"
        )
    return key


def parse_public_key(text: str) -> Ed25519PublicKey:
    """Read a public key from text in OpenSSH format.

    Raises:
        ValueError: If it is not an Ed25519 key.
    """
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{text[:80]!r} is not an Ed25519 key; use a line of NAME.id.pub")
    return key


def read_sites(file: Path, authority: str | None = None) -> dict[str, Ed25519PublicKey]:
    """Read the public keys of a list of sites, by name.

    Args:
        file: File with a key on each line; blank lines and lines that begin with ``#`` are skipped.
        authority: Public key that must have signed the file, with the signature beside it; None requires no signature.

    Raises:
        FileNotFoundError: If the file, or its signature, is missing.
        ValueError: If a line is not a key with a name, a name or key is listed twice, or the signature is not the
            authority's.
    """
    content = file.read_bytes()
    if authority is not None:
        signature = _signature_file(file).read_text(encoding="ascii").strip()
        if not is_signed(parse_public_key(authority), signature, _LIST, content.hex()):
            raise ValueError(
                f"{str(file)!r} is not signed by the authority in the site's file; ask the authority for its list"
            )
    public_keys: dict[str, Ed25519PublicKey] = {}
    # Only a newline ends a line: str.splitlines() would also split at characters that an editor does not show.
    for line in content.decode().split("\n"):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        if len(words) != 3 or words[2] in public_keys or not re.fullmatch(r"[\w.-]{1,64}", words[2]):
            raise ValueError(
                f"{str(file)!r}: {line[:120]!r} is not a line with a key and a unique name; use the line of "
                "the site's NAME.id.pub"
            )
        algorithm, encoded_key, name = words
        public_keys[name] = parse_public_key(f"{algorithm} {encoded_key}")
    if len({format_public_key(key) for key in public_keys.values()}) < len(public_keys):
        raise ValueError(
            f"{str(file)!r} lists the same key under two names, so one site would count as two; "
            "use the line of each site's NAME.id.pub"
        )
    return public_keys


def sign_sites(file: Path, identity: Path) -> Path:
    """Sign a list of sites as its authority.

    Returns:
        The file with the signature.
    """
    read_sites(file)
    signature_file = _signature_file(file)
    signature = sign(read_identity(identity), _LIST, file.read_bytes().hex())
    write_atomic(signature_file, signature.encode() + b"\n")
    return signature_file


def _signature_file(file: Path) -> Path:
    return file.with_name(file.name + SIGNATURE_SUFFIX)
