# SPDX-License-Identifier: Apache-2.0
"""Options of small runs as one flat dictionary, which tests override one by one."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from perada.federation.options import Evaluation, Training
from perada.server import Distillation
from tests.methods import NAMED

EVERYDAY = ("lr_personal", "lr_local", "local_epochs", "local_steps")
"""Fields of training that `perada.finetune` also takes as arguments."""
SECTIONS = {field.name: ("training", field.name) for field in fields(Training) if field.name not in EVERYDAY}
SECTIONS |= {field.name: ("evaluation", field.name) for field in fields(Evaluation)}
SECTIONS |= {f"distill_{field.name}": ("distillation", field.name) for field in fields(Distillation)}
SECTIONS["prox_strength"] = ("algorithm_options", "prox_strength")
"""The section of each option that has one, and its name there."""


def fields_among(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return those of some options that are fields of a dataclass."""
    names = [field.name for field in fields(kind)]
    return {name: value for name, value in options.items() if name in names}


def sections(**options: Any) -> dict[str, Any]:
    """Move flat options into the sections of `perada.finetune`. One that is None is left out.

    A section may be given beside them; what it has itself takes precedence. The algorithm may be called as a method,
    such as ``perada_no_kd``.

    >>> sections(rounds=2, momentum=0.9, distill_steps=3, distillation={"lr": 0.1})
    {'rounds': 2, 'distillation': {'steps': 3, 'lr': 0.1}, 'training': {'momentum': 0.9}}
    """
    arguments: dict[str, Any] = {}
    given = {}
    for name, value in options.items():
        if name not in SECTIONS:
            arguments[name] = value
        elif value is not None:
            given[name] = value
    for name, value in given.items():
        section, field = SECTIONS[name]
        content = arguments.get(section) or {}
        if not isinstance(content, Mapping):
            raise TypeError(f"{name}={value!r} is given beside {section}={content!r}: set it there")
        arguments[section] = {field: value} | content
    algorithm = arguments.get("algorithm")
    if isinstance(algorithm, str) and algorithm in NAMED:
        arguments["algorithm"] = NAMED[algorithm].algorithm
        algorithm_options = NAMED[algorithm].options | arguments.get("algorithm_options", {})
        if algorithm_options:
            arguments["algorithm_options"] = algorithm_options
    return arguments
