# SPDX-License-Identifier: Apache-2.0
"""Rows of a manifest that are medical images: a row for each frame or slice, and the patients as groups."""

import hashlib
import hmac
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from perada.core.text import abbreviated
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import UID_KEYWORDS, open_source, read_dataset, text
from perada.data.medical.nifti import num_slices, read_volume
from perada.data.medical.reading import Kind, MedicalReading, count_frames, known_kinds, with_number
from perada.data.sets.base import Manifest

DicomGroup = Literal["patient", "study", "accession"]
SALT_VARIABLE = "PERADA_SALT"
"""Environment variable of the key of the hashes of identifiers."""
_DEFAULT_SALT = "perada: identifiers of DICOM files"
_KEYWORDS: dict[DicomGroup, tuple[str, ...]] = {
    "patient": ("PatientID", "IssuerOfPatientID"),
    "study": ("StudyInstanceUID",),
    "accession": ("AccessionNumber",),
}
_NUM_READERS = 8
"""Threads that read headers."""


def add_frames(manifest: Manifest, reading: MedicalReading, foreground_only: bool) -> Manifest:
    """Return a manifest with a row for each frame or slice that is an image, in place of the row of its file.

    Args:
        manifest: The files.
        reading: Which frames are images.
        foreground_only: Whether to leave out slices whose mask has no value above 0.
    """
    kinds = known_kinds(manifest.paths)
    if not any(kinds) or (reading.frames == "middle" and not foreground_only):
        return manifest
    masks: Sequence[str | None] = manifest.masks or [None] * len(kinds)
    numbers_of = partial(_frame_numbers, reading=reading, foreground_only=foreground_only)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        numbers_of_files = list(pool.map(numbers_of, manifest.paths, kinds, masks))
    row_numbers: list[int] = []
    paths: list[str] = []
    mask_paths: list[str] = []
    for row, numbers in enumerate(numbers_of_files):
        mask = masks[row]
        mask_kind = None if mask is None else known_kinds([mask])[0]
        for number in numbers:
            row_numbers.append(row)
            paths.append(_numbered_path(manifest.paths[row], number))
            if mask is not None:
                mask_paths.append(_numbered_path(mask, number if mask_kind == "NIfTI" else None))
    if not row_numbers:
        raise ValueError(
            f"no slice of {abbreviated(manifest.paths)} has a mask with a value above 0; set foreground_only to false"
        )
    expanded = manifest.rows(np.array(row_numbers, dtype=np.int64))
    split = None if manifest.split is None else manifest.split[row_numbers]
    return replace(expanded, paths=paths, masks=mask_paths if manifest.masks is not None else None, split=split)


def _numbered_path(path: str, number: int | None) -> str:
    """Return the path of a frame; that of the file if the frame has no number."""
    return path if number is None else with_number(path, number)


def _frame_numbers(
    path: str, kind: Kind | None, mask: str | None, *, reading: MedicalReading, foreground_only: bool
) -> Sequence[int | None]:
    """Return the numbers of a file's frames that are images; None stands for its only frame."""
    if kind is None:
        return [None]
    num_frames = count_frames(path, kind, reading.axis)
    if num_frames == 1:
        return [None]
    if not foreground_only or mask is None or not known_kinds([mask])[0]:
        return reading.chosen_frames(num_frames)
    try:
        labels = read_volume(mask)
    except (MedicalImageError, OSError):
        # Reading the mask names the problem.
        return reading.chosen_frames(num_frames)
    shown = []
    for index in range(num_slices(labels.shape, reading.axis)):
        if (labels.slice(reading.axis, index) > 0).any():
            shown.append(index)
    chosen = reading.chosen_frames(len(shown)) if shown else []
    return [shown[number - 1] + 1 for number in chosen]


