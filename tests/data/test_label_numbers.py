# SPDX-License-Identifier: Apache-2.0
"""Clients that number the classes from 1, where others number them from 0, are warned of in every source."""

import csv
from itertools import combinations, product

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from perada.cli import main
from perada.data import FederatedData, FederatedDataModule, Images, ImageTable
from perada.data.sets.label_numbers import find_shifted_numbers

SHIFTED = {"north": [1, 2], "south": [0, 1], "west": [0, 1]}
MESSAGE = "the classes 1, 2 of 'north' look like the classes 0, 1 of 'south', 'west' plus 1"


def write_table(root, numbers_of_clients, count=8):
    """Write a table of images whose labels take these numbers in turn, and return its path."""
    rows = [["path", "label", "client"]]
    for client, numbers in numbers_of_clients.items():
        for index in range(count):
            name = f"{client}_{index}.png"
            Image.new("L", (4, 4), len(rows)).save(root / name)
            rows.append([name, numbers[index % len(numbers)], client])
    with (root / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root / "t.csv"


def write_folders(root, numbers_of_clients, count=8):
    """Write images in folders of client and number, and return the folder of all."""
    for client_index, (client, numbers) in enumerate(numbers_of_clients.items()):
        for index in range(count):
            folder = root / "sites" / client / str(numbers[index % len(numbers)])
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), count * client_index + index).save(folder / f"{index}.png")
    return root / "sites"


def read_table(root, numbers_of_clients, **options):
    """Read the list of a table of images."""
    table = ImageTable(str(write_table(root, numbers_of_clients)), size=4, **options)
    # The list is read when it is first needed.
    _ = table.manifest


def read_folders(root, numbers_of_clients, **options):
    """Read the list of images in folders."""
    images = Images(str(write_folders(root, numbers_of_clients)), size=4, **options)
    # The list is read when it is first needed.
    _ = images.manifest


@pytest.mark.parametrize("read", [read_table, read_folders])
def test_numbers_from_one_are_warned_of_unless_the_classes_are_declared(tmp_path, read):
    with pytest.warns(UserWarning, match=MESSAGE) as recorded:
        read(tmp_path, SHIFTED)
    message = str(recorded[0].message)
    assert "subtracting 1 from each label of 'north'; if they are different classes, declare classes: ['0', " in message
    read(tmp_path, SHIFTED, classes=["0", "1", "2"])


@pytest.mark.parametrize("read", [read_table, read_folders])
@pytest.mark.parametrize(
    "numbers_of_clients",
    [
        {"north": [1, 2], "south": [0, 1], "west": [0, 2]},
        {"north": [1, 2], "south": [0, 1], "west": [0, 1, 2]},
        {"north": [1, 2], "south": [0, 1, 2]},
        {"north": [1], "south": [0], "west": [0]},
        {"north": [0, 1], "south": [1, 2], "west": [2, 3]},
    ],
)
def test_clients_that_have_only_some_classes_are_accepted(tmp_path, read, numbers_of_clients):
    read(tmp_path, numbers_of_clients)


@pytest.mark.parametrize("write", [write_table, write_folders])
def test_inspect_warns_of_them(tmp_path, capsys, write):
    main(["data", "inspect", str(write(tmp_path, SHIFTED, count=20))])
    assert MESSAGE in capsys.readouterr().out


def federated(*numbers_of_clients, together=False, **options):
    """Set up clients with labels of these numbers, each in a set of its own or together in one."""
    sets = []
    for numbers in numbers_of_clients:
        labels = torch.tensor(numbers).repeat(4)
        sets.append(TensorDataset(torch.zeros(len(labels), 3, 4, 4, dtype=torch.uint8), labels))
    if together:
        images = torch.cat([each.tensors[0] for each in sets])
        labels = torch.cat([each.tensors[1] for each in sets])
        rows = torch.arange(len(labels)).split([len(each) for each in sets])
        sets = [Subset(TensorDataset(images, labels), part.tolist()) for part in rows[:1]]
        sets += [Subset(sets[0].dataset, part.tolist()) for part in rows[1:]]
    data = FederatedDataModule(FederatedData(sets, sets, **options))
    data.setup()
    return data


def test_integers_of_datasets_are_compared_too():
    with pytest.warns(UserWarning, match=r"classes 1, 2 of client 0 .*client 1 plus 1.*num_classes=3"):
        federated((1, 2), (0, 1))
    with pytest.warns(UserWarning, match=r"classes 1, 2, 3 of 'a'.*0, 1, 2 of 'b' plus 1"):
        federated((1, 2, 3), (0, 1, 2), client_names=["a", "b"])
    assert federated((1, 2), (0, 1), num_classes=3).num_classes == 3
    assert federated((1, 2), (0, 1), classes=["x", "y", "z"]).num_classes == 3


def test_clients_that_share_a_set_have_its_numbers():
    assert federated((1, 2), (0, 1), together=True).num_classes == 3


def test_all_clients_fit_one_of_two_ranges():
    """Against a plain search of all sets of numbers below 4 at three clients."""
    subsets = [{*each} for size in (1, 2, 3) for each in combinations(range(4), size)]
    num_found = 0
    for sets in product(subsets, repeat=3):
        numbers_of_clients = dict(zip("abc", sets, strict=True))
        is_shifted = False
        for lower in sets:
            higher = {number + 1 for number in lower}
            fits = all(numbers <= lower or numbers <= higher for numbers in sets)
            is_shifted = is_shifted or (higher in sets and fits and bool(lower & higher))
        result = find_shifted_numbers(numbers_of_clients)
        assert (result is not None) == is_shifted, sets
        if result is not None:
            num_found += 1
            assert result.higher_numbers == [number + 1 for number in result.numbers]
            assert not {*result.client_names} & {*result.higher_client_names}
    assert num_found > 50
