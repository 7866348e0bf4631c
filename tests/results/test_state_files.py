# SPDX-License-Identifier: Apache-2.0
"""Runs as files of states: equal to the run in memory to the bit, read client by client, and checked."""

import json
import shutil

import pytest
import torch
from peft import VeraConfig
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.results.clients import forget
from perada.results.run_file import StateRows
from perada.results.state_files import StateFiles, delete_unlisted, write_states
from perada.system.digests import sealed
from tests.digests import undigested
from tests.options import sections

SIZES = (9, 5, 7, 6)
NAMES = ["east", "north", "south", "west"]


def finetune(tiny, network=None, **options):
    settings = tiny.options | {"adapter": "head", "algorithm": "ditto", "logger": False, "distill_steps": None}
    settings |= {"distill_batch_size": None, "local_steps": 2, "rounds": 1, "clients_per_round": None}
    data = tiny.data(sizes=SIZES, public=False)
    data.client_names = NAMES
    return perada.finetune(network or tiny.net(), data, **sections(**(settings | options)))


@pytest.fixture(scope="module")
def run(tiny):
    return finetune(tiny)


@pytest.fixture(scope="module")
def original(run, tmp_path_factory):
    return run.save(tmp_path_factory.mktemp("states") / "run")


@pytest.fixture
def saved_run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def same_states(run, other):
    for role in ("global", "personal"):
        pairs = zip(run.states(role), other.states(role), strict=True)
        assert all(equal(state, other_state) for state, other_state in pairs), role
    return True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "fedavg"},
        {"algorithm": "fed_ensemble"},
        {"adapter": "full"},
        {"adapter": "full", "algorithm": "standalone", "clients_per_round": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_loaded_run_equals_the_one_in_memory_to_the_bit(tiny, tmp_path, options):
    run = finetune(tiny, **options)
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=tiny.net())
    assert all(map(equal, loaded.states("global"), run.states("global")))
    assert (loaded.info, loaded.metrics, loaded.num_clients) == (run.info, run.metrics, run.num_clients)
    if options.get("algorithm") != "fed_ensemble":  # whose clients have no state
        assert same_states(run, loaded)
    x = tiny.data().test[0].tensors[0]
    for name in NAMES:
        assert torch.equal(loaded.personal(name)(x), run.personal(name)(x))
    assert (tmp_path / "run" / "personal.safetensors").exists() == run.personalized


def test_random_projections_of_an_adapter_are_saved(tmp_path):
    """VeRA's are neither trained nor weights of the backbone; PEFT draws them from a seed of the configuration."""
    x = torch.randint(0, 256, (4, 3, 160, 160), dtype=torch.uint8)
    data = perada.FederatedData([TensorDataset(x, torch.arange(4) % 2)] * 2)
    adapter = VeraConfig(r=2, target_modules=["qkv"], projection_prng_key=3)
    run = perada.finetune(
        "test_vit", data, pretrained="perada:shapes_test_vit", adapter=adapter, algorithm="ditto", rounds=1,
        local_steps=1, logger=False, accelerator="cpu", enable_progress_bar=False,
    )  # fmt: skip
    loaded = perada.Run.load(run.save(tmp_path / "run"))
    assert same_states(run, loaded)
    images = torch.rand(2, 3, 160, 160)
    assert torch.equal(loaded.personal(1)(images), run.personal(1)(images))


def test_other_programs_read_the_rows_as_run_json_lists_them(run, original):
    states = json.loads((original / "run.json").read_text())["states"]
    assert states["personal.safetensors"]["rows"] == [0, 1, 2, 3]
    tensors = load_file(original / "personal.safetensors")
    for name, rows in tensors.items():
        assert torch.equal(rows, torch.stack([state[name] for state in run.states("personal")]))
    assert set(content(original)) == {
        "README.md", "adapter_config.json", "backbone.safetensors", "global.safetensors", "personal.safetensors",
        "run.json",
    }  # fmt: skip


