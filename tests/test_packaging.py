# SPDX-License-Identifier: Apache-2.0
"""The wheel, built from the sdist as PyPI's users get it, holds the whole package and nothing else."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def copy_of_checkout(folder):
    skip = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "lightning_logs")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=skip)
    return folder


def built(checkout, out):
    """Folder with the sdist of a tree and the wheel built from it, as `make dist` makes them."""
    command = [sys.executable, str(ROOT / ".ci" / "dist.py"), str(checkout), str(out)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    checkout = copy_of_checkout(tmp_path_factory.mktemp("checkout") / "perada")
    return built(checkout, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(dist):
    """Names of the files in the wheel."""
    (path,) = dist.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(dist, tmp_path):
    """Whatever the folder, the times of the files and the umask were."""
    checkout = copy_of_checkout(tmp_path / "another")
    for path in checkout.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (1_600_000_000, 1_600_000_000))
    again = built(checkout, tmp_path / "dist")
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (dist, again)
    ]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


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
