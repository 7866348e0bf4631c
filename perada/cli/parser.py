# SPDX-License-Identifier: Apache-2.0
"""Options of recipes: both names of each, classes by name and of one's own, `--help`, and a JSON schema for editors."""

import inspect
import json
import shutil
import sys
import types
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader
from pytorch_lightning.cli import LightningArgumentParser

from perada.algorithms import ALGORITHM_NAMES, ALGORITHMS, VARIANTS, Algorithm, with_server_rule
from perada.api import FULL_NAMES, SECTIONS, argument_texts, full_name
from perada.cli.options import TEXTS
from perada.cli.parser_errors import missing_module, subclasses
from perada.cli.recipes import recipe_files, recipe_names
from perada.core.yaml_files import read_yaml
from perada.data import ImageSet, Partition
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SERVER_RULES, ServerRule
from perada.studies.compare.plan import spec_of, words_of

T = TypeVar("T")
BY_NAME = ("federated.algorithm", "federated.algorithm.base", "federated.server_rule")
"""Options that take a class by the name of an algorithm or a server rule."""
FIRST: list[str] = TEXTS["first"].split()
LIGHTNING: dict[str, str] = TEXTS["lightning"]


class RecipeParser(LightningArgumentParser):
    """Reads recipes in which options have their short names, and algorithms and server rules theirs."""

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a recipe."""
        try:
            recipe = get_loader("yaml")(content)
        except yaml.YAMLError:  # the parser says it
            recipe = None
        if isinstance(recipe, dict) and (full := full_names(recipe)) != recipe:
            content = yaml.safe_dump(full, sort_keys=False, allow_unicode=True)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed


def spelt_out(args: Sequence[str]) -> list[str]:
    """Options by their full names, with the files of recipes and the classes of algorithms and server rules.

    >>> spelt_out(["--rounds", "3", "--algorithm", "perada_no_kd"])[:3]
    ['--trainer.max_epochs', '3', '--federated.algorithm=perada.algorithms.perada.PerAda']
    """
    out: list[str] = []
    words = iter(args)
    chosen_rule = _value_of("federated.server_rule", args)
    for word in words:
        option, equals, value = ("--config", "", "") if word == "-c" else word.partition("=")
        name = full_name(option[2:])
        if not option.startswith("--"):
            out.append(word)
            continue
        if not equals and name in ("config", *BY_NAME):  # given as two words
            value = next(words, "")
        if name == "config" and value:
            out += [f"--config={path}" for path in recipe_files(value)]
        elif name in BY_NAME and value:
            if name == "federated.algorithm":
                base, rule = with_server_rule(value, chosen_rule)
                value = str(base)
                if rule is not None and chosen_rule is None:
                    out.append(f"--federated.server_rule={SERVER_RULES[rule].__name__}")
            named = by_name(value, name)
            out += words_of(name, named) if isinstance(named, dict) else [f"--{name}={value}"]
        else:
            out.append(f"--{name}{equals}{value}")
    return out


def _value_of(name: str, args: Sequence[str]) -> str | None:
    """What words of the command line give for an option, by either of its names; None if nothing."""
    for place, word in enumerate(args):
        option, equals, value = word.partition("=")
        if option.startswith("--") and full_name(option[2:]) == name:
            return value if equals else "".join(args[place + 1 : place + 2])
    return None


def typed_names(args: Sequence[str]) -> dict[str, str]:
    """By full name: what an option is called on the command line, or else in a recipe that it names."""
    names: dict[str, str] = {}
    for recipe in recipe_names(args):
        for path in recipe_files(recipe):
            names |= {full_name(name): name for name in read_yaml(path) if full_name(name) != name}
    for word in args:
        option = word.partition("=")[0]
        if option.startswith("--"):
            names[full_name(option[2:])] = option
    return names


def full_names(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the full names of options, and the classes that the names of algorithms and server rules stand for.

    >>> full_names({"rounds": 3, "trainer": {"devices": 1}})
    {'trainer': {'devices': 1, 'max_epochs': 3}}
    """
    out = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    # An algorithm comes before its arguments.
    for name in sorted(FULL_NAMES.keys() & content.keys(), key=lambda name: FULL_NAMES[name].count(".")):
        *sections, last = FULL_NAMES[name].split(".")
        value, inner = out.pop(name), out
        for section in sections:
            below: Any = inner.get(section) or {}
            if isinstance(below, str) and section != "algorithm":
                raise ValueError(f"{name} cannot be given beside {section}: {below}, a file; put it into that file")
            inner[section] = {"class_path": below} if isinstance(below, str) else dict(below)
            inner = inner[section]
        if sections[-1:] == ["algorithm"]:
            inner["init_args"] = inner = dict(inner.get("init_args") or {})
        if last in inner:
            raise ValueError(f"{name} and {FULL_NAMES[name]} are the same option; give it once")
        inner[last] = value
    if isinstance(federated := out.get("federated"), dict):
        for name in ("privacy", "client_privacy"):
            own = federated.pop(name, None)
            if own is not None and out.get(name) is not None:
                raise ValueError(f"{name} and federated.{name} are the same section; give it once")
            out |= {} if own is None else {name: own}
        _set_rule_of_algorithm(federated)
        for role in ("algorithm", "server_rule"):
            if role in federated:
                federated[role] = by_name(federated[role], f"federated.{role}")
    return out


