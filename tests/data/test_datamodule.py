# SPDX-License-Identifier: Apache-2.0
import json
import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.data import (
    CohortBatch,
    Digits,
    Dirichlet,
    EvalBatch,
    FederatedData,
    FederatedDataModule,
    FromFile,
    Phase,
    Photographs,
)
from perada.data.batches.samples import make_store
from perada.tasks import Classification, MultiLabel

SIZES = (6, 9, 4)


def tensors(sizes=SIZES, *, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        TensorDataset(
            torch.randint(0, 256, (size, 1, 5, 5), dtype=torch.uint8, generator=source),
            torch.randint(0, 3, (size,), generator=source),
        )
        for size in sizes
    ]


class Pictures(Dataset):
    """The same samples as PIL images and plain integers, and random if asked for."""

    def __init__(self, samples, noisy=False):
        self.samples = samples
        self.noisy = noisy

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        if self.noisy:
            value = random.randrange(100) + int(np.random.randint(50)) + int(torch.randint(0, 50, ()))
            image = torch.full_like(image, value)
        return Image.fromarray(image[0].numpy()), int(label)


def pictures(noisy=False):
    return [Pictures(samples, noisy) for samples in tensors()]


def module(data, **options):
    datamodule = FederatedDataModule(data, batch_size=4, eval_batch_size=5, **options)
    datamodule.configure_rounds(seed=3, clients_per_round=None, phases=[Phase(epochs=2)], image_config=None)
    return datamodule


def equal(batches, others):
    batches = list(batches)
    others = list(others)
    assert len(batches) == len(others) > 0
    for batch, other in zip(batches, others, strict=True):
        for mine, yours in zip(batch, other, strict=True):
            assert torch.equal(mine, yours) if isinstance(mine, torch.Tensor) else mine == yours


def test_tensors_and_pictures_give_the_same_batches():
    fast, slow = (module(FederatedData(make(), make())) for make in (tensors, pictures))
    equal(fast.train_dataloader(), slow.train_dataloader())
    equal(fast.val_dataloader(), slow.val_dataloader())


def test_clients_share_images_and_not_labels():
    images = torch.randint(0, 256, (6, 1, 5, 5), dtype=torch.uint8)
    one = torch.tensor([0, 1, 2, 0, 1, 2])
    other = torch.tensor([2, 2, 1, 1, 0, 0])
    store = make_store([TensorDataset(images, labels) for labels in (one, other, one)])
    assert [labels.tolist() for labels in store.client_labels()] == [labels.tolist() for labels in (one, other, one)]
    assert len(store.images) == 12  # what is shared whole is held once


def test_a_client_without_labels_is_named():
    class Unlabelled(Digits):
        labels = None

    with pytest.raises(ValueError, match=r"client 1: .*labelled"):
        module(FederatedData([Digits(), Unlabelled()], [Digits()] * 2)).setup()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_batches():
    loaded = [module(FederatedData(pictures(noisy=True), pictures(noisy=True)), num_workers=n) for n in (0, 2)]
    equal(*(made.train_dataloader() for made in loaded))
    equal(*(made.val_dataloader() for made in loaded))


def test_datasets_that_draw_leave_the_global_streams_alone():
    datamodule = module(FederatedData(pictures(noisy=True)))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = list(datamodule.train_dataloader())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    assert len({int(value) for batch in first for value in batch.x.unique()}) > 20


def test_test_images_are_read_once_each_with_their_owner():
    data = tensors()
    datamodule = module(FederatedData(data, [data[0], data[1], Subset(data[2], [])]))
    batches = list(datamodule.test_dataloader())
    assert all(isinstance(batch, EvalBatch) for batch in batches)
    assert [len(batch.y) for batch in batches] == [5, 5, 5]
    assert torch.equal(torch.cat([batch.x for batch in batches]), torch.cat([part.tensors[0] for part in data[:2]]))
    assert torch.equal(torch.cat([batch.y for batch in batches]), torch.cat([part.tensors[1] for part in data[:2]]))
    assert torch.cat([batch.owner for batch in batches]).tolist() == [0] * 6 + [1] * 9
    assert module(FederatedData(data)).val_dataloader() == []


