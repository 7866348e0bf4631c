# SPDX-License-Identifier: Apache-2.0
"""The page on architecture: its drawing is that of the imports, and the files and names on it exist."""

import ast
import re

from . import test_house as house

ROOT = house.ROOT
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_drawing_of_the_rooms_is_that_of_the_imports():
    drawn = {}
    for line in PAGE.split("```text\n")[1].split("```")[0].splitlines():
        room, *others = line.split()
        drawn[room] = {name.strip(",") for name in others} & {*house.ROOMS, *house.LINKS}
    drawn["core"] = set()  # its line says in words what it holds

    imports = {room: set() for room in house.ROOMS}
    for module, path in house.MODULES.items():
        room = house.room_of(module)
        if room not in imports:
            continue
        for name in house.imported(module, path.read_text(), is_package=path.name == "__init__.py"):
            if name.startswith("perada.") and house.room_of(name) != room:
                imports[room].add(house.room_of(name))
    assert list(drawn) == house.ROOMS
    assert drawn == imports


def names_in(path):
    """Names that a file defines at its top, and the members of its classes with the class before them."""
    for node in house.parse_source(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield ast.unparse(target)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}"
                if isinstance(inner, ast.AnnAssign):
                    yield f"{node.name}.{ast.unparse(inner.target).removeprefix('self.')}"
                if isinstance(inner, ast.Assign):
                    yield from (f"{node.name}.{ast.unparse(one).removeprefix('self.')}" for one in inner.targets)


def test_files_and_names_on_the_page_exist():
    quoted = set(re.findall(r"`([^`\n]+)`", PAGE))
    files = {name for name in quoted if name.endswith(".py")}
    names = {name for name in quoted if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name)}
    assert files and names
    assert [name for name in files if not (ROOT / name).is_file()] == []
    defined = {name for path in house.MODULES.values() for name in names_in(path)}
    assert names - defined == set()


def test_each_row_names_what_its_files_define():
    """Of the tables of steps, and of the one that says where things are."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|") and ".py`" in line]
    assert rows
    for row in rows:
        files = re.findall(r"`([\w/]+\.py)`", " ".join(row))
        defined = {name for file in files for name in names_in(ROOT / file)}
        names = set(re.findall(r"`([A-Za-z]\w+(?:\.\w+)?)`", " ".join(row))) - {"privacy"}
        assert names and names <= defined, row
