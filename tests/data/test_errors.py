# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs: one line at set-up that says what, why, and what to do."""

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
from tests.rejections import raises_naming, rejects


def client(size=4, channels=1, side=5, labels=None, dtype=torch.uint8):
    return TensorDataset(
        torch.zeros(size, channels, side, side, dtype=dtype), torch.arange(size) if labels is None else labels
    )


def items(dataset):
    return [dataset[index] for index in range(len(dataset))]


class Declared(list):
    """A set that declares its labels, as torchvision's do."""


def declare_labels(dataset):
    declaring = Declared(items(dataset))
    declaring.targets = [int(label) for _, label in dataset]
    return declaring


KINDS = [
    lambda dataset: dataset,
    items,
    declare_labels,
    lambda dataset: Subset(declare_labels(dataset), range(len(dataset))),
]


def assert_rejected(data, *facts, error=ValueError, image=None, **options):
    with raises_naming(error, *facts):
        FederatedDataModule(data, **options).configure_rounds(
            seed=0, clients_per_round=None, phases=[Phase()], image_config=image
        )


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", [-1, 7])
def test_labels_out_of_range(kind, label):
    wrong = kind(client(labels=torch.tensor([0, 1, label, 2])))
    right = client() if kind is KINDS[0] else kind(client())
    facts = [f"label {label}", "outside 0..4", "num_classes (now 5)"]
    assert_rejected(FederatedData([right, wrong], num_classes=5), "client 1", "training", *facts)
    assert_rejected(FederatedData([client()] * 2, [client(), wrong], num_classes=5), "client 1", "test", *facts)
    assert_rejected(FederatedData([client()], server_validation=wrong, num_classes=5), "server", "validation", *facts)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_another_shape(kind):
    image = kind(client())
    for wrong, facts in (
        (client(side=6), ["(1, 6, 6)", "(1, 5, 5)", "image_size"]),
        (client(channels=3), ["(3, 5, 5)"]),
        (client(dtype=torch.float32), ["float32", "uint8"]),
    ):
        assert_rejected(FederatedData([image, kind(wrong)]), "client 1", *facts)
    assert_rejected(FederatedData([image], [kind(client(side=6))]), "client 0", "test set", "(1, 6, 6)")


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


def test_a_shape_that_differs_within_a_dataset_is_named_at_set_up():
    shapes = ["sample 1", "float32", "(1, 6, 6)", "(1, 5, 5)"]
    mixed = [(torch.zeros(1, 5, 5), 0), (torch.zeros(1, 6, 6), 1)]
    assert_rejected(FederatedData([mixed]), "client 0", "training set", *shapes)
    assert_rejected(FederatedData([mixed[:1]], public=mixed, num_classes=2), "public set", *shapes)
    assert FederatedDataModule(FederatedData([[(torch.zeros(1, 5, 5).byte(), 0), (torch.zeros(1, 6, 6).byte(), 1)]]))


def test_a_shape_that_changes_after_set_up_is_named_when_it_is_met():
    changing = [(torch.zeros(1, 5, 5), 0), (torch.zeros(1, 5, 5), 1)]
    module = FederatedDataModule(FederatedData([changing]))
    module.setup()
    changing[1] = (torch.zeros(1, 6, 6), 1)
    (batch,) = module.train_dataloader()
    ((client, reason),) = batch.failed
    assert client == 0
    assert "client 0: " in reason
    assert reason.index("(1, 6, 6)") < reason.index("(1, 5, 5)")


def test_missing_and_empty_clients():
    empty = Subset(client(), [])
    assert_rejected(FederatedData([]), "no clients", "FederatedData.train")
    assert_rejected(FederatedData([client(), empty]), "client 1", "no training samples")
    assert_rejected(FederatedData([client()] * 2, [client()]), "2 training sets", "1 test sets")
    assert_rejected(FederatedData([client()], public=empty), "public set", "no samples")
    assert_rejected(FederatedData([client()], server_validation=empty), "server's validation set", "no samples")


