# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a spreadsheet, and the endings of names of scores."""

from collections.abc import Iterable, Sequence

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


def near_names(word: str, names: Iterable[str], limit: int = 1) -> list[str]:
    """Find the names that a misspelt word may stand for, nearest first.

    A name is near if few letters were left out, added, changed or swapped: one in a short word, one in four letters of
    a long one, at most three. Capitals, dashes and underscores do not count. The word itself is never proposed: callers
    ask because it was rejected.

    >>> near_names("ditot", ["ditto", "fedavg"]), near_names("Fed-Avg", ["ditto", "fedavg"])
    (['ditto'], ['fedavg'])
    >>> near_names("fedpac", ["feddpa", "fedper"]), near_names("ditto", ["ditto"])
    ([], [])
    """
    spelling = _without_style(word)
    allowed = min(3, max(1, len(spelling) // 4))
    distances: dict[str, int] = {}
    for name in names:
        other = _without_style(name)
        # The difference in length is a lower bound, and spares the table for most names of a long list.
        if name == word or abs(len(other) - len(spelling)) > allowed:
            continue
        distance = _edits(spelling, other)
        if distance <= allowed and distance < len(spelling):
            distances[name] = distance
    return sorted(distances, key=distances.__getitem__)[:limit]


def _without_style(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _edits(first: str, second: str) -> int:
    """Count the insertions, deletions, changes and swaps of neighbours between two words (optimal string alignment)."""
    before: list[int] = []
    above = list(range(len(second) + 1))
    for row, letter in enumerate(first, 1):
        current = [row]
        for column, other in enumerate(second, 1):
            cost = min(above[column] + 1, current[column - 1] + 1, above[column - 1] + (letter != other))
            swapped = row > 1 and column > 1 and letter == second[column - 2] and first[row - 2] == other
            if swapped:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, above = above, current
    return above[-1]
