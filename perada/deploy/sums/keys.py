# SPDX-License-Identifier: Apache-2.0
"""Keys, signatures and mask streams of one secure sum.

Everything is composed of primitives of ``cryptography`` (X25519, Ed25519, HKDF, ChaCha20, Poly1305).
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
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
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
"""Bytes of two sealed shares: ChaCha20-Poly1305 appends a tag of 16 bytes."""
_LABEL = b"perada sums 1 "
_BLOCK = 2**14
"""Entries of a vector that are masked at a time, so that they stay in the processor's cache."""
_ZEROS = memoryview(bytes(8 * _BLOCK))


def digest_of_json(content: object) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal digits."""
    return hashlib.sha256(canonical(content)).hexdigest()


def derive_key(secret: bytes, purpose: str, context: Any = None) -> bytes:  # noqa: ANN401  # any JSON value
    """Derive a key of 32 bytes for one purpose by HKDF-SHA256."""
    info = _LABEL + canonical([purpose, context])
    key: bytes = HKDF(SHA256(), 32, None, info).derive(secret)
    return key


def add_streams(total: Uint64Vector, added: Sequence[bytes], subtracted: Sequence[bytes] = ()) -> None:
    """Add and subtract the ChaCha20 key streams of several keys, in place and modulo 2⁶⁴.

    The nonce is constant, so a key must never mask two vectors.

    Args:
        total: Vector to be masked.
        added: Keys whose streams are added.
        subtracted: Keys whose streams are subtracted.
    """
    added_streams = [_key_stream(key) for key in added]
    subtracted_streams = [_key_stream(key) for key in subtracted]
    buffer = bytearray(_ZEROS.nbytes)
    mask = np.frombuffer(buffer, "<u8")
    for start in range(0, len(total), _BLOCK):
        block = total[start : start + _BLOCK]
        zeros = _ZEROS[: block.nbytes]
        for stream in added_streams:
            stream.update_into(zeros, buffer)
            np.add(block, mask[: len(block)], out=block)
        for stream in subtracted_streams:
            stream.update_into(zeros, buffer)
            np.subtract(block, mask[: len(block)], out=block)


def _key_stream(key: bytes) -> CipherContext:
    """Return a cipher that turns zeros into the key stream."""
    return Cipher(ChaCha20(key, bytes(16)), None).encryptor()


def exchange_key(seed: bytes) -> X25519PrivateKey:
    """Derive an X25519 private key from a seed. The seed, which is shorter, is what sites share by Shamir's scheme."""
    return X25519PrivateKey.from_private_bytes(derive_key(seed, "mask key"))


def shared_key(private: X25519PrivateKey, public: str, purpose: str, context: Any) -> bytes:  # noqa: ANN401  # any JSON
    """Return the key that two sites share for one purpose.

    Raises:
        ValueError: If ``public`` (hexadecimal digits) is not a usable X25519 key.
    """
    try:
        public_key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        secret = private.exchange(public_key)
    except ValueError as error:
        raise ValueError(f"a public key cannot be used ({error})") from None
    return derive_key(secret, purpose, context)


def sign(private_key: Ed25519PrivateKey, statement_kind: str, statement: object) -> str:
    """Sign a statement of some kind; the kind keeps a signature from being valid for a statement of another one."""
    return str(private_key.sign(_LABEL + canonical([statement_kind, statement])).hex())


def is_signed(public_key: Ed25519PublicKey, signature: str, statement_kind: str, statement: object) -> bool:
    """Return whether a statement was signed with the private half of a key."""
    try:
        public_key.verify(bytes.fromhex(signature), _LABEL + canonical([statement_kind, statement]))
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(key: bytes, text: bytes, context: Any) -> bytes:  # noqa: ANN401  # any JSON value
    """Encrypt and authenticate a message. The nonce is constant: a key must seal one message only."""
    return bytes(ChaCha20Poly1305(key).encrypt(bytes(12), text, canonical(context)))


def unseal(key: bytes, sealed: bytes, context: Any) -> bytes:  # noqa: ANN401  # any JSON value
    """Decrypt a sealed message.

    Raises:
        ValueError: If it was changed, or was sealed with another key or for another context.
    """
    try:
        return bytes(ChaCha20Poly1305(key).decrypt(bytes(12), sealed, canonical(context)))
    except InvalidTag:
        raise ValueError("a sealed message was changed, or is for a different round or site") from None


@dataclass(frozen=True)
class SumTerms:
    """What all sites of a sum agree on. Each site takes it from its approved recipe and the request.

    Args:
        run: Id of the federation's run.
        round: Counted from 0.
        recipe: Digest of the recipe.
        secure_sums: Options of the recipe.
        attempt: Counted from 0, within the round.
        given: Digest of what the server sent for the round: the model to be trained, the rates, the public images. If
            two sites were sent different things, one of them might send back what the server already has, and the
            sum would show the other one's update. It is empty in the server's own terms.
        of: What is added up: ``update`` or ``scores``.
    """

    run: str
    round: int
    recipe: str
    secure_sums: SecureSums
    attempt: int = 0
    given: str = ""
    of: str = "update"


