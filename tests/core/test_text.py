# SPDX-License-Identifier: Apache-2.0
"""How messages describe the values that they reject."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from perada.core.checks import OptionError, check_choice, check_integer, check_number, checked_names
from perada.core.text import printable, printable_json, printable_lines, value_text
from perada.data import IID, Digits

PLAIN = {
    "None": None,
    "'a.png'": Path("a.png"),
    "'sgd'": np.str_("sgd"),
    "True": np.bool_(True),
    "0.1": np.float32(0.1),
    "-3": np.int64(-3),
    "nan": np.float64("nan"),
    "IID(num_clients=3)": IID(3),
    "{'r': [8, (1,)]}": {"r": [8, (1,)]},
    "an empty set": set(),
}
DESCRIBED = {
    "a tensor of the number 0.1 (pass its .item())": torch.tensor(0.1, requires_grad=True),
    "a tensor of the number 3 (pass its .item())": torch.tensor(3),
    "a tensor": torch.empty((), device="meta"),
    "a tensor of shape (2, 3)": torch.zeros(2, 3),
    "an array of shape (2,)": np.zeros(2),
    "a TensorDataset": TensorDataset(torch.zeros(1)),
    "[a TensorDataset]": [TensorDataset(torch.zeros(1))],
    "an object": object(),
    "a Sequential": nn.Sequential(nn.ReLU()),
    "the class Digits (create it: Digits(...))": Digits,
    "the function value_text": value_text,
    "the module numpy": np,
}


HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x00\x9b31m\u202e\u2066\u200f\ufeff\u2028\U000e0041"
"""Commands of terminals, C1 codes, changes of direction, invisible letters and other line breaks."""


def test_nothing_that_a_terminal_or_browser_obeys_is_shown():
    for shown in (printable(HOSTILE), printable_lines(HOSTILE)):
        assert len(shown) == len(HOSTILE)
        assert shown.isprintable()
        assert shown.replace("?", "") == "]0;title[2J31m"
    text = "Gdańsk 赤\u00a0十字\n\tone\u3000two"
    assert printable_lines(text) == text
    assert printable(text).count("?") == 4


def test_json_lines_keep_their_meaning():
    text = json.dumps({"site": HOSTILE, "name": "Gdańsk"}, ensure_ascii=False)
    assert printable_json(text).isprintable()
    assert "Gdańsk" in printable_json(text)
    assert json.loads(printable_json(text)) == json.loads(text)


@pytest.mark.parametrize(("text", "value"), [*PLAIN.items(), *DESCRIBED.items()])
def test_values_are_described_in_one_line_without_addresses(text, value):
    assert value_text(value) == text


@pytest.mark.parametrize("value", ["x" * 1000, list(range(10**6)), {f"key {index}": index for index in range(1000)}])
def test_long_values_are_cut(value):
    text = value_text(value)
    assert len(text) <= 80
    assert text.startswith(repr(value)[:50])


def test_an_object_whose_repr_fails_is_described_by_its_class():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert value_text(Broken()) == "a Broken"


@pytest.mark.parametrize("value", DESCRIBED.values(), ids=DESCRIBED)
def test_options_reject_other_objects_in_words(value):
    for check in (check_number, check_integer):
        with pytest.raises(OptionError) as error:
            check("lr", value)
        assert str(error.value).endswith(f"got {value_text(value)}")
    with pytest.raises(OptionError) as error:
        check_choice("optimizer", value, ["sgd", "adam"])
    assert " at 0x" not in str(error.value)


def test_flags_and_words_of_numpy_are_accepted():
    check_choice("flip", np.bool_(False), [False, True])
    check_choice("optimizer", np.str_("sgd"), ["sgd", "adam"])
    with pytest.raises(OptionError, match=r"got 1$"):
        check_choice("flip", np.int64(1), [False, True])


def test_names_come_from_any_ordered_collection():
    for names in (["a", "b"], ("a", "b"), {"a": 0, "b": 1}.keys(), np.array(["a", "b"]), iter(["a", "b"])):
        checked = checked_names("classes", names)
        assert checked == ["a", "b"]
        assert {type(name) for name in checked} == {str}
    for wrong in ("ab", b"ab", {"a", "b"}, {0: "a"}, ["a", None], ["a", ""], [0, 1], [float("nan"), "b"], [["a"]], 3):
        with pytest.raises(
            OptionError, match=r"^classes must be a list of names \(non-empty strings\), at least one, or None, got "
        ):
            checked_names("classes", wrong)
