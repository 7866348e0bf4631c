# SPDX-License-Identifier: Apache-2.0
"""What clients keep, wherever it is held."""

import hashlib
import os
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from perada.federation.settings import Storage
from perada.federation.shared_store import joined, restricted
from perada.federation.store import ClientStore, DiskStore, locate
from tests.rejections import rejects


def client_states(clients, seed=1):
    """What ``clients`` keep, in several number formats: stacks (C, ...)."""
    random = torch.Generator().manual_seed(seed)
    return {
        "personal": {
            "a.weight": torch.randn(clients, 2, 3, generator=random),
            "a.count": torch.randint(0, 99, (clients,), generator=random),
        },
        "extra": {
            "h": torch.randn(clients, 5, generator=random).to(torch.bfloat16),
            "d": torch.randn(clients, 1, generator=random, dtype=torch.float64),
        },
    }


def initial():
    return {role: {key: value[0] for key, value in state.items()} for role, state in client_states(1, seed=0).items()}


class CompressedStore(ClientStore):
    """A store that is written outside perada: rows are compressed."""

    def write_row(self, client, row):
        self.written[client] = zlib.compress(row.numpy().tobytes())

    def read_row(self, client):
        return torch.frombuffer(bytearray(zlib.decompress(self.written[client])), dtype=torch.uint8)


def stores(tmp_path):
    return {
        "device": ClientStore(initial()),
        "compressed": CompressedStore(initial()),
        "host": ClientStore(initial(), host=True),
        "disk": DiskStore(initial(), tmp_path / "run" / "clients"),
        "temporary": DiskStore(initial()),
    }


KINDS = ["device", "compressed", "host", "disk", "temporary"]
kinds = pytest.mark.parametrize("kind", KINDS)


def rows(stacks, index):
    return {role: {key: value[index] for key, value in state.items()} for role, state in stacks.items()}


def assert_same(one, other):
    assert {role: list(state) for role, state in one.items()} == {role: list(state) for role, state in other.items()}
    for role, state in other.items():
        for key, value in state.items():
            assert one[role][key].dtype == value.dtype
            assert torch.equal(one[role][key], value), (role, key)


@kinds
def test_clients_have_the_initial_state_until_they_are_written(tmp_path, kind):
    store = stores(tmp_path)[kind]
    written = client_states(2)
    store.scatter([3, 0], written)
    assert sorted(store.written) == [0, 3]
    actual = store.gather([0, 1, 3])
    expected = [rows(written, 1), initial(), rows(written, 0)]
    for index, state in enumerate(expected):
        got = rows(actual, index)
        for role in state:
            for key in state[role]:
                assert torch.equal(got[role][key], state[role][key])


@kinds
def test_what_is_stored_and_what_is_gathered_are_copies(tmp_path, kind):
    store = stores(tmp_path)[kind]
    states = client_states(2)
    store.scatter([0, 1], states)
    for copy in (states, store.gather([0, 1, 5]), store.gather([1])):
        for state in copy.values():
            for value in state.values():
                value.add_(1)
    assert_same(store.gather([0, 1]), client_states(2))


@kinds
def test_a_client_written_again_has_its_last_state(tmp_path, kind):
    store = stores(tmp_path)[kind]
    for seed in (1, 2, 3):
        store.scatter([4, 2], client_states(2, seed))
    store.scatter([], client_states(0))
    assert_same(store.gather([4, 2]), client_states(2, seed=3))


@pytest.mark.every(5)
@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_saved_store_goes_on_in_one_of_any_kind(tmp_path, before, after):
    store = stores(tmp_path)[before]
    store.scatter([4, 7], client_states(2))
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = stores(tmp_path / "second")[after]
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    assert_same(again.gather([4, 7]), client_states(2))
    again.scatter([4, 9], client_states(2, seed=5))
    third = stores(tmp_path / "third")[before]
    third.load_state_dict(again.state_dict())
    assert_same(third.gather([4, 9]), client_states(2, seed=5))
    assert_same(store.gather([4, 7]), client_states(2))  # what the first one holds is as it was


@kinds
def test_clients_can_move_from_one_store_to_another(tmp_path, kind):
    """As they do between processes: by their rows, while training; by what was saved, afterwards."""
    one = stores(tmp_path)[kind]
    two = stores(tmp_path)[kind]
    one.scatter([1, 2, 3], client_states(3))
    two.put([3], one.rows([3]))
    one.drop([3, 4])
    assert sorted(one.written) == [1, 2]
    saved = joined([one.state_dict(), two.state_dict()])
    third = stores(tmp_path / "three")[kind]
    fourth = stores(tmp_path / "four")[kind]
    third.load_state_dict(restricted(saved, {1, 3}))
    fourth.load_state_dict(restricted(saved, {2}))
    assert_same(third.gather([1, 3]), {r: {k: v[[0, 2]] for k, v in s.items()} for r, s in client_states(3).items()})
    assert_same(fourth.gather([2]), rows_of(client_states(3), 1))
    assert (sorted(third.written), sorted(fourth.written)) == ([1, 3], [2])


