# SPDX-License-Identifier: Apache-2.0
"""Fit stored help texts to the width of the terminal."""

import re
from collections.abc import Sequence
from textwrap import wrap

MAX_WIDTH = 120
"""Largest number of columns of help texts."""
MIN_TEXT = 20
"""Smallest number of columns beside the names of options."""
_OPTION = re.compile(r"(  \S.*?  +)(\S.*)")
"""An option and, at least two spaces behind it, the beginning of its description."""


def rewrapped(lines: Sequence[str], width: int) -> str:
    """Wrap a help text again.

    Args:
        lines: Lines of the help of a parser, wrapped at any width.
        width: Number of columns.
    """
    wrapped = []
    for first_indent, indent, text in _join_paragraphs(lines):
        if not text:
            wrapped.append("")
            continue
        # What stands in brackets stays together.
        glued = re.sub(r"\[[^\[\]]*\]", lambda match: match[0].replace(" ", "\0"), text)
        # As argparse does, two columns are left free.
        columns = max(min(width, MAX_WIDTH) - 2 - len(indent), MIN_TEXT)
        parts = wrap(glued, columns, break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(parts):
            wrapped.append((indent if number else first_indent) + part.replace("\0", " "))
    return "\n".join(wrapped)


def _join_paragraphs(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    """Join lines to paragraphs: what the first line begins with, the indentation of the others, and the text."""
    paragraphs: list[tuple[str, str, str]] = []
    for line in lines:
        text = line.lstrip(" ")
        indent = line[: len(line) - len(text)]
        continues = bool(paragraphs and text and paragraphs[-1][2])
        if continues and paragraphs[-1][1] == indent and indent != "  ":
            first_indent, indent, before = paragraphs[-1]
            paragraphs[-1] = (first_indent, indent, f"{before} {text}")
            continue
        option = _OPTION.fullmatch(line)
        usage = re.match(r"usage: (?:\w+ )+(?=[-A-Z\[])", line)
        if usage:
            paragraphs.append((usage[0], " " * len(usage[0]), line.removeprefix(usage[0])))
        elif option:
            paragraphs.append((option[1], " " * len(option[1]), option[2]))
        else:
            paragraphs.append((indent, indent, text))
    return paragraphs
