# SPDX-License-Identifier: Apache-2.0
"""Image sets in folders: one folder per class, a custom layout, or no labels at all."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import OptionError, check_choice, check_known, check_name
from perada.core.text import abbreviated
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, number_labels, renumber_labels
from perada.data.sets.manifest import SPLITS, ImageFiles, OwnImages
from perada.data.sets.masks import check_mask_values
from perada.tasks import Segmentation, Task

FIELDS = ("client", "class", "split", "group", "domain")
UNSUPPORTED_EXTENSIONS = tuple(".avif .dcm .dicom .gif .heic .heif .jfif .jp2 .j2k .jxl .nii .nii.gz .svs .tga".split())
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


class ImageFolder(OwnImages):
    """Images sorted into one folder per class, as for torchvision's ImageFolder.

    ``root`` has folders ``train`` and ``test`` with the same class folders, or the class folders themselves. With
    ``domains``, class folders are inside of domain folders.

    Args:
        root: The folder.
        domains: Whether class folders are inside of domain folders, which the column ``domain`` then names.
        **options: Options of :class:`.OwnImages`.
    """

    _client_column = "domain"

    def __init__(self, root: str, domains: bool = False, **options: Any) -> None:
        super().__init__(root, **options)
        check_choice("domains", domains, [True, False])
        self.domains = domains

    def read_manifest(self) -> Manifest:
        """List the images of all class folders."""
        root = Path(self.root)
        layout = "{domain}/{class}/**" if self.domains else "{class}/**"
        split_folders = [root / "train", root / "test"]
        if all(folder.is_dir() for folder in split_folders):
            return class_folders(split_folders, root, f"{{split}}/{layout}")
        return class_folders([root], root, layout)

    def _check_classes(self, manifest: Manifest, is_train: Array) -> None:
        """Accept classes whose folders contain no images."""


class Images(OwnImages):
    """Images in folders, with client, class, split and group in their paths.

    ``{client}/{class}/*`` matches ``hospital_a/benign/0001.png``. A layout is the path below ``root``, with ``/``. Its
    fields are ``{client}``, ``{class}`` (required), ``{split}``, ``{group}`` and ``{domain}``. A field matches a
    folder's name or a part of a name, as short as possible. ``*`` and ``?`` match any characters within one name,
    ``**`` also any folders. Names that begin with a dot, system folders such as ``$RECYCLE.BIN``, ``@eaDir`` and
    ``lost+found``, and files that are not images are skipped.

    Args:
        root: The folder.
        layout: Positions of client, class, split and group in the paths.
        **options: Options of :class:`.OwnImages`.

    """

    def __init__(self, root: str, layout: str = "{client}/{class}/*", **options: Any) -> None:
        super().__init__(root, **options)
        self.layout = layout
        layout_pattern(layout)

    def read_manifest(self) -> Manifest:
        """List the images that match the layout."""
        root = Path(self.root)
        return match_layout(root, list_images(root), self.layout)


class ImageMasks(OwnImages):
    """Images with a mask each, in folders ``images`` and ``masks`` with the same names.

    ``images/0001.jpg`` has the mask ``masks/0001.png``; the extensions may differ. Folders above ``images`` are the
    client, and the split if they are called ``train`` or ``test``, as in ``hospital_a/train/images``. A folder below
    ``images`` is the group of its images, such as a patient, which is never divided between training and test.

    Masks are grey images or images with a palette, of the same size as their image, with the number of the class as
    value of a pixel. They are resized by nearest neighbour, and stay in memory.

    Args:
        root: The folder.
        images: Name of the folders of images.
        masks: Name of the folders of masks.
        mask_values: Value of each class in the masks, such as ``[0, 255]``; null for 0, 1, 2 and so on. 255 stands for
            pixels without a class, unless it is listed.
        **options: Options of :class:`.OwnImages`.
    """

    def __init__(
        self,
        root: str,
        *,
        images: str = "images",
        masks: str = "masks",
        mask_values: list[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_name("images", images)
        check_name("masks", masks)
        # Not `images`, which are the images themselves.
        self.images_folder = images
        self.masks_folder = masks
        self.mask_values = check_mask_values(mask_values)

    @property
    def task(self) -> Task:
        """What is learnt from the masks, which is known without reading them."""
        return Segmentation()

    def read_manifest(self) -> Manifest:
        """List the images and their masks.

        Raises:
            FileNotFoundError: If there is no image, or an image has no mask.
        """
        root = Path(self.root)
        files = [PurePosixPath(file) for file in list_images(root)]
        mask_of_image: dict[PurePosixPath, str] = {}
        images: list[PurePosixPath] = []
        for file in files:
            folders = file.parts[:-1]
            if self.masks_folder in folders:
                mask_of_image[file.with_suffix("")] = f"{root}/{file}"
            elif self.images_folder in folders:
                images.append(file)
        if not images:
            raise FileNotFoundError(
                f"{root} has no images in folders called {self.images_folder!r}; set images and masks to the names of "
                "the folders"
            )
        masks = []
        without_mask = []
        for file in images:
            expected = self._place_of_mask(file)
            if expected in mask_of_image:
                masks.append(mask_of_image[expected])
            else:
                without_mask.append(str(file))
        if without_mask:
            raise FileNotFoundError(
                f"{len(without_mask)} of {len(images)} images in {root} have no mask: {abbreviated(without_mask)}; add "
                f"masks such as {self._place_of_mask(PurePosixPath(without_mask[0]))}.png, or remove the images"
            )
        columns: dict[str, list[str]] = {}
        for file in images:
            for name, value in self._facts_of(file).items():
                columns.setdefault(name, []).append(value)
        complete = {name: np.array(values) for name, values in columns.items() if len(values) == len(images)}
        incomplete = sorted(columns.keys() - complete.keys())
        if incomplete:
            raise ValueError(
                f"only some of the images in {root} are in a folder for the {incomplete[0]}; use the same levels of "
                "folders for all images"
            )
        split = complete.pop("split", None)
        return Manifest([f"{root}/{file}" for file in images], columns=complete, split=split, masks=masks)

    def _place_of_mask(self, file: PurePosixPath) -> PurePosixPath:
        """Return the path of an image's mask below the root, without extension."""
        parts = list(file.with_suffix("").parts)
        parts[parts.index(self.images_folder)] = self.masks_folder
        return PurePosixPath(*parts)

    def _facts_of(self, file: PurePosixPath) -> dict[str, str]:
        """Return client, split and group of an image, as far as its folders name them."""
        facts: dict[str, str] = {}
        place = file.parts.index(self.images_folder)
        for folder in file.parts[:place]:
            if folder.lower() in SPLITS:
                facts["split"] = folder
            else:
                facts.setdefault("client", folder)
        below = file.parts[place + 1 : -1]
        if below:
            # Patients of different clients may have the same number.
            facts["group"] = "/".join([facts.get("client", ""), *below]).lstrip("/")
        return facts


def have_masks(files: Iterable[str]) -> bool:
    """Return whether images have masks: whether folders ``images`` and ``masks`` of some folder both have files.

    Args:
        files: Paths below a folder, with ``/``.
    """
    folders_above: dict[str, set[tuple[str, ...]]] = {"images": set(), "masks": set()}
    for file in files:
        folders = PurePosixPath(file).parts[:-1]
        for name, parents in folders_above.items():
            if name in folders:
                parents.add(folders[: folders.index(name)])
    return not folders_above["images"].isdisjoint(folders_above["masks"])


class UnlabelledFolder(ImageFiles):
    """All images below a folder, without labels, as a public set.

    The options are those of :class:`.ImageFiles`.
    """

    def read_manifest(self) -> Manifest:
        """List all images."""
        root = Path(self.root)
        return Manifest([f"{root}/{file}" for file in list_images(root)])


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
    # Like torchvision: by class folder, then by folder, then by name.
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
        example = propose_layout(files)
        hint = f", such as {example}" if example else ""
        raise FileNotFoundError(
            f"the {len(files)} images in {root}, such as {others[0]}, do not match the layout {layout!r}: set a layout "
            f"that matches{hint}"
        )
    if others:
        warnings.warn(
            f"{len(others)} of {len(files)} images in {root}, such as {others[0]}, do not match the layout {layout!r}; "
            "they are skipped",
            stacklevel=2,
        )
    values = {name: [match[name] for match in matches] for name in matches[0].groupdict()}
    classes, labels = number_labels(values.pop("class"))
    split = np.array(values.pop("split")) if "split" in values else None
    columns = {name: np.array(column) for name, column in values.items()}
    return Manifest([f"{root}/{match[0]}" for match in matches], labels, classes, columns, split)


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


def is_system_folder(name: str) -> bool:
    """Return whether a folder was made by an operating system, file server or editor, without images of the user.

    >>> is_system_folder("$Recycle.Bin"), is_system_folder("lost+found"), is_system_folder("lost")
    (True, True, False)
    """
    return name.lower() in _SYSTEM_FOLDERS or _NUMBERED_SYSTEM_FOLDER.fullmatch(name) is not None


def list_images(root: Path, above: Path | None = None) -> list[str]:
    """List all images below a folder, except for names that begin with a dot and for system folders.

    Links to folders are followed unless they lead to a folder above them. Warns of system folders with images, and of
    images of unsupported formats, such as DICOM.

    Args:
        root: The folder.
        above: Folder that the paths are relative to; ``root`` by default.

    Returns:
        Sorted paths with ``/``.

    Raises:
        FileNotFoundError: If there is no image.
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
    images = sorted(file for file in files if file.lower().endswith(IMG_EXTENSIONS))
    unsupported = [file for file in files if file.lower().endswith(UNSUPPORTED_EXTENSIONS)]
    if skipped:
        warnings.warn(
            f"system folders in {root} are skipped with their images: {abbreviated(sorted(skipped))}. Rename them to "
            "use them",
            stacklevel=3,
        )
    if unsupported:
        counts = Counter(Path(file).suffix.lower() for file in unsupported)
        summary = abbreviated([f"{count} {extension}" for extension, count in sorted(counts.items())])
        warnings.warn(f"files in {root} are skipped ({summary}): convert them to PNG or TIFF to use them", stacklevel=3)
    if not images:
        hint = f"set root to a folder with {', '.join(IMG_EXTENSIONS)}"
        if any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            hint = f"it was written by datasets: read it with the class HuggingFace, or as hf:{root}"
        raise FileNotFoundError(f"{root} has no images: {hint}")
    return images


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
