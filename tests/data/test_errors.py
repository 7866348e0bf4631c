# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs: one line at set-up that says what, why, and what to do."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

import perada
from perada.core.rounds import ImageConfig
from perada.data import (
    IID,
    Digits,
    Dirichlet,
    FederatedData,
    FederatedDataModule,
    FromFile,
    ImageSet,
    Partition,
    Phase,
    Photographs,
)
from tests.options import sections


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


def rejected(data, words, error=ValueError, image=None, **options):
    with pytest.raises(error, match=words) as caught:
        FederatedDataModule(data, **options).configure_rounds(
            seed=0, clients_per_round=options.pop("clients_per_round", None), phases=[Phase()], image=image
        )
    assert "\n" not in str(caught.value)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("label", "words"), [(-1, "label -1, outside"), (7, "label 7, outside 0..4: .* num_classes .now 5.")]
)
def test_labels_out_of_range(kind, label, words):
    wrong = client(labels=torch.tensor([0, 1, label, 2]))
    rejected(
        FederatedData([client(), kind(wrong)] if kind is KINDS[0] else [kind(client()), kind(wrong)], num_classes=5),
        f"client 1 has the training {words}",
    )
    rejected(FederatedData([client()] * 2, [client(), kind(wrong)], num_classes=5), f"client 1 has the test {words}")
    rejected(
        FederatedData([client()], server_validation=kind(wrong), num_classes=5),
        f"the server has the validation {words}",
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_another_shape(kind):
    wrong = "client 1: an image is .*1, 6, 6.*, others are .*1, 5, 5.* image_size"
    rejected(FederatedData([kind(client()), kind(client(side=6))]), wrong)
    rejected(FederatedData([kind(client()), kind(client(channels=3))]), "client 1: an image is .*3, 5, 5")
    rejected(FederatedData([kind(client()), kind(client(dtype=torch.float32))]), "float32.* others are .*uint8")
    rejected(FederatedData([kind(client())], [kind(client(side=6))]), "client 0: the test set: an image is .*6, 6")


def test_image_size_makes_one_shape_of_many_where_images_are_read_one_by_one():
    train = [items(client()), items(client(side=6)), [(Image.new("L", (9, 7)), 0), (Image.new("L", (3, 4)), 1)]]
    module = FederatedDataModule(FederatedData(train, [client(side=8)] * 3), image_size=5)
    assert [module.prepare(batch).x.shape[2:] for batch in module.train_dataloader()] == [(1, 5, 5)]
    assert [module.prepare(batch).x.shape for batch in module.val_dataloader()] == [(12, 1, 5, 5)]


def test_image_size_makes_one_shape_of_clients_tensors_too():
    """As if each image was read: tensors of one size would be resized with the batch, as floating-point numbers."""
    parts = [TensorDataset(torch.full((4, 1, side, side), side, dtype=torch.uint8), torch.arange(4)) for side in (5, 8)]
    (batch,) = FederatedDataModule(FederatedData(parts), image_size=6, batch_size=4).train_dataloader()
    assert batch.x.shape == (2, 4, 1, 6, 6)
    assert [int(image) for client in batch.x for image in client[0].unique()] == [5, 8]


WRONG_SHAPE = "an image is float32 of shape (1, 6, 6), others are float32 of shape (1, 5, 5): use one shape"


def test_a_shape_that_differs_within_a_dataset_is_named_at_set_up():
    mixed = [(torch.zeros(1, 5, 5), 0), (torch.zeros(1, 6, 6), 1)]
    rejected(FederatedData([mixed]), re.escape(f"client 0: the training set, sample 1: {WRONG_SHAPE}"))
    rejected(
        FederatedData([mixed[:1]], public=mixed, num_classes=2), re.escape(f"the public set, sample 1: {WRONG_SHAPE}")
    )
    assert FederatedDataModule(FederatedData([[(torch.zeros(1, 5, 5).byte(), 0), (torch.zeros(1, 6, 6).byte(), 1)]]))


def test_a_shape_that_changes_after_set_up_is_named_when_it_is_met():
    changing = [(torch.zeros(1, 5, 5), 0), (torch.zeros(1, 5, 5), 1)]
    module = FederatedDataModule(FederatedData([changing]))
    module.setup()
    changing[1] = (torch.zeros(1, 6, 6), 1)
    (batch,) = module.train_dataloader()
    ((client, reason),) = batch.failed
    assert client == 0
    assert f"client 0: {WRONG_SHAPE}" in reason


def test_missing_and_empty_clients():
    empty = Subset(client(), [])
    rejected(FederatedData([]), "there are no clients")
    rejected(FederatedData([client(), empty]), "client 1 has no training samples")
    rejected(FederatedData([client()] * 2, [client()]), "2 training sets and 1 test sets")
    rejected(FederatedData([client()], public=empty), "the public set has no samples")
    rejected(FederatedData([client()], server_validation=empty), "the server's validation set has no samples")


def test_padding_that_no_image_could_have():
    with pytest.raises(ValueError, match=r"^crop_padding must be an integer >= 0 and <= 1024, got 1000000000000"):
        FederatedDataModule(FederatedData([client()]), crop_padding=10**12)


def test_class_counts_that_do_not_match():
    several = client(labels=torch.ones(4, 3))
    rejected(FederatedData([several], num_classes=5), "MultiLabel: labels have 3 entries but num_classes is 5")
    rejected(FederatedData([client()], num_classes=5), "num_classes is 6 but the data has 5", num_classes=6)
    rejected(
        FederatedData([client()], num_classes=0),
        "num_classes must be an integer >= 1 or None, got 0",
    )
    with pytest.raises(ValueError, match="num_classes is 3 but the data has 10 classes"):
        FederatedDataModule(dataset=Digits(), partition=IID(2), num_classes=3).setup()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_labels_of_different_kinds(kind):
    several = client(labels=torch.ones(4, 3))
    for other in (client(), client(labels=torch.ones(4, 2))):
        rejected(FederatedData([kind(several), kind(other)]), "client 1: a label is .* float vector of K labels")
    rejected(FederatedData([kind(client(labels=torch.full((4, 3), 1.5)))]), r"label 1\.5, outside 0\.\.1")
    rejected(FederatedData([kind(client(labels=torch.full((4, 3), torch.nan)))]), "all training labels are unknown")
    rejected(
        FederatedData([items(client(labels=torch.ones(4)))]),
        "labels are one float32 number per image: use integer",
        TypeError,
    )
    rejected(FederatedData([kind(client(labels=torch.ones(4, 3, dtype=torch.bool)))]), "labels are booleans", TypeError)
    rejected(
        FederatedData([client(), client(labels=torch.ones(4))]),
        "client 1: a label is a single float32, an earlier client's is a single int64",
    )


def test_images_that_are_none():
    rejected(FederatedData([client(dtype=torch.int64)]), "images are int64: use uint8", TypeError)
    rejected(
        FederatedData([[("cat.jpg", 1)]], num_classes=2),
        "client 0, sample 0: an image must be a tensor, an array or a PIL image, got 'cat.jpg'",
        TypeError,
    )


def test_channels_that_the_backbone_does_not_take():
    rgb = ImageConfig((3, 8, 8), (0.5,) * 3, (0.5,) * 3)
    gray = ImageConfig((1, 8, 8), (0.5,), (0.5,))
    rejected(FederatedData([client(channels=3)]), r"shape \(3, 5, 5\), but the backbone takes 1 channels", image=gray)
    rejected(FederatedData([client(channels=2)]), "backbone takes 3 channels", image=rgb)
    rejected(
        FederatedData([client(dtype=torch.float32)]),
        "float32 .*backbone takes 3 channels: convert them to 3 .* your own network for 1 as backbone",
        image=rgb,
    )
    rejected(
        FederatedData([client()], public=client(channels=3)),
        r"public images are uint8 of shape \(3, 5, 5\)",
        image=gray,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1 or 'full', got 0"),
        ({"batch_size": "all"}, "batch_size must be .*, got 'all'"),
        ({"eval_batch_size": -1}, "eval_batch_size must be an integer >= 1, got -1"),
        ({"num_workers": -1}, "num_workers must be an integer >= 0, got -1"),
        ({"image_size": 0}, "image_size must be .*, got 0"),
        ({"crop_padding": -1}, "crop_padding must be .*, got -1"),
        ({"train_limit": 5}, "data cannot be combined with options"),
        ({"dataset": Digits()}, "data cannot be combined with options"),
    ],
)
def test_options(options, words):
    rejected(FederatedData([client()]), words, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": None}, "partition must be set: pass a dataset and a partition"),
        ({"dataset": None}, "dataset must be set: pass a dataset and a partition, for example"),
        ({"public_fraction": 1.0}, r"public_fraction must be a finite number >= 0 and < 1, got 1\.0"),
        ({"validation_fraction": -0.1}, r"validation_fraction must be .*, got -0\.1"),
        ({"public_fraction": 0.5, "validation_fraction": 0.5}, "leave the clients nothing"),
        ({"public": Photographs(5), "public_fraction": 0.5}, "mutually exclusive: leave one out"),
        ({"train_limit": 0}, "train_limit must be an integer >= 1 or None, got 0"),
        ({"train_limit": 20}, "30 clients .* got 20"),
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
            match=f"clients_per_round must be an integer >= 1 and <= 3 or None, got {wrong}",
        ):
            module.configure_rounds(seed=0, clients_per_round=wrong, phases=[Phase()], image=None)
    with pytest.raises(ValueError, match="no phases"):
        module.configure_rounds(seed=0, clients_per_round=3, phases=[], image=None)


