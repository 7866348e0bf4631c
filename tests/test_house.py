# SPDX-License-Identifier: Apache-2.0
"""The habits of CONTRIBUTING.md that a machine can check: imports, dependencies, documentation."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(path: Path) -> str:
    """Name under which a file of `perada/` or `adapters/` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "perada" else ("perada", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# perada/adapters is a symlink, which rglob does not follow: each file is listed once.
MODULES = {module_name(path): path for room in ("perada", "adapters") for path in sorted((ROOT / room).rglob("*.py"))}

# The rooms, top to bottom: a module imports from its own room and from those above it. "perada" is perada/__init__.py.
ROOMS = """
states seeding ranks rounds stacked_layers frozen_layers prefix prefix_search fold losses engine loss_scaling
masked_optimizers server algorithms privacy local_training cohort store refinement settings server_turn round_report
adapters slot twins backbone_weights backbones evaluation data progress federation scoring module strategies callbacks
privacy_card export report run outcome pretrain api studies compare perada
cli_classes cli_words cli_messages cli
""".split()
TORCH_ONLY = set(ROOMS[: ROOMS.index("adapters")])
MODEL_ZOOS = {"huggingface_hub", "peft", "timm", "transformers"}
SEES_ZOOS = {"adapters", "slot", "twins", "backbone_weights", "backbones", "export"}
SEES_LIGHTNING = {"module", "callbacks", "strategies", "data", "api", "cli", "run", "pretrain", "progress", "compare"}


def room_of(module: str) -> str:
    """Second part of a dotted name, or the name itself where there is only one."""
    return module.split(".")[min(1, module.count("."))]


def imported(module: str, source: str, *, is_package: bool = False) -> set[str]:
    """Absolute names that a source file imports, at any depth and under any condition."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            package = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" if base == "perada" else base for alias in node.names}
    return names - {"__future__"}


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a file imports against the house's rules, one line each."""
    room, found = room_of(module), []
    if room not in ROOMS:
        return [f"{module} is in no room: give it one in ROOMS"]
    for name in sorted(imported(module, source, is_package=is_package)):
        top = name.split(".")[0]
        if top == "perada":
            other = room_of(name) if room_of(name) in ROOMS else "perada"
            wrong = ROOMS.index(other) > ROOMS.index(room) or (room == "adapters" and other != "adapters")
        elif top in sys.stdlib_module_names:
            continue
        else:
            torch_only = room in TORCH_ONLY and top != "torch" and not (room == "privacy" and top == "opacus")
            zoo = top in MODEL_ZOOS and room not in SEES_ZOOS
            wrong = torch_only or zoo or (top == "pytorch_lightning" and room not in SEES_LIGHTNING)
        if wrong:
            found.append(f"{module} must not import {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_upwards(module):
    path = MODULES[module]
    assert violations(module, path.read_text(), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("perada.states", "import numpy as np"),
        ("perada.states", "def f():\n    from .engine import forward"),
        ("perada.engine", "import timm.layers"),
        ("perada.server.distill", "from ..module import FederatedClassifier"),
        ("perada.algorithms.ditto", "import pytorch_lightning as pl"),
        ("perada.algorithms.ditto", "from perada import api"),
        ("perada.algorithms.ditto", "import opacus"),
        ("perada.adapters.residual.layer", "from perada.states import State"),
        ("perada.adapters.residual.layer", "from ...states import State"),
        ("perada.callbacks.federated_loop", "from peft import PeftModel"),
        ("perada.report", "import pytorch_lightning"),
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
            "perada.engine",
            "import torch\nfrom collections import abc\nfrom . import seeding\nfrom .states import State",
        ),
        ("perada.privacy.accountants", "from opacus.accountants import RDPAccountant"),
        ("perada.algorithms.ditto", "from .base import Algorithm"),
        ("perada.adapters.residual.layer", "from peft import PeftConfig\nfrom .config import ResidualConfig"),
        ("perada.cli", "import perada\nfrom perada import api"),
    ],
)
def test_an_allowed_import_is_not(module, line):
    assert violations(module, line) == []


def distribution(requirement: str) -> str:
    return re.split(r"[\s\[<>=!;]", requirement, maxsplit=1)[0]


def test_dependencies_are_what_is_imported():
    import_names = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL"}
    names = map(distribution, PYPROJECT["project"]["dependencies"])
    declared = {import_names.get(name, name.replace("-", "_")) for name in names}
    extras = {distribution(r) for rows in PYPROJECT["project"]["optional-dependencies"].values() for r in rows}
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
    for name in ("adapters", "recipes"):
        link = ROOT / "perada" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


def test_source_files_name_their_licence():
    files = [p for room in ("perada", "adapters", "tests", "benchmarks") for p in (ROOT / room).rglob("*.py")]
    line = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [str(p.relative_to(ROOT)) for p in files if not p.read_text().startswith(line)] == []


def public_names(source: str) -> list[str]:
    """Names in the `__all__` of a source file, read without importing it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def test_public_names_are_read():
    assert public_names('import torch\n__all__ = ["a", "b"]\n') == ["a", "b"]


def test_public_names_are_documented():
    words = set(re.findall(r"\w+", "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))))
    public = {name for path in MODULES.values() for name in public_names(path.read_text())}
    assert sorted(public - words) == []


def test_recipes_are_in_the_readme():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    linked = set(re.findall(r"\]\((recipes/[^)]+)\)", "\n".join(rows)))
    assert linked == {p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*.yaml")}


def test_relative_links_resolve():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "perada" / "weights").glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
