# SPDX-License-Identifier: Apache-2.0
"""Classes as recipes and command lines write them: the path of a class, and arguments."""

import json
from collections.abc import Callable
from typing import Any


def class_path_of(factory: Callable[..., Any]) -> str:
    """Return the path by which a recipe names a class."""
    return f"{factory.__module__}.{factory.__qualname__}"


def option_words(option: str, spec: dict[str, Any]) -> list[str]:
    """Return the options of ``perada fit`` for a class with its arguments.

    >>> option_words("data.partition", {"class_path": "Shards", "init_args": {"num_clients": 3}})
    ['--data.partition=Shards', '--data.partition.num_clients=3']
    """
    words = [f"--{option}={spec['class_path']}"]
    for name, value in spec.get("init_args", {}).items():
        value_text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{option}.{name}={value_text}")
    return words
