# SPDX-License-Identifier: Apache-2.0
"""Options of types that cannot be used are one line that names option, value and remedy."""

import math

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger

import perada
from perada.core.text import value_text
from perada.data import ByDomain, Digits, Dirichlet, FederatedData, FederatedDataModule, FromFile
from perada.lightning.trainer_setup import available_cores, check_devices
from perada.models.configurations import METHODS
from tests.options import sections

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


def test_a_class_in_a_list_of_callbacks_is_to_be_created(tiny):
    with pytest.raises(ValueError, match=r"^callbacks must be .*, got the class EarlyStopping \(create it: .*\)$"):
        perada.finetune(tiny.net(), tiny.data(), **sections(**tiny.options | {"callbacks": [EarlyStopping]}))


@pytest.mark.parametrize("rounds", [np.int64(1), np.int32(1), torch.tensor(1).numpy()[()]])
def test_numpy_integers_count_rounds(tiny, rounds):
    run = perada.finetune(tiny.net(), tiny.data(), **sections(**tiny.options | {"rounds": rounds}))
    assert len(run.metrics["rounds"]) == 1


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_one_line_says_what_is_wrong(tiny, name, value):
    with pytest.raises(ValueError, match=rf"^{name}(=| must be )") as raised:
        perada.finetune(tiny.net(), tiny.data(), **sections(**tiny.options | {name: value}))
    message = str(raised.value)
    assert f", got {value_text(value)}" in message or message.startswith(f"{name}={value_text(value)} is unknown")
    assert "\n" not in message


OF_DATA = [
    (lambda value: FederatedDataModule(value), "data", [{}, [], "", True, math.nan]),
    (lambda value: FederatedDataModule(dataset=value, partition=Dirichlet(2, 1.0)), "dataset", [{}, [], "Digits", 3]),
    (lambda value: FederatedDataModule(dataset=Digits(), partition=value), "partition", [{}, [], "IID", True]),
    (
        lambda value: FederatedDataModule(FederatedData([]), seed=value),
        "seed",
        [{}, None, math.inf, math.nan, 0.5, True],
    ),
    (lambda value: FederatedDataModule(FederatedData([]), shifts=value), "shifts", ["3", True, math.nan, -1]),
    (lambda value: FederatedDataModule(FederatedData([]), image_size=value), "image_size", [10**12, "32", 0]),
    (lambda value: FederatedDataModule(FederatedData([]), flip=value), "flip", ["abc", {}, None, math.nan]),
    (lambda value: FederatedDataModule(FederatedData([], classes=value)), "FederatedData: classes", [True, 3, "abc"]),
    (
        lambda value: FederatedDataModule(FederatedData([], client_names=value)),
        "FederatedData: client_names",
        [0.5, "a"],
    ),
    (lambda value: Dirichlet(2, column=value), "column", [{}, [], "", 3]),
    (lambda value: Dirichlet(2, alpha=value), "alpha", [math.nan, math.inf, "1", None, True]),
    (lambda value: Dirichlet(value, 1.0), "num_clients", [math.nan, "3", 2.0, True, None, {}]),
    (lambda value: ByDomain(column=value), "column", [{}, None, ""]),
    (lambda value: FromFile(value), "path", [{}, [], None, 3, ""]),
]


@pytest.mark.parametrize(("make", "name", "value"), [(make, name, value) for make, name, of in OF_DATA for value in of])
def test_data_and_partitions_say_what_is_wrong(make, name, value):
    with pytest.raises((ValueError, TypeError)) as raised:
        make(value)
    message = str(raised.value)
    requirement, _, hint = message.partition(f", got {value!r}")
    assert requirement.startswith(f"{name} must be "), message
    assert not hint or hint.startswith("; "), message
    assert "\n" not in message


@pytest.mark.parametrize("adapter", ["residual", "bottleneck"])
def test_a_dropout_that_is_no_number(adapter):
    with pytest.raises(ValueError, match="dropout must be a number >= 0 and < 1, got 'x'"):
        METHODS[adapter](dropout="x")


def test_more_processes_than_cores_are_rejected():
    cores = max(2, available_cores())
    check_devices("cpu", cores)
    with pytest.raises(ValueError, match=f"devices={cores + 1} exceeds the {cores} cores"):
        check_devices("cpu", cores + 1)


def test_two_processes_may_share_one_core(monkeypatch):
    monkeypatch.setattr("perada.lightning.trainer_setup.available_cores", lambda: 1)
    check_devices("cpu", 2)
    with pytest.raises(ValueError, match=r"devices=3 .* at most 2"):
        check_devices("cpu", 3)
