# SPDX-License-Identifier: Apache-2.0
"""What a deployment exports is a run like that of `perada fit`: it is loaded, predicts, and is joined by clients."""

import csv
import hashlib
import json
import math
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from perada import Run
from perada.cli.deploy import make_client
from perada.cli.main import main
from perada.data import Digits
from perada.deploy.server.progress import RunProgress, write_progress
from perada.deploy.site.file import read_site
from perada.deploy.state import read_state
from perada.privacy.accounting import history_epsilon

from .test_site_file import RECIPE

DATA = {"partition": RECIPE["data"]["partition"], "dataset": "Digits"}


def sites(folder, recipe, capsys, **entries):
    """The files of two sites that approve a recipe, whose partition has a client for each."""
    paths = []
    for number, name in enumerate(("st-marys", "north")):
        home = folder / name
        home.mkdir(parents=True)
        text = yaml.safe_dump(recipe).encode()
        (home / "recipe.yaml").write_bytes(text)
        content = {"name": name, "recipes": [{"recipe": "recipe.yaml"}], "data": DATA | {"client": number}} | entries
        path = home / "site.yaml"
        path.write_text(yaml.safe_dump(content))
        if not paths:
            main(["deploy", "check", str(path)])
            (digest,) = re.findall("digest: ([0-9a-f]{64})\n", capsys.readouterr().out)
        content["recipes"][0] |= {"sha256": hashlib.sha256(text).hexdigest(), "digest": digest}
        path.write_text(yaml.safe_dump(content))
        paths.append(str(path))
    return paths


def deployed(tmp_path, monkeypatch, capsys, recipe, **entries):
    """Two sites' runs and the server's after a deployment, exported and loaded, and what the commands said."""
    monkeypatch.chdir(tmp_path)
    paths = sites(tmp_path, recipe, capsys, **entries)
    main(["deploy", "run", "st-marys/recipe.yaml", "--local", *paths, "--folder", "srv", "--min-sites", "2"])
    capsys.readouterr()
    main(["deploy", "export", paths[1], "--output", "out"])
    main(["deploy", "export", "srv", "--recipe", "st-marys/recipe.yaml", "--output", "server"])
    return Run.load("out"), Run.load("server"), capsys.readouterr().out


def pictures(folder, count=5):
    folder.mkdir()
    images = Digits(train=False).images[:count]
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(folder / f"{number}.png")
    return images


