# SPDX-License-Identifier: Apache-2.0
"""Shifted test sets on which models are evaluated in addition to the test images, such as ImageNet-C's corruptions."""

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
from perada.core.text import SPREADS, dtype_name, value_text
from perada.data.batches.datasets import isolated_randomness, seed_all
from perada.data.batches.samples import MapStore, Rows, Samples, Store, TensorStore
from perada.data.batches.transforms import resize_uint8
from perada.data.checked import CheckedData, check
from perada.data.federated import FederatedData
from perada.data.sets.arrays import CORRUPTIONS
from perada.data.sets.base import ImageSet, split_of
from perada.tasks import Task

ShiftsWhen = Literal["end", "evaluation", "test"]
MAIN: tuple[str, ...] = CORRUPTIONS[:15]
"""The 15 kinds of the benchmark (Hendrycks & Dietterich, ICLR 2019, https://arxiv.org/abs/1903.12261)."""
EXTRA: tuple[str, ...] = CORRUPTIONS[15:]
"""The four kinds that the benchmark reserves for validation."""
GROUPS = {"main": MAIN, "extra": EXTRA, "all": MAIN + EXTRA}
"""Names of groups of kinds."""
MOVING = ("elastic_transform", "zoom_blur")
"""The kinds that move the content of images."""
LABEL_SHIFT = "label_shift"
RESERVED_PREFIXES = ("local_test", "global_test", "best_mode", "worst_mode", "entropy")
"""Beginnings of the names of other scores."""
MIN_SIZE = 32
"""Height and width in pixels that an image must have to be corrupted."""


class Shift:
    """Base class of the shifts of the test images, :class:`Corruptions` and :class:`LabelShift`."""


