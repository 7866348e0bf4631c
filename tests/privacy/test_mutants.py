# SPDX-License-Identifier: Apache-2.0
"""The tests of privacy are tested: each of many mistakes, made on purpose, must fail one of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .mutants import MUTANTS

ROOT = Path(__file__).parents[2]
COPIED = ("perada", "adapters", "recipes", "tests", "benchmarks", "pyproject.toml", "README.md")


def outcome_of(copy: Path, names: str) -> subprocess.CompletedProcess[str]:
    """Run test files of a copy of the project, whose modules come before those that are installed."""
    paths = [f"tests/{name}.py" for name in dict.fromkeys(names.split())]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    variables = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture
def copy(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "lightning_logs")
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    return tmp_path


@pytest.mark.slow
def test_without_a_mistake_they_pass(copy):
    outcome = outcome_of(copy, " ".join(mutant.tests for mutant in MUTANTS))
    assert outcome.returncode == 0, outcome.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.before.strip()[:50]}")
def test_a_mistake_is_noticed(copy, mutant):
    path = copy / "perada" / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    outcome = outcome_of(copy, mutant.tests)
    assert outcome.returncode == 1, f"{mutant} passes:\n{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}"
