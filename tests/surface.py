# SPDX-License-Identifier: Apache-2.0
"""What perada promises, read from the code: names, options, commands, files, messages.

``surface_page.py`` writes it into ``docs/api.md``, and ``test_surface.py`` compares it with ``surface.json``, that of
the last release. Nothing in it depends on the versions of other libraries.
"""

import inspect
import json
import re
import types
from argparse import Action
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import cached_property
from importlib import import_module
from inspect import get_annotations
from io import StringIO
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from jsonargparse import ArgumentParser

OPEN = (
    "Run Comparison FederatedData Algorithm Broadcast ClientStep ServerStep TensorNames ImageSet Partition Shift Phase "
    "RoundPlan"
)
OPEN = {*f"{OPEN} ServerRule Aggregation Updates Distiller Ledger Ledgers AddedLayer AddingModel".split()}
"""Classes that users call methods of, or derive theirs from: what they have is promised too; of others, how to make
them."""
PACKAGES = ("perada", *(f"perada.{name}" for name in "data tasks engine algorithms server privacy adapters".split()))
Parts = dict[str, str]
"""Of one promised thing: its parts, such as the arguments of a function, and under "" what it is as a whole."""
Surface = dict[str, dict[str, Parts]]
"""By section and name."""


def collect(folder) -> Surface:
    """All that is promised; a small run writes its files into ``folder``."""
    from tests.surface_files import files

    return {
        "names": names(),
        "options": options(),
        "commands": commands(),
        "files": files(folder),
        "messages": messages(),
    }


# Names.


def type_name(hint: Any) -> str:
    """A type as it is written, the same in each version of Python."""
    if hint is inspect.Parameter.empty:
        return ""
    if hint in (None, types.NoneType):
        return "None"
    kind = get_origin(hint)
    inner = get_args(hint)
    if kind in (Union, types.UnionType):
        return " | ".join(map(type_name, inner))
    if kind is Literal:
        return " | ".join(map(repr, inner))
    if isinstance(hint, list):
        return f"[{', '.join(map(type_name, hint))}]"
    if kind is not None:
        return f"{kind.__name__}[{', '.join(map(type_name, inner))}]"
    if hint is Ellipsis:
        return "..."
    return str(getattr(hint, "__name__", hint))


def value_of(default: object) -> str:
    """A default as it is written; of a function or a class its name, of what a field makes afresh three dots."""
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "..."
    return getattr(default, "__name__", None) or repr(str(default) if isinstance(default, PurePath) else default)


def signature_of(function: Any, skip: int = 0) -> Parts:
    """Arguments with types and defaults, and under "" those that may be given by position, and what is returned."""
    signature = inspect.signature(function)
    hints = {}
    with suppress(NameError):  # of what is imported for type checkers alone
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    by_place = []
    out = {"": ""}
    for name, one in list(signature.parameters.items())[skip:]:
        if name in ("args", "kwargs"):  # what Python shows of a class that takes nothing
            continue
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            by_place.append(name)
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f" = {value_of(one.default)}"
        out[stars + name] = f"{type_name(hints.get(name, one.annotation))}{default}"
    returns = "" if isinstance(function, type) else f" -> {type_name(hints.get('return', signature.return_annotation))}"
    return out | {"": f"({', '.join(by_place)}){returns}"}


def ours(kind: type) -> bool:
    """Whether a class is perada's."""
    return kind.__module__.split(".")[0] == "perada"


