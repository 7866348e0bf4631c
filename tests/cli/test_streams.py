# SPDX-License-Identifier: Apache-2.0
"""Streams that cannot encode what is printed, or cannot be written: no result is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from perada.cli.streams import ascii_form
from tests.cli.test_cli import TINY

PROGRAM = str(Path(sys.executable).parent / "perada")
LOCALE_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = {
    "ascii": ({"PYTHONIOENCODING": "ascii"}, "ascii"),
    "cp1252": ({"PYTHONIOENCODING": "cp1252"}, "cp1252"),
    "locale C": (LOCALE_C, "ascii"),
}


def run(folder, *words, environment=None, redirection=""):
    """Run the program in a shell; its output is bytes."""
    command = f"{PROGRAM} {' '.join(words)} {redirection}"
    environment = os.environ | (environment or {})
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("words", ["ls", "fit --help", "init --help"])
@pytest.mark.every_value
def test_what_an_encoding_lacks_is_spelt_out(tmp_path, words, name):
    environment, encoding = ENCODINGS[name]
    ended = run(tmp_path, words, environment=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
    text = ended.stdout.decode(encoding)
    # The same text as elsewhere, but for these letters.
    uninterrupted = run(tmp_path, words, environment={"PYTHONIOENCODING": "utf-8"}).stdout.decode("utf-8")
    kept = uninterrupted.encode(encoding, "ignore").decode(encoding)
    assert len(text.splitlines()) == len(kept.splitlines())
    assert "sigma = 1" in text or words != "ls"


@pytest.mark.parametrize(
    ("letter", "expected"), [("±", "+-"), ("ε", "epsilon"), ("³", "3"), ("ń", r"\u0144"), ("\udcc5", r"\udcc5")]
)
def test_letters_have_distinct_forms(letter, expected):
    assert ascii_form(letter) == expected


SCRIPT = """
from pathlib import Path
from perada.cli.streams import guard_streams, output_is_lost
streams = guard_streams()
import sys
for stream in (sys.stdout, sys.stderr):
    print("x" * 100000, file=stream, flush=True)
    print("y", file=stream, flush=True)
Path("result").write_text(f"{output_is_lost()} {streams.pipe_was_closed}")
"""


@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        (">/dev/full", "True False"),
        ("2>/dev/full", "False False"),
        (">/dev/full 2>&1", "True False"),
        (">&- 2>&- <&-", "True False"),
        ("| true", "True True"),
        ("", "False False"),
    ],
)
def test_a_failed_write_ends_nothing(tmp_path, redirection, expected):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = f"{sys.executable} script.py {redirection}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert (tmp_path / "result").read_text() == expected


def test_a_closed_output_is_not_replaced_by_the_next_file(tmp_path):
    """The system would give the descriptor of standard output to the next file, into which a library might print."""
    (tmp_path / "script.py").write_text(
        "import os\nfrom perada.cli.streams import guard_streams\nguard_streams()\n"
        "file = open('result', 'w')\nos.write(1, b'of a library')\nfile.write(str(file.fileno() > 2))\n"
    )
    subprocess.run(["bash", "-c", f"{sys.executable} script.py >&-"], cwd=tmp_path, check=True)
    assert (tmp_path / "result").read_text() == "True"


@pytest.fixture
def hospitals(tmp_path):
    """Images of hospitals whose names have letters beyond ASCII, and a recipe that names their folder."""
    for client in ("Gdańsk", "Łódź"):
        for number, label in enumerate(("żółw", "kot")):
            folder = tmp_path / "zdjęcia" / client / label
            folder.mkdir(parents=True)
            for image in range(10):
                Image.new("RGB", (16, 16), (100 * number, 10 * image, 9)).save(folder / f"{image}.png")
    images = {"class_path": "Images", "init_args": {"root": "zdjęcia", "layout": "{client}/{class}/*"}}
    partition = {"class_path": "ByDomain", "init_args": {"column": "client"}}
    data = {"dataset": images, "partition": partition, "image_size": 16, "batch_size": 8, "num_workers": 0}
    recipe = TINY | {"data": data, "federated": {"algorithm": "fedavg"}}
    recipe.pop("distillation")
    recipe["trainer"] = recipe["trainer"] | {"enable_progress_bar": True}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_names_beyond_ascii_are_recorded_in_utf_8_whatever_the_locale(hospitals, name):
    environment, encoding = ENCODINGS[name]
    ended = run(hospitals, "fit --config recipe.yaml", environment=environment)
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout.decode(encoding)
    assert r"Gda\u0144sk" in shown
    assert "Run folder: ./lightning_logs/version_0" in shown
    folder = hospitals / "lightning_logs" / "version_0"
    assert "Gda\\u0144sk" in (folder / "run.json").read_text(encoding="utf-8")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"]["dataset"]["init_args"]["root"] == "zdjęcia"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "status"),
    [(">/dev/full", 1), ("2>/dev/full", 0), (">/dev/full 2>&1", 1), ("| true", 0), ("2>&1 >/dev/null | true", 0)],
)
def test_a_run_is_finished_although_it_cannot_print(hospitals, redirection, status):
    ended = run(hospitals, "fit --config recipe.yaml", redirection=redirection)
    assert ended.returncode == status
    folder = hospitals / "lightning_logs" / "version_0"
    assert (folder / "run.json").is_file()
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    if ">/dev/full" in redirection and "2>" not in redirection:
        assert b"Run folder: ./lightning_logs/version_0" in ended.stderr
