# SPDX-License-Identifier: Apache-2.0
"""Options of types that cannot be used are one line that names option, value and remedy."""

import pytest

import perada

WRONG = [
    ("seed", 0.5),
    ("seed", True),
    ("seed", -1),
    ("seed", "a"),
    ("seed", None),
    ("algorithm", None),
    ("local_steps", True),
    ("local_steps", "2"),
    ("local_epochs", float("inf")),
    ("server_rule", {}),
    ("adapter_options", 3),
    ("algorithm_options", [1]),
    ("torch_compile", "x"),
    ("pretrained", 3),
    ("ckpt_path", 3),
    ("resume_allow", "lr_local"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_one_line_says_what_is_wrong(tiny, name, value):
    with pytest.raises(ValueError, match=rf"^{name}=") as raised:
        perada.finetune(tiny.net(), tiny.data(), **tiny.options | {name: value})
    said = str(raised.value)
    assert said.startswith(f"{name}={value!r} ")
    assert "; " in said
    assert "\n" not in said
