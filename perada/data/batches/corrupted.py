# SPDX-License-Identifier: Apache-2.0
"""Images corrupted as they are read: the corruptions of ImageNet-C."""

import copy
import inspect
from importlib.util import find_spec

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from perada.core.seeding import derive_seed
from perada.data.batches.samples import Store, TensorStore, isolated_randomness, seed_all
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.arrays import CORRUPTIONS

MAIN: tuple[str, ...] = CORRUPTIONS[:15]
"""The 15 kinds of the benchmark (Hendrycks & Dietterich, ICLR 2019, https://arxiv.org/abs/1903.12261)."""
EXTRA: tuple[str, ...] = CORRUPTIONS[15:]
"""The four that it holds back for validation."""
SMALLEST = 32
"""Height and width in pixels that an image must have."""


def check_installed() -> None:
    """Refuse to continue without the library, or without what it needs, by an ImportError that says what to install."""
    if find_spec("imagecorruptions") is None:
        raise ImportError(
            "shifts: corruptions need the package imagecorruptions-imaug, which is not installed; install "
            "perada[shifts], or leave the corruptions out"
        )
    try:
        import cv2  # noqa: F401  # whether it loads
    except ImportError as error:
        raise ImportError(
            f"shifts: corruptions need OpenCV, which does not load here ({error}); install the system's libraries that "
            "it lacks (on Debian libgl1 and libxcb1), or opencv-python-headless in place of opencv-python"
        ) from error


def corrupt(image: Tensor, kind: str, severity: int, seed: int) -> Tensor:
    """Corrupt an image by ImageNet-C's function and parameters; the library is imagecorruptions-imaug.

    A grey image is corrupted as an RGB one with three equal channels, of which the green one is kept.

    Args:
        image: uint8 (1 or 3, H, W), on the CPU, with sides of ``SMALLEST`` pixels or more.
        kind: One of ``MAIN`` or ``EXTRA``.
        severity: From 1 to 5.
        seed: All that is drawn follows from it; the global streams stay as they are.

    Returns:
        uint8, of the same shape.
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


class CorruptedStore:
    """The samples of a store, each image corrupted as it is read, on the host.

    The draws follow from the run's ``seed``, the kind, the severity and the image's place among all clients' images.

    Args:
        store: Images uint8.
        kind: The corruption.
        severity: From 1 to 5.
        seed: The run's seed.
        size: Height and width that images are resized to before they are corrupted; None keeps them.
    """

    def __init__(self, store: Store, kind: str, severity: int, seed: int, size: int | None) -> None:
        if isinstance(store, TensorStore):
            store = copy.copy(store)  # the original may be on an accelerator, where no worker can read
            store.images, store.labels = store.images.cpu(), None if store.labels is None else store.labels.cpu()
        self.store, self.sizes = store, store.sizes
        self.kind, self.severity, self.seed, self.size = kind, severity, seed, size
        self.starts = torch.tensor([0, *store.sizes]).cumsum(0)[:-1]

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather rows, with the arguments and results of :meth:`perada.data.batches.samples.TensorStore.take`."""
        images, labels = self.store.take(owners, indices, key)
        images = images if self.size is None else resize_uint8(images, self.size)
        places = (self.starts[owners] + indices).tolist()
        corrupted = [
            corrupt(image, self.kind, self.severity, derive_seed(self.seed, f"shift/{self.kind}", self.severity, place))
            for image, place in zip(images, places, strict=True)
        ]
        return torch.stack(corrupted), labels