def test_augmentation_of_what_is_no_image():
    vectors = TensorDataset(torch.rand(4, 7), torch.arange(4))
    rejected(FederatedData([vectors]), "crop_padding, flip, mixup and cutmix need", flip=True)


def test_a_partition_that_leaves_a_client_empty(tmp_path):
    path = tmp_path / "partition.json"
    path.write_text('{"train": [[0], []], "test": [[0], [1]]}')
    with pytest.raises(ValueError, match="client 1 has no training samples"):
        FederatedDataModule(dataset=Digits(), partition=FromFile(str(path))).setup()


def test_labels_may_be_numpys():
    train = [[(np.zeros((5, 5), np.uint8), np.int64(label)) for label in (0, 1)]]
    assert FederatedDataModule(FederatedData(train)).plan(0).clients == (0,)


def test_large_sets_without_declared_labels_are_checked_as_they_are_read(monkeypatch):
    monkeypatch.setattr("perada.data.checked.SCAN_LIMIT", 3)
    wrong = items(client(labels=torch.tensor([0, 1, 9, 2])))
    rejected(FederatedData([wrong]), "num_classes")
    module = FederatedDataModule(FederatedData([wrong], num_classes=5))
    (batch,) = module.train_dataloader()
    assert "client 0 has the label 9, outside 0..4" in dict(batch.failed)[0]


