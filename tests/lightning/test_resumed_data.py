# SPDX-License-Identifier: Apache-2.0
"""A run resumes with the clients and the images that it began with, or is rejected with what differs."""

import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import perada
from perada.data import FederatedData, fingerprints
from perada.data.value_hashes import hash_of
from tests.options import sections

SIZE = 12
NAMES = ["north", "south", "east"]


def images(client, size=SIZE):
    """Images and labels of a client, from a stream of its own."""
    generator = torch.Generator().manual_seed(client)
    x = torch.randint(0, 256, (size, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return x, torch.arange(size) % 3


class Items(Dataset):
    """Images that are read one by one; ``draw`` changes an image each time it is read."""

    def __init__(self, pairs, draw=None):
        self.pairs = pairs
        self.draw = draw

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        image, label = self.pairs[index]
        return (image if self.draw is None else self.draw(image)), int(label)


def dataset(client, kind="tensors", draw=None, size=SIZE):
    x, y = images(client, size)
    if kind == "tensors":
        return TensorDataset(x, y)
    return Items(list(zip(x, y, strict=True)), draw)


def data(order=(0, 1, 2), names=None, kind="tensors", draw=None, test=(10, 11, 12), public=20, **others):
    return FederatedData(
        [dataset(client, kind, draw) for client in order],
        [dataset(client) for client in test],
        dataset(public),
        num_classes=3,
        client_names=names,
        **others,
    )


def fit(folder, given, rounds=1, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    options = {"algorithm": "ditto", "adapter": "head", "batch_size": 6, "num_classes": 3} | options
    options |= {"enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": str(folder)}
    return perada.finetune(net, given, **sections(rounds=rounds, **options))


def other_label(client):
    x, y = images(client)
    y[3] = (y[3] + 1) % 3
    return TensorDataset(x, y)


def other_pixel(client):
    x, y = images(client)
    x[5, 0, 2, 2] ^= 1
    return TensorDataset(x, y)


PRIVATE = {"privacy": {"noise_multiplier": 1.0, "delta": 1e-3}}
CLIENT_PRIVATE = {"client_privacy": {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-2}, "algorithm": "fedavg"}


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize("options", [{}, PRIVATE, CLIENT_PRIVATE], ids=["plain", "private", "client_private"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"order": (1, 0, 2), "names": ["south", "north", "east"]},
            "clients are north, south, east in this order, but",
        ),
        ({"names": ["north", "west", "east"]}, r"clients are north, south, east, but here .*'south' became 'west'"),
        ({"names": None}, "clients are north, south, east, but here they are without names"),
        ({"order": (1, 0, 2)}, r"images of clients 'north', 'south' .*client 'north' now has those of client 'south'"),
        ({"order": (0, 7, 2)}, "images of client 'south' differ from those of the checkpoint"),
    ],
    ids=["swapped", "renamed", "unnamed", "images swapped", "other images"],
)
@pytest.mark.every(30)
def test_other_clients_are_rejected(tmp_path, kind, options, change, message):
    arguments = {"names": NAMES, "kind": kind, "public": 20}
    if options:
        options = options | {"distill_steps": 0}
    fit(tmp_path, data(**arguments), **options)
    with pytest.raises(ValueError, match=message) as error:
        fit(tmp_path, data(**arguments | change), 2, ckpt_path="last", **options)
    assert "\n" not in str(error.value)
    fit(tmp_path, data(**arguments), 2, ckpt_path="last", **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": (10, 12, 11)}, r"the test images of clients 1, 2 .*client 1 now has those of client 2"),
        ({"public": 21}, "the public images differ from those"),
        ({"server_validation": dataset(31)}, "the validation images on the server differ from those"),
        ({"classes": ["a", "c", "b"]}, "its classes are a, b, c in this order"),
        ({"classes": None}, "its classes are a, b, c, but here they are without names"),
    ],
)
def test_other_tests_public_images_and_classes_are_rejected(tmp_path, change, message):
    arguments = {"classes": ["a", "b", "c"], "server_validation": dataset(30)}
    fit(tmp_path, data(**arguments))
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, data(**arguments | change), 2, ckpt_path="last")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "what"), [(other_label, "the labels of the training images"), (other_pixel, "the training images")]
)
def test_one_changed_image_or_label_is_noticed(tmp_path, change, what):
    fit(tmp_path, data())
    changed = data()
    changed.train = [changed.train[0], change(1), changed.train[2]]
    with pytest.raises(ValueError, match=f"{what} of client 1") as error:
        fit(tmp_path, changed, 2, ckpt_path="last")
    assert "resume_allow=['images']" in str(error.value)
    run = fit(tmp_path, changed, 2, ckpt_path="last", resume_allow=["images"])
    assert len(run.metrics["rounds"]) == 2


