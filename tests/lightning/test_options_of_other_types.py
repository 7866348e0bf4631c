# SPDX-License-Identifier: Apache-2.0
"""Options of types that cannot be used are one line that names option, value and remedy."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger

from perada.data import ByDomain, Digits, Dirichlet, FederatedData, FederatedDataModule, FromFile
from perada.lightning.trainer_setup import available_cores, check_devices
from perada.models.configurations import METHODS
from tests.rejections import rejects

WRONG = [
    ("seed", 0.5),
    ("seed", True),
    ("seed", -1),
    ("seed", "a"),
    ("seed", None),
    ("algorithm", None),
    ("local_steps", True),
    ("local_steps", "2"),
    ("local_epochs", float("inf")),
    ("server_rule", {}),
    ("adapter_options", 3),
    ("algorithm_options", [1]),
    ("torch_compile", "x"),
    ("pretrained", 3),
    ("ckpt_path", 3),
    ("resume_allow", "training.lr_local"),
    ("metric", 10**12),
    ("callbacks", 3),
    ("callbacks", EarlyStopping),
    ("logger", "csv"),
    ("logger", CSVLogger),
    ("default_root_dir", 3),
    ("precision", "fp16"),
    ("precision", 8),
]


def test_a_class_in_a_list_of_callbacks_is_rejected(tiny):
    with rejects("callbacks", EarlyStopping, "create it"):
        tiny.finetune(callbacks=[EarlyStopping])


@pytest.mark.parametrize("rounds", [np.int64(1), np.int32(1), torch.tensor(1).numpy()[()]])
def test_numpy_integers_count_rounds(tiny, rounds):
    run = tiny.finetune(rounds=rounds)
    assert len(run.metrics["rounds"]) == 1


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_option_of_another_type_is_rejected(tiny, name, value):
    with rejects(name, value):
        tiny.finetune(**{name: value})


NO_DATA = FederatedData([])
OPTIONS_OF_DATA = [
    (FederatedDataModule, "data", [{}, [], "", True, math.nan]),
    (partial(FederatedDataModule, partition=Dirichlet(2, 1.0)), "dataset", [{}, [], "Digits", 3]),
    (partial(FederatedDataModule, dataset=Digits()), "partition", [{}, [], "IID", True]),
    (partial(FederatedDataModule, NO_DATA), "seed", [{}, None, math.inf, math.nan, 0.5, True]),
    (partial(FederatedDataModule, NO_DATA), "shifts", ["3", True, math.nan, -1]),
    (partial(FederatedDataModule, NO_DATA), "image_size", [10**12, "32", 0]),
    (partial(FederatedDataModule, NO_DATA), "flip", ["abc", {}, None, math.nan]),
    (partial(FederatedData, []), "FederatedData: classes", [True, 3, "abc"]),
    (partial(FederatedData, []), "FederatedData: client_names", [0.5, "a"]),
    (partial(Dirichlet, 2), "column", [{}, [], "", 3]),
    (partial(Dirichlet, 2), "alpha", [math.nan, math.inf, "1", None, True]),
    (partial(Dirichlet, alpha=1.0), "num_clients", [math.nan, "3", 2.0, True, None, {}]),
    (ByDomain, "column", [{}, None, ""]),
    (FromFile, "path", [{}, [], None, 3, ""]),
]


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [(call, option, value) for call, option, values in OPTIONS_OF_DATA for value in values],
)
def test_an_option_of_data_or_a_partition_of_another_type_is_rejected(call, option, value):
    with rejects(option, value):
        call(**{option.removeprefix("FederatedData: "): value})


@pytest.mark.parametrize("adapter", ["residual", "bottleneck"])
def test_a_dropout_that_is_no_number(adapter):
    with pytest.raises(ValueError, match="dropout must be a number >= 0 and < 1, got 'x'"):
        METHODS[adapter](dropout="x")


def test_more_processes_than_cores_are_rejected():
    cores = max(2, available_cores())
    check_devices("cpu", cores)
    with pytest.raises(ValueError, match=rf"devices={cores + 1} .*{cores} cores"):
        check_devices("cpu", cores + 1)


def test_two_processes_may_share_one_core(monkeypatch):
    monkeypatch.setattr("perada.lightning.trainer_setup.available_cores", lambda: 1)
    check_devices("cpu", 2)
    with rejects("devices", 3):
        check_devices("cpu", 3)
