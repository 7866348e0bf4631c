# SPDX-License-Identifier: Apache-2.0
"""Whether the server's public images are also among those that clients train on."""

import hashlib
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from perada.data.batches.samples import MapStore, Store, isolated_randomness

_CHUNK = 4096  # images of a tensor gathered at a time


def public_overlap(train: Store, public: Store) -> tuple[int, int, int] | None:
    """Find the first training image that is in the public set too, the same to the last byte.

    Images are compared as they are stored, before they are resized or augmented, with their shape and type; grey uint8
    images (H, W) and (1, H, W) are alike. What a dataset draws at random is drawn alike for all. A changed copy of an
    image, by as little as one pixel, is another image.

    Args:
        train: The clients' images.
        public: The server's images.

    Returns:
        The client, the index among its images, and the index among the public ones; None if no image is in both.
    """
    known: dict[bytes, int] = {}
    for index, digest in enumerate(_digests(public)):
        known.setdefault(digest, index)
    digests = _digests(train)
    for client, size in enumerate(train.sizes):
        for index, digest in enumerate(islice(digests, size)):
            if digest in known:
                return client, index, known[digest]
    return None


def check_overlap(train: Store, public: Store, name: str = "public") -> None:
    """Refuse a set of the server's that holds a training image."""
    found = public_overlap(train, public)
    if found is not None:
        client, index, other = found
        raise ValueError(
            f"image {index} of client {client} is also image {other} of the {name} set: the server would distil by a "
            f"private image, which the ledgers do not count. Take such images out of the {name} set; where it is a "
            f"fraction of a dataset that holds an image twice, give another set as {name}"
        )


def _digests(store: Store) -> Iterator[bytes]:
    """A hash of each image, client after client; equal images have equal ones, others do not (128 bits)."""
    if isinstance(store, MapStore):
        for client, size in enumerate(store.sizes):
            for index in range(size):
                with isolated_randomness():
                    image, _ = store.item(client, index, resize=False)
                yield from _hashes(image.unsqueeze(0))
        return
    for rows in torch.split(store.table, _CHUNK):
        yield from _hashes(store.images[rows.to(store.images.device)])


def _hashes(images: Tensor) -> Iterator[bytes]:
    """A hash of each of the images (N, ...)."""
    kind = f"{tuple(images.shape[1:])} {images.dtype} ".encode()
    for row in images.reshape(len(images), -1).contiguous().cpu().view(torch.uint8).numpy():
        yield hashlib.blake2b(kind + row.tobytes(), digest_size=16).digest()