def test_other_images_cannot_be_allowed_in_a_private_run(tmp_path):
    fit(tmp_path, data(), distill_steps=0, **PRIVATE)
    with pytest.raises(ValueError, match="private run on different data"):
        fit(tmp_path, data((1, 0, 2)), 2, ckpt_path="last", distill_steps=0, resume_allow=["images"], **PRIVATE)


def test_a_checkpoint_is_not_evaluated_on_other_clients(tmp_path):
    fit(tmp_path, data(names=NAMES))
    path = next(tmp_path.glob("lightning_logs/*/checkpoints/last.ckpt"))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    loop = perada.FederatedLoop(perada.make_algorithm("ditto"))
    module = perada.FederatedClassifier(net, adapter="head")
    trainer = perada.api.make_trainer(loop, 1, accelerator="cpu", logger=False, enable_progress_bar=False)
    swapped = perada.FederatedDataModule(
        data((1, 0, 2), ["south", "north", "east"], test=(11, 10, 12)), batch_size=6, num_classes=3
    )
    with pytest.raises(ValueError, match=r"north, south, east .*data\.shifts"):
        trainer.validate(module, swapped, ckpt_path=str(path), verbose=False)


def test_more_clients_are_compared_too(tmp_path):
    fit(tmp_path, data(names=NAMES))
    more = data((3, 1, 0, 2), ["west", "south", "north", "east"], test=(13, 11, 10, 12))
    run = fit(tmp_path, more, 2, ckpt_path="last", resume_allow=["clients"])
    assert run.num_clients == 4
    for folder in tmp_path.glob("lightning_logs/version_1"):
        folder.rename(tmp_path / "other")
    mixed = data((3, 0, 1, 2), ["west", "south", "north", "east"], test=(13, 11, 10, 12))
    with pytest.raises(ValueError, match="images or labels of client north"):
        fit(tmp_path, mixed, 2, ckpt_path="last", resume_allow=["clients"])


@pytest.mark.every(3)
@pytest.mark.parametrize("draw", ["own generator", "global generator", "counter"])
def test_datasets_that_draw_at_random_resume(tmp_path, draw):
    """With a generator of its own nobody knows the images of another session; the labels are still compared."""
    calls = iter(range(10**6))
    own = random.Random()

    def drawn(image):
        if draw == "own generator":
            return image.flip(-1) if own.random() < 0.5 else image
        if draw == "global generator":
            return image.flip(-1) if random.random() < 0.5 else image
        return image + next(calls) % 7

    fit(tmp_path, data(kind="items", draw=drawn))
    fit(tmp_path, data(kind="items", draw=drawn), 2, ckpt_path="last")
    changed = data(kind="items", draw=drawn)
    changed.train = [changed.train[0], Items(list(zip(*other_label(1).tensors, strict=True)), drawn), changed.train[2]]
    with pytest.raises(ValueError, match=r"labels .*client 1"):
        fit(tmp_path, changed, 2, ckpt_path="last")


class Counting(Items):
    read = 0

    def __getitem__(self, index):
        Counting.read += 1
        return super().__getitem__(index)


def test_of_many_items_only_some_are_read(monkeypatch):
    monkeypatch.setattr(fingerprints, "ITEMS_LIMIT", 40)
    x, y = images(0, 500)
    given = FederatedData([Counting(list(zip(x, y, strict=True))) for _ in range(2)], num_classes=3)
    module = perada.FederatedDataModule(given, num_classes=3)
    module.setup()
    before = Counting.read
    assert module.fingerprint["train"]["images"] is not None
    assert Counting.read - before == 2 * (20 + fingerprints.REPEATED_ITEMS)


def test_of_a_large_tensor_the_first_and_the_last_image_are_hashed(monkeypatch):
    monkeypatch.setattr(fingerprints, "BYTES_LIMIT", 16 * 4)  # of four images of 16 bytes
    x, y = images(0, 500)

    def hashes(pixels):
        module = perada.FederatedDataModule(FederatedData([TensorDataset(pixels, y)], num_classes=3), num_classes=3)
        return module.fingerprint["train"]["images"]

    first = x.clone()
    last = x.clone()
    first[0] += 1
    last[-1] += 1
    assert len({*hashes(x), *hashes(first), *hashes(last)}) == 3


def write(folder, client, name, shade):
    from PIL import Image

    path = folder / client / "cat" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 10 * shade % 255, 7)).save(path)


