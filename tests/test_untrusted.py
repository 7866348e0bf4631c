# SPDX-License-Identifier: Apache-2.0
"""Files that a stranger may have written: they run no code, name no other file, and nothing of them is shown raw."""

import json
import os
import shutil
from dataclasses import asdict

import pytest
import pytorch_lightning as pl
import torch
import yaml
from transformers import ViTConfig, ViTForImageClassification

import perada
from perada.cli import main
from perada.privacy import ClientPrivacy, Privacy
from tests.digests import undigested
from tests.options import sections
from tests.recipes import recipe

CONTROL = "\x1b]0;owned\x07\x1b[2J"
SCRIPT = "<script>alert(1)</script>"


class Evil:
    """What pickle would call on loading."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def fit(tiny, root, **options):
    return tiny.finetune(**{"rounds": 2, "default_root_dir": str(root)} | options)


def checkpoint(root, version=0):
    return root / "lightning_logs" / f"version_{version}" / "checkpoints" / "last.ckpt"


def change_checkpoint(path, change):
    content = torch.load(path, weights_only=True)
    change(content["perada"]["federation"]["clients"])
    torch.save(content, path)


@pytest.mark.parametrize("place", ["top", "perada"])
def test_a_checkpoint_runs_no_code(tiny, tmp_path, place):
    fit(tiny, tmp_path, rounds=1)
    content = torch.load(checkpoint(tmp_path), weights_only=True)
    (content if place == "top" else content["perada"])["more"] = Evil(tmp_path / "owned")
    torch.save(content, checkpoint(tmp_path))
    with pytest.raises(ValueError, match="more than tensors") as error:
        fit(tiny, tmp_path, ckpt_path=str(checkpoint(tmp_path)))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "owned").exists()


RECIPE = recipe(federated={"algorithm": "Ditto"})


def test_the_program_runs_no_code_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    main(["fit", "--config", "recipe.yaml"])
    good = torch.load(checkpoint(tmp_path), weights_only=True)
    torch.save(good | {"more": Evil(tmp_path / "owned")}, checkpoint(tmp_path))
    common = ["--config", "recipe.yaml", "--ckpt_path=last", "--trainer.logger=false"]
    calls = [[word, *common] for word in ("test", "predict")]
    calls += [["fit", *common, "--trainer.max_epochs=2"], ["export", "lightning_logs/version_0", "--output", "out"]]
    for words in calls:
        with pytest.raises(ValueError, match="more than tensors"):
            main(words)
        assert not (tmp_path / "owned").exists()
    main(["test", *common, "--weights_only=false"])  # whoever trusts it says so
    assert (tmp_path / "owned").exists()


NAMES = [
    "../../outside/{name}",
    "{absolute}",
    "client_1-0000-1.safetensors/../{name}",
    "other.safetensors",
    "client_9-{session}",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(3)
def test_a_checkpoint_names_no_file_outside_of_its_run(tiny, tmp_path, name):
    """Not even one that holds the right tensors."""
    fit(tiny, tmp_path, client_store="disk")
    run = tmp_path / "lightning_logs" / "version_0"
    real = sorted((run / "clients").glob("client_*.safetensors"))[0]
    client = int(real.name.split("-")[0].removeprefix("client_"))
    session = real.name.partition("-")[2]
    outside = tmp_path / "lightning_logs" / "outside"
    outside.mkdir()
    for other in (real.name, "other.safetensors"):
        shutil.copy(real, outside / other)
    shutil.copy(real, run / "clients" / "other.safetensors")
    shutil.copy(real, run / "clients" / f"client_9-{session}")
    named = name.format(name=real.name, absolute=outside / real.name, session=session)
    change_checkpoint(checkpoint(tmp_path), lambda saved: saved["files"].update({client: named}))
    for rounds in (2, 3):
        with pytest.raises(ValueError, match=f"client {client},"):
            fit(tiny, tmp_path, client_store="disk", rounds=rounds, ckpt_path=str(checkpoint(tmp_path)))
    linked = [path for path in tmp_path.rglob("version_[12]/clients/*") if path.is_file()]
    assert linked == []


def test_a_checkpoint_names_no_folder_but_of_clients(tiny, tmp_path):
    fit(tiny, tmp_path, client_store="disk")
    run = tmp_path / "lightning_logs" / "version_0"
    outside = tmp_path / "outside"
    (run / "clients").rename(outside)
    change_checkpoint(checkpoint(tmp_path), lambda saved: saved.update(folder=str(outside)))
    with pytest.raises(ValueError, match=r"lists files in '.*outside'"):
        fit(tiny, tmp_path, client_store="disk", rounds=3, ckpt_path=str(checkpoint(tmp_path)))


def test_links_and_other_contents_are_not_taken_for_a_clients_file(tiny, tmp_path):
    fit(tiny, tmp_path, client_store="disk")
    clients = tmp_path / "lightning_logs" / "version_0" / "clients"
    real = sorted(clients.glob("client_*.safetensors"))[0]
    secret = tmp_path / "secret"
    content = real.read_bytes()
    real.rename(secret)
    real.symlink_to(secret)
    with pytest.raises(ValueError, match="damaged"):
        fit(tiny, tmp_path, client_store="disk", rounds=3, ckpt_path=str(checkpoint(tmp_path)))
    real.unlink()
    real.write_bytes(b"x" * len(content))
    for store in ("disk", "host"):
        with pytest.raises(ValueError, match="damaged"):
            fit(tiny, tmp_path, client_store=store, rounds=3, ckpt_path=str(checkpoint(tmp_path)))
    assert [path for path in tmp_path.rglob("version_[1-9]/clients/*") if path.is_file()] == []


def stranger(folder):
    """A transformers folder whose configuration asks for code that lies beside it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "code.Own", "AutoModelForImageClassification": "code.Model"},
        "model_type": "own",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'owned')!r}, 'w')\n")
    return folder


