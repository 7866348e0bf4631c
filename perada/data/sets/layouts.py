# SPDX-License-Identifier: Apache-2.0
"""Layouts: what the folders above an image name, such as its client and its class."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from perada.core.checks import OptionError, check_known, check_name
from perada.data.sets.base import Manifest, number_labels, renumber_labels
from perada.data.sets.image_paths import is_system_folder, list_images
from perada.data.sets.manifest import SPLITS

FIELDS = ("client", "class", "split", "group", "domain")


def class_folders(tops: list[Path], root: Path, layout: str) -> Manifest:
    """List the images in class folders, one class after the other.

    Classes are all class folders, also those without images.

    Args:
        tops: Folders to list, ``root`` or folders in it.
        root: Folder that the layout is relative to.
        layout: A layout that ends in ``{class}/**``.
    """
    depth = layout.count("/")
    below_top = "*/" * (depth - len(tops[0].relative_to(root).parts))
    files = []
    classes = set()
    for top in tops:
        files += list_images(top, root)
        for folder in top.glob(below_top):
            parts = folder.relative_to(root).parts
            if not any(is_system_folder(part) or part.startswith(".") for part in parts):
                classes.add(folder.name)
    # Images are sorted as by torchvision: by class folder, then by folder, then by name.
    files.sort(key=lambda file: (file.split("/")[:depth], *os.path.split(file)))
    return renumber_labels(match_layout(root, files, layout), sorted(classes), str(root))


def match_layout(root: Path, files: list[str], layout: str) -> Manifest:
    """List the files below ``root`` that match the layout, with the values of its fields.

    Raises:
        FileNotFoundError: If no file matches.
    """
    pattern = layout_pattern(layout)
    matches = []
    others = []
    for file in files:
        match = pattern.fullmatch(file)
        if match is None:
            others.append(file)
        else:
            matches.append(match)
    if not matches:
        raise FileNotFoundError(
            f"the {len(files)} images in {root}, such as {others[0]}, do not match the layout {layout!r}: "
            f"{_remedy_for_layout(root, files, layout)}"
        )
    if others:
        problem = (
            f"{len(others)} of {len(files)} images in {root}, such as {others[0]}, do not match the layout {layout!r}"
        )
        # A layout such as {class}/*_rgb.png selects some images of each folder on purpose.
        used_folders = {match[0].rpartition("/")[0] for match in matches}
        elsewhere = [file for file in others if file.rpartition("/")[0] not in used_folders]
        if 2 * len(elsewhere) > len(files):
            raise FileNotFoundError(
                f"{problem}, so the images cannot be used: {_remedy_for_layout(root, files, layout)}"
            )
        warnings.warn(f"{problem}; they are skipped", stacklevel=2)
    values = {name: [match[name] for match in matches] for name in matches[0].groupdict()}
    classes, labels = number_labels(values.pop("class"))
    split = np.array(values.pop("split")) if "split" in values else None
    columns = {name: np.array(column) for name, column in values.items()}
    return Manifest([f"{root}/{match[0]}" for match in matches], labels, classes, columns, split)


def _remedy_for_layout(root: Path, files: Sequence[str], layout: str) -> str:
    """Return what to do if most images are in folders that a layout does not match."""
    below = folder_below(files, layout)
    if below:
        return f"did you mean the folder {root / below}, in which all images match?"
    example = propose_layout(files)
    if example not in ("", layout):
        return f"set a layout that matches, such as {example}"
    return "set a layout that matches"


def folder_below(files: Iterable[str], layout: str) -> str:
    """Return the folder that has most of the images, and in which all match a layout; empty if there is none.

    Args:
        files: Paths below the folder that was named, with ``/``.
        layout: The layout.

    >>> folder_below(["sites/a/x/1.png", "sites/b/x/1.png", "figures/1.png"], "{client}/{class}/*")
    'sites'
    """
    files_by_folder: dict[str, list[str]] = {}
    count = 0
    for file in files:
        count += 1
        folder, slash, rest = file.partition("/")
        if slash:
            files_by_folder.setdefault(folder, []).append(rest)
    pattern = layout_pattern(layout)
    for folder, files_in_folder in files_by_folder.items():
        if folder.lower() in SPLITS or 2 * len(files_in_folder) <= count:
            continue
        folders_in_folder = {file.split("/")[0] for file in files_in_folder}
        # One folder may be a client or a year, and folders of splits are no clients.
        if len(folders_in_folder) < 2 or any(name.lower() in SPLITS for name in folders_in_folder):
            continue
        if all(pattern.fullmatch(file) for file in files_in_folder):
            return folder
    return ""


def layout_pattern(layout: str) -> re.Pattern[str]:
    """Compile a layout to a regular expression of paths.

    Raises:
        OptionError: If the layout has an unknown field, a field twice, or no ``{class}``.

    >>> layout_pattern("{client}/{class}_*").fullmatch("a/b_c_1.png").groupdict()
    {'client': 'a', 'class': 'b'}
    """
    check_name("layout", layout)
    wildcards = {"*": "[^/]*", "?": "[^/]", "**": ".*", "**/": "(?:.*/)?"}
    pattern = ""
    for part in re.split(r"(\{[^{}]*\}|\*\*/?|\*|\?)", layout):
        if part.startswith("{"):
            name = part[1:-1]
            check_known("layout: field", name, FIELDS)
            if layout.count(part) > 1:
                raise OptionError(
                    f"layout={layout!r} has the field {part} twice; replace one of them with *",
                    name="layout",
                    value=layout,
                )
            pattern += f"(?P<{name}>[^/]+?)"
        else:
            pattern += wildcards.get(part, re.escape(part))
    if "{class}" not in layout:
        raise OptionError(
            f"layout={layout!r} has no {{class}}: add it where the class is; UnlabelledFolder reads images without one",
            name="layout",
            value=layout,
        )
    return re.compile(pattern, re.DOTALL)


def guess_layout(file: str) -> str:
    """Guess the layout from one file, with the client first and the class last; empty if there is no guess.

    >>> guess_layout("north/test/benign/1.png")
    '{client}/{split}/{class}/*'
    >>> guess_layout("north/2024/may/benign/1.png")
    '{client}/**/{class}/*'
    """
    folders = file.split("/")[:-1]
    is_split = [folder.lower() in SPLITS for folder in folders]
    other_depths = [depth for depth, split in enumerate(is_split) if not split]
    if not other_depths or sum(is_split) > 1:
        return ""
    parts = []
    for depth, split in enumerate(is_split):
        if split:
            parts.append("{split}")
        elif depth == other_depths[-1]:
            parts.append("{class}")
        elif depth == other_depths[0]:
            parts.append("{client}")
        elif parts[-1] != "**":
            parts.append("**")
    return "/".join(parts) + "/*"


def propose_layout(files: Sequence[str]) -> str:
    """Return the guessed layout that matches the most files; empty if no guess matches any."""
    best_layout = ""
    most_matches = 0
    guesses = Counter(guess_layout(file) for file in files)
    # most_common() breaks ties: the guess of more files comes first, and only more matches replace it.
    for layout, _ in guesses.most_common(20):
        if not layout:
            continue
        pattern = layout_pattern(layout)
        num_matches = sum(1 for file in files if pattern.fullmatch(file))
        if num_matches > most_matches:
            best_layout = layout
            most_matches = num_matches
    return best_layout
