# SPDX-License-Identifier: Apache-2.0
"""Options of recipes: classes by name, `--help`, and a JSON schema for editors."""

import inspect
import json
import shutil
import sys
import types
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader
from pytorch_lightning.cli import LightningArgumentParser

from perada.algorithms import ALGORITHMS, Algorithm
from perada.algorithms.registry import distinct_methods, methods
from perada.algorithms.specs import class_path_of, option_words
from perada.api import OPTION_CLASSES, SECTIONS, argument_texts
from perada.cli.help_format import HelpFormatter, default_text, option_names, option_text, plain_text
from perada.cli.options import TEXTS
from perada.cli.parser_errors import missing_module, subclasses
from perada.cli.recipes import recipe_files
from perada.core.checks import OptionError
from perada.data import ImageSet, Partition
from perada.server import SERVER_RULES, ServerRule

T = TypeVar("T")
BY_NAME = ("federated.algorithm", "federated.algorithm.base", "federated.server_rule")
"""Options that take a class by the name of an algorithm or a server rule."""
ALWAYS_SET = ("training", "evaluation")
"""Sections that cannot be null, unlike the other sections that are dataclasses."""
MOST_USED: list[str] = TEXTS["first"].split()
"""Options that help shows first."""
TRAINER_TEXTS: dict[str, str] = TEXTS["lightning"]
"""Descriptions of options of Lightning's trainer."""
WITH_CHECKPOINT: dict[str, dict[str, str]] = TEXTS["with_checkpoint"]
"""Commands that score or predict with the models of a checkpoint, and descriptions that differ from those of fit."""


class RecipeParser(LightningArgumentParser):
    """Parses recipes that name algorithms and server rules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # jsonargparse builds another parser of this class, without our arguments, for the help of a class.
        super().__init__(*args, formatter_class=HelpFormatter, **kwargs)

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse the text of a recipe."""
        try:
            recipe = get_loader("yaml")(content)
        except yaml.YAMLError:  # the parser reports it
            recipe = None
        if isinstance(recipe, dict):
            resolved = resolve_names(recipe)
            if resolved != recipe:
                content = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed


def spelt_out(args: Sequence[str]) -> list[str]:
    """Expand a command line: recipes to files, and algorithms and server rules to classes.

    >>> spelt_out(["--trainer.max_epochs", "3", "--federated.algorithm", "perada"])
    ['--trainer.max_epochs', '3', '--federated.algorithm=perada.algorithms.perada.PerAda']
    """
    expanded: list[str] = []
    words = iter(args)
    for word in words:
        option, equals, value = word.partition("=")
        if word == "-c":
            option = "--config"
        if not option.startswith("--"):
            expanded.append(word)
            continue
        name = option[2:]
        if not equals and name in ("config", *BY_NAME):  # the value is the next word
            value = next(words, "")
        if name == "config" and value:
            expanded += [f"--config={path}" for path in recipe_files(value)]
        elif name in BY_NAME and value:
            resolved = by_name(value, name)
            expanded += option_words(name, resolved) if isinstance(resolved, dict) else [f"--{name}={value}"]
        else:
            expanded.append(f"--{name}{equals}{value}")
    return expanded


def typed_names(args: Sequence[str]) -> dict[str, str]:
    """Return each option of a command line as it was typed, by its name."""
    options = [word.partition("=")[0] for word in args]
    return {option[2:]: option for option in options if option.startswith("--")}


