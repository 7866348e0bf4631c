# SPDX-License-Identifier: Apache-2.0
"""Image sets in folders: a folder per class, a layout of one's own, or no labels at all."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import OptionError, check_known
from perada.core.text import abbreviated
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, numbered, renumbered
from perada.data.sets.manifest import SPLITS, ImageFiles, OwnImages

FIELDS = ("client", "class", "split", "group", "domain")
UNREAD = tuple(".avif .dcm .dicom .gif .heic .heif .jfif .jp2 .j2k .jxl .nii .nii.gz .svs .tga".split())
"""Ends of names of images of other kinds."""
_SYSTEM_FOLDERS = frozenset(
    (
        *("$recycle.bin", "recycler", "recycled", "system volume information", "msocache", "config.msi"),  # Windows
        *("lost+found", "network trash folder", "temporary items", "__pycache__", "__macosx", ".ipynb_checkpoints"),
        *(".trash", ".trashes", ".spotlight-v100", ".fseventsd", ".appledouble", ".snapshot", ".snapshots", ".zfs"),
        *("@eadir", "#recycle", "#snapshot", "@tmp", "@recycle", "@recently-snapshot", "@sharebin", "~snapshot"),  # NAS
    )
)
"""Folders that systems make, in lower case. Others that begin with a dot are hidden by the user, and not mentioned."""
_NUMBERED = re.compile(r"found\.\d{3}|\.trash-\d+", re.IGNORECASE)  # Windows after a crash; the trash of a user


class ImageFolder(OwnImages):
    """Images sorted into a folder per class, as torchvision's ImageFolder reads them.

    ``root`` holds ``train`` and ``test`` with the same class folders, or the class folders themselves. With
    ``domains``, a folder per domain comes above the classes.

    Args:
        root: The folder.
        domains: Whether class folders stand within domain folders; the column ``domain`` then names each image's.
        **options: Those of :class:`.OwnImages`.
    """

    _clients = "domain"

    def __init__(self, root: str, domains: bool = False, **options: Any) -> None:
        super().__init__(root, **options)
        self.domains = domains

    def read_manifest(self) -> Manifest:
        """List the images of all class folders."""
        root, layout = Path(self.root), "{domain}/{class}/**" if self.domains else "{class}/**"
        parts = [root / part for part in ("train", "test")]
        if all(part.is_dir() for part in parts):
            return class_folders(parts, root, f"{{split}}/{layout}")
        return class_folders([root], root, layout)

    def _check_classes(self, found: Manifest, train: Array) -> None:
        """A class may have a folder without images."""


class Images(OwnImages):
    """Images of one's own whose client, class, split and group stand in their paths.

    ``{client}/{class}/*`` reads ``hospital_a/benign/0001.png``. A layout is the path below ``root``, with ``/``. Its
    fields are ``{client}``, ``{class}`` (which is needed), ``{split}``, ``{group}`` and ``{domain}``; a field is a
    folder's name or a part of a name, as short as possible. ``*`` and ``?`` stand for any letters of one name, ``**``
    for any folders too. What begins with a dot, folders of the system such as ``$RECYCLE.BIN``, ``@eaDir`` and
    ``lost+found``, and what is not an image are passed over.

    Args:
        root: The folder.
        layout: Where client, class, split and group stand.
        **options: Those of :class:`.OwnImages`.

    """

    def __init__(self, root: str, layout: str = "{client}/{class}/*", **options: Any) -> None:
        super().__init__(root, **options)
        self.layout = layout
        layout_pattern(layout)

    def read_manifest(self) -> Manifest:
        """List the images that have the layout."""
        return listed(Path(self.root), list_images(Path(self.root)), self.layout)


class UnlabelledFolder(ImageFiles):
    """All images below a folder, without labels: a public set.

    Its options are those of :class:`.ImageFiles`.
    """

    def read_manifest(self) -> Manifest:
        """List all images."""
        root = Path(self.root)
        return Manifest([f"{root}/{file}" for file in list_images(root)])


def class_folders(tops: list[Path], root: Path, layout: str) -> Manifest:
    """The images in folders of classes, one class after the other; a class may have a folder without images.

    Args:
        tops: Folders of ``root``, or this itself.
        root: Where the layout begins.
        layout: It ends in ``{class}/**``.
    """
    files = [file for top in tops for file in list_images(top, root)]
    depth = layout.count("/")
    inside = "*/" * (depth - len(tops[0].relative_to(root).parts))
    folders = [folder.relative_to(root) for top in tops for folder in top.glob(inside)]
    classes = {
        folder.name
        for folder in folders
        if not any(is_of_system(part) or part.startswith(".") for part in folder.parts)
    }
    files.sort(key=lambda file: (file.split("/")[:depth], *os.path.split(file)))
    return renumbered(listed(root, files, layout), sorted(classes), str(root))


def listed(root: Path, files: list[str], layout: str) -> Manifest:
    """Those of the files below ``root`` that have the layout, with what it says of them.

    Raises:
        FileNotFoundError: If there are none.
    """
    pattern = layout_pattern(layout)
    matches = [pattern.fullmatch(file) for file in files]
    found = [match for match in matches if match]
    others = [file for file, match in zip(files, matches, strict=True) if not match]
    what = f"in {root}, such as {others[0]}, do not have the layout {layout!r}" if others else ""
    if not found:
        fits = best_proposal(files)
        raise FileNotFoundError(f"the {len(files)} images {what}: set layout to fit{', such as ' * bool(fits)}{fits}")
    if others:
        warnings.warn(f"{len(others)} of {len(files)} images {what}; they are left out", stacklevel=2)
    values = {name: [match[name] for match in found] for name in found[0].groupdict()}
    classes, labels = numbered(values["class"])
    columns = {name: np.array(values[name]) for name in values if name not in ("class", "split")}
    split = np.array(values["split"]) if "split" in values else None
    return Manifest([f"{root}/{match[0]}" for match in found], labels, classes, columns, split)


