# SPDX-License-Identifier: Apache-2.0
"""The tests are tested: each of many mistakes, made on purpose, must fail the test that is named for it.

A table ``mutants.yaml`` stands in the folder of each kind of tests. It lists mistakes by the file below ``perada/``
that they are in: the text that stands there once, the text put in its place, and the test that must notice, below
``tests/`` and without ``.py``.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
COPIED = ("perada", "adapters", "recipes", "studies", "tests", "benchmarks", "pyproject.toml", "README.md")


class Mutant(NamedTuple):
    file: str
    before: str
    after: str
    test: str


def read_table(path: Path) -> list[Mutant]:
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Mutant(file, **row) for file, rows in table.items() for row in rows]


TABLES = sorted(Path(__file__).parent.glob("*/mutants.yaml"))
MUTANTS = [mutant for path in TABLES for mutant in read_table(path)]


def name(mutant: Mutant) -> str:
    return f"{mutant.file}: {' '.join(mutant.before.split())[:50]}"


@pytest.fixture
def copy(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "lightning_logs")
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    return tmp_path


def run(copy: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the project, whose modules come before those that are installed."""
    paths = ["tests/{}.py::{}".format(*test.split("::")) for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *paths]
    variables = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_what_a_mistake_replaces_stands_there_once(table):
    wrong = [
        name(mutant)
        for mutant in read_table(table)
        if (ROOT / "perada" / mutant.file).read_text(encoding="utf-8").count(mutant.before) != 1
    ]
    assert wrong == []


def test_the_test_that_must_notice_is_there():
    """Below ``tests/``: a row that names no test would only be found by the hours of `make test-all`."""
    missing = []
    for mutant in MUTANTS:
        file, _, function = mutant.test.partition("::")
        path = ROOT / "tests" / f"{file}.py"
        if not path.is_file() or f"def {function.partition('[')[0]}(" not in path.read_text(encoding="utf-8"):
            missing.append(f"{name(mutant)}: {mutant.test}")
    assert missing == []


@pytest.mark.slow
def test_without_a_mistake_they_pass(copy):
    outcome = run(copy, dict.fromkeys(mutant.test for mutant in MUTANTS))
    assert outcome.returncode == 0, outcome.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=name)
def test_a_mistake_is_noticed(copy, mutant):
    path = copy / "perada" / mutant.file
    path.write_text(path.read_text(encoding="utf-8").replace(mutant.before, mutant.after), encoding="utf-8")
    outcome = run(copy, [mutant.test])
    assert outcome.returncode == 1, f"{mutant} passes:\n{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}"
