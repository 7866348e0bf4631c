# SPDX-License-Identifier: Apache-2.0
"""Numbers of threads for tests whose results or paths depend on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    with num_threads(1):
        yield


@pytest.fixture
def two_threads():
    with num_threads(2):
        yield
