# SPDX-License-Identifier: Apache-2.0
"""The tests are tested: each of many mistakes, made on purpose, must fail the test that is named for it.

A table ``mutants.yaml`` stands in the folder of each kind of tests. It lists mistakes by the file below ``perada/``
that they are in: the text that stands there once, the text put in its place, and the test that must notice, below
``tests/`` and without ``.py``.
"""

import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


class Outcome(NamedTuple):
    """Exit status of pytest, and what it printed."""

    status: int
    output: str


TABLES = sorted(Path(__file__).parent.glob("*/mutants.yaml"))
MUTANTS = [mutant for path in TABLES for mutant in read_table(path)]


def name(mutant: Mutant) -> str:
    return f"{mutant.file}: {' '.join(mutant.before.split())[:50]}"


class Project:
    """A copy of the project, and a process that runs its tests.

    Args:
        folder: Folder of the copy.
        runner: The process, a ``tests/mutant_runner.py``.
    """

    def __init__(self, folder: Path, runner: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self.runner = runner

    def run(self, tests: Iterable[str]) -> Outcome:
        """Run tests of the copy, whose modules come before those that are installed."""
        ids = ["tests/{}.py::{}".format(*test.split("::")) for test in tests]
        output = self.folder / "output.txt"
        request = {"copy": str(self.folder), "tests": ids, "output": str(output)}
        print(json.dumps(request), file=self.runner.stdin, flush=True)
        status = int(self.runner.stdout.readline())
        return Outcome(status, output.read_text(encoding="utf-8", errors="replace"))

    @contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        """Make a mistake in the copy, which is taken back afterwards."""
        path = self.folder / "perada" / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "lightning_logs")
    for name in COPIED:
        source = ROOT / name
        target = folder / name
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    # Compiled once. The files have a hash of their source, by which a mistake is noticed in the second it is made.
    for name in ("perada", "benchmarks"):
        compileall.compile_dir(folder / name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    variables = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", folder / "tests" / "mutant_runner.py"]
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runner:
        yield Project(folder, runner)
        runner.stdin.close()


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


def test_mistakes_use_names_that_are_there(tmp_path):
    """A name that a file lacks would be noticed by any test that runs the line."""
    for number, mutant in enumerate(MUTANTS):
        source = ROOT / "perada" / mutant.file
        if source.suffix == ".py":
            changed = source.read_text(encoding="utf-8").replace(mutant.before, mutant.after)
            (tmp_path / f"{number}.py").write_text(changed, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format", "json"]
    command += ["--select", "F821,F822,F823", tmp_path]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    unknown = []
    for found in json.loads(checked.stdout):
        mutant = MUTANTS[int(Path(found["filename"]).stem)]
        unknown.append(f"{name(mutant)}: {found['message']}")
    assert unknown == []


@pytest.mark.slow
def test_without_a_mistake_they_pass(project):
    outcome = project.run(dict.fromkeys(mutant.test for mutant in MUTANTS))
    assert outcome.status == 0, outcome.output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=name)
def test_a_mistake_is_noticed(project, mutant):
    with project.with_mistake(mutant):
        outcome = project.run([mutant.test])
    assert outcome.status == 1, f"{mutant} passes:\n{outcome.output[-4000:]}"
    # A name that is not there would be noticed by any test that runs the line.
    assert "NameError: name" not in outcome.output, f"{mutant}:\n{outcome.output[-4000:]}"
