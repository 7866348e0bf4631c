# SPDX-License-Identifier: Apache-2.0
"""What ``import perada`` does to importing.

Modules that have moved can still be imported under their former names, since saved configurations and scripts name
classes by them: what is imported is the module itself, not a copy. And whoever imports PEFT finds perada's methods
registered with it, without PEFT being imported before it is needed.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_HOMES = {
    "perada": "callbacks:lightning",
    "perada.cli": "cli_classes:classes cli_messages:messages cli_words:words",
    "perada.core": "ranks rounds seeding states",
    "perada.data": "data.server_images:datamodule",
    "perada.data.batches": (
        "data.features:feature_cache data.loaders data.preparation data.private_batches:private "
        "data.schedule data.store:samples data.transforms"
    ),
    "perada.data.partitions": "data.apportion data.division data.holdout data.label_partitions:by_label",
    "perada.data.sets": "data.datasets:images data.folders data.readers data.shapes",
    "perada.engine": (
        "engine.masked_optimizers:loss_scaling fold frozen_layers loss_scaling losses "
        "masked_optimizers:loss_scaling prefix prefix_search stacked_layers"
    ),
    "perada.experiments": "compare pretrain studies",
    "perada.federation": (
        "cohort evaluation federation.local_training:cohort federation.scores:evaluation local_training:cohort "
        "round_report scoring:evaluation server_turn:federation settings store"
    ),
    "perada.federation.store": (
        "federation.store.choice:kinds federation.store.disk:kinds federation.store.files:rows "
        "federation.store.layout:rows federation.store.memory:kinds"
    ),
    "perada.lightning": (
        "callbacks.features:checks callbacks.finetuning:after_rounds callbacks.parts:steps "
        "callbacks.protect:private_setup lightning.journals:run_folder lightning.processes:strategies module outcome "
        "strategies"
    ),
    "perada.models": "backbone_weights:weight_files backbones models.slots:adapted slot:adapted twins",
    "perada.privacy": (
        "privacy.calibration:accounting privacy.client_level_refusals:rehearsal privacy.independence:probe"
    ),
    "perada.results": "export privacy_card report run",
    "perada.server": "refinement:distill server.server_optimizers:rules",
}
MOVED = {
    f"perada.{former.split(':')[0]}": f"{home}.{re.split('[.:]', former)[-1]}"
    for home, names in _HOMES.items()
    for former in names.split()
}
"""Former name of each module or package, and where it is now; what is in a package moved with it."""


class _Finder(MetaPathFinder, Loader):
    """Finds moved modules under their former names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if home(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        found = home(module.__name__)
        assert found is not None
        sys.modules[module.__name__] = importlib.import_module(found)


def home(name: str) -> str | None:
    """Where a module that had this name is now; ``None`` where none had.

    >>> home("perada.module"), home("perada.callbacks.checks"), home("perada.algorithms")
    ('perada.lightning.module', 'perada.lightning.checks', None)
    """
    if name in MOVED:
        return MOVED[name]
    package, _, module = name.rpartition(".")
    above = home(package) if package else None
    return above and f"{above}.{module}"


class _AfterPeft(MetaPathFinder, Loader):
    """Registers our methods as soon as PEFT has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module("perada.adapters")


def install() -> None:
    """Have Python's import do both; once."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if "peft" in sys.modules:
        importlib.import_module("perada.adapters")
    else:
        sys.meta_path.insert(0, _AfterPeft())
