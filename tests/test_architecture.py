# SPDX-License-Identifier: Apache-2.0
"""The page on architecture says what the code does: its drawing is that of the imports, and what it names is there."""

import ast
import re

from . import test_house as house

ROOT = house.ROOT


def architecture():
    return (ROOT / "docs" / "architecture.md").read_text()


def test_the_drawing_of_the_rooms_is_that_of_the_imports():
    drawn = {}
    for line in architecture().split("```text\n")[1].split("```")[0].splitlines():
        room, *used = line.split()
        drawn[room] = {name.strip(",") for name in used} & {*house.ROOMS, *house.LINKS} if room != "core" else set()
    found = {room: set() for room in house.ROOMS}
    for module, path in house.MODULES.items():
        for name in house.imported(module, path.read_text(), is_package=path.name == "__init__.py"):
            room, other = house.room_of(module), house.room_of(name)
            if room in found and name.startswith("perada.") and other != room:
                found[room].add(other)
    assert list(drawn) == house.ROOMS
    assert drawn == found


def names_in(path):
    """Classes and functions of a file, and the methods of its classes with the class before them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}"
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_what_the_page_on_architecture_names_is_there():
    quoted = set(re.findall(r"`([^`\n]+)`", architecture()))
    files = {name for name in quoted if name.endswith(".py")}
    assert len(files) >= 15
    assert [name for name in files if not (ROOT / name).is_file()] == []
    known = {name for path in house.MODULES.values() for name in names_in(path)}
    named = {name for name in quoted if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name)} - {"Federation.cohort"}
    assert len(named) >= 20
    attributes = {"Federation.protection", "FederatedClassifier.federation", "SERVER_RULES"}
    assert named - known - attributes == set()


def test_steps_of_the_ways_name_what_their_files_define():
    rows = [line.split("|")[2:4] for line in architecture().splitlines() if re.match(r"\|\s+\d+ \|", line)]
    assert len(rows) >= 15
    for what, where in rows:
        defined = {name for file in re.findall(r"`([^`]+)`", where) for name in names_in(ROOT / file)}
        asked = [name for name in re.findall(r"`([A-Za-z]\w+(?:\.\w+)?)`", what) if name not in ("x", "w", "privacy")]
        assert asked and [name for name in asked if name not in defined] == [], (what, where)


def test_each_question_has_its_answer_where_the_page_says():
    rows = [line.split("|")[1:4] for line in architecture().split("## Where is it?\n")[1].split("## ")[0].splitlines()]
    asked = [row for row in rows if len(row) == 3 and row[0].strip().endswith("?")]
    assert len(asked) >= 20
    for question, where, what in asked:
        (file,), (name,) = re.findall(r"`([^`]+)`", where), re.findall(r"`([^`]+)`", what)
        assert name in set(names_in(ROOT / file)), question