def test_a_store_of_other_tensors_is_rejected():
    saved = ClientStore({"personal": {"w": torch.zeros(3)}}).state_dict()
    with pytest.raises(ValueError, match="different tensors"):
        ClientStore({"personal": {"w": torch.zeros(4)}}).load_state_dict(saved)


@pytest.mark.parametrize("make", [ClientStore, partial(ClientStore, host=True), DiskStore])
def test_clients_that_keep_nothing_cost_nothing(make):
    store = make({})
    store.scatter([0, 1], {})
    assert store.gather([0, 1]) == {}
    store.load_state_dict(store.state_dict())


def test_a_client_is_a_file_that_safetensors_reads(tmp_path):
    store = DiskStore(initial(), tmp_path)
    store.scatter([6], client_states(1))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("client_6-")
    result = load_file(path)
    assert set(result) == {"personal/a.weight", "personal/a.count", "extra/h", "extra/d"}
    for name, value in result.items():
        role, key = name.split("/")
        assert torch.equal(value, client_states(1)[role][key][0])


def names(folder):
    return {path.name.split("-")[0] + path.suffix for path in folder.iterdir()}, len(list(folder.iterdir()))


def test_outdated_files_are_deleted_once_two_newer_checkpoints_do_without_them(tmp_path):
    store = DiskStore(initial(), tmp_path)
    checkpoints = []
    for round in range(4):
        store.scatter([0, 1], client_states(2, seed=round))
        assert len(list(tmp_path.iterdir())) == 2 * min(round + 1, 3)
        checkpoints.append(store.state_dict())
        for age, saved in enumerate(reversed(checkpoints)):
            again = DiskStore(initial(), tmp_path / "other")
            if age < 2:
                again.load_state_dict(saved)
                assert_same(again.gather([0, 1]), client_states(2, seed=round - age))
            else:
                with pytest.raises(FileNotFoundError, match="client 0, is missing"):
                    again.load_state_dict(saved)
            (tmp_path / "other").rmdir()


def test_where_older_checkpoints_are_kept_so_are_their_files(tmp_path):
    store = DiskStore(initial(), tmp_path / "clients", prune=False)
    checkpoints = []
    for round in range(4):
        store.scatter([0], client_states(1, seed=round))
        checkpoints.append(store.state_dict())
    for round, saved in enumerate(checkpoints):
        again = DiskStore(initial())
        again.load_state_dict(saved)
        assert_same(again.gather([0]), client_states(1, seed=round))


def test_files_of_a_temporary_folder_go_with_their_store():
    store = DiskStore(initial())
    for seed in range(3):
        store.scatter([0, 1], client_states(2, seed))
    folder = store.folder
    assert len(list(folder.iterdir())) == 2
    del store
    assert not folder.exists()


def test_a_resumed_run_keeps_the_files_of_the_checkpoint_it_came_from(tmp_path):
    """In the same folder too, until its own checkpoints are there."""
    store = DiskStore(initial(), tmp_path)
    store.scatter([0, 1], client_states(2, seed=1))
    saved = store.state_dict()
    store.scatter([0, 1], client_states(2, seed=2))  # killed here, before the next checkpoint
    again = DiskStore(initial(), tmp_path)
    again.load_state_dict(saved)
    assert_same(again.gather([0, 1]), client_states(2, seed=1))
    again.scatter([0, 1], client_states(2, seed=3))
    again.state_dict()  # killed here, before it is written
    third = DiskStore(initial(), tmp_path)
    third.load_state_dict(saved)
    assert_same(third.gather([0, 1]), client_states(2, seed=1))


def test_a_resumed_run_in_a_folder_of_its_own_does_not_need_the_old_one(tmp_path):
    old = tmp_path / "old" / "clients"
    new = tmp_path / "new" / "clients"
    store = DiskStore(initial(), old)
    store.scatter([0, 1], client_states(2, seed=1))
    again = DiskStore(initial(), new)
    again.load_state_dict(store.state_dict())
    again.scatter([1], rows_of(client_states(2, seed=2), 1))
    saved = again.state_dict()
    assert len(list(old.iterdir())) == 2
    for path in old.iterdir():
        path.unlink()
    third = DiskStore(initial(), tmp_path / "third" / "clients")
    third.load_state_dict(saved)
    assert_same(third.gather([0]), rows_of(client_states(2, seed=1), 0))
    assert_same(third.gather([1]), rows_of(client_states(2, seed=2), 1))


