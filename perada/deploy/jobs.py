# SPDX-License-Identifier: Apache-2.0
"""Jobs without training: each site makes a vector of integers, and the server learns their sum.

A job has a recipe, which sites approve by its digest as they approve recipes for training. The server sends one request
(``count``), to which a site replies with its keys, and takes the steps of one secure sum. Then it sends the sum back
(``compare``), so that each site can tell its own operator how it differs from the others; nothing of that leaves.
A site whose file allows it (``may_send``) adds its own vector to its reply (``row``), in the clear.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perada.deploy.protocol import MAX_COUNT, JobKind, RejectionError, canonical
from perada.deploy.sums.vector import SPOILED, Uint64Vector
from perada.server.sums import SecureSums

Counts = NDArray[np.int64]
"""A vector of integers, which are negative only if noise made them so."""
TOTAL_NAME = "total"
"""Name of the tensor with the sum over sites."""


@dataclass(frozen=True)
class DeployedJob:
    """What server and sites know of a job.

    Attributes:
        kind: Kind of the job.
        digest: Digest that sites approve; see :func:`job_digest`.
        options: Options of the secure sum.
        size: Length (V,) of a site's vector.
        row_size: Length (R,) of what a site may send of its own in the clear; None if that is its vector.
    """

    kind: JobKind
    digest: str
    options: SecureSums
    size: int
    row_size: int | None = None


def job_digest(text: bytes, weights_digest: str = "") -> str:
    """Return the digest of a job that sites approve.

    Args:
        text: Content of its recipe's file.
        weights_digest: Digest of the weights that it needs; empty for a job without a model.
    """
    sha256 = hashlib.sha256(text).hexdigest()
    return hashlib.sha256(canonical([sha256, weights_digest])).hexdigest()


def encode_counts(counts: Sequence[int]) -> Uint64Vector:
    """Return what a site adds to the sum: a 1, so that the number of sites can be checked, and its vector (V,).

    Raises:
        ValueError: If a number is too large.
    """
    vector = np.array([1, *counts], dtype=np.int64)
    if np.abs(vector).max() > MAX_COUNT:
        raise ValueError(f"a vector has the number {np.abs(vector).max()}, but at most {MAX_COUNT} can be summed")
    return vector.view(np.uint64)


def decode_counts(total: Uint64Vector, num_sites: int) -> Counts:
    """Return the sum (V,) of the vectors of ``num_sites`` sites.

    Raises:
        RejectionError: If a site added other numbers than it should, or masks that did not cancel.
    """
    integers = total.view(np.int64)
    sites_in_sum = int(integers[0])
    counts: Counts = integers[1:].copy()
    largest = int(np.abs(counts).max()) if len(counts) else 0
    if sites_in_sum != num_sites or largest > num_sites * MAX_COUNT:
        raise RejectionError(
            f"{SPOILED} it claims {sites_in_sum} sites instead of {num_sites}, and numbers of up to {largest}", "other"
        )
    return counts
