# SPDX-License-Identifier: Apache-2.0
"""``perada predict RUN``: images and a run, without the data that it was trained on."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Ditto, FedEnsemble, PerAda
from perada.cli import main
from perada.cli.inference import open_run
from perada.cli.main import entry_point
from perada.data import FashionMNIST
from tests.options import sections

RECIPE = {
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
    "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
    "data": {
        "dataset": {"class_path": "FashionMNIST", "init_args": {"root": "fashion-mnist"}},
        "partition": {"class_path": "IID", "init_args": {"num_clients": 3}},
        "batch_size": 20,
        "image_size": 32,
    },
    "federated": {"algorithm": "Ditto"},
    "training": {"lr_local": 0.1, "lr_personal": 0.1, "local_steps": 2},
}


def images_in(folder, count=5):
    folder.mkdir()
    for number, image in enumerate(FashionMNIST("fashion-mnist", train=False).images[:count]):
        Image.fromarray(image[0].numpy()).save(folder / f"{number}.png")


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_folders_of_fit_and_of_export_predict_alike_without_the_data(fashion_root, monkeypatch, capsys):
    here = fashion_root.parent
    monkeypatch.chdir(here)
    (here / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    main(["fit", "--config", "recipe.yaml"])
    main(["predict", "--config", "recipe.yaml", "--ckpt_path", "last"])  # LightningCLI's, of the test images
    tested = rows_of(here / capsys.readouterr().out.split("Predictions: ")[1].strip())
    images_in(here / "images", 40)
    shutil.rmtree(fashion_root)
    main(["export", "lightning_logs/version_0", "--output", "out"])
    version = "lightning_logs/version_0"
    for run, output in ((version, "a.csv"), ("out", "b.csv"), (f"{version}/checkpoints/last.ckpt", "c.csv")):
        main(["predict", run, "--images", "images", "--client", "1", "--output", output, "--batch_size=3"])
        assert capsys.readouterr().out.endswith(f"Predictions of 40 images: {output}\n")
    (here / "table.csv").write_text("label,file\n" + "".join(f"x,images/{n}.png\n" for n in range(40)))
    main(["predict", "--images=table.csv", version, "--client=1", "--path=file"])
    with pytest.raises(FileNotFoundError, match="'out/client_1' is one adapter"):
        main(["predict", "out/client_1", "--images=table.csv", "--path=file"])
    with pytest.raises(ValueError, match=r"'out'.*--format=onnx"):
        main(["export", "out", "--output=again"])
    with pytest.raises(NotADirectoryError, match=r"--output=a\.csv is a file"):
        main(["export", version, "--output=a.csv"])
    with pytest.raises(NotADirectoryError, match=r"--output=a\.csv/b.*'a\.csv'"):
        main(["export", version, "--output=a.csv/b"])
    rows = rows_of(here / "predictions.csv")
    assert [row["path"] for row in rows] == [f"images/{number}.png" for number in range(40)]
    result = {row["path"]: row for row in rows_of(here / "a.csv")}
    assert list(result) == sorted(f"{number}.png" for number in range(40))
    for row in rows:
        same = result[row["path"].removeprefix("images/")]
        assert same["predicted"] == row["predicted"]
        columns = [f"p({name})" for name in FashionMNIST.classes]
        shares = [float(same[column]) for column in columns]
        # In batches of another size: six digits are written, and the last of them may be rounded otherwise.
        assert [float(row[column]) for column in columns] == pytest.approx(shares, rel=0, abs=2e-6)
        assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert (here / "a.csv").read_text() == (here / "b.csv").read_text() == (here / "c.csv").read_text()
    own = {row["image"] for row in tested if row["client"] == "1"}
    data = yaml.safe_load((here / version / "partition.json").read_text())
    positions = [position for part in data["test"] for position in part]
    assert own
    for row in tested:
        if row["image"] in own:
            same = result[f"{positions[int(row['image'])]}.png"]
            assert FashionMNIST.classes[int(row["personal"])] == same["predicted"]


def made_in_python(tmp_path, backbone="test_resnet", **options):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (3, 6, 3, 32, 32), generator=random, dtype=torch.uint8)
    sets = [TensorDataset(part, torch.arange(6) % 3) for part in x]
    settings = {"pretrained": False, "adapter": "head", "rounds": 2, "local_steps": 1, "lr_local": 0.1, "batch_size": 4}
    settings |= {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    run = perada.finetune(backbone, perada.FederatedData(sets), **sections(**settings | options))
    return run, tmp_path / "lightning_logs" / "version_0"


def test_files_that_cannot_be_read_are_left_out_and_named_at_the_end(tmp_path, monkeypatch, capsys):
    run, _ = made_in_python(tmp_path, rounds=1)
    run.save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    for number in range(7):
        noise = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(images / f"{number}.png")
    main(["predict", "saved", "--images=images", "--output=whole.csv"])
    for number in (0, 4, 5):
        (images / f"{number}.png").write_bytes((images / f"{number}.png").read_bytes()[:100])
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["perada", "predict", "saved", "--images=images", "--batch_size=2"])
    with pytest.raises(
        SystemExit,
        match=r"3 of 7 images.*'predictions\.csv'.*0\.png.*4\.png.*5\.png",
    ) as end:
        entry_point()
    assert isinstance(end.value.code, str)  # which Python prints, with the status 1
    assert capsys.readouterr().out == "Predictions of 4 images: predictions.csv\n"
    kept = [row for row in rows_of(tmp_path / "whole.csv") if row["path"][0] in "1236"]
    assert [row["predicted"] for row in rows_of(tmp_path / "predictions.csv")] == [row["predicted"] for row in kept]
    assert [row["path"] for row in rows_of(tmp_path / "predictions.csv")] == [row["path"] for row in kept]
    for number in (1, 2, 3, 6):
        (images / f"{number}.png").write_bytes(b"")
    with pytest.raises(ValueError, match="7 images"):
        main(["predict", "saved", "--images=images"])


OTHERS = [{"algorithm": "fedavg_ft"}, {"algorithm": "fed_ensemble"}, {"algorithm": "standalone", "adapter": "lora"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"client_store": "disk"}, *(pytest.param(given, marks=pytest.mark.slow) for given in OTHERS)]
)
def test_the_run_of_a_checkpoint_is_the_one_that_was_made(tmp_path, monkeypatch, options):
    run, folder = made_in_python(tmp_path, **options)
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    os.utime(copied / "checkpoints" / "last.previous.ckpt")  # the newest file, of an older state
    result = open_run(copied)
    monkeypatch.chdir(tmp_path / "elsewhere" / "checkpoints")
    assert open_run(Path("last.ckpt")).info == result.info
    assert result.num_clients == 3
    assert run.info == result.info
    x = torch.rand(2, 3, 32, 32)
    for client in range(3):
        with torch.no_grad():
            assert torch.equal(result.personal(client)(x), run.personal(client)(x))
    if run.info["global_model"]:
        with torch.no_grad():
            assert torch.equal(result.global_model()(x), run.global_model()(x))


class Small(nn.Module):
    """A network of the caller's own."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Conv2d(3, 4, 3, stride=8), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.body(x).relu().mean((2, 3)))


