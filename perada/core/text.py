# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal, and the endings of names of scores."""

SPREADS = ("_std", "_worst", "_p10", "_weighted")
"""What the name of a mean over clients ends in where it is another figure of theirs."""


def printable(text: str) -> str:
    r"""``text`` on one line, without the control characters that a terminal would obey.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)
