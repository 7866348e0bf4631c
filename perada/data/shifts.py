# SPDX-License-Identifier: Apache-2.0
"""Shifted test sets: what else than the test images the models are scored on, and the corruptions of ImageNet-C."""

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from perada.core.checks import OptionError, check_choice, check_integer
from perada.core.seeding import derive_seed
from perada.core.text import SPREADS
from perada.data.batches.datasets import isolated_randomness, seed_all
from perada.data.batches.samples import Rows, Samples, Store, TensorStore
from perada.data.batches.transforms import resize_uint8
from perada.data.checked import Checked, check
from perada.data.federated import FederatedData
from perada.data.sets.arrays import CORRUPTIONS
from perada.data.sets.base import ImageSet, split_of

ShiftsWhen = Literal["end", "evaluation", "test"]
MAIN: tuple[str, ...] = CORRUPTIONS[:15]
"""The 15 kinds of the benchmark (Hendrycks & Dietterich, ICLR 2019, https://arxiv.org/abs/1903.12261)."""
EXTRA: tuple[str, ...] = CORRUPTIONS[15:]
"""The four that it holds back for validation."""
GROUPS = {"main": MAIN, "extra": EXTRA, "all": MAIN + EXTRA}
"""Words for several kinds of corruption."""
LABEL_SHIFT = "label_shift"
TAKEN = ("local_test", "global_test", "best_mode", "worst_mode", "entropy")
"""What names of other scores begin with."""
SMALLEST = 32
"""Height and width in pixels that an image must have to be corrupted."""


