# SPDX-License-Identifier: Apache-2.0
"""Readers of users' YAML files, whose errors name the file, the line and the remedy."""

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

MERGE_TAG = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, which may occur in a mapping several times."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class YamlFileError(ValueError):
    """Raised for a file that is not valid YAML or has no options; the message has file, line and remedy."""


def read_yaml(path: Path, example: str = "trainer: {max_epochs: 3}") -> dict[str, Any]:
    """Read a YAML file of options, NAME: VALUE.

    Args:
        path: The file.
        example: A line that such a file may have, for the message about one that is empty or holds something else.

    Raises:
        YamlFileError: If the file is not such YAML.
        OSError: If it cannot be read.
    """
    return parse_yaml(path.read_bytes(), str(path), example)


def parse_yaml(content: bytes | str, source: str, example: str = "trainer: {max_epochs: 3}") -> dict[str, Any]:
    """Parse the content of a YAML file of options; ``source`` is its name in messages.

    Raises:
        YamlFileError: If it is not such YAML.
    """
    text = _decode_utf8(content, source) if isinstance(content, bytes) else content
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        _check_keys(root, source)
        parsed = yaml.safe_load(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = ord(text[error.position])
        raise YamlFileError(
            f"{source}, line {line}: the character U+{code:04X} is not allowed in YAML; remove it, or use a text file"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _explain_syntax_error(error, text, source) from None
    except YamlFileError:
        raise
    except ValueError as error:
        # A value that looks like a date and is none, such as 2024-13-01.
        raise YamlFileError(f"{source}: a value cannot be read ({error}); quote it") from None
    if parsed is None:
        raise YamlFileError(f"{source} is empty; add options, for example {example}")
    if not isinstance(parsed, dict):
        content_text = "a list" if isinstance(parsed, list) else repr(parsed)
        raise YamlFileError(f"{source}, line 1: must hold options, NAME: VALUE, got {content_text}; write {example}")
    for key, _ in _key_value_pairs(root):
        if not isinstance(key, yaml.ScalarNode) or key.tag not in ("tag:yaml.org,2002:str", MERGE_TAG):
            key_text = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
            raise YamlFileError(
                f"{source}, line {key.start_mark.line + 1}: option names must be strings, got {key_text}; write, for "
                f"example, {example}"
            )
    return parsed


def _decode_utf8(content: bytes, source: str) -> str:
    """Decode a YAML file as UTF-8; raise a YamlFileError with the line of the first invalid byte."""
    if content.startswith(UTF16_MARKS):
        raise YamlFileError(f"{source}, line 1: the text is encoded as UTF-16; save it as UTF-8")
    if b"\x00" in content:
        raise YamlFileError(f"{source}, line 1: this is not a text file; use a YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise YamlFileError(
            f"{source}, line {line}: the byte 0x{byte:02x} is not UTF-8; save the text as UTF-8, or use a YAML file"
        ) from None


def _key_value_pairs(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _check_keys(root: yaml.Node | None, source: str) -> None:
    """Reject duplicate keys in a mapping, of which YAML would silently use the last."""
    pending = [root]
    # Ids of visited nodes: an alias is the same node again.
    seen: set[int] = set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        lines: dict[Hashable, int] = {}
        for key, value in _key_value_pairs(node):
            pending.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise YamlFileError(
                    f"{source}, line {line}: {key.value!r} is set twice, first in line {first}; remove one"
                )
            lines[key.tag, key.value] = line


def _explain_syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> YamlFileError:
    """Explain a syntax error from the text at which the parser stopped."""
    mark = error.problem_mark or error.context_mark
    opened = error.context_mark
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1) if mark else 0
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent:
        return _error_at_line(source, number, "a tab indents the line, which YAML does not allow; replace it by spaces")
    if isinstance(error, yaml.constructor.ConstructorError):
        return _error_at_line(source, number, f"{error.problem}; use a plain value")
    if isinstance(error, yaml.composer.ComposerError):
        return _error_at_line(source, number, _explain_composition(error, lines))
    # An unclosed bracket or quote is reported where it was opened, since the parser stops far below.
    begins = _character_at(lines, opened.line, opened.column) if opened else ""
    if begins in ("[", "{", "'", '"') and opened:
        return _error_at_line(
            source, opened.line, f"the {begins} is not closed, or a comma is missing after it; correct it"
        )
    without_colon = _line_without_colon(lines, number)
    if without_colon is not None:
        return _error_at_line(source, without_colon, f"a colon is missing; write {lines[without_colon].strip()}:")
    if _is_misplaced(lines, number):
        return _error_at_line(
            source, number, "the indentation fits none of the lines above; align it with its neighbouring options"
        )
    stopped_at = _character_at(lines, number, mark.column) if mark else ""
    # The parser often stops in the line after the mistake.
    for candidate in (number - 1, number):
        if candidate >= 0 and re.fullmatch(r"\s*[\w.-]+:[^\s:/]+", lines[candidate]):
            return _error_at_line(source, candidate, "there is no space after the colon; write NAME: VALUE")
    if stopped_at == "\t":
        return _error_at_line(source, number, "a tab where YAML allows only spaces; replace it by spaces")
    if stopped_at == ":":
        return _error_at_line(source, number, "the line contains a second colon; quote a value that contains ': '")
    if stopped_at and stopped_at in "%@`!&*|>":
        return _error_at_line(source, number, f"{error.problem}; quote a value that begins with a special character")
    return _error_at_line(source, number, f"{error.problem}; write NAME: VALUE")


def _explain_composition(error: yaml.composer.ComposerError, lines: list[str]) -> str:
    """Explain an unknown alias, or a second document."""
    mark = error.problem_mark
    if mark is not None and mark.line < len(lines) and _character_at(lines, mark.line, mark.column) in ("*", "&"):
        return f"{error.problem}; quote a text that begins with * or &"
    return "a second document begins; keep only one document, and remove the line ---"


def _line_without_colon(lines: list[str], number: int) -> int | None:
    """Return the line before one at which the parser stopped if it is a bare name, as of a section; else None."""
    before = max((index for index in range(number) if lines[index].strip()), default=number)
    return before if re.fullmatch(r"\s*[A-Za-z_][\w.-]*\s*", lines[before]) else None


def _error_at_line(source: str, number: int, problem: str) -> YamlFileError:
    return YamlFileError(f"{source}, line {number + 1}: {problem}")


def _character_at(lines: list[str], number: int, column: int) -> str:
    return lines[number][column : column + 1] if number < len(lines) else ""


def _is_misplaced(lines: list[str], number: int) -> bool:
    """Return whether the indentation of a line matches none of the sections that are open above it."""
    open_indents: list[int] = []
    before = ""
    for line in lines[:number]:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        while open_indents and open_indents[-1] > indent:
            open_indents.pop()
        if not open_indents or open_indents[-1] < indent:
            open_indents.append(indent)
        before = line
    if not open_indents:
        return False
    indent = len(lines[number]) - len(lines[number].lstrip())
    if indent > open_indents[-1]:
        return not before.split(" #")[0].rstrip().endswith((":", "-", "|", ">"))
    return indent not in open_indents


def iterate_strings(content: object) -> Iterator[tuple[str, str]]:
    """Yield all strings of a recipe, or of a part of it, with the name of their option."""
    pending = [("", content)]
    # Objects that YAML's aliases repeat are visited once, since aliases may nest exponentially.
    seen: set[int] = set()
    while pending:
        option, value = pending.pop()
        if isinstance(value, str):
            yield option, value
        elif isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            pending += [(f"{option}.{key}".removeprefix("."), item) for key, item in value.items()]
        elif isinstance(value, list) and id(value) not in seen:
            seen.add(id(value))
            pending += [(option, item) for item in value]
