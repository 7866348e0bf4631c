# SPDX-License-Identifier: Apache-2.0
"""Parameters that a client trains and sends, ResNet-18 on CIFAR-10, beside Table 1 of the PerAda paper.

Counted by hand from the layout of ResNet-18; in the last two columns what the paper prints, in millions. It cuts digits
where others round, so a count agrees if it lies within 0.01 M. Two of its figures cannot be had from the definitions:
the "input layer" sends 6.45 M there (its Table 7 keeps 4.73 M, which is the last block and the head), and FedAlt's and
FedSim's adapters train 12.59 M, which counts norms and head twice (11.18 + 1.41).
"""

from functools import cache

import pytest

from perada.algorithms import make_algorithm
from perada.core.rounds import Phase, RoundPlan, Shares
from perada.core.states import get_state
from perada.engine import Engine
from perada.federation import Federation
from perada.federation.settings import LocalTraining, Settings
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.server import Distillation
from tests.methods import NAMED, make_method

from .problems import OF_BRANCHES, OF_LORA
from .table1 import TABLE


class Sizes:
    """What a round without public images needs of the data."""

    train_sizes = (8,) * 5


@cache
def model(adapter, train_backbone):
    return insert_adapter(build_backbone("resnet18", 10, pretrained=False), adapter, train_backbone=train_backbone)


def test_every_algorithm_is_counted():
    assert set(TABLE) == set(NAMED)


QUICK = ("standalone", "apfl", "fedbn", "lg_fedavg", "fedrep", "fedalt_input", "fedalt_adapter", "perada")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TABLE])
@pytest.mark.every(24)
def test_parameters_trained_and_sent(name):
    few = {"fed_ensemble": {"modes": 2}, "fedbe": {"samples": 1}, "fedbe_no_kd": {"samples": 1}}
    algorithm = make_method(name, **few.get(name, {}))
    is_adapter = name.endswith("adapter")
    adapter = "residual" if name.startswith("perada") or is_adapter else "lora" if name in OF_LORA else "full"
    adapter = "dual_lora" if name in OF_BRANCHES else adapter
    adapted = model(adapter, "merged" if algorithm.merges_into_backbone else is_adapter)
    tensor_names = find_tensor_names(adapted.model, adapted.backbone.head)
    algorithm.check(tensor_names, 5)
    phases = algorithm.phases(1, None)
    settings = Settings(
        algorithm, LocalTraining("sgd", {"personal": 0.1, "local": 0.1}), Distillation(0), "uniform", phases, seed=0
    )
    engine = Engine(adapted.model, "loop")
    federation = Federation(engine, tensor_names, lambda index: get_state(adapted.model), settings, 5)
    federation.begin_round(Shares.of(RoundPlan(0, (0,), ((1,),) * len(phases))))
    counted = federation.end_round(Sizes(), steps=lambda plan: []).metrics
    trained, sent, *paper = TABLE[name]
    assert (counted["params/trained"], counted["params/sent"]) == (trained, sent)
    for count, printed in zip((trained, sent), paper, strict=True):
        if printed is not None:
            assert abs(count / 1e6 - printed) < 0.01


def test_phases_are_those_of_the_paper():
    assert [phase.name for phase in make_algorithm("fedrep").phases(1, None)] == ["personal", "local"]
    assert make_algorithm("fedrep", head_epochs=2).phases(None, 7) == (Phase("personal", 2), Phase("local", steps=7))
