# SPDX-License-Identifier: Apache-2.0
"""Count the images of one site, or of one client of a simulation."""

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from tqdm import tqdm

from perada.core.text import near_names
from perada.survey.facts import ImageFacts, MaskFacts, read_facts
from perada.survey.images import SurveyedImage
from perada.survey.layout import (
    ANOTHER_SIZE,
    BACKGROUND_ONLY,
    BLACK_AND_WHITE,
    BLANK,
    CLASS_NUMBERS,
    CONTRADICTION,
    COPY,
    MISSPELT,
    NO_LABEL,
    OTHER_LABEL,
    OTHER_VALUES,
    PER_PATIENT,
    Counts,
    Layout,
    SurveyTally,
)

UNLISTED = 255
"""Value of pixels without a class in masks."""


def survey_images(images: Sequence[SurveyedImage], layout: Layout) -> SurveyTally:
    """Read and count images. The tally of a survey with noise has it."""
    if layout.options.noise_multiplier is not None:
        images = _first_images_of_patients(images, layout.options.images_per_patient)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(partial(read_facts, layout=layout), images)
        facts = list(tqdm(results, total=len(images), desc="reading", leave=False, disable=None))
    counts = count_facts(images, facts, layout)
    if layout.options.noise_multiplier is not None:
        return SurveyTally.with_noise(layout, counts)
    return SurveyTally.of_counts(layout, counts)


def _first_images_of_patients(images: Sequence[SurveyedImage], limit: int) -> list[SurveyedImage]:
    """Return the first images of each patient; an image without a patient is one by itself."""
    num_images: Counter[str] = Counter()
    chosen = []
    for image in images:
        num_images[image.group] += 1
        if not image.group or num_images[image.group] <= limit:
            chosen.append(image)
    return chosen


def count_facts(images: Sequence[SurveyedImage], facts: Sequence[ImageFacts], layout: Layout) -> Counts:
    """Return the exact counts (C,) of images that were read."""
    counter: Counter[tuple[str, str]] = Counter()
    for image, facts_of_image in zip(images, facts, strict=True):
        if facts_of_image.problem:
            counter["unreadable", facts_of_image.problem] += 1
            continue
        counter["images", "read"] += 1
        counter.update(facts_of_image.names.items())
        counter.update(("labels", name) for name in _names_of_labels(image, facts_of_image, layout))
        if facts_of_image.mask is not None:
            counter["values of masks", _kind_of_mask(facts_of_image.mask, image, layout)] += 1
        counter["problems", BLANK] += facts_of_image.is_blank
    _count_patients(counter, images)
    _count_duplicates(counter, images, facts)
    counts = np.zeros(layout.num_counts, dtype=np.int64)
    for pair, count in counter.items():
        counts[layout.places[pair]] = count
    return counts


def _names_of_labels(image: SurveyedImage, facts: ImageFacts, layout: Layout) -> set[str]:
    """Return the names of the counts of an image's labels."""
    if layout.has_masks:
        if facts.mask is None:
            return {NO_LABEL}
        return {layout.classes[number] for number in _classes_in_mask(facts.mask.values, image, layout)}
    if image.labels is None:
        return {NO_LABEL}
    names = set()
    for label in image.labels:
        if label in layout.classes:
            names.add(label)
        else:
            names.add(MISSPELT if near_names(label, layout.classes) else OTHER_LABEL)
    # An image with one label changes one count.
    return names if layout.several_labels else set(sorted(names)[:1])


def _classes_in_mask(values: frozenset[int], image: SurveyedImage, layout: Layout) -> list[int]:
    """Return the numbers of the classes in a mask."""
    listed = getattr(image.image_set, "mask_values", None)
    if listed is None:
        return [value for value in sorted(values) if 0 <= value < len(layout.classes)]
    return [number for number, value in enumerate(listed) if value in values and number < len(layout.classes)]


def _kind_of_mask(mask: MaskFacts, image: SurveyedImage, layout: Layout) -> str:
    """Return what the values of a mask are, one of :data:`.MASK_KINDS`."""
    values = mask.values
    if not mask.fits:
        return ANOTHER_SIZE
    listed = getattr(image.image_set, "mask_values", None)
    allowed = {*(range(len(layout.classes)) if listed is None else listed)}
    if values == {0}:
        return BACKGROUND_ONLY
    if values <= {0, UNLISTED} and UNLISTED in values:
        # Also where they are listed: sites whose values differ need different options.
        return BLACK_AND_WHITE
    return CLASS_NUMBERS if values <= allowed | {UNLISTED} else OTHER_VALUES


def _count_patients(counter: Counter[tuple[str, str]], images: Sequence[SurveyedImage]) -> None:
    """Count patients, by the number of their images."""
    images_of_group = Counter(image.group for image in images)
    without_patient = images_of_group.pop("", 0)
    counter["patients", "images without patient"] += without_patient
    counter["patients", "patients"] += len(images_of_group)
    for num_images in images_of_group.values():
        place = int(np.searchsorted([2, 5, 20], num_images, side="right"))
        counter["images of a patient", PER_PATIENT[place]] += 1


def _count_duplicates(
    counter: Counter[tuple[str, str]], images: Sequence[SurveyedImage], facts: Sequence[ImageFacts]
) -> None:
    """Count images with the pixels of an earlier one, and pixels with different labels."""
    labels_of_digest: dict[bytes, set[object]] = defaultdict(set)
    for image, facts_of_image in zip(images, facts, strict=True):
        if facts_of_image.problem or facts_of_image.is_blank:
            continue
        labels = labels_of_digest[facts_of_image.digest]
        if labels:
            counter["problems", COPY] += 1
        is_new_label = image.labels not in labels
        if labels and is_new_label and len(labels) == 1:
            counter["problems", CONTRADICTION] += 1
        labels.add(image.labels)