def resolve_names(content: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe in which classes replace the names of algorithms and server rules.

    >>> resolve_names({"federated": {"server_rule": "median"}})
    {'federated': {'server_rule': {'class_path': 'Median'}}}

    Raises:
        ValueError: If an option of a section of its own is among those of the loop.
    """
    out = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    for name in ALWAYS_SET:
        if name in out and out[name] is None:
            # Null resets what recipes below have set, as in other sections.
            out[name] = asdict(OPTION_CLASSES[name]())
    federated = out.get("federated")
    if isinstance(federated, dict):
        _check_linked(federated)
        for role in ("algorithm", "server_rule"):
            if role in federated:
                federated[role] = by_name(federated[role], f"federated.{role}")
    return out


def _check_linked(federated: dict[str, Any]) -> None:
    """Reject arguments of the loop that are separate sections; the parser would ignore them."""
    for name in OPTION_CLASSES:
        if name in federated:
            raise ValueError(f"there is no option 'federated.{name}'; did you mean {name}?")


def by_name(value: object, option: str) -> object:
    """Return the class of the algorithm or server rule that a value names; return any other value unchanged.

    Args:
        value: Value of the option: a name, or a dictionary with ``class_path`` and ``init_args``.
        option: Full name of the option.

    Raises:
        ValueError: If the value names the method of a recipe, and not an algorithm.
    """
    entry = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(entry, dict):
        return value
    name = entry.get("class_path")
    init_args = entry.get("init_args") or {}
    if isinstance(init_args, dict) and isinstance(init_args.get("base"), str | dict):
        # The option `base` is the algorithm that this one wraps.
        init_args = init_args | {"base": by_name(init_args["base"], option)}
    if option == "federated.server_rule":
        if name in SERVER_RULES:
            return entry | {"class_path": SERVER_RULES[name].__name__}
    elif name in ALGORITHMS:
        return entry | {"class_path": class_path_of(ALGORITHMS[name]), "init_args": init_args}
    elif name in methods():
        raise OptionError(
            f"{option}: there is no algorithm {name!r}; the method of that name is a recipe, --config method/{name}: "
            f"{methods()[name]}",
            name=option,
            value=name,
        )
    if isinstance(value, dict) and init_args:
        return entry | {"init_args": init_args}
    return value


def with_own_classes(parse: Callable[[], T]) -> T:
    """Parse something that may name classes in modules of the current folder.

    Only a module in which a class was not found is imported from there: libraries try to import optional dependencies,
    and a file of the same name must not be run.
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
        except Exception as error:  # whatever the user's module raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{kind!r} cannot be imported from {package!r} in this folder: {reason}; fix it"
            ) from error
        finally:
            sys.path.remove(here)


_CLASSES: dict[type, tuple[list[str], list[str]]] = {
    Algorithm: ([*ALGORITHMS], ["federated.algorithm"]),
    ServerRule: ([*SERVER_RULES], ["federated.server_rule"]),
    ImageSet: ([], ["data.dataset", "data.public"]),
    Partition: ([], ["data.partition"]),
}
"""Base classes that options take: short names of some subclasses, and the options."""


def option_class_names() -> dict[str, list[str]]:
    """Return the names of perada's classes that each option takes."""
    names_by_option = {"algorithms": ["all", *distinct_methods()]}  # of `perada compare`
    for base, (short_names, options) in _CLASSES.items():
        for option in options:
            names_by_option[option] = short_names or _exported_classes(base)
    return names_by_option


END = """\
Recipes use the same names, with a section for each part before a dot. NAME.CHILD sets an argument of a class:
--data.partition.alpha=0.1, --privacy.target_epsilon=3.
  --help WORD                 the options with this word in their names, such as --help lr
  --help all                  every option, including those of Lightning's trainer that are rarely needed
  --data.partition.help NAME  the arguments of a class; every option that takes a class has such a help"""


def explained(parser: ArgumentParser, topic: str) -> str:
    """Return the help of a parser.

    Args:
        parser: Parser of a command.
        topic: ``all``, a word in the names of options, or "" for the options that most users need.
    """
    command = parser.prog.split()[-1]
    actions = {action.dest: action for action in parser._actions if _is_option(action)}
    if topic:
        matching = list(actions.values())
        if topic != "all":
            matching = [action for action in matching if topic in " ".join(option_names(action))]
        if not matching:
            raise ValueError(f"--help {topic}: no option has this in its name; --help all shows every option")
        return _format_options(matching, command)
    usage = f"usage: perada {command} --config RECIPE [--OPTION VALUE ...]"
    names = MOST_USED
    if command in WITH_CHECKPOINT:
        usage = f"usage: perada {command} --config RECIPE --ckpt_path FILE [--OPTION VALUE ...]"
        # The two options that these commands need come first.
        required = ["config", "ckpt_path"]
        names = [*required, *(name for name in MOST_USED if name not in required)]
    most_used = [actions.pop(name) for name in names if name in actions]
    blocks = [usage, "-h, --help [WORD | all]", f"Most used:\n{_format_options(most_used, command)}"]
    for section in (*SECTIONS, *ALWAYS_SET, "trainer"):
        in_section = [action for name, action in actions.items() if name.startswith(f"{section}.")]
        if section == "trainer":
            in_section = [action for action in in_section if action.dest in TRAINER_TEXTS]
        blocks.append(f"{section.capitalize()}:\n{_format_options(in_section, command)}")
    return "\n\n".join([*blocks, END])


