# SPDX-License-Identifier: Apache-2.0
"""Identities of sites towards one another: their keys, and the lists of sites to hide among.

A public key is a line as OpenSSH writes it, ``ssh-ed25519 AAAA… NAME``; a list of sites is a file of such lines.
"""

import os
import re
import stat
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

from perada.core.files import is_owner_only, write_atomic
from perada.deploy.sums.keys import is_signed, sign

SIGNATURE = ".sig"
"""What is added to the name of a list for the file of its signature."""
_LIST = "sites"


def write_identity(folder: Path, name: str) -> None:
    """Write ``NAME.id``, an Ed25519 key that only its owner may read, and ``NAME.id.pub``.

    A FileExistsError if there is one already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, file = Ed25519PrivateKey.generate(), folder / f"{name}.id"
    for path in (file, folder / f"{name}.id.pub"):
        if path.exists():
            raise FileExistsError(f"{str(path)!r} is there already; give another folder, or move it away")
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (folder / f"{name}.id.pub").write_text(f"{line_of(key.public_key())} {name}\n", encoding="utf-8")


def line_of(key: Ed25519PublicKey) -> str:
    """A public key as text."""
    return bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)).decode()


def read_identity(file: Path) -> Ed25519PrivateKey:
    """The key in a file; a FileNotFoundError if it is not there.

    A ValueError if it holds none, or if other users may read it: an app that the server ships, say.
    """
    if not is_owner_only(file.stat()):
        mode = stat.S_IMODE(file.stat().st_mode)
        raise ValueError(
            f"{str(file)!r} may be read by other users (mode {mode:04o}); chmod 0400, so that only its owner can"
        )
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"{str(file)!r} holds no identity ({error}); give NAME.id of `perada deploy keys site`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{str(file)!r} holds another sort of key; give NAME.id of `perada deploy keys site`")
    return key


def public_key(text: str) -> Ed25519PublicKey:
    """The key of a line; a ValueError if it has none."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{text[:80]!r} is no Ed25519 key; give a line of NAME.id.pub")
    return key


def read_sites(file: Path, authority: str | None = None) -> dict[str, Ed25519PublicKey]:
    """The sites of a list, by name.

    Args:
        file: Lines of keys; empty ones, and those that begin with ``#``, are left out.
        authority: Line of the key that must have signed the file, with the signature beside it; None asks for none.

    Raises:
        FileNotFoundError: If it, or its signature, is not there.
        ValueError: If a line is no key with a name, a name or key stands there twice, or the signature is not the
            authority's.
    """
    content = file.read_bytes()
    if authority is not None:
        signature = file.with_name(file.name + SIGNATURE).read_text(encoding="ascii").strip()
        if not is_signed(public_key(authority), signature, _LIST, content.hex()):
            raise ValueError(f"{str(file)!r} is not signed by the authority that the site names; ask for its list")
    found: dict[str, Ed25519PublicKey] = {}
    for text in content.decode().split("\n"):  # no other end of a line, which an editor may not show
        words = text.split()
        if not words or text.lstrip().startswith("#"):
            continue
        if len(words) != 3 or words[2] in found or not re.fullmatch(r"[\w.-]{1,64}", words[2]):
            raise ValueError(f"{str(file)!r}: {text[:120]!r} is no line of a key and a name of its own")
        found[words[2]] = public_key(" ".join(words[:2]))
    if len({line_of(key) for key in found.values()}) < len(found):
        raise ValueError(f"{str(file)!r} has one key under two names; one site would count as two")
    return found


def sign_sites(file: Path, identity: Path) -> Path:
    """Sign a list of sites as its authority; the file of the signature."""
    read_sites(file)
    signature = file.with_name(file.name + SIGNATURE)
    write_atomic(signature, sign(read_identity(identity), _LIST, file.read_bytes().hex()).encode() + b"\n")
    return signature
