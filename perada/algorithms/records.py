# SPDX-License-Identifier: Apache-2.0
"""The record of a run's algorithm, and the algorithm that a record describes."""

import inspect
from collections.abc import Mapping
from typing import Any

import perada.algorithms as algorithms
from perada.algorithms.base import Algorithm
from perada.algorithms.specs import class_path_of


def algorithm_record(algorithm: Algorithm) -> dict[str, Any]:
    """Return a description of an algorithm in plain types: its class, and the options that are plain or algorithms.

    >>> algorithm_record(algorithms.MTL(0.5))
    {'class': 'MTL', 'options': {'prox_strength': 0.5}}
    """
    algorithm_class = type(algorithm)
    class_name = algorithm_class.__name__
    if getattr(algorithms, class_name, None) is not algorithm_class:
        # Classes from outside perada are recorded with their module.
        class_name = class_path_of(algorithm_class)
    options: dict[str, Any] = {}
    wrapped: dict[str, Any] = {}
    for name in inspect.signature(algorithm_class).parameters:
        value = getattr(algorithm, name, None)
        if isinstance(value, bool | int | float | str):
            options[name] = value
        elif isinstance(value, Algorithm):
            wrapped[name] = algorithm_record(value)
    return {"class": class_name, "options": options | wrapped}


def algorithm_of(record: Mapping[str, Any]) -> Algorithm:
    """Re-create an algorithm from its record.

    Only perada's algorithms are created: a record comes from a file that may be from anyone, so it must not choose code
    to run.

    Args:
        record: Result of :func:`algorithm_record`.

    Raises:
        ValueError: If the class is not one of perada's algorithms, or does not have these options.
    """
    algorithm_class = getattr(algorithms, str(record["class"]), None)
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
        raise ValueError(
            f"the run was trained with the algorithm {record['class']!r}, which does not ship with perada; pass it as "
            "algorithm="
        )
    options = {}
    try:
        for name, value in record["options"].items():
            options[name] = algorithm_of(value) if isinstance(value, Mapping) else value
        algorithm: Algorithm = algorithm_class(**options)
    except TypeError as error:
        raise ValueError(
            f"the run's algorithm {record['class']} cannot be re-created ({error}); pass algorithm="
        ) from None
    return algorithm
