# SPDX-License-Identifier: Apache-2.0
"""In words, where the images of sites do not fit together, and what to change.

:func:`compare_with_others` is for one site, which knows its own tally and the sum of the others'.
:func:`describe_total` is for the server, which knows the sum only, and how many sites have a count.
"""

import numpy as np
from numpy.typing import NDArray

from perada.core.text import abbreviated, quoted
from perada.survey.layout import (
    ANOTHER_SIZE,
    BACKGROUND_ONLY,
    BLACK_AND_WHITE,
    BLANK,
    CLASS_NUMBERS,
    CONTRADICTION,
    COPY,
    FOREGROUND,
    GREYS,
    MISSING,
    MISSPELT,
    NO_LABEL,
    OTHER,
    OTHER_LABEL,
    OTHER_VALUES,
    Cell,
    SurveyTally,
)

Shares = NDArray[np.float64]

PROPERTIES = ("bits", "colours", "modality", "manufacturer", "spacing in mm", "window")
"""Blocks of which sites should have the same values."""
FAR = 0.5
"""Share of the images in other bins than those of the others, from which distributions differ."""
RARE = 0.05
"""Share of a site's images below which a value is no property of the site."""
MIN_IMAGES = 5
"""Number of images from which distributions are compared."""
MORE_IMAGES_OF_PATIENT = 10.0
"""How many times as many images a patient has here as at the other sites, if patients are probably not told apart."""

REMEDIES = {
    "bits": "export all images with the same number of bits, or set full_scale or window for this site",
    "colours": "save all images as grey, or all as colours, or set gray; MONOCHROME1 is inverted when it is read",
    "modality": "leave other modalities out, or agree that the model is for all of them",
    "manufacturer": "expect other contrasts and sizes; personal adapters are for such differences",
    "spacing in mm": "structures have other sizes in pixels; crop or resample to the same spacing",
    "window": "set window to numbers or a preset, the same at all sites",
    "width": "check that images are not cropped, scaled down or mosaics; all are resized to squares of one size",
    "height": "check that images are not cropped, scaled down or mosaics; all are resized to squares of one size",
}
"""What to do where sites have different values of a block."""
REMEDIES_OF_LABELS = {
    MISSPELT: "spell classes as in the recipe, also upper and lower case",
    OTHER_LABEL: "add the class to the recipe, or leave these images out",
    NO_LABEL: "fill the labels in or add the masks, or leave these images out",
}
REMEDIES_OF_MASKS = {
    BLACK_AND_WHITE: "set mask_values: [0, 255] for this site, or save the number of the class as the value",
    OTHER_VALUES: "save the number of each pixel's class, or set mask_values",
    BACKGROUND_ONLY: "check that masks were saved with their foreground",
    ANOTHER_SIZE: "save masks in the size of their images",
}
REMEDIES_OF_PROBLEMS = {
    COPY: "remove the copies, which may be on both sides of a split",
    CONTRADICTION: "find out which label is right",
    BLANK: "leave images without content out, or check window and full_scale",
}
REMEDIES_OF_REASONS = {
    MISSING: "correct the paths, or copy the files",
    "damaged or truncated": "export these files again",
    "no image": "leave files that are no images out",
    "encrypted or another format": "decrypt them, or leave them out",
    "no pixel data": "leave reports and presentation states out",
    "values out of range": "set full_scale to the value of white",
    "mask with colours or losses": "save masks as PNG, with the number of each pixel's class",
    OTHER: "`perada data inspect` names the files",
}


