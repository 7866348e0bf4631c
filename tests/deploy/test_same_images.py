# SPDX-License-Identifier: Apache-2.0
"""A site trains on, holds out and scores the images that its client has in the simulation, whatever its place is."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.data import (
    ByDomain,
    Digits,
    Dirichlet,
    FederatedData,
    FederatedDataModule,
    Images,
    ImageTable,
    UnlabelledFolder,
)
from perada.deploy.protocol import Request
from perada.deploy.site.client import Client, single_client_data
from perada.deploy.site.file import Limits, read_site
from perada.deploy.transport import LocalTransport
from perada.tasks import Classification, MultiLabel

from .parties import Parties
from .test_classes import CLASSES, naming
from .test_site_file import RECIPE

CLIENTS = (0, 1, 3)


def write_site(folder, recipe, data):
    """A site with ``data`` that has a recipe, which may say no seed."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    content = {"name": "a", "recipes": [{"recipe": "recipe.yaml"}], "data": data}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    return site_recipe(folder / "recipe.yaml", read_site(folder / "site.yaml"))


def served_images(module, client):
    """The images that a client trains on, and those that it is scored on."""
    module.setup()
    row = torch.arange(module.train_sizes[client])
    kept = module.checked.train.take(torch.full_like(row, client), row)
    scored = [(x[owner == client], y[owner == client]) for x, y, owner in module.val_dataloader()]
    return kept, tuple(map(torch.cat, zip(*scored, strict=True)))


def assert_same_images(simulated, site, client):
    for expected, results in zip(served_images(simulated, client), served_images(site, 0), strict=True):
        for one, other in zip(expected, results, strict=True):
            assert torch.equal(one, other)


PARTITION = {"class_path": "Dirichlet", "init_args": {"num_clients": 4, "alpha": 0.5}}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("limits", [{}, {"train_limit": 300, "test_limit": 90}])
@pytest.mark.every(11)
def test_a_client_of_the_recipes_partition_has_its_images(client, evaluate_on, seed, limits, tmp_path):
    """The recipe's seed and limits draw the partition, though site.yaml says neither."""
    data = {"dataset": "Digits", "partition": PARTITION, "client_validation": 0.3, "evaluate_on": evaluate_on}
    data |= {"image_size": 32, "batch_size": 8} | limits | ({} if seed is None else {"seed": seed})
    site_options = {"dataset": "Digits", "partition": PARTITION, "client": client}
    site = write_site(tmp_path / "site", RECIPE | {"data": data}, site_options).data
    options = {"client_validation": 0.3, "evaluate_on": evaluate_on, "seed": seed or 0, "image_size": 32} | limits
    simulated = FederatedDataModule(dataset=Digits(), partition=Dirichlet(4, 0.5), **options)
    assert_same_images(simulated, site, client)


def test_a_seed_of_the_sites_own_counts(tmp_path):
    data = RECIPE["data"] | {"partition": PARTITION, "seed": 7}
    site_options = {"dataset": "Digits", "partition": PARTITION, "seed": 3, "client": 1, "train_limit": 200}
    site = write_site(tmp_path / "site", RECIPE | {"data": data}, site_options).data
    options = {"seed": 3, "train_limit": 200, "test_limit": data["test_limit"], "image_size": 32}
    assert_same_images(FederatedDataModule(dataset=Digits(), partition=Dirichlet(4, 0.5), **options), site, 1)


class Noisy(Dataset):
    """Images to which the dataset itself adds noise, as random transforms do, also where it is scored."""

    def __init__(self, size, start):
        self.size, self.start, self.targets = size, start, torch.arange(size) % 3

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((1, 8, 8), (self.start + index) / 400) + torch.randn(1, 8, 8), int(self.targets[index])


def in_memory(sizes):
    random = torch.Generator().manual_seed(0)
    return [TensorDataset(torch.randn(n, 1, 8, 8, generator=random), torch.arange(n) % 3) for n in sizes]


def one_by_one(sizes):
    return [Noisy(size, 100 * place) for place, size in enumerate(sizes)]


