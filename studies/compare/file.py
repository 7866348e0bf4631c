# SPDX-License-Identifier: Apache-2.0
"""A file that describes a comparison, as words of the command line."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perada.system.yaml_files import read_yaml

NESTED_OPTIONS = ("set", "tune", "variants", "vary")
"""Options of ``perada compare`` with values by name."""


def expand_comparison(words: Sequence[str], find: Callable[[str], Path | None]) -> list[str]:
    """Replace a file that describes a comparison by the equivalent words of a command line.

    Its section ``compare`` has ``recipes`` and the options of ``perada compare``; all other sections are options of
    ``perada fit`` for every run.

    Args:
        words: Words of the command line.
        find: Returns the file of a comparison that a word names; None if it does not name one.

    Returns:
        The words. Those of the command line come after the file's, so that they prevail.

    Raises:
        ValueError: If the file names no recipes, has an invalid section, or is given beside recipes.
    """
    file_name, path = _first_file(words, find)
    if path is None:
        return list(words)
    other_words = [word for word in words if word != file_name]
    if other_words and not other_words[0].startswith("-"):
        raise ValueError(f"{file_name!r} already lists the recipes to compare; leave {other_words[0]!r} out")
    content = read_yaml(path)
    options = content.pop("compare")
    if not isinstance(options, dict) or not options.get("recipes"):
        raise ValueError(f"{file_name!r} lists no recipes to compare; add compare: {{recipes: [...]}}")

    file_words = _value_words(options.pop("recipes"))
    for name, value in options.items():
        if name not in NESTED_OPTIONS:
            file_words += _plain_option(name, value)
            continue
        if not isinstance(value, dict):
            what = "names of rows with their options" if name == "variants" else "options of `perada fit`"
            raise ValueError(
                f"{file_name!r}: compare.{name} must be a mapping of {what} with their values, got {value!r}"
            )
        if name == "variants":
            file_words += [f"--variants={variant}={_value_word(changes)}" for variant, changes in value.items()]
        else:
            file_words += _nested_option(name, value, other_words)
    for option, value in leaves(content):
        file_words.append(f"--{option}={_value_word(value)}")
    return [*file_words, *other_words]


def _first_file(words: Sequence[str], find: Callable[[str], Path | None]) -> tuple[str, Path | None]:
    """Return the first word that names a comparison's file, and the file; None if there is none."""
    for word in words:
        path = find(word)
        if path is not None:
            return word, path
    return "", None


def _plain_option(name: str, value: Any) -> list[str]:  # noqa: ANN401  # the content of any file
    """Return the words for an option with one value or a list of values; true is an option without a value."""
    if value is False:
        return []
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *_value_words(value)]


def _nested_option(name: str, values_of_key: dict[str, Any], other_words: Sequence[str]) -> list[str]:
    """Return the words for the values of an option by name, without the names that other words set."""
    overridden = [word.removeprefix(f"--{name}=").partition("=")[0] for word in other_words]
    words = []
    for key, values in values_of_key.items():
        if key in overridden:
            continue
        quoted = []
        for word in _value_words(values):
            # In quotes a comma in a text does not separate two values.
            needs_quotes = "," in word and word[0] not in "[{"
            quoted.append(f'"{word}"' if needs_quotes else word)
        words.append(f"--{name}={key}={','.join(quoted)}")
    return words


def _value_words(value: Any) -> list[str]:  # noqa: ANN401  # the content of any file
    """Return a value, or each value of a list, as a word."""
    values = value if isinstance(value, list) else [value]
    return [_value_word(item) for item in values]


def _value_word(value: object) -> str:
    """Return a value as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a section by their full names; a dictionary with a ``class_path`` is one option."""
    for key, value in section.items():
        if isinstance(value, dict) and value and "class_path" not in value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
