# SPDX-License-Identifier: Apache-2.0
"""Checks that the server has no image of a client."""

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import bytes_of
from perada.data.batches.datasets import isolated_randomness
from perada.data.batches.samples import MapStore, Store
from perada.data.value_hashes import hash_of_content

_CHUNK = 4096  # images of a tensor that are gathered at once


def image_hashes(store: Store) -> Iterator[bytes]:
    """Yield a hash (128 bits) of each image, client after client."""
    if isinstance(store, MapStore):
        for client, size in enumerate(store.sizes):
            for index in range(size):
                with isolated_randomness():
                    image, _ = store.item(client, index, resize=False)
                yield from _hash_each(image.unsqueeze(0))
        return
    for rows in torch.split(store.table, _CHUNK):
        yield from _hash_each(store.images[rows.to(store.images.device)])


def _hash_each(images: Tensor) -> Iterator[bytes]:
    """Yield a hash of each of the images (N, ...), which covers shape and dtype."""
    if not len(images):
        return
    shape = tuple(images.shape[1:])
    content = bytes_of(images)
    bytes_per_image = content.nbytes // len(images)
    for start in range(0, content.nbytes, bytes_per_image):
        yield hash_of_content(shape, images.dtype, content[start : start + bytes_per_image]).digest()


def check_no_copies(store: Store, split_name: str, server_images: Mapping[bytes, str], privacy_options: str) -> None:
    """Raise an OptionError if the server has one of the clients' images.

    Args:
        store: The clients' images.
        split_name: Their name in the message, such as ``"test "``.
        server_images: Names of the server's images by their hash.
        privacy_options: The options that request privacy, for the message.
    """
    hashes = image_hashes(store)
    for client, size in enumerate(store.sizes):
        for index, image_hash in enumerate(islice(hashes, size)):
            if image_hash in server_images:
                raise OptionError(
                    f"{privacy_options}: {split_name}image {index} of client {client} is also "
                    f"{server_images[image_hash]}: the ledgers do not account for what the server does with a client's "
                    "image. Remove such images from the server's set, or use a different set",
                    name=privacy_options,
                )
