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


def test_a_name_that_there_is_not_is_refused():
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
