# SPDX-License-Identifier: Apache-2.0
"""Named algorithms as options of ``perada fit``."""

import json
import re
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from jsonargparse import Namespace

from perada.algorithms import ALGORITHMS, VARIANTS
from perada.algorithms.specs import algorithm_spec, class_path_of, option_words
from perada.core.checks import check_known
from perada.server import SERVER_RULES

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
    """A named algorithm with its options of ``perada fit``.

    Attributes:
        base: Its name for :func:`perada.algorithms.make_algorithm`, which has its class and its arguments; or the path
            of a user's class.
        options: Further words that belong to it.
        paper: Words with which it trains what its paper trains.
        adapter: The adapter that it is about; empty for the recipe's adapter.
        adapter_options: Options of this adapter that belong to it.
    """

    base: str
    options: tuple[str, ...] = ()
    paper: tuple[str, ...] = FULL_MODEL
    adapter: str = ""
    adapter_options: dict[str, bool] = field(default_factory=dict)

    def words(self, cli: Any, paper: bool = False) -> list[str]:  # noqa: ANN401 - a LightningCLI
        """Return the options of ``perada fit`` for this algorithm.

        If the recipe's algorithm has the same class, the arguments in the recipe are kept. Otherwise they are reset, so
        that no other algorithm's argument of the same name remains.

        Args:
            cli: The recipe's CLI.
            paper: Whether to add the options that train what the paper trains.
        """
        spec = algorithm_spec(self.base)
        words = []
        if spec["class_path"] != class_path_of(type(cli.loop.algorithm)):
            words.append(f"--{ALGORITHM}=null")
        words += option_words(ALGORITHM, spec)
        words += self.options
        if paper:
            words += self.paper
        return words

    def adapter_words(self, cli: Any) -> list[str]:  # noqa: ANN401 - a LightningCLI
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
        spec = algorithm_spec(self.base)
        class_path = spec["class_path"]
        if self.base not in ALGORITHMS:
            # The parser replaces the path of a user's class by that of the module that defines it.
            module, _, name = self.base.rpartition(".")
            class_path = class_path_of(getattr(import_module(module), name))
        other = ""
        if algorithm.class_path != class_path:
            other = algorithm.class_path
        else:
            for name, value in spec["init_args"].items():
                if algorithm.init_args.get(name) != value:
                    other = f"{name}={algorithm.init_args.get(name)}"
                    break
        if other:
            raise ValueError(
                f"--algorithms {self.base}: an option or a --config for all runs changes it to {other}, so its row "
                "would show a different algorithm; leave that option out, or leave --algorithms out (each recipe then "
                "keeps its algorithm)"
            )


def _make_entries() -> dict[str, Entry]:
    """Return the entries of all named algorithms, by name."""
    entries = {name: Entry(name) for name in ALGORITHMS}
    for name, variant in VARIANTS.items():
        words = []
        for argument, algorithm in variant.options.items():
            words.append(f"--{ALGORITHM}.{argument}={class_path_of(ALGORITHMS[algorithm])}")
        if variant.server_rule is not None:
            words.append(f"--{SERVER_RULE}={class_path_of(SERVER_RULES[variant.server_rule])}")
        entries[name] = Entry(variant.base, tuple(words))

    # PerAda is about adapters: the recipe's.
    for name in ("perada", "perada_no_kd", "fed_ensemble_perada"):
        entries[name] = replace(entries[name], paper=())
    # The adapter stays private, so the backbone is trained beside it and shared.
    for name in ("fedalt_adapter", "fedsim_adapter"):
        entries[name] = replace(entries[name], options=(f"--{TRAIN_BACKBONE}=true",), paper=())
    # About LoRA's factors.
    for name in (
        "ffa_lora",
        "fedsa_lora",
        "rolora",
        "het_lora",
        "fedex_lora",
        "flora",
        "flexlora",
        "lora_fair",
    ):
        entries[name] = replace(entries[name], paper=(), adapter="lora")
    # About the two branches of dual LoRA.
    for name in ("feddpa", "feddpa_f", "fedalt_row"):
        entries[name] = replace(entries[name], paper=(), adapter="dual_lora")
    entries["fedalt_row"] = replace(entries["fedalt_row"], adapter_options={"gate": True})
    return entries


ENTRIES = _make_entries()


def entry_of(name: str) -> Entry:
    """Return the entry of a named algorithm, or of a custom class by its path, which trains what the recipe specifies.

    Raises:
        ValueError: If the name is neither.
    """
    if name in ENTRIES:
        return ENTRIES[name]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return Entry(name, paper=())
    check_known("--algorithms", name, ENTRIES, ", or the path of a custom class, such as mine.MyAlgorithm")
    raise AssertionError("check_known raises for unknown names")
