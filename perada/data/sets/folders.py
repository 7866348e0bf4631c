# SPDX-License-Identifier: Apache-2.0
"""Image sets in folders: one folder per class, a custom layout, or no labels at all."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from perada.core.checks import check_choice, check_name
from perada.core.text import abbreviated
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.nifti import Axis
from perada.data.medical.reading import Frames, MedicalReading, medical_kind
from perada.data.medical.segmentations import image_reference, read_segmentation
from perada.data.medical.windows import check_window
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest
from perada.data.sets.image_paths import list_images
from perada.data.sets.layouts import class_folders, layout_pattern, match_layout
from perada.data.sets.manifest import DEFAULT_SIZE, SPLITS, ImageFiles, OwnImages
from perada.data.sets.mask_folders import (
    IMAGES,
    MASKS,
    MaskFolders,
    find_mask_folders,
    find_masks,
    find_masks_beside_images,
    folder_of_clients,
    role_of,
    stem_of_mask,
)
from perada.data.sets.masks import check_mask_values
from perada.tasks import Segmentation, Task


class ImageFolder(OwnImages):
    """Images sorted into one folder per class, as for torchvision's ImageFolder.

    ``root`` has folders ``train`` and ``test`` with the same class folders, or the class folders themselves. With
    ``domains``, class folders are inside of domain folders.

    Args:
        root: The folder.
        domains: Whether class folders are inside of domain folders, which the column ``domain`` then names.
        **options: Options of :class:`.OwnImages`.

    >>> ImageFolder("images", domains=True)  # doctest: +SKIP
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
            manifest = class_folders(split_folders, root, f"{{split}}/{layout}")
        else:
            manifest = class_folders([root], root, layout)
        if self._class_names is None:
            files = [str(PurePosixPath(path).relative_to(root)) for path in manifest.paths]
            reject_masks_in_image_folders(root, files)
            _reject_mask_folders_as_classes(root, files, manifest)
        return manifest

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


    >>> Images("images", layout="{client}/{class}/*")  # doctest: +SKIP
    """

    def __init__(self, root: str, layout: str = "{client}/{class}/*", **options: Any) -> None:
        super().__init__(root, **options)
        self.layout = layout
        layout_pattern(layout)

    @property
    def names_clients(self) -> bool:
        """Whether the layout has a place for the client."""
        return "{client}" in self.layout

    def read_manifest(self) -> Manifest:
        """List the images that match the layout."""
        root = Path(self.root)
        files = list_images(root)
        if self._class_names is None:
            # A layout may leave the masks out.
            pattern = layout_pattern(self.layout)
            matching = [file for file in files if pattern.fullmatch(file)]
            reject_masks_in_image_folders(root, matching or files)
        manifest = match_layout(root, files, self.layout)
        if self._class_names is None:
            _reject_mask_folders_as_classes(root, files, manifest)
        return manifest


class ImageMasks(OwnImages):
    """Images with a mask each, in folders ``images`` and ``masks`` with the same names.

    ``images/0001.jpg`` has the mask ``masks/0001.png``; the extensions may differ. Folders above ``images`` are the
    client, and the split if they are called ``train`` or ``test``, as in ``hospital_a/train/images``. A folder below
    ``images`` is the group of its images, such as a patient, which is never divided between training and test.

    Other common names are recognised: ``Images`` and ``Masks``, ``img`` and ``gt``, or ``imagesTr`` and ``labelsTr``
    as in nnU-Net, whose ends are the split. A mask may then be called like its image with ``_mask`` or ``_seg``.

    Masks are grey images or images with a palette, of the same size as their image, with the number of the class as
    value of a pixel. They are resized by nearest neighbour, and stay in memory. A DICOM SEG is the mask of the image of
    its name, or of all images of the series that it refers to. Its segments, and the numbers of NIfTI volumes with a
    ``dataset.json``, have names: ``classes`` numbers them, and without it each name must have one number everywhere.

    Args:
        root: The folder.
        images: Name of the folders of images; null for common names, beside a folder of masks.
        masks: Name of the folders of masks; null for common names.
        mask_values: Value of each class in the masks, such as ``[0, 255]``; null for 0, 1, 2 and so on. 255 stands for
            pixels without a class, unless it is listed.
        **options: Options of :class:`.OwnImages`.

    >>> ImageMasks("scans", images="images", masks="masks")  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str,
        *,
        images: str | None = None,
        masks: str | None = None,
        mask_values: list[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_name("images", images, optional=True)
        check_name("masks", masks, optional=True)
        # The attribute `images` is taken: it holds the images themselves.
        self.images_folder = images
        self.masks_folder = masks
        self.mask_values = check_mask_values(mask_values)

    @property
    def task(self) -> Task:  # type: ignore[override]  # an attribute of other sets
        """What is learnt from the masks, which is known without reading them."""
        return Segmentation()

    def read_manifest(self) -> Manifest:
        """List the images and their masks.

        Raises:
            FileNotFoundError: If there is no image, or an image has no mask.
            ValueError: If an image has several masks, or a mask several images.
        """
        root = Path(self.root)
        files = list_images(root)
        pairs = self._pair_folders(files)
        pairs_by_image_folder = {pair.path_of_images: pair for pair in pairs}
        if len(pairs_by_image_folder) < len(pairs):
            names = sorted({pair.mask_folder for pair in pairs})
            raise ValueError(
                f"{root} has several folders that may hold the masks of the same images: {abbreviated(names)}; set "
                "images and masks to the names of the folders"
            )
        masks_of_pairs = _list_masks(files, pairs)
        segmentation_of_series = _list_segmentations(root, masks_of_pairs)
        image_paths: list[str] = []
        mask_paths: list[str] = []
        without_mask: list[str] = []
        fields_of_images: list[dict[str, str]] = []
        for file in files:
            parts = PurePosixPath(file).with_suffix("").parts
            pair = _pair_of(parts[:-1], pairs_by_image_folder)
            if pair is None:
                continue
            masks_by_stem = masks_of_pairs[pair]
            stem = stem_of_mask("/".join(pair.parts_below(parts)), masks_by_stem.keys())
            if stem is None:
                mask = segmentation_of_series.get(pair, {}).get(_series_of(root / file))
            else:
                mask = masks_by_stem[stem]
            if mask is None:
                without_mask.append(file)
                continue
            image_paths.append(file)
            mask_paths.append(mask)
            fields_of_images.append(_fields_of_folders(parts, pair, self.shared_groups is True))
        segmentations = {mask for by_series in segmentation_of_series.values() for mask in by_series.values()}
        self._check_pairs(image_paths, mask_paths, without_mask, pairs_by_image_folder, segmentations)
        self._warn_of_unused(files, [*image_paths, *mask_paths])
        self._warn_of_high_root(pairs)
        columns = self._complete_columns(fields_of_images)
        split = columns.pop("split", None)
        paths = [f"{root}/{file}" for file in image_paths]
        return Manifest(paths, columns=columns, split=split, masks=[f"{root}/{file}" for file in mask_paths])

    def _pair_folders(self, files: Sequence[str]) -> list[MaskFolders]:
        """Return the folders of images with those of their masks; raise a FileNotFoundError if there are none."""
        if self.images_folder is None and self.masks_folder is None:
            pairs = find_mask_folders(files)
            if pairs:
                return pairs
        images = self.images_folder or IMAGES
        masks = self.masks_folder or MASKS
        parents: set[tuple[str, ...]] = set()
        for file in files:
            folders = PurePosixPath(file).parts[:-1]
            if images in folders and masks not in folders:
                parents.add(folders[: folders.index(images)])
        if not parents:
            reject_masks_in_image_folders(Path(self.root), files)
            raise FileNotFoundError(
                f"{self.root} has no images in folders called {images!r}; set images and masks to the names of the "
                "folders"
            )
        return [MaskFolders(parent, images, masks) for parent in sorted(parents)]

    def _check_pairs(
        self,
        image_paths: Sequence[str],
        mask_paths: Sequence[str],
        without_mask: Sequence[str],
        pairs_by_image_folder: Mapping[tuple[str, ...], MaskFolders],
        segmentations: Set[str],
    ) -> None:
        """Raise an error for images without mask, and for a mask of several images.

        Args:
            image_paths: Images with a mask.
            mask_paths: Their masks.
            without_mask: Images without a mask.
            pairs_by_image_folder: The pairs of folders by the path of that with images.
            segmentations: Masks that are those of a series.
        """
        if without_mask:
            first = PurePosixPath(without_mask[0]).with_suffix("")
            pair = _pair_of(first.parts[:-1], pairs_by_image_folder)
            assert pair is not None
            expected = PurePosixPath(*pair.path_of_masks, *pair.parts_below(first.parts))
            raise FileNotFoundError(
                f"{len(without_mask)} of {len(image_paths) + len(without_mask)} images in {self.root} have no mask: "
                f"{abbreviated(without_mask)}; add masks such as {expected}.png, or remove the images"
            )
        counts = Counter(mask_paths)
        shared = []
        for image, mask in zip(image_paths, mask_paths, strict=True):
            if counts[mask] > 1 and mask not in segmentations:
                shared.append(image)
        if shared:
            raise ValueError(
                f"several images in {self.root} have the same mask: {abbreviated(shared)}; combine the channels of an "
                "image in one file, or rename the files"
            )

    def _warn_of_unused(self, files: Sequence[str], used: Sequence[str]) -> None:
        """Warn of images that are skipped: their folder is named for images, but no folder of masks is beside it."""
        unused = []
        for file in sorted({*files}.difference(used)):
            roles = [role_of(folder) for folder in PurePosixPath(file).parts[:-1]]
            kinds = [role.file_kind for role in roles if role is not None]
            if kinds and kinds[-1] == IMAGES:
                unused.append(file)
        if unused:
            warnings.warn(
                f"{len(unused)} images in {self.root} are in folders without masks beside them, such as {unused[0]}; "
                "they are skipped",
                stacklevel=2,
            )

    def _warn_of_high_root(self, pairs: Sequence[MaskFolders]) -> None:
        """Warn if root is above the clients' folders, so that all images belong to a single client."""
        shared = folder_of_clients([pair.parent for pair in pairs], SPLITS.keys())
        if shared:
            clients = sorted({pair.parent[len(shared)] for pair in pairs})
            warnings.warn(
                f"all images in {self.root} belong to one client, {shared[0]!r}: if the folders in it are clients "
                f"({abbreviated(clients)}), set root to {Path(self.root, *shared)}",
                stacklevel=2,
            )

    def _complete_columns(self, fields_of_images: Sequence[Mapping[str, str]]) -> dict[str, Array]:
        """Return clients, splits and groups as columns; raise a ValueError for one that only some images have."""
        values_of_columns: dict[str, list[str]] = {}
        for fields_of_image in fields_of_images:
            for name, value in fields_of_image.items():
                values_of_columns.setdefault(name, []).append(value)
        incomplete = sorted(name for name, values in values_of_columns.items() if len(values) < len(fields_of_images))
        if incomplete:
            raise ValueError(
                f"only some of the images in {self.root} are in a folder for the {incomplete[0]}; use the same levels "
                "of folders for all images"
            )
        return {name: np.array(values) for name, values in values_of_columns.items()}


def _list_masks(files: Iterable[str], pairs: Sequence[MaskFolders]) -> dict[MaskFolders, dict[str, str]]:
    """Return the files of the masks of each pair of folders, by their names without extension."""
    pairs_by_mask_folder = {pair.path_of_masks: pair for pair in pairs}
    masks_of_pairs: dict[MaskFolders, dict[str, str]] = {pair: {} for pair in pairs}
    for file in files:
        parts = PurePosixPath(file).with_suffix("").parts
        pair = _pair_of(parts[:-1], pairs_by_mask_folder)
        if pair is not None:
            stem = "/".join(pair.parts_below(parts))
            masks_of_pairs[pair][stem] = file
    return masks_of_pairs


def _list_segmentations(
    root: Path, masks_of_pairs: Mapping[MaskFolders, Mapping[str, str]]
) -> dict[MaskFolders, dict[str, str]]:
    """Return the DICOM SEG of each series in the folders of masks, by the UID of the series."""
    segmentation_of_series: dict[MaskFolders, dict[str, str]] = {}
    for pair, masks_by_stem in masks_of_pairs.items():
        for file in masks_by_stem.values():
            # Reading a mask names what is wrong with it.
            with suppress(MedicalImageError, OSError):
                if medical_kind(root / file) == "DICOM":
                    by_series = segmentation_of_series.setdefault(pair, {})
                    for series in read_segmentation(root / file).series:
                        by_series[series] = file
    return segmentation_of_series


def _series_of(path: Path) -> str:
    """Return the UID of the series of a DICOM file; an empty text for other files."""
    with suppress(MedicalImageError, OSError):
        if medical_kind(path) == "DICOM":
            return image_reference(path).series
    return ""


def _pair_of(folders: tuple[str, ...], pairs: Mapping[tuple[str, ...], MaskFolders]) -> MaskFolders | None:
    """Return the pair whose folder, the key, is one of nested folders; None if there is none."""
    for depth in range(1, len(folders) + 1):
        if folders[:depth] in pairs:
            return pairs[folders[:depth]]
    return None


def _fields_of_folders(parts: Sequence[str], pair: MaskFolders, shared_groups: bool) -> dict[str, str]:
    """Return client, split and group of an image, as far as its folders name them.

    Args:
        parts: Folders and name of the image.
        pair: The folder of images that it is in, and that of the masks.
        shared_groups: Whether a group of the same name is the same group in the folders of all clients.
    """
    fields: dict[str, str] = {}
    for folder in pair.parent:
        if folder.lower() in SPLITS:
            fields["split"] = folder
        else:
            fields.setdefault("client", folder)
    if pair.split:
        fields["split"] = pair.split
    *folders_below, _ = pair.parts_below(parts)
    if folders_below:
        fields["group"] = "/".join(folders_below)
        if "client" in fields and not shared_groups:
            # Patients of different clients may have the same number.
            fields["group"] = f"{fields['client']}/{fields['group']}"
    return fields


def have_masks(files: Iterable[str]) -> bool:
    """Return whether images have masks: whether folders of images and of masks are beside each other.

    Args:
        files: Paths below a folder, with ``/``.
    """
    return bool(find_mask_folders(files))


def reject_masks_in_image_folders(root: Path, files: Sequence[str]) -> None:
    """Raise a ValueError if some of the images are masks in the folders of their images, which would be images too.

    Args:
        root: The folder, for the message.
        files: Paths of images below it, with ``/``.
    """
    image_of_mask = find_masks_beside_images(files)
    if not image_of_mask:
        return
    mask, image = next(iter(image_of_mask.items()))
    folder = PurePosixPath(image).parent
    raise ValueError(
        f"{len(image_of_mask)} of {len(files)} images in {root} are named like masks of others, such as {mask} and "
        f"{image}, and would be images themselves. To learn masks, move them to folders called masks beside folders "
        f"called images ({folder / IMAGES / PurePosixPath(image).name} and "
        f"{folder / MASKS / PurePosixPath(mask).name}), or list both in a table with the columns path and mask; to "
        "learn classes, take the masks out. If they are images, declare classes"
    )


def _reject_mask_folders_as_classes(root: Path, files: Sequence[str], manifest: Manifest) -> None:
    """Raise a ValueError if the classes or the clients of images are their folders and those of their masks."""
    classes = list(manifest.classes or ())
    clients = sorted({*manifest.columns.get("client", ())})
    for names in (classes, clients):
        roles = [role_of(name) for name in names]
        kinds = {role.file_kind for role in roles if role is not None}
        if None not in roles and len(kinds) > 1:
            _reject_paired_class_folders(root, files, classes)
    for name in classes:
        role = role_of(name)
        if role is not None and role.file_kind == MASKS:
            _reject_class_of_masks(root, files, name, classes)


def _reject_paired_class_folders(root: Path, files: Sequence[str], class_folders: Sequence[str]) -> None:
    """Raise a ValueError if folders named like those of images and of masks are beside each other.

    Args:
        root: The folder, for the message.
        files: Paths of all images below it.
        class_folders: All classes.
    """
    confirmation = f"if they are classes, declare classes: {list(class_folders)}"
    pairs = find_mask_folders(files)
    if pairs:
        first = pairs[0]
        raise ValueError(
            f"{root} has images and their masks in folders such as {'/'.join(first.path_of_images)} and "
            f"{'/'.join(first.path_of_masks)}, which would be classes: read them with ImageMasks; "
            f"{confirmation}"
        )
    # The first file of each kind, by the folders above both.
    first_files: dict[tuple[str, ...], dict[str, str]] = {}
    for file in files:
        folders = PurePosixPath(file).parts[:-1]
        for depth, folder in enumerate(folders):
            role = role_of(folder)
            if role is not None:
                first_files.setdefault(folders[:depth], {}).setdefault(role.file_kind, file)
    for first_of_kind in first_files.values():
        if len(first_of_kind) > 1:
            raise ValueError(
                f"{root} has folders that are named like those of images and masks, and would be classes, but no mask "
                f"has the name of an image ({first_of_kind[IMAGES]}, {first_of_kind[MASKS]}): give each mask the name "
                f"of its image, and read them with ImageMasks; {confirmation}"
            )


def _reject_class_of_masks(root: Path, files: Sequence[str], name: str, class_folders: Sequence[str]) -> None:
    """Raise a ValueError if the files of a class have the names of those in a folder beside it, which are their masks.

    Args:
        root: The folder, for the message.
        files: Paths of all images below it.
        name: A class that is named like a folder of masks.
        class_folders: All classes.
    """
    stems_of_folders: dict[PurePosixPath, dict[str, str]] = {}
    for file in files:
        path = PurePosixPath(file)
        stems_of_folders.setdefault(path.parent, {})[path.stem] = file
    for folder, images in stems_of_folders.items():
        # A class no_mask is the opposite of mask, and not its images.
        if folder.name not in class_folders or name.lower() in folder.name.lower():
            continue
        masks = stems_of_folders.get(folder.parent / name, {})
        image_of_mask: dict[str, str] = {}
        for image_stem in images:
            mask_stem = stem_of_mask(image_stem, masks.keys())
            if mask_stem is not None:
                image_of_mask.setdefault(mask_stem, image_stem)
        if len(masks) < 2 or len(image_of_mask) < len(masks):
            continue
        mask_stem = next(iter(image_of_mask))
        image = images[image_of_mask[mask_stem]]
        raise ValueError(
            f"{root} has the class {name!r}, whose files have the names of those in {folder.name!r}, such as "
            f"{masks[mask_stem]} and {image}, as if they were their masks: rename {folder.name!r} to "
            f"{IMAGES!r}, or read them with ImageMasks, images: {folder.name} and masks: {name}; if they are classes, "
            f"declare classes: {list(class_folders)}"
        )


class UnlabelledFolder(ImageFiles):
    """All images below a folder, without labels, as a public set. Masks of the images are left out.

    Args:
        root: The folder.
        size: As of :class:`.ImageFiles`.
        in_memory: As of :class:`.ImageFiles`.
        train: As of :class:`.ImageFiles`.
        window: As of :class:`.OwnImages`.
        frames: As of :class:`.OwnImages`.
        axis: As of :class:`.OwnImages`.

    >>> UnlabelledFolder("public", size=224)  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str,
        *,
        size: int = DEFAULT_SIZE,
        in_memory: bool = False,
        train: bool = True,
        window: str | list[float] = "file",
        frames: Frames = "middle",
        axis: Axis = "axial",
    ) -> None:
        super().__init__(root, size=size, in_memory=in_memory, train=train)
        # A public set has no clients with windows of their own.
        self.medical = MedicalReading.checked(check_window(window), frames, axis)
        self.window = window
        self.frames = frames
        self.axis = axis

    def read_manifest(self) -> Manifest:
        """List all images; warn of masks."""
        root = Path(self.root)
        files = list_images(root)
        masks = find_masks(files)
        if masks:
            warnings.warn(
                f"{len(masks)} of {len(files)} images in {root}, such as {min(masks)}, are masks of others by their "
                "names; they are skipped",
                stacklevel=2,
            )
        return Manifest([f"{root}/{file}" for file in files if file not in masks])
