# SPDX-License-Identifier: Apache-2.0
"""What the program imports: modules are counted, not seconds."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from PIL import Image

from perada.cli.early_checks import check_early
from perada.results.run_file import _REQUIRED_INFO, RunFile, write_run
from tests.cli.test_cli import TINY

PACKAGE = Path(__file__).parents[2] / "perada"
LARGE = {"huggingface_hub", "matplotlib", "numpy", "opacus", "peft", "PIL", "pytorch_lightning", "scipy", "sklearn"}
LARGE |= {"timm", "torch", "torchmetrics", "torchvision", "tqdm", "transformers"}
OPTIONAL = {"matplotlib", "opacus", "sklearn", "transformers"}
"""What only some recipes and studies need."""
SCRIPT = """
import atexit, json, pathlib, sys
atexit.register(lambda: pathlib.Path("modules.json").write_text(json.dumps([*sys.modules])))
import perada
if sys.argv[1:]:
    from perada.cli import entry_point
    entry_point()
"""


STOP_AT_PAGE = """
import json, os, pathlib, sys

class StopAtPage:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        if text.startswith("Page: "):
            pathlib.Path("modules.json").write_text(json.dumps([*sys.modules]))
            self.stream.write(text)
            self.stream.flush()
            os._exit(0)
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stdout = StopAtPage(sys.stdout)
from perada.cli import entry_point
entry_point()
"""
"""Runs the program until it prints the path of a report, and writes the modules that it has imported by then."""


def imported(folder, *words, code=0):
    """The modules that a process has imported which runs the program; without words, that imports perada."""
    command = [sys.executable, "-c", SCRIPT, *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr[-3000:]
    return set(json.loads((folder / "modules.json").read_text()))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 0),
        ("--help", 0),
        ("ls", 0),
        ("cp quickstart mine.yaml", 0),
        ("study", 0),
        ("report .", 0),
        ("cp --help", 0),
        ("fti", 1),
        ("study fed-ensembel", 1),
        ("cp quikstart mine.yaml", 1),
        ("fit --config quikstart", 1),
    ],
)
def test_what_computes_nothing_imports_nothing_large(tmp_path, words, code):
    (tmp_path / "metrics.csv").write_text("epoch,personal/local_test\n0,0.5\n")
    modules = imported(tmp_path, *words.split(), code=code)
    assert modules & LARGE == set()
    assert len(modules) < 500  # torch alone makes 1200


@pytest.fixture
def record(tmp_path):
    """A folder with the record of a run of three clients, and no models."""
    names = ["Aachen", "Bonn", "Celle"]
    info = dict.fromkeys(_REQUIRED_INFO, None) | {"num_classes": 2, "clients": names, "built_for": None}
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", RunFile(3, info, {"rounds": [], "clients": {}}))
    (tmp_path / "images").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "predict run",
        "predict nothing --images images",
        "predict run --images nothing",
        "predict run --images images --client Bon",
        "predict run --images images --client 3",
        "predict run --images images --batch_size many",
        "predict run --images images --output nothing/p.csv",
        "export run --output x --client Bon",
        "export run --output x --format onx",
        "export run",
        "init --yes --rounds 0",
        "init --yes --rounds many",
        "init --yes --images nothing",
        "init --yes --images run/run.json",
        "init --yes --task class",
        "init --yes --epsilon -1",
        "init --yes --output run",
        "clients add nothing --data images",
        "clients add images --data images",
        "clients add run --data nothing/table.csv",
        "clients add run --data images --client Bonn",
        "clients add run --data nothing",
        "clients add run",
        "clients add",
        "clients remove nothing --client Bonn",
        "clients remove images --client Bonn",
        "clients remove run --client Bon",
        "clients remove run",
        "push nothing me/run",
        "push images me/run",
        "push run me/run --client Bon",
        "push run",
        "push run --client Bonn",
        "push --client Bonn run",
        "push",
        "data inspect nothing",
        "data inspect nothing.csv",
        "data inspect run/run.json",
        "report nothing",
        "report images",
        "report run/nothing.json",
        "report run --pictures images",
        "report",
        "compare nothing",
        "compare quickstart --trainer.max_epoch 3",
        "compare quickstart --seeds -1",
        "compare quickstart --seeds 0 4294967296",
        "compare quickstart --seeds 0,1",
        "compare quickstart --seeds 0 one",
        "compare",
    ],
)
def test_a_mistake_is_found_before_anything_large_is_imported(record, words):
    modules = imported(record, *words.split(), code=1)
    assert modules & LARGE == set()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("push", "run me/run"),
        ("push", "--client Bonn --public run me/run"),
        ("push", "run --trust me/run --license mit"),
        ("push", "run me/run --client=Bonn"),
        ("compare", "quickstart --seeds 0 4294967295"),
        ("compare", "quickstart --seeds=7 --jobs 2"),
        ("compare", "--seeds 1 2 --algorithms ditto"),
        ("data inspect", "hf:mnist"),
        ("data inspect", "images"),
        ("data inspect", "--config quickstart"),
        ("clients add", "run --data quickstart"),
        ("clients add", "run --data hf:mnist"),
        ("clients add", "run --images images"),
    ],
)
def test_what_may_be_right_is_left_to_the_command(record, monkeypatch, command, words):
    monkeypatch.chdir(record)
    check_early(command, words.split())


@pytest.mark.parametrize("options", ["--output page", "--open", "--watch", "--watch --open"])
def test_report_prints_the_path_of_its_page_before_anything_large_is_imported(tmp_path, options):
    (tmp_path / "metrics.csv").write_text("epoch,personal/local_test\n0,0.5\n")
    command = [sys.executable, "-c", STOP_AT_PAGE, "report", ".", *options.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    folder = "page" if "--output" in options else "report"
    assert ended.stdout == f"Page: {Path(folder) / 'index.html'}"
    assert set(json.loads((tmp_path / "modules.json").read_text())) & LARGE == set()


def test_the_page_of_a_run_without_privacy_is_drawn_without_torch(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,personal/local_test\n0,0.5\n")
    modules = imported(tmp_path, "report", ".", "--output", "page")
    assert (tmp_path / "page" / "index.html").is_file()
    assert modules & {"torch", "timm", "peft", "huggingface_hub"} == set()


def test_python_runs_the_program_as_a_module(tmp_path):
    command = [sys.executable, "-m", "perada"]
    printed = subprocess.run([*command, "ls"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "quickstart" in printed.stdout.split()
    rejected = subprocess.run([*command, "fti"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert rejected.returncode == 1 and rejected.stderr.startswith("perada: error: ")


def test_warnings_are_one_line_each():
    message = "import warnings; from perada.cli.messages import short_warnings; short_warnings(); "
    message += "warnings.warn('two\\n lines \\x1b[2J'); warnings.warn('old', DeprecationWarning)"
    result = subprocess.run(
        [sys.executable, "-c", message], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert result[0].startswith("perada: warning: two lines ") and "\x1b" not in result[0]
    assert result[1:] == ["<string>:1: DeprecationWarning: old"]


@pytest.mark.slow
def test_optional_packages_are_imported_where_they_are_used():
    """At the top of a file they would be imported by every recipe that reaches it."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert len(trees) > 100
    for path, tree in trees.items():
        names = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
        names |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} & OPTIONAL == set(), path