def test_class_counts_that_do_not_match():
    several = client(labels=torch.ones(4, 3))
    assert_rejected(FederatedData([several], num_classes=5), "MultiLabel", "3 entries", "num_classes is 5")
    assert_rejected(FederatedData([client()], num_classes=5), "num_classes is 6", "5 classes", num_classes=6)
    with rejects("num_classes", 0):
        FederatedDataModule(FederatedData([client()], num_classes=0)).setup()
    with raises_naming(ValueError, "num_classes is 3", "10 classes"):
        FederatedDataModule(dataset=Digits(), partition=IID(2), num_classes=3).setup()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_labels_of_different_kinds(kind):
    several = client(labels=torch.ones(4, 3))
    for other in (client(), client(labels=torch.ones(4, 2))):
        assert_rejected(FederatedData([kind(several), kind(other)]), "client 1", "a label", "float vector of K labels")
    assert_rejected(FederatedData([kind(client(labels=torch.full((4, 3), 1.5)))]), "label 1.5", "outside 0..1")
    assert_rejected(
        FederatedData([kind(client(labels=torch.full((4, 3), torch.nan)))]), "all training labels", "unknown"
    )
    assert_rejected(FederatedData([items(client(labels=torch.ones(4)))]), "float32", "integers", error=TypeError)
    booleans = torch.ones(4, 3, dtype=torch.bool)
    assert_rejected(FederatedData([kind(client(labels=booleans))]), "booleans", "labels.long()", error=TypeError)
    assert_rejected(
        FederatedData([client(), client(labels=torch.ones(4))]), "client 1", "single float32", "single int64"
    )


def test_images_that_are_none():
    assert_rejected(FederatedData([client(dtype=torch.int64)]), "int64", "uint8", error=TypeError)
    paths = [[("cat.jpg", 1)]]
    assert_rejected(FederatedData(paths, num_classes=2), "client 0", "sample 0", "'cat.jpg'", error=TypeError)


def test_channels_that_the_backbone_does_not_take():
    rgb = ImageConfig((3, 8, 8), (0.5,) * 3, (0.5,) * 3)
    gray = ImageConfig((1, 8, 8), (0.5,), (0.5,))
    assert_rejected(FederatedData([client(channels=3)]), "training images", "(3, 5, 5)", "takes 1 channels", image=gray)
    assert_rejected(FederatedData([client(channels=2)]), "takes 3 channels", image=rgb)
    assert_rejected(
        FederatedData([client(dtype=torch.float32)]),
        *("float32", "takes 3 channels", "convert them to 3", "your own network for 1 as backbone"),
        image=rgb,
    )
    assert_rejected(FederatedData([client()], public=client(channels=3)), "public images", "(3, 5, 5)", image=gray)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 0),
        ("batch_size", "all"),
        ("eval_batch_size", -1),
        ("num_workers", -1),
        ("image_size", 0),
        ("crop_padding", -1),
        ("crop_padding", 10**12),
    ],
)
def test_options(option, value):
    with rejects(option, value):
        FederatedDataModule(FederatedData([client()]), **{option: value})


@pytest.mark.parametrize("option", [{"train_limit": 5}, {"dataset": Digits()}])
def test_options_of_a_division_beside_data(option):
    assert_rejected(FederatedData([client()]), "data cannot be combined", "FederatedData", **option)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("option", "value"),
    [("public_fraction", 1.0), ("validation_fraction", -0.1), ("train_limit", 0)],
)
def test_options_of_a_division(option, value):
    with rejects(option, value):
        FederatedDataModule(dataset=Digits(), partition=Dirichlet(30), **{option: value}).setup()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"partition": None}, ["partition must be set", "dataset"]),
        ({"dataset": None}, ["dataset must be set", "partition"]),
        ({"public_fraction": 0.5, "validation_fraction": 0.5}, ["public_fraction", "validation_fraction"]),
        ({"public": Photographs(5), "public_fraction": 0.5}, ["public", "public_fraction", "mutually exclusive"]),
        ({"train_limit": 20}, ["30 clients", 20]),
        ({"dataset": Photographs(50)}, ["no labels"]),
    ],
)
def test_options_of_a_division_that_do_not_go_together(options, facts):
    with raises_naming(ValueError, *facts):
        FederatedDataModule(**{"dataset": Digits(), "partition": Dirichlet(30)} | options).setup()