@pytest.mark.slow
def test_a_sites_run_and_the_servers_are_used_as_any_other(tmp_path, monkeypatch, capsys):
    recipe = RECIPE | {"data": RECIPE["data"] | {"flip": True}}
    site, server, said = deployed(tmp_path, monkeypatch, capsys, recipe, may_send=["sizes", "counts"])
    assert "Wrote 2 adapters to out: client_0 … global" in said and "Wrote 1 adapter to server: global" in said
    assert site.info["clients"] == ["north"] and sorted(server.info["clients"]) == ["north", "st-marys"]
    assert server.info["training"]["images"] == [20, 20] and site.info["training"]["images"] == [20]
    assert site.info["classes"] == server.info["classes"] == list("0123456789")
    assert server.metrics["rounds"][-1]["personal/local_test"] >= 0

    # The models are those on the site's disk, and see what their training saw.
    images = pictures(tmp_path / "new")
    client = make_client(tmp_path / "north" / "recipe.yaml", read_site(tmp_path / "north" / "site.yaml"))
    state = read_state(tmp_path / "north" / "state" / "state.safetensors")[0]
    prepared = client.data.prepare(images)
    expected = client.module.engine.shared_logits(client.personal(state.scoring.global_state, state), prepared)[
        0
    ].softmax(-1)
    main(["predict", "out", "--images", "new", "--client", "north", "--output", "found.csv", "--device", "cpu"])
    with open("found.csv") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [f"{number}.png" for number in range(5)]
    probabilities = site.predict([str(path) for path in sorted((tmp_path / "new").iterdir())], "north").probabilities
    torch.testing.assert_close(probabilities, expected.detach(), rtol=1e-5, atol=1e-6)
    both = [run.predict(list(images)).probabilities for run in (site, server)]
    torch.testing.assert_close(both[0], both[1])
    with pytest.raises(ValueError, match=r"client='st-marys' .*at its site"):
        server.predict(list(images), "st-marys")

    # As a simulation's, but for what only a simulation knows.
    main(["fit", "--config", "north/recipe.yaml", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=sim"])
    main(["export", "sim/lightning_logs/version_0", "--output", "simulated"])
    simulated = json.loads((tmp_path / "simulated" / "run.json").read_text())
    for folder in ("out", "server"):
        actual = json.loads((tmp_path / folder / "run.json").read_text())
        assert actual["info"].keys() - {"elsewhere"} == simulated["info"].keys()
        for name in ("preprocessing", "adapter", "algorithm", "backbone", "built_for", "image_size", "adapter_options"):
            assert actual["info"][name] == simulated["info"][name], name
        same = {"phases", "rounds", "batch_size", "flip", "lr_local", "optimizer", "algorithm"}
        assert all(actual["info"]["training"][name] == simulated["info"]["training"][name] for name in same)
    for file in (tmp_path / "simulated").rglob("*"):
        name = file.relative_to(tmp_path / "simulated")
        assert (tmp_path / "out" / name).exists() or name.parts[0] == "client_1"

    # New clients join both, reports are written, and a model leaves in another format.
    for label in range(2):
        for number in range(4):
            path = tmp_path / "joining" / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 30 * number + label, np.uint8)).save(path)
    for folder in ("out", "server"):
        main(["clients", "add", folder, "--images=joining", "--client=new", "--rounds=1", "--accelerator=cpu"])
        joined = Run.load(folder)
        assert joined.info["clients"][-1] == "new" and joined.predict(list(images), "new").labels.shape == (5,)
        main(["report", folder])
    main(["export", "out", "--client", "north", "--format", "safetensors", "--output", "plain"])
    assert (tmp_path / "plain" / "model.safetensors").is_file()


@pytest.mark.parametrize("printed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_private_runs_carry_their_epsilon(printed, tmp_path, monkeypatch, capsys):
    recipe = RECIPE | {
        "federated": {"algorithm": "FedAvg"},
        "training": {"local_steps": 1},
        "privacy": {"noise_multiplier": 1.5, "delta": 1e-3},
    }
    may_send = ["epsilon"] if printed else []
    site, server, said = deployed(tmp_path, monkeypatch, capsys, recipe, may_send=may_send, limits={"delta": 1e-3})
    # One step at σ = 1.5, of a batch of 8 among 20 images, as the site's own ledger has it.
    expected = history_epsilon({(1.5, 8 / 20): 1}, 1e-3, "rdp")
    sample = site.info["privacy"]["sample"]
    assert sample["release"] == sample["server"] == [pytest.approx(expected)]
    assert (sample["noise_multipliers"], sample["sample_rates"]) == ([1.5], [0.4])
    assert site.metrics["clients"]["privacy/release_epsilon"] == [pytest.approx(expected)]
    known = expected if printed else math.inf
    assert server.info["privacy"]["sample"]["server"] == [pytest.approx(known)] * 2
    assert said.count(f"ε {expected:.2f}") >= (2 if printed else 1)
    card = (tmp_path / "server" / "global" / "README.md").read_text()
    assert "DP-SGD at the sites" in card and "No noise was added" not in card
    assert f"{expected:.2f}" in card if printed else "∞" in card
    assert "noise multiplier 1.5" in (tmp_path / "out" / "client_0" / "README.md").read_text()


def test_the_server_exports_no_run_of_another_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    write_progress(tmp_path, RunProgress("0" * 32, "1" * 64, 1), {"global": {}, "server": {}})
    with pytest.raises(ValueError, match=r"'recipe\.yaml'.*run 0"):
        main(["deploy", "export", ".", "--recipe", "recipe.yaml", "--output", "out"])
