# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are whole or as they were before, whatever happens while they are written, and damage is found."""

import errno
import os
import random
import re
import tempfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from perada.lightning.checkpoint import AtomicCheckpointIO, find_checkpoint
from perada.results.restore import check_intact_file, newest_intact
from tests.disks import no_room

CONTENT = {"state_dict": {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}, "epoch": 4, "name": "ü"}


@pytest.fixture
def write_checkpoint(tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


def test_what_is_written_is_read_by_torch_alone(write_checkpoint):
    for read in (
        torch.load(write_checkpoint, weights_only=True),
        AtomicCheckpointIO().load_checkpoint(write_checkpoint),
    ):
        assert read["epoch"] == 4
        assert read["name"] == "ü"
        assert torch.equal(read["state_dict"]["w"], CONTENT["state_dict"]["w"])
    assert os.listdir(write_checkpoint.parent) == ["last.ckpt"]


def test_no_copy_of_a_checkpoint_is_made_in_memory(tmp_path):
    tracemalloc.start()
    try:
        AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(16, 2**20)}, tmp_path / "last.ckpt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "last.ckpt").stat().st_size > 64 * 2**20
    assert peak < 16 * 2**20


def test_any_flipped_bit_is_found(write_checkpoint):
    content = write_checkpoint.read_bytes()
    generator = random.Random(0)
    places = {0, *range(len(content) - 110, len(content)), *generator.sample(range(len(content)), 300)}
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        write_checkpoint.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ckpt_path='.*last\.ckpt' (is|was)"):
            check_intact_file(write_checkpoint)
    write_checkpoint.write_bytes(content)
    check_intact_file(write_checkpoint)