def test_image_files_with_other_content_are_rejected(tmp_path):
    def datamodule():
        sets = perada.data.Images(str(tmp_path / "images"), size=8, classes=["cat", "dog"])
        return perada.FederatedDataModule(dataset=sets, partition=perada.data.ByDomain("client"), batch_size=4)

    for client in ("a", "b"):
        for number in range(10):
            write(tmp_path / "images", client, f"{number}.png", number + 20 * (client == "b"))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 8 * 3, 2))
    options = {"adapter": "head", "algorithm": "fedavg", "accelerator": "cpu", "enable_progress_bar": False}
    options["default_root_dir"] = str(tmp_path)
    perada.finetune(net, datamodule(), **sections(rounds=1, **options))
    # The names of the files and what is drawn as test images by their content stay; a client's images do not.
    before = datamodule().fingerprint
    for number in range(10):
        write(tmp_path / "images", "b", f"{number}.png", number + 50)
    assert datamodule().fingerprint["train"]["images"] != before["train"]["images"]
    with pytest.raises(ValueError, match="belongs to"):
        perada.finetune(net, datamodule(), **sections(rounds=2, ckpt_path="last", **options))


def test_of_many_clients_a_bounded_number_is_read(monkeypatch):
    """Labels are compared of all whose labels are known without reading."""
    read = []

    class Counted(Items):
        def __init__(self, client):
            super().__init__(list(zip(*images(client), strict=True)))
            self.client = client

        def __getitem__(self, index):
            read.append(self.client)
            return super().__getitem__(index)

    monkeypatch.setattr(fingerprints, "CLIENTS_LIMIT", 3)
    module = perada.FederatedDataModule(FederatedData([Counted(client) for client in range(7)], num_classes=3))
    module.setup()
    read.clear()
    former = module.fingerprint
    assert sorted(set(read)) == [0, 3, 6]
    changed = {**former, "train": {**former["train"], "images": [*former["train"]["images"][:3], "x", "", "", "y"]}}
    text = fingerprints.difference_in_content(former, changed)
    assert text == "the training images of clients 3, 6 differ from those of the checkpoint"


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize("place", [0, -1])
def test_of_each_of_many_clients_the_first_and_the_last_image_are_hashed(monkeypatch, kind, place):
    """Also where each client's share of the limit is less than one image."""
    monkeypatch.setattr(fingerprints, "ITEMS_LIMIT", 2)
    monkeypatch.setattr(fingerprints, "BYTES_LIMIT", 2 * 16)

    def hashes(pairs):
        clients = [TensorDataset(x, y) if kind == "tensors" else Items(list(zip(x, y, strict=True))) for x, y in pairs]
        module = perada.FederatedDataModule(FederatedData(clients, num_classes=3), num_classes=3)
        return module.fingerprint["train"]["images"]

    pairs = [images(client) for client in range(4)]
    before = hashes(pairs)
    pairs[2][0][place] += 1
    changed = [client for client, value in enumerate(hashes(pairs)) if value != before[client]]
    assert changed == [2]


def test_equal_bytes_of_another_shape_or_format_are_other_images():
    flat = torch.arange(16, dtype=torch.int16)
    formats = [flat, flat.view(4, 4), flat.view(2, 8), flat.view(torch.float16), flat.view(torch.bfloat16)]
    formats.append(flat.view(torch.uint8))
    assert len({hash_of(values).digest() for values in formats}) == len(formats)


def test_the_files_that_are_hashed_are_the_clients_own(tmp_path):
    def sets():
        return perada.data.Images(str(tmp_path / "images"), size=8, classes=["cat", "dog"])

    def hashes():
        clients = FederatedData([Subset(sets(), [2, 3]), Subset(sets(), [0, 1])], num_classes=2)
        return perada.FederatedDataModule(clients, num_classes=2, image_size=8).fingerprint["train"]["images"]

    for number in range(10):
        write(tmp_path / "images", "a", f"{number}.png", number)
    before = hashes()
    paths = list(sets().manifest.paths)
    for shade in range(50, 100):
        write(tmp_path / "images", "a", Path(paths[3]).name, shade)
        if list(sets().manifest.paths) == paths:  # what is a test image is drawn by its content
            break
    assert [new == old for new, old in zip(hashes(), before, strict=True)] == [False, True]