def members_of(kind: type, promised: set[type]) -> Iterator[tuple[str, Parts]]:
    """What a class has beside its arguments, but for what is said of a class that it inherits from."""
    foreign = [base for base in kind.__mro__ if not ours(base) and base is not object]
    arguments = {*getattr(kind, "__dataclass_fields__", ()), *inspect.signature(kind).parameters}
    result = {name for base in kind.__mro__ if ours(base) for name in vars(base) if not name.startswith("_")}
    heirs = [base for base in kind.__mro__[1:] if base in promised]
    for name in sorted(result - arguments):
        if any(name in dir(base) for base in foreign):  # hooks of Lightning, methods of a mapping
            continue
        attribute = member(inspect.getattr_static(kind, name))
        if all(name not in dir(base) or member(inspect.getattr_static(base, name)) != attribute for base in heirs):
            yield name, attribute
    told = {name for base in kind.__mro__ if ours(base) for name in (*attributes_of(base), *get_annotations(base))}
    yield from ((name, {"": "attribute"}) for name in sorted(told - result - arguments) if not name.startswith("_"))


def attributes_of(kind: type) -> list[str]:
    """Names in the section Attributes of a class's docstring."""
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    return re.findall(r"^    (\w+): ", section[1], re.MULTILINE) if section else []


def member(value: Any) -> Parts:
    """A method with its arguments, or the type of an attribute."""
    if isinstance(value, classmethod | staticmethod):
        return signature_of(value.__func__, skip=isinstance(value, classmethod))
    if inspect.isfunction(value):
        return signature_of(value, skip=1)
    function = value.fget if isinstance(value, property) else getattr(value, "func", None)
    if isinstance(value, property | cached_property):
        return {"": f"property{signature_of(function, skip=1)[''].removeprefix('()')}"}
    return {"": "attribute" if value is None else f"attribute {type(value).__name__}"}


def names() -> dict[str, Parts]:
    """What the packages hand on, and the members of their classes."""
    from perada import algorithms, data, server

    by_path = (algorithms.Algorithm, server.ServerRule, data.Partition, data.ImageSet)
    result = {f"{package}.{name}": getattr(import_module(package), name)
             for package in PACKAGES for name in import_module(package).__all__}  # fmt: skip
    promised = {value for value in result.values() if isinstance(value, type)}
    out: dict[str, Parts] = {}
    for path, value in result.items():
        if not isinstance(value, type):
            out[path] = signature_of(value) if inspect.isfunction(value) else constant(value)
            continue
        made = arguments_of(value)
        theirs = {
            name for base in value.__mro__ if not ours(base) for name in getattr(base, "__dataclass_fields__", ())
        }
        made = {name: text for name, text in made.items() if name not in theirs}
        where = value.__module__ if issubclass(value, by_path) else ""
        by_place = [one for one in made[""].strip("()").split(", ") if one not in theirs]
        made[""] = f"{f'class {where}'.strip()}({', '.join(by_place)})"
        made = {"": "class"} if path == "perada.Run" else made  # which is made by finetune and Run.load
        first = next(other for other, one in result.items() if one is value) == path
        out[path] = made if first else {"": f"as {next(other for other, one in result.items() if one is value)}"}
        if first and path.rpartition(".")[2] in OPEN:
            out |= {f"{path}.{name}": parts for name, parts in members_of(value, promised)}
    return out


def constant(value: Any) -> Parts:
    """A table with its keys, or the alias of a type."""
    if isinstance(value, Mapping | tuple | list):
        return {"": type(value).__name__, **dict.fromkeys(value, "")}
    return {"": f"type {type_name(value)}"}


def arguments_of(kind: type) -> Parts:
    """What a class is made of; nothing of one that another library's base makes."""
    base = next(base for base in kind.__mro__ if "__init__" in vars(base))
    if is_typeddict(kind):
        return {"": "()"} | {f"{name}": type_name(hint) for name, hint in get_type_hints(kind).items()}
    return {"": "()"} if base is not object and not ours(base) else signature_of(kind)


# Options of recipes.


