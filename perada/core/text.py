# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a spreadsheet, and suffixes of score names."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

SPREADS = ("_std", "_worst", "_p10", "_weighted", "_recent")
"""Name suffixes of statistics over clients other than the mean."""


def is_spread(name: str) -> bool:
    """Return whether a score is a statistic over clients other than the mean; the metric f1_weighted is not.

    >>> is_spread("personal/local_test_std"), is_spread("personal/local_test_f1_weighted")
    (True, False)
    """
    return name.endswith(SPREADS) and not name.endswith("_f1_weighted")


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in a spreadsheet."""


def cell_text(text: str) -> str:
    r"""Return a text for a CSV cell, with a quote before anything that a spreadsheet would treat as a formula.

    >>> cell_text("=1+1"), cell_text("cat")
    ("'=1+1", 'cat')
    """
    if text.startswith(FORMULA):
        return f"'{text}"
    return text


def printable(text: str) -> str:
    r"""Replace control characters, which a terminal would obey, and line breaks by question marks.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# Letters of the Greek and Cyrillic alphabets that most fonts draw like Latin ones, and hyphens.
_DRAWN_ALIKE = str.maketrans(
    "АВЕКМНОРСТХІЈЅаеорсухіјѕΑΒΕΖΗΙΚΜΝΟΡΤΥΧο\u2010\u2011", "ABEKMHOPCTXIJSaeopcyxijsABEZHIKMNOPTYXo--"
)
# Letters, by their Unicode category, that are not visible.
_BLANK = "\u115f\u1160\u3164\uffa0\u2800"


def visible_form(name: str) -> str:
    r"""Return a normal form of a name, equal for names that look alike.

    It ignores Unicode normalisation, invisible characters, kinds of spaces, spaces at either end, and the difference
    between Latin letters and those of other alphabets that look the same, but not case.

    >>> visible_form("cafe\u0301 ") == visible_form("caf\xe9\u200b")
    True
    >>> visible_form("Cat") == visible_form("cat")
    False
    """
    composed = unicodedata.normalize("NFC", name).translate(_DRAWN_ALIKE)
    letters = []
    for letter in composed:
        category = unicodedata.category(letter)
        if category.startswith("Z") or letter in "\t\n\v\f\r" or letter in _BLANK:
            letters.append(" ")
        elif category not in ("Cc", "Cf") and not "\ufe00" <= letter <= "\ufe0f" and letter != "\u034f":
            letters.append(letter)
    return re.sub(" +", " ", "".join(letters)).strip()


def look_alike(names: Iterable[str]) -> list[list[str]]:
    r"""Group the names that look alike, in groups of two or more.

    >>> look_alike(["cat", "dog", "cat\u200b"])
    [['cat', 'cat\u200b']]
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(visible_form(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def case_variants(names: Iterable[str]) -> list[list[str]]:
    r"""Group the names that differ only in case and in what a reader cannot see.

    Names of one letter are left out, since an alphabet has both cases of each as classes of their own.

    >>> case_variants(["Hospital", "clinic", "hospital", "HOSPITAL "])
    [['Hospital', 'hospital', 'HOSPITAL ']]
    >>> case_variants(["cat", "cat ", "A", "a"])
    []
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(visible_form(name).casefold(), []).append(name)
    variants = []
    for folded, group in groups.items():
        if len(folded) > 1 and len({visible_form(name) for name in group}) > 1:
            variants.append(group)
    return variants


def abbreviated(names: Sequence[str], limit: int = 5) -> str:
    """Join the first names, and add the number of the others.

    >>> abbreviated(["a", "b", "c"], limit=1)
    'a and 2 more'
    """
    first = ", ".join(names[:limit])
    hidden = len(names) - limit
    if hidden <= 0:
        return first
    return f"{first} and {hidden} more"


def near_names(word: str, names: Iterable[str], limit: int = 1) -> list[str]:
    """Find the names that a misspelt word may mean, nearest first.

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
        before = above
        above = current
    return above[-1]
