# SPDX-License-Identifier: Apache-2.0
"""A run that is resumed with more clients than it began with."""

import pytest
import torch

from perada.data import FederatedData


def named_clients(tiny, names, sizes=None):
    """Clients by name, each with the images that its name stands for."""
    data = tiny.data(sizes=(9, 5, 14, 7, 20, 6, 8))
    places = [sorted("abcdefg").index(name) for name in names]
    return FederatedData([data.train[p] for p in places], [data.test[p] for p in places], None, client_names=names)


def run(tiny, folder, data, rounds, **options):
    arguments = tiny.options | {"distill_steps": None, "distill_batch_size": None, "algorithm": "ditto"} | options
    return tiny.finetune(data, **arguments, rounds=rounds, default_root_dir=str(folder))


def equal(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("store", [pytest.param("device", marks=pytest.mark.slow), "disk"])
def test_the_former_clients_keep_their_states_and_others_begin_with_the_global_one(tiny, tmp_path, store):
    first = run(tiny, tmp_path, named_clients(tiny, list("bdf")), 2, client_store=store)
    more = named_clients(tiny, list("abcdf"))  # in between, so that numbers change
    resumed = run(tiny, tmp_path, more, 2, ckpt_path="last", resume_allow=["clients"], client_store=store)
    for name in "bdf":
        assert equal(first.state("personal", name), resumed.state("personal", name))
    for name in "ac":
        assert equal(first.state("global"), resumed.state("personal", name))
        assert not equal(first.state("personal", "b"), resumed.state("personal", name))
    assert equal(first.state("global"), resumed.state("global"))
    options = {"ckpt_path": "last", "resume_allow": ["clients"], "client_store": store, "clients_per_round": 2}
    longer = run(tiny, tmp_path, more, 5, **options)
    assert longer.num_clients == 5
    assert len(longer.metrics["rounds"]) == 5
    assert len(longer.metrics["clients"]["personal/local_test"]) == 5
    assert not equal(longer.state("global"), first.state("global"))


def test_without_names_the_former_clients_are_the_first(tiny, tmp_path):
    sizes = (9, 5, 14)
    first = run(tiny, tmp_path, tiny.data(sizes=sizes, public=False), 1)
    more = tiny.data(sizes=(*sizes, 7), public=False)
    resumed = run(tiny, tmp_path, more, 1, ckpt_path="last", resume_allow=["clients"])
    assert all(equal(first.state("personal", client), resumed.state("personal", client)) for client in range(3))
    assert equal(resumed.state("personal", 3), first.state("global"))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((9, 5, 14, 7), {}, r"belongs to a different run: its number of clients is 3, here 4"),
        (
            (9, 5),
            {"resume_allow": ["clients"]},
            r"client 2 had 14 training images when .* but has none now; resume",
        ),
        ((9, 6, 14, 7), {"resume_allow": ["clients"]}, r"client 1 had 5 training images when .* but has 6 now"),
        ((9, 5, 14), {"resume_allow": ["client"]}, r"resume_allow='client' is unknown; did you mean 'clients'\?"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(tiny, tmp_path, sizes, options, message):
    run(tiny, tmp_path, tiny.data(sizes=(9, 5, 14), public=False), 1)
    with pytest.raises(ValueError, match=message):
        run(tiny, tmp_path, tiny.data(sizes=sizes, public=False), 2, ckpt_path="last", **options)


@pytest.mark.slow
def test_a_private_run_keeps_its_clients(tiny, tmp_path):
    private = {"privacy": {"noise_multiplier": 1.0, "delta": 1e-3}}
    run(tiny, tmp_path, tiny.data(sizes=(9, 5, 14), public=False), 1, **private)
    more = tiny.data(sizes=(9, 5, 14, 7), public=False)
    with pytest.raises(ValueError, match=r"3 clients, .*4"):
        run(tiny, tmp_path, more, 2, ckpt_path="last", resume_allow=["clients"], **private)