def subsets(sizes):
    (everything,) = in_memory((sum(sizes),))
    ends = np.cumsum(sizes)
    return [Subset(everything, range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


SIZES = (12, 12, 30, 12)


@pytest.mark.parametrize("kind", [in_memory, one_by_one, subsets])
def test_what_a_client_holds_out_does_not_depend_on_its_place(kind):
    federation = FederatedData(kind(SIZES), kind(SIZES))
    options = {"client_validation": 0.25, "seed": 5}
    simulated = FederatedDataModule(federation, **options)
    simulated.setup()
    kept = [trained_on(simulated, client) for client in range(len(SIZES))]
    for client in range(len(SIZES)):
        site = FederatedDataModule(single_client_data(federation, client), **options)
        site.setup()
        assert trained_on(site, 0) == kept[client]
    back = FederatedDataModule(FederatedData(federation.train[::-1], federation.test[::-1]), **options)
    back.setup()
    assert [trained_on(back, client) for client in range(len(SIZES))] == kept[::-1]
    if kind is one_by_one:  # of equal sizes, and yet drawn apart
        assert len({tuple(kept[client]) for client in (0, 1, 3)}) == 3


def trained_on(module, client):
    """What tells the images that a client trains on: their positions in its dataset, or a number of each."""
    store = module.checked.train
    if hasattr(store, "datasets"):
        return list(store.datasets[client].indices)
    rows = store.table[store.starts[client] :][: store.sizes[client]]
    return store.images[rows].flatten(1).sum(1).tolist()


AUGMENTED = {"crop_padding": 2, "flip": True}
BALANCED = AUGMENTED | {"sampling": "balanced"}


@pytest.mark.parametrize("kind", [in_memory, one_by_one])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep"])
@pytest.mark.parametrize("number", [2, 0, 3])
@pytest.mark.parametrize("data_options", [AUGMENTED, BALANCED], ids=["uniform", "balanced"])
@pytest.mark.every(7)
def test_batches_and_test_images_are_those_of_the_simulation(kind, algorithm, number, data_options, tiny, tmp_path):
    """Also what datasets and augmentation draw, in later phases, and where nobody tells the site the others' sizes."""
    parties = Parties(tiny, tmp_path, algorithm, sizes=SIZES, data=data_options)
    parties.whole = FederatedData(kind(SIZES), kind((5, 9, 7, 6)), in_memory((8,))[0])
    loop = parties.loop()
    module = parties.module()
    data = parties.data(parties.whole)
    parties.rounds = 1
    parties.trainer(loop).fit(module, datamodule=data)
    client = Client(parties.recipe(number), Limits())
    for round in (0, 3):
        order = Request("train", "0" * 32, client.recipe.digest, round=round, client=number, clients=4)
        plan = data.plan_for(range(4), round)
        expected = []
        for batch in map(data.prepare, data.cohort_loader(plan)):
            if number in batch.clients:
                place = batch.clients.index(number)
                expected.append((batch.x[place, : batch.counts[place]], batch.y[place, : batch.counts[place]]))
        actual = [(batch.x[0], batch.y[0]) for batch in client.batches(client.plan(order))]
        assert len(actual) == len(expected) > 1
        for one, other in zip(expected, actual, strict=True):
            assert all(map(torch.equal, one, other))
    batches = [data.prepare(batch) for batch in data.val_dataloader()]
    x, y, owner = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("x", "y", "owner"))
    own = [torch.cat(parts) for parts in zip(*client.test_batches(number), strict=True)]
    assert torch.equal(own[0], x[owner == number]) and torch.equal(own[1], y[owner == number])


@pytest.mark.parametrize("algorithm", ["fedrep", pytest.param("fedbabu", marks=pytest.mark.slow)])
def test_a_site_that_tells_no_sizes_trains_the_simulations_bits(algorithm, tiny, tmp_path):
    """Dropout and augmentation of a later phase do not depend on how long others train in an earlier one."""
    parties = Parties(tiny, tmp_path, algorithm, rounds=1, sizes=(6, 3, 14), data=AUGMENTED)
    loop, module = parties.simulated()
    workers = parties.workers(may_send=())
    coordinator = parties.coordinator(LocalTransport(workers))
    coordinator.run()
    assert loop.history
    for key, value in module.federation.global_state.items():
        assert torch.equal(coordinator.server.global_state[key], value), key


def draw_folder(root, clients, size=(20, 14)):
    """A folder of clients with folders of classes, of grey images with 16 bits that all differ."""
    for client in range(clients):
        for number in range(18):
            path = root / f"h{client}" / CLASSES[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([client, number]).integers(0, 1000, size[::-1], dtype=np.uint16)
            Image.fromarray(pixels).save(path)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "options", [{"size": 32, "gray": True, "full_scale": 1023.0, "test_share": 0.4, "seed": 6}, {}]
)
@pytest.mark.parametrize("data", [{"image_size": 24, "client_validation": 0.3}, {"image_size": 24}, {}])
def test_a_folder_is_read_as_the_recipes_is(options, data, tmp_path):
    """Pixels, too: in the size of the recipe's set first, then in that of the data module."""
    draw_folder(tmp_path / "all", 3)
    if not options:
        options = {"size": 16}
    recipe = naming()
    recipe["data"]["dataset"]["init_args"] |= options
    recipe["data"] = {key: value for key, value in recipe["data"].items() if key != "image_size"} | data
    images = Images(str(tmp_path / "all"), "{client}/{class}/*", classes=CLASSES, **options)
    simulated = FederatedDataModule(dataset=images, partition=ByDomain("client"), **data)
    for client in range(3):
        site_options = {"root": str(tmp_path / "all" / f"h{client}"), "layout": "{class}/*"}
        site = write_site(tmp_path / f"site{client}", recipe, site_options).data
        assert_same_images(simulated, site, client)


def test_dicom_files_are_read_as_the_recipes_is(tmp_path):
    """With the recipe's window and frames, and with the same patients on each side."""
    files = pytest.importorskip("tests.data.dicom_files", reason="needs the extra medical")
    for client in range(2):
        for number in range(12):
            stack = np.random.default_rng([client, number]).integers(-500, 500, (3, 8, 8)).astype(np.int16)
            path = tmp_path / "all" / f"h{client}" / CLASSES[number % 3] / f"{number}.dcm"
            files.write(path, stack, PatientID=f"p{number // 2}")
    options = {"size": 8, "window": [0, 300], "frames": 2}
    recipe = naming()
    recipe["data"]["dataset"]["init_args"] |= options
    recipe["data"] = {key: value for key, value in recipe["data"].items() if key != "image_size"}
    images = Images(str(tmp_path / "all"), "{client}/{class}/*", classes=CLASSES, **options)
    simulated = FederatedDataModule(dataset=images, partition=ByDomain("client"))
    for client in range(2):
        site_options = {"root": str(tmp_path / "all" / f"h{client}"), "layout": "{class}/*"}
        site = write_site(tmp_path / f"site{client}", recipe, site_options).data
        assert_same_images(simulated, site, client)
        assert site.preprocessing.medical.record() == {"window": [0.0, 300.0], "frames": 2, "axis": "axial"}


def test_a_table_is_read_as_the_recipes_is(tmp_path):
    """By the recipe's columns and separator, unless the site names its own."""
    draw_folder(tmp_path / "h0", 1)
    files = sorted((tmp_path / "h0").rglob("*.png"))
    rows = [f"{file},{'|'.join(CLASSES[: 1 + place % 3])},p{place // 2}" for place, file in enumerate(files)]
    for name, header in (("a", "file,finding,patient"), ("b", "picture,finding,patient")):
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *rows]))
    table = {"path": "file", "label": "finding", "separator": "|", "group": "patient", "size": 16, "seed": 2}
    recipe = naming()
    recipe["data"]["dataset"] = {
        "class_path": "ImageTable",
        "init_args": {"table": "x.csv", "classes": CLASSES} | table,
    }
    sides = []
    for name, columns in (("a", {}), ("b", {"path": "picture"})):
        site = write_site(tmp_path / f"site-{name}", recipe, {"table": str(tmp_path / f"{name}.csv")} | columns).data
        site.setup()
        assert site.task == MultiLabel() and site.checked.train.datasets[0].dataset.size == site.image_size
        sides.append(site.data.train[0].indices)
    assert sides[0] == sides[1]
    assert server_recipe(str(tmp_path / "site-a" / "recipe.yaml")).task == MultiLabel()  # without reading the table


