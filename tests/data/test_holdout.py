# SPDX-License-Identifier: Apache-2.0
"""Validation images held out at the clients: who gets which, what is trained on, what is scored."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.data import IID, ByDomain, Digits, Dirichlet, FederatedData, FederatedDataModule, FromFile, ImageSet, Phase

SIZES = (6, 9, 2, 30)


class Pictures(Dataset):
    """Samples as PIL images, one by one."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        return Image.fromarray(image[0].numpy()), int(label)


class Unread(Dataset):
    """Test images that must not be looked at."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("a test image was read")


def number_images(sizes=SIZES, start=0):
    """Every image of every client has a value of its own."""
    sets = []
    for size in sizes:
        images = torch.arange(start, start + size, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
        sets.append(TensorDataset(images.contiguous(), torch.arange(size) % 3))
        start += size
    return sets


def module(data=None, run_seed=5, **options):
    datamodule = FederatedDataModule(data, batch_size="full", **options)
    datamodule.configure_rounds(seed=run_seed, clients_per_round=None, phases=[Phase(epochs=1)], image_config=None)
    return datamodule


def values(images):
    return sorted(((images[:, 0, 0, 0] + 1) * 127.5).round().long().tolist())


def values_trained_on(datamodule):
    """For each client the values of the images it trains on in one epoch of full batches."""
    (batch,) = [datamodule.prepare(batch) for batch in datamodule.train_dataloader()]
    rows = zip(batch.clients, batch.x, batch.counts, strict=True)
    return [values_of_client for _, values_of_client in sorted((client, values(x[:n])) for client, x, n in rows)]


def values_scored_on(datamodule, clients):
    """For each client the values of the images it is evaluated on."""
    batches = [datamodule.prepare(batch) for batch in datamodule.val_dataloader()]
    x = torch.cat([b.x for b in batches])
    owner = torch.cat([b.owner for b in batches])
    return [values(x[owner == client]) for client in range(clients)]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.95])
@pytest.mark.parametrize("wrap", [lambda dataset: dataset, Pictures], ids=["tensors", "pictures"])
def test_clients_train_on_one_part_and_are_scored_on_the_other(wrap, share):
    data = FederatedData([wrap(newcomers) for newcomers in number_images()], [Unread() for _ in SIZES])
    datamodule = module(data, client_validation=share, evaluate_on="validation")
    train = values_trained_on(datamodule)
    held_out = values_scored_on(datamodule, len(SIZES))
    start = 0
    for size, kept, out in zip(SIZES, train, held_out, strict=True):
        assert sorted(kept + out) == list(range(start, start + size))
        assert len(out) == min(size - 1, max(1, round(share * size)))
        start += size
    assert datamodule.train_sizes == tuple(map(len, train))
    record = datamodule.partition_dict()
    assert record["client_validation_sizes"] == [len(out) for out in held_out]
    assert (record["train_sizes"], record["test_sizes"]) == ([len(kept) for kept in train], [3] * 4)
    again = module(data, run_seed=6, client_validation=share, evaluate_on="validation")
    assert values_scored_on(again, len(SIZES)) == held_out


def test_which_images_are_held_out_depends_on_the_data_seed_and_the_client():
    data = FederatedData(number_images((30, 30, 30)))

    def held_out_values(**options):
        return values_scored_on(module(data, client_validation=0.2, evaluate_on="validation", **options), 3)

    assert held_out_values(seed=1) == held_out_values(seed=1, run_seed=9)
    assert held_out_values(seed=1) != held_out_values(seed=2)
    first, second, third = (
        [value - 30 * client for value in values_of_client]
        for client, values_of_client in enumerate(held_out_values(seed=1))
    )
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_held_out_images_are_not_trained_on_where_the_test_images_are_scored():
    data = FederatedData(number_images(), number_images((4, 0, 2, 1), start=100))
    tuned = module(data, client_validation=0.3, evaluate_on="validation")
    final = module(data, client_validation=0.3)
    assert values_trained_on(final) == values_trained_on(tuned) != values_trained_on(module(data))
    assert (
        values_scored_on(final, 4) == values_scored_on(module(data), 4) == [[100, 101, 102, 103], [], [104, 105], [106]]
    )
    assert "client_validation_sizes" not in module(data).partition_dict()
    for batches in (tuned.test_dataloader, tuned.predict_dataloader):
        seen = torch.cat([batch.x for batch in batches()])
        assert sorted(seen[:, 0, 0, 0].tolist()) == sorted(
            value for values_of_client in values_scored_on(tuned, 4) for value in values_of_client
        )


def divide_digits(**options):
    options = {"partition": Dirichlet(6, 0.5), "train_limit": 300, "public_fraction": 0.1} | options
    return FederatedDataModule(dataset=Digits(), client_validation=0.25, evaluate_on="validation", **options)


def test_the_record_of_a_divided_set_says_where_every_image_went(tmp_path):
    datamodule = divide_digits()
    record = json.loads(json.dumps(datamodule.partition_dict()))
    undivided = FederatedDataModule(dataset=Digits(), partition=Dirichlet(6, 0.5), train_limit=300, public_fraction=0.1)
    for kept, held, own in zip(
        record["train"], record["client_validation"], undivided.partition_dict()["train"], strict=True
    ):
        assert sorted(kept + held) == own
        assert len(held) == round(0.25 * len(own))
    assert record["test"] == undivided.partition_dict()["test"]
    assert datamodule.train_sizes == tuple(map(len, record["train"]))
    batches = list(datamodule.val_dataloader())
    positions = [position for own in record["client_validation"] for position in own]
    assert torch.equal(torch.cat([batch.x for batch in batches]), Digits().images[positions])
    assert torch.equal(torch.cat([batch.y for batch in batches]), Digits().labels[positions])
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(record))
    again = divide_digits(partition=FromFile(str(path))).partition_dict()
    assert {part: again[part] for part in ("train", "client_validation", "test")} == {
        part: record[part] for part in ("train", "client_validation", "test")
    }


class Wards(ImageSet):
    """Grey images, three of each patient, whose brightness is the patient."""

    num_classes = 2
    group_column = "patient"

    def _load_images(self):
        patients = torch.from_numpy(self.columns["patient"])
        return patients.byte().view(-1, 1, 1, 1).expand(-1, 1, 8, 8), patients % 2

    @property
    def columns(self):
        patients = np.arange(60) if self.train else np.arange(60, 80)
        return {"patient": np.random.default_rng(0).permutation(np.repeat(patients, 3))}


def test_no_patient_is_on_both_sides_of_anything_that_is_set_aside():
    datamodule = FederatedDataModule(
        dataset=Wards(), partition=IID(3), client_validation=0.3, public_fraction=0.2, validation_fraction=0.1
    )
    record = datamodule.partition_dict()
    patient = Wards().columns["patient"]
    server = [set(patient[record[part]]) for part in ("public", "server_validation")]
    assert [len(part) for part in server] == [12, 6]
    clients = set(patient[np.concatenate(record["train"] + record["client_validation"])])
    assert len(clients) == 60 - 18
    assert not server[0] & server[1]
    assert not (server[0] | server[1]) & clients
    for kept, held_out in zip(record["train"], record["client_validation"], strict=True):
        assert not set(patient[kept]) & set(patient[held_out])
        assert len(kept) + len(held_out) == 42
        assert (
            abs(len(held_out) - 0.3 * 42) <= 2
        )  # a client has at most 3 images of a patient: half of that, and rounding


class Column(Wards):
    group_column = "hospital"


def test_groups_that_cannot_be_held_out_are_rejected():
    with pytest.raises(ValueError, match=r"Column.*group_column='hospital'.*'patient'"):
        FederatedDataModule(dataset=Column(), partition=IID(3)).setup()
    by_patient = FederatedDataModule(dataset=Wards(), partition=ByDomain("patient"), client_validation=0.3)
    message = r"clients 0, 1, .* have fewer than 2 images, or images of only one group, .*: .* set clie"
    with pytest.warns(UserWarning, match="no client"), pytest.raises(ValueError, match=message):
        by_patient.setup()


def test_a_client_with_two_images_has_one_of_each():
    datamodule = module(
        FederatedData(number_images((2, 2)), num_classes=3), client_validation=0.9, evaluate_on="validation"
    )
    assert [len(rows) for rows in values_trained_on(datamodule) + values_scored_on(datamodule, 2)] == [1, 1, 1, 1]


def test_clients_that_cannot_share_are_named():
    data = FederatedData([Subset(number_images()[3], range(n)) for n in (4, 1, 3, 1)])
    with pytest.raises(ValueError, match=r"clients 1, 3 .*2 images.*client_validation"):
        module(data, client_validation=0.1)
    with pytest.raises(ValueError, match=r"client 0 .*2"):
        module(FederatedData(number_images((1, 5))), client_validation=0.1)
    many = FederatedData([Subset(number_images()[3], [0])] * 13)
    with pytest.raises(ValueError, match="clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"):
        module(many, client_validation=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"client_validation": 1.0},
            r"client_validation .*got 1.0",
        ),
        ({"client_validation": -0.1}, r"client_validation .*got -0.1"),
        ({"client_validation": float("nan")}, r"client_validation .*got nan"),
        ({"evaluate_on": "validation"}, r"evaluate_on='validation'.*client_validation.*0"),
        (
            {"evaluate_on": "train", "client_validation": 0.1},
            r"evaluate_on .*got 'train'",
        ),
    ],
)
def test_options(options, words):
    with pytest.raises(ValueError, match=words):
        FederatedDataModule(FederatedData(number_images()), **options)
