# SPDX-License-Identifier: Apache-2.0
"""A window for each client: the same grey levels in training, in a saved run, in an export, and at a site."""

import csv
import json
import warnings

import numpy as np
import pytest
import torch

import perada
from perada.cli import main
from perada.cli.deployed_recipes import site_recipe
from perada.data import IID, ByDomain, Dirichlet, FederatedDataModule, Images, ImageTable, UnlabelledFolder
from perada.data.medical.reading import MedicalReading
from perada.data.partitions.division import Division
from perada.data.preprocessing import Preprocessing
from perada.deploy.site.file import Approved, SiteFile
from perada.lightning.joining import personalize
from tests.data.dicom_files import linear, pydicom, write
from tests.rejections import rejects

SIDE = 8
WINDOWS = {"north": [0, 300], "south": [100, 900]}


def pixels_of(seed):
    return np.random.default_rng(seed).integers(-500, 500, (SIDE, SIDE)).astype(np.int16)


def shown(path, client):
    """Grey levels by the standard's formula, pixel by pixel."""
    return np.rint(linear(pydicom.dcmread(path).pixel_array, *WINDOWS[client]))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    for number in range(24):
        client = ("north", "south")[number % 2]
        label = ("benign", "malignant")[number // 2 % 2]
        write(folder / client / label / f"{number}.dcm", pixels_of(number), PatientID=f"P{number}")
    return folder


@pytest.fixture(scope="module")
def table(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "client"])
        for image in sorted(root.rglob("*.dcm")):
            rows.writerow([image, image.parent.name, image.parent.parent.name])
    return path


@pytest.mark.parametrize("in_memory", [False, True])
def test_folders_and_tables_read_each_client_with_its_window(root, table, in_memory):
    options = {"size": SIDE, "window": WINDOWS, "gray": True, "in_memory": in_memory}
    for images in (Images(str(root), **options), ImageTable(str(table), **options)):
        for side in (images, images.with_split(False)):
            clients = side.columns["client"].tolist()
            assert {*clients} == {*WINDOWS}
            for row, (file, client) in enumerate(zip(side.files, clients, strict=True)):
                assert np.abs(side[row][0][0].numpy() - shown(file, client)).max() <= 1


def fitted(root, **options):
    images = Images(str(root), size=32, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return perada.finetune(
            "test_resnet", FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4),
            pretrained=False, adapter="head", algorithm="fedavg_ft", rounds=1, logger=False,
            enable_progress_bar=False, accelerator="cpu",
        )  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fitted(root, window=WINDOWS).save(folder)
    return folder


def test_a_saved_run_shows_each_client_what_it_was_trained_on(root, run_folder):
    run = perada.Run.load(run_folder)
    paths = sorted(map(str, (root / "south").rglob("*.dcm")))
    for client, number in (("north", 0), ("south", 1)):
        grey = [torch.from_numpy(shown(path, client).astype(np.uint8)).unsqueeze(0) for path in paths]
        for name in (client, number):
            # Another client's window would give other probabilities: see the last line.
            ours = run.predict(paths, name).probabilities
            assert torch.allclose(ours, run.predict(grey, client).probabilities, atol=1e-3)
        own = run.preprocessing.of_client(client)
        assert all((own.stored(path) == _stored_in_training(root, path, client)).all() for path in paths)
    assert not torch.allclose(
        run.predict(paths, "north", prediction="global").probabilities,
        run.predict(paths, "south", prediction="global").probabilities,
    )


def _stored_in_training(root, path, client):
    """The image as a set with this window for all reads it."""
    return Images(str(root), size=32, window=WINDOWS[client]).read(path)


def test_the_global_model_needs_a_client_to_read_files(root, run_folder, tmp_path):
    run = perada.Run.load(run_folder)
    path = str(next(root.rglob("*.dcm")))
    with pytest.raises(ValueError, match=r"north, south.*name the client"):
        run.predict(path)
    # Other images need no window.
    assert len(run.predict(torch.zeros(3, 32, 32, dtype=torch.uint8)).labels) == 1
    options = ["predict", str(run_folder), "--images", path, "--output", str(tmp_path / "p.csv")]
    with pytest.raises(ValueError, match=r"north, south.*name the client"):
        main(options)
    main([*options, "--client", "north", "--prediction", "global"])
    assert (tmp_path / "p.csv").read_text().count("\n") == 2