def test_code_beside_weights_is_neither_run_nor_offered_to_be(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    folder = stranger(tmp_path / "vit")
    run = fit(tiny, tmp_path, rounds=0, logger=False)
    saved = undigested(run.save(tmp_path / "run"))
    content = json.loads((saved / "run.json").read_text())
    content["info"] |= {"backbone": f"hf:{folder}", "pretrained": True}
    (saved / "run.json").write_text(json.dumps(content))
    options = {"rounds": 0, "logger": False}
    for call in (
        lambda: perada.Run.load(saved),
        lambda: perada.finetune(f"hf:{folder}", tiny.data(), **sections(**options)),
        lambda: perada.finetune(f"hf:{folder}", tiny.data(), **sections(pretrained=False, **options)),
    ):
        with pytest.raises(ValueError, match="custom code") as error:
            call()
        assert "\n" not in str(error.value)
    assert not (folder / "owned").exists()


def private(clients):
    return {
        "sample": {
            "options": asdict(Privacy(noise_multiplier=1.0)),
            "noise_multipliers": [1.0] * clients,
            "sample_rates": [0.25] * clients,
            "server": [1.0] * clients,
            "release": [2.0] * clients,
        },
        "client": {"options": asdict(ClientPrivacy(2.0)), "noise_multiplier": 2.0, "epsilon": [0.5] * clients},
    }


CHANGES = [
    lambda content: content.update(global_models=-1),
    lambda content: content.update(global_models="1"),
    lambda content: content.update(num_clients=0),
    lambda content: content.update(num_clients=True),
    lambda content: content["info"].update(num_classes=-3),
    lambda content: content.update(info=[]),
    lambda content: content.update(files=[]),
    lambda content: content.update(files={"client_0/adapter_model.safetensors": 3}),
    lambda content: content.update(metrics=None, info=None),
    lambda content: content["info"]["privacy"]["sample"]["options"].update(accountant=SCRIPT),
    lambda content: content["info"]["privacy"]["sample"]["options"].update(delta=SCRIPT),
    lambda content: content["info"]["privacy"]["sample"]["options"].update(max_norm=SCRIPT),
    lambda content: content["info"]["privacy"]["sample"]["options"].update({SCRIPT: 1}),
    lambda content: content["info"]["privacy"]["sample"].update(release=[SCRIPT] * 5),
    lambda content: content["info"]["privacy"]["sample"].update(server=[1.0]),
    lambda content: content["info"]["privacy"]["sample"].update(server=[-1.0] * 5),
    lambda content: content["info"]["privacy"]["sample"].update(release=["nan"] * 5),
    lambda content: content["info"]["privacy"]["client"].update(epsilon=[True] * 5),
    lambda content: content["info"]["privacy"]["client"].update(epsilon="12345"),
    lambda content: content["info"]["privacy"]["sample"].update(release=[10**400] * 5),
    lambda content: content["info"]["privacy"]["client"].update(noise_multiplier=-2.0),
    lambda content: content["info"]["privacy"]["client"]["options"].update(quantile=SCRIPT, clipping="adaptive"),
    lambda content: content["info"]["privacy"]["client"].update(noise_multiplier=SCRIPT),
    lambda content: content["info"]["privacy"].update(more=SCRIPT),
    lambda content: content["info"].update(privacy=SCRIPT),
    lambda content: content.update(command=[1]),
    lambda content: content.update(train_sizes=[-1] * 5),
    lambda content: content.update(train_sizes=[0.5] * 5),
]


@pytest.mark.parametrize("change", range(len(CHANGES)))
@pytest.mark.every(9)
def test_a_description_of_a_run_that_no_run_has_is_rejected(tiny, tmp_path, change):
    run = fit(tiny, tmp_path, rounds=0, logger=False)
    run.info["privacy"] = private(5)
    folder = undigested(run.save(tmp_path / "run"))
    content = json.loads((folder / "run.json").read_text())
    CHANGES[change](content)
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'.*run\.json' is broken") as error:
        perada.Run.load(folder, backbone=tiny.net())
    assert "\n" not in str(error.value)


def test_a_run_that_says_it_has_a_billion_global_models_is_rejected_at_once(tiny, tmp_path):
    folder = undigested(fit(tiny, tmp_path, rounds=0, logger=False).save(tmp_path / "run"))
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(content | {"global_models": 10**15}))
    with pytest.raises(ValueError, match=r"run\.json'.*global_models .*1000000000000000"):
        perada.Run.load(folder, backbone=tiny.net())
    (folder / "run.json").write_text(json.dumps(content | {"global_models": 10**7}))
    with pytest.raises(ValueError, match=r"run\.json'.*global state 1"):
        perada.Run.load(folder, backbone=tiny.net())
    exported = undigested(fit(tiny, tmp_path, rounds=0, logger=False).export(tmp_path / "exported"))
    content = json.loads((exported / "run.json").read_text())
    (exported / "run.json").write_text(json.dumps(content | {"global_models": 10**7}))
    with pytest.raises(FileNotFoundError, match="global_0' is not an adapter folder"):
        perada.Run.load(exported, backbone=tiny.net())


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed:UserWarning")
def test_what_is_saved_again_shows_nothing_that_was_read(tiny, tmp_path):
    """A name that PEFT keeps of the base model goes into the card's header, which is data."""
    run = fit(tiny, tmp_path, rounds=0, logger=False)
    run.info["privacy"] = private(5)
    folder = undigested(run.export(tmp_path / "run"))
    for path in folder.rglob("adapter_config.json"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"base_model_name_or_path": SCRIPT, "revision": SCRIPT}))
    content = json.loads((folder / "run.json").read_text())
    content["info"] |= {"algorithm": SCRIPT, "seed": SCRIPT, "more": SCRIPT}
    (folder / "run.json").write_text(json.dumps(content))
    loaded = perada.Run.load(folder, backbone=tiny.net())
    loaded.save(tmp_path / "saved")
    again = loaded.export(tmp_path / "again")
    cards = [path.read_text() for path in (*again.rglob("README.md"), tmp_path / "saved" / "README.md")]
    assert len(cards) == 7
    assert not any("<script" in card for card in cards)


