# SPDX-License-Identifier: Apache-2.0
"""Noise is drawn from a cryptographic generator by default. Noise that follows from a seed is a test mode: it says so
wherever ε stands, and the seed is in nothing that is saved, exported or reported."""

import json
import re
import zipfile

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.core.seeding import generator
from perada.results.report import TEST_MODE
from tests.options import sections

from ..algorithms.problems import QUIET

SEED = 918273645
PIXELS = 16
CLASSES = 3
IMAGES = 8
BOUND = 1.0
SIGMA = 50.0
LR = 0.1


pytestmark = pytest.mark.usefixtures("quick_epsilon")


def federation(clients=3, test=False):
    random = torch.Generator().manual_seed(0)

    def images(n):
        return TensorDataset(torch.randn(n, 1, 1, PIXELS, generator=random), torch.arange(n) % CLASSES)

    return perada.FederatedData(
        [images(IMAGES) for _ in range(clients)], [images(4)] * clients if test else [], num_classes=CLASSES
    )


def network():
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def train(privacy=None, rounds=1, **options):
    common = {"adapter": "full", "algorithm": "fedavg", "batch_size": "full", "lr_local": LR, "seed": SEED}
    arguments = {"noise_multiplier": SIGMA, "max_norm": BOUND, "delta": 1e-3} | (privacy or {})
    data = options.pop("data", None) or federation()
    return perada.finetune(network(), data, **sections(rounds=rounds, privacy=arguments, **common | QUIET | options))


def noise_of_seed(seed, clients=3):
    """What the noise of round 0 did to the global weights, for whoever knows the seed."""
    drawn = [torch.randn(CLASSES, PIXELS, generator=generator(seed, "noise-local", 0, m)) for m in range(clients)]
    return -LR * SIGMA * BOUND / IMAGES * torch.stack(drawn).mean(0)


def test_a_released_folder_gives_the_gradients_away_in_the_test_mode_alone(tmp_path):
    """Without the noise, the clipped sums are left: 0.0125 a client at most. With it, they drown in 0.36."""
    results = {}
    for secure in (True, False):
        options = {} if secure else {"secure_rng": False}
        run = train(options)
        (weight,) = run.state("global").values()
        results[secure] = float((weight - noise_of_seed(SEED)).norm())
    clipped = LR * BOUND
    size = LR * SIGMA * BOUND / IMAGES * (CLASSES * PIXELS / 3) ** 0.5
    assert 0 < results[False] <= clipped
    assert results[True] > size  # two noises, of which each has that size


def test_the_default_draws_anew_each_time():
    first, second = (train() for _ in range(2))
    (one,), (other,) = first.state("global").values(), second.state("global").values()
    assert not (one == other).any()
    assert first.info["seed"] == SEED  # from which no noise follows
    assert perada.Privacy(1.0).secure_rng is perada.ClientPrivacy(1.0).secure_rng is True


def forms(seed):
    """How a seed may stand in a file: in digits, in hexadecimal, in binary of either order."""
    binary = [seed.to_bytes(size, order) for size in (4, 8) for order in ("little", "big")]
    return [str(seed).encode(), f"{seed:x}".encode(), *binary]


def contents(folder):
    """Every file below a folder by its path, those within archives too."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    yield from ((f"{path}/{name}", archive.read(name)) for name in archive.namelist())


def holds_seed(folder):
    return [name for name, content in contents(folder) if any(form in content for form in forms(SEED))]


@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_the_seed_of_the_test_mode_is_in_no_file(tmp_path, section):
    """Neither in the run's folder, checkpoint and all, nor in what is saved. Without privacy, and by default, it is."""
    level = {"noise_multiplier": 5.0, "delta": 1e-3}
    common = {"logger": True, "enable_checkpointing": True, "rounds": 2, "data": federation(test=True)}

    def run(folder, **options):
        chosen = {"privacy": None, "client_privacy": None} | options
        result = perada.finetune(
            network(), **sections(adapter="full", seed=SEED, default_root_dir=str(folder), **common | chosen, **NO_LOOK)
        )
        return result

    for name, options in (("open", {}), ("secure", {section: level})):
        run(tmp_path / name, **options).export(tmp_path / name / "saved")
        assert {path.rpartition("/")[2] for path in holds_seed(tmp_path / name)} >= {"run.json", "config.yaml"}
    seeded = run(tmp_path / "seeded", **{section: level | {"secure_rng": False}})
    with pytest.warns(UserWarning, match="Test mode"):
        seeded.export(tmp_path / "seeded" / "saved")
    assert (tmp_path / "seeded" / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt").is_file()
    assert holds_seed(tmp_path / "seeded") == []
    assert seeded.info["seed"] is None


NO_LOOK = {"enable_progress_bar": False, "accelerator": "cpu", "algorithm": "perada_no_kd"}


def test_what_is_saved_says_that_it_is_a_test(tmp_path):
    run = train({"secure_rng": False})
    with pytest.warns(UserWarning, match=re.escape(TEST_MODE)):
        folder = run.export(tmp_path / "run")
    for name in ("global", "client_0", "client_2"):
        assert TEST_MODE in (folder / name / "README.md").read_text()
    again = perada.Run.load(folder, backbone=network())
    with pytest.warns(UserWarning, match="Test mode"):
        again.export(tmp_path / "again")
    assert run.metrics["rounds"][-1]["privacy/test_mode"] == 1.0
    secure = train()
    assert "privacy/test_mode" not in secure.metrics["rounds"][-1]
    assert TEST_MODE not in (secure.export(tmp_path / "secure") / "global" / "README.md").read_text()


RECIPE = {
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    "model": {"backbone": "test_resnet", "pretrained": "perada:fashion_test_resnet", "adapter": "head"},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "IID", "init_args": {"num_clients": 4}},
        "train_limit": 80,
        "test_limit": 40,
        "image_size": 32,
    },
    "federated": {"algorithm": "Ditto", "clients_per_round": 1},
    "privacy": {"noise_multiplier": 2.0, "secure_rng": False},
    "training": {"local_steps": 1},
}


