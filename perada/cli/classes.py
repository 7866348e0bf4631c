# SPDX-License-Identifier: Apache-2.0
"""The classes of the caller's own that a recipe names, imported from the current folder.

Only a module that a recipe or an option names is looked for there, and only where it is not installed. Nothing else is:
libraries try to import what may or may not be installed, and a file of that name would be run.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CONFIGS = (".yaml", ".yml", ".json")


def import_named(args: Sequence[str]) -> None:
    """Import the modules of the current folder that class paths in options, or in the recipes among them, name.

    Raises:
        ValueError: If one is there and cannot be imported.
    """
    here = str(Path.cwd())
    values = [value for word in args for value in (word, word.partition("=")[2])]
    for name in dict.fromkeys(name for value in values for name in _class_paths(value)):
        module, _, kind = name.rpartition(".")
        top = module.partition(".")[0]
        if top in sys.modules or find_spec(top) is not None or PathFinder.find_spec(top, [here]) is None:
            continue
        sys.path.append(here)
        try:
            invalidate_caches()
            import_module(module)
        except Exception as error:  # whatever the caller's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{kind!r} cannot be imported from {top!r} in this folder: {reason}; fix it") from error
        finally:
            sys.path.remove(here)


def _class_paths(text: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The class paths in a word: in the YAML that it is, or in the file that it names."""
    if text.endswith(_CONFIGS) and Path(text).is_file():
        text, seen = Path(text).read_text(encoding="utf-8"), seen | {text}
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # the parser will say it
        return
    yield from _named(content, seen)


def _named(content: Any, seen: frozenset[str], key: str = "") -> Iterator[str]:  # noqa: ANN401  # any YAML
    """What stands as a class_path, or looks like one: module.Class."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _named(value, seen, str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _named(value, seen)
    elif isinstance(content, str) and content.endswith(_CONFIGS):
        if content not in seen and Path(content).is_file():
            yield from _class_paths(content, seen)
    elif isinstance(content, str) and _DOTTED.fullmatch(content):
        if key == "class_path" or content.rpartition(".")[2][0].isupper():
            yield content
