# SPDX-License-Identifier: Apache-2.0
"""Mistakes in YAML files are named with the file, the line and the remedy."""

import pytest
import yaml

from perada.deploy.site.file import read_site
from perada.system.yaml_files import YamlFileError, parse_yaml, read_yaml

WRONG = {
    "a tab": (b"model:\n\tlr_local: 1\n", 2, "a tab indents the line"),
    "a tab below Windows' ends of lines": (b"rounds: 3\r\nmodel:\r\n\tlr_local: 1\r\n", 3, "a tab indents the line"),
    "a tab behind a colon": (b"rounds:\t3\n", 1, "a tab where YAML allows only spaces"),
    "too little indentation": (b"model:\n    lr_local: 1\n  backbone: a\n", 3, "the indentation fits none"),
    "too much indentation": (b"rounds: 3\n  model: a\n", 2, "the indentation fits none"),
    "indentation of a list": (b"a:\n  - 1\n - 2\n", 3, "the indentation fits none"),
    "nothing": (b"", None, "is empty; add options"),
    "only a comment": (b"# rounds: 3\n", None, "is empty; add options"),
    "an image": (b"\x89PNG\r\n\x1a\n\x00\x00", 1, "not a text file"),
    "Latin-1": (b"rounds: 3\nname: caf\xe9\n", 2, "the byte 0xe9 is not UTF-8; save the text as UTF-8"),
    "UTF-16": ("rounds: 3".encode("utf-16"), 1, "encoded as UTF-16; save it as UTF-8"),
    "a control character": (b"rounds: 3\nname: a\x07\n", 2, "is not allowed in YAML; remove it"),
    "a key twice": (b"rounds: 3\nseed: 1\nrounds: 4\n", 3, "'rounds' is set twice, first in line 1; remove one"),
    "a key twice in a section": (b"model:\n  lr: 1\n  lr: 2\n", 3, "'lr' is set twice, first in line 2"),
    "a key twice in a list": (b"a:\n  - b: 1\n    b: 2\n", 3, "'b' is set twice"),
    "a key twice on one line": (b"a: {b: 1, b: 2}\n", 1, "'b' is set twice"),
    "a list": (b"- a\n", 1, "must hold options, NAME: VALUE, got a list"),
    "a text": (b"hello\n", 1, "must hold options, NAME: VALUE, got 'hello'"),
    "a number as a name": (b"rounds: 3\n1: a\n", 2, "option names must be strings, got 1"),
    "an open bracket": (b"a: 1\nmodel: [1, 2\nb: 3\n", 2, "the [ is not closed"),
    "an open quote": (b"a: 1\nmodel: 'b\nc: 3\n", 2, "the ' is not closed"),
    "two colons": (b"a: b: c\n", 1, "quote a value that contains ': '"),
    "no space behind a colon": (b"rounds:3\nmodel: a\n", 1, "there is no space after the colon"),
    "a sign": (b"a: @b\n", 1, "quote a value that begins with a special character"),
    "an object of Python": (b"a: 1\nb: !!python/object:os.system x\n", 2, "use a plain value"),
    "an unknown alias": (b"a: *b\n", 1, "quote a text that begins with * or &"),
    "two documents": (b"a: 1\n---\nb: 2\n", 2, "keep only one document"),
}


@pytest.mark.parametrize("content, line, says", WRONG.values(), ids=WRONG)
def test_file_line_and_remedy_are_named(tmp_path, content, line, says):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(YamlFileError) as rejected:
        read_yaml(tmp_path / "mine.yaml")
    message = str(rejected.value)
    place = f"mine.yaml, line {line}: " if line else "mine.yaml "
    assert f"{place}" in message and says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: {c: [1, 2], d: null}\n",
        "x: &x {a: 1}\ny: &y {b: 2}\nz: {<<: *x, <<: *y}\n",
        "a: |\n  a text\n  \twith a tab\n",
        "a: 'b: c'\nd: x # a: comment\n",
        "a:\n- b\n- c\n",
    ],
)
def test_what_is_right_is_read_as_pyyaml_reads_it(text):
    assert parse_yaml(text, "mine.yaml") == yaml.safe_load(text)


def test_a_mark_of_utf8_does_not_belong_to_the_first_name():
    assert parse_yaml(b"\xef\xbb\xbfrounds: 3", "mine.yaml") == {"rounds": 3}


def test_aliases_of_aliases_are_looked_at_once():
    rows = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    assert len(parse_yaml("\n".join(rows), "mine.yaml")) == 30


@pytest.mark.parametrize("content", [b"name: a\n\tdata: b\n", b"", b"name: a\nname: b\n", b"\x00"])
def test_the_file_of_a_site_is_judged_likewise(tmp_path, content):
    (tmp_path / "site.yaml").write_bytes(content)
    with pytest.raises(YamlFileError, match=r"site\.yaml"):
        read_site(tmp_path / "site.yaml")


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        ("trainer:\n  max_epochs: 3\nmodel\n  backbone: x\n", 3, "write model:"),
        ("trainer\n  max_epochs: 3\n", 1, "write trainer:"),
        ("trainer: {max_epochs: 3}\n---\ntrainer: {max_epochs: 4}\n", 2, "second document"),
    ],
)
def test_a_missing_colon_and_a_second_document_are_named(tmp_path, text, line, remedy):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(YamlFileError, match=rf"line {line}: .*{remedy}"):
        read_yaml(path)
