# SPDX-License-Identifier: Apache-2.0
"""The images of a survey: also those that training would reject, such as images without a label."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from perada.data import FederatedData, ImageMasks, ImageTable
from perada.data.batches.datasets import resolve_subset
from perada.data.batches.transforms import to_image
from perada.data.medical.reading import DEFAULT_READING
from perada.data.partitions.division import groups_of_images
from perada.data.sets.base import ImageSet, Manifest
from perada.data.sets.image_paths import list_images
from perada.data.sets.label_columns import TRUE_CELLS
from perada.data.sets.label_names import is_missing
from perada.data.sets.manifest import ImageFiles, OwnImages
from perada.data.sets.mask_folders import find_mask_folders, stem_of_mask
from perada.data.sets.medical_rows import add_frames, add_groups
from perada.data.sets.table_files import existing_spelling


@dataclass(frozen=True)
class SurveyedImage:
    """An image to be counted.

    Attributes:
        image_set: The set that reads it.
        path: File of the image, which may name a frame; empty for images that are no files.
        row: Position in its set.
        labels: Names of its labels; None if it has no label. With masks it is empty.
        group: Name of its patient; empty if it is not known.
        mask: File of its mask; None if it has none.
        client: Name of its client; empty if the source names none.
    """

    image_set: ImageSet
    path: str
    row: int
    labels: tuple[str, ...] | None
    group: str = ""
    mask: str | None = None
    client: str = ""

    def prepare(self) -> Tensor:
        """Return the image (Ch, H, W), uint8, as training reads it.

        Raises:
            ValueError: If it cannot be read.
            OSError: Likewise.
        """
        if self.path and isinstance(self.image_set, ImageFiles):
            return self.image_set.read(self.path)
        item = self.image_set[self.row]
        return to_image(item[0] if isinstance(item, tuple) else item)


def images_of_source(image_set: OwnImages) -> list[SurveyedImage]:
    """List the images of a folder or a table, of all splits.

    Raises:
        FileNotFoundError: If there is no image.
        ValueError: If a table has no such column.
    """
    with warnings.catch_warnings():
        # What training warns of is counted here.
        warnings.simplefilter("ignore")
        if isinstance(image_set, ImageTable) and image_set.uid is None:
            listed = _list_table(image_set)
        else:
            listed = _list_manifest(image_set)
        return _with_frames_and_groups(image_set, listed)


def images_of_clients(data: FederatedData) -> dict[str, list[SurveyedImage]]:
    """List the training and test images of each client of a division, by the client's name."""
    names = data.client_names or [str(number) for number in range(len(data.train))]
    images = {}
    for number, name in enumerate(names):
        images[name] = _list_items(data.train[number], data.classes)
        if data.test:
            images[name] += _list_items(data.test[number], data.classes)
    return images


def _list_items(dataset: Dataset[Any], classes: Sequence[str] | None) -> list[SurveyedImage]:
    """List the images of a client."""
    base, rows = resolve_subset(dataset)
    assert isinstance(base, ImageSet)
    groups = groups_of_images(dataset)
    has_groups = base.group_column is not None
    manifest = base.manifest if isinstance(base, ImageFiles) else None
    images = []
    for place, row in enumerate(rows.tolist()):
        labels: tuple[str, ...] | None = ()
        mask = None
        if manifest is not None and manifest.masks is not None:
            mask = manifest.masks[row]
        elif base.labels is not None and base.labels.ndim <= 2:
            labels = _names_of_label(base.labels[row].numpy(), classes)
        images.append(
            SurveyedImage(
                image_set=base,
                path="" if manifest is None else manifest.paths[row],
                row=row,
                labels=labels,
                group=str(groups[place]) if has_groups else "",
                mask=mask,
            )
        )
    return images


def _names_of_label(label: Any, classes: Sequence[str] | None) -> tuple[str, ...] | None:  # noqa: ANN401  # labels of data sets are scalars, arrays or texts
    """Return the names of an image's label, or of all its labels; None if it has none."""
    numbers = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(np.asarray(label) == 1).tolist()
    names = [str(number) if classes is None else classes[number] for number in numbers]
    if np.ndim(label) == 0 and is_missing(names[0]):
        return None
    return tuple(names)


def _list_manifest(image_set: OwnImages) -> list[SurveyedImage]:
    """List the images of a source by its own manifest, or all images below its folder if it rejects them."""
    try:
        manifest = image_set.read_manifest()
    except (ValueError, FileNotFoundError):
        if isinstance(image_set, ImageTable):
            raise
        # Images without masks, or outside the layout, have no labels.
        return _list_folder(image_set)
    images = []
    for row, path in enumerate(manifest.paths):
        labels: tuple[str, ...] | None = ()
        if manifest.labels is not None:
            labels = _names_of_label(manifest.labels[row], manifest.classes)
        elif manifest.numbers is not None:
            labels = manifest.classes
        images.append(
            SurveyedImage(
                image_set=image_set,
                path=path,
                row=row,
                labels=labels,
                group=_cell_of_row(manifest.columns, "group", row),
                mask=None if manifest.masks is None else manifest.masks[row],
                client=_cell_of_row(manifest.columns, "client", row),
            )
        )
    return images