class Mine(Ditto):
    """An algorithm of the caller's own."""


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("creation", "given"),
    [
        ({"backbone": "test_resnet", "algorithm": FedEnsemble(base=PerAda(0.5, distill=False), modes=2)}, ()),
        ({"backbone": "network"}, ("backbone",)),
        ({"backbone": "test_resnet", "algorithm": "mine"}, ("algorithm",)),
    ],
    ids=["ensemble", "network", "algorithm"],
)
def test_a_fits_folder_is_the_run(tmp_path, creation, given):
    """Without config.yaml, and to the last bit; what is not perada's own is given."""
    torch.manual_seed(1)
    custom_network = {"network": Small(), "mine": Mine(0.5)}
    options = {
        name: custom_network.get(value, value) if isinstance(value, str) else value for name, value in creation.items()
    }
    run, folder = made_in_python(tmp_path, **options)
    (folder / "config.yaml").unlink()
    result = perada.Run.load(folder, **{name: options[name] for name in given})
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(result.global_model()(x), run.global_model()(x))
        for client in range(3):
            assert torch.equal(result.personal(client)(x), run.personal(client)(x))
    assert (result.info, result.metrics["clients"]) == (run.info, run.metrics["clients"])
    if given:
        with pytest.raises(ValueError, match=rf"pass (it|one of the same class) as {given[0]}="):
            perada.Run.load(folder)


@pytest.mark.slow
def test_an_algorithm_of_ones_own_within_another_is_made_again_from_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms_within.py").write_text("from perada.algorithms import FedAvg\nclass Own(FedAvg): pass\n")
    monkeypatch.chdir(tmp_path)
    base = {"class_path": "my_algorithms_within.Own"}
    recipe = RECIPE | {"data": RECIPE["data"] | {"dataset": "Digits", "train_limit": 60, "test_limit": 30}}
    recipe["training"] = {"local_steps": 1}
    recipe["federated"] = {"algorithm": {"class_path": "FedEnsemble", "init_args": {"base": base}}}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    main(["fit", "--config", "recipe.yaml", "--federated.algorithm.init_args.modes=2"])
    with pytest.raises(ValueError, match=r"'my_algorithms_within\.Own'"):
        open_run(Path("lightning_logs/version_0"))
    run = open_run(Path("lightning_logs/version_0"), trust=True)
    assert len(run.states("global")) == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("changed", [{"adapter_options": {"train_backbone": True}}, {"num_classes": "ten"}])
def test_a_checkpoint_that_says_what_no_run_says_is_rejected_in_one_line(tmp_path, changed):
    _, folder = made_in_python(tmp_path, rounds=1)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    saved["perada"]["info"] |= changed
    torch.save(saved, checkpoint)
    with pytest.raises(ValueError, match="content is not what perada writes") as error:
        perada.Run.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_random_weights_whose_seed_is_kept_secret_are_said_to_be_the_reason(tmp_path):
    privacy = perada.Privacy(noise_multiplier=1.0, secure_rng=False)
    _, folder = made_in_python(tmp_path, rounds=1, privacy=privacy, seed=5)
    with pytest.raises(ValueError, match=r"test mode.*seed"):
        open_run(folder)


