# SPDX-License-Identifier: Apache-2.0
"""Checks that clients write the classes of masks with the same numbers.

A client that writes the foreground as 255, where others write 1, would train on its background only: 255 is ignored by
default. Its scores would be better than those of the others.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perada.core.text import abbreviated
from perada.data.sets.label_numbers import find_shifted_numbers

_COMMON_FOREGROUND = 255
"""The foreground in many masks of two classes, and the value that is ignored by default."""
_MASKS_AT_ONCE = 64
"""Number of masks that are counted together."""
_MAX_VALUES = 20
"""A message lists all values if there are at most this many."""
_MAX_CLIENTS = 5
"""Largest number of clients whose values a message lists."""
_MIN_MASKS = 3
"""Smallest number of masks of a client whose background is compared: that of a single image may be small."""
_CLEAR_MINORITY = 1 / 3
"""Largest share of the pixels that is clearly not the background of images that have mostly background."""


class MaskCounter:
    """Counts the values of masks.

    Args:
        ignored: The value of pixels that do not count.

    Attributes:
        masks: Number of masks.
        pixels: Number of pixels of each value.
        with_ignored: Number of masks with ignored pixels.
        with_foreground: Number of masks with a class other than 0.
        with_both: Number of masks with both.

    >>> counter = MaskCounter(ignored=255)
    >>> counter.add(torch.tensor([[[0, 255], [0, 1]]]))
    >>> counter.pixels == {0: 2, 1: 1, 255: 1}
    True
    """

    def __init__(self, ignored: int) -> None:
        self.ignored = ignored
        self.masks = 0
        self.pixels = Counter[int]()
        self.with_ignored = 0
        self.with_foreground = 0
        self.with_both = 0

    def add(self, masks: Tensor) -> None:
        """Count the values of masks (N, H, W)."""
        self.masks += len(masks)
        for part in masks.split(_MASKS_AT_ONCE):
            self._count_pixels(part)
            are_ignored = part == self.ignored
            have_ignored = are_ignored.flatten(1).any(1)
            have_foreground = ((part != 0) & ~are_ignored).flatten(1).any(1)
            self.with_ignored += int(have_ignored.sum())
            self.with_foreground += int(have_foreground.sum())
            self.with_both += int((have_ignored & have_foreground).sum())

    def _count_pixels(self, masks: Tensor) -> None:
        """Add the number of pixels of each value in masks (N, H, W)."""
        if masks.dtype == torch.uint8:
            # Counting is far quicker than sorting all pixels, as unique() does.
            numbers = torch.bincount(masks.flatten())
            values = numbers.nonzero().flatten()
            counts = numbers[values]
        else:
            values, counts = masks.unique(return_counts=True)
        self.pixels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


@dataclass(frozen=True)
class MaskValues:
    """The values of one client's masks.

    Attributes:
        owner: Name of the client for messages.
        part: Part of its data: ``training``, ``test`` or ``validation``.
        counter: Its pixels and masks.
    """

    owner: str
    part: str
    counter: MaskCounter

    @property
    def values(self) -> list[int]:
        """All values, ascending."""
        return sorted(self.counter.pixels)

    @property
    def ignored(self) -> int:
        """The value of pixels that do not count."""
        return self.counter.ignored

    @property
    def classes(self) -> frozenset[int]:
        """The values that stand for classes."""
        return frozenset(self.counter.pixels) - {self.ignored}

    @property
    def has_ignored(self) -> bool:
        """Whether there are pixels that do not count."""
        return self.ignored in self.counter.pixels

    @property
    def lacks_classes(self) -> bool:
        """Whether all pixels are of one class or ignored, and some are ignored."""
        return self.has_ignored and len(self.classes) < 2

    def share(self, value: int) -> float:
        """Return the share of a value among the pixels that count."""
        num_pixels = sum(self.counter.pixels[number] for number in self.classes)
        return self.counter.pixels[value] / max(1, num_pixels)


def side_by_side(values_of_clients: Sequence[MaskValues]) -> str:
    """Return the values of the first clients for a message, those with values that few others have first."""
    frequencies = Counter(tuple(client.values) for client in values_of_clients)
    rarest_first = sorted(values_of_clients, key=lambda client: frequencies[tuple(client.values)])
    descriptions = [f"{client.owner}: {_list_values(client.values)}" for client in rarest_first]
    descriptions_of_first = "; ".join(descriptions[:_MAX_CLIENTS])
    num_hidden = len(descriptions) - _MAX_CLIENTS
    return f"{descriptions_of_first}; and {num_hidden} more" if num_hidden > 0 else descriptions_of_first


def _list_values(values: Iterable[int]) -> str:
    """Return the first values for a message."""
    return abbreviated([str(value) for value in values])


def find_suspects(values_of_clients: Sequence[MaskValues]) -> list[MaskValues]:
    """Return the clients whose masks lack classes that others have, and have ignored pixels instead."""
    if not any(len(values.classes) > 1 for values in values_of_clients):
        return []
    return [values for values in values_of_clients if values.lacks_classes]


def check_masks_of_clients(
    values_of_clients: Sequence[MaskValues], sets: Iterable[object], classes_are_declared: bool
) -> None:
    """Reject or warn of clients whose masks seem to use other numbers for the same classes.

    Args:
        values_of_clients: Values of the masks of each client, and of each part of its data.
        sets: The sets that the masks come from, some of which have the option ``mask_values``.
        classes_are_declared: Whether the number of classes is declared.

    Raises:
        ValueError: If a client has 255 where all others have classes, and no other has ignored pixels; or if most
            numbers up to the largest one stand for no class.
    """
    options = [images.mask_values for images in sets if hasattr(images, "mask_values")]
    values_are_declared = any(values is not None for values in options)
    suspects = find_suspects(values_of_clients)
    if suspects:
        _reject_suspect(suspects[0], values_of_clients, values_are_declared, has_option=bool(options))
    elif not values_are_declared:
        _warn_of_mixed_masks(values_of_clients)
    _warn_of_swapped_classes(values_of_clients)
    if not classes_are_declared and not values_are_declared:
        _check_numbering(values_of_clients, has_option=bool(options))


def _reject_suspect(
    suspect: MaskValues, values_of_clients: Sequence[MaskValues], values_are_declared: bool, has_option: bool
) -> None:
    """Raise a ValueError for a client whose masks lack the classes of others, or warn of it where it may be right.

    Args:
        suspect: The client's values.
        values_of_clients: Those of all clients.
        values_are_declared: Whether the user has listed the values that stand for classes.
        has_option: Whether the set that reads the masks has the option ``mask_values``.
    """
    others = [values for values in values_of_clients if not values.lacks_classes]
    classes_of_others = sorted(frozenset[int]().union(*(values.classes for values in others)))
    own_classes = "".join(f"class {value} and " for value in suspect.classes)
    same_part = [values for values in values_of_clients if values.part == suspect.part]
    problem = (
        f"the {suspect.part} masks of {suspect.owner} have only {own_classes}{suspect.ignored}, which is ignored, but "
        f"other clients have the classes {_list_values(classes_of_others)} ({side_by_side(same_part)})"
    )
    remedy = "write each class with the same number at all clients"
    is_surely_wrong = suspect.ignored == _COMMON_FOREGROUND and not any(values.has_ignored for values in others)
    if not is_surely_wrong or values_are_declared:
        warnings.warn(f"{problem}: {remedy}, unless {suspect.ignored} marks pixels without a class there", stacklevel=5)
        return
    confirmation = "mark them by another value, such as -1, and set ignore_index of the task Segmentation to it"
    if has_option:
        confirmation = f"set mask_values={[*range(classes_of_others[-1] + 1)]}"
    raise ValueError(f"{problem}: {remedy}; if {suspect.ignored} marks pixels without a class there, {confirmation}")


def _warn_of_mixed_masks(values_of_clients: Sequence[MaskValues]) -> None:
    """Warn if masks have either ignored pixels or a foreground, as if some had the ignored value as foreground."""
    counts = [values.counter for values in values_of_clients]
    with_ignored = sum(count.with_ignored for count in counts)
    with_foreground = sum(count.with_foreground for count in counts)
    with_both = sum(count.with_both for count in counts)
    if with_ignored and with_foreground and not with_both:
        ignored = counts[0].ignored
        training = [values for values in values_of_clients if values.part == "training"]
        warnings.warn(
            f"{with_ignored} masks have pixels of {ignored}, which is ignored, and {with_foreground} others have a "
            f"class other than 0, but none has both ({side_by_side(training)}): write each class with the "
            f"same number in all masks, unless {ignored} marks pixels without a class",
            stacklevel=5,
        )


def _warn_of_swapped_classes(values_of_clients: Sequence[MaskValues]) -> None:
    """Warn of clients whose masks seem to have the background as foreground, if there are two classes.

    One of the classes covers a clear minority of the pixels at some clients, and the majority at all others. Those that
    are fewer are named as the ones to look at.
    """
    training = [values for values in values_of_clients if values.part == "training"]
    classes = sorted(frozenset[int]().union(*(values.classes for values in training)))
    compared = [values for values in training if values.counter.masks >= _MIN_MASKS and values.classes]
    if len(classes) != 2:
        return
    background = classes[0]
    with_minority = [values for values in compared if values.share(background) < _CLEAR_MINORITY]
    with_majority = [values for values in compared if values.share(background) > 0.5]
    num_between = len(compared) - len(with_minority) - len(with_majority)
    if with_minority and with_majority and not num_between:
        swapped = with_minority
        others = with_majority
        if len(with_majority) < len(with_minority):
            swapped = with_majority
            others = with_minority
        warnings.warn(
            f"class {background} covers {_format_percentages(swapped, background)} of the pixels in the masks of "
            f"{abbreviated([values.owner for values in swapped])}, but {_format_percentages(others, background)} at "
            f"{abbreviated([values.owner for values in others])}, as if background and foreground were swapped: write "
            "each class with the same number at all clients, unless their images differ so much",
            stacklevel=5,
        )


def _format_percentages(values_of_clients: Sequence[MaskValues], value: int) -> str:
    """Return the smallest and the largest share that a value has at clients, in percent."""
    shares = [100 * values.share(value) for values in values_of_clients]
    smallest = f"{min(shares):.0f}"
    largest = f"{max(shares):.0f}"
    return f"{smallest} %" if smallest == largest else f"{smallest} to {largest} %"


def _check_numbering(values_of_clients: Sequence[MaskValues], has_option: bool) -> None:
    """Check that classes that are not declared are numbered from 0, and alike at all clients.

    Args:
        values_of_clients: Values of the masks of each client, and of each part of its data.
        has_option: Whether the set that reads the masks has the option ``mask_values``.

    Raises:
        ValueError: If most numbers up to the largest one stand for no class.
    """
    all_classes = sorted(frozenset[int]().union(*(values.classes for values in values_of_clients)))
    training = [values for values in values_of_clients if values.part == "training" and values.classes]
    if not all_classes or all_classes[0] < 0:
        # Negative classes are rejected later, with the client that has them.
        return
    largest = all_classes[-1]
    num_unused = largest + 1 - len(all_classes)
    if num_unused:
        problem = (
            f"the masks have the classes {_list_values(all_classes)}, which implies {largest + 1} classes, but "
            f"{num_unused} of them occur in no mask ({side_by_side(training)})"
        )
        remedy = "number the classes from 0 without gaps, with the same numbers at all clients"
        if has_option and len(all_classes) > 1:
            example = f"={all_classes}" if len(all_classes) <= _MAX_VALUES else ""
            remedy += f", or if these are different classes, list the value of each (mask_values{example})"
        if num_unused > len(all_classes):
            raise ValueError(f"{problem}: {remedy}")
        warnings.warn(f"{problem}: {remedy}; or declare the classes (classes, num_classes)", stacklevel=5)
        return
    shift = find_shifted_numbers({values.owner: values.classes for values in training})
    differing = _find_other_numbers(training)
    if shift is not None:
        warnings.warn(
            f"in the masks, {shift.describe('declare the classes (classes, num_classes)')}",
            stacklevel=5,
        )
    elif differing is not None:
        warnings.warn(
            f"the masks of {differing.owner} have other classes than those of other clients "
            f"({side_by_side(training)}): write each class with the same number at all clients, or declare the "
            "classes (classes, num_classes) if these are the same numbers",
            stacklevel=5,
        )


def _find_other_numbers(values_of_clients: Sequence[MaskValues]) -> MaskValues | None:
    """Return a client without a background that all others have, or with no class of some other client; else None."""
    num_without_background = sum(0 not in values.classes for values in values_of_clients)
    foregrounds = {values.classes - {0} for values in values_of_clients} - {frozenset[int]()}
    for values in values_of_clients:
        if num_without_background == 1 and len(values_of_clients) > 1 and 0 not in values.classes:
            return values
        foreground = values.classes - {0}
        if foreground and any(foreground.isdisjoint(other) for other in foregrounds):
            return values
    return None
