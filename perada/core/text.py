# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a spreadsheet, and the endings of names of scores."""

from collections.abc import Sequence

SPREADS = ("_std", "_worst", "_p10", "_weighted")
"""What the name of a mean over clients ends in where it is another figure of theirs."""


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def cell_text(text: str) -> str:
    r"""``text`` for a cell of a CSV file, with a quote before it where a spreadsheet would compute it.

    >>> cell_text("=1+1"), cell_text("cat")
    ("'=1+1", 'cat')
    """
    return f"'{text}" if text.startswith(FORMULA) else text


def printable(text: str) -> str:
    r"""``text`` on one line, without the control characters that a terminal would obey.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many there are more.

    >>> some(["a", "b", "c"], most=1)
    'a and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
