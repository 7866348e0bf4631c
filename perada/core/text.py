# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a spreadsheet, and suffixes of score names."""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

SPREADS = ("_std", "_worst", "_p10", "_weighted", "_recent")
"""Suffixes of the names of scores that are statistics over clients other than the mean."""


def is_spread(name: str) -> bool:
    """Return whether a score is a statistic over clients other than the mean.

    The metric ``f1_weighted`` is not one: it is weighted over classes.

    >>> is_spread("personal/local_test_std"), is_spread("personal/local_test_f1_weighted")
    (True, False)
    """
    return name.endswith(SPREADS) and not name.endswith("_f1_weighted")


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in a spreadsheet."""


def cell_text(text: str) -> str:
    r"""Return a text for a CSV cell, with an apostrophe before anything that a spreadsheet would run as a formula.

    >>> cell_text("=1+1"), cell_text("cat")
    ("'=1+1", 'cat')
    """
    if text.startswith(FORMULA):
        return f"'{text}"
    return text


def printable(text: str) -> str:
    r"""Replace line breaks, and control characters that a terminal would obey, by question marks.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_lines(text: str) -> str:
    r"""Make a text of several lines safe to show: a terminal, a browser and a log file show what it says.

    Names of clients, sites, classes and files come from anyone. Control characters, among them those that begin a
    terminal's commands, and characters that are invisible or change the direction of writing, become question marks.
    Line breaks, tabs and all kinds of spaces are kept.

    >>> printable_lines("a\x1b[2J\x07\n\u202eb\tc")
    'a?[2J?\n?b\tc'
    """
    lines = []
    for line in text.split("\n"):
        # Most lines are printable, and this is far quicker than a look at each letter.
        lines.append(line if line.isprintable() else "".join(map(_shown_letter, line)))
    return "\n".join(lines)


def _shown_letter(letter: str) -> str:
    """Return a letter, or a question mark in place of one that must not be shown."""
    is_shown = letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs"
    return letter if is_shown else "?"