def _set_rule_of_algorithm(federated: dict[str, Any]) -> None:
    """Write out the server rule of an algorithm whose name stands for one too."""
    chosen = federated.get("algorithm")
    rule = federated.get("server_rule")
    name = chosen.get("class_path") if isinstance(chosen, dict) else chosen
    rule_name = rule.get("class_path") if isinstance(rule, dict) else rule
    if not isinstance(name, str):
        return
    base, own_rule = with_server_rule(name, rule_name)
    if base == name:
        return
    federated["algorithm"] = chosen | {"class_path": base} if isinstance(chosen, dict) else base
    if rule is None or rule == "mean":
        federated["server_rule"] = own_rule


def by_name(given: Any, option: str) -> Any:  # noqa: ANN401  # any YAML
    """An algorithm or a server rule by its class, where it is given by name; else what is given."""
    made = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(made, dict):
        return given
    name, own = made.get("class_path"), made.get("init_args") or {}
    if isinstance(own, dict) and isinstance(own.get("base"), str | dict):
        own = own | {"base": by_name(own["base"], option)}
    if option != "federated.server_rule" and name in VARIANTS:
        variant = VARIANTS[name]
        arguments = {argument: by_name(algorithm, option) for argument, algorithm in variant.options.items()}
        return by_name(made | {"class_path": variant.base, "init_args": arguments | own}, option)
    if option != "federated.server_rule" and name in ALGORITHMS:
        spec = spec_of(name)
        return made | spec | {"init_args": spec["init_args"] | own}
    if option == "federated.server_rule" and name in SERVER_RULES:
        return made | {"class_path": SERVER_RULES[name].__name__}
    return made | ({"init_args": own} if own else {}) if isinstance(given, dict) else given


def with_own_classes(parse: Callable[[], T]) -> T:
    """What is parsed, with the classes that it names in modules of the current folder.

    Only a module in which a class was looked for in vain is imported from there, and nothing else: libraries try to
    import what may or may not be installed, and a file of that name would be run.
    """
    here = str(Path.cwd())
    while True:
        try:
            return parse()
        except Exception as error:
            missing = missing_module(str(error))
            if missing is None:
                raise
            path, module_name = missing
            package = path.partition(".")[0]
            in_folder = PathFinder.find_spec(package, [here]) is not None
            if module_name != package or package in sys.modules or not in_folder:
                raise
        module, _, kind = path.rpartition(".")
        sys.path.append(here)
        try:
            invalidate_caches()
            import_module(module)
        except Exception as error:  # whatever the caller's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{kind!r} cannot be imported from {package!r} in this folder: {reason}; fix it"
            ) from error
        finally:
            sys.path.remove(here)


_CLASSES: dict[type, tuple[list[str], list[str]]] = {
    Algorithm: ([*ALGORITHM_NAMES], ["federated.algorithm"]),
    ServerRule: ([*SERVER_RULES], ["federated.server_rule"]),
    ImageSet: ([], ["data.dataset", "data.public"]),
    Partition: ([], ["data.partition"]),
}
"""Bases of classes that options take: names that stand for some, and the options."""


