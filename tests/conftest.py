# SPDX-License-Identifier: Apache-2.0
"""What all tests share: no network, one stream of random numbers, small files in the formats of real data sets."""

import os

# Read at import by huggingface_hub, so it is set first: a missing model then fails at once instead of after retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read at import by torch. The size of chunks depends on the number of threads, and some tests read rows of chunks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gzip
import signal
import struct
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

# A job in the background ignores Ctrl-C, and so would what it starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


MEMORY = Path("/dev/shm")
"""File system in memory that Linux has."""
ENOUGH_MEMORY = 2 * 2**30
"""Bytes that must be free there: ten times what the files of all tests take at the same time."""


def pytest_configure():
    """Keep the tests' files in memory, if there is room: on a disk, tests of deployments wait for it half of the time.

    Pytest reads the variable when the first test asks for a folder. ``--basetemp`` still counts.
    """
    if not os.access(MEMORY, os.W_OK):
        return
    status = os.statvfs(MEMORY)
    runs_programs = not status.f_flag & os.ST_NOEXEC  # some tests write a program into their folder
    if runs_programs and status.f_bavail * status.f_frsize >= ENOUGH_MEMORY:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases as slow where their test has the mark ``every(n)`` or ``every_value``."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, []).append(item)
    for of_one_test in cases.values():
        every_nth = of_one_test[0].get_closest_marker("every")
        every_value = of_one_test[0].get_closest_marker("every_value")
        quick = of_one_test
        if every_nth is not None:
            quick = of_one_test[:: every_nth.args[0]]
        elif every_value is not None:
            quick = _cases_with_every_value(of_one_test)
        for item in of_one_test:
            if item not in quick:
                item.add_marker("slow")


def _cases_with_every_value(items):
    """Choose few cases of a test among which each value of each of its parameters occurs.

    Greedily: the next case is the first of those with the most values that no earlier one has. Cases that are slow
    themselves are not chosen.
    """
    candidates = [item for item in items if item.get_closest_marker("slow") is None]
    values_of = {}
    for item in candidates:
        # By identity: the cases share the objects of the lists, and not all of these can be hashed.
        values_of[item] = {(name, id(value)) for name, value in item.callspec.params.items()}
    missing = set().union(*values_of.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda item: len(values_of[item] & missing))
        chosen.append(best)
        missing -= values_of[best]
    return chosen


@pytest.fixture(autouse=True)
def _seeded():
    """Models and tensors that a test draws do not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signal_handlers_stay():
    """A program that ends by a signal ignores others from then on, and what later tests start would inherit that."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        if handler is not None:  # None is one that another language has set
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _packages_listed_once():
    """Lightning looks through all installed packages for every Trainer, which takes as long as a tiny round."""
    from lightning_fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk():
    """Replace fsync by nothing, since it matters only after a power failure, which no test causes.

    A deployed round syncs about fifty files, which takes as long as its computations. Tests of the order of writes
    replace fsync themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda file: None, raising=False)
        yield


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write unsigned bytes in the gzipped idx format of MNIST: magic 0x0000 08 <dims>, the sizes, the values."""
    header = struct.pack(f">I{array.ndim}I", 0x0800 | array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0))


@pytest.fixture
def fashion_root(tmp_path):
    """Folder like Fashion-MNIST's with 120 training and 40 test images: noise and a bar whose row is the class."""
    root = tmp_path / "fashion-mnist"
    root.mkdir()
    random = np.random.default_rng(0)
    for split, n in (("train", 120), ("t10k", 40)):
        labels = np.arange(n) % 10
        images = random.integers(0, 64, (n, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 6 + 2 * label] = 255
        write_idx(root / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(root / f"{split}-labels-idx1-ubyte.gz", labels)
    return root


class Tiny:
    """A federation of five unequal clients with 8×8 images of three classes, and a network with dropout for it."""

    sizes = (9, 5, 14, 7, 20)
    classes = 3

    @staticmethod
    def net(classes=3, seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, classes),
        )

    def data(self, seed=1, sizes=None, public=True, test=True):
        from perada import FederatedData

        random = torch.Generator().manual_seed(seed)
        sizes = sizes or self.sizes

        def part(n):
            y = torch.arange(n) % 3
            x = torch.randn(n, 1, 8, 8, generator=random) + y.view(-1, 1, 1, 1)
            return torch.utils.data.TensorDataset(x, y)

        shared = torch.utils.data.TensorDataset(torch.randn(12, 1, 8, 8, generator=random))
        return FederatedData(
            [part(n) for n in sizes], [part(6) for _ in sizes] if test else [], shared if public else None
        )

    def finetune(self, data=None, **options):
        """Fine-tune on the data, by default those of :meth:`data`, with flat options (:func:`tests.options.sections`).

        Those that are not passed are the ones of ``options``.
        """
        import perada
        from tests.options import sections

        return perada.finetune(self.net(), data or self.data(), **sections(**self.options | options))

    options: ClassVar = {
        "adapter": "full",
        "clients_per_round": 2,
        "batch_size": 4,
        "lr_personal": 0.1,
        "lr_local": 0.1,
        "momentum": 0.9,
        "distill_steps": 3,
        "distill_batch_size": 4,
        "accelerator": "cpu",
        "enable_progress_bar": False,
    }


@pytest.fixture(scope="session")
def tiny():
    """Data, network and options of a run that takes a fraction of a second."""
    return Tiny()
