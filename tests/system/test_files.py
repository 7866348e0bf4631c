# SPDX-License-Identifier: Apache-2.0
"""What a process that was killed left is deleted, and what another one is writing is not."""

import errno
import grp
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from perada.system.files import (
    LOCK,
    PREFIX,
    FolderLock,
    Scratch,
    check_output_file,
    check_output_folder,
    clear,
    is_owner_only,
    locked,
    open_atomic,
)

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
        "from perada.system.files import Scratch; s = Scratch(); (s.path / 'x').write_text('')", temporary
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


@pytest.mark.parametrize("moment", ["before it is opened", "while it is being locked", "still at it"])
def test_a_folder_that_another_process_clears_before_it_is_locked_is_made_again(temporary, monkeypatch, moment):
    make_folder = tempfile.mkdtemp
    lock = filelock.lock_descriptor
    created = []

    def mkdtemp(**options):
        folder = make_folder(**options)
        created.append(folder)
        if len(created) == 1 and moment == "before it is opened":
            clear([Path(folder)])
        if len(created) == 1 and moment == "still at it":
            lock(os.open(folder, os.O_RDONLY), blocking=False)
        return folder

    def lock_descriptor(handle, *, blocking):
        if len(created) == 1 and moment == "while it is being locked":
            os.rmdir(created[0])
        return lock(handle, blocking=blocking)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(filelock, "lock_descriptor", lock_descriptor)
    with Scratch() as folder:
        assert [str(folder)] == created[1:] and folder.is_dir()
        clear([folder])
        assert folder.is_dir()  # it is locked
    assert not folder.exists()


def test_a_file_that_another_process_clears_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "x"
    partial = tmp_path / ".x.partial"
    lock = filelock.lock_descriptor
    cleared = []

    def lock_descriptor(handle, *, blocking):
        if not cleared:
            cleared.append(True)
            clear([partial])
        return lock(handle, blocking=blocking)

    monkeypatch.setattr(filelock, "lock_descriptor", lock_descriptor)
    with open_atomic(path) as file:
        file.write(b"whole")
        file.flush()
        clear([partial])
        assert partial.read_text() == "whole"  # it is locked
    assert (cleared, path.read_text(), os.listdir(tmp_path)) == ([True], "whole", ["x"])


def test_files_and_folders_that_are_always_cleared_are_an_error_that_names_them(temporary, monkeypatch):
    make_folder = tempfile.mkdtemp

    def mkdtemp(**options):
        folder = make_folder(**options)
        os.rmdir(folder)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(FileNotFoundError, match="another process") as error:
        Scratch()
    assert error.value.filename == str(temporary)


def test_a_link_in_the_place_of_what_is_written_is_not_followed(tmp_path):
    path = tmp_path / "run" / "x"
    outside = tmp_path / "outside"
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
    outside = tmp_path / "outside"
    link = tmp_path / "link"
    outside.mkdir()
    link.symlink_to(outside)
    with locked(outside) as first, locked(outside) as second:
        assert (first, second) == (True, False)
        with locked(link) as alone:
            assert alone
    with locked(link), locked(outside) as free:
        assert free


def test_a_lock_is_waited_for_until_its_process_ends(tmp_path):
    """However it ends: it is killed here, and frees nothing itself."""
    process = elsewhere(
        f"from pathlib import Path; from perada.system.files import locked; l = locked(Path({str(tmp_path)!r})); "
        "assert l.__enter__()",
        tmp_path,
    )
    killed = []
    try:
        with locked(tmp_path) as is_free:
            assert not is_free

        def kill():
            time.sleep(0.3)
            killed.append(True)
            process.kill()

        threading.Thread(target=kill).start()
        with locked(tmp_path, wait=True) as is_free:
            assert is_free and killed
            with locked(tmp_path) as is_free_again:
                assert not is_free_again
    finally:
        end(process)


