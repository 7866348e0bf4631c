# SPDX-License-Identifier: Apache-2.0
"""What is said of options: `--help`, and a JSON schema of recipes, by which editors complete and check them."""

import inspect
import json
import shutil
import types
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterable
from textwrap import wrap
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytorch_lightning as pl
from jsonargparse import ArgumentParser as JSONArgumentParser

from perada.algorithms import ALGORITHMS, Algorithm
from perada.api import FULL_NAMES, argument_texts
from perada.cli.messages import subclasses
from perada.data import FederatedDataModule, ImageSet, Partition
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SERVER_RULES, Distillation, ServerRule

FIRST = (
    "config trainer.max_epochs model.backbone model.pretrained model.adapter data.dataset data.partition data.public "
    "data.image_size data.batch_size federated.algorithm federated.clients_per_round federated.local_epochs "
    "federated.local_steps model.lr_personal model.lr_local federated.distillation privacy client_privacy "
    "trainer.check_val_every_n_epoch trainer.accelerator trainer.devices trainer.precision trainer.default_root_dir "
    "seed_everything ckpt_path print_config"
).split()
"""The options that are shown first."""
LIGHTNING = {
    "trainer.max_epochs": "Communication rounds.",
    "trainer.check_val_every_n_epoch": "Rounds between two evaluations.",
    "trainer.accelerator": "auto, cpu, cuda or mps.",
    "trainer.devices": "Devices, which share the clients of a round.",
    "trainer.num_nodes": "Machines.",
    "trainer.precision": "32-true, bf16-mixed or 16-mixed.",
    "trainer.default_root_dir": "Folder in which lightning_logs is made; by default the current one.",
    "trainer.logger": "false for no run folder; or loggers by class, such as TensorBoardLogger.",
    "trainer.callbacks": "Callbacks by class, of Lightning or your own.",
    "trainer.enable_progress_bar": "Bars in a terminal, elsewhere a line for each round; or neither.",
    "trainer.enable_checkpointing": "Save the newest round.",
    "trainer.fast_dev_run": "Try a recipe: one local step, and nothing is written.",
    "trainer.deterministic": "Refuse operations that are not deterministic on a GPU.",
    "trainer.profiler": "simple, advanced or pytorch.",
    "config": "Recipe: its name (`perada ls`) or a file; several are laid over one another, the last on top.",
    "print_config": "Print the whole configuration, and run nothing.",
    "seed_everything": "Seed of all that is random in training.",
    "ckpt_path": "Checkpoint to resume from, or last for the newest.",
}
"""What Lightning's options are for here; its others are shown by ``--help=all`` alone."""
_CLASSES: dict[type, tuple[list[str], list[str]]] = {
    Algorithm: ([*ALGORITHMS], ["federated.algorithm"]),
    ServerRule: ([*SERVER_RULES], ["federated.server_rule"]),
    ImageSet: ([], ["data.dataset", "data.public"]),
    Partition: ([], ["data.partition"]),
}
"""Bases of classes that options take: names that stand for some, and the options."""
END = """\
Both names of an option can be used, on the command line and in recipes. NAME.CHILD sets an argument of a class:
--data.partition.alpha=0.1, --privacy.target_epsilon=3.
  --help WORD                the options with that word in their names, such as --help lr
  --help all                 every option, also those of Lightning's trainer that are seldom needed
  --data.partition.help NAME the arguments of a class, likewise for all options that take one"""


def explained(parser: ArgumentParser, asked: str) -> str:
    """The help of a parser: ``all``, what has a word in its name, or, where nothing is asked for, what most need.

    Raises:
        ValueError: If no option has that word in its name.
    """
    if asked == "all":
        return parser.format_help()
    known = {action.dest: action for action in parser._actions if _is_option(action)}
    if asked:
        found = [action for action in known.values() if asked in " ".join(_names(action))]
        if not found:
            raise ValueError(f"--help {asked}: no option has that in its name; --help all shows every option")
        return _listed(found)
    command = parser.prog.split()[-1]
    blocks = [f"usage: perada {command} --config RECIPE [--OPTION VALUE ...]", "-h, --help [WORD | all]"]
    blocks.append(f"Most used:\n{_listed(known.pop(name) for name in FIRST if name in known)}")
    for title in ("model", "data", "federated", "trainer"):
        own = [action for name, action in known.items() if name.startswith(f"{title}.")]
        own = [action for action in own if title != "trainer" or action.dest in LIGHTNING]
        blocks.append(f"{title.capitalize()}:\n{_listed(own)}")
    return "\n\n".join([*blocks, END])


