# SPDX-License-Identifier: Apache-2.0
"""Methods of papers as options of ``perada fit``: the rows of a comparison."""

import json
import re
from dataclasses import dataclass, field
from pydoc import locate
from typing import Any

from jsonargparse import Namespace

from perada.algorithms import ALGORITHMS
from perada.algorithms.registry import Method, distinct_methods, methods
from perada.algorithms.specs import class_path_of, option_words
from perada.core.checks import check_known
from perada.server import SERVER_RULES
from perada.studies.compare.configured import ConfiguredRun

# Options of `perada fit`.
ALGORITHM = "federated.algorithm"
SERVER_RULE = "federated.server_rule"
ADAPTER = "model.adapter"
ADAPTER_OPTIONS = "model.adapter_options"
TRAIN_BACKBONE = "model.train_backbone"

FULL_MODEL = (f"--{ADAPTER}=full", f"--{ADAPTER_OPTIONS}=null")
"""Words that train the full model."""
LORA_ADAPTERS = ("lora", "dual_lora")
LORA_OPTIONS = {"r", "lora_alpha", "target_modules", "exclude_modules", "last_blocks"}
"""Options that have the same meaning in all :data:`LORA_ADAPTERS`."""
COMMON_OPTIONS = {"last_blocks"}
"""Options that have the same meaning in all adapters."""


@dataclass(frozen=True)
class Entry:
    """A method with its options of ``perada fit``, or a user's algorithm.

    Attributes:
        name: Name of the method, or the path of the user's class.
        class_path: Path of the algorithm's class.
        init_args: Arguments of the class that tell the method from others; an algorithm among them by its class's path.
        options: Further words that belong to it.
        paper: Words with which it trains what its paper trains.
        adapter: The adapter that it is about; empty for the recipe's adapter.
        adapter_options: Options of this adapter that belong to it.
    """

    name: str
    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    paper: tuple[str, ...] = ()
    adapter: str = ""
    adapter_options: dict[str, Any] = field(default_factory=dict)

    def words(self, cli: ConfiguredRun, paper: bool = False) -> list[str]:
        """Return the options of ``perada fit`` for this algorithm.

        If the recipe's algorithm has the same class, the arguments in the recipe are kept. Otherwise they are reset, so
        that no other algorithm's argument of the same name remains.

        Args:
            cli: The recipe's CLI.
            paper: Whether to add the options that train what the paper trains.
        """
        words = []
        if self.class_path != class_path_of(type(cli.loop.algorithm)):
            words.append(f"--{ALGORITHM}=null")
        words += option_words(ALGORITHM, {"class_path": self.class_path, "init_args": self.init_args})
        words += self.options
        if paper:
            words += self.paper
        return words

    def adapter_words(self, cli: ConfiguredRun) -> list[str]:
        """Return the options of ``perada fit`` for the adapter that the algorithm requires, if there is one.

        They have to follow all other words: what is given for every run is given for every algorithm.

        Args:
            cli: A CLI of the recipe with the words for every run. Its options of the adapter are kept, or those that
                this adapter has too.
        """
        if not self.adapter:
            return []
        model = cli.config.model
        options = dict(model.adapter_options or {})
        if model.adapter != self.adapter:
            shared_options = LORA_OPTIONS if model.adapter in LORA_ADAPTERS else COMMON_OPTIONS
            options = {name: value for name, value in options.items() if name in shared_options}
        options |= self.adapter_options
        options_text = json.dumps(options) if options else "null"
        return [f"--{ADAPTER}={self.adapter}", f"--{ADAPTER_OPTIONS}={options_text}"]

    def check(self, algorithm: Namespace) -> None:
        """Raise if a parsed algorithm differs from the one of this name.

        Args:
            algorithm: ``class_path`` and ``init_args`` of the parsed algorithm.

        Raises:
            ValueError: If its class, or an argument that belongs to this name, is another.
        """
        other = ""
        if not _name_the_same_class(algorithm.class_path, self.class_path):
            other = algorithm.class_path
        else:
            for argument, expected in self.init_args.items():
                value = algorithm.init_args.get(argument)
                if isinstance(value, Namespace):  # an algorithm
                    value = value.class_path
                    is_same = _name_the_same_class(value, expected)
                else:
                    is_same = value == expected
                if not is_same:
                    other = f"{argument}={value}"
                    break
        if other:
            raise ValueError(
                f"--algorithms {self.name}: an option or a --config for all runs changes it to {other}, so its row "
                "would show a different algorithm; leave that option out, or leave --algorithms out (each recipe then "
                "keeps its algorithm)"
            )


def _name_the_same_class(path: str, other_path: str) -> bool:
    """Return whether two paths name one class: the parser may name it by another module that imports it."""
    return locate(path) is locate(other_path)


def _make_entry(method: Method) -> Entry:
    """Return a method's options of ``perada fit``."""
    init_args = {}
    for argument, value in method.options.items():
        is_algorithm = isinstance(value, str) and value in ALGORITHMS
        init_args[argument] = class_path_of(ALGORITHMS[value]) if is_algorithm else value
    options = []
    if method.server_rule is not None:
        options.append(f"--{SERVER_RULE}={class_path_of(SERVER_RULES[method.server_rule])}")
    if method.model.get("train_backbone"):
        options.append(f"--{TRAIN_BACKBONE}=true")
    adapter = method.model.get("adapter")
    adapter_options = {}
    if adapter in LORA_ADAPTERS:
        # Options that all adapters of LoRA have are the recipe's or those for all runs.
        for option, value in (method.model.get("adapter_options") or {}).items():
            if option not in LORA_OPTIONS:
                adapter_options[option] = value
    return Entry(
        name=method.name,
        class_path=class_path_of(ALGORITHMS[method.algorithm]),
        init_args=init_args,
        options=tuple(options),
        paper=FULL_MODEL if adapter == "full" else (),
        adapter=adapter if adapter in LORA_ADAPTERS else "",
        adapter_options=adapter_options,
    )


ENTRIES = {name: _make_entry(method) for name, method in distinct_methods().items()}
"""The methods of papers, by the names of their recipes."""


def entry_of(name: str) -> Entry:
    """Return the entry of a method, or of a custom class by its path, which trains what the recipe specifies.

    Raises:
        ValueError: If the name is neither.
    """
    if name in ENTRIES:
        return ENTRIES[name]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return Entry(name, class_path=name)
    if name in methods():
        raise ValueError(
            f"--algorithms {name}: this method changes only how another one is trained; compare it as a recipe, such "
            f"as quickstart/{name}"
        )
    if "," in name:
        raise ValueError(
            f"--algorithms={name!r} is not one name; separate names by spaces: --algorithms {name.replace(',', ' ')}"
        )
    check_known("--algorithms", name, ENTRIES, ", or the path of a custom class, such as mine.MyAlgorithm")
    raise AssertionError("check_known raises for unknown names")