def accuracies(folder):
    return json.loads((folder / "run.json").read_text())["metrics"]["clients"]["personal/local_test"]


@pytest.mark.slow
def test_the_program_says_so_and_writes_no_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    seed = f"--seed_everything={SEED}"
    main(["fit", "--config", "recipe.yaml", seed])
    printed = capsys.readouterr()
    assert TEST_MODE in printed.out
    table = [line for line in printed.out.splitlines() if line.startswith("|")]
    assert "ε release" in table[0]
    version = tmp_path / "lightning_logs" / "version_0"
    assert holds_seed(version) == []
    main(["report", str(version)])
    assert TEST_MODE in capsys.readouterr().out
    main(["test", "--config", "recipe.yaml", "--ckpt_path=last", "--trainer.logger=false"])  # whatever the seed is
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")] == table
    # Clients who were never drawn have the first adapter, which follows from the seed too, and is in the checkpoint.
    with pytest.warns(UserWarning, match="Test mode"):
        main(["export", str(version), "--output", "out"])
    assert TEST_MODE in capsys.readouterr().out
    assert holds_seed(tmp_path / "out") == []
    states = [perada.Run.load("out").state("personal", client) for client in range(4)]
    assert len({float(state["fc.weight"].sum()) for state in states}) == 2  # one was drawn
    with pytest.raises(ValueError, match=r"seed is '[0-9a-f]{32}'"):
        main(["fit", "--config", "recipe.yaml", "--ckpt_path=last", "--trainer.max_epochs=2"])
    main(["fit", "--config", "recipe.yaml", "--ckpt_path=last", "--trainer.max_epochs=2", seed])
    with pytest.raises(ValueError, match="secure_rng=false"):
        main(["compare", "recipe.yaml"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_a_run_does_not_change_its_generator_on_the_way(tmp_path, section, secure):
    def fit(secure, rounds, **more):
        levels = {"privacy": None, section: {"noise_multiplier": 5.0, "secure_rng": secure}}
        common = {"adapter": "full", "algorithm": "fedavg", "data": federation(), "seed": SEED}
        saving = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True}
        return perada.finetune(network(), **sections(rounds=rounds, **common | QUIET | saving | levels | more))

    fit(secure, 1)
    path = str(tmp_path / "saved.ckpt")
    message = rf"{section}: the checkpoint's noise was drawn with secure_rng={secure}, but this run has {not secure}"
    with pytest.raises(ValueError, match=message) as error:
        fit(not secure, 2, ckpt_path=path)
    assert "\n" not in str(error.value)
    assert len(fit(secure, 2, ckpt_path=path).metrics["rounds"]) == 2


def test_dropout_of_a_private_run_follows_from_the_seed_in_the_test_mode_alone():
    """Clipped only, with full batches: but for dropout's masks there is nothing at random."""
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(PIXELS, CLASSES))
    drawn = {}
    for secure in (True, False):
        privacy = {"noise_multiplier": 0.0, "delta": 1e-3, "secure_rng": secure}
        common = {"adapter": "full", "algorithm": "fedavg", "batch_size": "full", "rounds": 1, "seed": SEED} | QUIET
        runs = [
            perada.finetune(net, federation(), **sections(privacy=privacy, **common)).state("global") for _ in range(2)
        ]
        drawn[secure] = [torch.equal(runs[0][key], runs[1][key]) for key in runs[0]]
    assert all(drawn[False])
    assert not any(drawn[True])
