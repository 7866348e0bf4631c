# SPDX-License-Identifier: Apache-2.0
"""What a process that was killed left is deleted, and what another one is writing is not."""

import os
import subprocess
import sys
import tempfile

import pytest

from perada.core.files import PREFIX, Scratch, clear, locked, open_atomic

WAITS = "import time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def elsewhere(lines, temporary):
    """A process that does something and then waits."""
    command = [sys.executable, "-c", f"{lines}\n{WAITS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(temporary)})
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_temporary_folder_goes_with_its_owner_or_when_the_next_is_made(temporary):
    with Scratch() as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("")
    assert not os.listdir(temporary)
    process = elsewhere(
        "from perada.core.files import Scratch; s = Scratch(); (s.path / 'x').write_text('')", temporary
    )
    try:
        (theirs,) = temporary.iterdir()
        with Scratch() as folder:
            assert {path.name for path in temporary.iterdir()} == {theirs.name, folder.name}
        assert (theirs / "x").is_file()
    finally:
        end(process)
    with Scratch() as folder:
        assert list(temporary.iterdir()) == [folder]
    assert not os.listdir(temporary)


def test_a_link_in_the_place_of_what_is_written_is_not_followed(tmp_path):
    path, outside = tmp_path / "run" / "x", tmp_path / "outside"
    path.parent.mkdir()
    outside.write_text("theirs")
    path.with_name(".x.partial").symlink_to(outside)
    with open_atomic(path) as file:
        file.write(b"ours")
    assert (outside.read_text(), path.read_text(), os.listdir(path.parent)) == ("theirs", "ours", ["x"])


def test_a_file_is_left_alone_while_it_is_being_written(tmp_path):
    path = tmp_path / ".x.partial"
    with open_atomic(tmp_path / "x") as file:
        file.write(b"half")
        file.flush()
        clear([path])
        assert path.read_text() == "half"
    assert os.listdir(tmp_path) == ["x"]
    path.write_text("half")
    clear([path, tmp_path / "not there"])
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_in_the_temporary_directory_leads_nowhere(temporary):
    """Whoever may write there could else choose what is deleted."""
    mine = temporary / "mine"
    mine.mkdir()
    (mine / "kept").write_text("")
    (temporary / f"{PREFIX}link").symlink_to(mine)
    with Scratch():
        pass
    assert (mine / "kept").is_file()


def test_what_a_link_leads_to_is_not_locked(tmp_path):
    """Nor waited for: somebody else has locked it."""
    outside, link = tmp_path / "outside", tmp_path / "link"
    outside.mkdir()
    link.symlink_to(outside)
    with locked(outside) as first, locked(outside) as second:
        assert (first, second) == (True, False)
        with locked(link) as alone:
            assert alone
    with locked(link), locked(outside) as free:
        assert free
