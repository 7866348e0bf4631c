# SPDX-License-Identifier: Apache-2.0
"""How many patients have changed between two surveys, which a site finds without keeping what it counted."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from perada.data.sets.manifest import ImageFiles
from perada.survey.images import SurveyedImage

DIGEST_BYTES = 8
"""Bytes of a patient's digest: of a million patients two are taken for one with a chance of 1 in 10⁷."""
_NUM_READERS = 8
"""Threads that hash files."""


def digests_of_patients(images: Sequence[SurveyedImage]) -> bytes:
    """Return the digests of all patients, in order, each of a patient's files, labels and masks.

    An image without a patient is one by itself. Digests do not depend on the options of a survey.
    """
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        digests = list(pool.map(_digest_of_image, images))
    images_of_patient: dict[str, list[str]] = defaultdict(list)
    for image, digest in zip(images, digests, strict=True):
        images_of_patient[image.group or digest].append(digest)
    patients = []
    for digests_of_patient in images_of_patient.values():
        content = " ".join(sorted(digests_of_patient)).encode()
        patients.append(hashlib.sha256(content).digest()[:DIGEST_BYTES])
    return b"".join(sorted(patients))


def count_changes(before: bytes, after: bytes) -> int:
    """Return how many patients were added or removed, whichever are more; one who has changed is both.

    Args:
        before: Digests of the patients of a survey.
        after: Those of another one.
    """
    patients_before = _split_digests(before)
    patients_after = _split_digests(after)
    return max(len(patients_before - patients_after), len(patients_after - patients_before))


def _split_digests(digests: bytes) -> set[bytes]:
    return {digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)}


def _digest_of_image(image: SurveyedImage) -> str:
    """Return a digest of an image, its labels and its mask."""
    if isinstance(image.image_set, ImageFiles):
        content = image.image_set.digest(image.path)
        mask = "" if image.mask is None else image.image_set.digest(image.mask)
    else:
        content = hashlib.sha256(image.prepare().numpy().tobytes()).hexdigest()
        mask = ""
    return hashlib.sha256(repr((content, mask, image.labels)).encode()).hexdigest()