def printable_json(text: str) -> str:
    r"""Write the characters of a line of JSON that :func:`printable` would replace as escapes, with the same meaning.

    >>> printable_json('"Gdańsk \u202e"')
    '"Gdańsk \\u202e"'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


# Cyrillic and Greek letters that most fonts draw like Latin ones, and Unicode's hyphens.
_DRAWN_ALIKE = str.maketrans(
    "АВЕКМНОРСТХІЈЅаеорсухіјѕΑΒΕΖΗΙΚΜΝΟΡΤΥΧο\u2010\u2011", "ABEKMHOPCTXIJSaeopcyxijsABEZHIKMNOPTYXo--"
)
# Letters according to their Unicode category, but drawn as blanks.
_BLANK = "\u115f\u1160\u3164\uffa0\u2800"


def visible_form(name: str) -> str:
    r"""Return a normal form of a name, equal for names that look alike.

    Differences in Unicode normalisation, invisible characters, kinds and numbers of spaces, and between Latin letters
    and those of other alphabets that look the same are removed. Case is kept.

    >>> visible_form("cafe\u0301 ") == visible_form("caf\xe9\u200b")
    True
    >>> visible_form("Cat") == visible_form("cat")
    False
    """
    if name.isascii() and name.isprintable():
        # Only spaces can differ. This is far quicker than a look at each letter, and there may be 100,000 clients.
        return re.sub(" +", " ", name).strip()
    composed = unicodedata.normalize("NFC", name).translate(_DRAWN_ALIKE)
    letters = []
    for letter in composed:
        category = unicodedata.category(letter)
        if category.startswith("Z") or letter in "\t\n\v\f\r" or letter in _BLANK:
            letters.append(" ")
        elif category not in ("Cc", "Cf") and not _is_invisible_mark(letter):
            letters.append(letter)
    return re.sub(" +", " ", "".join(letters)).strip()


def _is_invisible_mark(letter: str) -> bool:
    """Return whether a character has no shape of its own: a variation selector or the combining grapheme joiner."""
    return "\ufe00" <= letter <= "\ufe0f" or letter == "\u034f"


def look_alike(names: Iterable[str]) -> list[list[str]]:
    r"""Return the names that look alike, in groups of two or more.

    >>> look_alike(["cat", "dog", "cat\u200b"])
    [['cat', 'cat\u200b']]
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(visible_form(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def case_variants(names: Iterable[str]) -> list[list[str]]:
    r"""Return the names that differ in case but are otherwise alike to a reader, in groups of two or more.

    Names of one letter are left out, since data sets of handwriting have "a" and "A" as classes.

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
    """Join the first ``limit`` names by commas, and add the number of the others.

    >>> abbreviated(["a", "b", "c"], limit=1)
    'a and 2 more'
    """
    first = ", ".join(names[:limit])
    hidden = len(names) - limit
    if hidden <= 0:
        return first
    return f"{first} and {hidden} more"


def number_cells(values: Sequence[float]) -> list[str]:
    """Return the numbers of a column of a table as cells, with as many digits as needed.

    These are seven significant digits, or fifteen where seven would make different numbers equal, or round integers,
    such as time stamps.

    >>> number_cells([36.60000038, 41.3]), number_cells([1700000000000.0, 1700000003600.0])
    (['36.6', '41.3'], ['1700000000000', '1700000003600'])
    >>> number_cells([1700000003601.0])
    ['1700000003601']
    """
    cells = [f"{number:.7g}" for number in values]
    has_long_integers = any(abs(number) >= 1e7 for number in values)
    if has_long_integers or len({*cells}) < len({*values}):
        return [f"{number:.15g}" for number in values]
    return cells


def plain_number(value: object) -> object:
    """Return the number, flag or text in a NumPy scalar as Python's own; return everything else unchanged.

    NumPy is recognised without an import, since this package does not depend on it.
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def value_text(value: object) -> str:
    """Describe a value that a user passed, for a message, in one line and without the address of an object.

    Only plain values and objects that print their options are written as in Python. A class and a tensor of one number
    come with the remedy, since they are passed by mistake for an instance and for the number. A text of more than 80
    letters is cut.

    >>> value_text(PurePath("a.png")), value_text(None), value_text([1, "b"])
    ("'a.png'", 'None', "[1, 'b']")
    >>> value_text(object()), value_text([object()]), value_text(OSError)
    ('an object', '[an object]', 'the class OSError (create it: OSError(...))')
    """
    text = _full_text(value)
    return f"{text[:60]}…" if len(text) > 80 else text


def _full_text(value: object) -> str:
    """Describe a value; see :func:`value_text`."""
    plain = plain_number(value)
    if plain is not value:
        # The number is formatted by NumPy: 0.1 in float32 is 0.10000000149 in Python.
        return repr(plain) if isinstance(plain, str) else str(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, type):
        return f"the class {value.__name__} (create it: {value.__name__}(...))"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return f"the function {value.__name__}"
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return _tensor_text(value)
    if type(value) is dict:
        entries = [f"{value_text(key)}: {value_text(entry)}" for key, entry in islice(value.items(), _MAX_ENTRIES)]
        return f"{{{_join_entries(entries, len(value))}}}"
    # Subclasses, such as named tuples, print themselves.
    if isinstance(value, list | tuple | set | frozenset) and type(value) in (list, tuple, set, frozenset):
        return _container_text(value)
    return _object_text(value)


_MAX_ENTRIES = 20
"""Number of entries of a container that are described. It may have millions."""


def _tensor_text(value: Any) -> str:  # noqa: ANN401  # a tensor, or an array of NumPy or pandas
    """Describe a tensor, or an array of NumPy or pandas."""
    noun = _with_article(type(value).__name__)
    if type(value).__module__ == "torch":
        noun = "a tensor"
    elif type(value).__name__ == "ndarray":
        noun = "an array"
    if value.shape == ():
        try:
            return f"{noun} of the number {value.item():.6g} (pass its .item())"
        except (RuntimeError, TypeError, ValueError):  # it has no data, or is complex
            return noun
    return f"{noun} of shape {tuple(value.shape)}"


def _with_article(noun: str) -> str:
    """Put the indefinite article in front of the name of a type."""
    return f"{'an' if noun[0].upper() in 'AEIO' else 'a'} {noun}"


def _container_text(values: Collection[object]) -> str:
    """Describe a list, a tuple or a set by its entries."""
    entries = _join_entries([value_text(entry) for entry in islice(values, _MAX_ENTRIES)], len(values))
    if isinstance(values, list):
        return f"[{entries}]"
    if isinstance(values, tuple):
        return f"({entries},)" if len(values) == 1 else f"({entries})"
    return f"{{{entries}}}" if entries else "an empty set"


def _join_entries(entries: Sequence[str], count: int) -> str:
    """Join the first entries of a container with ``count`` entries."""
    return ", ".join([*entries, "…"] if count > len(entries) else entries)


def _object_text(value: object) -> str:
    """Describe an object by its ``repr`` if that is one line without an address, otherwise by its type."""
    try:
        text = repr(value)
    except Exception:  # of any class
        text = ""
    is_readable = bool(text) and "\n" not in text and " at 0x" not in text and not text.startswith("<")
    if is_readable and type(value).__repr__ is not object.__repr__:
        return text
    return _with_article(type(value).__name__)


def quoted(values: Iterable[object]) -> str:
    """Join names in quotes by commas, or return ``none``.

    >>> quoted(["age", "sex"]), quoted([])
    ("'age', 'sex'", 'none')
    """
    return ", ".join(repr(name) for name in values) or "none"


def near_names(word: str, names: Iterable[str], limit: int = 1) -> list[str]:
    """Find the names that a misspelt word may mean, nearest first.

    A name is near if few letters were left out, added, changed or swapped: one for every four letters, but at least one
    and at most three. Case, dashes and underscores are ignored. The word itself is never returned, since callers look
    for a replacement of a word that was rejected.

    Args:
        word: The misspelt word.
        names: Names that exist.
        limit: Largest number of names to return.

    >>> near_names("ditot", ["ditto", "fedavg"]), near_names("Fed-Avg", ["ditto", "fedavg"])
    (['ditto'], ['fedavg'])
    >>> near_names("fedpac", ["feddpa", "fedper"]), near_names("ditto", ["ditto"])
    ([], [])
    """
    spelling = _without_style(word)
    max_distance = min(3, max(1, len(spelling) // 4))
    distances: dict[str, int] = {}
    for name in names:
        other = _without_style(name)
        # The difference in length is a lower bound of the distance, which is slow to compute for a long list.
        if name == word or abs(len(other) - len(spelling)) > max_distance:
            continue
        distance = _edit_distance(spelling, other)
        # A word of one letter is within distance 1 of every other one.
        if distance <= max_distance and distance < len(spelling):
            distances[name] = distance
    return sorted(distances, key=distances.__getitem__)[:limit]


def _without_style(name: str) -> str:
    """Return a name in lower case, without dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def _edit_distance(first: str, second: str) -> int:
    """Return the number of insertions, deletions, changes and swaps of neighbours that turn one word into another.

    This is the optimal string alignment distance, by dynamic programming. Entry j of row i of its table is the distance
    between the first i letters of ``first`` and the first j letters of ``second``; three rows are stored at a time.
    """
    row_before_last: list[int] = []
    last_row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            deletion = last_row[j] + 1
            insertion = row[j - 1] + 1
            change = last_row[j - 1] + (letter != other)
            distance = min(deletion, insertion, change)
            is_swap = i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other
            if is_swap:
                distance = min(distance, row_before_last[j - 2] + 1)
            row.append(distance)
        row_before_last = last_row
        last_row = row
    return last_row[-1]


def dtype_name(dtype: object) -> str:
    """Return the name of a type of numbers of torch or NumPy without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
