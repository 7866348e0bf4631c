# SPDX-License-Identifier: Apache-2.0
"""Processes that read images stay alive from round to round, and serve what one process would read."""

import copy
import multiprocessing.process
import pickle

import pytest
import torch
from torch.utils.data import Dataset

from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.workers import WorkerPool


class Drawn(Dataset):
    """Items with noise, drawn from torch's global stream."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(1, 2, 2) + index, index % 3


@pytest.fixture
def started_processes(monkeypatch):
    """A list that grows with each process that is started."""
    processes = []
    start = multiprocessing.process.BaseProcess.start

    def counting(process):
        processes.append(process)
        return start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", counting)
    return processes


def module(workers):
    clients = [Drawn(6), Drawn(5), Drawn(4)]
    return FederatedDataModule(FederatedData(clients, clients), batch_size=2, eval_batch_size=4, num_workers=workers)


def rounds(data, count=3):
    """All batches of some rounds, each with its evaluation."""
    batches = []
    for round in range(count):
        batches += list(data.cohort_loader(data.plan_for((0, 1, 2), round)))
        batches += list(data.val_dataloader())
    return batches


def assert_equal(batches, expected):
    assert len(batches) == len(expected) > 0
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.x, other.x) and torch.equal(batch.y, other.y)


def test_workers_are_started_once(started_processes):
    expected = rounds(module(0))
    assert not started_processes
    data = module(2)
    data.setup()
    assert len(started_processes) == 2  # one pass over all images, whatever the number of clients
    assert_equal(rounds(data), expected)
    # Two processes read training images and two test images.
    assert len(started_processes) == 6
    data.teardown()
    for process in started_processes:
        process.join(10)
        assert process.exitcode is not None


def test_passes_may_be_nested_and_abandoned(started_processes):
    data = module(1)
    plain = module(0)
    expected = list(plain.val_dataloader())
    loader = data.val_dataloader()
    pairs = list(zip(loader, data.val_dataloader(), strict=True))
    for side in zip(*pairs, strict=True):
        assert_equal(side, expected)
    before = len(started_processes)
    next(iter(loader))
    assert_equal(list(loader), expected)
    assert len(started_processes) == before
    first, second = (data.cohort_loader(data.plan_for((0, 1, 2), round)) for round in (0, 1))
    assert_equal(list(second), list(plain.cohort_loader(plain.plan_for((0, 1, 2), 1))))
    assert_equal(list(first), list(plain.cohort_loader(plain.plan_for((0, 1, 2), 0))))
    assert_equal(list(copy.deepcopy(data).val_dataloader()), expected)
    pickle.loads(pickle.dumps(data._pools))
    data.teardown()


class Squares(Dataset):
    def __getitem__(self, request):
        if request < 0:
            raise ValueError("negative")
        return request**2


def test_a_pool_goes_on_after_an_error(started_processes):
    pool = WorkerPool(Squares(), 1, None)
    assert list(pool.answers([1, 2, 3])) == [1, 4, 9]
    with pytest.raises(ValueError, match="negative"):
        list(pool.answers([1, -1, 3]))
    assert list(pool.answers([4, 5])) == [16, 25]
    assert list(pool.answers([])) == []
    assert len(started_processes) == 2  # the second one after the error