def rows_of(stacks, index):
    return {role: {key: value[index : index + 1] for key, value in state.items()} for role, state in stacks.items()}


@pytest.mark.parametrize("name", ["", "tuned"])
def test_the_files_of_a_run_folder_that_was_moved_are_found(tmp_path, name):
    store = Storage("disk", tmp_path / "run" / "clients").open(initial(), name)
    store.scatter([3], client_states(1))
    saved = store.state_dict()
    (tmp_path / "run").rename(tmp_path / "moved")
    again = ClientStore(initial())
    with pytest.raises(FileNotFoundError, match="client 3"):
        again.load_state_dict(saved)
    again.load_state_dict(locate(saved, tmp_path / "moved" / "checkpoints" / "last.ckpt"))
    assert_same(again.gather([3]), client_states(1))


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_broken_file_is_named(tmp_path, damage):
    store = DiskStore(initial(), tmp_path)
    store.scatter([3], client_states(1))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1] if damage == "cut" else content.replace(b"a.weight", b"b.weight"))
    with pytest.raises(ValueError, match=r"client_3-.*damaged"):
        store.gather([3])


@pytest.mark.parametrize("kind", [DiskStore, ClientStore])
def test_a_changed_bit_and_another_clients_file_are_found_when_a_run_is_resumed(tmp_path, kind):
    """Of states of the same shapes; a file whose name has no digest is not taken."""
    store = DiskStore(initial(), tmp_path / "of_the_run")
    store.scatter([3, 5], client_states(2))
    saved = store.state_dict()
    paths = {client: store.folder / name for client, name in saved["files"].items()}
    contents = {client: path.read_bytes() for client, path in paths.items()}

    def resumed():
        again = kind(initial())
        again.load_state_dict(saved)
        return again

    assert_same(resumed().gather([3]), rows_of(client_states(2), 0))
    random = np.random.default_rng(0)
    for _ in range(20):
        content = bytearray(contents[3])
        content[random.integers(len(content))] ^= 1 << random.integers(8)
        paths[3].write_bytes(content)
        with pytest.raises(ValueError, match=r"client_3-.*damaged"):
            resumed()
    paths[3].write_bytes(contents[5])
    with pytest.raises(ValueError, match=r"client_3-.*damaged"):
        resumed()
    former = paths[3].with_name("client_3-0123abcd-1.safetensors")
    former.write_bytes(contents[3])
    saved["files"] = saved["files"] | {3: former.name}
    with pytest.raises(ValueError, match="damaged"):
        resumed()


def test_a_file_of_something_else_is_rejected_though_its_name_has_its_digest(tmp_path):
    """A checkpoint of a stranger may name any file: what is not a client's states is not even adopted."""
    store = DiskStore(initial(), tmp_path)
    store.scatter([3], client_states(1))
    saved = store.state_dict()
    path = tmp_path / saved["files"][3]
    content = b"x" * path.stat().st_size
    forged = path.with_name(f"client_3-0123abcd-1-{hashlib.sha256(content).hexdigest()[:32]}.safetensors")
    forged.write_bytes(content)
    saved["files"] = {3: forged.name}
    with pytest.raises(ValueError, match=r"client_3-.*damaged"):
        store.files_of(saved)


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    """Killed while it writes: the name that a checkpoint may give is given to whole files only."""
    store = DiskStore(initial(), tmp_path)
    store.scatter([3], client_states(1))

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.scatter([3], client_states(1, seed=2))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert_same(store.gather([3]), client_states(1))


@pytest.mark.parametrize(
    ("clients", "memory", "kind"), [(10, 4000, ClientStore), (11, 1760, DiskStore), (10**9, None, DiskStore)]
)
def test_the_place_is_chosen_by_what_all_clients_may_take(monkeypatch, clients, memory, kind):
    size = 24 + 8 + 10 + 8
    if memory is not None:
        monkeypatch.setattr("perada.federation.settings.host_memory", lambda: 4 * 10 * size)
    assert type(Storage(num_clients=clients).open(initial())) is kind
    assert [Storage(name).open(initial()).host for name in ("host", "device")] == [True, False]


def test_an_unknown_place_is_rejected():
    with rejects("client_store", "cloud"):
        Storage("cloud")
