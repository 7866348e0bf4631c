# SPDX-License-Identifier: Apache-2.0
"""Writes the generated tables of the documentation: `make tables`.

A page has a table between ``<!-- generated: python -m tests.doc_tables NAME [ARGUMENT] -->`` and
``<!-- /generated -->``. Tables come from docstrings, signatures and the first comments of recipes.
"""

import ast
import importlib
import inspect
import pydoc
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perada.algorithms import ALGORITHMS
from perada.algorithms.registry import Method, distinct_methods
from perada.server import SERVER_RULES
from tests.algorithms.table1 import TABLE

ROOT = Path(__file__).parents[1]
COMMAND = "python -m tests.doc_tables"
BLOCK = re.compile(rf"(<!-- generated: {COMMAND} (\w+) ?([\w./]*) -->\n)(.*?)(<!-- /generated -->\n)", re.DOTALL)
CODE = re.compile(r'"(\w+)",  # (.*)')
SUFFIXES = {"Counter": "_total", "Info": "_info", "Summary": "_sum"}
PAPER_TABLE = re.compile(r"(?P<paper>PerAda|Fed-ensemble), (?P<table>(?:Table|Figure) \d+)")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(text: str) -> str:
    """Return the text of a docstring as one cell of a table."""
    text = " ".join(text.split())
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("||", "‖").replace("|", "\\|").replace("<", "&lt;")


def summary(documented: Any) -> str:
    """Return the first paragraph of a docstring."""
    return cell(inspect.getdoc(documented).split("\n\n")[0])


def source(documented: Any) -> str:
    """Return the link to the paper that a docstring names as its source."""
    match = re.search(r"Source:\s+(\[[^\]]+\]\([^)]+\))", inspect.getdoc(documented))
    return " ".join(match[1].split()) if match else ""


def entries(documented: Any, section: str) -> list[tuple[str, str]]:
    """Return the names and descriptions of a section of a Google docstring."""
    doc = inspect.getdoc(documented)
    match = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    if match is None:
        return []
    result = re.findall(r"^    (\*{0,2}\w[\w, ]*): ((?:.*\n?)(?:^ {8}.*\n?)*)", match[1], re.MULTILINE)
    return [(", ".join(f"`{name.strip()}`" for name in names.split(",")), cell(text)) for names, text in result]


def call(name: str, documented: Any, options: dict[str, Any]) -> str:
    """Return the call that creates an object with its default arguments, except for some options."""
    arguments = []
    for parameter in inspect.signature(documented).parameters.values():
        value = repr(options.get(parameter.name, parameter.default)).replace("'", '"')
        arguments.append(f"{parameter.name}={value}")
    return f"`{name}({', '.join(arguments)})`"


def millions(count: int, printed: float | None) -> str:
    """Return a number of parameters in millions, with what the paper prints in brackets."""
    digits = 2 if count >= 1e6 else 3
    text = f"{count / 1e6:.{digits}f}" if count else "0"
    return text if printed is None else f"{text} ({printed})"


def counts(method: str) -> list[str]:
    """Return the cells of the parameters that a client of a method trains and sends."""
    trained, sent, printed_trained, printed_sent = TABLE[method]
    return [millions(trained, printed_trained), millions(sent, printed_sent)]


def algorithms(_argument: str) -> str:
    """Return the table of algorithms, each followed by its variants that are methods of papers."""
    variants: dict[str, list[Method]] = {name: [] for name in ALGORITHMS}
    for method in distinct_methods().values():
        if method.server_rule is None and method.name in TABLE:
            variants[method.algorithm].append(method)

    rows = []
    for name, algorithm in ALGORITHMS.items():
        plain = call(algorithm.__name__, algorithm, {})
        counts_by_call = {}
        for method in variants[name]:
            counts_by_call[call(algorithm.__name__, algorithm, method.options)] = counts(method.name)
        text = [summary(algorithm), source(algorithm)]
        rows.append([f"`{name}`", plain, *text, *counts_by_call.get(plain, ["", ""])])
        for method in variants[name]:
            variant = call(algorithm.__name__, algorithm, method.options)
            if variant != plain:
                rows.append([f"`method/{method.name}`", variant, "", "", *counts_by_call[variant]])
    return table(["name", "class", "content", "source", "T", "S"], rows)


def rules(_argument: str) -> str:
    """Return the table of server rules."""
    rows = []
    for name, rule in SERVER_RULES.items():
        rows.append([f"`{name}`", call(rule.__name__, rule, {}), summary(rule), source(rule)])
    return table(["name", "class", "result", "source"], rows)


def attributes(path: str) -> str:
    """Return the table of a class's options or attributes."""
    documented = pydoc.locate(path)
    return table(["name", "meaning"], entries(documented, "Attributes") + entries(documented, "Args"))


def hooks(path: str) -> str:
    """Return the table of a class's public methods and properties."""
    rows = []
    for name, member in vars(pydoc.locate(path)).items():
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            rows.append([f"`{name}`", summary(member)])
        elif inspect.isfunction(member):
            arguments = list(inspect.signature(member).parameters)[1:]
            rows.append([f"`{name}({', '.join(arguments)})`", summary(member)])
    return table(["method", "result"], rows)


