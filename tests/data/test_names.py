# SPDX-License-Identifier: Apache-2.0
"""Names of classes and clients, from where they are written to where they are read."""

import json

import pytest
import timm
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.data import (
    CIFAR10,
    MNIST,
    ByDomain,
    CheXpert,
    Digits,
    Dirichlet,
    FashionMNIST,
    FederatedData,
    FederatedDataModule,
    FromFile,
    ImageFolder,
    Images,
)
from tests.digests import without
from tests.rejections import rejects

from .miniatures import FINDINGS, HOSPITALS, write_chexpert, write_hospitals

CLASSES = ["benign", "malignant", "normal"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    root = tmp_path_factory.mktemp("hospitals")
    write_hospitals(root, each=4)
    return root


def module(root, partition=None):
    return FederatedDataModule(
        dataset=Images(str(root), size=8, test_share=0.25), partition=partition or ByDomain("client"), image_size=32
    )


def test_published_sets_have_their_names(tmp_path):
    assert Digits().classes == MNIST().classes == tuple("0123456789")
    assert (FashionMNIST().classes[0], FashionMNIST().classes[9]) == ("T-shirt/top", "Ankle boot")
    write_chexpert(tmp_path / "CheXpert-v1.0-small", patients=5, valid=1)
    assert CheXpert(str(tmp_path)).classes == FINDINGS
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (home / f"{name}.bin").write_bytes(bytes(3073))
    assert CIFAR10(str(tmp_path)).classes is None
    (home / "batches.meta.txt").write_text("\n".join(f"class{n}" for n in range(10)) + "\n\n")
    assert CIFAR10(str(tmp_path)).classes == tuple(f"class{n}" for n in range(10))


def test_folders_name_classes_and_clients(hospitals, tmp_path):
    datamodule = module(hospitals)
    record = datamodule.partition_dict()
    assert (datamodule.classes, datamodule.client_names) == (CLASSES, list(HOSPITALS))
    assert record["clients"] == list(HOSPITALS)
    assert ImageFolder(str(hospitals), domains=True).classes == tuple(CLASSES)
    (tmp_path / "partition.json").write_text(json.dumps(record))
    again = module(hospitals, FromFile(str(tmp_path / "partition.json")))
    again.setup()
    assert again.client_names == list(HOSPITALS)
    halves = module(hospitals, ByDomain("client", clients_per_domain=2))
    halves.setup()
    assert halves.client_names[:3] == ["hospital_a 0", "hospital_a 1", "hospital_b 0"]
    numbered = module(hospitals, Dirichlet(2, 100.0))
    assert "clients" not in numbered.partition_dict()
    assert numbered.client_names is None


def data(**names):
    part = TensorDataset(torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8), torch.arange(6) % 3)
    return FederatedData(train=[part, part], **names)


def test_names_in_python():
    datamodule = FederatedDataModule(data(classes=("a", "b", "c", "d"), client_names=["left", "right"]))
    datamodule.setup()
    assert (datamodule.num_classes, datamodule.classes, datamodule.client_names) == (4, list("abcd"), ["left", "right"])
    bare = FederatedDataModule(data())
    bare.setup()
    assert (bare.num_classes, bare.classes, bare.client_names) == (3, None, None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"classes": ["a", "b"], "num_classes": 3},
            "has 2 names for 3 classes in classes; give each class a unique name",
        ),
        ({"classes": ["a", "b", "a"]}, "has the name 'a' twice in classes"),
        (
            {"client_names": ["a", "a"]},
            "2 names, 1 of them distinct, for 2 clients: pass a unique name for each client",
        ),
        ({"client_names": ["a"]}, "1 names, 1 of them distinct, for 2 clients"),
    ],
)
def test_names_that_do_not_fit_are_rejected(names, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(data(**names)).setup()


@pytest.fixture(scope="module")
def run(hospitals, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained_run = perada.finetune(
        "test_resnet", module(hospitals), pretrained=False, adapter="head", algorithm="ditto", rounds=1, local_steps=1,
        lr_personal=0.5, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trained_run.export(folder)
    return trained_run, folder


def test_a_run_knows_names_and_finds_models_by_them(run, tmp_path):
    trained_run, folder = run
    assert (trained_run.info["classes"], trained_run.info["clients"]) == (CLASSES, list(HOSPITALS))
    loaded = perada.Run.load(folder)
    assert (loaded.info["classes"], loaded.info["clients"]) == (CLASSES, list(HOSPITALS))
    x = torch.rand(2, 3, 32, 32)
    assert not torch.equal(trained_run.personal(1)(x), trained_run.personal(2)(x))
    assert torch.equal(loaded.personal("hospital_c")(x), trained_run.personal(2)(x))
    assert torch.equal(trained_run.personal("2")(x), trained_run.personal(2)(x))
    with pytest.raises(ValueError, match=r"client='hospital_e'.*'hospital_"):
        trained_run.state("personal", "hospital_e")
    with pytest.raises(ValueError, match=r"client='nobody'.*hospital_a, hospital_b, ho"):
        trained_run.personal("nobody")
    with rejects("client", 4):
        trained_run.personal("4")
    broken = without(json.loads((folder / "run.json").read_text()))
    broken["info"]["clients"] = [1, 2]
    (tmp_path / "run.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"run\.json'.*'\[1, 2\]'.* 4"):
        perada.Run.load(tmp_path)


def test_exported_adapters_have_the_names_of_classes(run, tmp_path):
    trained_run, folder = run
    for name in ("global", "client_0", "client_3"):
        config = json.loads((folder / name / "config.json").read_text())
        assert config == {
            "id2label": {"0": "benign", "1": "malignant", "2": "normal"},
            "label2id": {"benign": 0, "malignant": 1, "normal": 2},
        }
    trained_run.export(tmp_path, client="hospital_b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone.safetensors", "client_1"]
    x = torch.rand(2, 3, 32, 32)
    plain = timm.create_model("test_resnet", num_classes=3)
    plain.load_state_dict(load_file(tmp_path / "backbone.safetensors"), strict=False)
    model = PeftModel.from_pretrained(plain, str(tmp_path / "client_1")).eval()
    assert torch.equal(model(x), trained_run.personal("hospital_b")(x))


@pytest.mark.slow  # docs/own_images.md takes the same way, and test_recipes.py sees the names in the table
def test_the_command_line_shows_and_takes_names(hospitals, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "images/ditto", f"--data.dataset.root={hospitals}", "--data.dataset.size=32",
          "--data.image_size=32", "--model.backbone=test_resnet", "--model.pretrained=false", "--model.adapter=head",
          "--data.num_workers=0", "--data.public_fraction=0", "--trainer.max_epochs=1", "--training.local_steps=1",
          "--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_epoch=1"])  # fmt: skip
    printed = capsys.readouterr().out
    first = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert first == ["client", *HOSPITALS, "mean ± std"]
    main(["export", "lightning_logs/version_0", "--output", "one", "--client", "hospital_d"])
    assert "Wrote 2 adapters to one: client_3 … global" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["backbone.safetensors", "client_3", "global"]
    assert json.loads((tmp_path / "one/client_3/config.json").read_text())["id2label"]["2"] == "normal"
