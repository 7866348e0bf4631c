# SPDX-License-Identifier: Apache-2.0
"""The notebooks in docs/tutorials run from top to bottom."""

import json
import subprocess
import sys

import pytest

from tests.test_docs import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
CUT = """
import perada
finetune = perada.finetune
def cut(backbone, data, local_epochs=1, **options):
    return finetune(backbone, data, **options | {"rounds": 1, "local_steps": 1})
perada.finetune = cut
"""


def cells(notebook):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def run(notebook, folder, before=""):
    """In a process of its own, since the program's help lists all algorithms that there are in a process."""
    source = "\n".join([before, *("".join(cell["source"]) for cell in cells(notebook))])
    (folder / "notebook.py").write_text(source)
    subprocess.run([sys.executable, "notebook.py"], cwd=folder, check=True)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_there(notebook):
    kinds = [output["output_type"] for cell in cells(notebook) for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds


@pytest.mark.parametrize("name", ["folder_to_model", "own_algorithm"])
def test_it_runs_cut_down_to_a_step(name, tmp_path):
    run(ROOT / "docs" / "tutorials" / f"{name}.ipynb", tmp_path, CUT)


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "ten_hospitals")) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_it_runs(notebook, tmp_path):
    run(notebook, tmp_path)