def test_names_of_columns_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    columns = ["epoch", f"train/{CONTROL}loss", "train/a|b", "personal/local_test"]
    (tmp_path / "metrics.csv").write_text(",".join(columns) + "\n0,0.5,0.25,0.75\n", newline="")
    main(["report", str(tmp_path)])
    output = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in output)
    assert "]0;owned" in output
    assert output.splitlines()[0].count("|") == 5


def test_results_of_a_comparison_do_not_reach_the_terminal_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    words = ["compare", "recipe.yaml", "--output", "results.json"]
    main(words)
    records = json.loads((undigested(tmp_path) / "results.json").read_text())
    for record in records:
        record["label"] = f"{CONTROL}{record['label']}"
    records.append(records[-1] | {"failed": f"{CONTROL} failed", "args": ["another"]})
    (tmp_path / "results.json").write_text(json.dumps(records))
    capsys.readouterr()
    main(words)
    assert all(letter.isprintable() or letter == "\n" for letter in capsys.readouterr().out)


PARTS = {
    "metrics/rounds/0": "../x",
    "metrics/rounds/0/round": "../x",
    "step": "4",
    "metrics/clients": {"personal/local_test": "<script>"},
    "shifted": "x",
    "metrics": 3,
    "federation": "x",
    "federation/rounds_done": "x",
    "federation/server": [1],
    "federation/clients": None,
    "federation/clients/rows": 5,
    "belongs": [],
    "metrics/by_round": {"round": 1},
    "metrics/rounds/1/step": "x",
    "metrics/by_round/0/round": "x",
    "belongs/adapter": torch.full((3, 3), torch.nan),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.every(9)
def test_other_values_than_perada_writes_are_rejected_in_one_line(part, tiny, tmp_path):
    fit(tiny, tmp_path)
    path = checkpoint(tmp_path)
    content = torch.load(path, weights_only=True)
    *way, last = [int(name) if name.isdecimal() else name for name in part.split("/")]
    place = content["perada"]
    for name in way:
        place = place[name]
    place[last] = PARTS[part]
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"checkpoint|ckpt_path") as raised:
        fit(tiny, tmp_path, rounds=3, ckpt_path=str(path))
    assert "\n" not in str(raised.value)


