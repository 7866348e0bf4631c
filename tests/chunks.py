# SPDX-License-Identifier: Apache-2.0
"""Batches of a cohort, for tests that make their own."""


def in_chunks(batches, size):
    """Cut batches of all clients into those of chunks, in the order in which chunks train."""
    parts = []
    for start in range(0, len(batches[0].clients), size):
        for batch in batches:
            rows = slice(start, start + size)
            if batch.clients[rows]:
                cut = {name: getattr(batch, name)[rows] for name in ("clients", "x", "y", "counts")}
                parts.append(batch._replace(start=start, **cut))
    return parts
