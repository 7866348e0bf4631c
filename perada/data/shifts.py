# SPDX-License-Identifier: Apache-2.0
"""Shifted test sets: what else than the test images the models are scored on."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from perada.core.checks import check_choice, check_whole
from perada.core.text import SPREADS
from perada.data.batches.corrupted import EXTRA, MAIN, SMALLEST, check_installed
from perada.data.batches.samples import Store, as_labels, make_store
from perada.data.federated import Checked
from perada.data.sets.base import ImageSet, split_of

ShiftsWhen = Literal["end", "evaluation", "test"]
GROUPS = {"main": MAIN, "extra": EXTRA, "all": MAIN + EXTRA}
"""Words for several kinds of corruption."""
LABEL_SHIFT = "label_shift"
TAKEN = ("local_test", "global_test", "best_mode", "worst_mode", "entropy")
"""What names of other scores begin with."""


class Shift(ABC):
    """A shift of the test images: :class:`Corruptions` or :class:`LabelShift`.

    Attributes:
        others: Whether a client's model is scored on the images of the other clients alone.
    """

    others = False

    @abstractmethod
    def passes(self) -> list[tuple[str, int]]:
        """Kind of corruption and severity of each pass over the test images; an empty kind corrupts nothing."""


@dataclass(frozen=True)
class Corruptions(Shift):
    """All test images, corrupted in each of some kinds with each of some severities, as in ImageNet-C.

    Source: Hendrycks & Dietterich, ICLR 2019, https://arxiv.org/abs/1903.12261.

    Args:
        kinds: Names of kinds, or one name; or ``main`` (15), ``extra`` (4), ``all`` (19).
        severities: Whole numbers from 1, the mildest, to 5.

    Raises:
        ValueError: If a kind is unknown or named twice, or a severity is not one of 1 to 5.
    """

    kinds: str | list[str] = "main"
    severities: Sequence[int] = (1, 2, 3, 4, 5)

    def __post_init__(self) -> None:
        for kind in self.names:
            check_choice("shifts: kind", kind, [*GROUPS["all"]], hint=f"or one word for several: {', '.join(GROUPS)}")
        for severity in self.severities:
            check_whole("shifts: severity", severity, most=5)
        for what, values in (("kinds", self.names), ("severities", self.severities)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"shifts: {what}={[*values]} cannot be used; give one at least, and each once")

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds, one by one."""
        return GROUPS.get(self.kinds, (self.kinds,)) if isinstance(self.kinds, str) else tuple(self.kinds)

    def passes(self) -> list[tuple[str, int]]:
        """Each kind with each severity."""
        return [(kind, severity) for kind in self.names for severity in self.severities]


class LabelShift(Shift):
    """For each client, the test images of all other clients: all that the clients have but its own.

    The images and their number of each class are the others', so the labels are distributed as theirs together.
    """

    others = True

    def passes(self) -> list[tuple[str, int]]:
        """One, over the images as they are."""
        return [("", 0)]

    def __repr__(self) -> str:
        return "LabelShift()"


Given = Shift | ImageSet | list[str] | str
"""How a shift may be given: an object, kinds of corruption, or one of the words."""


class Condition(NamedTuple):
    """Images that all models run on once, for a part of a shift or all of it.

    Attributes:
        shift: The name of the shift.
        store: The images, before they are corrupted.
        kind: Of the corruption; empty where there is none.
        severity: Of the corruption.
        others: Whether a client's model is scored on the images of the other clients alone.
    """

    shift: str
    store: Store
    kind: str = ""
    severity: int = 0
    others: bool = False


def as_shifts(given: Mapping[str, Given]) -> dict[str, Shift | ImageSet]:
    """The shifts by name, with objects for the short forms.

    Raises:
        ValueError: If a name cannot be used, or a value is not a shift.
    """
    for name in given:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.startswith(TAKEN) or name.endswith(SPREADS):
            raise ValueError(
                f"shifts: the name {name!r} cannot be used; give one of letters, digits, '_', '-' and '.', that is no "
                f"other score's: not beginning with {', '.join(TAKEN)}, nor ending in {', '.join(SPREADS)}"
            )
    return {name: _as_shift(name, value) for name, value in given.items()}


def _as_shift(name: str, value: Given) -> Shift | ImageSet:
    if isinstance(value, Shift | ImageSet):
        return value
    if value == LABEL_SHIFT:
        return LabelShift()
    if isinstance(value, list) or value in (*GROUPS, *GROUPS["all"]):
        return Corruptions(value)
    raise ValueError(
        f"shifts: {name}={value!r} is not a shift; give {LABEL_SHIFT!r}, a kind of corruption ({', '.join(GROUPS)} or "
        "one of them), Corruptions, or an ImageSet with the same classes"
    )


def conditions(shifts: Mapping[str, Shift | ImageSet], checked: Checked, size: int | None) -> list[Condition]:
    """What the models run on, in order, after checking that it fits.

    Args:
        shifts: By name.
        checked: The clients' data.
        size: Height and width that uint8 images are resized to.

    Raises:
        ImportError: If corruptions are asked for and their library is missing.
        ValueError: If there are no test images, or a shift does not fit the clients' images and classes.
    """
    found: list[Condition] = []
    for name, shift in shifts.items():
        if checked.test is None:
            raise ValueError(f"shifts: {name!r} needs test images, and the data has none; give some, or no shifts")
        if isinstance(shift, ImageSet):
            found.append(Condition(name, _labelled(name, shift, checked, size)))
            continue
        if shift.others and sum(map(bool, checked.test.sizes)) < 2:
            raise ValueError(f"shifts: {name!r} needs test images of two clients, at least; leave it out")
        if isinstance(shift, Corruptions):
            _check_corruptible(name, checked)
        found += [Condition(name, checked.test, *one, shift.others) for one in shift.passes()]
    return found


def _check_corruptible(name: str, checked: Checked) -> None:
    """Refuse images that the corruptions are not made for."""
    check_installed()
    shape, dtype = checked.image
    if dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            f"shifts: {name!r} cannot corrupt images {dtype} of shape {shape}; give uint8 images of 1 or 3 channels"
        )
    if min(shape[1:]) < SMALLEST:
        raise ValueError(
            f"shifts: {name!r} cannot corrupt images of {shape[1]}×{shape[2]} pixels; give image_size={SMALLEST} or "
            "more, to which they are resized before"
        )


def _labelled(name: str, images: ImageSet, checked: Checked, size: int | None) -> Store:
    """The test split of another set, whose labels must be of the clients' classes."""
    test = images.with_split(False)
    who, classes = f"shifts: {name!r} ({split_of(test)})", test.num_classes
    if test.labels is None:
        raise ValueError(f"{who} has no labels, so nothing can be scored on it; give a labelled set")
    if not len(test):
        raise ValueError(f"{who} has no images; give some, or leave it out")
    if classes is not None and classes != checked.num_classes:
        raise ValueError(f"{who} has {classes} classes and the data has {checked.num_classes}; give a set with as many")
    labels = as_labels(test.labels)
    if labels.shape[1:] != ((checked.num_classes,) if checked.multilabel else ()):
        kind = f"vectors of {checked.num_classes} entries" if checked.multilabel else "one class an image"
        raise ValueError(f"{who} has labels of shape {tuple(labels.shape)}, and the data has {kind}; give the same")
    top = 1 if checked.multilabel else checked.num_classes - 1
    wrong = labels[(labels < 0) | (labels > top)]
    if len(wrong):
        raise ValueError(f"{who} has the label {wrong[0].item()}, outside 0..{top}; give a set with the same classes")
    return make_store([test], size=size)