def class_names() -> dict[str, list[str]]:
    """By option: the names of classes of perada that it takes."""
    names = {option: names or _known(base) for base, (names, options) in _CLASSES.items() for option in options}
    return names | {"algorithms": ["all", *ALGORITHM_NAMES]}  # of `perada compare`, which takes classes too


END = """\
Both names of an option can be used, on the command line and in recipes. NAME.CHILD sets an argument of a class:
--data.partition.alpha=0.1, --privacy.target_epsilon=3.
  --help WORD                the options with that word in their names, such as --help lr
  --help all                 every option, also those of Lightning's trainer that are seldom needed
  --data.partition.help NAME the arguments of a class, likewise for all options that take one"""


def explained(parser: ArgumentParser, asked: str) -> str:
    """The help of a parser: ``all``, what has a word in its name, or, where nothing is asked for, what most need."""
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
    """Classes of perada's own that can be named: those that their package hands on."""
    return sorted(
        {
            kind.__name__
            for kind in subclasses(base)
            if (package := ".".join(kind.__module__.split(".")[:2])).startswith("perada.")
            and kind.__name__ in getattr(sys.modules.get(package), "__all__", ())
        }
    )


Schema = dict[str, Any]
_BASIC: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
}


def schema(parser: ArgumentParser, words: list[str]) -> None:
    """Print the schema."""
    parser.parse_args(words)
    print(json.dumps(recipe_schema(), indent=1))


def recipe_schema() -> Schema:
    """A JSON schema (draft 2020-12) of recipes; a value of a type of Lightning's or torch's may be anything."""
    sections = {name: _arguments(kind, f"{name}.") for name, kind in {"trainer": pl.Trainer, **SECTIONS}.items()}
    top: Schema = {"seed_everything": {"type": ["integer", "boolean"]}, **sections}
    top |= {"privacy": _value(Privacy | None), "client_privacy": _value(ClientPrivacy | None)}
    top |= {"ckpt_path": {"type": ["string", "null"]}, "weights_only": {"type": ["boolean", "null"]}}
    for name, full in FULL_NAMES.items():
        found: Schema = {"properties": top}
        for part in full.split("."):
            choices = [one for one in found.get("anyOf", ()) if "properties" in one]
            found = (choices[0] if choices else found).get("properties", {}).get(part, {})
        top[name] = found
    top["compare"] = {"type": "object", "description": "What `perada compare` runs; the rest is for every run."}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": "perada recipe", **_object(top)}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _arguments(kind: type, prefix: str = "") -> Schema:
    """The arguments of a class, with what it says of them."""
    hints, said = get_type_hints(kind.__init__), argument_texts(kind)  # type: ignore[misc]  # read, not called
    out: Schema = {}
    for name, argument in inspect.signature(kind).parameters.items():
        text = LIGHTNING.get(prefix + name) or said.get(name, "").replace("``", "")
        out[name] = _value(hints.get(name, Any)) | ({"description": text} if text else {})
        if prefix != "trainer." and isinstance(argument.default, bool | int | float | str | None):
            out[name]["default"] = argument.default  # those of the trainer are not Lightning's own
    return _object(out)


def _value(hint: Any) -> Schema:  # noqa: ANN401  # a type
    """The values of a type; anything for one that is none of ours."""
    if hint in _BASIC:
        return dict(_BASIC[hint])
    if get_origin(hint) is Literal:
        return {"enum": [*get_args(hint)]}
    if get_origin(hint) in (Union, types.UnionType):
        values = [_value(one) for one in get_args(hint)]
        return {} if {} in values else {"anyOf": values}
    if get_origin(hint) is list and get_args(hint):
        return {"type": "array", "items": _value(get_args(hint)[0])}
    if isinstance(hint, type) and is_dataclass(hint):
        return _arguments(hint)
    if hint in _CLASSES:
        name = {"anyOf": [{"enum": [*_CLASSES[hint][0], *_known(hint)]}, {"type": "string", "pattern": r"\."}]}
        return {"anyOf": [name, _object({"class_path": name, "init_args": {"type": "object"}})]}
    return {}
