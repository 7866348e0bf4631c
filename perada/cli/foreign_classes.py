# SPDX-License-Identifier: Apache-2.0
"""Classes in the files of a run or of a deployment that are not perada's, whose modules would be run."""

import re
from importlib.machinery import PathFinder
from pathlib import Path

from perada.system.yaml_files import iterate_strings

OWN_PACKAGES = ("perada", "pytorch_lightning", "torch")
"""Packages whose modules perada imports in any case, or which have no effect when they are imported."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def foreign_classes(content: object) -> list[str]:
    """Return the paths of classes in a section of a recipe that are in none of :data:`OWN_PACKAGES`.

    Nothing is imported. A class is named by ``class_path``, or by a string alone, which may also be a path of a file.
    Such a string counts only if its first part is a module that can be imported.

    Args:
        content: Content of a YAML file, or a part of it.

    >>> foreign_classes({"algorithm": {"class_path": "mine.Own"}, "table": "scans.csv", "rule": "torch.nn.Linear"})
    ['mine.Own']
    """
    class_paths = []
    for option, text in iterate_strings(content):
        is_class_path = option.rpartition(".")[2] == "class_path"
        package, dot, _ = text.partition(".")
        if not dot or package in OWN_PACKAGES:
            continue
        if is_class_path or (_PATH.fullmatch(text) and _is_importable(package)):
            class_paths.append(text)
    return sorted(set(class_paths))


def _is_importable(package: str) -> bool:
    """Return whether there is a module of this name, also in the current folder. It is not imported."""
    return PathFinder.find_spec(package) is not None or PathFinder.find_spec(package, [str(Path.cwd())]) is not None