def _is_option(action: Action) -> bool:
    """Whether it sets something; links between options and the help of classes do not, and data.data is for Python."""
    sets = action.help != SUPPRESS and "".join(action.option_strings[:1]).startswith("-")
    return sets and not action.dest.endswith(".help") and action.dest != "data.data"


def _names(action: Action) -> list[str]:
    """The names of an option, the short one first."""
    short = [f"--{name}" for name, full in FULL_NAMES.items() if full == action.dest]
    return list(dict.fromkeys([*short, *(name for name in action.option_strings if not name.endswith("+"))]))


def _listed(actions: Iterable[Action]) -> str:
    """Each option with its names, what it is, its values and its default."""
    out: list[str] = []
    width = min(shutil.get_terminal_size().columns, 120) - 2
    for action in actions:
        choice = action.metavar if isinstance(action.metavar, str) and action.metavar.startswith("{") else ""
        out.append(f"  {', '.join(_names(action))} {choice}".rstrip())
        said = LIGHTNING.get(action.dest) or " ".join((action.help or "").replace("``", "").split())
        for base, (names, options) in _CLASSES.items():
            if action.dest in options:
                said += f" One of {', '.join(names or _known(base))}, or a class of your own."
        if action.default not in (None, SUPPRESS, ""):
            said += f" (default: {action.default})"
        out += wrap(said, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(out)


def _known(base: type) -> list[str]:
    """Our classes of a kind."""
    return sorted({kind.__name__ for kind in subclasses(base) if kind.__module__.startswith("perada.")})


Schema = dict[str, Any]
_BASIC: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
}
_SECTIONS: dict[str, Callable[..., Any]] = {
    "trainer": pl.Trainer,
    "model": FederatedClassifier,
    "data": FederatedDataModule,
    "federated": FederatedLoop,
}
_OPTIONS = (Distillation, Privacy, ClientPrivacy)


def schema(parser: JSONArgumentParser, words: list[str]) -> None:
    """Print the schema."""
    parser.parse_args(words)
    print(json.dumps(recipe_schema(), indent=1))


def recipe_schema() -> Schema:
    """A JSON schema (draft 2020-12) of recipes; a value of a type of Lightning's or torch's may be anything."""
    sections = {name: _arguments(kind, f"{name}.") for name, kind in _SECTIONS.items()}
    top: Schema = {"seed_everything": {"type": ["integer", "boolean"]}, **sections}
    top |= {"privacy": _either([Privacy, types.NoneType]), "client_privacy": _either([ClientPrivacy, types.NoneType])}
    top |= {"ckpt_path": {"type": ["string", "null"]}, "weights_only": {"type": ["boolean", "null"]}}
    for name, full in FULL_NAMES.items():
        found: Schema = {"properties": top}
        for part in full.split("."):
            found = found.get("properties", {}).get(part, {})
        top[name] = found
    top["compare"] = {"type": "object", "description": "What `perada compare` runs; the rest is for every run."}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": "perada recipe", **_object(top)}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _arguments(kind: Callable[..., Any], prefix: str = "") -> Schema:
    """The arguments of a class, with what it says of them."""
    made = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]  # signatures are read, not called
    hints, said = get_type_hints(made), argument_texts(kind)
    out: Schema = {}
    for name in inspect.signature(kind).parameters:
        text = LIGHTNING.get(prefix + name) or said.get(name, "").replace("``", "")
        out[name] = _value(hints.get(name, Any)) | ({"description": text} if text else {})
    return _object(out)


def _value(hint: Any) -> Schema:  # noqa: ANN401  # a type
    """The values of a type; anything for one that is none of ours."""
    if hint in _BASIC:
        return dict(_BASIC[hint])
    if get_origin(hint) is Literal:
        return {"enum": [*get_args(hint)]}
    if get_origin(hint) in (Union, types.UnionType):
        return _either(get_args(hint))
    if get_origin(hint) is list and get_args(hint):
        return {"type": "array", "items": _value(get_args(hint)[0])}
    if hint in _OPTIONS:
        return _arguments(hint)
    if hint in _CLASSES:
        name = {"anyOf": [{"enum": [*_CLASSES[hint][0], *_known(hint)]}, {"type": "string", "pattern": r"\."}]}
        return {"anyOf": [name, _object({"class_path": name, "init_args": {"type": "object"}})]}
    return {}


def _either(hints: Any) -> Schema:  # noqa: ANN401  # types
    values = [_value(hint) for hint in hints]
    return {} if {} in values else {"anyOf": values}
