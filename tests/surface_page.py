# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/api.md``: `make surface`; with ``--release 1.2.0`` also ``surface.json``, then that release's."""

import json
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from tests.surface import PACKAGES, Parts, Surface, collect

ROOT = Path(__file__).parents[1]
PAGE, BASELINE = ROOT / "docs" / "api.md", Path(__file__).with_name("surface.json")
HEAD = """\
# What is promised

`make surface` writes this page from the code. What stands here keeps its name and its meaning in all releases 1.x.

All else is internal, with an underscore or without: other modules, arguments and attributes, texts of messages and
logs, the last digits of a result. It may change in any release. The API reference also shows internal modules, for
those who work on perada.

| release | what may change |
|---|---|
| patch, 1.0.x | mistakes are mended; nothing on this page changes |
| minor, 1.x.0 | names, options, commands, keys and codes are added; what is to go begins to warn |
| major, 2.0.0 | what has warned is gone |

- Versions follow [Semantic Versioning](https://semver.org/). What is to go warns in one minor version at least, naming
  its replacement and the version in which it goes, which is a major one.
- Each difference to the last release is in the [changelog](../CHANGELOG.md) by name. A test compares.
- Files that a release 1.x wrote are read by all later ones 1.x. Files name their `format`; one that is not known is
  refused, with both numbers.
- A server and sites whose messages name the same `protocol` understand one another, whatever their releases. Another
  one is refused, with both numbers.
- A class that an option takes stays where it is, since `config.yaml` names its path.
- With a seed, the same release on the same machine with the same libraries makes the same numbers. A release that
  changes them says so in the changelog.
"""
RUNS = {
    "folder of a fit": "Files of `perada fit` and `perada.finetune`",
    "folder of Run.save": "Files of `Run.save`; `run.json` lists the client of each row of `personal.safetensors`",
    "folder of Run.export": "Files of `Run.export` and `perada export`; each folder in it is one of PEFT's",
}


def page(surface: Surface) -> str:
    """The page."""
    return "\n".join([HEAD, *names(surface["names"]), *options(surface["options"]), *commands(surface["commands"]),
                      *files(surface["files"]), *messages(surface["messages"])]).rstrip() + "\n"  # fmt: skip


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Rows of a table, and an empty line."""
    lines = [list(head), ["---" for _ in head], *map(list, rows)]
    return [
        f"| {' | '.join(cell.replace(' | ', ' or ') for cell in line)} |".replace("||", "| |") for line in lines
    ] + [""]


def code(words: Iterable[str]) -> str:
    """Words as code."""
    return ", ".join(f"`{word}`" for word in words)


def names(found: dict[str, Parts]) -> list[str]:
    out = ["## Names", "", "The API reference has the types. Members are promised only where the table lists them.", ""]
    others = [one for one in PACKAGES if one != "perada"]
    for package in PACKAGES:
        own = {path: parts for path, parts in found.items() if path.startswith(f"{package}.")}
        if package == "perada":
            own = {path: parts for path, parts in own.items() if not any(path.startswith(f"{one}.") for one in others)}
        tops = [path for path in own if path.count(".") == package.count(".") + 1]
        rows = [(code([path.rpartition(".")[2]]), call(own[path]), members(path, own)) for path in tops]
        out += [f"### {package}", "", *table(["name", "arguments", "members"], rows)]
    return out


def members(path: str, own: dict[str, Parts]) -> str:
    """Members of a class."""
    found = {one.rpartition(".")[2]: parts for one, parts in own.items() if one.startswith(f"{path}.")}
    return code(f"{name}()" if parts[""].startswith("(") else name for name, parts in found.items())


def call(parts: Parts) -> str:
    """What a function or a class is called with, without types; keys of a table; what an alias stands for."""
    whole = parts[""]
    if whole == "class":
        return "`finetune` and `Run.load` make it"
    if whole.startswith(("as ", "type ")):
        return f"{whole.split()[0]} `{whole.partition(' ')[2]}`"
    if not whole.startswith(("(", "class")):
        return f"{whole} of {code(key for key in parts if key)}"
    by_place = whole[whole.index("(") + 1 : whole.index(")")].split(", ")
    written, starred = [], False
    for name, text in parts.items():
        if not name:
            continue
        if name not in by_place and not name.startswith("*") and not starred:
            written.append("*")
            starred = True
        default = text.rpartition(" = ")[2] if " = " in text else ""
        written.append(f"{name}={default}" if default else name)
    return f"`{', '.join(written)}`" if written else ""


def options(found: dict[str, Parts]) -> list[str]:
    rows, named = [], []
    for name, parts in found.items():
        values, _, default = parts[""].rpartition(" = ") if " = " in parts[""] else (parts[""], "", "")
        if chosen := [part for part in parts if part]:
            named.append((code([name]), code(chosen)))
        rows.append((code([name]), values, code([default] if default else [])))
    text = (
        "Options of `trainer` are Lightning's; these have a meaning here. [Recipes](recipes.md) explains their names."
    )
    return ["## Options of recipes", "", text, "",
            *table(["option", "values", "default"], rows),
            "Names that stand for classes, and classes that are known by their names alone:", "",
            *table(["option", "names"], named)]  # fmt: skip


def commands(found: dict[str, Parts]) -> list[str]:
    text = "The exit status is 0 if a command did what was asked. `perada study` and `perada pretrain` are internal."
    rows = []
    for name, parts in found.items():
        taken = code(part for part in parts if part)
        rows.append((code([name]), "; ".join(filter(None, [taken, parts.get("")]))))
    return ["## Commands", "", text, "", *table(["command", "takes"], rows)]


def files(found: dict[str, Parts]) -> list[str]:
    text = "Of a run with public images and test images. Other options add columns and keys ([glossary](glossary.md))."
    rows = []
    for name, parts in found.items():
        of_format = f"; {parts['']}" if parts.get("") else ""
        rows.append((RUNS.get(name, code([name])), code(part for part in parts if part) + of_format))
    return ["## Files of a run", "", text, "", *table(["file", "what is in it"], rows)]


def messages(found: dict[str, Parts]) -> list[str]:
    text = "A message is a safetensors file with a header ([deployment](deploy.md)). The parties' files are here too."
    rows = [(code([name]), parts.get("") or code(parts)) for name, parts in found.items()]
    return ["## Messages of a deployment", "", text, "", *table(["what", "fields or values"], rows)]


def main(words: list[str]) -> None:
    """Write the page, and for a release the baseline."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = collect(Path(folder))
    PAGE.write_text(page(found), encoding="utf-8")
    if words[:1] == ["--release"]:
        content = {"release": words[1], "surface": found}
        BASELINE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