def add_groups(
    manifest: Manifest,
    dicom_group: DicomGroup | None,
    client_of_image: Sequence[Any] | None,
    digest: Callable[[str], str],
) -> Manifest:
    """Return a manifest with the groups of medical images, which splits never divide.

    Files of a patient (or study) are a group, and so are the frames of any other file. A group is named for its first
    file: identifiers are hashed when they are read, and are nowhere else.

    Args:
        manifest: The images.
        dicom_group: What files of a group have in common; None for the frames of a file.
        client_of_image: Client of each image, if they are known.
        digest: Function that hashes a file's content.
    """
    kinds = known_kinds(manifest.paths)
    if "group" in manifest.columns or not any(kinds):
        return manifest
    files = [
        path.rpartition("#")[0] if "#" in path and kind else path
        for path, kind in zip(manifest.paths, kinds, strict=True)
    ]
    keys = _keys_of_files(files, kinds, dicom_group)
    if not any(keys.values()) and len({*files}) == len(files):
        return manifest
    group_of_key: dict[str, str] = {}
    for file in files:
        group_of_key.setdefault(keys[file] or file, file)
    _warn_of_single_group(files, keys, client_of_image, dicom_group)
    groups = [group_of_key[keys[file] or file] for file in files]
    identity_of_file: dict[str, str] = {}
    for file in files:
        if file not in identity_of_file:
            identity_of_file[file] = keys[file] or digest(file)
    identities = np.array([identity_of_file[file] for file in files])
    return replace(manifest, columns={**manifest.columns, "group": np.array(groups)}, identities=identities)


def _keys_of_files(
    files: Sequence[str], kinds: Sequence[Kind | None], dicom_group: DicomGroup | None
) -> dict[str, str | None]:
    """Return the salted hash of the identifier of each file; None for those without one."""
    unique = dict(zip(files, kinds, strict=True))
    if dicom_group is None:
        return dict.fromkeys(unique)
    group = dicom_group
    salt = os.environ.get(SALT_VARIABLE) or _DEFAULT_SALT

    def key_of(file: str) -> str | None:
        if unique[file] != "DICOM":
            return None
        try:
            state = os.stat(file)
            return _hashed_identifier(file, group, salt, state.st_size, state.st_mtime_ns)
        except (MedicalImageError, OSError):
            return None

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(unique, pool.map(key_of, unique), strict=True))


@lru_cache(maxsize=2**18)
def _hashed_identifier(path: str, group: DicomGroup, salt: str, size: int, modified_ns: int) -> str | None:
    """Hash the identifier of a file. Size and time of the last modification are part of the key of the cache."""
    with open_source(path) as file:
        dataset = read_dataset(file, with_pixels=False, with_identity=True)
    for candidate in dict.fromkeys((group, "study")):
        words = [text(dataset, keyword) for keyword in _KEYWORDS[candidate]]
        if words[0]:
            message = "\0".join([candidate, *words]).encode()
            return hmac.new(salt.encode(), message, hashlib.sha256).hexdigest()
    return None


def uids_of_files(files: Sequence[str]) -> list[list[str]]:
    """Return the UIDs of image, series and study of each DICOM file; none of files that are others, or damaged."""
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return list(pool.map(_uids_of_file, files))


def _uids_of_file(file: str) -> list[str]:
    try:
        if known_kinds([file]) != ["DICOM"]:
            return []
        with open_source(file) as opened:
            dataset = read_dataset(opened, with_pixels=False, with_identity=True)
    except (MedicalImageError, OSError):
        return []
    uids = [text(dataset, keyword) for keyword in UID_KEYWORDS]
    return [uid for uid in uids if uid]


def _warn_of_single_group(
    files: Sequence[str],
    keys: dict[str, str | None],
    client_of_image: Sequence[Any] | None,
    dicom_group: DicomGroup | None,
) -> None:
    """Warn of clients whose files, of which there are several, all have one identifier, as after anonymisation."""
    owners = ["all clients"] * len(files) if client_of_image is None else [str(client) for client in client_of_image]
    keys_of_owner: dict[str, set[str | None]] = {}
    files_of_owner: dict[str, set[str]] = {}
    for file, owner in zip(files, owners, strict=True):
        keys_of_owner.setdefault(owner, set()).add(keys[file])
        files_of_owner.setdefault(owner, set()).add(file)
    single = [owner for owner, found in keys_of_owner.items() if len(found) == 1 and len(files_of_owner[owner]) > 1]
    affected = [owner for owner in single if None not in keys_of_owner[owner]]
    if affected:
        warnings.warn(
            f"all DICOM files of {abbreviated(affected)} have the same {dicom_group} identifier, so they stay on one "
            "side of every split: if they are of several patients, set dicom_group to study or null, or name the "
            "groups in a layout or table",
            stacklevel=2,
        )