class Broken(pl.Callback):
    """A callback of one's own with a mistake, in a function that is called as those that restore checkpoints."""

    def on_train_batch_end(self, *_):
        self.load_state_dict({})

    def load_state_dict(self, state):
        if not state:
            raise KeyError("a mistake of one's own")


def test_errors_of_ones_own_code_are_not_taken_for_the_checkpoints(tiny, tmp_path):
    fit(tiny, tmp_path, rounds=1)
    with pytest.raises(KeyError, match=r"a mistake of one's own"):
        fit(tiny, tmp_path, callbacks=[Broken()], ckpt_path=str(checkpoint(tmp_path)))


@pytest.mark.every(3)
@pytest.mark.parametrize("format", [2, True, "1"])
def test_a_checkpoint_of_another_format_is_rejected_by_both_numbers(tiny, tmp_path, format):
    fit(tiny, tmp_path, rounds=1)
    content = torch.load(checkpoint(tmp_path), weights_only=True)
    assert content["perada"]["format"] == 1
    torch.save(content | {"perada": {"format": format, "a later key": 3}}, checkpoint(tmp_path))
    message = (
        f"^the checkpoint has format {format}, but this release of perada reads format 1; read it with the release"
    )
    with pytest.raises(ValueError, match=message):
        fit(tiny, tmp_path, ckpt_path=str(checkpoint(tmp_path)))
    with pytest.raises(ValueError, match=message):
        perada.Run.load(checkpoint(tmp_path))


@pytest.mark.every(2)
@pytest.mark.parametrize("part", ["loops", "perada"])
def test_what_takes_its_place_wrongly_is_the_checkpoints_fault(tiny, tmp_path, part):
    fit(tiny, tmp_path, rounds=1)
    content = torch.load(checkpoint(tmp_path), weights_only=True)
    if part == "loops":
        content["loops"]["fit_loop"] = {"epoch_progress": 3}
    else:
        content["perada"]["federation"]["clients"] = 3
    torch.save(content, checkpoint(tmp_path))
    with pytest.raises(ValueError, match=r"ckpt_path='.*': its content") as error:
        fit(tiny, tmp_path, ckpt_path=str(checkpoint(tmp_path)))
    assert "\n" not in str(error.value)
