# SPDX-License-Identifier: Apache-2.0
"""What the masks are made of: the keys of one round, and the streams that follow from them.

All of it is put together from primitives of ``cryptography`` (X25519, Ed25519, HKDF, ChaCha20, Poly1305).
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from perada.deploy.protocol import canonical
from perada.deploy.sums.progress import MAX_HEARD_ROUNDS
from perada.deploy.sums.shares import SECRET_SIZE
from perada.deploy.sums.vector import Uint64Vector
from perada.server.sums import SecureSums

SEALED_SIZE = 2 * SECRET_SIZE + 16
"""Bytes of two shares that are sealed: ChaCha20-Poly1305 adds 16."""
_LABEL = b"perada sums 1 "
_BLOCK = 2**14
"""Numbers of a vector that get all their masks before the next ones, so that they stay in the processor's cache."""
_ZEROS = memoryview(bytes(8 * _BLOCK))


def digest(content: Any) -> str:  # noqa: ANN401  # any JSON
    """SHA-256 of a JSON value, in hexadecimal digits."""
    return hashlib.sha256(canonical(content)).hexdigest()


def derive_key(secret: bytes, purpose: str, about: Any = None) -> bytes:  # noqa: ANN401  # any JSON
    """A key of 32 bytes for one purpose (HKDF-SHA256)."""
    key: bytes = HKDF(SHA256(), 32, None, _LABEL + canonical([purpose, about])).derive(secret)
    return key


def add_streams(total: Uint64Vector, added: Sequence[bytes], subtracted: Sequence[bytes] = ()) -> None:
    """Add to a vector, in place, uniform numbers modulo 2⁶⁴ for each key: the key streams of ChaCha20.

    A key must never mask two vectors.
    """
    ways = [(key, np.add) for key in added] + [(key, np.subtract) for key in subtracted]
    ciphers = [(Cipher(ChaCha20(key, bytes(16)), None).encryptor(), way) for key, way in ways]
    buffer = bytearray(_ZEROS.nbytes)
    numbers = np.frombuffer(buffer, "<u8")
    for part in (total[start : start + _BLOCK] for start in range(0, len(total), _BLOCK)):
        for cipher, way in ciphers:
            cipher.update_into(_ZEROS[: part.nbytes], buffer)
            way(part, numbers[: len(part)], out=part)


def exchange_key(seed: bytes) -> X25519PrivateKey:
    """The private key that follows from a secret, which is what is shared of it."""
    return X25519PrivateKey.from_private_bytes(derive_key(seed, "mask key"))


def shared_key(own: X25519PrivateKey, other: str, purpose: str, about: Any) -> bytes:  # noqa: ANN401  # any JSON
    """The key that two sites have in common, for one purpose; a ValueError if the other's public key is none."""
    try:
        return derive_key(own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other))), purpose, about)
    except ValueError as error:
        raise ValueError(f"a public key cannot be used ({error})") from None


def sign(key: Ed25519PrivateKey, what: str, content: Any) -> str:  # noqa: ANN401  # any JSON
    """A signature of a statement of a certain sort."""
    return str(key.sign(_LABEL + canonical([what, content])).hex())


def is_signed(key: Ed25519PublicKey, signature: str, what: str, content: Any) -> bool:  # noqa: ANN401  # any JSON
    """Whether a statement was signed with the private half of a key."""
    try:
        key.verify(bytes.fromhex(signature), _LABEL + canonical([what, content]))
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(key: bytes, text: bytes, about: Any) -> bytes:  # noqa: ANN401  # any JSON
    """Encrypt one message with a key that is used for no other."""
    return bytes(ChaCha20Poly1305(key).encrypt(bytes(12), text, canonical(about)))


def unseal(key: bytes, sealed: bytes, about: Any) -> bytes:  # noqa: ANN401  # any JSON
    """The text of a sealed message; a ValueError if it is another's, or was changed."""
    try:
        return bytes(ChaCha20Poly1305(key).decrypt(bytes(12), sealed, canonical(about)))
    except InvalidTag:
        raise ValueError("a sealed message was changed, or is for another round or site") from None


@dataclass(frozen=True)
class SumTerms:
    """What all sites of a sum agree on; each has it from its approved recipe and the order.

    Args:
        run: Id of the federation's run.
        round: Counted from 0.
        recipe: Digest of the recipe.
        options: Those of the recipe.
        attempt: Counted from 0, within the round.
        given: Digest of what the server had to say for the round: the model to be trained, the rates, the public
            images. Of two sites that were told different things, one might send back what the server knows, and the
            sum would be the other's update. The server's own terms do not say it.
        of: What is added up: updates, or scores.
    """

    run: str
    round: int
    recipe: str
    options: SecureSums
    attempt: int = 0
    given: str = ""
    of: str = "update"