def test_a_thousand_clients_are_a_handful_of_files(tiny, tmp_path):
    sets = [
        TensorDataset(torch.full((1, 1, 8, 8), client / 1000), torch.tensor([client % 3])) for client in range(1000)
    ]
    settings = tiny.options | {"adapter": "head", "algorithm": "ditto", "rounds": 1, "logger": False}
    settings |= {"distill_steps": None, "distill_batch_size": None, "clients_per_round": 5, "local_steps": 1}
    data = perada.FederatedData(sets, [], num_classes=3)
    run = tiny.finetune(data, **settings)
    folder = run.save(tmp_path / "run")
    assert len(list(folder.rglob("*"))) == 6
    loaded = perada.Run.load(folder, backbone=tiny.net())
    trained = {client for client in range(1000) if not equal(run.state("personal", client), run.state("global"))}
    assert len(trained) >= 5
    for client in {0, 999, *trained}:
        assert equal(loaded.state("personal", client), run.state("personal", client))


@pytest.mark.parametrize("rows_of_file", [1, 2, 3, 4])
def test_large_states_are_divided_among_files(tmp_path, rows_of_file):
    random = torch.Generator().manual_seed(0)
    states = []
    for _ in range(4):
        state = {
            "a": torch.randn(3, 2, generator=random),
            "b": torch.randn(5, generator=random).bfloat16(),
            "count": torch.randint(9, (), generator=random),
            "flag": torch.rand(3, generator=random) > 0.5,
        }
        states.append(state)
    bytes_of_row = 3 * 2 * 4 + 5 * 2 + 8 + 3
    index = write_states(
        tmp_path, "personal", [7, 1, 4, 2], lambda number: states[number % 4], shard_bytes=rows_of_file * bytes_of_row
    )
    assert [part.rows for part in index.values()] == [
        [7, 1, 4, 2][start : start + rows_of_file] for start in range(0, 4, rows_of_file)
    ]
    assert {path.name for path in tmp_path.iterdir()} == set(index)
    files = StateFiles(tmp_path, "personal", index)
    assert sorted(files.numbers) == [1, 2, 4, 7]
    for number in (1, 2, 4, 7):
        assert equal(files(number), states[number % 4])
    for name, part in index.items():
        tensors = load_file(tmp_path / name)
        for row, number in enumerate(part.rows):
            assert equal({key: value[row] for key, value in tensors.items()}, states[number % 4])


def damaged_row(path, name, row):
    """Change a value of one row, as a fault of the disk would."""
    tensors = load_file(path)
    tensors[name][row].flatten()[0] += 1
    save_file(tensors, path)


def test_a_client_is_read_and_checked_without_the_others(run, saved_run, tiny):
    damaged_row(saved_run / "personal.safetensors", "7.weight", 2)
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    for client in (0, 1, 3):
        assert equal(loaded.state("personal", client), run.state("personal", client))
    with pytest.raises(ValueError, match=r"personal\.safetensors' .*row 2"):
        loaded.personal("south")


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-3])


def change(name, edit):
    return lambda folder: save_file(edit(load_file(folder / name)), folder / name)


def edit_states(edit):
    def damage(folder):
        run_json = json.loads((folder / "run.json").read_text())
        del run_json["sha256"]
        edit(run_json["states"])
        (folder / "run.json").write_text(json.dumps(sealed(run_json)))

    return damage


