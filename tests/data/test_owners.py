# SPDX-License-Identifier: Apache-2.0
"""Messages name the owner of an image: a client, the public set, the server's validation set, or a shifted test set."""

import re

import pytest
import torch
from torch.utils.data import Subset

from perada.data import ByDomain, FederatedData, FederatedDataModule, Images
from perada.data.batches.samples import make_store

from .miniatures import write_jpeg


def samples(count, side=8, channels=3, label=None):
    """Return a list of samples, which are read one by one."""
    generator = torch.Generator().manual_seed(count)
    image = torch.randint(0, 256, (channels, side, side), dtype=torch.uint8, generator=generator)
    return [(image, index % 2 if label is None else label) for index in range(count)]


CLIENTS = [samples(4), samples(4)]


@pytest.mark.parametrize(
    ("data", "owner"),
    [
        (FederatedData([samples(4), samples(4, channels=1)]), "client 1:"),
        (FederatedData(CLIENTS, [samples(2), samples(2, channels=1)]), "client 1: the test set"),
        (FederatedData(CLIENTS, server_validation=samples(4, channels=1)), "the server's validation set"),
        (FederatedData(CLIENTS, server_validation=samples(4, label=7), num_classes=2), "the server"),
        (FederatedData(CLIENTS, public=[samples(1)[0], samples(1, channels=1)[0]]), "the public set, sample 1"),
    ],
    ids=["training", "test", "validation", "label", "public"],
)
def test_the_owner_of_an_image_that_does_not_fit_is_named(data, owner):
    with pytest.raises(ValueError) as raised:
        FederatedDataModule(data).setup()
    assert str(raised.value).startswith(owner)
    others = {"client", "public", "server"} - {*re.findall(r"client|public|server", owner)}
    assert not any(other in str(raised.value).split(":")[0] for other in others)


def test_an_image_of_a_dataset_that_clients_share_is_named_as_that_of_its_client():
    """The sixth sample is of the second client, and the public set shares the dataset, too."""
    shared = [*samples(5), samples(1, side=9)[0]]
    clients = [Subset(shared, [0, 1, 2]), Subset(shared, [3, 4, 5])]
    data = FederatedData(clients, public=Subset(shared, [0, 1]))
    with pytest.raises(ValueError, match=r"^client 1: the training set, sample 5"):
        FederatedDataModule(data).setup()


def test_samples_that_are_read_later_are_named_by_their_owner():
    mixed = [samples(1)[0], samples(1, channels=1)[0]]
    for owner, name in (("the public set", "the public set"), ("client {client}: the test set", "client 0: the test")):
        store = make_store([mixed], owner=owner)
        with pytest.raises(ValueError, match=rf"^{name}"):
            store.take(torch.tensor([0, 0]), torch.tensor([0, 1]))[0]
            raise next(iter(store.read(torch.tensor([0, 0]), torch.tensor([0, 1]))[2].values()))


def test_an_image_of_a_shifted_test_set_is_not_that_of_a_client(tmp_path):
    for root in ("own", "other"):
        for client in ("north", "south"):
            for name in ("cat", "dog"):
                for number in range(8):
                    write_jpeg(tmp_path / root / client / name / f"{number}.jpg", (number, 20, 30))
    dataset = Images(str(tmp_path / "own"), layout="{client}/{class}/*", size=8)
    other = Images(str(tmp_path / "other"), layout="{client}/{class}/*", size=8)
    data = FederatedDataModule(dataset=dataset, partition=ByDomain("client"), shifts={"scanner": other})
    data.setup()
    store = data.conditions[0].store
    assert store.describe(0, 1).endswith("of the shifted test set 'scanner'")


def test_copies_are_named_with_the_servers_set():
    data = FederatedDataModule(FederatedData(CLIENTS, server_validation=CLIENTS[1]))
    data.setup()
    with pytest.raises(ValueError, match=r"image 0 of client 0 .*image 0 .*server's validation set"):
        data.checked.check_overlap("privacy")
