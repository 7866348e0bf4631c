# SPDX-License-Identifier: Apache-2.0
"""Two rounds, a checkpoint and two more rounds are four rounds, to the bit, for every algorithm."""

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from perada.algorithms import APFL, FedBE, FedEnsemble, FedProx, PFedMe, make_algorithm
from perada.server.rules import FedAdam, ModifiedLocalGD
from tests.methods import NAMED

from .problems import CLIENTS, MERGING, OF_BRANCHES, OF_LORA, assert_equal, finetune, task

PERADA = make_algorithm("perada")
NAMED = [
    (
        name,
        {"problem": "net-backbone"}
        if name.endswith("_adapter") or name in OF_LORA
        else {"problem": "net-branches"}
        if name in OF_BRANCHES
        else {},
    )
    for name in NAMED
    if name not in ("fed_ensemble", *MERGING)  # it has five strata, and there are four clients; see test_merging.py
]
MADE = [
    (FedEnsemble(modes=2, strata=2), {}),
    (FedEnsemble(base=FedProx(), modes=2, strata=2), {}),
    (APFL(lr_alpha=0.5), {}),
    (PFedMe(beta=0.5), {}),
    (FedBE(sampler="dirichlet", samples=3), {}),
    (FedBE(distill=False, samples=3), {}),
    (FedEnsemble(base=PERADA, modes=2, strata=2), {}),
    (FedEnsemble(modes=2, strata=2, assignment="loss"), {}),
    (FedEnsemble(modes=3, strata=2, keeps="best"), {}),
    (FedEnsemble(modes=2, strata=2), {"server_rule": FedAdam()}),
    ("ditto", {"server_rule": FedAdam()}),
    ("fedavg", {"server_rule": ModifiedLocalGD()}),
]


def train(algorithm, folder, rounds, **options):
    checkpoint = {"callbacks": [ModelCheckpoint(folder, "saved")], "enable_checkpointing": True}
    options = {"dropout": 0.4, "momentum": 0.5, "batch_size": 8, "local_epochs": 1} | checkpoint | options
    return finetune(algorithm, rounds=rounds, **options)


VARIANTS = [pytest.param(*row, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, row in enumerate(MADE)]


@pytest.mark.parametrize(("algorithm", "options"), NAMED + VARIANTS, ids=lambda value: repr(value)[:60])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.every(30)
def test_a_checkpoint_goes_on_to_the_bit(tmp_path, algorithm, options):
    uninterrupted = train(algorithm, tmp_path / "whole", 4, **options)
    train(algorithm, tmp_path / "half", 2, **options)
    resumed = train(algorithm, tmp_path / "half", 4, ckpt_path=str(tmp_path / "half" / "saved.ckpt"), **options)
    for state, expected in zip(resumed.states("global"), uninterrupted.states("global"), strict=True):
        assert_equal(state, expected, "global")
    images = task().public[:][0]
    for m in CLIENTS:
        assert torch.equal(resumed.personal(m)(images), uninterrupted.personal(m)(images))
    assert resumed.metrics == uninterrupted.metrics