def options() -> dict[str, Parts]:
    """Options of recipes by their names, with types and defaults."""
    from perada.cli.parser import TRAINER_TEXTS, recipe_schema
    from perada.models.configurations import ADAPTERS

    top = recipe_schema()["properties"]
    out = dict(_options({name: schema for name, schema in top.items() if name != "compare"}, ""))
    lightning = {name: {"": "as Lightning has it"} for name in TRAINER_TEXTS if name.startswith("trainer.")}
    out = {name: parts for name, parts in out.items() if not name.startswith("trainer.")} | lightning
    out["model.adapter"] |= dict.fromkeys(ADAPTERS, "")
    return out


def _options(properties: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Parts]]:
    for name, one in properties.items():
        path = prefix + name
        choices = one.get("anyOf", [one])
        if path in ("data.data", "federated.seed"):
            continue  # for Python alone, or said elsewhere
        section = next((choice for choice in choices if "properties" in choice), {}).get("properties", {})
        if section and not {"class_path", "peft_type"} & section.keys():
            others = [typed(choice) for choice in choices if "properties" not in choice]
            yield path, {"": " | ".join(["section", *others])}
            yield from _options(section, f"{path}.")
        else:
            default = f" = {json.dumps(one['default'])}" if "default" in one else ""
            yield path, {"": f"{typed(one)}{default}", **dict.fromkeys(_classes(one), "")}