PERSONAL = "personal.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove(PERSONAL), "personal.safetensors', the personal states of the run, is missing; copy the entire folder"),
        (remove("global.safetensors"), "global.safetensors', the global states of the run, is missing; copy"),
        (remove("adapter_config.json"), "run' has no adapter_config.json; copy the entire folder"),
        (remove("backbone.safetensors"), "run' has no backbone.safetensors, .*; copy the entire folder"),
        (
            truncate(PERSONAL),
            "personal.safetensors' cannot be read, it was truncated or damaged: .*; restore an intact",
        ),
        (truncate("global.safetensors"), "global.safetensors' cannot be read, it was truncated"),
        (truncate("backbone.safetensors"), "backbone.safetensors' was changed or damaged"),
        (truncate("adapter_config.json"), "adapter_config.json' was changed or damaged"),
        (lambda folder: (folder / PERSONAL).write_bytes(b""), "personal.safetensors' cannot be read"),
        (
            change(PERSONAL, lambda tensors: {name: rows[:3] for name, rows in tensors.items()}),
            r"personal.safetensors' belongs to a different.* is \[3, .*, expected \[4, ",
        ),
        (
            change(PERSONAL, lambda tensors: {"7.weight": tensors["7.weight"]}),
            "personal.safetensors' belongs to a different .*'7.bias' is missing",
        ),
        (
            change("global.safetensors", lambda tensors: {name: -rows for name, rows in tensors.items()}),
            "global.safetensors' was changed or damaged",
        ),
        (edit_states(lambda states: states.pop(PERSONAL)), "run.json' is broken: .* no file with personal state 0"),
        (edit_states(lambda states: states.pop("global.safetensors")), "run.json' is broken: .* global state 0"),
        (edit_states(lambda states: states[PERSONAL]["rows"].append(9)), "run.json' is broken .*a row of personal"),
        (edit_states(lambda states: states[PERSONAL].update(rows=[0, 0, 1, 2])), "run.json' is broken .*a row twice"),
        (edit_states(lambda states: states[PERSONAL]["sha256"].pop()), "run.json' is broken"),
        (edit_states(lambda states: states.update({"../x.safetensors": {"rows": [0]}})), "run.json' is broken"),
        (edit_states(lambda states: states[PERSONAL].update(rows="0123")), "run.json' is broken"),
    ],
)
def test_missing_and_damaged_files_are_named_with_the_remedy(saved_run, tiny, damage, message):
    damage(saved_run)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        perada.Run.load(saved_run, backbone=tiny.net())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(saved_run, tiny, number):
    undigested(saved_run)
    tensors = load_file(saved_run / PERSONAL)
    tensors["7.bias"][1, 0] = number
    save_file(tensors, saved_run / PERSONAL)
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    loaded.personal(0)
    with pytest.raises(ValueError, match=r"personal\.safetensors' .*'7\.bias' of row 1"):
        loaded.personal(1)


def test_the_format_of_before_is_named(saved_run, tiny):
    run_json = json.loads((saved_run / "run.json").read_text())
    del run_json["sha256"], run_json["states"]
    (saved_run / "run.json").write_text(json.dumps(sealed(run_json | {"format": 1})))
    with pytest.raises(ValueError, match=r"run\.json' .*format 1, .*format 2"):
        perada.Run.load(saved_run, backbone=tiny.net())


def test_a_folder_has_one_layout(run, saved_run, tmp_path):
    before = content(saved_run)
    with pytest.raises(ValueError, match=r"run' .*Run\.save"):
        run.export(saved_run)
    assert content(saved_run) == before
    run.export(tmp_path / "exported")
    with pytest.raises(ValueError, match=r"exported' .*Run\.export"):
        run.save(tmp_path / "exported")


def test_a_saved_run_is_exported_as_the_run_in_memory_is(run, original, tiny, tmp_path):
    run.export(tmp_path / "one")
    perada.Run.load(original, backbone=tiny.net()).export(tmp_path / "two")
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 20
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_run_that_is_saved_in_its_own_folder_can_be_read_on(run, saved_run, tiny):
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    joined = perada.personalize(
        loaded, perada.FederatedData([tiny.data().train[0]]), "late", rounds=1, accelerator="cpu"
    )
    joined.save(saved_run)
    joined.save(saved_run)
    again = perada.Run.load(saved_run, backbone=tiny.net())
    assert same_states(joined, again)
    assert equal(loaded.state("personal", "west"), run.state("personal", "west"))


def test_text_of_the_users_in_the_card_stays(run, saved_run):
    card = saved_run / "README.md"
    assert "The adapters of 4 clients" in card.read_text()
    card.write_text(card.read_text() + "\n## Of our own\n")
    run.save(saved_run, license="mit")
    assert "## Of our own" in card.read_text()
    assert "license: mit" in card.read_text()
    assert card.read_text().count("The adapters of 4 clients") == 1


