# SPDX-License-Identifier: Apache-2.0
"""The wheel, built from the sdist as PyPI's users get it, holds the whole package and nothing else."""

import email
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def copy_of_checkout(folder):
    skip = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "lightning_logs")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=skip)
    return folder


def build_packages(checkout, out):
    """Folder with the sdist of a tree and the wheel built from it, as `make dist` makes them."""
    command = [sys.executable, str(ROOT / ".ci" / "dist.py"), str(checkout), str(out)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    checkout = copy_of_checkout(tmp_path_factory.mktemp("checkout") / "perada")
    return build_packages(checkout, tmp_path_factory.mktemp("dist"))


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
    again = build_packages(checkout, tmp_path / "dist")
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


def metadata(dist):
    """The metadata of the wheel: its fields, and the long description."""
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    return message, message.get_payload(decode=True).decode()


def relative_links(text):
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith(("https://", "#"))]


def test_the_long_description_has_no_dead_link(dist):
    """As long as the repository has no address, links to its files are plain text, and pictures are left out."""
    fields, text = metadata(dist)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert publishing().address_of() == ""
    assert len(relative_links(readme)) > 30
    assert relative_links(text) == []
    assert "[docs/own_images.md]" not in text and "docs/own_images.md leads from" in text
    assert "![" not in text
    assert fields.get_all("Project-URL") is None


def publishing():
    spec = importlib.util.spec_from_file_location("publishing", ROOT / ".ci" / "publishing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ADDRESS = "https://example.org/someone/perada"


def test_all_addresses_follow_from_one_line(tmp_path):
    for name in ("pyproject.toml", "CITATION.cff", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    publish = publishing()
    for _ in range(2):  # it may be set again
        publish.set_address(ADDRESS, tmp_path)
    assert publish.address_of(tmp_path) == ADDRESS
    assert (tmp_path / "CITATION.cff").read_text().count(f"repository-code: {ADDRESS}\n") == 1
    publish.prepare(tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == ADDRESS
    assert all(url.startswith(ADDRESS) for url in project["urls"].values())
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert relative_links(text) == []
    for target in re.findall(rf"{ADDRESS}/(?:blob|raw)/v{project['version']}/([^)#\s]+)", text):
        assert (ROOT / target).exists(), target
    assert f"![Python 3.11 to 3.13]({ADDRESS}/raw/v{project['version']}/docs/badge_python.svg)" in text
    assert f"({ADDRESS}/blob/v{project['version']}/docs/compare.md#which-row-to-take)" in text


@pytest.mark.parametrize("address", ["", "perada", "https://example.org", 'https://example.org/a"b'])
def test_other_addresses_are_rejected(tmp_path, address):
    with pytest.raises(ValueError, match="must begin with https:// and have a path"):
        publishing().set_address(address, tmp_path)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(dist, tmp_path):
    """Installed outside of the checkout; its dependencies are those of this environment, without perada."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (path,) = dist.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", str(path)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    # A line of a .pth file adds a folder, but not the .pth file in it by which the checkout would be imported.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    here = tmp_path / "here"
    here.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), "-c", "import perada; print(perada.__file__)"],
        cwd=here, env=clean, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert Path(result.stdout.strip()).is_relative_to(packages)
    perada = environment / "bin" / "perada"
    words = ["fit", "--config", "quickstart", "--trainer.fast_dev_run=true"]
    for arguments in (["--version"], ["ls"], words):
        subprocess.run([str(perada), *arguments], cwd=here, env=clean, check=True, capture_output=True)