@pytest.mark.slow
def test_fit_imports_what_its_recipe_names(tmp_path):
    """PEFT itself imports transformers, and torchmetrics matplotlib: no code of ours can keep them out."""
    shapes = ["--data.dataset=perada.studies.shapes.Shapes", "--data.dataset.count=400"]
    shapes += ["--data.public=null", "--data.public_fraction=0.1"]
    small = ["--trainer.fast_dev_run=true", "--distillation.steps=1", "--training.local_steps=1"]
    modules = imported(tmp_path, "fit", "--config", "digits", *shapes, *small)
    assert {name for name in modules if name.startswith("perada.studies.")} == {"perada.studies.shapes"}
    assert {"torch", "timm", "peft", "pytorch_lightning", "perada.studies.shapes"} <= modules
    others = {"opacus", "sklearn", "transformers.models.vit.modeling_vit"}
    assert [name for name in others if find_spec(name) is None] == []
    assert modules & others == set()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["predict run --images image.png", "export run --output out --format safetensors"])
def test_a_saved_run_is_used_without_lightning_and_torchmetrics(tmp_path, words):
    """These two take as long to import as torch itself. PEFT imports transformers, and timm torchvision."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    subprocess.run([sys.executable, "-m", "perada", "fit", "--config", "tiny.yaml"], cwd=tmp_path, check=True)
    (tmp_path / "lightning_logs" / "version_0").rename(tmp_path / "run")
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    modules = imported(tmp_path, *words.split())
    assert "torch" in modules
    assert modules & {"pytorch_lightning", "torchmetrics", "matplotlib", "opacus", "sklearn"} == set()
