# SPDX-License-Identifier: Apache-2.0
"""``perada clients add``: from folders, tables and recipes; what it writes and what it leaves."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.cli import main
from perada.data import Digits, Dirichlet, FederatedDataModule


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run of the digits, whose 8×8 images became 32×32."""
    data = FederatedDataModule(
        dataset=Digits(), partition=Dirichlet(3, alpha=1), image_size=32, batch_size=8, train_limit=60, test_limit=30
    )
    run = perada.finetune(
        "test_resnet", data, pretrained="perada:fashion_test_resnet", adapter="head", rounds=1, local_steps=2,
        logger=False, enable_progress_bar=False, accelerator="cpu", distillation={"steps": 0},
        algorithm_options={"prox_strength": 0.01},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    run.export(folder)
    return folder


@pytest.fixture
def pictures(tmp_path):
    """Digits 3 and 5 as files of one client."""
    digits = Digits()
    for label in (3, 5):
        folder = tmp_path / "pictures" / str(label)
        folder.mkdir(parents=True)
        for number in np.flatnonzero(digits.labels.numpy() == label)[:10]:
            Image.fromarray(digits.images[number, 0].numpy()).save(folder / f"{number}.png")
    return tmp_path / "pictures"


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def copy(saved, tmp_path):
    folder = tmp_path / "run"
    perada.Run.load(saved).export(folder)
    return folder


def test_a_folder_joins_a_saved_run_whose_other_files_stay_to_the_last_bit(saved_run, pictures, tmp_path, capsys):
    folder = copy(saved_run, tmp_path)
    before = digests(folder)
    main(["clients", "add", str(folder), "--data", str(pictures), "--client", "late", "--rounds=30", "--lr=0.3"])
    out = capsys.readouterr().out
    after = digests(folder)
    assert {name for name in before if before[name] != after[name]} == {"run.json"}
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"client_3"}
    run = perada.Run.load(folder)
    record = run.info["joined"][-1]
    assert record["images"] == 16
    assert record["after"] > record["before"]
    assert f"{100 * record['after']:.2f} % after" in out
    result = run.predict(sorted(pictures.rglob("*.png")), "late")
    assert np.mean([name == path.split("/")[-2] for name, path in zip(result.names, result.paths, strict=True)]) > 0.8


@pytest.mark.slow
def test_images_of_12_bits_are_read_as_the_runs_own_were(saved_run, pictures, tmp_path):
    run = perada.Run.load(saved_run)
    run.info["preprocessing"]["full_scale"] = 4095
    run.export(tmp_path / "run")
    for path in pictures.rglob("*.png"):
        deep = tmp_path / "deep" / path.relative_to(pictures)
        deep.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(np.asarray(Image.open(path)) * (4095 / 255)).astype(np.uint16)).save(deep)
    states = []
    for data in (pictures, tmp_path / "deep"):
        words = ["--client=late", "--rounds=1", "--accelerator=cpu", "--output", str(tmp_path / f"new_{data.name}")]
        words.append("--images.layout={class}/{group}.*")  # the files differ, and their names divide them alike
        main(["clients", "add", str(tmp_path / "run"), "--data", str(data), *words])
        states.append(perada.Run.load(tmp_path / f"new_{data.name}").state("personal", "late"))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.slow
def test_a_client_that_joined_is_not_lost_to_the_next_one(saved_run, pictures, tmp_path):
    def joins(run, name, output):
        words = ["--rounds=1", "--local_steps=1", "--accelerator=cpu", "--output", str(output)]
        main(["clients", "add", str(run), "--data", str(pictures), "--client", name, *words])

    joins(saved_run, "first", tmp_path / "new")
    with pytest.raises(ValueError, match="first joined"):
        joins(saved_run, "second", tmp_path / "new")
    assert perada.Run.load(tmp_path / "new").info["clients"][-1] == "first"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--images={}"], ["--images", "{}"]])
def test_the_folder_may_be_named_as_predict_has_it(saved_run, pictures, tmp_path, words):
    folder = copy(saved_run, tmp_path)
    words = [word.format(pictures) for word in words]
    main(["clients", "add", str(folder), *words, "--client=late", "--rounds=1", "--images.layout={class}/*"])
    assert perada.Run.load(folder).info["joined"][-1]["images"] == 16


@pytest.mark.slow
def test_a_table_joins_and_the_run_is_written_elsewhere(saved_run, pictures, tmp_path):
    rows = [f"{path},{path.parent.name}" for path in sorted(pictures.rglob("*.png"))]
    table = tmp_path / "late.csv"
    table.write_text("\n".join(["file,digit", *rows]))
    before = digests(saved_run)
    words = ["--client=late", "--rounds=1", "--images.path=file", "--images.label=digit", "--accelerator=cpu"]
    main(["clients", "add", str(saved_run), "--data", str(table), "--output", str(tmp_path / "new"), *words])
    assert digests(saved_run) == before
    assert perada.Run.load(tmp_path / "new").info["clients"] == ["0", "1", "2", "late"]
    same = {name: value for name, value in digests(tmp_path / "new").items() if name in before and "/" in name}
    assert same == {name: before[name] for name in same}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--client=2"], "client='2' is empty or already"),
        (["--client=late", "--images.layout={class}"], "do not match the layout"),
        ([], "the client has no name; pass one"),
        (["--images=pictures"], "--images and --data are the same option; use only one"),
    ],
)
def test_what_cannot_be_done_is_one_line(saved_run, pictures, words, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(["clients", "add", str(saved_run), "--data", str(pictures), *words])


def test_a_run_that_is_not_there_is_said(pictures, tmp_path):
    with pytest.raises(FileNotFoundError, match="none' does not exist"):
        main(["clients", "add", str(tmp_path / "none"), "--data", str(pictures), "--client=late"])


def test_a_class_that_the_run_has_not_is_named(saved_run, pictures):
    (pictures / "5").rename(pictures / "cat")
    with pytest.raises(ValueError, match=r"class='cat'.*0, 1, 2"):
        main(["clients", "add", str(saved_run), "--data", str(pictures), "--client=late"])


@pytest.mark.slow
def test_a_run_folder_and_a_recipe(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--data.train_limit=60", "--data.test_limit=20", "--trainer.max_epochs=1", "--training.local_steps=1"]
    main(["fit", "--config", "digits", *small, "--trainer.accelerator=cpu"])
    run = next((tmp_path / "lightning_logs").iterdir())
    recipe = tmp_path / "late.yaml"
    dataset = {"class_path": "Images", "init_args": {"root": str(pictures), "layout": "{class}/*"}}
    one = {"class_path": "IID", "init_args": {"num_clients": 1}}
    recipe.write_text(json.dumps({"data": {"dataset": dataset, "partition": one}}))
    with pytest.raises(ValueError, match="set --output"):
        main(["clients", "add", str(run), "--data", str(recipe), "--client=late"])
    main(["clients", "add", str(run), "--data", str(recipe), "--client=late", "--output=new", "--rounds=1"])
    record = json.loads((tmp_path / "new" / "run.json").read_text())
    assert record["info"]["clients"][-1] == "late"
    assert "Wrote client_" in capsys.readouterr().out
