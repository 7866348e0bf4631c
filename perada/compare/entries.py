# SPDX-License-Identifier: Apache-2.0
"""The rows that `perada compare` can make: every named algorithm, as options of ``perada fit``."""

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perada.algorithms import ALGORITHMS as NAMED
from perada.algorithms import Algorithm

FULL = ("--model.adapter=full", "--model.adapter_options=null")
"""Train the whole model."""


@dataclass(frozen=True)
class Entry:
    """An algorithm with its options of ``perada fit``."""

    base: str  # its name for make_algorithm, which says its class and its arguments
    options: tuple[str, ...] = ()  # further ones that belong to it
    paper: tuple[str, ...] = FULL  # with which it trains what its paper trains

    def words(self, given: type[Algorithm], paper: bool = False) -> list[str]:
        """Options of ``perada fit`` for this algorithm, with ``paper`` those that train what the paper trains.

        An algorithm of the class ``given``, the recipe's own, keeps the arguments that the recipe gives it; any other
        has its own defaults, and not another algorithm's arguments of the same name.
        """
        kind, arguments = class_of(self.base)
        reset = [] if kind is given else ["--federated.algorithm=null"]
        own = {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}
        return [*reset, *words_of("federated.algorithm", own), *self.options, *(self.paper if paper else ())]

    def check(self, made: Any) -> None:  # noqa: ANN401  # a namespace of jsonargparse
        """Refuse to call by this name an algorithm that is another one by its ``class_path`` or ``init_args``.

        Raises:
            ValueError: If so.
        """
        kind, arguments = class_of(self.base)
        other = made.class_path if made.class_path != f"{kind.__module__}.{kind.__qualname__}" else ""
        changed = other or next(
            (f"{name}={made.init_args[name]}" for name in arguments if made.init_args[name] != arguments[name]), ""
        )
        if changed:
            raise ValueError(
                f"--algorithms {self.base}: an option or a --config for all runs makes it {changed}, so that its row "
                "would show another algorithm; leave that out, or --algorithms (then a recipe has its own algorithm)"
            )


def words_of(option: str, made: dict[str, Any]) -> list[str]:
    """Options of ``perada fit`` for a class with its arguments.

    >>> words_of("data.partition", {"class_path": "Shards", "init_args": {"num_clients": 3}})
    ['--data.partition=Shards', '--data.partition.num_clients=3']
    """
    own = [
        f"--{option}.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in made.get("init_args", {}).items()
    ]
    return [f"--{option}={made['class_path']}", *own]


def class_of(name: str) -> tuple[type[Algorithm], dict[str, Any]]:
    """Class of a named algorithm, and the arguments that tell it from other names of that class."""
    kind, own = _bound(NAMED[name])
    defaults = inspect.signature(kind).parameters
    told = [argument for make in NAMED.values() if _bound(make)[0] is kind for argument in _bound(make)[1]]
    return kind, {argument: own.get(argument, defaults[argument].default) for argument in told}


def _bound(make: Callable[..., Algorithm]) -> tuple[type[Algorithm], dict[str, Any]]:
    """Class and arguments of an entry of :data:`perada.algorithms.ALGORITHMS`."""
    given = partial(make)  # of a partial it is the same one
    assert isinstance(given.func, type)
    return given.func, inspect.signature(given.func).bind_partial(*given.args, **given.keywords).arguments


_BACKBONE = ("--model.train_backbone=true",)
_SPECIAL = {
    # PerAda is about adapters: the recipe's.
    "perada": Entry("perada", paper=()),
    "perada_no_kd": Entry("perada_no_kd", paper=()),
    # Where the adapter is what stays private, the backbone is trained and shared beside it.
    "fedalt_adapter": Entry("fedalt_adapter", _BACKBONE, paper=()),
    "fedsim_adapter": Entry("fedsim_adapter", _BACKBONE, paper=()),
    # Algorithms that are another one with an option of its own.
    "fed_ensemble_perada": Entry("fed_ensemble", ("--federated.algorithm.base=PerAda",), paper=()),
    "modified_local_gd": Entry("fedavg", ("--federated.server_rule=perada.server.rules.ModifiedLocalGD",)),
}
ENTRIES = {name: Entry(name) for name in NAMED} | _SPECIAL


def names(asked: Iterable[str]) -> list[str]:
    """The entries asked for, each once; ``all`` stands for every one."""
    asked = list(asked)
    return list(dict.fromkeys(ENTRIES if "all" in asked else asked))
