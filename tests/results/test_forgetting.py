# SPDX-License-Identifier: Apache-2.0
"""A client that is forgotten: nothing of it is left in the folder, and the others' files stay."""

import json
import shutil

import pytest
import torch

import perada
from perada.cli import main
from perada.results.clients import forget

SECRET = "hospital-of-the-north"


@pytest.fixture(scope="module")
def saved_run(tiny, tmp_path_factory):
    data = tiny.data(sizes=(9, 5, 7), public=False)
    data.client_names = ["east", SECRET, "west"]
    settings = tiny.options | {"adapter": "head", "rounds": 1, "logger": False, "algorithm": "ditto"}
    settings |= {"distill_steps": None, "distill_batch_size": None, "local_steps": 1}
    folder = tmp_path_factory.mktemp("forget") / "run"
    tiny.finetune(data, **settings).export(folder)
    return folder


@pytest.fixture
def copied_run(saved_run, tmp_path):
    return shutil.copytree(saved_run, tmp_path / "run")


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_the_client_is_left_and_the_others_stay(copied_run, tiny, capsys):
    before = content(copied_run)
    measured = json.loads((copied_run / "run.json").read_text())["metrics"]
    scores = measured["clients"]
    main(["clients", "remove", str(copied_run), "--client", SECRET])
    assert "This does not undo what others have learned" in capsys.readouterr().out
    after = content(copied_run)
    assert not any(name.startswith("client_1/") for name in after)
    assert all(after[name] == before[name] for name in after if name != "run.json")
    assert not any(SECRET.encode() in text for text in after.values())
    left = json.loads(after["run.json"])["metrics"]["clients"]
    for name, values in scores.items():
        assert left[name] == [values[0], None, values[2]]
    record = json.loads(after["run.json"])["metrics"]
    assert measured["partition"]["train"][1] == [2, 2, 1]
    assert record["partition"]["train"] == [
        measured["partition"]["train"][0],
        [0] * 3,
        measured["partition"]["train"][2],
    ]
    assert [row["personal/local_test"][1] for row in record["by_round"]] == [None]
    assert record["initial"]["personal/local_test"][1] is record["global/local_test"][1] is None
    rows = record["predictions"]["personal"]["confusion"]
    assert rows == [row for row in measured["predictions"]["personal"]["confusion"] if row[0] != 1]
    assert len(rows) < len(measured["predictions"]["personal"]["confusion"])
    run = perada.Run.load(copied_run, backbone=tiny.net())
    assert run.state("personal", "west").keys() == run.state("global").keys()
    assert len(run.states("personal")) == 2
    for client in (1, "1"):
        with pytest.raises(ValueError, match="was forgotten"):
            run.personal(client)
    with pytest.raises(ValueError, match="is unknown"):
        run.personal(SECRET)


def test_a_run_that_has_forgotten_can_be_saved_and_joined(copied_run, tiny, tmp_path):
    forget(copied_run, SECRET)
    run = perada.Run.load(copied_run, backbone=tiny.net())
    run = perada.personalize(run, perada.FederatedData([tiny.data().train[0]]), "late", rounds=1, accelerator="cpu")
    run.export(tmp_path / "again")
    again = perada.Run.load(tmp_path / "again", backbone=tiny.net())
    assert again.info["clients"] == ["east", "(forgotten 1)", "west", "late"]
    assert torch.equal(again.state("personal", "late")["7.bias"], run.state("personal", 3)["7.bias"])
    forget(tmp_path / "again", "late")
    assert "late" not in (tmp_path / "again" / "run.json").read_text()


def test_a_call_that_failed_between_can_be_repeated(copied_run, tiny, monkeypatch):
    def fails(*_, **__):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("perada.results.clients.shutil.rmtree", fails)
        with pytest.raises(OSError, match="full"):
            forget(copied_run, SECRET)
    assert (copied_run / "client_1").is_dir()
    assert len(perada.Run.load(copied_run, backbone=tiny.net()).states("personal")) == 2
    assert forget(copied_run, SECRET) == 1
    assert not (copied_run / "client_1").exists()
    with pytest.raises(ValueError, match="is unknown"):
        forget(copied_run, SECRET)


def test_a_file_that_cannot_be_written_leaves_everything(copied_run, monkeypatch):
    before = content(copied_run)

    def fails(*_):
        raise OSError("full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="full"):
        forget(copied_run, SECRET)
    assert before.items() <= content(copied_run).items()


def test_checkpoints_are_rejected_and_unknown_clients_are(copied_run):
    before = content(copied_run)
    with pytest.raises(ValueError, match="client='north' is unknown"):
        forget(copied_run, "north")
    (copied_run / "checkpoints").mkdir()
    (copied_run / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(ValueError, match=r"last\.ckpt' is a checkpoint"):
        forget(copied_run, SECRET)
    assert before.items() <= content(copied_run).items()
