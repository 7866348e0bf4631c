# SPDX-License-Identifier: Apache-2.0
"""What the range checks let pass and what they reject, and how they say it."""

import math
import sys

import numpy as np
import pytest

from perada.core.checks import check_choice, check_installed, check_integer, check_number

NEVER = [math.nan, math.inf, -math.inf, True, "1", None, [1], 1 + 0j]


def rejection_message(check, *arguments, **options):
    with pytest.raises(ValueError) as error:
        check("option", *arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("value", NEVER)
def test_what_is_not_a_finite_number_is_rejected(value):
    assert rejection_message(check_number, value) == f"option must be a finite number, got {value!r}"
    assert rejection_message(check_integer, value, -5) == f"option must be an integer >= -5, got {value!r}"


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.int64(1)])
def test_numbers_of_numpy_count(number):
    check_number("option", number, ge=1, le=1)
    if not isinstance(number, float | np.floating):
        check_integer("option", number, 1, le=1)


def test_the_ends_of_a_range():
    check_number("option", 0, ge=0, lt=1)
    check_number("option", 1, gt=0, le=1)
    assert ">= 0 and < 1, got" in rejection_message(check_number, 1, ge=0, lt=1)
    assert ">= 0 and < 1, got" in rejection_message(check_number, -1e-9, ge=0, lt=1)
    assert "> 0 and <= 1, got" in rejection_message(check_number, 0, gt=0, le=1)
    assert "> 0 and < 1, got" in rejection_message(check_number, 1, gt=0, lt=1)
    assert ">= 2 and <= 3, got" in rejection_message(check_integer, 4, 2, le=3)
    assert ">= 2 and <= 3, got" in rejection_message(check_integer, 1, 2, le=3)
    assert rejection_message(check_integer, 2.0) == "option must be an integer >= 1, got 2.0"


@pytest.mark.parametrize("value", [np.full((3, 3), math.nan), np.arange(10_000).reshape(100, 100)])
def test_values_that_print_several_lines_are_named_in_one(value):
    for check in (check_number, check_integer):
        assert rejection_message(check, value).startswith("option must be ")
        assert len(rejection_message(check, value)) < 150


def test_what_else_is_let_pass():
    check_number("option", None, gt=0, optional=True)
    check_integer("option", None, optional=True)
    check_integer("option", "full", also=["full"])
    assert (
        rejection_message(check_integer, "all", also=["full"]) == "option must be an integer >= 1 or 'full', got 'all'"
    )
    assert rejection_message(check_number, -1, gt=0, optional=True, hint="why") == (
        "option must be a finite number > 0 or None, got -1; why"
    )


def test_choices_are_told_apart_by_their_type():
    check_choice("option", "a", ["a", "b"])
    check_choice("option", False, [True, False])
    assert rejection_message(check_choice, 1, [True, False]) == "option must be one of True, False, got 1"
    assert (
        rejection_message(check_choice, "c", ["a", "b"], hint="why") == "option must be one of 'a', 'b', got 'c'; why"
    )


def test_libraries_that_are_missing_are_named_and_none_is_imported(monkeypatch, tmp_path):
    (tmp_path / "perada_there.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    check_installed("a test", "tune", "perada_there", "json")
    monkeypatch.setitem(sys.modules, "json", None)
    with pytest.raises(ModuleNotFoundError) as rejection:
        check_installed("a test", "tune", "perada_gone", "perada_there", "json")
    assert str(rejection.value) == (
        "a test needs perada_gone and json, which are not installed; pip install 'perada[tune]'"
    )
