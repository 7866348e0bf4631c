# SPDX-License-Identifier: Apache-2.0
"""Operations of torch that are not divided among cores."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_one_core() -> Iterator[None]:
    """Run the operations of the calling thread on one core each.

    For threads beside those that train. After an operation that was divided, the threads that helped keep their cores
    busy for a while, waiting for the next one, and even short operations wait for a core that is free.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