def test_a_bit_that_flips_on_the_way_to_the_disk_is_found(write_checkpoint, monkeypatch):
    @contextmanager
    def flipping(target, **_):
        with target.open("w+b") as file:
            file_write = file.write
            file_flush = file.flush

            class Flipping:
                name = str(target)
                seek = file.seek
                flush = staticmethod(file_flush)

                def write(self, some):
                    some = bytearray(some)
                    some[len(some) // 2] ^= len(some) == 24  # in a tensor of six numbers
                    return file_write(bytes(some))

            yield Flipping()

    monkeypatch.setattr("perada.lightning.checkpoint.open_atomic", flipping)
    AtomicCheckpointIO().save_checkpoint(CONTENT, write_checkpoint)
    with pytest.raises(ValueError, match="is damaged"):
        check_intact_file(write_checkpoint)


@pytest.mark.parametrize("left", [0, 1, 100, -1, -79, -90, -2000])
def test_a_file_that_is_cut_off_is_found(write_checkpoint, left):
    write_checkpoint.write_bytes(write_checkpoint.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"last\.ckpt' is (not a checkpoint|damaged)"):
        check_intact_file(write_checkpoint)


def test_damage_of_another_programs_checkpoint_is_found_by_the_checksums_of_its_tensors(tmp_path):
    path = tmp_path / "other.ckpt"
    torch.save({"w": torch.zeros(1000)}, path)
    check_intact_file(path)
    content = bytearray(path.read_bytes())
    content[content.index(bytes(1000)) + 500] ^= 4
    path.write_bytes(content)
    assert float(torch.load(path)["w"].abs().max()) > 0  # torch itself does not look
    with pytest.raises(ValueError, match=r"damaged: .*'other/data/0'"):
        check_intact_file(path)


def test_the_one_before_is_kept(write_checkpoint):
    before = write_checkpoint.read_bytes()
    AtomicCheckpointIO().save_checkpoint({"epoch": 5}, write_checkpoint)
    assert (write_checkpoint.parent / "last.previous.ckpt").read_bytes() == before
    assert torch.load(write_checkpoint) == {"epoch": 5}
    AtomicCheckpointIO().save_checkpoint({"epoch": 6}, write_checkpoint)
    assert torch.load(write_checkpoint.parent / "last.previous.ckpt") == {"epoch": 5}
    AtomicCheckpointIO().save_checkpoint({"epoch": 7}, write_checkpoint.parent / "best.ckpt")
    assert sorted(os.listdir(write_checkpoint.parent)) == ["best.ckpt", "last.ckpt", "last.previous.ckpt"]


class Killed(BaseException):
    """A process that is killed: nothing after it is run."""


CALLS = ["link", "fsync", "replace"]


@pytest.mark.parametrize("moment", [(name, nth) for name in CALLS for nth in (1, 2) if (name, nth) != ("link", 2)])
@pytest.mark.parametrize("happens", ["kill", "full disk"])
def test_whatever_happens_there_is_a_whole_one(write_checkpoint, monkeypatch, moment, happens):
    AtomicCheckpointIO().save_checkpoint({"epoch": 5}, write_checkpoint)
    left = {name: moment[1] if name == moment[0] else 0 for name in CALLS}
    real = {n: getattr(os, n) for n in CALLS}
    stop = Killed() if happens == "kill" else OSError(errno.ENOSPC, "No space left on device")

    def call(name):
        def stopped(*arguments, **options):
            left[name] -= 1
            if left[name] == 0:
                raise stop
            return real[name](*arguments, **options)

        return stopped

    for name in CALLS:
        monkeypatch.setattr(os, name, call(name))
    linked = moment[0] == "link" and happens == "full disk"  # then it is renamed instead
    if linked:
        AtomicCheckpointIO().save_checkpoint({"epoch": 6}, write_checkpoint)
    else:
        with pytest.raises((Killed, OSError)) as raised:
            AtomicCheckpointIO().save_checkpoint({"epoch": 6}, write_checkpoint)
        if happens == "full disk":
            assert re.search(r"No space left on device: '.*/run(/last.ckpt)?'$", str(raised.value))
            assert not list(write_checkpoint.parent.glob(".last.ckpt.partial"))
    monkeypatch.undo()
    check_intact_file(write_checkpoint)
    epochs = torch.load(write_checkpoint)["epoch"], torch.load(write_checkpoint.parent / "last.previous.ckpt")["epoch"]
    assert epochs in [(5, 4), (5, 5), (6, 5)]


@pytest.mark.slow
def test_nothing_is_written_into_the_temporary_directory(tiny, tmp_path, monkeypatch):
    """It may be on another file system, from which nothing can be renamed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    options = tiny.options | {"rounds": 3, "default_root_dir": str(tmp_path), "logger": True}
    tiny.finetune(**options)
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    assert sorted(os.listdir(folder)) == ["last.ckpt", "last.previous.ckpt"]


@pytest.mark.every(3)
@pytest.mark.parametrize("size", [100, 1000, 5000])  # which partition.json, metrics.csv and a checkpoint pass
def test_a_disk_that_is_full_is_named_with_the_runs_folder(tiny, tmp_path, size):
    options = tiny.options | {"rounds": 3, "default_root_dir": str(tmp_path), "logger": True, "client_store": "disk"}
    with (
        no_room(size),
        pytest.raises(OSError, match="File too large") as full,
    ):
        tiny.finetune(**options)
    assert str(tmp_path / "lightning_logs" / "version_0") in str(full.value)
    saved = any(tmp_path.rglob("*.ckpt"))
    resumed = tiny.finetune(**options, ckpt_path="last" if saved else None)
    undisturbed = tiny.finetune(**options | {"default_root_dir": str(tmp_path / "other")})
    for role in ("global", "personal"):
        torch.testing.assert_close(resumed.states(role), undisturbed.states(role), rtol=0, atol=0)


def test_what_was_replaced_is_older_whatever_the_times_of_the_files_say(write_checkpoint):
    AtomicCheckpointIO().save_checkpoint({"epoch": 5}, write_checkpoint)
    replaced = write_checkpoint.with_name("last.previous.ckpt")
    other = write_checkpoint.parent / "of_another_name.ckpt"
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, other)
    for time, path in enumerate((other, write_checkpoint, replaced)):  # as after copying the folder
        os.utime(path, (time, time))
    folder = write_checkpoint.parent
    assert newest_intact(folder.glob("*.ckpt")) == write_checkpoint
    write_checkpoint.write_bytes(b"")
    with pytest.warns(UserWarning, match=r"'.*/last\.ckpt' is not a checkpoint"):
        assert newest_intact(folder.glob("*.ckpt")) == replaced
    write_checkpoint.unlink()
    os.utime(other, (3, 3))
    assert newest_intact(folder.glob("*.ckpt")) == other
    assert newest_intact([]) is None


@pytest.mark.slow
def test_last_takes_the_newest_that_is_whole(tiny, tmp_path):
    options = tiny.options | {"default_root_dir": str(tmp_path), "logger": True}
    uninterrupted = tiny.finetune(**options | {"rounds": 4})
    second = tmp_path / "second"
    options["default_root_dir"] = str(second)
    tiny.finetune(**options | {"rounds": 3})
    last = second / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"last\.ckpt' is not a checkpoint.*'last'"):
        tiny.finetune(ckpt_path=str(last), **options | {"rounds": 4})
    with pytest.warns(UserWarning, match=r"'.*/last\.ckpt'.*previous"):
        resumed = tiny.finetune(ckpt_path="last", **options | {"rounds": 4})
    for key, value in uninterrupted.state("global").items():
        assert torch.equal(resumed.state("global")[key], value)
    for path in Path(second).rglob("*.ckpt"):
        path.write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no intact checkpoint"), pytest.warns(UserWarning):
        find_checkpoint("last", second)