def test_an_exported_model_has_the_window_of_its_client(run_folder, tmp_path):
    from safetensors import safe_open

    main(["export", str(run_folder), "--output", str(tmp_path), "--client", "south", "--format", "safetensors"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        record = json.loads(file.metadata()["preprocessing"])
    assert record["medical"] == {"window": [100.0, 900.0], "frames": "middle", "axis": "axial"}


def test_a_client_that_joins_keeps_its_window(root, run_folder):
    run = perada.Run.load(run_folder)
    images = Images(str(root / "north"), layout="{class}/*", size=32, window="auto")
    data = Division(images, IID(1)).share_out()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joined = personalize(run, data, "east", accelerator="cpu")
    assert joined.preprocessing.of_client("east").medical.window == "auto"
    assert joined.preprocessing.of_client("south").medical.window == (100.0, 900.0)
    assert "east" not in run.preprocessing.medical.window_of_client
    options = ["clients", "add", str(run_folder), "--data", str(root / "north"), "--client", "east", "--output", "x"]
    with pytest.raises(ValueError, match=r"north, south.*--images\.window"):
        main(options)


def test_a_removed_client_leaves_no_window(root, tmp_path):
    fitted(root, window=WINDOWS).save(tmp_path)
    for client in WINDOWS:
        main(["clients", "remove", str(tmp_path), "--client", client])
        text = (tmp_path / "run.json").read_text()
        assert client not in text
    assert perada.Run.load(tmp_path).preprocessing.medical == MedicalReading(None)


@pytest.mark.parametrize("name", ["north", "west"])
def test_a_site_has_the_window_of_its_name(root, tmp_path, name):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "trainer: {max_epochs: 1, accelerator: cpu}\n"
        "model: {backbone: test_resnet, pretrained: false, adapter: head}\n"
        "data:\n  dataset:\n    class_path: Images\n    init_args:\n      root: images\n      size: 32\n"
        f"      classes: [benign, malignant]\n      window: {json.dumps(WINDOWS)}\n"
        "  partition: {class_path: ByDomain, init_args: {column: client}}\n  batch_size: 4\n"
        "federated: {algorithm: FedAvg}\n"
    )
    data = {"root": str(root / "north"), "layout": "{class}/*"}
    site = SiteFile(name, {recipe: Approved("", "")}, data, tmp_path / "state", accelerator="cpu")
    if name == "north":
        built = site_recipe(recipe, site)
        (reading,) = {part.dataset.medical for part in built.data.data.train}
        assert reading == MedicalReading((0.0, 300.0))
        return
    with rejects("window", "west"):
        site_recipe(recipe, site)
    # A site's own file comes first.
    own = SiteFile(name, {recipe: Approved("", "")}, data | {"window": "auto"}, tmp_path / "own", accelerator="cpu")
    (reading,) = {part.dataset.medical for part in site_recipe(recipe, own).data.data.train}
    assert reading == MedicalReading("auto")


def test_wrong_windows_are_rejected(root):
    with rejects("window", "lungs"):
        Images(str(root), window={"north": "lungs", "south": "file"})
    with pytest.raises(ValueError, match=r"window.*'south'.*north, suoth.*did you mean 'suoth'"):
        Images(str(root), window={"north": "file", "suoth": "file"}, size=SIDE).manifest  # noqa: B018  # read when used
    with pytest.raises(ValueError, match=r"window.*north.*names no clients"):
        Images(str(root / "north"), layout="{class}/*", window=WINDOWS, size=SIDE).manifest  # noqa: B018
    with rejects("window", WINDOWS):
        UnlabelledFolder(str(root), window=WINDOWS)
    # Clients that a partition draws have no windows of their own.
    drawn = FederatedDataModule(
        dataset=Images(str(root), window=WINDOWS, size=SIDE), partition=Dirichlet(2, alpha=10.0), batch_size=4
    )
    with rejects("window", "0"):
        drawn.setup()


def test_a_record_is_read_again():
    reading = MedicalReading.checked(WINDOWS, 2)
    record = json.loads(json.dumps(reading.record()))
    assert MedicalReading.checked(**record) == reading
    preprocessing = Preprocessing("uint8", (3, 8, 8), 3, (), (0.5,) * 3, (0.5,) * 3, None, reading)
    assert Preprocessing.from_record(json.loads(json.dumps(preprocessing.record()))) == preprocessing
    assert preprocessing.of_client("north").record()["medical"]["window"] == [0.0, 300.0]
