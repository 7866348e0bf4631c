# SPDX-License-Identifier: Apache-2.0
"""The notebooks in docs/tutorials run from top to bottom."""

import json

import pytest

from tests.test_docs import ROOT, Reader

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def cells(notebook):
    found = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in found], [cell["outputs"] for cell in found]


def run(notebook):
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells(notebook)[0]):
        exec(compile(source, f"{notebook.stem}, cell {number}", "exec"), names)
    return names


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_there(notebook):
    _, outputs = cells(notebook)
    kinds = [output["output_type"] for found in outputs for output in found]
    assert kinds
    assert "error" not in kinds


@pytest.mark.parametrize("name", ["folder_to_model", "own_algorithm"])
def test_it_runs_cut_down_to_a_step(name, tmp_path, monkeypatch, capsys):
    Reader(tmp_path, monkeypatch, capsys)
    run(ROOT / "docs" / "tutorials" / f"{name}.ipynb")


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "ten_hospitals")) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_it_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(notebook)
