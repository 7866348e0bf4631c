# SPDX-License-Identifier: Apache-2.0
"""A file that says what to compare, as words of the command line."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perada.core.yaml_files import read_yaml


def comparison(words: Sequence[str], find: Callable[[str], Path | None]) -> list[str]:
    """Replace a file that says what to compare by the words that it stands for; those that are given follow them.

    ``find`` gives the file of a word that names such a one. Its section ``compare`` has the options of ``perada
    compare``, and ``recipes``; all other sections are options of ``perada fit`` for every run.
    """
    found = ((word, path) for word in words if (path := find(word)) is not None)
    file, path = next(found, ("", None))
    if path is None:
        return list(words)
    rest = [word for word in words if word != file]
    if rest and not rest[0].startswith("-"):
        raise ValueError(f"{file!r} says itself which recipes to compare: leave {rest[0]!r} out")
    content = read_yaml(path)
    own = content.pop("compare")
    if not isinstance(own, dict) or not own.get("recipes"):
        raise ValueError(f"{file!r} names no recipes to compare: give it compare: {{recipes: [...]}}")
    out = _listed(own.pop("recipes"))
    for name, value in own.items():
        if name not in ("set", "tune", "variants", "vary"):
            out += [] if value is False else [f"--{name}", *(_listed(value) if value is not True else ())]
            continue
        if not isinstance(value, dict):
            what = "names of rows with the options of each" if name == "variants" else "options of `perada fit`"
            raise ValueError(f"{file!r}: compare.{name} is {value!r}; give it {what} with their values")
        if name == "variants":
            out += [f"--variants={variant}={_word(changes)}" for variant, changes in value.items()]
            continue
        given = [word.removeprefix(f"--{name}=").partition("=")[0] for word in rest]
        for key in (key for key in value if key not in given):
            # A comma in a text does not part two values.
            quoted = (f'"{word}"' if "," in word and word[0] not in "[{" else word for word in _listed(value[key]))
            out.append(f"--{name}={key}={','.join(quoted)}")
    return [*out, *(f"--{key}={_word(value)}" for key, value in leaves(content)), *rest]


def _listed(value: Any) -> list[str]:  # noqa: ANN401  # whatever a file holds
    """One value or several as words."""
    return list(map(_word, value if isinstance(value, list) else [value]))


def _word(value: object) -> str:
    """A value as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options by full name; what has a ``class_path`` is one."""
    for key, value in section.items():
        if isinstance(value, dict) and value and "class_path" not in value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