def typed(schema: Mapping[str, Any]) -> str:
    """Values that a schema allows."""
    if _classes(schema):
        return "class" + (" | null" if {"type": "null"} in schema["anyOf"] else "")
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(map(typed, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {typed(schema['items'])}"
    if "properties" in schema:
        return "PEFT configuration"
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else " | ".join(kinds)


def _classes(schema: Mapping[str, Any]) -> list[str]:
    """Names of classes that an option takes; none if it takes no class."""
    for choice in schema.get("anyOf", ()):
        if {"enum", "pattern"} <= {key for one in choice.get("anyOf", ()) for key in one}:
            return next(one["enum"] for one in choice["anyOf"] if "enum" in one)
        if result := _classes(choice):
            return result
    return []


# Commands.


class _Parsed(Exception):
    """Ends a command that has told its parser all its options."""


class _Recorder(ArgumentParser):
    def parse_args(self, *_: Any, **__: Any) -> Any:
        raise _Parsed


def commands() -> dict[str, Parts]:
    """Commands with what they take; those that run recipes take options of recipes too."""
    from perada.cli.main import COMMANDS

    tree = {name: entry for name, entry in COMMANDS.items() if name not in ("study", "pretrain")}
    return {"perada": {"--version": "", "--help": ""}, **dict(_commands(tree, "perada"))}


def _commands(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Parts]]:
    for name, (entry, _) in tree.items():
        if isinstance(entry, dict):
            yield from _commands(entry, f"{above} {name}")
        elif entry == "cli.main:run_subcommand":
            yield f"{above} {name}", {"": "takes options of recipes", **_of_lightning(name)}
        else:
            yield f"{above} {name}", _of_command(entry, f"{above} {name}")


def _of_command(entry: str, prog: str) -> Parts:
    module, _, function = entry.partition(":")
    parser = _Recorder(prog=prog, exit_on_error=False)
    words = {"perada predict": ["run"], "perada compare": ["recipe"], "perada check": ["recipe"]}.get(prog, [])
    with suppress(_Parsed):
        getattr(import_module(f"perada.{module}"), function)(parser, words)
    return dict(map(_argument, filter(_counts, parser._actions)))


def _of_lightning(name: str) -> Parts:
    """What a subcommand of LightningCLI takes that is in no section of a recipe."""
    from perada.cli.runs import PeradaCLI

    with redirect_stdout(StringIO()), suppress(SystemExit):
        PeradaCLI([name, "--help"])
    made = next(own for (subcommand, *_), own in PeradaCLI.parsers.items() if subcommand == name)
    actions = made["_subcommand_parsers"][name]._actions
    return {f"--{action.dest}": "" for action in actions if action.dest in ("config", "print_config")}


def _counts(action: Action) -> bool:
    return action.dest != "help" and not action.dest.endswith(".help") and action.help != "==SUPPRESS=="


def _argument(action: Action) -> tuple[str, str]:
    named = [option for option in action.option_strings if not option.endswith("+")]
    text = (
        " | ".join(map(str, action.choices))
        if action.choices
        else type_name(getattr(action, "_typehint", None) or action.type)
    )
    unsaid = action.default in (None, "==SUPPRESS==") or not named
    text = "flag" if action.nargs == 0 else text
    default = "" if unsaid or action.nargs == 0 else f" = {value_of(action.default)}"
    return ", ".join(named) or str(action.metavar or action.dest), f"{'' if text == 'None' else text}{default}".strip()


# Messages of a deployment.


def messages() -> dict[str, Parts]:
    """Fields of requests and responses, kinds and codes, the files of the parties."""
    from perada.deploy import protocol, state, transport
    from perada.deploy.server import progress
    from perada.deploy.site import file
    from perada.deploy.sums.keys import Advert

    def fields(kind: type) -> Parts:
        if issubclass(kind, tuple):
            return dict.fromkeys(kind._fields, "")
        return {name: text for name, text in signature_of(kind).items() if name}

    return {
        "protocol": {"": str(protocol.PROTOCOL)},
        "Request": fields(protocol.Request),
        "Response": fields(protocol.Response),
        "kind": dict.fromkeys(get_args(protocol.RequestKind), ""),
        "code": dict.fromkeys(get_args(protocol.ResponseCode), ""),
        "failure": dict.fromkeys(transport.FAILURE_CODES, ""),
        "sums: advert": fields(Advert),
        "may_send": dict.fromkeys(protocol.MAY_SEND, ""),
        "site.yaml": fields(file.SiteFile),
        "site.yaml: recipes": fields(file.Approved),
        "site.yaml: limits": fields(file.Limits),
        "site.yaml: secure_sums": fields(file.SecureSumsSection),
        "terms": fields(transport.Terms),
        state.SITE_STATE: {"": f"format {state.SITE_FORMAT}"},
        progress.SERVER_STATE: {"": f"format {progress.SERVER_FORMAT}"},
        progress.SUM_STATE: {"": f"format {progress.SUM_FORMAT}"},
    }


# What has changed.


class Change(NamedTuple):
    """What differs between two surfaces: where, the word by which users know it, and how it was and is."""

    where: str
    word: str
    before: str
    now: str


MISSING = "(nothing)"


def changes(before: Surface, now: Surface) -> list[Change]:
    """All differences; of a thing that is there in one of them alone, one."""
    out = []
    for section in sorted({*before, *now}):
        old = before.get(section, {})
        new = now.get(section, {})
        for name in sorted({*old, *new}):
            last = re.split(r"[. ]|: ", name)[-1] if section != "files" else name.split(": ")[-1]
            if name not in old or name not in new:
                texts = (f"{one[name].get('', 'there')}" if name in one else MISSING for one in (old, new))
                out.append(Change(f"{section}: {name}", last, *texts))
                continue
            for part in sorted({*old[name], *new[name]}):
                texts = [one[name].get(part, MISSING) for one in (old, new)]
                if texts[0] != texts[1]:
                    where = f"{section}: {name}" + (f"({part})" if part else "")
                    out.append(Change(where, part.lstrip("*").split(", ")[0] or last, *texts))
    return out


def unsaid(found: list[Change], changelog: str, version: str) -> list[Change]:
    """Changes whose word is in no code span of a changelog above the heading of ``version``."""
    new = re.split(rf"^## \[?{re.escape(version)}\b", changelog, maxsplit=1, flags=re.MULTILINE)[0]
    spans = re.findall(r"`([^`]+)`", new)
    return [one for one in found
            if not any(re.search(rf"(?<![\w-]){re.escape(one.word)}(?![\w-])", span) for span in spans)]  # fmt: skip