def test_unknown_labels_of_a_sites_table_are_read_as_in_the_simulation(tmp_path):
    """By the recipe's policies, for the sites' training and test images; -1 stays in what is ignored."""
    draw_folder(tmp_path / "all", 3)
    cells = ("1", "0", "-1", "")
    tables = {"all": []}
    for client in range(3):
        tables[client] = []
        for place, file in enumerate(sorted((tmp_path / "all" / f"h{client}").rglob("*.png"))):
            split = "test" if place % 3 == 2 else "train"
            tables[client].append(f"{file},h{client},{split},{cells[place % 4]},{cells[(place // 3 + client) % 4]}")
        tables["all"] += tables[client]
    for name, rows in tables.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,client,split,edema,fracture", *rows]))
    options = {"label": ["edema", "fracture"], "unknown": {"edema": "ones", "fracture": "ignore"}, "blank": "absent"}
    options |= {"size": 16, "classes": ["edema", "fracture"]}
    recipe = naming()
    recipe["data"]["dataset"] = {"class_path": "ImageTable", "init_args": {"table": "x.csv"} | options}
    simulated = FederatedDataModule(
        dataset=ImageTable(str(tmp_path / "all.csv"), **options), partition=ByDomain("client"), image_size=32
    )
    simulated.setup()
    labels = simulated.checked.train.client_labels()
    assert all(set(values[:, 0].tolist()) == {0, 1} and -1 in values[:, 1] for values in labels)
    for client in range(3):
        site = write_site(tmp_path / f"site{client}", recipe, {"table": str(tmp_path / f"{client}.csv")}).data
        assert_same_images(simulated, site, client)