def compare_with_others(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return how a site differs from the sum of the others, and what to change; empty if it fits.

    Args:
        own: SurveyTally of the site.
        others: Sum of the tallies of the other sites.
    """
    return [
        *_own_faults(own),
        *_compare_classes(own, others),
        *_compare_masks(own, others),
        *_compare_values(own, others),
        *_compare_sizes(own, others),
        *_compare_greys(own, others),
        *_compare_patients(own, others),
    ]


def describe_total(total: SurveyTally) -> list[str]:
    """Return where the sites of a sum do not fit together, and what to change; empty if they do."""
    findings = _own_faults(total)
    findings += _classes_of_some(total)
    for block in PROPERTIES:
        findings += _values_of_some(total, block, REMEDIES[block])
    if total.layout.has_masks:
        findings += _masks_of_some(total)
    findings += _blocks_without_common_bin(total)
    if total.cell("patients", "images without patient").num_sites and total.cell("patients", "patients").num_sites:
        cell = total.cell("patients", "images without patient")
        findings.append(
            f"images without patient {_format_places(cell, total)}; name patients there, so that splits do not "
            "divide them"
        )
    return findings


def _format_places(cell: Cell, tally: SurveyTally) -> str:
    """Return at how many sites a count is."""
    if tally.is_noisy or tally.num_sites == 1:
        return f"({cell.describe(tally.layout.options.min_count)})"
    return f"at {cell.num_sites} of {tally.num_sites} sites"


def _own_faults(tally: SurveyTally) -> list[str]:
    """Return what is wrong whatever other sites have."""
    findings = []
    options = tally.layout.options
    for block, remedies in (
        ("unreadable", REMEDIES_OF_REASONS),
        ("labels", REMEDIES_OF_LABELS),
        ("problems", REMEDIES_OF_PROBLEMS),
    ):
        for name, remedy in remedies.items():
            if (block, name) not in tally.layout.places:
                continue
            cell = tally.cell(block, name)
            if cell.num_sites:
                sites = "" if tally.num_sites == 1 or tally.is_noisy else f" {_format_places(cell, tally)}"
                count = cell.describe(options.min_count)
                noun = "files that cannot be read" if block == "unreadable" else "images"
                findings.append(f"{count} {noun}{sites}: {name}; {remedy}")
    return findings


def _compare_classes(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return which classes only the site, or only others have, and whether their shares are far apart."""
    missing = []
    alone = []
    for name in own.layout.classes:
        is_here = own.cell("labels", name).num_sites > 0
        is_elsewhere = others.cell("labels", name).num_sites > 0
        if is_elsewhere and not is_here:
            missing.append(name)
        if is_here and not is_elsewhere:
            alone.append(name)
    findings = []
    if missing:
        findings.append(
            f"no images of {quoted(missing)}, which other sites have; check the spelling, or expect that the site's "
            "own model does not know them"
        )
    if alone:
        findings.append(f"only this site has images of {quoted(alone)}; check the spelling at the others")
    difference = _difference_of_classes(own, others)
    if difference > FAR and not findings:
        findings.append(
            f"the shares of the classes differ by {100 * difference:.0f} % from those of the others; check that "
            "classes are not exchanged"
        )
    return findings


def _difference_of_classes(own: SurveyTally, others: SurveyTally) -> float:
    """Return the total variation distance of the shares of the classes."""
    num_classes = len(own.layout.classes)
    if min(own.total("labels"), others.total("labels")) < MIN_IMAGES:
        return 0.0
    own_shares = own.shares("labels")[:num_classes]
    other_shares = others.shares("labels")[:num_classes]
    if not own_shares.sum() or not other_shares.sum():
        return 0.0
    return _total_variation(own_shares / own_shares.sum(), other_shares / other_shares.sum())


def _classes_of_some(total: SurveyTally) -> list[str]:
    """Return the classes that not all sites have."""
    cells = {name: total.cell("labels", name) for name in total.layout.classes}
    nowhere = [name for name, cell in cells.items() if not cell.num_sites]
    findings = []
    if nowhere:
        findings.append(f"no images of {quoted(nowhere)} anywhere; check the spelling in the recipe")
    at_some = []
    for name, cell in cells.items():
        if not total.is_noisy and 0 < cell.num_sites < total.num_sites:
            at_some.append(f"{name!r} only {_format_places(cell, total)}")
    if at_some:
        findings.append(
            f"images of {', '.join(at_some)}; check the spelling at the others, whose own models do not know them"
        )
    return findings


def _compare_masks(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return whether the values of the site's masks are others than those of the others."""
    if not own.layout.has_masks:
        return []
    findings = []
    own_shares = _shares_by_name(own, "values of masks")
    other_shares = _shares_by_name(others, "values of masks")
    for kind, share in own_shares.items():
        if kind in REMEDIES_OF_MASKS and share > FAR and other_shares.get(kind, 0.0) <= FAR:
            findings.append(f"masks with {kind}, unlike those of the others; {REMEDIES_OF_MASKS[kind]}")
    another_size = own.cell("values of masks", ANOTHER_SIZE)
    if another_size.num_sites and own_shares.get(ANOTHER_SIZE, 0.0) <= FAR:
        count = another_size.describe(own.layout.options.min_count)
        findings.append(f"{count} masks with {ANOTHER_SIZE}; {REMEDIES_OF_MASKS[ANOTHER_SIZE]}")
    foreground = _difference_of_block(own, others, FOREGROUND)
    if foreground > FAR:
        here = abbreviated(_main_bins(own, FOREGROUND))
        findings.append(
            f"the foreground of masks has {here} of the pixels, but {abbreviated(_main_bins(others, FOREGROUND))} at "
            "the others; check that foreground and background are not exchanged"
        )
    if other_shares.get(BLACK_AND_WHITE, 0.0) > FAR and own_shares.get(CLASS_NUMBERS, 0.0) > FAR:
        findings.append(f"masks with the numbers of the classes, but those of the others have {BLACK_AND_WHITE}")
    return findings


def _masks_of_some(total: SurveyTally) -> list[str]:
    """Return the kinds of wrong masks that some sites have."""
    findings = []
    for kind in (BLACK_AND_WHITE, OTHER_VALUES, ANOTHER_SIZE):
        cell = total.cell("values of masks", kind)
        # Where all sites have 0 and 255, one option is for all of them.
        is_common = kind == BLACK_AND_WHITE and cell.num_sites == total.num_sites
        if cell.num_sites and not is_common:
            findings.append(f"masks with {kind} {_format_places(cell, total)}; {REMEDIES_OF_MASKS[kind]}")
    return findings


def _compare_values(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return the values of properties that the site has and the others lack."""
    findings = []
    for block in PROPERTIES:
        own_shares = _shares_by_name(own, block)
        other_shares = _shares_by_name(others, block)
        unusual = []
        for name, share in own_shares.items():
            if share >= RARE and other_shares.get(name, 0.0) < RARE and other_shares:
                unusual.append(name)
        if unusual:
            findings.append(
                f"{block} {abbreviated(unusual)}, but {abbreviated(list(other_shares))} at the others; "
                f"{REMEDIES[block]}"
            )
    return findings


def _shares_by_name(tally: SurveyTally, block: str) -> dict[str, float]:
    """Return the share of each of a block's counts that is not zero."""
    shares = tally.shares(block).tolist()
    return {name: share for name, share in zip(tally.layout.blocks[block], shares, strict=True) if share > 0}


def _values_of_some(total: SurveyTally, block: str, remedy: str) -> list[str]:
    """Return the values of a property, if not all sites have the same."""
    names = total.names(block)
    if len(names) < 2:
        return []
    if total.is_noisy:
        return [f"{block}: {abbreviated(names)}; {remedy}"]
    cells = {name: total.cell(block, name) for name in names}
    if all(cell.num_sites == total.num_sites for cell in cells.values()):
        return []
    parts = [f"{name} {_format_places(cell, total)}" for name, cell in cells.items()]
    return [f"{block}: {abbreviated(parts, 8)}; {remedy}"]


def _compare_sizes(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return whether the site's images have other sizes."""
    for block in ("width", "height"):
        if _difference_of_block(own, others, block) > FAR:
            here = abbreviated(_main_bins(own, block))
            elsewhere = abbreviated(_main_bins(others, block))
            return [f"{block} {here} pixels, but {elsewhere} at the others; {REMEDIES[block]}"]
    return []


def _compare_greys(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return whether the site's greys are inverted, dark, or otherwise not those of the others."""
    _, median, brightest, prepared = GREYS
    for block in (prepared, median):
        difference = _difference_of_block(own, others, block)
        # Inverted greys are those of the others, once they are inverted again.
        inverted = _difference_of_block(own, others, block, inverts=True)
        if difference > FAR and inverted < difference / 2:
            return [
                f"greys seem to be inverted ({block} {abbreviated(_main_bins(own, block))}, but "
                f"{abbreviated(_main_bins(others, block))} at the others); invert the files, or correct their "
                "photometric interpretation"
            ]
    findings = []
    own_brightest = _mean_bin(own, brightest)
    other_brightest = _mean_bin(others, brightest)
    if own_brightest is not None and other_brightest is not None and 2 * own_brightest + 1 < other_brightest:
        findings.append(
            f"only dark greys are used ({brightest} {abbreviated(_main_bins(own, brightest))}, but "
            f"{abbreviated(_main_bins(others, brightest))} at the others); set full_scale to the value of white, such "
            "as 4095 for 12 bits in files of 16"
        )
    elif _difference_of_block(own, others, prepared) > FAR:
        findings.append(
            f"images are brighter or darker than those of the others after preprocessing "
            f"({abbreviated(_main_bins(own, prepared))}, but {abbreviated(_main_bins(others, prepared))}); compare "
            "window, full_scale and borders"
        )
    return findings


def _compare_patients(own: SurveyTally, others: SurveyTally) -> list[str]:
    """Return whether patients are missing at the site, or not told apart."""
    without = "images without patient"
    findings = []
    if own.cell("patients", without).num_sites and others.cell("patients", "patients").num_sites:
        if not own.cell("patients", "patients").num_sites:
            findings.append(
                "no patients, unlike the others; name them in layout or table, so that splits do not divide them"
            )
        else:
            findings.append("images without patient; name them, so that splits do not divide their images")
    per_patient = _images_per_patient(own)
    per_patient_elsewhere = _images_per_patient(others)
    if per_patient_elsewhere and per_patient > MORE_IMAGES_OF_PATIENT * per_patient_elsewhere:
        findings.append(
            f"a patient has about {per_patient:.0f} images, but {per_patient_elsewhere:.1f} at the others; check that "
            "patients have different identifiers after anonymisation"
        )
    return findings


def _images_per_patient(tally: SurveyTally) -> float:
    """Return the mean number of images of a patient; 0 if it is not known. Few patients count as one per site."""
    patients = tally.cell("patients", "patients")
    num_patients = patients.count + patients.few
    with_patient = tally.cell("images", "read").count - tally.cell("patients", "images without patient").count
    return with_patient / num_patients if num_patients else 0.0


def _blocks_without_common_bin(total: SurveyTally) -> list[str]:
    """Return the sizes and greys of which no bin has images of all sites."""
    if total.is_noisy:
        return []
    findings = []
    for block, remedy in (
        ("width", REMEDIES["width"]),
        (FOREGROUND, "check that foreground and background are not exchanged"),
        (GREYS[-1], "compare window, full_scale and inverted greys; each site's log says whether it is the odd one"),
    ):
        # A site without masks has none of their bins.
        lacks_masks = total.cell("labels", NO_LABEL).num_sites > 0
        if block not in total.layout.blocks or (block == FOREGROUND and lacks_masks):
            continue
        cells = [total.cell(block, name) for name in total.layout.blocks[block]]
        most_sites = max(cell.num_sites for cell in cells)
        num_sites = total.cell("images", "read").num_sites
        if 0 < most_sites < num_sites:
            findings.append(f"{block}: no bin has images of all {num_sites} sites; {remedy}")
    return findings


def _difference_of_block(own: SurveyTally, others: SurveyTally, block: str, inverts: bool = False) -> float:
    """Return the total variation distance of a block's distributions; 0 if there are too few images.

    Bins that are neighbours are taken as one in both ways, so that images just beside an edge are not far apart.

    Args:
        own: SurveyTally of the site.
        others: Sum of the others.
        block: The block.
        inverts: Whether the site's distribution is reversed before.
    """
    if min(own.total(block), others.total(block)) < MIN_IMAGES:
        return 0.0
    own_shares = own.shares(block)
    if inverts:
        own_shares = own_shares[::-1]
    other_shares = others.shares(block)
    pairs = [(_pair_bins(own_shares, first), _pair_bins(other_shares, first)) for first in (0, 1)]
    return min(_total_variation(own_pairs, other_pairs) for own_pairs, other_pairs in pairs)


def _pair_bins(shares: Shares, first: int) -> Shares:
    """Return the sums of neighbouring bins in pairs, of which the first begins at ``first``."""
    edges = [0, *range(first, len(shares), 2)] if first else list(range(0, len(shares), 2))
    return np.add.reduceat(shares, edges)


def _total_variation(shares: Shares, others: Shares) -> float:
    """Return the total variation distance of two distributions."""
    return float(np.abs(shares - others).sum() / 2)


def _main_bins(tally: SurveyTally, block: str) -> list[str]:
    """Return the bins that have a fifth of a block's images each, or else the fullest one."""
    shares = tally.shares(block)
    names = tally.layout.blocks[block]
    main = [name for name, share in zip(names, shares.tolist(), strict=True) if share >= 0.2]
    return main or [names[int(shares.argmax())]]


def _mean_bin(tally: SurveyTally, block: str) -> float | None:
    """Return the mean number of a block's bin; None if there are too few images."""
    if tally.total(block) < MIN_IMAGES:
        return None
    shares = tally.shares(block)
    return float((shares * np.arange(len(shares))).sum())
