# SPDX-License-Identifier: Apache-2.0
"""Paths of the images below a folder."""

import os
import re
import warnings
from collections import Counter
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.text import abbreviated
from perada.data.medical.reading import is_readable_kind, medical_kind_of_file

UNSUPPORTED_EXTENSIONS = tuple(".avif .gif .heic .heif .jfif .jp2 .j2k .jxl .svs .tga".split())
"""Extensions of images that are not read."""
_SYSTEM_FOLDERS = frozenset(
    (
        *("$recycle.bin", "recycler", "recycled", "system volume information", "msocache", "config.msi"),  # Windows
        *("lost+found", "network trash folder", "temporary items", "__pycache__", "__macosx", ".ipynb_checkpoints"),
        *(".trash", ".trashes", ".spotlight-v100", ".fseventsd", ".appledouble", ".snapshot", ".snapshots", ".zfs"),
        *("@eadir", "#recycle", "#snapshot", "@tmp", "@recycle", "@recently-snapshot", "@sharebin", "~snapshot"),  # NAS
    )
)
"""Folders made by systems, in lower case. Other folders that begin with a dot are hidden on purpose: no warning."""
_NUMBERED_SYSTEM_FOLDER = re.compile(r"found\.\d{3}|\.trash-\d+", re.IGNORECASE)  # Windows after a crash; users' trash


def is_system_folder(name: str) -> bool:
    """Return whether a folder was made by an operating system, file server or editor, without images of the user.

    >>> is_system_folder("$Recycle.Bin"), is_system_folder("lost+found"), is_system_folder("lost")
    (True, True, False)
    """
    return name.lower() in _SYSTEM_FOLDERS or _NUMBERED_SYSTEM_FOLDER.fullmatch(name) is not None


def list_images(root: Path, above: Path | None = None) -> list[str]:
    """List all images below a folder, except for names that begin with a dot and for system folders.

    Links to folders are followed unless they lead to a folder above them. Warns of system folders with images, of
    images of unsupported formats, and of medical images if the extra that reads them is not installed.

    Args:
        root: The folder.
        above: Folder that the paths are relative to; ``root`` by default.

    Returns:
        Sorted paths with ``/``.

    Raises:
        FileNotFoundError: If there is no image.
        ModuleNotFoundError: If all images are medical, and the extra that reads them is not installed.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder: set root to the folder of the images")
    files: list[str] = []
    skipped: list[str] = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        relative_folder = Path(folder).relative_to(above or root)
        walked = []
        for name in subfolders:
            if is_system_folder(name):
                if _has_images(Path(folder) / name):
                    skipped.append((relative_folder / name).as_posix())
            elif not name.startswith(".") and not _links_to_ancestor(folder, name):
                walked.append(name)
        # os.walk descends into the folders that remain in its list.
        subfolders[:] = walked
        files += [(relative_folder / name).as_posix() for name in names if not name.startswith(".")]
    images = _list_readable(files, root, above or root)
    if skipped:
        warnings.warn(
            f"system folders in {root} are skipped with their images: {abbreviated(sorted(skipped))}. Rename them to "
            "use them",
            stacklevel=3,
        )
    if not images:
        hint = f"set root to a folder with {', '.join(IMG_EXTENSIONS)}"
        if any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            hint = f"it was written by datasets: read it with the class HuggingFace, or as hf:{root}"
        raise FileNotFoundError(f"{root} has no images: {hint}")
    return images


def _list_readable(files: list[str], root: Path, folder: Path) -> list[str]:
    """Return those of the files that can be read, sorted; warn of other images.

    Args:
        files: Paths of the files.
        root: The folder that they are in, for messages.
        folder: The folder that the paths are relative to.

    Raises:
        ModuleNotFoundError: If all images are medical, and the extra that reads them is not installed.
    """
    image_paths: list[str] = []
    unread: list[str] = []
    for file in files:
        kind = medical_kind_of_file(file, folder)
        if kind is not None:
            (image_paths if is_readable_kind(kind) else unread).append(file)
        elif file.lower().endswith(IMG_EXTENSIONS):
            image_paths.append(file)
    unsupported = [file for file in files if file.lower().endswith(UNSUPPORTED_EXTENSIONS)]
    if unsupported:
        counts = Counter(Path(file).suffix.lower() for file in unsupported)
        summary = abbreviated([f"{count} {extension}" for extension, count in sorted(counts.items())])
        warnings.warn(f"files in {root} are skipped ({summary}): convert them to PNG or TIFF to use them", stacklevel=4)
    if unread:
        problem = f"{len(unread)} DICOM or NIfTI files in {root}, such as {min(unread)}, cannot be read"
        if not image_paths:
            raise ModuleNotFoundError(f"{problem}: pip install 'perada[medical]'")
        warnings.warn(f"{problem} and are skipped: pip install 'perada[medical]' to use them", stacklevel=4)
    return sorted(image_paths)


def _has_images(folder: Path) -> bool:
    """Return whether there is an image in a folder or below it."""
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".") for name in names):
            return True
    return False


def _links_to_ancestor(folder: str, name: str) -> bool:
    """Return whether a name in a folder is a link to this folder or to one above it."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))