@dataclass(frozen=True)
class Advert:
    """A site's public keys of one round, signed with its identity.

    Attributes:
        name: Of the site.
        terms: Digest of the :class:`SumTerms`.
        identity: Public half of its identity, in hexadecimal digits as all keys are. The server checks signatures with
            it; the other sites check that it is the one on their lists.
        seals: Public key of what it seals for others. It is another one than ``shares``, so that what a site dealt can
            be opened to a server that judges a dispute, and what others dealt to it cannot.
        shares: Public key by which shares are sealed for it.
        masks: Public key of its masks towards other sites.
        own: SHA-256 of the secret of its own mask, by which it is recognised when it is put together.
        numbers: Names of what it adds beside the model, such as a training loss, with spaces between.
        heard: The last rounds in which it trained and digests of what it was told, as :class:`SiteClaims` writes them.
        signature: Of all of these.

    Raises:
        ValueError: If one is not of its form, of which there is one for each value.
    """

    name: str
    terms: str
    identity: str
    seals: str
    shares: str
    masks: str
    own: str
    numbers: str = ""
    heard: str = ""
    signature: str = ""

    def __post_init__(self) -> None:
        digits, forms = "[0-9a-f]{64}", {"name": r"\S{1,64}", "numbers": ".{0,4096}", "signature": "([0-9a-f]{128})?"}
        forms["heard"] = f"([0-9]{{1,7}}:[0-9a-f]{{64}} ){{0,{MAX_HEARD_ROUNDS}}}"
        for name, value in vars(self).items():
            if not isinstance(value, str) or not re.fullmatch(forms.get(name, digits), value):
                raise ValueError(f"{name}={str(value)[:80]!r} of a site's keys is not of its form")

    def statement(self) -> dict[str, str]:
        """What is signed."""
        return {name: value for name, value in vars(self).items() if name != "signature"}


def is_signed_by_itself(advert: Advert, signature: str, what: str, content: Any) -> bool:  # noqa: ANN401  # any JSON
    """Whether a statement was signed by the identity that a site's keys name."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(advert.identity))
    except ValueError:
        return False
    return is_signed(key, signature, what, content)


def check_usable(advert: Advert) -> None:
    """Refuse, by a ValueError, public keys with which there is nothing in common: no other site could use the list."""
    for public in (advert.seals, advert.shares, advert.masks):
        shared_key(X25519PrivateKey.generate(), public, "trial", None)


class SiteClaims(NamedTuple):
    """What a site says of itself beside its keys.

    Two sites that were told different things in a round are in no later sum together either: by what it keeps of such
    a round, such as statistics of its images, a site might send back what the server knows.
    """

    numbers: Collection[str] = ()  # names of what it adds beside the model
    heard: Mapping[str, str] = {}  # digest of what it was told, by round

    def texts(self) -> dict[str, str]:
        """As an advert has them."""
        last = sorted(self.heard, key=int)[-MAX_HEARD_ROUNDS:]
        # All 256 bits: the server chooses both messages, and could find two that agree in 128 bits in 2⁶⁴ trials.
        heard = "".join(f"{round}:{self.heard[round]} " for round in last)
        return {"numbers": " ".join(sorted(self.numbers)), "heard": heard}


def heard_digests(advert: Advert) -> dict[str, str]:
    """What a site says that it was told, by round."""
    return parse_heard(advert.heard)


def parse_heard(text: str) -> dict[str, str]:
    """Digests of what a site was told, by round, from the text that :class:`SiteClaims` makes of them."""
    return {round: told for round, _, told in (entry.partition(":") for entry in text.split())}


def conflicting_rounds(told: Mapping[str, str], other: Advert) -> list[str]:
    """The rounds in which another site was told something else than what was ``told``, by round."""
    theirs = heard_digests(other)
    return [round for round, one in told.items() if theirs.get(round, one) != one]


def share_order(adverts: Sequence[Advert]) -> list[str]:
    """The names of a round's sites, whose places are those of their shares."""
    return sorted(advert.name for advert in adverts)


def commitment(about: str, dealer: str, holder: str, purpose: str, share: bytes) -> str:
    """Return what binds a site to the share of a secret that it deals to another one.

    A share has 128 random bits, of which the digest says nothing that could be computed.
    """
    return digest(["share", about, dealer, holder, purpose, share.hex()])


def sum_statement(about: str, there: Sequence[str], numbers: int, alive: Sequence[str]) -> dict[str, object]:
    """Return what a site signs of a sum: its keys, who began it, how long the vectors are, and who is in it."""
    return {"about": about, "there": sorted(there), "numbers": numbers, "alive": sorted(alive)}


def sealing_key(own: X25519PrivateKey, other: str, about: str, dealer: str, holder: str) -> bytes:
    """Return the key of what one site seals for another, which both can compute; it seals one message.

    Args:
        own: Of the dealer its key ``seals``, or of the holder its key ``shares``.
        other: The other one of the two public keys.
        about: Digest of all sites' keys.
        dealer: Name of the site whose secrets are shared.
        holder: Name of the site that gets the shares.
    """
    return shared_key(own, other, "shares", [about, dealer, holder])


def self_mask_key(secret: bytes) -> bytes:
    """The key of a site's own mask."""
    return derive_key(secret, "own mask")


def pair_mask_key(own: X25519PrivateKey, other: str, about: str, names: Sequence[str]) -> bytes:
    """The key of the mask of two sites, which the first of them by name adds and the other subtracts."""
    return shared_key(own, other, "pair mask", [about, *sorted(names)])