def test_more_clients_a_round_than_there_are():
    module = FederatedDataModule(FederatedData([client()] * 3))
    for wrong in (4, 0, -1):
        with rejects("clients_per_round", wrong):
            module.configure_rounds(seed=0, clients_per_round=wrong, phases=[Phase()], image_config=None)
    with raises_naming(ValueError, "no phases"):
        module.configure_rounds(seed=0, clients_per_round=3, phases=[], image_config=None)


def test_augmentation_of_what_is_no_image():
    vectors = TensorDataset(torch.rand(4, 7), torch.arange(4))
    assert_rejected(FederatedData([vectors]), "(7,)", "crop_padding, flip, mixup and cutmix", flip=True)


def test_a_partition_that_leaves_a_client_empty(tmp_path):
    path = tmp_path / "partition.json"
    path.write_text('{"train": [[0], []], "test": [[0], [1]]}')
    with raises_naming(ValueError, "client 1", "no training samples"):
        FederatedDataModule(dataset=Digits(), partition=FromFile(str(path))).setup()


def test_labels_may_be_numpys():
    train = [[(np.zeros((5, 5), np.uint8), np.int64(label)) for label in (0, 1)]]
    assert FederatedDataModule(FederatedData(train)).plan(0).clients == (0,)


def test_large_sets_without_declared_labels_are_checked_as_they_are_read(monkeypatch):
    monkeypatch.setattr("perada.data.labels.SCAN_LIMIT", 3)
    wrong = items(client(labels=torch.tensor([0, 1, 9, 2])))
    assert_rejected(FederatedData([wrong]), "num_classes")
    module = FederatedDataModule(FederatedData([wrong], num_classes=5))
    (batch,) = module.train_dataloader()
    assert "client 0 has the label 9, outside 0..4" in dict(batch.failed)[0]


@pytest.mark.slow
def test_what_is_advised_for_other_channels_works():
    """Floating-point images of one channel, with a network of one's own that takes them, and converted for one."""
    parts = [TensorDataset(torch.rand(4, 1, 8, 8), torch.arange(4) % 2) for _ in range(2)]
    options = {"rounds": 1, "local_steps": 1, "algorithm": "fedavg", "accelerator": "cpu", "logger": False}
    options |= {"enable_progress_bar": False, "adapter": "full"}
    custom_network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 8), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    named = {"pretrained": False, "image_size": 8}
    with pytest.raises(ValueError, match=r"to 3\b"):
        perada.finetune("test_resnet", FederatedData(parts), **sections(**options, **named))
    assert perada.finetune(custom_network, FederatedData(parts), **sections(**options)).num_clients == 2
    converted = [TensorDataset(x.expand(-1, 3, -1, -1), y) for x, y in (part.tensors for part in parts)]
    grey = [TensorDataset((255 * x).byte(), y) for x, y in (part.tensors for part in parts)]
    for data in (converted, grey):
        assert perada.finetune("test_resnet", FederatedData(data), **sections(**options, **named)).num_clients == 2


class Own(ImageSet):
    """Images and labels that both splits have, and their columns."""

    num_classes = 2

    def __init__(self, content=None, columns=None):
        super().__init__()
        self.content = content
        self.columns_by_name = columns or {}

    def _load_images(self):
        return self.content

    @property
    def columns(self):
        return self.columns_by_name


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