@pytest.mark.slow
def test_what_is_advised_for_other_channels_works():
    """Floating-point images of one channel, with a network of one's own that takes them, and converted for one."""
    parts = [TensorDataset(torch.rand(4, 1, 8, 8), torch.arange(4) % 2) for _ in range(2)]
    options = {"rounds": 1, "local_steps": 1, "algorithm": "fedavg", "accelerator": "cpu", "logger": False}
    options |= {"enable_progress_bar": False, "adapter": "full"}
    own = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 8), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    named = {"pretrained": False, "image_size": 8}
    with pytest.raises(ValueError, match="convert them to 3"):
        perada.finetune("test_resnet", FederatedData(parts), **sections(**options, **named))
    assert perada.finetune(own, FederatedData(parts), **sections(**options)).num_clients == 2
    converted = [TensorDataset(x.expand(-1, 3, -1, -1), y) for x, y in (part.tensors for part in parts)]
    grey = [TensorDataset((255 * x).byte(), y) for x, y in (part.tensors for part in parts)]
    for data in (converted, grey):
        assert perada.finetune("test_resnet", FederatedData(data), **sections(**options, **named)).num_clients == 2


class Own(ImageSet):
    """What ``given`` says, for both splits; ``facts`` are its columns."""

    num_classes = 2

    def __init__(self, given=None, facts=None, train=True):
        super().__init__(train)
        self.given, self.facts = given, facts

    def _load(self):
        return self.given

    @property
    def columns(self):
        return self.facts or {}