def test_what_a_run_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, folder = made_in_python(tmp_path, rounds=1)
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    image = ["--images", str(tmp_path / "a.png")]
    config = folder / "config.yaml"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    with pytest.raises(FileNotFoundError, match="not a finished run"):
        main(["predict", str(tmp_path), *image])
    with pytest.raises(FileNotFoundError, match=r"--output=.* folder"):
        main(["predict", str(folder), *image, "--output", str(tmp_path / "none" / "a.csv")])
    with pytest.raises(ValueError, match=r"client='9'|client .*9"):
        main(["predict", str(folder), *image, "--client", "9", "--output", str(tmp_path / "a.csv")])
    with pytest.raises(IsADirectoryError, match=r"--output=.* is a folder.*predictions\.csv"):
        main(["predict", str(folder), *image, "--output", str(tmp_path)])
    with pytest.raises(ValueError, match="device='tpux' is not available"):
        main(["predict", str(folder), *image, "--device=tpux", "--output", str(tmp_path / "a.csv")])
    with pytest.raises(ValueError, match=r"--config.*`perada predict RUN"):
        main(["predict", str(folder), *image, "--config=quickstart"])
    saved = torch.load(checkpoint, weights_only=True)

    def written(**info):
        torch.save(saved | {"perada": saved["perada"] | {"info": saved["perada"]["info"] | info}}, checkpoint)
        return ["predict", str(folder), *image]

    with pytest.raises(ValueError, match="different trained tensors"):
        main(written(adapter="bias_norm"))
    with pytest.raises(ValueError, match="'hat' is unknown"):
        main(written(adapter="hat"))
    with pytest.raises(ValueError, match="PEFT configuration"):
        main(written(adapter=None))
    with pytest.raises(ValueError, match="custom network"):
        main(written(backbone=None))
    with pytest.raises(ValueError, match="content is not what perada writes"):
        main(written(training=None))
    main(written())
    config.write_text(config.read_text().replace("perada.algorithms.perada.PerAda", "nobody.knows.PerAda"))
    with pytest.raises(ValueError, match=r"config\.yaml'.*nobody"):
        main(["predict", str(folder), *image, "--trust"])
    config.write_text("model: {}\n")
    with pytest.raises(ValueError, match=r"config\.yaml'.*'federated'"):
        main(["predict", str(folder), *image])
    config.unlink()
    torch.save(saved | {"perada": {name: one for name, one in saved["perada"].items() if name != "info"}}, checkpoint)
    with pytest.raises(ValueError, match="content is not what perada writes") as error:
        main(["predict", str(folder), *image])
    assert "\n" not in str(error.value)


def test_the_help_tells_both_ways_to_predict(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--help"])
    assert ended.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "--images PATH" in output
    assert "`perada predict --config RECIPE --ckpt_path PATH` predicts the recipe's test images" in output


DIVERGES = ["--model.adapter=full", "--trainer.max_epochs=1", "--training.local_steps=1", "--training.lr_local=1e20"]


@pytest.mark.filterwarnings("ignore:outputs are NaN or infinite")
def test_models_without_finite_outputs_end_every_command_with_an_error(fashion_root, monkeypatch, capsys):
    """Whatever was computed is printed and kept before; no table has a class 0 for such an image."""
    here = fashion_root.parent
    monkeypatch.chdir(here)
    (here / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"federated": {"algorithm": "FedAvg"}}))
    whose = r"NaN or infinite: the global model on \d+ test images of client 0, since round 1"
    with pytest.raises(ValueError, match=whose):
        main(["fit", "--config", "recipe.yaml", *DIVERGES])
    shown = capsys.readouterr().out
    assert "– ± –" in shown
    assert "Run folder: " in shown
    recipe = ["--config", "recipe.yaml", *DIVERGES, "--ckpt_path", "last"]
    for command in ("test", "predict"):
        with pytest.raises(ValueError, match=whose):
            main([command, *recipe])
    table = rows_of(here / capsys.readouterr().out.split("Predictions: ")[1].strip())
    assert {row["global"] for row in table} == {""}
    images_in(here / "images", 3)
    run = "lightning_logs/version_0"
    for arguments in (["predict", run, "--images=images"], ["export", run, "--output=out", "--format=safetensors"]):
        with pytest.raises(ValueError, match=r"global model.*NaN"):
            main(arguments)
    assert not (here / "predictions.csv").exists()
    with pytest.raises(ValueError, match=rf"were written.*{whose}"):
        main(["export", run, "--output=adapters"])
    assert (here / "adapters" / "global" / "adapter_model.safetensors").is_file()
    compared = ["compare", "recipe.yaml", "--algorithms=fedavg", "--output=compared.json", *DIVERGES]
    for _ in range(2):  # from the file, too
        with pytest.raises(SystemExit):
            main(compared)
        shown = capsys.readouterr()
        assert "the global model on" in shown.err
        assert "NaN or infinite" in shown.out