def test_which_clients_differ_is_named_among_those_that_were_read():
    def fingerprint(*hashes):
        return {"train": {"labels": None, "images": list(hashes)}}

    def difference(former, here):
        return fingerprints.difference_in_content(fingerprint(*former), fingerprint(*here))

    unread = fingerprints.NOT_READ
    # A client that was not read this time has no images that could be another's.
    assert (
        difference(["a", unread], [unread, unread])
        == "the training images of client 0 differ from those of the checkpoint"
    )
    moved = "the training images of client 1 differ from those of the checkpoint (client 1 now has those of client 0)"
    assert difference(["a", "b"], ["a", "a"]) == moved
    assert difference(["a"], ["a", "b"]) == "the training images of client 1 differ from those of the checkpoint"


def test_images_that_are_drawn_from_the_global_generator_are_compared():
    def hashes(shift):
        def draw(image):
            return image + torch.randint(0, 2, image.shape, dtype=torch.uint8) + shift

        return perada.FederatedDataModule(data(kind="items", draw=draw), num_classes=3).fingerprint["train"]["images"]

    assert hashes(0) is not None
    assert hashes(0) == hashes(0)
    assert hashes(0) != hashes(1)


@pytest.mark.parametrize("what", ["labels", "images"])
def test_a_clients_training_data_are_its_labels_and_its_images(what):
    former = {"labels": ["a", "b"], "images": ["c", "d"]}
    here = {"labels": ["a", "b"], "images": ["c", "d"]}
    assert fingerprints.first_changed_client(former, here) is None
    here[what][1] = "other"
    assert fingerprints.first_changed_client(former, here) == 1


CLIENT_SIZES = [20, 16, 30, 12, 14]
"""Numbers of images of the first clients, and of those that join them."""


def make_module(kind, folder, clients, changed_client=None):
    """Return the data module of some clients; the first image of one of them may have changed."""
    if kind == "files":
        for client in clients:
            for number in range(CLIENT_SIZES[client]):
                shade = 200 if client == changed_client and number == 0 else number + 20 * client
                write(folder / "train", str(client), f"{number}.png", shade)
            write(folder / "test", str(client), "0.png", 255)
        folder_set = perada.data.Images(
            str(folder), layout="{split}/{client}/{class}/*", size=8, classes=["cat", "dog"]
        )
        return perada.FederatedDataModule(dataset=folder_set, partition=perada.data.ByDomain("client"))
    datasets = []
    for client in clients:
        x, y = images(client, CLIENT_SIZES[client])
        if client == changed_client:
            x[0, 0, 0, 0] ^= 1
        joins_with_items = kind == "tensors, then items" and client >= 2
        if kind == "items" or joins_with_items:
            datasets.append(Items(list(zip(x, y, strict=True))))
        else:
            datasets.append(TensorDataset(x, y))
    return perada.FederatedDataModule(FederatedData(datasets, num_classes=3), num_classes=3)


@pytest.mark.parametrize(
    ("kind", "limit", "value", "num_former"),
    [
        ("items", "fingerprints.ITEMS_LIMIT", 20, 2),
        ("items", "fingerprints.CLIENTS_LIMIT", 3, 4),
        ("items", "labels.SCAN_LIMIT", 40, 2),
        ("files", "fingerprints.FILES_LIMIT", 20, 2),
        ("tensors", "fingerprints.BYTES_LIMIT", 20 * 16, 2),
        ("tensors, then items", "fingerprints.ITEMS_LIMIT", 20, 2),
    ],
)
def test_clients_that_join_do_not_change_what_is_hashed_of_the_others(
    monkeypatch, tmp_path, kind, limit, value, num_former
):
    monkeypatch.setattr(f"perada.data.{limit}", value)
    former_clients = list(range(num_former))
    more_clients = list(range(num_former + 1))
    former = make_module(kind, tmp_path / "former", former_clients).fingerprint["train"]

    def find_changed_client(folder, changed_client):
        module = make_module(kind, tmp_path / folder, more_clients, changed_client)
        return fingerprints.first_changed_client(
            former, fingerprints.training_fingerprint(module.checked, former_clients)
        )

    assert former["images"] is not None
    assert find_changed_client("more", None) is None
    last_client = num_former - 1
    assert find_changed_client("changed", last_client) == last_client
    # The client that joins is compared with nothing.
    assert find_changed_client("other", num_former) is None


def test_a_run_resumes_with_more_clients_beyond_the_limit_of_items(monkeypatch, tmp_path):
    monkeypatch.setattr(fingerprints, "ITEMS_LIMIT", 9)
    fit(tmp_path, data(kind="items", names=NAMES))
    order = (3, 1, 0, 2)
    names = ["west", "south", "north", "east"]
    more = data(order, names, kind="items", test=(13, 11, 10, 12))
    run = fit(tmp_path, more, 2, ckpt_path="last", resume_allow=["clients"])
    assert run.num_clients == 4
