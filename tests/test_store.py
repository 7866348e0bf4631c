# SPDX-License-Identifier: Apache-2.0
"""What clients keep."""

import torch

from perada.store import ClientStore


def test_clients_have_the_initial_state_until_they_are_written():
    store = ClientStore({"personal": {"w": torch.tensor([1.0, 2.0])}})
    store.scatter([3, 0], {"personal": {"w": torch.tensor([[5.0, 5.0], [7.0, 7.0]])}})
    assert store.gather([0, 1, 3])["personal"]["w"].tolist() == [[7, 7], [1, 2], [5, 5]]


def test_what_is_stored_and_what_is_gathered_are_copies():
    store = ClientStore({"personal": {"w": torch.zeros(1)}})
    rows = {"personal": {"w": torch.ones(2, 1)}}
    store.scatter([0, 1], rows)
    rows["personal"]["w"] += 1
    store.gather([0, 5])["personal"]["w"].add_(9)
    assert store.gather([0, 1, 5])["personal"]["w"].flatten().tolist() == [1, 1, 0]


def test_a_saved_store_goes_on_where_it_was(tmp_path):
    store = ClientStore({"personal": {"w": torch.zeros(2)}, "extra": {"h": torch.zeros(())}})
    store.scatter([4], {"personal": {"w": torch.ones(1, 2)}, "extra": {"h": torch.tensor([3.0])}})
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = ClientStore({"personal": {"w": torch.zeros(2)}, "extra": {"h": torch.zeros(())}})
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True), torch.device("cpu"))
    assert again.gather([4, 0])["personal"]["w"].tolist() == [[1, 1], [0, 0]]
    assert again.gather([4, 0])["extra"]["h"].tolist() == [3, 0]


def test_clients_that_keep_nothing_cost_nothing():
    store = ClientStore({})
    store.scatter([0, 1], {})
    assert store.gather([0, 1]) == {}
