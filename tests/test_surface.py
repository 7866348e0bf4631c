# SPDX-License-Identifier: Apache-2.0
"""What is promised (docs/api.md): the page is the code's, no change is without its line in the changelog."""

import ast
import copy
import inspect
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import perada
from perada.cli.parser import SECTIONS
from perada.deploy import protocol, transport
from tests.surface import changes, collect, commands, messages, names, options, unsaid
from tests.surface_page import BASELINE, PAGE, page

ROOT = Path(__file__).parents[1]
program = import_module("perada.cli.main")  # `perada.cli` has a function of that name
REMEDY = (
    "write it into CHANGELOG.md under its name in backticks, and run `make surface`; a former name goes on working, "
    "with a warning by typing_extensions.deprecated, until the next major release"
)


@pytest.fixture(scope="module")
def now(tmp_path_factory):
    return collect(tmp_path_factory.mktemp("run"))


def test_the_page_is_what_the_code_promises(now):
    assert PAGE.read_text() == page(now), "run `make surface`"


def test_what_has_changed_since_the_last_release_is_in_the_changelog(now):
    last = json.loads(BASELINE.read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(last['release'])}\]", changelog, re.MULTILINE)  # what is above it is new
    result = unsaid(changes(last["surface"], now), changelog, last["release"])
    assert not result, "\n".join([REMEDY, *(f"{one.where}: {one.before} -> {one.now}" for one in result)])


def test_nothing_has_changed_where_nothing_has(now):
    assert changes(now, copy.deepcopy(now)) == []
    assert changes(now, json.loads(json.dumps(now))) == []


# Each plants a change into the library.


def a_name_goes(patch):
    patch.setattr(perada.server, "__all__", [name for name in perada.server.__all__ if name != "Krum"])


def a_default_changes(patch):
    patch.setitem(perada.finetune.__kwdefaults__, "rounds", 11)


def an_argument_moves(patch):
    def personalize(data, run, name=None, **options): ...

    personalize.__module__ = perada.personalize.__module__
    personalize.__signature__ = inspect.signature(perada.personalize)
    first, second, *others = personalize.__signature__.parameters.values()
    personalize.__signature__ = personalize.__signature__.replace(parameters=[second, first, *others])
    patch.setattr(perada, "personalize", personalize)


def a_method_goes(patch):
    patch.delattr(perada.Run, "save")


def an_option_of_recipes_comes(patch):
    class Loop(perada.FederatedLoop):
        pass

    told = inspect.signature(perada.FederatedLoop)
    more = inspect.Parameter("staleness", inspect.Parameter.KEYWORD_ONLY, default=3)
    Loop.__signature__ = told.replace(parameters=[*told.parameters.values(), more])
    patch.setitem(SECTIONS, "federated", Loop)


def an_option_of_a_command_comes(patch):
    def cp(parser, words):
        parser.add_argument("--link", action="store_true")
        copied(parser, words)

    copied = program.cp
    patch.setattr(program, "cp", cp)


def a_command_goes(patch):
    # Not patch.delitem, which puts the command back at the end: other tests know the order.
    others = {name: entry for name, entry in program.COMMANDS.items() if name != "push"}
    patch.setattr(program, "COMMANDS", others)


def the_protocol_changes(patch):
    patch.setattr(protocol, "PROTOCOL", 2)


def a_code_comes(patch):
    patch.setattr(transport, "FAILURE_CODES", (*transport.FAILURE_CODES, "asleep"))


READ = {"names": names, "options": options, "commands": commands, "messages": messages}
PLANTED = {
    a_name_goes: ("names: perada.server.Krum", "Krum"),
    a_default_changes: ("names: perada.finetune(rounds)", "rounds"),
    an_argument_moves: ("names: perada.personalize", "personalize"),
    a_method_goes: ("names: perada.Run.save", "save"),
    an_option_of_recipes_comes: ("options: federated.staleness", "staleness"),
    an_option_of_a_command_comes: ("commands: perada cp(--link)", "--link"),
    a_command_goes: ("commands: perada push", "push"),
    the_protocol_changes: ("messages: protocol", "protocol"),
    a_code_comes: ("messages: failure(asleep)", "asleep"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_change_is_found_and_must_be_in_the_changelog_of_the_next_release(plant, now, monkeypatch):
    where, word = PLANTED[plant]
    section = where.partition(":")[0]
    plant(monkeypatch)
    result = changes(now, now | {section: READ[section]()})
    assert [(one.where, one.word) for one in result] == [(where, word)]
    for text in ("", f"{word} without backticks", f"`{word}s` and `un{word}`", f"## [1.0.0]\n\n- `{word}`, of old"):
        assert unsaid(result, f"## [unreleased]\n\n{text}\n", "1.0.0") == result, text
    for text in (f"`{word}` is new", f"`perada x {word}=3`\n\n## 1.0.0 - 2026"):
        assert unsaid(result, f"## [unreleased]\n\n{text}\n", "1.0.0") == [], text


def test_a_key_of_a_file_that_goes_is_found(now):
    later = copy.deepcopy(now)
    del later["files"]["run.json: info"]["classes"]
    del later["files"]["partition.json"]
    assert [one.word for one in changes(now, later)] == ["partition.json", "classes"]


def asked_for(code):
    """Names of perada's that a block of Python imports, or takes from the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "perada":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "perada")
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"perada(\.\w+)+", path := ast.unparse(node)):
            yield path


def test_users_are_shown_only_names_that_are_promised(now):
    """By all Python in the documentation: it is what they copy."""
    known = {"perada", *now["names"]}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        (path.name, code)
        for path in pages
        for code in re.findall(r"```python\n(.*?)^```", path.read_text(), re.S | re.M)
    ]
    assert len(blocks) > 20
    assert [(name, asked) for name, code in blocks for asked in asked_for(code) if asked not in known] == []


@pytest.mark.parametrize(
    "code", ["from perada.core.states import stack", "import perada.engine", "perada.api.finetune()"]
)
def test_a_name_that_is_not_promised_is_seen(code, now):
    assert set(asked_for(code)) - {"perada", *now["names"]}
