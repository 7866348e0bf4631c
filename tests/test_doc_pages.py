# SPDX-License-Identifier: Apache-2.0
"""Tables, lists of pages, and notebooks of the documentation are current. ``test_docs.py`` runs its code."""

import json
import re
from pathlib import Path

import pytest

from perada import algorithms, server
from perada.algorithms import make_algorithm
from perada.server import make_rule
from tests.doc_tables import BLOCK, COMMAND, generated

ROOT = Path(__file__).parents[1]


def options(instance):
    """Return the class of an algorithm or a rule, and its options, of which objects are compared by their text."""
    attributes = vars(instance)
    comparable = {name: value if isinstance(value, float | int) else repr(value) for name, value in attributes.items()}
    return type(instance), comparable


@pytest.mark.parametrize(("module", "make"), [(algorithms, make_algorithm), (server, make_rule)])
def test_the_tables_of_algorithms_and_rules_have_the_defaults(module, make):
    written = {}
    for row in (ROOT / "docs" / "algorithms.md").read_text().splitlines():
        names, classes = (re.findall(r"`([^`]+)`", cell) for cell in (*row.split("|"), "", "")[1:3])
        written |= dict(zip(names, classes, strict=False)) if row.startswith("| `") else {}
    known = algorithms.ALGORITHMS if module is algorithms else server.SERVER_RULES
    assert set(known) <= set(written)
    for name in known:
        instance = eval(written[name], vars(module).copy())
        if isinstance(instance, type):
            instance = instance()
        assert options(instance) == options(make(name)), written[name]


def test_the_generated_tables_are_current():
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    for path, page in pages.items():
        assert page.count(f"<!-- generated: {COMMAND} ") == len(BLOCK.findall(page)), path
        assert page == generated(page), f"{path.name}: run `make tables`"


def test_every_package_has_a_page_of_the_api_reference():
    packages = {path.parent.name for path in (ROOT / "perada").glob("*/__init__.py")} | {"perada"}
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
    assert set(pages) == packages
    assert all(f"::: perada.{package}" in page for package, page in pages.items() if package != "perada")


NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_each_notebook_is_in_the_navigation_and_in_the_list_of_pages():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        assert navigation.count(f": docs/tutorials/{notebook.name}\n") == 1
        assert f"(tutorials/{notebook.name})" in listed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_notebooks_are_small(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    for output in outputs:
        texts = [output.get("text", []), output.get("data", {}).get("text/plain", [])]
        lines = "".join(line for text in texts for line in text).splitlines()
        assert len(lines) <= 40  # a screen
        assert max(map(len, lines), default=0) <= 400  # an error is one line
        assert len(output.get("data", {}).get("image/png", "")) < 60_000


def test_the_page_for_missing_pages_links_to_pages():
    text = (ROOT / "docs" / "theme" / "404.html").read_text(encoding="utf-8")
    targets = re.findall(r"\{\{ '([^']+)/' \| url \}\}", text)
    assert len(targets) > 3
    for target in targets:
        page = ROOT / target
        assert (page / "index.md").is_file() or page.with_suffix(".md").is_file(), target
