# SPDX-License-Identifier: Apache-2.0
"""Find folders of images and folders of their masks beside each other, by their names and by those of their files."""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

IMAGES = "images"
MASKS = "masks"
_IMAGE_NAMES = ("images", "image", "imgs", "img", "pictures", "photos", "scans", "inputs", "input", "jpegimages")
_MASK_NAMES = (
    *("masks", "mask", "msk", "labels", "label", "labelmaps", "segs", "seg", "segmentations", "segmentation"),
    *("segmentationclass", "segmasks", "segmentationmasks", "annotations", "annotation", "annots", "annot"),
    *("gts", "gt", "groundtruths", "groundtruth", "targets", "target"),
)
_SPLITS = {"training": "train", "train": "train", "tr": "train", "testing": "test", "test": "test", "ts": "test"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val"), "val")
_SPLIT_PATTERN = "|".join(_SPLITS)
_FOLDER_PATTERN = re.compile(
    f"(?P<before>{_SPLIT_PATTERN})?(?P<kind>{'|'.join((*_IMAGE_NAMES, *_MASK_NAMES))})(?P<after>{_SPLIT_PATTERN})?"
)
_SUFFIX_OF_CHANNEL = re.compile(r"_\d{4}$")
"""End of the name of an image of nnU-Net, which has a file for each channel."""
_SUFFIXES_OF_MASKS = ("_mask", "_masks", "_seg", "_segmentation", "_label", "_labels", "_gt", "_annotation")


_MASK_BESIDE_IMAGE = re.compile(rf"(?P<image>.*[^/])(?:{'|'.join(_SUFFIXES_OF_MASKS)})(?:_\d+)?", re.IGNORECASE)
"""A mask's path without extension if it begins like that of its image; an image may have several, with numbers."""


class FolderRole(NamedTuple):
    """What the name of a folder says of its files.

    Attributes:
        file_kind: ``images`` or ``masks``.
        split: ``train``, ``test`` or ``val``; empty if the name has none.
    """

    file_kind: Literal["images", "masks"]
    split: str


@lru_cache(maxsize=2**12)
def role_of(folder: str) -> FolderRole | None:
    """Return the role of a folder; None if its name is none of images or masks.

    >>> role_of("imagesTr")
    FolderRole(file_kind='images', split='train')
    >>> role_of("Ground_Truth"), role_of("lesions")
    (FolderRole(file_kind='masks', split=''), None)
    """
    match = _FOLDER_PATTERN.fullmatch(re.sub(r"[\s_.-]+", "", folder).lower())
    if match is None:
        return None
    split = _SPLITS.get(match["before"] or match["after"] or "", "")
    return FolderRole("images" if match["kind"] in _IMAGE_NAMES else "masks", split)


@dataclass(frozen=True)
class MaskFolders:
    """A folder of images and that of their masks, beside each other.

    Attributes:
        parent: The folders above both.
        image_folder: Name of the folder of images.
        mask_folder: Name of the folder of masks.
        split: ``train``, ``test`` or ``val``, if their names have it.
    """

    parent: tuple[str, ...]
    image_folder: str
    mask_folder: str
    split: str = ""

    @property
    def path_of_images(self) -> tuple[str, ...]:
        """The folder of images, with the folders above it."""
        return (*self.parent, self.image_folder)

    @property
    def path_of_masks(self) -> tuple[str, ...]:
        """The folder of masks, with the folders above it."""
        return (*self.parent, self.mask_folder)

    def parts_below(self, parts: Sequence[str]) -> Sequence[str]:
        """Return the part of a path that is below the folder of images, or that of masks."""
        return parts[len(self.parent) + 1 :]


def find_mask_folders(files: Iterable[str]) -> list[MaskFolders]:
    """Find folders of images that have a folder of masks beside them.

    Folders called ``images`` and ``masks`` are, whatever their files. Others, such as ``imagesTr`` and ``labelsTr``,
    or ``img`` and ``gt``, are if a mask has the name of an image.

    Args:
        files: Paths below a folder, with ``/``.

    >>> find_mask_folders(["a/imagesTr/1_0000.png", "a/labelsTr/1.png", "b/images/1.png", "b/texts/1.png"])
    [MaskFolders(parent=('a',), image_folder='imagesTr', mask_folder='labelsTr', split='train')]
    """
    # The keys are the folders above, and then the folder's own name.
    stems_of_folders: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for file in files:
        parts = PurePosixPath(file).with_suffix("").parts
        for depth, folder in enumerate(parts[:-1]):
            if role_of(folder) is not None:
                siblings = stems_of_folders.setdefault(parts[:depth], {})
                siblings.setdefault(folder, set()).add("/".join(parts[depth + 1 :]))
    pairs: list[MaskFolders] = []
    for parent, siblings in stems_of_folders.items():
        for image_folder, image_stems in siblings.items():
            role = role_of(image_folder)
            if role is None or role.file_kind != IMAGES:
                continue
            for mask_folder, mask_stems in siblings.items():
                if role_of(mask_folder) != FolderRole("masks", role.split):
                    continue
                have_plain_names = image_folder == IMAGES and mask_folder == MASKS
                if have_plain_names or any(stem_of_mask(stem, mask_stems) for stem in image_stems):
                    pairs.append(MaskFolders(parent, image_folder, mask_folder, role.split))
    return pairs


def stem_of_mask(stem: str, mask_stems: Set[str]) -> str | None:
    """Return which of the masks is that of an image, both without extension; None if there is none.

    >>> stem_of_mask("p1/0007_0000", {"p1/0007"}), stem_of_mask("7", {"7_segmentation"}), stem_of_mask("7", {"8"})
    ('p1/0007', '7_segmentation', None)
    """
    candidates = [stem, _SUFFIX_OF_CHANNEL.sub("", stem)]
    candidates += [stem + suffix for suffix in _SUFFIXES_OF_MASKS]
    for candidate in candidates:
        if candidate in mask_stems:
            return candidate
    return None


def find_masks_beside_images(files: Iterable[str]) -> dict[str, str]:
    """Find masks in the folders of their images, and return the image of each.

    Args:
        files: Paths below a folder, with ``/``.

    >>> find_masks_beside_images(["a/1.jpg", "a/1_mask.png", "a/1_mask_2.png", "b/1_mask.png"])
    {'a/1_mask.png': 'a/1.jpg', 'a/1_mask_2.png': 'a/1.jpg'}
    """
    files_by_stem = {str(PurePosixPath(file).with_suffix("")): file for file in files}
    image_of_mask: dict[str, str] = {}
    for stem, file in files_by_stem.items():
        match = _MASK_BESIDE_IMAGE.fullmatch(stem)
        if match is not None and match["image"] in files_by_stem:
            image_of_mask[file] = files_by_stem[match["image"]]
    return image_of_mask


def folder_of_clients(parents: Iterable[tuple[str, ...]], splits: Set[str]) -> tuple[str, ...]:
    """Return the folders that all images share, if several folders below would be clients; empty if there are none.

    Args:
        parents: The folders above each folder of images.
        splits: Names of folders of splits, in lower case, which are no clients.

    >>> folder_of_clients([("data", "north", "train"), ("data", "south")], {"train"})
    ('data',)
    >>> folder_of_clients([("north",), ("south",)], {"train"}), folder_of_clients([("data", "north")], {"train"})
    ((), ())
    """
    folders = [list(parent) for parent in parents]
    common_names: list[str] = []
    while folders and all(folders):
        first_folders = {parent[0] for parent in folders}
        if any(name.lower() in splits for name in first_folders):
            return ()
        if len(first_folders) > 1:
            return tuple(common_names)
        common_names.append(folders[0][0])
        folders = [parent[1:] for parent in folders]
    return ()


def find_masks(files: Sequence[str]) -> set[str]:
    """Return the files that are masks of others by their names: in the same folder, or in a folder beside it.

    Args:
        files: Paths below a folder, with ``/``.

    >>> sorted(find_masks(["a/1.jpg", "a/1_mask.png", "images/2.png", "masks/2.png", "texts/2.png"]))
    ['a/1_mask.png', 'masks/2.png']
    """
    masks = set(find_masks_beside_images(files))
    for pair in find_mask_folders(files):
        folder = "/".join(pair.path_of_masks) + "/"
        masks.update(file for file in files if file.startswith(folder))
    return masks
