# SPDX-License-Identifier: Apache-2.0
"""What ``import perada`` does to importing.

Modules that have moved can still be imported under their former names, since saved configurations and scripts name
classes by them: what is imported is the module itself, not a copy. And whoever imports PEFT finds perada's methods
registered with it, without PEFT being imported before it is needed.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MOVED = {
    "perada.backbone_weights": "perada.models.weight_files",
    "perada.backbones": "perada.models.backbones",
    "perada.callbacks": "perada.lightning",
    "perada.callbacks.features": "perada.lightning.checks",
    "perada.callbacks.parts": "perada.lightning.steps",
    "perada.callbacks.protect": "perada.lightning.private_setup",
    "perada.cli_classes": "perada.cli.classes",
    "perada.cli_messages": "perada.cli.messages",
    "perada.cli_words": "perada.cli.words",
    "perada.cohort": "perada.federation.cohort",
    "perada.compare": "perada.experiments.compare",
    "perada.data.apportion": "perada.data.partitions.apportion",
    "perada.data.datasets": "perada.data.sets.images",
    "perada.data.division": "perada.data.partitions.division",
    "perada.data.features": "perada.data.batches.feature_cache",
    "perada.data.folders": "perada.data.sets.folders",
    "perada.data.holdout": "perada.data.partitions.holdout",
    "perada.data.label_partitions": "perada.data.partitions.by_label",
    "perada.data.loaders": "perada.data.batches.loaders",
    "perada.data.preparation": "perada.data.batches.preparation",
    "perada.data.private_batches": "perada.data.batches.private",
    "perada.data.readers": "perada.data.sets.readers",
    "perada.data.schedule": "perada.data.batches.schedule",
    "perada.data.server_images": "perada.data.datamodule",
    "perada.data.shapes": "perada.data.sets.shapes",
    "perada.data.store": "perada.data.batches.samples",
    "perada.data.transforms": "perada.data.batches.transforms",
    "perada.evaluation": "perada.federation.scores",
    "perada.export": "perada.results.export",
    "perada.fold": "perada.engine.fold",
    "perada.frozen_layers": "perada.engine.frozen_layers",
    "perada.local_training": "perada.federation.local_training",
    "perada.loss_scaling": "perada.engine.loss_scaling",
    "perada.losses": "perada.engine.losses",
    "perada.masked_optimizers": "perada.engine.masked_optimizers",
    "perada.module": "perada.lightning.module",
    "perada.outcome": "perada.lightning.outcome",
    "perada.prefix": "perada.engine.prefix",
    "perada.prefix_search": "perada.engine.prefix_search",
    "perada.pretrain": "perada.experiments.pretrain",
    "perada.privacy_card": "perada.results.privacy_card",
    "perada.ranks": "perada.core.ranks",
    "perada.refinement": "perada.server.distill",
    "perada.report": "perada.results.report",
    "perada.round_report": "perada.federation.round_report",
    "perada.rounds": "perada.core.rounds",
    "perada.run": "perada.results.run",
    "perada.scoring": "perada.federation.evaluation",
    "perada.seeding": "perada.core.seeding",
    "perada.server_turn": "perada.federation.federation",
    "perada.settings": "perada.federation.settings",
    "perada.slot": "perada.models.adapted",
    "perada.stacked_layers": "perada.engine.stacked_layers",
    "perada.states": "perada.core.states",
    "perada.store": "perada.federation.store",
    "perada.strategies": "perada.lightning.strategies",
    "perada.studies": "perada.experiments.studies",
    "perada.twins": "perada.models.twins",
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