def test_without_locks_files_are_written_and_nothing_is_cleared(tmp_path, temporary, monkeypatch):
    """As on some network file systems. A folder cannot be reserved for one process there, and the error names it."""

    def no_locks(handle, *, blocking):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("filelock.lock_descriptor", no_locks)
    left = tmp_path / ".left.partial"
    left.write_text("half")
    clear([left])
    assert left.read_text() == "half"
    with open_atomic(tmp_path / "x") as file:
        file.write(b"ours")
    assert (tmp_path / "x").read_text() == "ours"
    with Scratch() as folder, locked(folder) as is_free:
        assert folder.is_dir() and is_free
    with pytest.raises(OSError, match="No locks available") as error:
        FolderLock(tmp_path / "site", "worker")
    assert error.value.filename == str(tmp_path / "site" / LOCK)


def file_of(mode, group):
    return SimpleNamespace(st_mode=mode, st_gid=group)


def test_a_file_is_only_its_owners_where_its_group_has_no_other_member(monkeypatch):
    """The accounts and groups are made here: 7 has a second member by name, 8 by an account's own group, 9 nobody."""
    me = SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=5)
    other = SimpleNamespace(pw_name="other", pw_uid=10002, pw_gid=8)
    root = SimpleNamespace(pw_name="root", pw_uid=0, pw_gid=9)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, other, root])
    groups = {7: SimpleNamespace(gr_mem=["me", "other"]), 8: SimpleNamespace(gr_mem=["me"])}
    monkeypatch.setattr(grp, "getgrgid", lambda group: groups[group])
    monkeypatch.setattr(os, "getgroups", lambda: [7, 8, 9])
    monkeypatch.setattr(os, "getegid", lambda: 5)
    assert is_owner_only(file_of(0o400, 7))
    assert is_owner_only(file_of(0o440, 9))
    assert is_owner_only(file_of(0o440, 5))
    assert not is_owner_only(file_of(0o440, 7))
    assert not is_owner_only(file_of(0o440, 8))
    assert not is_owner_only(file_of(0o440, 6))  # a group that this process is not in
    assert not is_owner_only(file_of(0o404, 9))
    assert is_owner_only(file_of(0o2775, 9), rights=0o2)
    assert not is_owner_only(file_of(0o2775, 7), rights=0o2)
    assert not is_owner_only(file_of(0o702, 9), rights=0o2)


@pytest.mark.parametrize("name", ["new", "new/deep", "folder", "folder/new", "file", "file/new", "file/new/deep"])
def test_a_folder_passes_the_check_exactly_if_it_can_be_created(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    folder = tmp_path / name
    if "file" in name:
        with pytest.raises(NotADirectoryError, match=r"--output=.* is a file"):
            check_output_folder("--output", folder)
        with pytest.raises((NotADirectoryError, FileExistsError)):
            folder.mkdir(parents=True, exist_ok=True)
    else:
        existed = folder.exists()
        check_output_folder("--output", folder)
        assert folder.exists() == existed
        folder.mkdir(parents=True, exist_ok=True)


def test_a_folder_of_another_user_is_rejected(tmp_path, monkeypatch):
    """The system is asked about the folder in which the first new one would be created."""
    checked = []
    monkeypatch.setattr(os, "access", lambda path, mode: checked.append((path, mode)) or False)
    with pytest.raises(PermissionError, match=r"--output=.*deep:"):
        check_output_folder("--output", tmp_path / "new" / "deep")
    assert checked == [(tmp_path, os.W_OK | os.X_OK)]


def test_a_file_may_be_replaced_but_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    check_output_file("--output", tmp_path / "file", "a.csv")
    check_output_file("--output", tmp_path / "new" / "file", "a.csv")
    with pytest.raises(IsADirectoryError, match=r"folder.*/a\.csv"):
        check_output_file("--output", tmp_path, "a.csv")
    with pytest.raises(NotADirectoryError, match=r"--output=.*/file is a file"):
        check_output_file("--output", tmp_path / "file" / "b.csv", "a.csv")
