# SPDX-License-Identifier: Apache-2.0
"""The habits of CONTRIBUTING.md that a machine can check: imports, dependencies, documentation."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(path: Path) -> str:
    """Name under which a file of `perada/` or `adapters/` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "perada" else ("perada", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# perada/adapters and perada/studies are symlinks, which rglob does not follow: each file is listed once.
MODULES = {
    module_name(path): path
    for room in ("perada", "adapters", "studies")
    for path in sorted((ROOT / room).rglob("*.py"))
}

# The packages, top to bottom: a module imports from its own package and from those above it.
ROOMS = "core system tasks engine server algorithms privacy models scores federation data results".split()
ROOMS += "survey evaluation lightning api deploy studies cli".split()
LINKS = {"adapters": {"torch", "peft", "timm", "transformers"}}  # never perada's own
FACES = {"perada", "__main__"}  # perada/__init__.py hands on public names when they are asked for
ALSO = {"privacy": {"opacus"}, "system": {"filelock", "yaml"}}  # system reads YAML files of users, and locks files
TORCH_ONLY = set(ROOMS[: ROOMS.index("models")])
MODEL_ZOOS = {"huggingface_hub", "peft", "timm", "transformers"}
SEES_ZOOS = {"models", "results"}
SEES_LIGHTNING = {"data", "lightning", "api", "studies", "deploy", "cli"}


def room_of(module: str) -> str:
    """Second part of a dotted name, or the name itself where there is only one."""
    return module.split(".")[min(1, module.count("."))]


@cache
def parse_source(source: str) -> ast.Module:
    """The tree of a source file, which several tests walk."""
    return ast.parse(source)


@cache
def imported(module: str, source: str, *, is_package: bool = False) -> frozenset[str]:
    """Absolute names that a source file imports, at any depth and under any condition."""
    names: set[str] = set()
    for node in ast.walk(parse_source(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            package = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            full = [f"{base}.{alias.name}" for alias in node.names]
            names |= {name if base == "perada" or name in MODULES else base for name in full}
    return frozenset(names - {"__future__"})


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a file imports against the house's rules, one line each."""
    room = room_of(module)
    result = []
    if room not in {*ROOMS, *LINKS, *FACES}:
        return [f"{module} is in no room: give it one in ROOMS"]
    for name in sorted(imported(module, source, is_package=is_package)):
        top = name.split(".")[0]
        other = room_of(name)
        if top in sys.stdlib_module_names:
            continue
        if room in LINKS:
            wrong = top not in LINKS[room] and other != room
        elif top == "perada":
            above = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else [*ROOMS, *FACES, *LINKS]
            wrong = other not in above and not (other in LINKS and room in SEES_ZOOS)
        else:
            torch_only = room in TORCH_ONLY and top not in {"torch", *ALSO.get(room, ())}
            zoo = top in MODEL_ZOOS and room not in SEES_ZOOS
            wrong = torch_only or zoo or (top == "pytorch_lightning" and room not in SEES_LIGHTNING)
        if wrong:
            result.append(f"{module} must not import {name}")
    return result


def test_imports_go_upwards():
    wrong = [
        line
        for module, path in MODULES.items()
        for line in violations(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert wrong == []


def private_names(module: str) -> tuple[set[str], dict[str, int]]:
    """Names with an underscore that a file gives its own objects, and those that it asks of others, with the line."""
    private: set[str] = set()
    asked: dict[str, int] = {}
    for node in ast.walk(parse_source(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            private.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            private.add(node.id)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                private.add(node.attr)
            else:
                asked[node.attr] = node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perada"):
            asked |= {alias.name: node.lineno for alias in node.names}
    return private, {name: line for name, line in asked.items() if re.match("_[^_]", name)}


def test_no_file_uses_what_is_private_to_another():
    """An underscore on an attribute of another library's is that library's business."""
    result = {module: private_names(module) for module in MODULES}
    libraries = {"_buffers", "_parameters", "_modules", "_replace", "_fields"}  # of torch's and Python's own classes
    owners = {name: module for module, (own, _) in result.items() for name in own - libraries}
    wrong = [
        f"{module}:{line}: {name} of {owners[name]}"
        for module, (own, asked) in result.items()
        for name, line in asked.items()
        if name in owners and name not in own
    ]
    assert wrong == []


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; none where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_is_there():
    assert [room for room in ROOMS if not any(room_of(module) == room for module in MODULES)] == []


def test_nothing_imports_in_a_circle():
    """At the level of files: a package's `__init__` hands on what its modules hold, and they do not import it."""
    imports = {
        module: {name for name in imported(module, path.read_text(), is_package=path.name == "__init__.py")}
        & set(MODULES) - {module}
        for module, path in MODULES.items()
        if room_of(module) not in FACES
    }
    assert circle(imports) == []


def test_a_circle_is_seen():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("perada.core.states", "import numpy as np"),
        ("perada.core.states", "def f():\n    from ..engine import Engine"),
        ("perada.engine", "import timm.layers"),
        ("perada.server.distill", "from ..module import FederatedClassifier"),
        ("perada.algorithms.perada", "import pytorch_lightning as pl"),
        ("perada.algorithms.perada", "from perada import api"),
        ("perada.algorithms.perada", "import opacus"),
        ("perada.adapters.residual", "from perada.core.states import State"),
        ("perada.adapters.residual", "from ..states import State"),
        ("perada.lightning.federated_loop", "from peft import PeftModel"),
        ("perada.results.report", "import pytorch_lightning"),
        ("perada.results.report", "from perada.lightning.module import FederatedClassifier"),
        ("perada.cli.main", "import perada"),
        ("perada.api", "from perada.cli import main"),
        ("perada.api", "import perada"),
        ("perada.utils", "import torch"),
    ],
)
def test_a_forbidden_import_is_seen(module, line):
    assert len(violations(module, line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (
            "perada.engine.engine",
            "import torch\nfrom collections import abc\nfrom . import fold\nfrom ..core.states import State",
        ),
        ("perada.privacy.accountants", "from opacus.accountants import RDPAccountant"),
        ("perada.algorithms.perada", "from .base import Algorithm"),
        ("perada.adapters.residual", "from peft import PeftConfig\nfrom .added import AddedLayer"),
        ("perada.cli.main", "from perada import api"),
    ],
)
def test_an_allowed_import_is_not(module, line):
    assert violations(module, line) == []


def distribution(requirement: str) -> str:
    return re.split(r"[\s\[<>=!;]", requirement, maxsplit=1)[0]


def test_dependencies_are_what_is_imported():
    import_names = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL", "opencv-python": "cv2"}
    import_names |= {"imagecorruptions-imaug": "imagecorruptions", "pycryptodome": "Crypto"}

    def names(requirements):
        result = map(distribution, requirements)
        return {import_names.get(name, name.replace("-", "_")) for name in result}

    declared = names(PYPROJECT["project"]["dependencies"])
    extras = names(r for rows in PYPROJECT["project"]["optional-dependencies"].values() for r in rows)
    used = {name.split(".")[0] for module, path in MODULES.items() for name in imported(module, path.read_text())}
    # LightningCLI parses with jsonargparse, whether or not we import it ourselves.
    assert declared == used - set(sys.stdlib_module_names) - extras - {"perada"} | {"jsonargparse"}


def test_every_bound_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    requirements = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"]["dev"]]
    for requirement in requirements:
        assert re.search(rf'"{re.escape(requirement)}", +# \S+ \S+', text), f"no reason beside {requirement}"
        assert re.search(r"[<>=]", requirement), f"no bound on {requirement}"


def test_ruff_has_one_version():
    (pinned,) = (r for r in PYPROJECT["project"]["optional-dependencies"]["dev"] if distribution(r) == "ruff")
    hook = re.search(r"ruff-pre-commit\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hook is not None
    assert {pinned, "ruff" + PYPROJECT["tool"]["ruff"]["required-version"]} == {f"ruff=={hook[1]}"}


def test_top_level_folders_are_seen_through_symlinks():
    for name in ("adapters", "recipes", "studies"):
        link = ROOT / "perada" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


def test_source_files_name_their_licence():
    files = [
        p for room in ("perada", "adapters", "studies", "tests", "benchmarks") for p in (ROOT / room).rglob("*.py")
    ]
    line = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [str(p.relative_to(ROOT)) for p in files if not p.read_text().startswith(line)] == []


def test_recipes_are_listed():
    """Those of the papers' tables and figures on a page of their own."""
    pages = [(ROOT / page).read_text() for page in ("docs/recipes.md", "docs/papers.md")]
    linked = {link for page in pages for link in re.findall(r"\]\(\.\./(recipes/[^)]+)\)", page)}
    assert linked == {p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*.yaml")}


def test_every_guide_is_listed():
    """On the page of guides and, for the site, in its navigation."""
    guides = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    guides = {guide for guide in guides if not guide.startswith("api/")} - {"index.md"}
    index = (ROOT / "docs" / "index.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    assert guides - {"home.md"} <= set(re.findall(r"\]\(([^)#]+)[)#]", index))
    assert guides <= set(re.findall(r"docs/(\S+\.md)", site))


def test_relative_links_resolve():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "perada" / "models" / "weights").glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