class Shift:
    """A shift of the test images: :class:`Corruptions` or :class:`LabelShift`."""


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
            check_integer("shifts: severity", severity, le=5)
        for what, values in (("kinds", self.names), ("severities", self.severities)):
            if not values or len(set(values)) < len(values):
                raise OptionError(
                    f"shifts: {what}={[*values]} cannot be used; give one at least, and each once",
                    name=f"shifts: {what}",
                    value=[*values],
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds, one by one."""
        return GROUPS.get(self.kinds, (self.kinds,)) if isinstance(self.kinds, str) else tuple(self.kinds)


@dataclass(frozen=True)
class LabelShift(Shift):
    """For each client, the test images of all other clients: all that the clients have but its own.

    The images and their number of each class are the others', so the labels are distributed as theirs together.
    """


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
    found: dict[str, Shift | ImageSet] = {}
    for name, value in given.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.startswith(TAKEN) or name.endswith(SPREADS):
            raise OptionError(
                f"shifts: the name {name!r} cannot be used; give one of letters, digits, '_', '-' and '.', that is no "
                f"other score's: not beginning with {', '.join(TAKEN)}, nor ending in {', '.join(SPREADS)}",
                name="shifts",
            )
        if isinstance(value, Shift | ImageSet):
            found[name] = value
        elif value == LABEL_SHIFT:
            found[name] = LabelShift()
        elif isinstance(value, list) or value in (*GROUPS, *GROUPS["all"]):
            found[name] = Corruptions(value)
        else:
            raise OptionError(
                f"shifts: {name}={value!r} is not a shift; give {LABEL_SHIFT!r}, a kind of corruption "
                f"({', '.join(GROUPS)} or one of them), Corruptions, or an ImageSet with the same classes",
                name=f"shifts: {name}",
                value=value,
            )
    return found


def conditions(shifts: Mapping[str, Shift | ImageSet], checked: Checked, size: int | None) -> list[Condition]:
    """What the models run on, in order, after checking that it fits.

    Raises:
        ImportError: If corruptions are asked for and their library is missing.
        ValueError: If there are no test images, or a shift does not fit the clients' images and classes.
    """
    found: list[Condition] = []
    for name, shift in shifts.items():
        if checked.test is None:
            raise OptionError(
                f"shifts: {name!r} needs test images, and the data has none; give some, or no shifts", name="shifts"
            )
        if isinstance(shift, ImageSet):
            found.append(Condition(name, _labelled(name, shift, checked, size)))
        elif isinstance(shift, Corruptions):
            _check_corruptible(name, checked)
            found += [
                Condition(name, checked.test, kind, severity) for kind in shift.names for severity in shift.severities
            ]
        else:
            if sum(map(bool, checked.test.sizes)) < 2:
                raise OptionError(
                    f"shifts: {name!r} needs test images of two clients, at least; leave it out", name="shifts"
                )
            found.append(Condition(name, checked.test, others=True))
    return found


def _check_corruptible(name: str, checked: Checked) -> None:
    """Refuse to continue without the library, or with images that the corruptions are not made for."""
    try:
        import cv2  # noqa: F401  # whether it loads

        if find_spec("imagecorruptions") is None:
            raise ImportError("no imagecorruptions")
    except ImportError as error:
        raise ImportError(
            f"shifts: corruptions need imagecorruptions-imaug and OpenCV, and one does not load ({error}); install "
            "perada[shifts] and the system's libraries that OpenCV lacks (on Debian libgl1 and libxcb1), or leave the "
            "corruptions out"
        ) from error
    shape, dtype = checked.image
    if dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < SMALLEST:
        raise OptionError(
            f"shifts: {name!r} cannot corrupt images {dtype} of shape {shape}; give uint8 images of 1 or 3 channels, "
            f"and image_size={SMALLEST} or more, to which they are resized before",
            name="shifts",
        )


def _labelled(name: str, images: ImageSet, checked: Checked, size: int | None) -> Store:
    """The test split of another set, whose labels must be of the clients' classes."""
    test = images.with_split(False)
    who = f"shifts: {name!r} ({split_of(test)})"
    if test.labels is None or not len(test):
        raise ValueError(f"{who} has no {'labels' if len(test) else 'images'}; give a set of labelled images")
    if test.num_classes not in (None, checked.num_classes):
        both = f"{test.num_classes} classes and the data has {checked.num_classes}"
        raise ValueError(f"{who} has {both}; give a set with as many")
    try:
        found = check(FederatedData([test]), checked.num_classes, size)
    except ValueError as error:  # the set is the only client of these data
        said = str(error).replace("client 0 has the training", "it has the")
        raise ValueError(f"{who}: {said}") from None
    if found.multilabel != checked.multilabel:
        kind = "several labels" if found.multilabel else "one class"
        raise ValueError(f"{who} has {kind} an image, and the data has not; give a set of the same kind")
    return found.train


def corrupt(image: Tensor, kind: str, severity: int, seed: int) -> Tensor:
    """Corrupt an image by ImageNet-C's function and parameters; the library is imagecorruptions-imaug.

    The image is uint8 (1 or 3, H, W), on the CPU, with sides of ``SMALLEST`` pixels or more; a grey one is corrupted as
    an RGB one with three equal channels, of which the green one is kept. All that is drawn follows from the seed; the
    global streams stay as they are.
    """
    import cv2
    from imagecorruptions import corruption_dict

    if get_worker_info() is not None:
        cv2.setNumThreads(0)  # the threads of OpenCV do not survive the fork of a worker
    pixels = image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    function = corruption_dict[kind]
    # Two of them do not draw from NumPy's stream.
    own = {"seed": derive_seed(seed, "own") % 2**32} if "seed" in inspect.signature(function).parameters else {}
    with isolated_randomness(), np.errstate(all="ignore"):
        seed_all(seed)
        found = np.asarray(function(Image.fromarray(pixels), severity, **own))
    found = np.where(np.isfinite(found), found, pixels)  # a spatter of no drops divides by zero
    corrupted = torch.from_numpy(found.astype(np.uint8)).permute(2, 0, 1)
    return corrupted[1:2] if len(image) == 1 else corrupted


class CorruptedStore(Samples):
    """The samples of a store, each image corrupted as it is read, on the host.

    The draws follow from the run's seed, the kind, the severity and the image's place among all clients' images.
    uint8 images are resized to ``size`` before they are corrupted, unless it is None.
    """

    by_item = True

    def __init__(self, condition: Condition, seed: int, size: int | None) -> None:
        store = condition.store
        if isinstance(store, TensorStore):
            store = copy.copy(store)  # the original may be on an accelerator, where no worker can read
            store.to(torch.device("cpu"), store.images.nbytes)
        self.store, self.sizes = store, store.sizes
        self.kind, self.severity, self.seed, self.size = condition.kind, condition.severity, seed, size

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read rows of the store, and corrupt them."""
        images, labels, failed = self.store.read(owners, indices, key)
        images = images if self.size is None else resize_uint8(images, self.size)
        places = (self.starts[owners] + indices).tolist()
        corrupted = [
            corrupt(image, self.kind, self.severity, derive_seed(self.seed, f"shift/{self.kind}", self.severity, place))
            for image, place in zip(images, places, strict=True)
        ]
        return torch.stack(corrupted), labels, failed
