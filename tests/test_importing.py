# SPDX-License-Identifier: Apache-2.0
"""Import paths of before the thirteen rooms, and what `import perada` does not import."""

import importlib
import json
import subprocess
import sys

import pytest

import perada
from perada.importing import MOVED

PUBLIC = [
    "perada.callbacks.FederatedLoop",
    "perada.callbacks.PredictionFile",
    "perada.callbacks.RoundCheckpoint",
    "perada.callbacks.RoundProgressBar",
    "perada.callbacks.federated_loop.FederatedLoop",
    "perada.module.FederatedClassifier",
    "perada.strategies.FederatedStrategy",
    "perada.engine.Engine",
    "perada.federation.Federation",
    "perada.settings.Settings",
    "perada.cohort.Cohort",
    "perada.data.datasets.Digits",
    "perada.data.datasets.CIFAR10",
    "perada.data.folders.ImageFolder",
    "perada.data.partitions.IID",
    "perada.data.partitions.ByDomain",
    "perada.data.partitions.FromFile",
    "perada.data.label_partitions.Dirichlet",
    "perada.data.label_partitions.DominantClass",
    "perada.data.label_partitions.Shards",
    "perada.data.federated.FederatedData",
    "perada.data.datamodule.FederatedDataModule",
    "perada.data.transforms.prepare_images",
    "perada.server.rules.ModifiedLocalGD",
    "perada.server.distill.Distillation",
    "perada.privacy.options.Privacy",
    "perada.privacy.options.ClientPrivacy",
    "perada.store.Storage",
    "perada.rounds.RoundPlan",
    "perada.rounds.share_out",
    "perada.states.State",
    "perada.run.Run",
    "perada.export.save_adapter",
    "perada.backbones.build_backbone",
    "perada.slot.insert_adapter",
    "perada.pretrain.pretrain",
    "perada.cli.main",
    "perada.cli.entry_point",
]
"""Class paths that stand in saved configurations, scripts and the docs of before."""


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", PUBLIC)
def test_class_paths_of_before_are_found(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("former", sorted(MOVED))
def test_a_module_that_has_moved_is_the_same_under_its_former_name(former):
    assert importlib.import_module(former) is importlib.import_module(MOVED[former])
    assert importlib.import_module(former).__spec__.name == MOVED[former]


def test_a_former_name_that_there_never_was_is_none():
    with pytest.raises(ModuleNotFoundError, match=r"perada\.callbacks\.nothing|perada\.lightning\.nothing"):
        importlib.import_module("perada.callbacks.nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        perada.nothing  # noqa: B018


def test_public_names_are_those_of_their_homes():
    assert [name for name in perada.__all__ if getattr(perada, name).__name__ != name] == []
    assert {*perada.__all__} <= {*dir(perada)}


@pytest.mark.parametrize(
    "first",
    [
        "import perada, peft",
        *(
            pytest.param(f"import {names}", marks=pytest.mark.slow)
            for names in ("peft, perada", "perada.adapters, peft, perada")
        ),
    ],
)
@pytest.mark.slow
def test_peft_knows_our_methods_after_import_perada(first):
    known = run(f"{first}\nprint('PERADA_RESIDUAL' in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING)")
    assert known.strip() == "True"


def test_import_perada_imports_nothing_large():
    script = "import json, sys, perada; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    large = {"torch", "numpy", "transformers", "peft", "timm", "pytorch_lightning", "opacus", "jsonargparse", "yaml"}
    assert large & {*json.loads(run(script))} == set()
