# SPDX-License-Identifier: Apache-2.0
"""A folder that one process writes is left alone by others, and what one that was killed left is not."""

import os
import signal
import time

import pytest

from perada.results import run_file
from perada.results.run_file import READY, STAGE, finish_interrupted_move, together
from tests.forked import FORKS, forked

pytestmark = FORKS


def write(folder, when):
    """Write a folder, and wait in the middle of it until the file ``go`` is beside it."""

    def wait():
        (folder.parent / "there").touch()
        while not (folder.parent / "go").exists():
            time.sleep(0.01)

    move = run_file._move_ready_files

    def moved(folder):
        if when == "moving" and (folder / READY).exists():
            wait()
        move(folder)

    run_file._move_ready_files = moved
    with together(folder) as stage:
        (stage / "run.json").write_text("new")
        if when == "writing":
            wait()


def begin_writing(tmp_path, when):
    """A process in the middle of writing a folder, which was written before."""
    folder = tmp_path / "run"
    with together(folder) as stage:
        (stage / "run.json").write_text("old")
    process = forked(write, folder, when)
    end = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    return folder, process


def note_reading(folder):
    """Tell of what is read by a file beside the folder."""
    finish_interrupted_move(folder)
    (folder.parent / "read").write_text((folder / "run.json").read_text())


def test_what_another_process_is_writing_is_left_to_it(tmp_path):
    folder, process = begin_writing(tmp_path, "writing")
    try:
        finish_interrupted_move(folder)  # as Run.load does
        assert (folder / STAGE / "run.json").read_text() == "new"
        assert (folder / "run.json").read_text() == "old"
        with (
            pytest.raises(BlockingIOError, match="another process"),
            together(folder),
        ):
            pass
    finally:
        (tmp_path / "go").touch()
    process.join(60)
    assert process.exitcode == 0
    assert (folder / "run.json").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


def test_who_reads_waits_while_files_are_moved(tmp_path):
    folder, process = begin_writing(tmp_path, "moving")
    reader = forked(note_reading, folder)
    reader.join(0.5)
    assert reader.is_alive() and not (tmp_path / "read").exists()
    (tmp_path / "go").touch()
    for one in (process, reader):
        one.join(60)
        assert one.exitcode == 0
    assert (tmp_path / "read").read_text() == "new"


@pytest.mark.parametrize(("when", "left", "found"), [("writing", STAGE, "old"), ("moving", READY, "new")])
def test_what_a_killed_process_left_is_deleted_or_put_in_place(tmp_path, when, left, found):
    folder, process = begin_writing(tmp_path, when)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert (folder / left).is_dir()
    finish_interrupted_move(folder)
    assert (folder / "run.json").read_text() == found
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]
