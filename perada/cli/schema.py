# SPDX-License-Identifier: Apache-2.0
"""`perada schema`: a JSON schema of recipes, by which editors complete and check them."""

import inspect
import json
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytorch_lightning as pl
from jsonargparse import ArgumentParser

from perada.algorithms import ALGORITHMS, Algorithm
from perada.api import FULL_NAMES, argument_texts
from perada.cli.messages import subclasses
from perada.cli.parser import LIGHTNING
from perada.data import FederatedDataModule, ImageSet, Partition
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SERVER_RULES, Distillation, ServerRule

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
_NAMES = {Algorithm: [*ALGORITHMS], ServerRule: [*SERVER_RULES], ImageSet: [], Partition: []}
_OPTIONS = (Distillation, Privacy, ClientPrivacy)


def schema(parser: ArgumentParser, words: list[str]) -> None:
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
    if hint in _NAMES:
        own = [one.__name__ for one in subclasses(hint) if one.__module__.startswith("perada.")]
        name = {"anyOf": [{"enum": [*_NAMES[hint], *sorted(own)]}, {"type": "string", "pattern": r"\."}]}
        return {"anyOf": [name, _object({"class_path": name, "init_args": {"type": "object"}})]}
    return {}


def _either(hints: Any) -> Schema:  # noqa: ANN401  # types
    values = [_value(hint) for hint in hints]
    return {} if {} in values else {"anyOf": values}
