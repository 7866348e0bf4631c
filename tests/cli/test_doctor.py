# SPDX-License-Identifier: Apache-2.0
"""`perada doctor`: versions and the machine as they are, what is broken by name, and nobody's name or folder."""

import getpass
import json
import os
import platform
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest
import torch

from perada.cli import doctor
from perada.cli.doctor import _check_hub
from perada.cli.main import main

HEAVY = {"pytorch_lightning", "peft", "timm", "transformers", "torchmetrics", "torchvision", "opacus"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder, and an environment in which nothing is asked of libraries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=1"] if name == "perada" else [])
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))
    return tmp_path


def doctor_output(capsys, code=0):
    """Facts by name, and checks by state."""
    if code:
        with pytest.raises(SystemExit) as end:
            main(["doctor"])
        assert end.value.code == code
    else:
        main(["doctor"])
    facts, checks = capsys.readouterr().out.split("\n\n")
    lines = [line.split("  ", 1) for line in checks.splitlines()]
    return (
        {line[:18].strip(): line[19:] for line in facts.splitlines()},
        {state: [text for one, text in lines if one == state] for state in ("pass", "warn", "fail")},
    )


def test_it_says_what_there_is(capsys):
    facts, checks = doctor_output(capsys)
    assert {name: facts[name] for name in ("perada", "torch", "peft")} == {
        name: version(name) for name in ("perada", "torch", "peft")
    }
    assert facts["Python"].startswith(platform.python_version())
    assert facts["instructions"].split()[0] == torch.backends.cpu.get_cpu_capability()
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "not set")
    assert facts["cores"].endswith(f" of {os.cpu_count()}")
    assert checks["fail"] == []
    assert "the current folder is writable" in checks["pass"]
    assert "the versions of 1 libraries are within their bounds" in checks["pass"]


@pytest.mark.slow
def test_it_is_fast_and_names_nobody(tmp_path):
    """In a process of its own with what is really installed: of the large libraries torch alone is imported."""
    script = """
import atexit, json, pathlib, sys
atexit.register(lambda: pathlib.Path("modules.json").write_text(json.dumps([*sys.modules])))
from perada.cli import entry_point
entry_point()
"""
    ended = subprocess.run([sys.executable, "-c", script, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    modules = set(json.loads((tmp_path / "modules.json").read_text()))
    assert "torch" in modules and modules & HEAVY == set()
    assert ended.stderr == ""
    assert "fail" not in ended.stdout and ended.returncode == 0
    home = Path(f"~{getpass.getuser()}").expanduser()
    for private in (str(tmp_path), str(home), platform.node(), "someone", str(Path(torch.__file__).parent)):
        assert private not in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["modules.json"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["torch<1"], f"torch is {version('torch')}, not <1; reinstall perada"),
        (["no-such-library>=2"], "no-such-library is not installed; reinstall perada"),
        (["numpy!=0", 'no-such-library; python_version < "3"'], None),
        (['no-such-library; extra == "flower"'], None),
    ],
)
def test_versions_out_of_their_bounds_fail(asked, said, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: asked if name == "perada" else [])
    _, checks = doctor_output(capsys, code=1 if said else 0)
    assert [line[: len(said)] for line in checks["fail"]] == [said] if said else checks["fail"] == []


def test_libraries_that_do_not_fit_one_another_are_warned_of(capsys, monkeypatch):
    asked = {"perada": ["torch>=2", "numpy>=1"], "numpy": ["torch==1.0", 'peft<0; extra == "more"']}
    monkeypatch.setattr(doctor, "requires", lambda name: asked.get(name, []))
    _, checks = doctor_output(capsys)
    assert f"numpy requires torch==1.0: torch is {version('torch')}, not ==1.0" in checks["warn"]
    assert not any("within their bounds" in line for line in checks["pass"])


def test_an_extra_is_complete_or_missing_or_of_another_version(capsys, monkeypatch):
    asked = ["numpy>=1", 'numpy>=1; extra == "report"', 'no-such; extra == "flower"', 'torch<1; extra == "tune"']
    monkeypatch.setattr(doctor, "requires", lambda name: asked if name == "perada" else None)
    _, checks = doctor_output(capsys)
    (line,) = (line for line in checks["pass"] if "extras" in line)
    complete, _, incomplete = line.removeprefix("installed extras: ").partition("; not installed completely: ")
    assert (complete, sorted(incomplete.split(", "))) == ("report", ["flower", "tune"])
    assert f"perada[tune]: torch is {version('torch')}, not <1; pip install 'perada[tune]'" in checks["warn"]


def test_an_import_that_breaks_fails_without_the_folders_of_whoever_installed_it(capsys, monkeypatch, tmp_path):
    def broken(name):
        library = tmp_path / "my env" / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libtorch_cpu.so"
        raise OSError(f"{library}: undefined symbol: x")

    monkeypatch.setattr(doctor, "import_module", broken)
    _, checks = doctor_output(capsys, code=1)
    text = "perada cannot be imported (OSError: libtorch_cpu.so: undefined symbol: x); reinstall it"
    assert checks["fail"] == [text]


def test_a_folder_that_cannot_be_written_to_fails(capsys, monkeypatch, tmp_path):
    def reject(**_):
        raise PermissionError(13, "Permission denied", str(tmp_path / "secret"))

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", reject)
    _, checks = doctor_output(capsys, code=1)
    assert checks["fail"] == ["the current folder is not writable (Permission denied); runs write there by default"]


@pytest.mark.every(2)
@pytest.mark.parametrize(("value", "set_"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_an_offline_hub_is_said(value, set_, capsys, monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    _, checks = doctor_output(capsys)
    assert any(line.startswith("HF_HUB_OFFLINE is set") for line in checks["pass"]) == set_


def test_imports_of_a_run_are_tried_when_asked_for(capsys, monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "import_module", tried.append)
    main(["doctor", "--imports"])
    assert "perada.api" in tried
    assert "pass  perada can be imported\n" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nothing"])
def test_a_hub_that_does_not_answer_is_a_warning(monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    check = _check_hub()
    assert check.status == "warn"
    assert "HF_HUB_OFFLINE=1" in check.text


@pytest.mark.parametrize("status", [200, 404])
def test_any_answer_of_the_hub_passes(monkeypatch, status):
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert _check_hub().status == "pass"
