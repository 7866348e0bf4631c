# SPDX-License-Identifier: Apache-2.0
"""The wheel, built from the sdist as PyPI's users get it, holds the whole package and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names of the files in a wheel built from an sdist of a copy of this checkout."""
    checkout, out = tmp_path_factory.mktemp("checkout") / "perada", tmp_path_factory.mktemp("dist")
    skip = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "lightning_logs")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_top_level_is_only_perada(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"perada"}
    assert len(tops) == 2


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [
        ("perada", "**/*.py"),
        ("adapters", "**/*.py"),
        ("recipes", "**/*.yaml"),
        ("studies", "**/*.py"),
        ("studies", "report/page.html"),
        ("perada", "models/weights/*.safetensors"),
        ("perada", "models/weights/*.md"),
        ("perada", "py.typed"),
        ("perada", "cli/options.yaml"),
        ("perada", "results/templates/*.j2"),
    ],
)
def test_nothing_is_left_out(wheel, folder, pattern):
    inside = "perada" if folder == "perada" else f"perada/{folder}"
    expected = {f"{inside}/{p.relative_to(ROOT / folder).as_posix()}" for p in (ROOT / folder).glob(pattern)}
    assert expected
    assert expected - wheel == set()


def test_entry_point_and_licence_are_inside(wheel):
    tails = {name.split(".dist-info/")[1] for name in wheel if ".dist-info/" in name}
    assert {"entry_points.txt", "licenses/LICENSE"} <= tails
