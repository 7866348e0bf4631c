# SPDX-License-Identifier: Apache-2.0
"""Algorithms by the names of papers' methods, for tests that go through all of them."""

from typing import Any

from perada.algorithms import ALGORITHMS, Algorithm, make_algorithm
from perada.algorithms.registry import Method, distinct_methods

NAMED: dict[str, Method] = {}
"""The methods that differ in their algorithm or its arguments: one or more for each algorithm."""
for _name, _method in distinct_methods().items():
    if _method.server_rule is None and "base" not in _method.options:
        NAMED[_name] = _method
assert {_method.algorithm for _method in NAMED.values()} == set(ALGORITHMS)


def make_method(name: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of a method, or of that name; an algorithm is returned as it is."""
    if isinstance(name, str) and name in NAMED:
        return NAMED[name].make(**options)
    return make_algorithm(name, **options)