def test_several_labels():
    train = [TensorDataset(torch.rand(5, 3, 4, 4), (torch.rand(5, 7) > 0.5).double()) for _ in range(2)]
    datamodule = module(FederatedData(train, train))
    assert (datamodule.num_classes, datamodule.task) == (7, MultiLabel())
    batch = next(iter(datamodule.train_dataloader()))
    assert (batch.y.shape, batch.y.dtype, batch.x.shape) == ((2, 4, 7), torch.float32, (2, 4, 3, 4, 4))
    assert next(iter(datamodule.val_dataloader())).y.shape == (5, 7)
    as_items = module(FederatedData([list(part) for part in train]))
    equal(datamodule.train_dataloader(), as_items.train_dataloader())


def test_facts_about_the_data():
    datamodule = module(FederatedData(tensors()))
    assert (datamodule.num_clients, datamodule.num_classes, datamodule.task, datamodule.train_sizes) == (
        3,
        3,
        Classification(),
        SIZES,
    )
    assert module(FederatedData(tensors(), num_classes=8)).num_classes == 8
    assert module(FederatedData(tensors()), num_classes=8).num_classes == 8
    assert datamodule.partition_dict() == {
        "num_clients": 3,
        "train_sizes": [6, 9, 4],
        "test_sizes": [0, 0, 0],
        "public_size": 0,
    }


class Poisoned(Dataset):
    """A public set whose labels must not be looked at."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((1, 5, 5), index, dtype=torch.uint8), Label()

    @property
    def targets(self):
        raise AssertionError("labels of the public set were read")


class Label:
    def __getattribute__(self, name):
        raise AssertionError("a label of the public set was read")


class SecretDigits(Digits):
    @property
    def labels(self):
        raise AssertionError("labels of the public set were read")


@pytest.mark.parametrize("public", [Poisoned(), SecretDigits(), Photographs(count=30, size=8), torch.rand(30, 3, 4, 4)])
def test_public_images_come_without_labels(public):
    public = TensorDataset(public) if isinstance(public, torch.Tensor) else public
    datamodule = module(FederatedData(tensors(), public=public))
    assert datamodule.public_size == len(public)
    indices = datamodule.public_indices(round=2, steps=5, batch_size=4)
    for rows in indices:
        images = datamodule.public_images(rows)
        first = public.images[rows[0]] if isinstance(public, Digits) else public[int(rows[0])]
        first = first[0] if isinstance(first, tuple) else first
        assert len(images) == 4
        expected = first.float() / 127.5 - 1 if first.dtype == torch.uint8 else first
        torch.testing.assert_close(images[0], expected)
    assert torch.equal(indices, datamodule.public_indices(2, 5, 4))
    assert not torch.equal(indices, datamodule.public_indices(3, 5, 4))
    assert datamodule.public_indices(0, 2, "full").sort().values.tolist() == [list(range(len(public)))] * 2


class RandomShade(Dataset):
    """Images of one random value, which is another at each reading."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(()).expand(1, 5, 5)


def test_a_random_public_image_is_the_same_whenever_it_is_read():
    """Teachers and student see it in different batches and steps: they must see the same image."""
    datamodule = module(FederatedData(tensors(), public=RandomShade()))
    alone = [datamodule.public_images(torch.tensor([position])) for position in range(6)]
    assert len({float(image.flatten()[0]) for image in alone}) == 6
    assert torch.equal(datamodule.public_images(torch.tensor([4, 1, 4])), torch.cat([alone[4], alone[1], alone[4]]))