def _is_option(action: Action) -> bool:
    """Return whether an action is an option for users, and not a link, the help of a class, or for Python only."""
    is_visible = action.help != SUPPRESS and "".join(action.option_strings[:1]).startswith("-")
    return is_visible and not action.dest.endswith(".help") and action.dest != "data.data"


def _format_options(actions: Iterable[Action], command: str) -> str:
    """Format options of a command with their names, descriptions, values and defaults."""
    texts = TRAINER_TEXTS | WITH_CHECKPOINT.get(command, {})
    lines: list[str] = []
    width = min(shutil.get_terminal_size().columns, 120) - 2
    for action in actions:
        choices = action.metavar if isinstance(action.metavar, str) and action.metavar.startswith("{") else ""
        lines.append(f"  {', '.join(option_names(action))} {choices}".rstrip())
        text = texts.get(action.dest) or option_text(action)
        for base, (short_names, options) in _CLASSES.items():
            if action.dest in options:
                text += f" One of {', '.join(short_names or _exported_classes(base))}, or a custom class."
        default = default_text(action)
        if default:
            text += f" (default: {default})"
        lines += wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _exported_classes(parent: type) -> list[str]:
    """Return the names of perada's subclasses of a class that their packages export."""
    names = set()
    for subclass in subclasses(parent):
        package = ".".join(subclass.__module__.split(".")[:2])
        exported = getattr(sys.modules.get(package), "__all__", ())
        if package.startswith("perada.") and subclass.__name__ in exported:
            names.add(subclass.__name__)
    return sorted(names)


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
    """Return a JSON schema (draft 2020-12) of recipes; values of types of Lightning or torch may be anything."""
    top: Schema = {"seed_everything": {"type": ["integer", "boolean"]}}
    for name, section_class in {"trainer": pl.Trainer, **SECTIONS}.items():
        top[name] = _argument_schema(section_class, f"{name}.")
    for name, options_class in OPTION_CLASSES.items():
        # The section stands beside that of the loop, which takes it.
        del top["federated"]["properties"][name]
        top[name] = _argument_schema(options_class) if name in ALWAYS_SET else _type_schema(options_class | None)
    top["ckpt_path"] = {"type": ["string", "null"]}
    top["weights_only"] = {"type": ["boolean", "null"]}
    top["compare"] = {
        "type": "object",
        "description": "The runs of `perada compare`; all other options apply to every run.",
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": "perada recipe", **_object_schema(top)}


def _object_schema(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _argument_schema(options_class: type, prefix: str = "") -> Schema:
    """Return the schema of the arguments of a class, with their descriptions."""
    hints = get_type_hints(options_class.__init__)  # type: ignore[misc]  # read, not called
    texts = argument_texts(options_class)
    properties: Schema = {}
    for name, argument in inspect.signature(options_class).parameters.items():
        properties[name] = _type_schema(hints.get(name, Any))
        text = TRAINER_TEXTS.get(prefix + name) or plain_text(texts.get(name, ""))
        if text:
            properties[name]["description"] = text
        # perada's defaults of the trainer differ from Lightning's.
        if prefix != "trainer." and isinstance(argument.default, bool | int | float | str | None):
            properties[name]["default"] = argument.default
    return _object_schema(properties)


def _type_schema(hint: Any) -> Schema:  # noqa: ANN401  # a type
    """Return the schema of a type; any value for a type that is unknown here."""
    if hint in _BASIC:
        return dict(_BASIC[hint])
    if get_origin(hint) is Literal:
        return {"enum": [*get_args(hint)]}
    if get_origin(hint) in (Union, types.UnionType):
        values = [_type_schema(member) for member in get_args(hint)]
        return {} if {} in values else {"anyOf": values}
    if get_origin(hint) is list and get_args(hint):
        return {"type": "array", "items": _type_schema(get_args(hint)[0])}
    if isinstance(hint, type) and is_dataclass(hint):
        return _argument_schema(hint)
    if hint in _CLASSES:
        short_names, _ = _CLASSES[hint]
        # The value is a short name, or the path of a class.
        name = {"anyOf": [{"enum": [*short_names, *_exported_classes(hint)]}, {"type": "string", "pattern": r"\."}]}
        return {"anyOf": [name, _object_schema({"class_path": name, "init_args": {"type": "object"}})]}
    return {}
