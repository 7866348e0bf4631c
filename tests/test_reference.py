# SPDX-License-Identifier: Apache-2.0
"""The reference shows what is promised: each stable name has an anchor, and an example where one makes sense."""

import re
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path

import pytest

from perada.algorithms import ALGORITHMS
from perada.data import CohortBatch, EvalBatch, ImageSet, Partition, Phase, RoundPlan, Shift
from perada.server import SERVER_RULES, Distiller, ServerRule
from tests.surface import PACKAGES, names

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
STABLE_PAGES = [f"{package.rpartition('.')[2]}.md" for package in PACKAGES]


def stable_names():
    """The promised names without their members, with the object of each."""
    results = {}
    for path in names():
        package = max((one for one in PACKAGES if path.startswith(f"{one}.")), key=len)
        if path.count(".") == package.count(".") + 1:
            results[path] = getattr(import_module(package), path.rpartition(".")[2])
    return results


WITHOUT_EXAMPLE = {
    "an algorithm is made by make_algorithm, which has an example": [*ALGORITHMS.values()],
    "a rule is made by make_rule, which has an example": [type(make()) for make in SERVER_RULES.values()],
    "it is a base of one's own classes; docs/extending.md derives one, and a test runs it": [
        *(ImageSet, Partition, Shift, ServerRule),
        *("Algorithm", "AddedLayer", "AddingModel", "Task", "ClassTask", "PartialSharing", "Engine"),
    ],
    "perada makes it, and passes it to one's own classes": [
        *(CohortBatch, EvalBatch, Phase, RoundPlan, Distiller),
        *("Broadcast", "ClientStep", "ServerStep", "TensorNames", "Stacks", "Aggregation", "Updates"),
        *("DistillationRound", "RestOfWorld"),
    ],
    "it takes no argument, or reads published files that have to be downloaded": [
        *("CIFAR10", "CIFAR10C", "CIFAR10_1", "CIFAR100", "MNIST", "FashionMNIST", "STL10", "CheXpert", "OfficeHome"),
        *("OpenImage", "Shakespeare", "Digits", "LabelShift", "Photographs"),
    ],
    "it is a collection of names": ["ALGORITHMS", "SERVER_RULES", "ACCOUNTANTS", "EngineName"],
    "docs/extending.md registers an adapter, and selects layers": ["register", "SelectiveConfig"],
    "it adds noise to sums of gradients, which take a training step": ["noisy_mean"],
}
"""Names without an example, or their classes, by the reason."""


def has_exception(path, value):
    name = path.rpartition(".")[2]
    entries = [entry for group in WITHOUT_EXAMPLE.values() for entry in group]
    return any(entry == name or (isinstance(entry, type) and entry is value) for entry in entries)


def test_each_stable_name_has_an_example_or_a_reason_for_none():
    lacking = []
    needless = []
    for path, value in stable_names().items():
        # The docstring of the class itself, not that of a base.
        text = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", "")
        has_example = ">>> " in (text or "")
        if not has_example and not has_exception(path, value):
            lacking.append(path)
        if has_example and path.rpartition(".")[2] in {name for group in WITHOUT_EXAMPLE.values() for name in group}:
            needless.append(path)
    assert lacking == []
    assert needless == []


def test_internals_are_for_contributors_and_outside_the_search():
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        is_internal = page.name not in STABLE_PAGES
        assert text.startswith("---\nsearch:\n  exclude: true\n---\n") == is_internal, page.name
        assert ("For contributors. Only names listed in" in text) == is_internal, page.name
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    internals = navigation[navigation.index("Internals:") : navigation.index("- Reference:")]
    for page in PAGES.glob("*.md"):
        assert (f"docs/api/{page.name}" in internals) == (page.name not in STABLE_PAGES), page.name


@pytest.mark.slow
def test_each_stable_name_has_an_anchor_on_a_page_of_its_own(tmp_path):
    """As the inventory of the built site lists them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""})
    content = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    page_of = {}
    for line in zlib.decompress(content).decode().splitlines():
        name, _, _, address, _ = line.split(" ", 4)
        page_of[name] = re.match(r"docs/api/(\w+)/", address)
    for path in stable_names():
        assert path in page_of, path
        assert page_of[path] and f"{page_of[path][1]}.md" in STABLE_PAGES, path