def test_a_client_that_joins_adds_one_file(saved_run, tiny):
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    before = content(saved_run)
    joined = perada.personalize(
        loaded, perada.FederatedData([tiny.data().train[0]]), "late", rounds=1, accelerator="cpu"
    )
    joined.add_client(saved_run, "late")
    after = content(saved_run)
    assert after.keys() - before.keys() == {"personal_2.safetensors"}
    assert {name for name in before if before[name] != after[name]} == {"run.json", "README.md"}
    assert same_states(joined, perada.Run.load(saved_run, backbone=tiny.net()))


def test_clients_that_share_the_global_adapter_have_no_rows(tiny, tmp_path):
    run = finetune(tiny, algorithm="fedavg")
    joined = perada.personalize(run, perada.FederatedData([tiny.data().train[0]]), "late", rounds=1, accelerator="cpu")
    folder = joined.save(tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["states"][PERSONAL]["rows"] == [4]
    loaded = perada.Run.load(folder, backbone=tiny.net())
    assert same_states(joined, loaded)
    assert equal(loaded.state("personal", 0), run.state("global"))
    forget(folder, "late")
    assert not (folder / PERSONAL).exists()
    assert len(perada.Run.load(folder, backbone=tiny.net()).states("personal")) == 4


def test_nothing_is_left_of_a_client_that_is_removed(run, saved_run, tiny, capsys):
    values = run.state("personal", "north")["7.weight"].numpy().tobytes()
    assert values in (saved_run / PERSONAL).read_bytes()
    main(["clients", "remove", str(saved_run), "--client", "north"])
    assert "Removed client north" in capsys.readouterr().out
    for name, file in content(saved_run).items():
        assert b"north" not in file, name
        assert values not in file, name
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    assert [
        equal(loaded.state("personal", name), run.state("personal", name)) for name in ("east", "south", "west")
    ] == [True] * 3
    with pytest.raises(ValueError, match="forgotten"):
        loaded.personal(1)
    forget(saved_run, "west")
    loaded = perada.Run.load(saved_run, backbone=tiny.net())
    assert equal(loaded.state("personal", "south"), run.state("personal", "south"))
    assert len(list(saved_run.glob("personal*.safetensors"))) == 1
    # The run can be saved again and joined.
    again = perada.Run.load(loaded.save(saved_run.parent / "again"), backbone=tiny.net())
    assert same_states(loaded, again)


def test_a_removal_that_failed_between_can_be_repeated(run, saved_run, tiny, monkeypatch):
    def fails(*_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("perada.results.clients.write_run", fails)
        with pytest.raises(OSError, match="full"):
            forget(saved_run, "north")
    assert same_states(run, perada.Run.load(saved_run, backbone=tiny.net()))
    calls = []

    def fails_after(folder, index):
        calls.append(index)
        return delete_unlisted(folder, index) if len(calls) == 1 else fails()

    with monkeypatch.context() as patch:
        patch.setattr("perada.results.clients.delete_unlisted", fails_after)
        with pytest.raises(OSError, match="full"):
            forget(saved_run, "north")
    assert len(perada.Run.load(saved_run, backbone=tiny.net()).states("personal")) == 3
    assert forget(saved_run, "north") == 1
    assert len(list(saved_run.glob("personal*.safetensors"))) == 1
    with pytest.raises(ValueError, match="is unknown"):
        forget(saved_run, "north")


def test_a_file_that_a_saved_run_does_not_list_is_deleted(run, saved_run):
    (saved_run / "personal_7.safetensors").write_bytes(b"of an earlier run")
    (saved_run / "mine.safetensors").write_bytes(b"of the user")
    run.save(saved_run)
    assert "personal_7.safetensors" not in content(saved_run)
    assert content(saved_run)["mine.safetensors"] == b"of the user"


def test_rows_without_digests_are_not_checked(tmp_path):
    index = write_states(tmp_path, "personal", [0], lambda _: {"w": torch.ones(2)})
    damaged_row(tmp_path / PERSONAL, "w", 0)
    files = StateFiles(tmp_path, "personal", {PERSONAL: StateRows([0])})
    assert torch.equal(files(0)["w"], torch.tensor([2.0, 1.0]))
    with pytest.raises(ValueError, match="changed or damaged"):
        StateFiles(tmp_path, "personal", index)(0)