class ColumnsAsMethod(Own):
    def columns(self):
        return {}


class Rows(Partition):
    def __init__(self, *rows):
        self.rows = rows

    def split(self, train, test, seed):
        return self.rows[0] if len(self.rows) == 1 else self.rows


class ByClinic(Partition):
    def split(self, train, test, seed):
        return [np.flatnonzero(train.columns["clinic"] == "a")], [[]]


class TwoParameters(Partition):
    def split(self, train, test):
        return [], []


PIXELS, CLASSES = torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.arange(6) % 2
GOOD = PIXELS, CLASSES


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (PIXELS, r"_load returned uint8 \(6, 3, 8, 8\); return images and labels"),
        (None, "_load returned None; return images and labels"),
        ((*GOOD, 1), "returned 3 values"),
        ((PIXELS, CLASSES[:4]), "6 images and 4 labels; return one label for each"),
        (
            ([PIXELS[0], PIXELS[0, :, 1:]], CLASSES),
            "images as .*, which is not a tensor of numbers",
        ),
        ((PIXELS.long(), CLASSES), "images are int64: use uint8"),
        ((PIXELS[0, 0], CLASSES), r"images of shape \(8, 8\); return \(N, channels, height, width\), or \(N, height"),
        (
            (PIXELS.permute(0, 2, 3, 1), CLASSES),
            r"\(6, 8, 8, 3\); its channels seem to come last: .* images.permute",
        ),
        ((PIXELS.float().permute(0, 2, 3, 1)[..., :1], CLASSES), r"\(6, 8, 8, 1\); its channels seem"),
        ((PIXELS, CLASSES.bool()), r"labels bool \(6,\)"),
        ((PIXELS, CLASSES[:, None]), r"labels int64 \(6, 1\)"),
        ((PIXELS, torch.zeros(6, 2, 2)), r"labels float32 \(6, 2, 2\), which are neither"),
        ((PIXELS, np.array(["cat"] * 6)), r"labels as <U3 \(6,\), which is not a tensor of numbers"),
        ((None, CLASSES), "no images, so Own must define __len__ and __getitem__, which read them one by one"),
    ],
)
def test_what_a_set_of_ones_own_loads(given, words):
    module = FederatedDataModule(dataset=Own(given), partition=IID(2))
    with pytest.raises((ValueError, TypeError), match=f"^Own, training split: .*{words}") as caught:
        module.setup()
    assert "\n" not in str(caught.value)