PIXELS = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
CLASSES = torch.arange(6) % 2
GOOD = PIXELS, CLASSES


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (PIXELS, ["uint8", "(6, 3, 8, 8)"]),
        (None, [None]),
        ((*GOOD, 1), ["3 values"]),
        ((PIXELS, CLASSES[:4]), ["6 images", "4 labels"]),
        (([PIXELS[0], PIXELS[0, :, 1:]], CLASSES), ["images", "(3, 8, 8)", "(3, 7, 8)"]),
        ((PIXELS.long(), CLASSES), ["images", "int64", "uint8"]),
        ((PIXELS[0, 0], CLASSES), ["images", "(8, 8)", "(N, channels, height, width)", "(N, height"]),
        ((PIXELS.permute(0, 2, 3, 1), CLASSES), ["(6, 8, 8, 3)", "images.permute"]),
        ((PIXELS.float().permute(0, 2, 3, 1)[..., :1], CLASSES), ["(6, 8, 8, 1)", "images.permute"]),
        ((PIXELS, CLASSES.bool()), ["labels", "bool", "(6,)"]),
        ((PIXELS, CLASSES[:, None]), ["labels", "int64", "(6, 1)"]),
        ((PIXELS, torch.zeros(6, 2, 2)), ["labels", "float32", "(6, 2, 2)"]),
        ((PIXELS, np.array(["cat"] * 6)), ["labels", "<U3", "(6,)"]),
        ((None, CLASSES), ["no images", "__len__", "__getitem__"]),
    ],
)
def test_what_a_set_of_ones_own_loads(content, facts):
    module = FederatedDataModule(dataset=Own(content), partition=IID(2))
    with raises_naming((ValueError, TypeError), "Own, training split", *facts):
        module.setup()


def test_numbers_as_labels_require_a_task_that_predicts_numbers():
    module = FederatedDataModule(dataset=Own((PIXELS, CLASSES.float())), partition=IID(2))
    with raises_naming(TypeError, "float32", "task=Regression()"):
        module.setup()


@pytest.mark.parametrize(
    ("dataset", "facts"),
    [
        (Own(GOOD, {"clinic": ["a"] * 5}), ["Own, training split", "'clinic'", "(5,)", "6 images"]),
        (Own(GOOD, ["clinic"]), ["Own, training split", "columns is ['clinic']"]),
        (ColumnsAsMethod(GOOD), ["ColumnsAsMethod, training split", "function columns", "@property"]),
        (Own(GOOD, {"hospital": ["a"] * 6}), ["Own", "'clinic'", "'hospital'"]),
        (Own(GOOD), ["Own", "'clinic'", "none", "client='clinic'"]),
    ],
)
def test_columns_of_a_set_of_ones_own(dataset, facts):
    with raises_naming((ValueError, TypeError), *facts):
        FederatedDataModule(dataset=dataset, partition=ByClinic()).setup()


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
    ("rows", "facts"),
    [
        (([[0, 1], [2, 1]], [[0], [1]]), ["training row 1", "clients 0 and 1"]),
        (([[0], [1]], [[0], [3, 3]]), ["test row 3", "clients 1 and 1"]),
        (([[0], [6]], [[0], [1]]), ["training row 6", "client 1", "outside 0..5", "train.labels"]),
        (([[0], [1]], [[-1], [1]]), ["test row -1", "client 0", "test.labels"]),
        ((np.arange(6), np.arange(6)), ["array () of int64", "training rows of client 0"]),
        (([[0], [1], [2]],), ["3 values"]),
        ((np.zeros((2, 3), int),), ["array of shape (2, 3)"]),
        (([[0], [1]], [[0]]), ["2 clients for training", "1 for testing"]),
        (([[0.0], [1.0]], [[0], [1]]), ["array (1,) of float64", "training rows of client 0"]),
        (([np.arange(6) < 3, [4]], [[], []]), ["array (6,) of bool", "np.flatnonzero", "training rows of client 0"]),
        (([[[0, 1]], [[2]]], [[], []]), ["array (1, 2)", "training rows of client 0"]),
        (({0: [1]}, [[0]]), ["training rows", "{0: [1]}"]),
    ],
)
def test_rows_of_a_partition_of_ones_own(rows, facts):
    with raises_naming((ValueError, TypeError), "Rows.split returned", *facts):
        FederatedDataModule(dataset=Own(GOOD), partition=Rows(*rows)).setup()


def test_a_partition_may_give_no_test_rows_at_all():
    module = FederatedDataModule(dataset=Own(GOOD), partition=Rows([[0, 2], [1]], []))
    assert module.partition_dict()["test"] == []
    assert module.val_dataloader() == []


def test_a_partition_that_takes_other_arguments():
    with raises_naming(ValueError, "TwoParameters.split", "split(self, train, test, seed)"):
        FederatedDataModule(dataset=Own(GOOD), partition=TwoParameters()).setup()