def _list_folder(image_set: OwnImages) -> list[SurveyedImage]:
    """List all images below a folder, without labels, but with the masks that are there."""
    root = Path(image_set.root)
    files = list_images(root)
    mask_of_image: dict[str, str] = {}
    masks: set[str] = set()
    if isinstance(image_set, ImageMasks):
        mask_of_image, masks = _pair_masks(files)
    images = []
    for row, file in enumerate(files):
        if file in masks:
            continue
        mask = mask_of_image.get(file)
        labels = None if mask is None else ()
        mask_path = None if mask is None else f"{root}/{mask}"
        images.append(SurveyedImage(image_set, f"{root}/{file}", row, labels, mask=mask_path))
    return images


def _pair_masks(files: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Find the masks among files, by the common names of their folders.

    Returns:
        The mask of each image that has one, and all masks.
    """
    mask_of_image: dict[str, str] = {}
    masks: set[str] = set()
    for pair in find_mask_folders(files):
        mask_of_stem = _files_by_stem(files, pair.path_of_masks)
        masks.update(mask_of_stem.values())
        for stem, image in _files_by_stem(files, pair.path_of_images).items():
            stem_in_masks = stem_of_mask(stem, mask_of_stem.keys())
            if stem_in_masks is not None:
                mask_of_image[image] = mask_of_stem[stem_in_masks]
    return mask_of_image, masks


def _files_by_stem(files: Sequence[str], folder: tuple[str, ...]) -> dict[str, str]:
    """Return the files below a folder by their paths in it, without extension."""
    prefix = "/".join(folder) + "/"
    return {
        str(PurePosixPath(file.removeprefix(prefix)).with_suffix("")): file for file in files if file.startswith(prefix)
    }


def _list_table(table: ImageTable) -> list[SurveyedImage]:
    """List the rows of a table, also those without a label, a patient or a file."""
    columns = table.listing.columns
    files = columns[table.check_column("path", table.path)]
    groups = _optional_column(table, "group")
    clients = _optional_column(table, "client")
    masks: Sequence[Any] | None = None
    if table.mask is not None:
        masks = columns[table.check_column("mask", table.mask)]
    images = []
    for row, file in enumerate(files):
        mask = _cell_text(masks[row]) if masks is not None else ""
        images.append(
            SurveyedImage(
                image_set=table,
                path=existing_spelling(os.path.join(table.root, _cell_text(file))),
                row=row,
                labels=() if masks is not None else _labels_of_row(table, row),
                group="" if groups is None else _cell_text(groups[row]),
                mask=existing_spelling(os.path.join(table.root, mask)) if mask else None,
                client="" if clients is None else _cell_text(clients[row]),
            )
        )
    return images


def _labels_of_row(table: ImageTable, row: int) -> tuple[str, ...] | None:
    """Return the labels in a row of a table; None if all of its cells are blank or mark a missing label."""
    columns = table.listing.columns
    selected = table.label if table.numbers is None else table.numbers
    if isinstance(selected, str) and table.numbers is None:
        cell = columns[table.check_column("label", selected)][row]
        words = cell if isinstance(cell, list) else _cell_text(cell).split(table.separator or "\0")
        names = tuple(str(word).strip() for word in words if not is_missing(str(word).strip()))
        # With a separator, a blank cell is an image without findings.
        return names if names or table.separator is not None else None
    names_of_columns = [selected] if isinstance(selected, str) else selected
    cells = {name: _cell_text(columns[table.check_column("label", name)][row]) for name in names_of_columns}
    if all(is_missing(cell) for cell in cells.values()):
        return None
    if table.numbers is not None:
        return tuple(name for name, cell in cells.items() if not is_missing(cell))
    return tuple(name for name, cell in cells.items() if cell.lower() in TRUE_CELLS)


def _optional_column(table: ImageTable, name: str) -> Sequence[Any] | None:
    """Return the column of groups or clients; None if there is none."""
    selected = getattr(table, name)
    if not selected and name not in table.listing.columns:
        return None
    return table.listing.columns[table.check_column(name, selected or name)]


def _with_frames_and_groups(image_set: OwnImages, images: Sequence[SurveyedImage]) -> list[SurveyedImage]:
    """Return the images with one for each chosen frame of a medical file, and the patients in their headers."""
    # Each image carries its position through, as a column.
    columns = {"position": np.arange(len(images))}
    if any(image.group for image in images):
        columns["group"] = np.array([image.group for image in images])
    manifest = Manifest([image.path for image in images], columns=columns)
    medical = getattr(image_set, "medical", DEFAULT_READING)
    manifest = add_frames(manifest, medical, foreground_only=False)
    manifest = add_groups(manifest, image_set.dicom_group, None, image_set.digest)
    result = []
    for row, path in enumerate(manifest.paths):
        image = images[int(manifest.columns["position"][row])]
        group = _cell_of_row(manifest.columns, "group", row)
        result.append(SurveyedImage(image_set, path, image.row, image.labels, group, image.mask, image.client))
    return result


def _cell_of_row(columns: Mapping[str, Any], name: str, row: int) -> str:
    """Return a cell of a column; an empty text if there is no such column."""
    return str(columns[name][row]) if name in columns else ""


def _cell_text(cell: object) -> str:
    """Return a cell of a table as text."""
    return "" if cell is None else str(cell).strip()
