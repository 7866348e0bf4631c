# SPDX-License-Identifier: Apache-2.0
"""Options of a Python call as they would stand in a recipe."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict

from perada.algorithms import Algorithm
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Distillation, ServerRule

Plain = bool | int | float | str | list["Plain"] | dict[str, "Plain"] | None
"""What YAML holds."""


def as_plain(value: object) -> Plain:
    """An option as it stands in a recipe; what has no place in one as a string that shows what it is.

    >>> from perada.algorithms import make_algorithm
    >>> as_plain(make_algorithm("ditto", prox_strength=0.5))
    {'class_path': 'perada.algorithms.perada.Ditto', 'init_args': {'prox_strength': 0.5}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value]
    if isinstance(value, Distillation | Privacy | ClientPrivacy):
        return asdict(value)
    if isinstance(value, Algorithm | ServerRule):
        names = [name for name in inspect.signature(type(value)).parameters if hasattr(value, name)]
        options = {name: as_plain(getattr(value, name)) for name in names}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": options}
    text = " ".join(repr(value).split())
    return text if len(text) <= 500 else f"{text[:497]}..."
