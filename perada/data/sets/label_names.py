# SPDX-License-Identifier: Apache-2.0
"""Names of classes that are probably no classes: missing labels, numbers written in two ways, and measurements."""

import re
import warnings
from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np

from perada.core.text import abbreviated, visible_form
from perada.data.sets.label_numbers import find_shifted_numbers

_NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
"""A number with a point or a comma for decimals."""
_MISSING = frozenset(
    {"", "-", "--", "---", "?", "??", ".", "na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "-nan", "null", "<null>"}
    | {"(null)", r"\n", "#n/d", "#nv", "#n/b", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!"}
)
"""How programs and people write that there is no label, in lower case; Excel writes ``#N/A`` in its user's language."""
_SODIUM = "Na"
_MISSING_OR_NONE = frozenset({"none", "nil", "missing", "undefined", "unknown", "unlabelled", "unlabeled"})
"""Words that may also be a class, such as the finding "none", in lower case."""
_WRITTEN_BY_PYTHON = "None"
_MAX_CLASSES = 10
"""A message lists all classes if there are at most this many."""


def number_of(name: str) -> Decimal | None:
    """Return the number that a name is, with a point or a comma for decimals; None if it is none.

    >>> number_of("01") == number_of("1,0") == number_of(" 1.0 ") == 1
    True
    """
    text = visible_form(name)
    if _NUMBER.fullmatch(text) is None:
        return None
    return Decimal(text.replace(",", "."))


def is_missing(name: str) -> bool:
    """Return whether a name can only mean that there is no label.

    >>> is_missing("N/A"), is_missing("None"), is_missing("none"), is_missing("Na")
    (True, True, False, False)
    """
    text = visible_form(name)
    return text == _WRITTEN_BY_PYTHON or (text.lower() in _MISSING and text != _SODIUM)


def check_label_names(source: str, names_of_images: Sequence[str], client_names: Sequence[str] | None = None) -> None:
    """Check the classes of images that the user has not declared.

    Args:
        source: Name of the source for messages.
        names_of_images: Name of each label: one for each image, or all labels of all images.
        client_names: Client of each of these labels; None if there are none.

    Raises:
        ValueError: If a name marks a missing label, two names are the same number, or most labels are different numbers
            with a fraction.
    """
    # There may be millions of images, so their labels are sorted only for an error.
    names = sorted({*names_of_images})
    _check_missing(source, names)
    numbers = {name: number_of(name) for name in names}
    _check_same_numbers(source, numbers, names_of_images, client_names)
    if names and all(number is not None for number in numbers.values()):
        _check_measurements(source, numbers, len(names_of_images))
    if client_names is not None:
        names_of_clients: dict[str, set[str]] = {}
        for name, client in {*zip(names_of_images, client_names, strict=True)}:
            names_of_clients.setdefault(client, set()).add(name)
        _warn_of_other_names(names_of_clients)
        _warn_of_shifted_numbers(names_of_clients, numbers)


def _check_missing(source: str, class_names: Sequence[str]) -> None:
    """Raise a ValueError for names that mark missing labels, and warn of those that may."""
    missing = [name for name in class_names if is_missing(name)]
    if missing:
        raise ValueError(
            f"{source} has the class {missing[0]!r}, which marks a missing label: fill the label in, or take these "
            f"images out; if it is a class, declare {_declare_classes(class_names)}"
        )
    others = {visible_form(name).lower() for name in class_names}
    doubtful = [name for name in class_names if visible_form(name).lower() in _MISSING_OR_NONE]
    counts_from_zero = others - {"-1"} and all(re.fullmatch(r"\d+", name) for name in others - {"-1"})
    if "-1" in others and counts_from_zero:
        doubtful.append("-1")
    if doubtful:
        warnings.warn(
            f"{source} has the class {doubtful[0]!r}: if it marks a missing label, take these images out; if it is a "
            f"class, declare {_declare_classes(class_names)} to confirm it",
            stacklevel=4,
        )


def _warn_of_other_names(names_of_clients: Mapping[str, set[str]]) -> None:
    """Warn of a client that seems to write the classes of the others in another way, such as ``yes`` and ``no``.

    Args:
        names_of_clients: The names of the classes of each client.
    """
    clients_of_names: dict[str, set[str]] = {}
    for client, names in names_of_clients.items():
        for name in names:
            clients_of_names.setdefault(name, set()).add(client)
    for client, own_names in sorted(names_of_clients.items()):
        is_alone = all(len(clients_of_names[name]) == 1 for name in own_names)
        other_names = {name for names in names_of_clients.values() for name in names} - own_names
        # Clients of one class each may be on purpose, such as one for each kind of scanner.
        if is_alone and len(own_names) > 1 and other_names:
            warnings.warn(
                f"client {client!r} has the classes {abbreviated(sorted(own_names))}, but no class of any other "
                f"client ({abbreviated(sorted(other_names))}): write each class in the same way at all clients",
                stacklevel=4,
            )
            return


def _warn_of_shifted_numbers(
    names_of_clients: Mapping[str, set[str]], number_of_label: Mapping[str, Decimal | None]
) -> None:
    """Warn of clients whose classes are numbers from 1, where those of others are numbers from 0.

    Args:
        names_of_clients: The names of the classes of each client.
        number_of_label: The number that each name is.
    """
    if any(number is None or number % 1 for number in number_of_label.values()):
        return
    numbers_of_clients: dict[str, set[int]] = {}
    for client, names in sorted(names_of_clients.items()):
        numbers_of_clients[repr(client)] = {int(number_of_label[name] or 0) for name in names}
    shift = find_shifted_numbers(numbers_of_clients)
    if shift is not None:
        names_in_order = sorted(number_of_label, key=lambda name: number_of_label[name] or 0)
        warnings.warn(shift.describe(f"declare {_declare_classes(names_in_order)}"), stacklevel=4)


def _declare_classes(class_names: Sequence[str]) -> str:
    """Return the option that declares classes, with their names if there are few."""
    if len(class_names) <= _MAX_CLASSES:
        return f"classes: {list(class_names)}"
    return "all classes with the option classes"


def _check_same_numbers(
    source: str,
    number_of_label: Mapping[str, Decimal | None],
    names_of_images: Sequence[str],
    client_names: Sequence[str] | None,
) -> None:
    """Raise a ValueError if names are the same number, such as ``1``, ``1.0`` and ``01``; see check_label_names."""
    names_of_number: dict[Decimal, list[str]] = {}
    for name, number in number_of_label.items():
        if number is not None:
            names_of_number.setdefault(number, []).append(name)
    for variants in names_of_number.values():
        if len(variants) < 2:
            continue
        owners = ""
        if client_names is not None:
            column = np.asarray(names_of_images, dtype=object)
            descriptions = []
            for name in variants:
                clients_with_name = np.unique(np.asarray(client_names)[column == name]).tolist()
                descriptions.append(f"{name!r} at {abbreviated(clients_with_name)}")
            owners = f" ({', '.join(descriptions)})"
        raise ValueError(
            f"{source} has the classes {' and '.join(map(repr, variants))}, which are the same number{owners}: write "
            f"it in one way; if they are different classes, declare {_declare_classes([*number_of_label])}"
        )


def _check_measurements(source: str, number_of_label: Mapping[str, Decimal | None], num_labels: int) -> None:
    """Raise a ValueError if most labels are different numbers with a fraction, and warn of many repeated ones."""
    fractions = [name for name, number in number_of_label.items() if number is not None and number % 1]
    if not fractions:
        return
    num_values = len(number_of_label)
    problem = f"{source} has {num_values} different numbers as classes of {num_labels} images, such as {fractions[0]!r}"
    remedy = "to predict them, write them in a column of a table, and name it as numbers, with the task Regression"
    if any("," in name for name in fractions):
        remedy += " and decimal: ','"
    if 2 * len(number_of_label) > num_labels:
        raise ValueError(f"{problem}: {remedy}; if they are classes, declare {_declare_classes([*number_of_label])}")
    # A few numbers may be grades, but those of a measuring program have a comma in half of Europe.
    if len(number_of_label) > _MAX_CLASSES or any("," in name for name in fractions):
        warnings.warn(
            f"{problem}: {remedy}; if they are classes, declare {_declare_classes([*number_of_label])}", stacklevel=4
        )
