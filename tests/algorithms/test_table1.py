# SPDX-License-Identifier: Apache-2.0
"""Parameters that a client trains and sends, ResNet-18 on CIFAR-10, beside Table 1 of the PerAda paper.

Counted by hand from the layout of ResNet-18; in the last two columns what the paper prints, in millions. It cuts digits
where others round, so a count agrees if it lies within 0.01 M. Two of its figures cannot be had from the definitions:
the "input layer" sends 6.45 M there (its Table 7 keeps 4.73 M, which is the last block and the head), and FedAlt's and
FedSim's adapters train 12.59 M, which counts norms and head twice (11.18 + 1.41).
"""

from functools import cache
from itertools import pairwise

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

FULL, CONV1, HEAD = 11_181_642, 3 * 64 * 7 * 7, 512 * 10 + 10
WIDTHS = (64, 128, 256, 512)
NORMS = 2 * (WIDTHS[0] + 4 * sum(WIDTHS) + sum(WIDTHS[1:]))  # the stem, four in each stage, three shortcuts
ADAPTERS = 4 * sum(width * width + 2 * width for width in WIDTHS)
PERADA = 1_413_258
DOWNS = 8 * 9 * (4 * WIDTHS[0] + sum(before + 3 * own for before, own in pairwise(WIDTHS)))  # of rank 8, 3 × 3
UPS = 8 * 4 * sum(WIDTHS)
TABLE = {  # trained, sent; what the paper prints
    "standalone": (FULL, 0, 11.18, 0),
    "fedavg": (FULL, FULL, None, None),
    "fedprox": (FULL, FULL, None, None),
    "feddyn": (FULL, FULL, None, None),
    "scaffold": (FULL, 2 * FULL, None, None),
    "moon": (FULL, FULL, None, None),
    "feddf": (FULL, FULL, None, None),
    "fedbe": (FULL, FULL, None, None),
    "fedbe_no_kd": (FULL, FULL, None, None),
    "fed_ensemble": (FULL, FULL, None, None),
    "fedavg_ft": (FULL, FULL, 11.18, 11.18),
    "fedbabu": (FULL - HEAD, FULL - HEAD, None, None),
    "mtl": (FULL, FULL, 11.18, 11.18),
    "pfedme": (2 * FULL, FULL, 22.36, 11.18),
    "apfl": (2 * FULL, FULL, 22.36, 11.18),
    "ditto": (2 * FULL, FULL, 22.36, 11.18),
    "fedbn": (FULL, FULL - NORMS, 11.18, 11.17),
    "lg_fedavg": (FULL, HEAD, 11.18, 0.005),
    "fedper": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedrod": (FULL + HEAD, FULL, None, None),
    "fedrep": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedalt_output": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedsim_output": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedalt_input": (FULL, FULL - CONV1, 11.18, None),
    "fedsim_input": (FULL, FULL - CONV1, 11.18, None),
    "fedalt_adapter": (FULL + ADAPTERS, FULL, 12.59, 11.18),
    "fedsim_adapter": (FULL + ADAPTERS, FULL, 12.59, 11.18),
    "perada": (2 * PERADA, PERADA, 2.82, 1.41),
    "perada_no_kd": (2 * PERADA, PERADA, 2.82, 1.41),
    "ffa_lora": (UPS + HEAD, UPS + HEAD, None, None),
    "fedsa_lora": (DOWNS + UPS + HEAD, DOWNS, None, None),
    "rolora": (UPS + HEAD, UPS + HEAD, None, None),  # in the first round
    "feddpa": (2 * (DOWNS + UPS + HEAD), DOWNS + UPS + HEAD, None, None),
    "feddpa_f": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
    "fedalt_row": (DOWNS + UPS + HEAD, DOWNS + UPS, None, None),  # without a gate
    "het_lora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),  # of a client with the adapter's rank
    "fedex_lora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
    "flora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
}


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
    own = name.endswith("adapter")
    adapter = "residual" if name.startswith("perada") or own else "lora" if name in OF_LORA else "full"
    adapter = "dual_lora" if name in OF_BRANCHES else adapter
    adapted = model(adapter, "merged" if algorithm.merges_into_backbone else own)
    tensor_names = find_tensor_names(adapted.model, adapted.backbone.head)
    algorithm.check(tensor_names, 5)
    phases = algorithm.phases(1, None)
    settings = Settings(
        algorithm, LocalTraining("sgd", {"personal": 0.1, "local": 0.1}), Distillation(0), "uniform", phases, seed=0
    )
    engine = Engine(adapted.model, "loop")
    federation = Federation(engine, tensor_names, lambda index: get_state(adapted.model), settings, 5)
    federation.begin_round(Shares.of(RoundPlan(0, (0,), ((1,),) * len(phases))))
    counted = federation.end_round(Sizes()).metrics
    trained, sent, *paper = TABLE[name]
    assert (counted["params/trained"], counted["params/sent"]) == (trained, sent)
    for count, printed in zip((trained, sent), paper, strict=True):
        if printed is not None:
            assert abs(count / 1e6 - printed) < 0.01


def test_phases_are_those_of_the_paper():
    assert [phase.name for phase in make_algorithm("fedrep").phases(1, None)] == ["personal", "local"]
    assert make_algorithm("fedrep", head_epochs=2).phases(None, 7) == (Phase("personal", 2), Phase("local", steps=7))
