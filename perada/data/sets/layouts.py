# SPDX-License-Identifier: Apache-2.0
"""Layouts of folders of images: which files there are, and what a path says of one."""

import os
import re
import warnings
from collections import Counter
from difflib import get_close_matches
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.text import some

FIELDS = ("client", "class", "split", "group")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)
"""Words for a split, in any case, and what they mean."""
UNREAD = (
    ".avif",
    ".dcm",
    ".dicom",
    ".gif",
    ".heic",
    ".heif",
    ".jfif",
    ".jp2",
    ".j2k",
    ".jxl",
    ".nii",
    ".nii.gz",
    ".svs",
    ".tga",
)
"""Ends of names of images of other kinds."""


def layout_pattern(layout: str) -> re.Pattern[str]:
    """The paths that a layout stands for.

    Raises:
        ValueError: If it has an unknown field, a field twice, or no ``{class}``.

    >>> layout_pattern("{client}/{class}_*").fullmatch("a/b_c_1.png").groupdict()
    {'client': 'a', 'class': 'b'}
    """
    pattern, fields = "", []
    for part in re.split(r"(\{[^{}]*\}|\*\*/?|\*|\?)", layout):
        if part.startswith("{"):
            name = part[1:-1]
            if name not in FIELDS:
                close = get_close_matches(name, FIELDS, 1)
                hint = f"did you mean {{{close[0]}}}?" if close else f"fields are {', '.join(FIELDS)}"
                raise ValueError(f"layout={layout!r} has the field {part}, which is unknown; {hint}")
            if name in fields:
                raise ValueError(f"layout={layout!r} has {part} twice; put * in one of the places")
            fields.append(name)
            pattern += f"(?P<{name}>[^/]+?)"
        else:
            pattern += {"*": "[^/]*", "?": "[^/]", "**": ".*", "**/": "(?:.*/)?"}.get(part, re.escape(part))
    if "class" not in fields:
        raise ValueError(
            f"layout={layout!r} has no {{class}}: say where the class stands; UnlabelledFolder reads images without one"
        )
    return re.compile(pattern, re.DOTALL)


def proposal(file: str) -> str:
    """A layout that a file may have.

    >>> proposal("north/test/benign/1.png")
    ', such as {client}/{split}/{class}/*'
    """
    folders = file.split("/")[:-1]
    others = [folder for folder in folders if folder.lower() not in SPLITS]
    if not 1 <= len(others) <= 2 or len(folders) - len(others) > 1:
        return ""
    fields = iter(("class",) if len(others) == 1 else ("client", "class"))
    parts = ["split" if folder.lower() in SPLITS else next(fields) for folder in folders]
    return f", such as {'/'.join(f'{{{part}}}' for part in parts)}/*"


def list_images(root: Path) -> list[str]:
    """Paths of all images below ``root``, relative to it, with ``/``, sorted; nothing that begins with a dot.

    Links to folders are followed, but for those to a folder that they stand in. A warning counts images of kinds that
    are not read, such as DICOM.
    """
    found, unread = [], Counter[str]()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX")) and not _loops(folder, name)]
        inside = Path(folder).relative_to(root)
        for name in names:
            if not name.startswith(".") and name.lower().endswith(IMG_EXTENSIONS):
                found.append((inside / name).as_posix())
            elif not name.startswith(".") and name.lower().endswith(UNREAD):
                unread[Path(name).suffix.lower()] += 1
    if unread:
        kinds = some([f"{number} {kind}" for kind, number in sorted(unread.items())])
        warnings.warn(f"files in {root} are left out ({kinds}): convert them to PNG or TIFF to use them", stacklevel=3)
    return sorted(found)


def _loops(folder: str, name: str) -> bool:
    """Whether a name in a folder is a link to this folder or to one above it."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))
