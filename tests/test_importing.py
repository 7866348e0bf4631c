# SPDX-License-Identifier: Apache-2.0
"""What `import perada` offers, registers and does not import."""

import importlib
import json
import subprocess
import sys

import pytest

import perada


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_a_name_that_there_is_not_is_rejected():
    with pytest.raises(ModuleNotFoundError, match=r"perada\.nothing"):
        importlib.import_module("perada.nothing")
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


@pytest.mark.slow
def test_import_perada_leaves_one_finder_until_peft_is_imported():
    script = "import sys; before = [*sys.meta_path]; import perada; (own,) = {*sys.meta_path} - {*before}; "
    script += "assert perada.adapters.register; print(own in sys.meta_path)"
    assert run(script).strip() == "False"


@pytest.mark.slow
def test_the_collector_rests_during_an_import():
    """It took a sixth of the time of importing the libraries, and found next to nothing."""
    script = """
import gc
import perada
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
perada.make_algorithm
paused = len(collections)
gc.collect()
print(paused, len(collections) > paused, gc.isenabled())
"""
    paused, collected, enabled = run(script).split()
    assert int(paused) <= 4  # each counts at its start and its end; the import made hundreds
    assert (collected, enabled) == ("True", "True")


@pytest.mark.slow
def test_images_that_scikit_learn_ships_are_read_without_importing_it():
    script = "import sys; from perada.data import Digits, Photographs; "
    script += "print(len(Digits().images), len(Photographs(count=2).images), {'sklearn', 'pandas'} & {*sys.modules})"
    assert run(script).strip() == "1438 2 set()"


@pytest.mark.slow
def test_what_only_some_need_is_asked_for_when_they_need_it():
    """A base install has no library of an extra: other runs go without, and one line names the extra.

    The studies, which are beside the library, are no part of a run either.
    """
    script = """
import importlib.metadata, sys
extras = ("opacus", "sklearn", "matplotlib", "pandas", "optuna")
sys.modules |= dict.fromkeys(extras)
find = importlib.metadata.distribution

def distribution(name):  # torchmetrics looks here for matplotlib before it imports it
    if name in extras:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

importlib.metadata.distribution = distribution
import perada, torch
from perada.data import Digits, FederatedData, FederatedDataModule
from perada.privacy import history_epsilon
from torch.utils.data import TensorDataset

def train(**options):
    sets = [TensorDataset(torch.randn(8, 1, 4, 4), torch.arange(8) % 2) for _ in range(2)]
    data = FederatedDataModule(FederatedData(train=sets, test=sets), batch_size=4)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    options |= {"adapter": "full", "algorithm": "fedavg", "rounds": 1, "enable_progress_bar": False}
    return perada.finetune(net, data, num_classes=2, **options)

print("plain:", len(train().metrics["rounds"]))
print("studies:", [name for name in sys.modules if name.startswith("perada.studies")])
for needs in (
    lambda: train(privacy={"noise_multiplier": 1.0}),
    lambda: train(client_privacy={"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-5}),
    lambda: history_epsilon({(1.0, 0.1): 10}, 1e-5),
    lambda: Digits().images,
):
    try:
        needs()
    except ModuleNotFoundError as error:
        print("needs:", error)
"""
    said = [line for line in run(script).splitlines() if line.startswith(("plain:", "studies:", "needs:"))]
    assert said[:2] == ["plain: 1", "studies: []"]
    assert ["perada[privacy]" in line for line in said[2:]] == [True, True, True, False]
    assert "perada[examples]" in said[5]


@pytest.mark.parametrize(
    ("library", "extra", "call"),
    [
        ("opacus", "privacy", lambda: perada.privacy.history_epsilon({(1.25, 0.125): 7}, 1e-5)),
        ("sklearn", "examples", lambda: perada.data.Digits().images),
    ],
)
def test_one_line_names_the_extra_of_a_library_that_is_missing(monkeypatch, library, extra, call):
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"perada\[{extra}\]") as error:
        call()
    assert "\n" not in str(error.value)
