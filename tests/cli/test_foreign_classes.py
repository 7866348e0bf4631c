# SPDX-License-Identifier: Apache-2.0
"""Folders and files that somebody else wrote, with a module beside them that tells when it is run."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perada.cli import main
from perada.cli.foreign_classes import foreign_classes
from perada.cli.inference import open_run
from perada.deploy.site.file import read_site

MODULE = "beside_a_run"
CODE = f"""
from pathlib import Path
from perada.algorithms import FedAvg
Path({MODULE + ".ran"!r}).touch()
class Own(FedAvg):
    pass
"""
NAMES = {
    "a class": {"class_path": f"{MODULE}.Own"},
    "a string": f"{MODULE}.Own",
    "with arguments": {"class_path": f"{MODULE}.Own", "init_args": {}},
    "within another": {"class_path": "FedEnsemble", "init_args": {"base": {"class_path": f"{MODULE}.Own"}}},
    "a string within another": {"class_path": "FedEnsemble", "init_args": {"base": f"{MODULE}.Own"}},
    "within one of another's": {"class_path": "FFALoRA", "init_args": {"base": {"class_path": f"{MODULE}.a.b.Own"}}},
}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """The current folder, which is that of a run."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"no checkpoint")
    (tmp_path / "a.png").write_bytes(b"no image")
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield tmp_path
    sys.modules.pop(MODULE, None)


def write_config(folder, algorithm, **sections):
    content = {"federated": {"algorithm": algorithm}, **sections}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))


def assert_asked(words, folder, name=f"{MODULE}."):
    with pytest.raises(ValueError, match=name) as error:
        main(words)
    assert "\n" not in str(error.value)
    assert "trust" in str(error.value)
    assert not (folder / f"{MODULE}.ran").exists()
    assert MODULE not in sys.modules


COMMANDS = {
    "predict": ["predict", ".", "--images=a.png"],
    "predict, of a checkpoint": ["predict", "checkpoints/last.ckpt", "--images=a.png"],
    "export": ["export", ".", "--output=out"],
    "export, ONNX": ["export", ".", "--output=out", "--format=onnx"],
    "push": ["push", ".", "somebody/something"],
    "clients add": ["clients", "add", ".", "--data=.", "--output=out"],
    "fit": ["fit", "--config", "config.yaml"],
    "test": ["test", "--config=config.yaml", "--ckpt_path=checkpoints/last.ckpt"],
    "predict, of a recipe": ["predict", "--config=config.yaml", "--ckpt_path=checkpoints/last.ckpt"],
    "check": ["check", "config.yaml"],
    "data inspect": ["data", "inspect", "--config=config.yaml"],
    "compare": ["compare", "config.yaml"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_value
def test_a_class_that_the_folder_of_a_run_names_is_asked_about_and_not_imported(stranger, command, name):
    write_config(stranger, NAMES[name])
    assert_asked(COMMANDS[command], stranger)


@pytest.mark.parametrize("section", ["trainer", "data", "model"])
def test_classes_in_other_sections_of_a_runs_file_are_asked_about_too(stranger, section):
    classes = {
        "trainer": {"callbacks": [{"class_path": f"{MODULE}.Own"}]},
        "data": {"dataset": f"{MODULE}.Own"},
        "model": {"backbone": {"class_path": f"{MODULE}.Own"}},
    }
    write_config(stranger, "Ditto", **{section: classes[section]})
    assert_asked(["test", "--config=config.yaml"], stranger)


def test_a_trusted_class_is_imported_only_if_the_checkpoint_is_intact(stranger):
    write_config(stranger, NAMES["a class"])
    with pytest.raises(ValueError, match=r"last\.ckpt' is not a checkpoint"):
        open_run(stranger / "checkpoints" / "last.ckpt", trust=True)
    assert MODULE not in sys.modules


def test_an_unapproved_recipe_of_a_deployment_imports_nothing(stranger):
    recipe = {"data": {"dataset": {"class_path": f"{MODULE}.Own"}}, "federated": {"algorithm": "FedAvg"}}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    site = {"name": "a", "recipes": [{"recipe": "recipe.yaml"}], "data": {"root": ".", "layout": "*"}}
    Path("site.yaml").write_text(yaml.safe_dump(site))
    assert read_site(Path("site.yaml")).recipes
    assert_asked(["deploy", "check", "site.yaml"], stranger)


def test_words_that_are_no_classes_are_not_asked_about():
    content = {
        "table": "scans.csv",
        "root": "/data/a.b",
        "version": "1.2",
        "backbone": "vit_base.augreg",
        "algorithm": {"class_path": "perada.algorithms.perada.PerAda"},
        "logger": {"class_path": "pytorch_lightning.loggers.CSVLogger"},
        "short": {"class_path": "FedAvg"},
    }
    assert foreign_classes(content) == []


def test_words_whose_first_part_is_a_module_are_asked_about(stranger):
    assert foreign_classes([f"{MODULE}.Own", "json.JSONDecoder", {"a": {"b": [{"class_path": "no.such.Thing"}]}}]) == [
        f"{MODULE}.Own",
        "json.JSONDecoder",
        "no.such.Thing",
    ]


def test_python_minus_m_does_not_look_for_libraries_in_the_current_folder(tmp_path):
    for name in ("jsonargparse", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file beside was run')\n")
    ended = subprocess.run([sys.executable, "-m", "perada", "ls"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "PerAda" in ended.stdout or "perada" in ended.stdout
