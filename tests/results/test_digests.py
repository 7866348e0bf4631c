# SPDX-License-Identifier: Apache-2.0
"""What a run saves shows any changed byte, and a save that is killed leaves the run of before or the new one."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import timm
import torch
from peft import PeftModel

import perada
from perada.data.partitions import FromFile, Split
from perada.results.clients import forget
from perada.results.run_file import READY, STAGE, finish_interrupted_move, together
from perada.studies.report.records import read_records
from perada.system.digests import KEY, check_sealed, sealed, write_sums
from tests.digests import undigested
from tests.disks import no_room
from tests.forked import FORKS, forked


def finetuned(tiny, **options):
    settings = tiny.options | {"adapter": "head", "algorithm": "ditto", "logger": False, "distill_steps": None}
    settings |= {"distill_batch_size": None, "local_steps": 2, "rounds": 1, "clients_per_round": 3}
    return tiny.finetune(tiny.data(sizes=(9, 5, 7), public=False), **settings | options)


@pytest.fixture(scope="module")
def run(tiny):
    return finetuned(tiny)


@pytest.fixture(scope="module")
def saved_run(run, tmp_path_factory):
    return run.export(tmp_path_factory.mktemp("digests") / "run")


def flip(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def places(path, count):
    """Bits spread over a file, its first and its last byte among them; the same ones every time."""
    size = path.stat().st_size
    draw = random.Random(path.name)
    return [(0, 0), (size - 1, 1), *((draw.randrange(size), draw.randrange(8)) for _ in range(count))]


def test_a_flipped_bit_in_any_file_of_a_saved_run_is_named(saved_run, tiny, tmp_path, recwarn):
    """Of JSON, what stands between the values may change: then the run is the same."""
    whole = perada.Run.load(saved_run, backbone=tiny.net())
    files = [path.relative_to(saved_run) for path in sorted(saved_run.rglob("*")) if path.is_file()]
    others = {"SHA256SUMS", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in files} == {"run.json", "backbone.safetensors"} | others
    result = 0
    for name in files:
        if name.parent.name in ("client_1", "client_2"):  # as client_0
            continue
        for place in places(saved_run / name, 4):
            folder = shutil.copytree(saved_run, tmp_path / "copy", dirs_exist_ok=True)
            flip(folder / name, *place)
            recwarn.clear()
            try:
                loaded = perada.Run.load(folder, backbone=tiny.net())
            except ValueError as error:
                result += 1
                assert (str(name.parent) if name.name == "SHA256SUMS" else name.name) in str(error)
                assert "\n" not in str(error)
            else:
                warned = [str(one.message) for one in recwarn]
                assert name.name in ("README.md", "run.json", "SHA256SUMS")  # in the last, the digest of the card
                assert name.name == "run.json" or any("README.md' is not what perada wrote" in one for one in warned)
                assert (loaded.info, loaded.metrics) == (whole.info, whole.metrics)
    assert result >= 40


def test_other_programs_check_and_load_the_folders(tmp_path):
    """GNU's sha256sum, and PEFT on timm's network from the same backbone.safetensors."""
    run = perada.finetune(
        "test_resnet",
        perada.FederatedData([torch.utils.data.TensorDataset(torch.rand(4, 3, 32, 32), torch.arange(4) % 2)] * 2),
        pretrained=False, adapter="lora", algorithm="ditto", rounds=1, local_steps=1, logger=False, accelerator="cpu",
        enable_progress_bar=False,
    )  # fmt: skip
    folder = run.export(tmp_path / "run")
    if shutil.which("sha256sum"):
        for name in ("global", "client_0", "client_1"):
            subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder / name, check=True)
    plain = timm.create_model("test_resnet", num_classes=2, checkpoint_path=str(folder / "backbone.safetensors"))
    model = PeftModel.from_pretrained(plain, str(folder / "client_1")).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), run.personal(1)(x))


def test_files_of_before_are_loaded_without_a_word(saved_run, tiny, tmp_path):
    """A warning would be an error here."""
    folder = undigested(shutil.copytree(saved_run, tmp_path / "copy"))
    assert perada.Run.load(folder, backbone=tiny.net()).num_clients == 3
    assert perada.Run.load(perada.Run.load(folder, backbone=tiny.net()).export(tmp_path / "new"), backbone=tiny.net())


def test_swapped_outdated_and_missing_files_are_named(run, saved_run, tiny, tmp_path):
    def swapped(folder):
        (folder / "client_0").rename(folder / "aside")
        (folder / "client_1").rename(folder / "client_0")
        (folder / "aside").rename(folder / "client_1")

    def outdated(folder):
        finetuned(tiny, rounds=2).export(folder, client=2)

    for damage, message in (
        (swapped, r"client_0/adapter_model.safetensors' was changed or damaged .*or belongs to a different run"),
        (outdated, r"client_2/adapter_model.safetensors' was changed or damaged .*or belongs to a different run"),
        (
            lambda folder: (folder / "global" / "SHA256SUMS").unlink(),
            "global' has no SHA256SUMS; copy the entire folder",
        ),
        (lambda folder: (folder / "global" / "SHA256SUMS").write_text(""), "global/SHA256SUMS' is damaged"),
    ):
        folder = shutil.copytree(saved_run, tmp_path / "copy")
        damage(folder)
        with pytest.raises(ValueError, match=message):
            perada.Run.load(folder, backbone=tiny.net())
        shutil.rmtree(folder)
    folder = shutil.copytree(saved_run, tmp_path / "copy")
    run.export(folder, client=1, license="mit")  # the same adapter with another card is no damage
    assert perada.Run.load(folder, backbone=tiny.net())


def test_json_is_compared_by_what_it_says():
    content = {"a": [1, 2.5, None, "é"], "b": {"c": True, 3: (4, 5)}}
    read = json.loads(json.dumps(sealed(content)))
    assert check_sealed(read) == json.loads(json.dumps(content))
    assert check_sealed(dict(reversed(read.items()))) == check_sealed(read)
    assert check_sealed({"a": 1}) == {"a": 1}
    for change in ({"a": [1, 2, None, "é"]}, {"d": 1}, {KEY: "0" * 64}, {KEY: 3}):
        with pytest.raises(ValueError, match="does not match its entry"):
            check_sealed(read | change)
    with pytest.raises(ValueError, match="does not match its entry"):  # the entry's own name was hit
        check_sealed({name.replace("sha", "sh!"): value for name, value in read.items()})


def test_a_flipped_bit_in_the_files_of_a_run_folder_is_named(tiny, tmp_path):
    finetuned(tiny, logger=True, default_root_dir=tmp_path)
    folder = tmp_path / "lightning_logs" / "version_0"
    (folder / "metrics.csv").unlink()
    records = read_records(folder)
    (tmp_path / "lightning_logs" / "partition.json").write_text(
        json.dumps(sealed({"train": [[0, 2], [1]], "test": [[0], []]}))
    )
    split = Split(torch.zeros(3, dtype=torch.int64).numpy(), torch.arange(3).numpy(), {}, "Own")
    sources = [
        (folder / "run.json", lambda: read_records(folder)),
        (
            tmp_path / "lightning_logs" / "partition.json",
            lambda: FromFile(str(tmp_path / "lightning_logs" / "partition.json")).split(split, split, 0),
        ),
    ]
    for path, read in sources:
        content = path.read_bytes()
        result = 0
        for place in places(path, 30):
            flip(path, *place)
            try:
                again = read()
            except ValueError as error:
                result += 1
                assert str(path) in str(error)
            else:
                assert path.name != "run.json" or again == records
            path.write_bytes(content)
        assert result >= 25


def save_until(left, folder):
    """Write a folder, and end at the operation on a file that comes after ``left`` others."""

    def step(event, args):
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(step)
    with together(folder) as stage:
        for client in ("client_0", "client_1"):
            (stage / client).mkdir()
            (stage / client / "a").write_text("new")
        (stage / "run.json").write_text("new")
    os._exit(0)


@pytest.mark.slow
@FORKS
def test_a_save_that_is_killed_at_any_file_operation_leaves_one_run(tmp_path):
    """Every operation on a file after the first may be the last; what is read is all old, or all new."""
    outcomes = []
    for count in range(40):
        folder = tmp_path / f"run{count}"
        (folder / "client_0").mkdir(parents=True)
        for name in ("client_0/a", "client_0/notes", "run.json"):
            (folder / name).write_text("old")
        process = forked(save_until, count, folder)
        process.join(60)
        code = process.exitcode
        finish_interrupted_move(folder)
        result = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert result.pop("client_0/notes") == "old"
        assert result in (
            {"client_0/a": "old", "run.json": "old"},
            {"client_0/a": "new", "client_1/a": "new", "run.json": "new"},
        )
        outcomes.append(result["run.json"])
        if code == 0:
            break
        assert code == 9
    assert code == 0
    assert {"old", "new"} == set(outcomes[:-1])
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_save_that_fails_leaves_the_run_of_before(run, saved_run, tiny, tmp_path, monkeypatch):
    folder = shutil.copytree(saved_run, tmp_path / "copy")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("perada.results.run.write_run", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        finetuned(tiny, rounds=2).export(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_deleted_while_its_digests_are_made_is_named(run, tmp_path, monkeypatch):
    def half_deleted(folder, names):
        (folder / "adapter_model.safetensors").unlink()
        return write_sums(folder, names)

    monkeypatch.setattr("perada.results.run.write_sums", half_deleted)
    with pytest.raises(FileNotFoundError, match="gone' could not be written"):
        run.export(tmp_path / "gone")


@pytest.mark.parametrize("size", [100, 2000])  # which a model card passes, or the first tensors
def test_a_disk_that_is_full_is_named_with_the_folder(run, saved_run, tmp_path, size):
    folder = shutil.copytree(saved_run, tmp_path / "copy")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with no_room(size), pytest.raises(OSError, match=r"copy' could not be written and is unchanged") as caught:
        run.export(folder)
    assert caught.value.errno == errno.EFBIG
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_forgotten_client_is_not_left_in_what_a_killed_save_wrote(saved_run, tiny, tmp_path):
    folder = shutil.copytree(saved_run, tmp_path / "copy")
    shutil.copytree(folder / "client_1", folder / STAGE / "client_1")
    forget(folder, 1)
    assert not list(folder.rglob("client_1"))
    assert not (folder / STAGE).exists()
    assert not (folder / READY).exists()
    assert "client_1" not in (folder / "run.json").read_text()
    assert len(perada.Run.load(folder, backbone=tiny.net()).states("personal")) == 2
