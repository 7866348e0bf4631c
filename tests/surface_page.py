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
PAGE = ROOT / "docs" / "api.md"
BASELINE = Path(__file__).with_name("surface.json")
HEAD = """\
# Stable interface

This page lists the names, options, commands, files and messages that keep their name and meaning in all 1.x releases.
`make surface` generates it from the code.

Everything else is internal, with or without a leading underscore: other modules, arguments and attributes, texts of
messages and logs, and the last digits of results. It may change in any release. The API reference also shows internal
modules, for contributors.

| release | changes |
|---|---|
| patch, 1.0.x | bug fixes; nothing on this page changes |
| minor, 1.x.0 | names, options, commands, keys and codes are added; deprecations begin to warn |
| major, 2.0.0 | deprecated names are removed |

- Versions follow [Semantic Versioning](https://semver.org/). Deprecated names warn for at least one minor version. The
  warning names the replacement and the major version in which the name is removed.
- The [changelog](../CHANGELOG.md) names each difference from the last release; a test enforces it.
- Files written by a 1.x release can be read by all later 1.x releases. Files contain their `format`; an unknown one is
  rejected, with both numbers.
- A server and sites with the same `protocol` number understand one another, whatever their releases. A different number
  is rejected, with both numbers.
- The path of a class that an option takes does not change, since `config.yaml` contains it.
- With a seed, the same release gives the same numbers on the same machine with the same libraries. Releases that change
  the numbers announce it in the changelog.
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
    out = ["## Names", "", "The API reference has the types. Members are stable only if the table lists them.", ""]
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
    result = {one.rpartition(".")[2]: parts for one, parts in own.items() if one.startswith(f"{path}.")}
    return code(f"{name}()" if parts[""].startswith("(") else name for name, parts in result.items())


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
    written = []
    starred = False
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
    rows = []
    named = []
    for name, parts in found.items():
        values, _, default = parts[""].rpartition(" = ") if " = " in parts[""] else (parts[""], "", "")
        if chosen := [part for part in parts if part]:
            named.append((code([name]), code(chosen)))
        rows.append((code([name]), values, code([default] if default else [])))
    text = (
        "Options of `trainer` are Lightning's; the listed ones are stable. [Recipes](recipes.md) explains their names."
    )
    return ["## Options of recipes", "", text, "",
            *table(["option", "values", "default"], rows),
            "Short names of classes, and classes that need no module path:", "",
            *table(["option", "names"], named)]  # fmt: skip


def commands(found: dict[str, Parts]) -> list[str]:
    text = "The exit status is 0 if a command succeeded. `perada study` and `perada pretrain` are internal."
    rows = []
    for name, parts in found.items():
        taken = code(part for part in parts if part)
        rows.append((code([name]), "; ".join(filter(None, [taken, parts.get("")]))))
    return ["## Commands", "", text, "", *table(["command", "arguments"], rows)]


def files(found: dict[str, Parts]) -> list[str]:
    text = "For a run with public images and test images. Other options add columns and keys ([glossary](glossary.md))."
    rows = []
    for name, parts in found.items():
        of_format = f"; {parts['']}" if parts.get("") else ""
        rows.append((RUNS.get(name, code([name])), code(part for part in parts if part) + of_format))
    return ["## Files of a run", "", text, "", *table(["file", "content"], rows)]


def messages(found: dict[str, Parts]) -> list[str]:
    text = "A message is a safetensors file with a header ([deployment](deploy.md)). The parties' files are here too."
    rows = [(code([name]), parts.get("") or code(parts)) for name, parts in found.items()]
    return ["## Messages of a deployment", "", text, "", *table(["message", "fields or values"], rows)]


def main(words: list[str]) -> None:
    """Write the page, and for a release the baseline."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        result = collect(Path(folder))
    PAGE.write_text(page(result), encoding="utf-8")
    if words[:1] == ["--release"]:
        content = {"release": words[1], "surface": result}
        BASELINE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
