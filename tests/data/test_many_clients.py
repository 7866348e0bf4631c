# SPDX-License-Identifier: Apache-2.0
"""Set-up with many clients: how often it calls their data sets, and that it gives the same as client by client."""

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.datasets import SubsetResolver, resolve_subset
from perada.data.batches.samples import make_store
from perada.data.broken_images import without_broken
from perada.data.fingerprints import part_fingerprint
from perada.data.partitions.division import divide


class Counting(Dataset):
    """Items of one class, which counts how often it is asked for its length."""

    def __init__(self, size, length_calls, label):
        self.size = size
        self.length_calls = length_calls
        self.label = label

    def __len__(self):
        self.length_calls[id(self)] += 1
        return self.size

    def __getitem__(self, index):
        return torch.zeros(1, 4, 4), self.label


def test_each_data_set_is_asked_for_its_length_once():
    length_calls = Counter()
    train = [Counting(3, length_calls, client % 2) for client in range(4)]
    test = [Counting(2, length_calls, client % 2) for client in range(4)]
    data = FederatedDataModule(FederatedData(train, test))
    data.setup()
    assert data.train_sizes == (3, 3, 3, 3)
    assert len(length_calls) == 8
    assert max(length_calls.values()) == 1


class Declaring(Dataset):
    """Declares labels in a list, and counts how often it is asked for them."""

    target_reads = 0

    @property
    def targets(self):
        self.target_reads += 1
        return [0, 1, 2, 0, 1, 2]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(1, 4, 4), index % 3


def test_the_labels_of_a_data_set_behind_many_subsets_are_asked_for_once():
    base = Declaring()
    data = FederatedDataModule(FederatedData([Subset(base, [client, 5 - client]) for client in range(3)]))
    data.setup()
    assert base.target_reads == 1
    assert [labels.tolist() for labels in data.checked.train.client_labels()] == [[0, 2], [1, 1], [2, 0]]


def test_a_resolved_data_set_stays_the_same_object_with_the_same_rows():
    base = TensorDataset(torch.arange(5))
    subset = Subset(Subset(base, [4, -2, 0]), [2, 1])
    resolve = SubsetResolver()
    assert resolve(subset).base is base
    assert resolve(subset).rows.tolist() == resolve_subset(subset).rows.tolist() == [0, 3]
    assert resolve(subset) is resolve(subset)
    # Data sets that are created and deleted meanwhile must not get the result of another one with the same id.
    assert [len(resolve(Subset(base, range(size))).rows) for size in range(5)] == [0, 1, 2, 3, 4]


def digest(*parts):
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_fingerprint_is_that_of_each_client_by_itself(dtype):
    """Clients without images, with some, and with more than are gathered at once in all."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (9_000, 1, 2, 3), generator=random).to(dtype)
    labels = torch.randint(0, 5, (9_000,), generator=random)
    base = TensorDataset(images, labels)
    sizes = [3, 0, 4_096, 1, 2_000, 2_900]
    order = torch.randperm(9_000, generator=random)
    parts = torch.split(order, sizes)
    fingerprint = part_fingerprint(make_store([Subset(base, rows.tolist()) for rows in parts]))
    prefix = f"(1, 2, 3) {dtype} ".encode()
    assert fingerprint["images"] == [digest(prefix, images[rows].numpy().tobytes()) for rows in parts]
    assert fingerprint["labels"] == [
        digest(f"({len(rows)},) torch.int64 ".encode(), labels[rows].numpy().tobytes()) for rows in parts
    ]


def test_a_client_with_more_images_than_are_gathered_at_once_has_the_fingerprint_of_its_chunks():
    images = torch.arange(5_000, dtype=torch.float64).view(-1, 1)
    store = make_store([TensorDataset(images, torch.zeros(5_000).long())])
    prefix = b"(1,) torch.float64 "
    expected = digest(prefix, images[:4096].numpy().tobytes(), prefix, images[4096:].numpy().tobytes())
    assert part_fingerprint(store)["images"] == [expected]


class Assigning:
    """A partition that returns given rows."""

    def __init__(self, rows):
        self.rows = rows

    def split(self, train, test, seed):
        return self.rows, []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1], [2, 5], [0.5]], "the training row 5 for client 1, outside 0..4"),
        ([[0, 1], [2, -1], [1]], "the training row -1 for client 1, outside 0..4"),
        ([[0, 1], [2, 2], [1]], "the training row 2 for the clients 1 and 1"),
        ([[0, 1], [], [4, 1]], "the training row 1 for the clients 0 and 2"),
        ([[0, 1], [True, False], [9]], r"an array \(2,\) of bool \(np.flatnonzero makes rows of a mask\)"),
        ([[0, 1], [[2]], [9]], r"an array \(1, 1\) of int64 as the training rows of client 1"),
    ],
)
def test_the_first_wrong_row_of_a_partition_is_named(rows, message):
    with pytest.raises(ValueError, match=message):
        divide(Assigning([np.asarray(part) for part in rows]), range(5), range(0), 0)


def test_rows_of_all_integer_types_are_taken():
    rows = [np.array([3, 0], dtype=np.uint64), [], np.array([1], dtype=np.int8), (2,)]
    train, _ = divide(Assigning(rows), range(5), range(0), 0)
    assert [part.tolist() for part in train] == [[3, 0], [], [1], [2]]
    assert {part.dtype for part in train} == {np.dtype("int64")}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_image_that_is_not_finite_is_named_among_many_small_data_sets(number):
    sets = [TensorDataset(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1])) for _ in range(3000)]
    # One is alone in its dtype, and one is too large to be checked together with others.
    sets.append(TensorDataset(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])))
    sets.append(TensorDataset(torch.zeros(1, 1, 300, 300), torch.tensor([0])))
    assert without_broken(FederatedData(sets), "raise", 0).train is sets
    for client, image in ((0, 1), (1500, 0), (2999, 1), (3001, 0)):
        images, labels = sets[client].tensors
        damaged = images.clone()
        damaged[image, 0, 1, 0] = number
        changed = [*sets]
        changed[client] = TensorDataset(damaged, labels)
        message = f"1 image cannot be read .client {client}: the training set: image {image} has NaN or infinity"
        with pytest.raises(ValueError, match=message):
            without_broken(FederatedData(changed), "raise", 0)
