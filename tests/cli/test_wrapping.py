# SPDX-License-Identifier: Apache-2.0
"""Help at the width of the terminal, and the words that ask for it."""

import re

import pytest

from perada.cli import main
from perada.cli.options import stored_commands
from perada.cli.wrapping import rewrapped


@pytest.mark.parametrize("command", ["fit", "export", "data inspect", "compare"])
@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.every_value
def test_a_help_has_the_same_words_at_any_width(command, width):
    lines = stored_commands()["commands"][command]["help"]
    text = rewrapped(lines, width)
    assert text.split() == " ".join(lines).split()
    for line in text.splitlines():
        # As in argparse, an option of the usage is not broken.
        is_one_option = re.fullmatch(r"\[--\w+ [^ ]+\]", line.strip()) is not None
        assert len(line) <= min(width, 120) or " " not in line.strip() or is_one_option
    # Each option still begins a line.
    options = [line.split()[0] for line in lines if line.startswith("  -")]
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  -")] == options


def printed_text(capsys, *words):
    """What the program prints before it ends with status 0."""
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("help", "--help"),
        ("help export", "export --help"),
        ("export help", "export --help"),
        ("help deploy init", "deploy init --help"),
        ("help deploy", "deploy"),
        ("version", "--version"),
    ],
)
def test_help_and_version_are_commands_too(capsys, words, same):
    text = printed_text(capsys, *words.split())
    assert len(text) > 50
    assert text == printed_text(capsys, *same.split())


def test_help_of_an_unknown_command_proposes_one():
    with pytest.raises(ValueError, match="'fit'"):
        main(["help", "fti"])