@pytest.mark.parametrize(
    "task",
    [
        Classification(class_weights=[1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        Classification(label_smoothing=0.1),
    ],
    ids=repr,
)
def test_server_and_sites_have_the_recipes_task_and_mixing(task, tmp_path):
    options = {name: value for name, value in task.record()["init_args"].items() if value}
    data = {"dataset": "Digits", "partition": PARTITION, "image_size": 32, "mixup": 0.2, "sampling": "balanced"}
    recipe = RECIPE | {"data": data | {"task": {"class_path": "Classification", "init_args": options}}}
    site_options = {"dataset": "Digits", "partition": PARTITION, "client": 1}
    built = write_site(tmp_path / "site", recipe, site_options)
    built.data.setup()
    assert built.data.task == task
    assert built.data.prepare.mixing.mixup == 0.2
    assert built.data.sampling == "balanced"


def test_weights_from_the_labels_of_all_sites_are_rejected(tmp_path):
    data = {"dataset": "Digits", "partition": PARTITION, "image_size": 32}
    data["task"] = {"class_path": "Classification", "init_args": {"class_weights": "balanced"}}
    site_options = {"dataset": "Digits", "partition": PARTITION, "client": 1}
    with pytest.raises(
        ValueError,
        match=r"task.*deployment",
    ):
        write_site(tmp_path / "site", RECIPE | {"data": data}, site_options)


@pytest.mark.parametrize("on_broken", ["skip", "raise"])
def test_public_images_that_cannot_be_read_are_those_of_the_simulation(on_broken, tmp_path):
    draw_folder(tmp_path / "public", 1)
    broken = sorted((tmp_path / "public").rglob("*.png"))[3]
    broken.write_bytes(broken.read_bytes()[:60])
    public = {"class_path": "UnlabelledFolder", "init_args": {"root": str(tmp_path / "public"), "size": 32}}
    data = RECIPE["data"] | {"public": public, "on_broken": on_broken, "public_limit": 17}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"data": data}))
    if on_broken == "raise":
        with pytest.raises(ValueError, match=r"1 image .*on_broken: skip"):
            server_recipe(str(tmp_path / "recipe.yaml"))
        return
    with pytest.warns(UserWarning, match=r"1 image .*read"):
        recipe = server_recipe(str(tmp_path / "recipe.yaml"))
    images = UnlabelledFolder(str(tmp_path / "public"), size=32)
    simulated = FederatedDataModule(dataset=Digits(), partition=Dirichlet(2, 1.0), public=images, public_limit=17,
                                    on_broken="skip", image_size=32)  # fmt: skip
    with pytest.warns(UserWarning, match=r"1 image .*read"):
        simulated.setup()
    store = simulated.checked.public
    rows = torch.arange(16)
    expected = store.take(torch.zeros_like(rows), rows)[0]
    assert torch.equal(torch.stack([recipe.public[row] for row in range(16)]), expected)
    assert len(recipe.public) == store.sizes[0] == 16