def layout_pattern(layout: str) -> re.Pattern[str]:
    """The paths that a layout stands for.

    Raises:
        ValueError: If it has an unknown field, a field twice, or no ``{class}``.

    >>> layout_pattern("{client}/{class}_*").fullmatch("a/b_c_1.png").groupdict()
    {'client': 'a', 'class': 'b'}
    """
    pattern = ""
    for part in re.split(r"(\{[^{}]*\}|\*\*/?|\*|\?)", layout):
        if part.startswith("{"):
            check_known("layout: field", part[1:-1], FIELDS)
            if layout.count(part) > 1:
                raise OptionError(
                    f"layout={layout!r} has the field {part} twice; put * in one of the places",
                    name="layout",
                    value=layout,
                )
            pattern += f"(?P<{part[1:-1]}>[^/]+?)"
        else:
            pattern += {"*": "[^/]*", "?": "[^/]", "**": ".*", "**/": "(?:.*/)?"}.get(part, re.escape(part))
    if "{class}" not in layout:
        raise OptionError(
            f"layout={layout!r} has no {{class}}: say where the class stands; UnlabelledFolder reads images without "
            "one",
            name="layout",
            value=layout,
        )
    return re.compile(pattern, re.DOTALL)


def proposal(file: str) -> str:
    """A layout that a file may have, or nothing.

    >>> proposal("north/test/benign/1.png")
    '{client}/{split}/{class}/*'
    >>> proposal("north/2024/may/benign/1.png")
    '{client}/**/{class}/*'
    """
    folders = file.split("/")[:-1]
    is_split = [folder.lower() in SPLITS for folder in folders]
    names = [place for place, split in enumerate(is_split) if not split]
    if not names or sum(is_split) > 1:
        return ""
    # The client stands first and the class last; whatever is between them does not count.
    parts = []
    for place, split in enumerate(is_split):
        if split:
            parts.append("{split}")
        elif place == names[-1]:
            parts.append("{class}")
        elif place == names[0]:
            parts.append("{client}")
        elif parts[-1] != "**":
            parts.append("**")
    return "/".join(parts) + "/*"


def best_proposal(files: Sequence[str]) -> str:
    """The layout that fits most of the files, or nothing."""
    most, best = 0, ""
    # Of layouts that fit as many files, the commonest, which comes first, is taken.
    for layout, _ in Counter(proposal(file) for file in files).most_common(20):
        fits = sum(layout_pattern(layout).fullmatch(file) is not None for file in files) if layout else 0
        if fits > most:
            most, best = fits, layout
    return best


def is_of_system(name: str) -> bool:
    """Whether a folder is made by an operating system, a file server or an editor, and holds no images of the user's.

    >>> is_of_system("$Recycle.Bin"), is_of_system("lost+found"), is_of_system("lost")
    (True, True, False)
    """
    return name.lower() in _SYSTEM_FOLDERS or _NUMBERED.fullmatch(name) is not None


def list_images(root: Path, above: Path | None = None) -> list[str]:
    """Paths of all images below ``root``, with ``/``, sorted; nothing that begins with a dot, nor of the system.

    They are relative to ``root``, or to the folder ``above``. Links to folders are followed, but for those to a folder
    that they stand in. Warnings name folders of the system that hold images, and count images of kinds that are not
    read, such as DICOM.

    Raises:
        FileNotFoundError: If there is no image.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder: set root to the folder of the images")
    files: list[str] = []
    skipped: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        inside = Path(folder).relative_to(above or root)
        of_system = sorted(name for name in folders if is_of_system(name))
        skipped += [(inside / name).as_posix() for name in of_system if _holds_images(Path(folder) / name)]
        left_out = [name for name in folders if name in of_system or name.startswith(".") or _loops(folder, name)]
        folders[:] = [name for name in folders if name not in left_out]
        files += [(inside / name).as_posix() for name in names if not name.startswith(".")]
    found = sorted(file for file in files if file.lower().endswith(IMG_EXTENSIONS))
    unread = Counter(Path(file).suffix.lower() for file in files if file.lower().endswith(UNREAD))
    if skipped:
        warnings.warn(
            f"folders of the system in {root} are skipped with their images: {abbreviated(sorted(skipped))}. Rename "
            "them to "
            "use them",
            stacklevel=3,
        )
    if unread:
        kinds = abbreviated([f"{number} {kind}" for kind, number in sorted(unread.items())])
        warnings.warn(f"files in {root} are left out ({kinds}): convert them to PNG or TIFF to use them", stacklevel=3)
    if not found:
        hint = f"give a folder with {', '.join(IMG_EXTENSIONS)}"
        if any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            hint = f"it is a set that datasets wrote: read it with the class HuggingFace, or as hf:{root}"
        raise FileNotFoundError(f"{root} has no images: {hint}")
    return found


def _holds_images(folder: Path) -> bool:
    """Whether there is an image in a folder or below it."""
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".") for name in names):
            return True
    return False


def _loops(folder: str, name: str) -> bool:
    """Whether a name in a folder is a link to this folder or to one above it."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))