@dataclass(frozen=True)
class Corruptions(Shift):
    """All test images with each of the given corruptions at each of the given severities, as in ImageNet-C.

    Source: Hendrycks & Dietterich, ICLR 2019, https://arxiv.org/abs/1903.12261.

    Args:
        kinds: Names of kinds of corruption, or one name; or ``main`` (15), ``extra`` (4), ``all`` (19).
        severities: Integers from 1, the mildest, to 5.

    Raises:
        ValueError: If a kind is unknown or named twice, or a severity is not one of 1 to 5.

    >>> Corruptions(kinds=["fog", "gaussian_noise"], severities=(1, 5)).severities
    (1, 5)
    """

    kinds: str | list[str] = "main"
    severities: Sequence[int] = (1, 2, 3, 4, 5)

    def __post_init__(self) -> None:
        for kind in self.names:
            check_choice("shifts: kind", kind, [*GROUPS["all"]], hint=f"groups of kinds are {', '.join(GROUPS)}")
        for severity in self.severities:
            check_integer("shifts: severity", severity, le=5)
        for option, values in (("kinds", self.names), ("severities", self.severities)):
            if not values or len(set(values)) < len(values):
                raise OptionError(
                    f"shifts: {option} must have at least one entry and each only once, got {[*values]}",
                    name=f"shifts: {option}",
                    value=[*values],
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds, with groups resolved."""
        if isinstance(self.kinds, str):
            return GROUPS.get(self.kinds, (self.kinds,))
        return tuple(self.kinds)


@dataclass(frozen=True)
class LabelShift(Shift):
    """The test images of all other clients, for each client.

    The labels are then distributed as those of the other clients together.
    """


ShiftOption = Shift | ImageSet | list[str] | str
"""Accepted values of a shift: an object, kinds of corruption, or one of the short forms."""


class Condition(NamedTuple):
    """One set of images that all models are evaluated on, for a shift or a part of it.

    Attributes:
        shift: Name of the shift.
        store: The images, before they are corrupted.
        corruption: Kind of the corruption; empty for none.
        severity: Severity of the corruption.
        of_other_clients: Whether a client's model is evaluated on the images of the other clients only.
    """

    shift: str
    store: Store
    corruption: str = ""
    severity: int = 0
    of_other_clients: bool = False


def as_shifts(options: Mapping[str, ShiftOption]) -> dict[str, Shift | ImageSet]:
    """Replace the short forms of shifts by objects.

    Raises:
        OptionError: If a name is not allowed, or a value is not a shift.
    """
    converted: dict[str, Shift | ImageSet] = {}
    for name, value in options.items():
        is_text = isinstance(name, str)
        is_reserved = is_text and (name.startswith(RESERVED_PREFIXES) or name.endswith(SPREADS))
        if not is_text or is_reserved or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise OptionError(
                f"shifts: the name {value_text(name)} is not allowed; use letters, digits, '_', '-' and '.'. It must "
                f"not begin with {', '.join(RESERVED_PREFIXES)}, nor end in {', '.join(SPREADS)}, as other scores do",
                name="shifts",
            )
        if isinstance(value, Shift | ImageSet):
            converted[name] = value
        elif value == LABEL_SHIFT:
            converted[name] = LabelShift()
        elif isinstance(value, list) or value in (*GROUPS, *GROUPS["all"]):
            converted[name] = Corruptions(value)
        else:
            raise OptionError(
                f"shifts: {name}={value_text(value)} is not a shift; use {LABEL_SHIFT!r}, a kind of corruption "
                f"({', '.join(GROUPS)} or one of them), Corruptions, or an ImageSet with the same classes",
                name=f"shifts: {name}",
                value=value,
            )
    return converted


def check_movements(shifts: Mapping[str, Shift | ImageSet], task: Task) -> None:
    """Raise an OptionError if a shift moves the content of images whose targets depend on it."""
    for name, shift in shifts.items():
        movements: Sequence[str] = ()
        if isinstance(shift, Corruptions):
            movements = [kind for kind in shift.names if kind in MOVING]
        elif isinstance(shift, ImageSet):
            movements = shift.movements
        task.check_moved_images(movements, f"test images (shifts: {name!r})")


def conditions(shifts: Mapping[str, Shift | ImageSet], checked: CheckedData, size: int | None) -> list[Condition]:
    """Check that the shifts fit the data, and list the conditions to evaluate.

    Args:
        shifts: The shifts by name.
        checked: The clients' data.
        size: Height and width to resize uint8 images to; None keeps them.

    Raises:
        ImportError: If there are corruptions and their library is missing.
        ValueError: If there are no test images, or a shift does not fit the clients' images and classes.
    """
    all_conditions: list[Condition] = []
    for name, shift in shifts.items():
        if checked.test is None:
            raise OptionError(
                f"shifts: {name!r} needs test images, but the data has none; add some, or leave shifts out",
                name="shifts",
            )
        if isinstance(shift, ImageSet):
            all_conditions.append(Condition(name, _labelled_test_set(name, shift, checked, size)))
        elif isinstance(shift, Corruptions):
            _check_corruptible(name, checked)
            for kind in shift.names:
                all_conditions += [Condition(name, checked.test, kind, severity) for severity in shift.severities]
        else:
            num_tested_clients = sum(1 for client_size in checked.test.sizes if client_size)
            if num_tested_clients < 2:
                raise OptionError(
                    f"shifts: {name!r} needs test images of at least two clients; leave it out", name="shifts"
                )
            all_conditions.append(Condition(name, checked.test, of_other_clients=True))
    return all_conditions


def _check_corruptible(name: str, checked: CheckedData) -> None:
    """Check that the libraries of the corruptions load, and support the images.

    Raises:
        ImportError: If a library does not load.
        OptionError: If the images are not supported.
    """
    try:
        import cv2  # noqa: F401  # whether it loads

        if find_spec("imagecorruptions") is None:
            raise ImportError("no imagecorruptions")
    except ImportError as error:
        raise ImportError(
            "shifts: corruptions need imagecorruptions-imaug and OpenCV, but one of them cannot be imported "
            f"({error}); install perada[shifts] and the system libraries that OpenCV requires (on Debian libgl1 and "
            "libxcb1), or leave the corruptions out"
        ) from error
    shape, dtype = checked.image_format
    is_supported = dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3)
    if not is_supported or min(shape[1:]) < MIN_SIZE:
        raise OptionError(
            f"shifts: {name!r} cannot corrupt images {dtype_name(dtype)} of shape {shape}; use uint8 images of 1 or 3 "
            f"channels, and set image_size={MIN_SIZE} or more to resize them first",
            name="shifts",
        )


def _labelled_test_set(name: str, image_set: ImageSet, checked: CheckedData, size: int | None) -> Store:
    """Return the test split of another set, after checking that its labels are of the clients' classes."""
    test = image_set.with_split(False)
    title = f"shifts: {name!r} ({split_of(test)})"
    if not len(test):
        raise ValueError(f"{title} has no images; use a set of labelled images")
    if test.labels is None:
        raise ValueError(f"{title} has no labels; use a set of labelled images")
    if test.num_classes not in (None, checked.num_classes):
        raise ValueError(
            f"{title} must have {checked.num_classes} classes like the data, got {test.num_classes}; use a different "
            "set"
        )
    # The default of numbers in vectors would be several labels.
    shifted_task = None if checked.task.has_classes else checked.task
    try:
        checked_set = check(FederatedData([test]), checked.num_classes, size, task=shifted_task)
    except ValueError as error:
        # The message calls the set a client, since it is the only one of these data.
        message = str(error).replace("client 0 has the training", "it has the").replace("client 0", "its images")
        raise ValueError(f"{title}: {message}") from None
    task = checked_set.task
    if (task.exclusive, task.per_pixel) != (checked.task.exclusive, checked.task.per_pixel):
        raise ValueError(f"{title} has {task.labels_per_image}, unlike the data; use a set of the same kind")
    if isinstance(checked_set.train, MapStore):
        checked_set.train.owner = f"the shifted test set {name!r}"
    return checked_set.train


def corrupt(image: Tensor, corruption: str, severity: int, seed: int) -> Tensor:
    """Corrupt an image with ImageNet-C's functions and parameters, from the library imagecorruptions-imaug.

    Args:
        image: uint8 (1 or 3, H, W) on the CPU, with sides of at least ``MIN_SIZE`` pixels. A grey image is corrupted as
            an RGB image with three equal channels, of which the green one is returned.
        corruption: Kind of corruption.
        severity: From 1, the mildest, to 5.
        seed: Seed of all draws. The global streams are restored.
    """
    import cv2
    from imagecorruptions import corruption_dict

    if get_worker_info() is not None:
        cv2.setNumThreads(0)  # the threads of OpenCV do not survive the fork of a worker
    pixels = image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    function = corruption_dict[corruption]
    options = {}
    # Two of the functions take a seed instead of drawing from NumPy's stream.
    if "seed" in inspect.signature(function).parameters:
        options["seed"] = derive_seed(seed, "own") % 2**32
    with isolated_randomness(), np.errstate(all="ignore"):
        seed_all(seed)
        values = np.asarray(function(Image.fromarray(pixels), severity, **options))
    values = np.where(np.isfinite(values), values, pixels)  # a spatter of no drops divides by zero
    corrupted = torch.from_numpy(values.astype(np.uint8)).permute(2, 0, 1)
    return corrupted[1:2] if len(image) == 1 else corrupted


class CorruptedStore(Samples):
    """The samples of a store, with each image corrupted on the host as it is read.

    The draws are derived from the run's seed, the kind, the severity and the image's position among all clients'
    images.

    Args:
        condition: The images and their corruption.
        seed: The run's seed.
        size: Height and width to resize uint8 images to before they are corrupted; None keeps them.
    """

    by_item = True

    def __init__(self, condition: Condition, seed: int, size: int | None) -> None:
        store = condition.store
        if isinstance(store, TensorStore):
            store = copy.copy(store)  # the original may be on an accelerator, where no worker can read
            store.to(torch.device("cpu"), store.images.nbytes)
        self.store = store
        self.sizes = store.sizes
        self.has_classes = store.has_classes
        self.kind = condition.corruption
        self.severity = condition.severity
        self.seed = seed
        self.size = size

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read rows of the store, and corrupt them."""
        images, labels, failed = self.store.read(owners, indices, key)
        if self.size is not None:
            images = resize_uint8(images, self.size)
        positions = (self.starts[owners] + indices).tolist()
        corrupted = []
        for image, position in zip(images, positions, strict=True):
            seed = derive_seed(self.seed, f"shift/{self.kind}", self.severity, position)
            corrupted.append(corrupt(image, self.kind, self.severity, seed))
        return torch.stack(corrupted), labels, failed