@dataclass(frozen=True)
class Advert:
    """A site's public keys of one round, signed with its identity.

    Its fields are named like the keys of the message, which are signed.

    Attributes:
        name: Name of the site.
        terms: Digest of the :class:`SumTerms`.
        identity: Public half of its identity, in hexadecimal digits like all keys. The server checks signatures with
            it; the other sites check that it is the key on their lists.
        seals: Public key of what the site seals for others. It differs from ``shares``, so that what a site dealt can
            be opened to a server that settles a dispute without opening what others dealt to the site.
        shares: Public key with which other sites seal shares for it.
        masks: Public key of its pairwise masks.
        own: SHA-256 of the secret of its self mask, by which the server recognises the recovered secret.
        numbers: Names of what it adds beside the model, such as a training loss, separated by spaces.
        heard: The last rounds in which it trained with digests of what it was sent, as :class:`SiteClaims` has them.
        signature: Signature of all other fields.

    Raises:
        ValueError: If a field does not have its form. Each value has one form only.
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
        digits = "[0-9a-f]{64}"
        patterns = {
            "name": r"\S{1,64}",
            "numbers": ".{0,4096}",
            "heard": f"([0-9]{{1,7}}:{digits} ){{0,{MAX_HEARD_ROUNDS}}}",
            "signature": "([0-9a-f]{128})?",
        }
        for name, value in vars(self).items():
            pattern = patterns.get(name, digits)
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ValueError(f"{name}={str(value)[:80]!r} of a site's keys is malformed")

    def statement(self) -> dict[str, str]:
        """Return the fields that are signed."""
        return {name: value for name, value in vars(self).items() if name != "signature"}


def is_signed_by_itself(advert: Advert, signature: str, statement_kind: str, content: object) -> bool:
    """Return whether a statement was signed by the identity that an advert names."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(advert.identity))
    except ValueError:
        return False
    return is_signed(key, signature, statement_kind, content)


def check_usable(advert: Advert) -> None:
    """Check that other sites could compute a shared key with each public key of an advert.

    Raises:
        ValueError: If one of them is unusable; no other site could go on with a list that has it.
    """
    for public in (advert.seals, advert.shares, advert.masks):
        shared_key(X25519PrivateKey.generate(), public, "trial", None)


class SiteClaims(NamedTuple):
    """What a site states in its advert in addition to its keys.

    Two sites that were sent different things in a round are in no later sum together either: a site keeps statistics
    of its images, for example, and might send back in a later round what the server had it keep.

    Attributes:
        metric_names: Names of the numbers that the site adds beside the model.
        received_digests: Digest of what the site was sent, by round.
    """

    metric_names: Collection[str] = ()
    received_digests: Mapping[str, str] = {}

    def texts(self) -> dict[str, str]:
        """Return the fields ``numbers`` and ``heard`` of an advert."""
        last_rounds = sorted(self.received_digests, key=int)[-MAX_HEARD_ROUNDS:]
        # All 256 bits: the server chooses both messages, and could find two that agree in 128 bits in 2⁶⁴ trials.
        entries = "".join(f"{round}:{self.received_digests[round]} " for round in last_rounds)
        return {"numbers": " ".join(sorted(self.metric_names)), "heard": entries}


def received_digests(advert: Advert) -> dict[str, str]:
    """Return the digests of what a site claims to have been sent, by round."""
    return parse_digests(advert.heard)


def parse_digests(text: str) -> dict[str, str]:
    """Read the digests by round from the text that :meth:`SiteClaims.texts` writes."""
    digests = {}
    for entry in text.split():
        round, _, digest = entry.partition(":")
        digests[round] = digest
    return digests


def conflicting_rounds(own_digests: Mapping[str, str], other: Advert) -> list[str]:
    """Return the rounds in which another site was sent something different from what was sent here.

    Args:
        own_digests: Digest of what was sent here, by round.
        other: The other site's advert. A round that it lacks is no conflict.
    """
    other_digests = received_digests(other)
    return [round for round, digest in own_digests.items() if other_digests.get(round, digest) != digest]


def share_order(adverts: Sequence[Advert]) -> list[str]:
    """Return the names of a round's sites in the order of their shares."""
    return sorted(advert.name for advert in adverts)


def commitment(keys_digest: str, dealer: str, holder: str, purpose: str, share: bytes) -> str:
    """Return the digest that commits a dealer to the share of a secret that it deals to a holder.

    A share has 128 random bits, so that the digest does not reveal it.
    """
    return digest_of_json(["share", keys_digest, dealer, holder, purpose, share.hex()])


def sum_statement(
    keys_digest: str,
    senders: Sequence[str],
    vector_size: int,
    survivors: Sequence[str],
) -> dict[str, object]:
    """Return the statement about a sum that its sites sign.

    Args:
        keys_digest: Digest of all sites' keys.
        senders: Sites whose pairwise masks are in the vectors.
        vector_size: Length of the vectors.
        survivors: Sites whose vectors are in the sum.
    """
    return {"about": keys_digest, "there": sorted(senders), "numbers": vector_size, "alive": sorted(survivors)}


def sealing_key(private: X25519PrivateKey, public: str, keys_digest: str, dealer: str, holder: str) -> bytes:
    """Return the key with which a dealer seals shares for a holder, which both can compute. It seals one message.

    Args:
        private: The dealer's key ``seals``, or the holder's key ``shares``.
        public: The public key of the other one of these two.
        keys_digest: Digest of all sites' keys.
        dealer: Name of the site whose secrets are shared.
        holder: Name of the site that receives the shares.
    """
    return shared_key(private, public, "shares", [keys_digest, dealer, holder])


def self_mask_key(secret: bytes) -> bytes:
    """Return the key of a site's self mask."""
    return derive_key(secret, "own mask")


def pair_mask_key(private: X25519PrivateKey, public: str, keys_digest: str, names: Sequence[str]) -> bytes:
    """Return the key of the mask of a pair of sites, which the first by name adds and the other one subtracts."""
    return shared_key(private, public, "pair mask", [keys_digest, *sorted(names)])