def test_server_validation():
    datamodule = module(FederatedData(tensors(), server_validation=tensors((7,), seed=1)[0]))
    assert [(x.shape, x.dtype, len(y)) for x, y in datamodule.validation_batches()] == [
        ((5, 1, 5, 5), torch.float32, 5),
        ((2, 1, 5, 5), torch.float32, 2),
    ]
    assert list(module(FederatedData(tensors())).validation_batches()) == []


def flat(lists):
    return [index for part in lists for index in part]


def digits(**options):
    return FederatedDataModule(dataset=Digits(), partition=Dirichlet(6, 0.5), **options)


def test_clients_get_the_images_that_the_record_says():
    datamodule = digits(seed=4)
    record = json.loads(json.dumps(datamodule.partition_dict()))
    assert record["num_clients"] == datamodule.num_clients == 6
    assert record["partition"] == repr(Dirichlet(6, 0.5))
    assert sorted(flat(record["train"])) == list(range(1438))
    assert sorted(flat(record["test"])) == list(range(359))
    test_split = Digits(train=False)
    seen = torch.cat([batch.x for batch in datamodule.val_dataloader()])
    assert torch.equal(seen, test_split.images[flat(record["test"])])
    assert digits(seed=4).partition_dict() == datamodule.partition_dict()
    assert digits(seed=5).partition_dict() != datamodule.partition_dict()


def test_held_out_shares_and_limits():
    datamodule = digits(public_fraction=0.25, validation_fraction=0.1, train_limit=400, test_limit=50)
    record = datamodule.partition_dict()
    clients = flat(record["train"])
    assert (len(record["public"]), len(record["server_validation"]), len(clients)) == (100, 40, 260)
    assert len({*clients, *record["public"], *record["server_validation"]}) == 400
    assert len(flat(record["test"])) == 50
    rows = torch.arange(100)
    expected = Digits().images[record["public"]].float() / 127.5 - 1
    torch.testing.assert_close(datamodule.public_images(rows), expected)
    assert sum(len(y) for _, y in datamodule.validation_batches()) == 40


def test_public_limit():
    datamodule = digits(public=Photographs(count=30, size=8), public_limit=12)
    assert datamodule.public_size == 12


def test_a_recorded_partition_is_read_back(tmp_path):
    path = tmp_path / "partition.json"
    options = {"public_fraction": 0.1, "train_limit": 500, "seed": 2}
    first = digits(**options)
    path.write_text(json.dumps(first.partition_dict()))
    again = FederatedDataModule(dataset=Digits(), partition=FromFile(str(path)), **options)
    for part in ("train", "test", "public"):
        assert again.partition_dict()[part] == first.partition_dict()[part]
    with pytest.raises(ValueError, match="not among"):
        FederatedDataModule(dataset=Digits(), partition=FromFile(str(path)), **options | {"seed": 3}).setup()


class Listener(pl.LightningModule):
    """Notes what Lightning hands over."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.seen = []
        self.lengths = []

    def on_train_epoch_start(self):
        self.lengths.append(self.trainer.num_training_batches)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)

    def validation_step(self, batch, batch_idx):
        assert isinstance(batch, EvalBatch)
        assert batch.x.dtype == torch.float32

    def configure_optimizers(self):
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)


def test_lightning_sees_a_round_as_an_epoch(tmp_path):
    listener = Listener()
    data = digits(batch_size=32, flip=True, crop_padding=1)
    data.configure_rounds(seed=1, clients_per_round=2, phases=[Phase()], image_config=None)
    pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
    ).fit(listener, datamodule=data)
    plans = [data.plan(round) for round in range(3)]
    assert listener.lengths == [sum(map(max, plan.steps)) for plan in plans]
    expected = [data.prepare(batch) for plan in plans for batch in data.cohort_loader(plan)]
    assert all(isinstance(batch, CohortBatch) for batch in listener.seen)
    equal(listener.seen, expected)
    assert len({plan.clients for plan in plans}) > 1