def test_numbers_as_labels_require_a_task_that_predicts_numbers():
    module = FederatedDataModule(dataset=Own((PIXELS, CLASSES.float())), partition=IID(2))
    with pytest.raises(TypeError, match=r"^labels are one float32 number per image: .* set task=Regression\(\)$"):
        module.setup()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Own(GOOD, {"clinic": ["a"] * 5}), r"Own, training split: the column 'clinic' has shape \(5,\) for 6 images"),
        (Own(GOOD, ["clinic"]), r"Own, .* columns is \['clinic'\]; return \{name: array \(N,\)\} from"),
        (ColumnsAsMethod(GOOD), "ColumnsAsMethod, .* columns is the function columns; return .* from a @property"),
        (Own(GOOD, {"hospital": ["a"] * 6}), r"Own has no column 'clinic' to divide by: it has 'hospital'"),
        (
            Own(GOOD),
            "Own has no column 'clinic' to divide by: it has none.*set its option client='clinic'",
        ),
    ],
)
def test_columns_of_a_set_of_ones_own(dataset, words):
    with pytest.raises((ValueError, TypeError), match=f"^{words}") as caught:
        FederatedDataModule(dataset=dataset, partition=ByClinic()).setup()
    assert "\n" not in str(caught.value)


def test_arrays_lists_and_grey_images_without_a_channel_axis_are_taken():
    """As the same tensors are; the array of images cannot be written to, as one that was read from a file."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    pixels.flags.writeable = False
    for labels in (CLASSES.tolist(), CLASSES.numpy().astype(np.uint8), CLASSES.int()):
        module = FederatedDataModule(dataset=Own((pixels, labels)), partition=Rows([range(6)], [[]]), batch_size=6)
        (batch,) = module.train_dataloader()
        seen = sorted((image.tolist(), int(label)) for image, label in zip(batch.x[0, :, 0], batch.y[0], strict=True))
        assert batch.x.shape == (1, 6, 1, 8, 8)
        assert seen == sorted(zip(pixels.tolist(), CLASSES.tolist(), strict=True))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            ([[0, 1], [2, 1]], [[0], [1]]),
            "returned the training row 1 for the clients 0 and 1; return two lists.* each row must occur only once",
        ),
        (([[0], [1]], [[0], [3, 3]]), "returned the test row 3 for the clients 1 and 1"),
        (
            ([[0], [6]], [[0], [1]]),
            r"returned the training row 6 for client 1, outside 0..5; .* positions in train\.labels",
        ),
        (([[0], [1]], [[-1], [1]]), r"returned the test row -1 for client 0, .* test\.labels"),
        (
            (np.arange(6), np.arange(6)),
            r"returned an array \(\) of int64 as the training rows of client 0; return two lists",
        ),
        (([[0], [1], [2]],), "returned 3 values; return two lists"),
        ((np.zeros((2, 3), int),), r"returned an array of shape \(2, 3\); return two lists"),
        (([[0], [1]], [[0]]), "returned rows of 2 clients for training and of 1 for testing"),
        (
            ([[0.0], [1.0]], [[0], [1]]),
            r"returned an array \(1,\) of float64 as the training rows of client 0; return two lists",
        ),
        (
            ([np.arange(6) < 3, [4]], [[], []]),
            r"returned an array \(6,\) of bool .np.flatnonzero makes rows of a mask. as the training rows of client 0",
        ),
        (([[[0, 1]], [[2]]], [[], []]), r"returned an array \(1, 2\) .* as the training rows of client 0"),
        (({0: [1]}, [[0]]), r"returned the training rows as \{0: \[1\]\}; return two lists"),
    ],
)
def test_rows_of_a_partition_of_ones_own(rows, words):
    with pytest.raises((ValueError, TypeError), match=rf"^Rows\.split {words}") as caught:
        FederatedDataModule(dataset=Own(GOOD), partition=Rows(*rows)).setup()
    assert "\n" not in str(caught.value)


def test_a_partition_may_give_no_test_rows_at_all():
    module = FederatedDataModule(dataset=Own(GOOD), partition=Rows([[0, 2], [1]], []))
    assert module.partition_dict()["test"] == []
    assert module.val_dataloader() == []


def test_a_partition_that_takes_other_arguments():
    words = r"^TwoParameters\.split is called with train, test and seed: .*; define split\(self, train, test, seed\)$"
    with pytest.raises(ValueError, match=words):
        FederatedDataModule(dataset=Own(GOOD), partition=TwoParameters()).setup()
