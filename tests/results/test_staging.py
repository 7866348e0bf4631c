# SPDX-License-Identifier: Apache-2.0
"""A folder that one process writes is left alone by others, and what one that was killed left is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from perada.results.run_file import READY, STAGE, finish, together

WRITER = """
import sys, time
from pathlib import Path
from perada.results import run_file
folder, when = Path(sys.argv[1]), sys.argv[2]
def wait():
    (folder.parent / "there").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
move = run_file._move
def moved(folder):
    if when == "moving" and (folder / run_file.READY).exists():
        wait()
    move(folder)
run_file._move = moved
with run_file.together(folder) as stage:
    (stage / "run.json").write_text("new")
    if when == "writing":
        wait()
"""


def begun(tmp_path, when):
    """A process in the middle of writing a folder, which was written before."""
    folder = tmp_path / "run"
    with together(folder) as stage:
        (stage / "run.json").write_text("old")
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), when])
    end = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    return folder, process


def test_what_another_process_is_writing_is_left_to_it(tmp_path):
    folder, process = begun(tmp_path, "writing")
    try:
        finish(folder)  # as Run.load does
        assert (folder / STAGE / "run.json").read_text() == "new"
        assert (folder / "run.json").read_text() == "old"
        with (
            pytest.raises(BlockingIOError, match="another process is writing a run into"),
            together(folder),
        ):
            pass
    finally:
        (tmp_path / "go").touch()
    assert process.wait(60) == 0
    assert (folder / "run.json").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


def test_who_reads_waits_while_files_are_moved(tmp_path):
    folder, process = begun(tmp_path, "moving")
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from perada.results.run_file import finish; "
            "finish(Path(sys.argv[1])); print((Path(sys.argv[1]) / 'run.json').read_text())",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(4)
    (tmp_path / "go").touch()
    assert (process.wait(60), reader.communicate(timeout=60)[0].strip()) == (0, "new")


@pytest.mark.parametrize(("when", "left", "found"), [("writing", STAGE, "old"), ("moving", READY, "new")])
def test_what_a_killed_process_left_is_deleted_or_put_in_place(tmp_path, when, left, found):
    folder, process = begun(tmp_path, when)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert (folder / left).is_dir()
    finish(folder)
    assert (folder / "run.json").read_text() == found
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]
