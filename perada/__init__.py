# SPDX-License-Identifier: Apache-2.0
"""Personalized, parameter-efficient federated fine-tuning of pretrained vision models on PyTorch Lightning."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perada.core.garbage import collection_paused

if TYPE_CHECKING:
    from perada.algorithms import Algorithm, make_algorithm
    from perada.api import finetune
    from perada.data import FederatedData, FederatedDataModule
    from perada.lightning import FederatedClassifier, FederatedLoop
    from perada.lightning.joining import personalize
    from perada.privacy import ClientPrivacy, Privacy
    from perada.results.run import Run

__all__ = [
    "Algorithm",
    "ClientPrivacy",
    "FederatedClassifier",
    "FederatedData",
    "FederatedDataModule",
    "FederatedLoop",
    "Privacy",
    "Run",
    "finetune",
    "make_algorithm",
    "personalize",
]

_HOMES = ("algorithms", "privacy", "data", "results.run", "lightning", "api", "lightning.joining")
"""Where the names are, as they import one another."""


def __getattr__(name: str) -> object:
    """Import a public name or a module when it is first used, so that ``import perada`` alone takes no time."""
    if name in __all__:
        with collection_paused():
            homes = (vars(importlib.import_module(f"perada.{home}")) for home in _HOMES)
            globals()[name] = value = next(home[name] for home in homes if name in home)
        return value
    if not name.startswith("_"):
        try:
            with collection_paused():
                return importlib.import_module(f"perada.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"perada.{name}":
                raise
    raise AttributeError(f"module 'perada' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _AfterPeft(MetaPathFinder):
    """Registers our methods with PEFT, which has no entry point for that, as soon as it has been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ANN401  # Python calls it
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), importlib.import_module("perada.adapters"))  # type: ignore[assignment, method-assign]  # as a loader has it
        return spec


if "peft" in sys.modules:
    importlib.import_module("perada.adapters")
else:
    sys.meta_path.insert(0, _AfterPeft())
