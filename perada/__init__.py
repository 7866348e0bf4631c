# SPDX-License-Identifier: Apache-2.0
"""Personalized, parameter-efficient federated fine-tuning of pretrained vision models on PyTorch Lightning."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from perada.system.garbage import collection_paused

if TYPE_CHECKING:
    from perada.algorithms import Algorithm, make_algorithm
    from perada.api import finetune
    from perada.data import FederatedData, FederatedDataModule
    from perada.evaluation.evaluate import evaluate
    from perada.federation import Evaluation, Training
    from perada.lightning import FederatedClassifier, FederatedLoop
    from perada.lightning.joining import personalize
    from perada.privacy import ClientPrivacy, Privacy
    from perada.results.run import Run
    from perada.studies.compare.comparison import Comparison

__all__ = [
    "Algorithm",
    "ClientPrivacy",
    "Comparison",
    "Evaluation",
    "FederatedClassifier",
    "FederatedData",
    "FederatedDataModule",
    "FederatedLoop",
    "Privacy",
    "Run",
    "Training",
    "evaluate",
    "finetune",
    "make_algorithm",
    "personalize",
]

_PUBLIC_MODULES = (
    "algorithms",
    "privacy",
    "federation",
    "data",
    "results.run",
    "evaluation.evaluate",
    "lightning",
    "api",
    "lightning.joining",
    "studies.compare.comparison",
)
"""Modules with the public names, each after those that it imports."""


def __getattr__(name: str) -> object:
    """Import a public name or a module when it is first used, so that ``import perada`` itself takes no time."""
    if name in __all__:
        value = _import_public_name(name)
        # From now on Python finds the name without this function.
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            with collection_paused():
                return importlib.import_module(f"perada.{name}")
        except ModuleNotFoundError as error:
            # A module that exists may lack a library.
            if error.name != f"perada.{name}":
                raise
    raise AttributeError(f"module 'perada' has no attribute {name!r}")


def _import_public_name(name: str) -> object:
    """Import the module that defines a public name, and return the object with that name."""
    with collection_paused():
        for module_name in _PUBLIC_MODULES:
            module = importlib.import_module(f"perada.{module_name}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'perada' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterAfterPeft(MetaPathFinder):
    """Imports perada's own methods, which registers them with PEFT, as soon as PEFT has been imported.

    PEFT has no entry point for that, and to import it here would take seconds.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of PEFT with a loader that also imports perada.adapters; None for other modules."""
        if fullname != "peft":
            return None
        # Without this finder, find_spec finds PEFT as usual.
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_register(module: ModuleType) -> None:
            exec_module(module)
            importlib.import_module("perada.adapters")

        # The method is replaced on this object only: a loader around it would hide what else it can do, such as read
        # PEFT's sources.
        spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]  # which mypy allows on no object
        return spec


if "peft" in sys.modules:
    importlib.import_module("perada.adapters")
else:
    sys.meta_path.insert(0, _RegisterAfterPeft())
