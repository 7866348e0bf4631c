# SPDX-License-Identifier: Apache-2.0
"""The notebooks in docs/tutorials run from top to bottom."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.test_docs import ROOT, Block, Reader

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder_to_model", "own_algorithm", "segmentation_across_hospitals"])
def test_it_runs_cut_down_to_a_step(name, tmp_path):
    run(ROOT / "docs" / "tutorials" / f"{name}.ipynb", tmp_path, CUT)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    run(notebook, tmp_path)


def shell_blocks(notebook):
    """Indented blocks of the text of a notebook, without their indentation."""
    texts = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    indented = [block for text in texts for block in re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE)]
    blocks = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in indented]
    return [block for block in blocks if block.startswith(("perada ", "pip "))]


def module_of(notebook):
    """The imports and classes of a notebook: what a reader puts into a file of one's own."""
    source = "\n".join("".join(cell["source"]) for cell in cells(notebook))
    kept = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    return ast.unparse(ast.Module(kept, type_ignores=[]))


def test_the_blocks_below_are_those_of_the_notebooks():
    result = {notebook.stem: [block.split()[0] for block in shell_blocks(notebook)] for notebook in NOTEBOOKS}
    assert result == {
        "folder_to_model": ["pip"],
        "own_algorithm": ["pip", "perada"],
        "segmentation_across_hospitals": ["pip"],
        "ten_hospitals": ["pip"],
    }


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_commands_are_accepted(notebook, tmp_path, monkeypatch, capsys):
    reader = Reader(tmp_path, monkeypatch, capsys)
    (tmp_path / "mine.py").write_text(module_of(notebook))
    for block in shell_blocks(notebook):
        # Of jupyter no extra of ours knows; the rest of a comparison takes minutes.
        reader.shell(Block("shell", block.replace(" jupyter", ""), "test: parse only, since it takes minutes"))