def subclasses(path: str) -> dict[str, type]:
    """Return the subclasses of a class that its package exports, in alphabetical order."""
    package = importlib.import_module(".".join(path.split(".")[:2]))
    base = pydoc.locate(path)
    exported = {name: getattr(package, name) for name in sorted(package.__all__)}
    return {
        name: member
        for name, member in exported.items()
        if inspect.isclass(member) and issubclass(member, base) and member is not base
    }


def classes(path: str) -> str:
    """Return the table of a class's subclasses."""
    return table(["class", "content"], [[f"`{name}`", summary(member)] for name, member in subclasses(path).items()])


def datasets(path: str) -> str:
    """Return the table of image sets with their descriptions and folders; options are left out."""
    rows = []
    for name, member in subclasses(path).items():
        description = re.split(r"\n\nArgs:", inspect.getdoc(member))[0]
        root = dict(entries(member, "Args")).get("`root`", "")
        rows.append([f"`{name}`", cell(description), root])
    return table(["class", "content", "`root`"], rows)


def codes(path: str) -> str:
    """Return the table of the values of a ``Literal``, which the source explains by a comment each."""
    module, _, name = path.rpartition(".")
    source_text = inspect.getsource(importlib.import_module(module))
    literal = re.search(rf"^{name} = Literal\[\n(.*?)^\]", source_text, re.DOTALL | re.MULTILINE)
    return table(["word", "meaning"], [[f"`{word}`", cell(text)] for word, text in CODE.findall(literal[1])])


def prometheus(path: str) -> str:
    """Return the table of the metrics that a module creates for Prometheus."""
    tree = ast.parse(inspect.getsource(importlib.import_module(path)))
    texts = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            texts[node.targets[0].id] = node.value.value
    rows = []
    for node in ast.walk(tree):
        kind = node.func.id.removesuffix("MetricFamily") if _makes_metric(node) else None
        if kind is None:
            continue
        name = node.args[0].value
        description = node.args[1]
        labels = [keyword.value for keyword in node.keywords if keyword.arg == "labels"]
        shown = name + SUFFIXES.get(kind, "")
        if labels:
            shown += "{" + ", ".join(label.value for label in labels[0].elts) + "}"
        text = texts[description.id] if isinstance(description, ast.Name) else description.value
        rows.append([f"`{shown}`", text])
    return table(["metric", "meaning"], rows)


def _makes_metric(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id.endswith("MetricFamily")


def first_sentence(recipe: Path) -> str:
    """Return the first line of a recipe's comment."""
    return cell(recipe.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))


def link(recipe: Path) -> str:
    """Return a link from a page of ``docs/`` to a recipe."""
    return f"[`{recipe.stem}`](../{recipe.relative_to(ROOT).as_posix()})"


def recipes(folder: str) -> str:
    """Return the table of a folder's recipes."""
    paths = sorted((ROOT / folder).glob("*.yaml"))
    return table(["recipe", "content"], [[link(path), first_sentence(path)] for path in paths])


def papers(_argument: str) -> str:
    """Return the table of the papers' tables and figures, with the files that repeat them."""
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "recipes" / "paper").glob("*.yaml")):
        match = PAPER_TABLE.match(first_sentence(path))
        files.setdefault(
            f"{match['paper']}, {match['table']}" if match else "Differences from PerAda's code", []
        ).append(path)
    rows = []
    for name in sorted(files, key=lambda name: (not name.startswith("PerAda"), name)):
        complete = [link(path) for path in files[name] if "_mini" not in path.stem]
        miniature = [link(path) for path in files[name] if "_mini" in path.stem]
        rows.append([name, ", ".join(complete), ", ".join(miniature)])
    return table(["table or figure", "with the paper's data", "in miniature"], rows)


def pages(section: str) -> str:
    """Return a list of the pages of a section of the site's navigation, each with its first sentence."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace('"', "")
    text = re.search(rf"^  - {section}[\w -]*:\n((?: {{6}}.*\n)+)", navigation, re.MULTILINE)[1]
    lines = []
    for path in re.findall(r": docs/([\w/.-]+\.md)$", text, re.MULTILINE):
        if path.startswith("api/"):
            continue
        page = (ROOT / "docs" / path).read_text(encoding="utf-8")
        title = re.match(r"# (.*)", page)[1]
        prose = re.sub(r"<!--.*?-->\n", "", page).split("\n\n")[1]
        sentence = re.split(r"\.(?=\s|$)", " ".join(prose.split()))[0]
        sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
        lines.append(f"- [{title}]({path}): {sentence.removeprefix('This page ').removeprefix('This tutorial ')}.\n")
    return "".join(lines)


GENERATORS: dict[str, Callable[[str], str]] = {
    "algorithms": algorithms,
    "rules": rules,
    "attributes": attributes,
    "classes": classes,
    "datasets": datasets,
    "codes": codes,
    "hooks": hooks,
    "prometheus": prometheus,
    "recipes": recipes,
    "pages": pages,
    "papers": papers,
}


def generated(page: str) -> str:
    """Return a page with its tables written anew."""

    def write(match: re.Match[str]) -> str:
        return f"{match[1]}\n{GENERATORS[match[2]](match[3])}\n{match[5]}"

    return BLOCK.sub(write, page)


def main() -> None:
    """Write the tables of all pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = path.read_text(encoding="utf-8")
        path.write_text(generated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
