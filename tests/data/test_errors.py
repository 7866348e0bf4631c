# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs: one line at set-up that says what, why, and what to do."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

import perada
from perada.core.images import ImageConfig
from perada.data import IID, Digits, Dirichlet, FederatedData, FederatedDataModule, FromFile, Phase, Photographs


def client(size=4, channels=1, side=5, labels=None, dtype=torch.uint8):
    return TensorDataset(
        torch.zeros(size, channels, side, side, dtype=dtype), torch.arange(size) if labels is None else labels
    )


def items(dataset):
    return [dataset[index] for index in range(len(dataset))]


class Declared(list):
    """A set that declares its labels, as torchvision's do."""


def declared(dataset):
    declaring = Declared(items(dataset))
    declaring.targets = [int(label) for _, label in dataset]
    return declaring


KINDS = [lambda dataset: dataset, items, declared, lambda dataset: Subset(declared(dataset), range(len(dataset)))]


def refused(data, words, error=ValueError, image=None, **options):
    with pytest.raises(error, match=words) as caught:
        FederatedDataModule(data, **options).configure_rounds(
            seed=0, clients_per_round=options.pop("clients_per_round", None), phases=[Phase()], image=image
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("label", "words"), [(-1, "label -1, outside"), (7, "label 7, outside 0..4: .* num_classes .now 5.")]
)
def test_labels_out_of_range(kind, label, words):
    wrong = client(labels=torch.tensor([0, 1, label, 2]))
    refused(
        FederatedData([client(), kind(wrong)] if kind is KINDS[0] else [kind(client()), kind(wrong)], num_classes=5),
        f"client 1 has the training {words}",
    )
    refused(FederatedData([client()] * 2, [client(), kind(wrong)], num_classes=5), f"client 1 has the test {words}")
    refused(
        FederatedData([client()], server_validation=kind(wrong), num_classes=5),
        f"the server has the validation {words}",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_another_shape(kind):
    wrong = "client 1: an image is .*1, 6, 6.*, others are .*1, 5, 5.* image_size"
    refused(FederatedData([kind(client()), kind(client(side=6))]), wrong)
    refused(FederatedData([kind(client()), kind(client(channels=3))]), "client 1: an image is .*3, 5, 5")
    refused(FederatedData([kind(client()), kind(client(dtype=torch.float32))]), "float32.* others are .*uint8")
    refused(FederatedData([kind(client())], [kind(client(side=6))]), "test data: client 0: an image is .*6, 6")


def test_image_size_makes_one_shape_of_many_where_images_are_read_one_by_one():
    train = [items(client()), items(client(side=6)), [(Image.new("L", (9, 7)), 0), (Image.new("L", (3, 4)), 1)]]
    module = FederatedDataModule(FederatedData(train, [client(side=8)] * 3), image_size=5)
    assert [module.prepare(batch).x.shape[2:] for batch in module.train_dataloader()] == [(1, 5, 5)]
    assert [module.prepare(batch).x.shape for batch in module.val_dataloader()] == [(12, 1, 5, 5)]


def test_a_shape_that_changes_within_a_client_is_named_when_it_is_met():
    mixed = [(torch.zeros(1, 5, 5), 0), (torch.zeros(1, 6, 6), 0)]
    with pytest.raises(ValueError, match="client 0: an image is"):
        list(FederatedDataModule(FederatedData([mixed])).train_dataloader())


def test_missing_and_empty_clients():
    empty = Subset(client(), [])
    refused(FederatedData([]), "there are no clients")
    refused(FederatedData([client(), empty]), "client 1 has no training samples")
    refused(FederatedData([client()] * 2, [client()]), "2 training sets and 1 test sets")
    refused(FederatedData([client()], public=empty), "the public set has no samples")
    refused(FederatedData([client()], server_validation=empty), "the server_validation set has no samples")


def test_class_counts_that_do_not_match():
    several = client(labels=torch.ones(4, 3))
    refused(FederatedData([several], num_classes=5), "labels have 3 entries but num_classes is 5")
    refused(FederatedData([client()], num_classes=5), "num_classes is 6 but the data has 5", num_classes=6)
    refused(
        FederatedData([client()], num_classes=0),
        "num_classes=0 cannot be used; give a whole number of 1 or more, or leave it out",
    )
    with pytest.raises(ValueError, match="num_classes is 3 but the data has 10 classes"):
        FederatedDataModule(dataset=Digits(), partition=IID(2), num_classes=3).setup()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_labels_of_different_kinds(kind):
    several = client(labels=torch.ones(4, 3))
    for other in (client(), client(labels=torch.ones(4, 2))):
        refused(FederatedData([kind(several), kind(other)]), "client 1: a label is .* float vector of K labels")
    refused(FederatedData([kind(client(labels=torch.full((4, 3), 1.5)))]), r"label 1\.5, outside 0\.\.1")
    refused(FederatedData([kind(client(labels=torch.full((4, 3), torch.nan)))]), "label nan, outside")
    refused(
        FederatedData([items(client(labels=torch.ones(4)))]), "client 0, sample 0: labels are torch.float32", TypeError
    )
    refused(
        FederatedData([kind(client(labels=torch.ones(4, 3, dtype=torch.bool)))]), "labels are torch.bool", TypeError
    )


def test_images_that_are_none():
    refused(FederatedData([client(dtype=torch.int64)]), "images are torch.int64: give uint8", TypeError)
    refused(FederatedData([[("cat.jpg", 1)]]), "client 0, sample 0: an image is of type str", TypeError)


def test_channels_that_the_backbone_does_not_take():
    rgb = ImageConfig((3, 8, 8), (0.5,) * 3, (0.5,) * 3)
    gray = ImageConfig((1, 8, 8), (0.5,), (0.5,))
    refused(FederatedData([client(channels=3)]), r"shape \(3, 5, 5\) and the backbone takes 1 channels", image=gray)
    refused(FederatedData([client(channels=2)]), "backbone takes 3 channels", image=rgb)
    refused(
        FederatedData([client(dtype=torch.float32)]),
        "float32 .*backbone takes 3 channels: convert them to 3 .* a network of your own for 1 as backbone",
        image=rgb,
    )
    refused(
        FederatedData([client()], public=client(channels=3)),
        r"public images are torch.uint8 of shape \(3, 5, 5\)",
        image=gray,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0 cannot be used; give a whole number of 1 or more, or 'full'"),
        ({"batch_size": "all"}, "batch_size='all' cannot be used"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1 cannot be used; give a whole number of 1 or more"),
        ({"num_workers": -1}, "num_workers=-1 cannot be used; give a whole number of 0 or more"),
        ({"image_size": 0}, "image_size=0 cannot be used"),
        ({"crop_padding": -1}, "crop_padding=-1 cannot be used"),
        ({"train_limit": 5}, "data is given together with options"),
        ({"dataset": Digits()}, "data is given together with options"),
    ],
)
def test_options(options, words):
    refused(FederatedData([client()]), words, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": None}, "give both"),
        ({"dataset": None}, "dataset=None and"),
        ({"public_fraction": 1.0}, r"public_fraction=1\.0 cannot be used; give a finite number from 0 to below 1"),
        ({"validation_fraction": -0.1}, r"validation_fraction=-0\.1 cannot be used"),
        ({"public_fraction": 0.5, "validation_fraction": 0.5}, "leave the clients nothing"),
        ({"public": Photographs(5), "public_fraction": 0.5}, "both given"),
        ({"train_limit": 0}, "train_limit=0 cannot be used; give a whole number of 1 or more, or leave it out"),
        ({"train_limit": 20}, "30 clients .* there are 20"),
        ({"dataset": Photographs(50)}, "has no labels"),
    ],
)
def test_options_of_a_division(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        FederatedDataModule(**{"dataset": Digits(), "partition": Dirichlet(30)} | options).setup()
    assert "\n" not in str(caught.value)


def test_more_clients_a_round_than_there_are():
    module = FederatedDataModule(FederatedData([client()] * 3))
    for wrong in (4, 0, -1):
        with pytest.raises(
            ValueError,
            match=f"clients_per_round={wrong} cannot be used; give a whole number from 1 to 3, or leave it out",
        ):
            module.configure_rounds(seed=0, clients_per_round=wrong, phases=[Phase()], image=None)
    with pytest.raises(ValueError, match="no phases"):
        module.configure_rounds(seed=0, clients_per_round=3, phases=[], image=None)


def test_augmentation_of_what_is_no_image():
    vectors = TensorDataset(torch.rand(4, 7), torch.arange(4))
    refused(FederatedData([vectors]), "crop_padding and flip need", flip=True)


def test_a_partition_that_leaves_a_client_empty(tmp_path):
    path = tmp_path / "partition.json"
    path.write_text('{"train": [[0], []], "test": [[0], [1]]}')
    with pytest.raises(ValueError, match="client 1 has no training samples"):
        FederatedDataModule(dataset=Digits(), partition=FromFile(str(path))).setup()


def test_labels_may_be_numpys():
    train = [[(np.zeros((5, 5), np.uint8), np.int64(label)) for label in (0, 2)]]
    assert FederatedDataModule(FederatedData(train)).plan(0).clients == (0,)


def test_large_sets_without_declared_labels_are_checked_as_they_are_read(monkeypatch):
    monkeypatch.setattr("perada.data.federated.SCAN_LIMIT", 3)
    wrong = items(client(labels=torch.tensor([0, 1, 9, 2])))
    refused(FederatedData([wrong]), "num_classes")
    module = FederatedDataModule(FederatedData([wrong], num_classes=5))
    with pytest.raises(ValueError, match=r"client 0 has the label 9, outside 0\.\.4"):
        list(module.train_dataloader())


def test_what_is_advised_for_other_channels_works():
    """Floating-point images of one channel, with a network of one's own that takes them, and converted for one."""
    parts = [TensorDataset(torch.rand(4, 1, 8, 8), torch.arange(4) % 2) for _ in range(2)]
    options = {"rounds": 1, "local_steps": 1, "algorithm": "fedavg", "accelerator": "cpu", "logger": False}
    options |= {"enable_progress_bar": False, "adapter": "full"}
    own = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 8), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    named = {"pretrained": False, "image_size": 8}
    with pytest.raises(ValueError, match="convert them to 3"):
        perada.finetune("test_resnet", FederatedData(parts), **options, **named)
    assert perada.finetune(own, FederatedData(parts), **options).num_clients == 2
    converted = [TensorDataset(x.expand(-1, 3, -1, -1), y) for x, y in (part.tensors for part in parts)]
    grey = [TensorDataset((255 * x).byte(), y) for x, y in (part.tensors for part in parts)]
    for data in (converted, grey):
        assert perada.finetune("test_resnet", FederatedData(data), **options, **named).num_clients == 2
