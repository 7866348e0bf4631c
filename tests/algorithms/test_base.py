# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name, and what they refuse."""

import pytest
import torch

from perada.algorithms import ALGORITHMS, Algorithm, Ditto, FedAvgFT, PerAda, Slot, make_algorithm


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_are_made_by_name(name):
    assert isinstance(make_algorithm(name), Algorithm)


def test_an_algorithm_is_returned_as_it_is():
    made = Ditto(0.25)
    assert make_algorithm(made) is made
    assert made.prox_strength == 0.25


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("peradda", {}, "algorithm='peradda' is unknown; did you mean 'perada'"),
        ("xyz", {}, "algorithm='xyz' is unknown; choose one of perada, "),
        ("standalone", {"prox_strength": 1.0}, "algorithm='standalone' cannot be made with .*prox_strength"),
        ("ditto", {"prox_strength": -1.0}, "prox_strength=-1.0 is not a strength"),
        ("ditto", {"prox_strength": float("nan")}, "prox_strength=nan is not a strength"),
        ("fedavg_ft", {"finetune_epochs": 0}, "finetune_epochs=0 is not positive"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, **options)


def test_only_perada_distils_and_only_personalised_algorithms_keep_states():
    slot = Slot(("w",), ("w",))
    kept = {name: set(make_algorithm(name).kept({"w": torch.zeros(1)}, slot)) for name in ALGORITHMS}
    personal = {"personal"}
    assert kept == {
        "perada": personal,
        "perada_no_kd": personal,
        "ditto": personal,
        "standalone": personal,
        "fedavg": set(),
        "fedavg_ft": set(),
    }
    assert [name for name in ALGORITHMS if make_algorithm(name).distills] == ["perada"]
    assert [name for name in ALGORITHMS if not make_algorithm(name).sends] == ["standalone"]
    assert PerAda().finetuning() is None
    assert FedAvgFT(3).finetuning()[1].epochs == 3
