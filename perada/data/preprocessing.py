# SPDX-License-Identifier: Apache-2.0
"""What training does to images before the model sees them, as a record that a run keeps, and done to other images."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from perada.core.checks import check_choice, check_integer, check_known, check_number
from perada.core.rounds import ImageConfig
from perada.data.batches.datasets import as_labels, length, resolved
from perada.data.batches.samples import MapStore, make_store
from perada.data.batches.transforms import (
    Preparation,
    check_full_scale,
    decode_opened,
    is_tokens,
    prepare_images,
    read_image,
    resize_uint8,
    to_image,
)
from perada.data.checked import Checked
from perada.data.federated import FederatedData
from perada.data.sets.base import ImageSet
from perada.data.sets.manifest import ImageFiles

Kind = Literal["uint8", "float", "tokens"]
_INTERPOLATION = "bilinear, antialiased"


class Resize(NamedTuple):
    """A resizing to so many pixels, whose result is ``rounded`` to whole numbers again or not."""

    height: int
    width: int
    rounded: bool


@dataclass(frozen=True)
class Preprocessing:
    """Makes images as they come ready for a model, as its training did.

    uint8 images get the number of channels that the training images had. Then they are resized, one step after the
    other, scaled to [0, 1] and normalised; one channel is repeated where the model takes three. Of a run that was
    trained on floating-point images, or on texts, samples are ready as they are.

    Args:
        kind: What the training samples were: ``uint8`` or ``float`` images, or ``tokens``.
        shape: Of what the model gets: (channels, height, width), or (L,).
        channels: Of uint8 images before they are normalised.
        resize: The steps that uint8 images are resized in, bilinear with antialiasing.
        mean: Of each of the model's channels, for values in [0, 1].
        std: Likewise.
        full_scale: The value of white in grey images of more than 8 bits; None as :func:`.decode` has it.
    """

    kind: Kind
    shape: tuple[int, ...]
    channels: int = 0
    resize: tuple[Resize, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    full_scale: float | None = None

    def record(self) -> dict[str, Any]:
        """The same in plain types, for a JSON file."""
        found: dict[str, Any] = {"kind": self.kind, "shape": list(self.shape)}
        if self.kind != "uint8":
            return found
        steps = [{"size": [height, width], "rounded": rounded} for height, width, rounded in self.resize]
        values = {"mean": list(self.mean), "std": list(self.std), "full_scale": self.full_scale}
        return found | {"channels": self.channels, "resize": steps, "interpolation": _INTERPOLATION} | values

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Preprocessing":
        """Read what :meth:`record` wrote.

        Raises:
            ValueError: If a value cannot be used.
            KeyError: If one is missing.
            TypeError: If something is of another type.
        """
        check_choice("preprocessing: kind", record["kind"], get_args(Kind))
        made = cls(record["kind"], tuple(record["shape"]))
        sizes = [*made.shape]
        if made.kind == "uint8":
            check_choice("preprocessing: interpolation", record["interpolation"], [_INTERPOLATION])
            steps = tuple(Resize(one["size"][0], one["size"][1], bool(one["rounded"])) for one in record["resize"])
            mean, std = tuple(record["mean"]), tuple(record["std"])
            for one, deviation in zip(mean, std, strict=True):
                check_number("preprocessing: mean", one)
                check_number("preprocessing: std", deviation, gt=0)
            check_full_scale(record.get("full_scale"))
            made = cls("uint8", made.shape, record["channels"], steps, mean, std, record.get("full_scale"))
            uneven = any(step.height != step.width for step in steps if not step.rounded)
            if [len(made.shape), len(mean)] != [3, made.shape[0]] or uneven:
                raise ValueError(f"preprocessing: mean={record['mean']} or resize={record['resize']} cannot be used")
            sizes += [made.channels, *(side for step in steps for side in step[:2])]
        for side in sizes:
            check_integer("preprocessing: shape", side)
        return made

    def batch(self, images: Sequence[Any]) -> Tensor:
        """Make a batch (B, *shape) of images: paths, PIL images, arrays (H, W) or (H, W, Ch), tensors (Ch, H, W).

        Files and PIL images are decoded as image sets decode them. What is floating point is taken as ready.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If a file is not an image, or an image does not fit.
            TypeError: If something is not an image.
        """
        stored = [self.stored(image) for image in images]
        floats = [x for x in stored if x.is_floating_point()]
        unchanged = set(self.mean) == {0.0} and set(self.std) == {1.0}
        if self.kind == "uint8" and floats and not unchanged and all(0 <= x.min() and x.max() <= 1 for x in floats):
            warnings.warn(
                "the floating-point images lie in [0, 1]; they are taken as normalised already, since training takes "
                f"them so: give uint8 images, or subtract mean {list(self.mean)} and divide by std {list(self.std)}",
                stacklevel=3,
            )
        channels, height, width = self.shape if self.kind == "uint8" else (0, 0, 0)
        image = ImageConfig((channels, height, width), self.mean, self.std)
        return torch.stack([prepare_images(x, image, self.last_size) for x in stored])

    def stored(self, image: Any) -> Tensor:  # noqa: ANN401  # whatever is taken for an image
        """An image as training had it in memory: uint8 (channels, height, width), or a sample that is ready.

        What is done to it later is normalising and, with a :attr:`last_size`, one more resizing.
        """
        x = self._tensor(image)
        if x.dtype != torch.uint8 or self.kind != "uint8":
            return self._ready(x)
        if x.shape[0] != self.channels:
            if x.shape[0] not in (1, 3, 4) or self.channels not in (1, 3):
                raise ValueError(
                    f"an image is uint8 of shape {tuple(x.shape)}, and the training images had {self.channels} "
                    "channels; give as many"
                )
            pixels = x.cpu().permute(1, 2, 0).contiguous().numpy()
            x = self._decoded(Image.fromarray(pixels[:, :, 0] if x.shape[0] == 1 else pixels))
        for height, width, rounded in self.resize:
            if rounded:
                x = resize_uint8(x, (height, width))
        return x

    @property
    def last_size(self) -> int | None:
        """Height and width that images are resized to once they are not whole numbers any more, if they are."""
        return next((height for height, _, rounded in self.resize if not rounded), None)

    def _tensor(self, image: Any) -> Tensor:  # noqa: ANN401
        """An image as a tensor: uint8 (Ch, H, W), or what is ready."""
        deep = isinstance(image, np.ndarray) and image.dtype == np.uint16 and image.ndim == 2
        if deep or isinstance(image, str | Path | Image.Image):
            return self._decoded(Image.fromarray(image) if deep else image)
        if isinstance(image, np.ndarray):
            if image.ndim == 3 and not (image.shape[0] == self.shape[0] != image.shape[2]):
                image = image.transpose(2, 0, 1)
            image = torch.from_numpy(np.array(image, order="C"))  # a copy, which may be written to
        x = to_image(image)
        x = x.unsqueeze(0) if x.ndim == 2 else x
        if x.dtype == torch.uint8 and (x.ndim != 3 or not x.numel()):
            raise ValueError(f"an image is uint8 of shape {tuple(x.shape)}; give (channels, height, width)")
        return x

    def _decoded(self, image: str | Path | Image.Image) -> Tensor:
        """A file or an image of Pillow, with the channels that the training images had."""
        if self.kind != "uint8" or self.channels not in (1, 3):
            what = repr(str(image)) if isinstance(image, str | Path) else "an image of Pillow or 16 bits"
            raise ValueError(
                f"{what} was given, but the run was trained on {self.kind} samples of shape {self.shape}, and how they "
                "were made of files is not known; give such tensors"
            )
        mode = "L" if self.channels == 1 else "RGB"
        if isinstance(image, Image.Image):
            return decode_opened(image, mode, self.full_scale)
        return read_image(image, "fix it, or leave it out", mode, self.full_scale)

    def _ready(self, x: Tensor) -> Tensor:
        """A sample that is ready for the model; a ValueError if it is not."""
        expected = torch.int64 if self.kind == "tokens" else torch.float32
        x = x.float() if x.is_floating_point() else x
        if x.dtype != expected or tuple(x.shape) != self.shape:
            hint = " (or uint8 images, of any size)" if self.kind == "uint8" else ""
            raise ValueError(
                f"a sample is {x.dtype} of shape {tuple(x.shape)}; give {expected} of shape {self.shape}, ready for "
                f"the model{hint}"
            )
        return x


def preprocessing_of(data: Checked, preparation: Preparation, full_scale: float | None = None) -> Preprocessing:
    """What is done to the clients' images of ``data``, but for random changes; ``full_scale`` where files are read."""
    stored = _stored_size(data, preparation.image_size)
    return _preprocessing(*data.image, isinstance(data.train, MapStore), stored, preparation, full_scale)


def preprocessing_of_set(images: ImageSet, preparation: Preparation) -> Preprocessing:
    """What would be done to the images of a set, of which no file is read if they are files.

    Raises:
        FileNotFoundError: If the set is not made of files of one's own, and is not there.
    """
    full_scale = getattr(images, "full_scale", None)
    if isinstance(images, ImageFiles):
        size, by_item = images.size, not images.in_memory
        channels = 1 if images.mode == "L" else 3
        shape: tuple[int, ...] = (channels, size, size)
        return _preprocessing(shape, torch.uint8, by_item, (size, size), preparation, full_scale)
    store = make_store([images])
    if isinstance(store, MapStore):
        image = store.item(0, 0, resize=False)[0]
        size_of_store = None if preparation.image_size else (image.shape[-2], image.shape[-1])
        return _preprocessing(tuple(image.shape), image.dtype, True, size_of_store, preparation, full_scale)
    height, width = store.images.shape[-2:]
    return _preprocessing(
        tuple(store.images.shape[1:]), store.images.dtype, False, (height, width), preparation, full_scale
    )


def _preprocessing(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    by_item: bool,
    stored: tuple[int, int] | None,
    preparation: Preparation,
    full_scale: float | None,
) -> Preprocessing:
    """What is done to images.

    Args:
        shape: Of a training image.
        dtype: Of it.
        by_item: Whether they are read one by one, and then resized as whole numbers.
        stored: Height and width before the data module resizes them; None where they may differ.
        preparation: What the data module does.
        full_scale: The value of white where files are read.
    """
    if dtype != torch.uint8:
        return Preprocessing("tokens" if is_tokens(torch.empty(0, dtype=dtype)) else "float", shape)
    size, steps = preparation.image_size, []
    if stored is not None:
        steps.append(Resize(*stored, True))
    if size is not None and stored != (size, size):
        steps.append(Resize(size, size, by_item))
    image, channels = preparation.image, shape[0]
    mean, std = ((0.5,) * channels, (0.5,) * channels) if image is None else (image.mean, image.std)
    return Preprocessing("uint8", (len(mean), *steps[-1][:2]), channels, tuple(steps), mean, std, full_scale)


def _stored_size(data: Checked, size: int | None) -> tuple[int, int] | None:
    """Height and width of the training images before the data module resizes them; None where they may differ."""
    if size is None or not isinstance(data.train, MapStore):
        height, width = (data.image[0] if isinstance(data.train, MapStore) else data.train.images.shape)[-2:]
        return height, width
    base, _ = resolved(data.train.datasets[0])
    return (base.size, base.size) if isinstance(base, ImageFiles) else None


def joining_data(
    data: FederatedData,
    name: str | None,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    num_classes: int,
    multilabel: bool,
) -> FederatedData:
    """One client's images in memory, prepared as those of a run were, their labels numbered as the run's.

    The data are of the client alone, who is called ``name`` or what they call it, or have it among others. The rest is
    the run's: names of classes, if they have any, their number K, and whether an image may have several labels.

    Raises:
        ValueError: If the client, a class or the kind of labels is not known to the run, or there are no images.
    """
    place, name = data.find(name)
    own = list(map(str, range(num_classes))) if classes is None else list(classes)
    numbers = list(range(num_classes))
    if data.classes is not None:
        for one in data.classes:
            check_known("the data: class", one, own)
        numbers = list(map(own.index, data.classes))
    elif data.num_classes not in (None, num_classes):
        raise ValueError(
            f"the data have {data.num_classes} classes without names, and the run has {num_classes}; name the "
            "data's classes (classes=), or give data with the run's"
        )

    def read(part: Dataset[Any]) -> list[TensorDataset]:
        samples = [part[index] for index in range(length(part))]
        if not samples:
            return []
        images = torch.stack([preprocessing.stored(image) for image, _ in samples])
        labels = torch.stack([as_labels(label, of_one_image=True) for _, label in samples])
        known = range(len(numbers)) if labels.ndim == 1 else (0, 1)
        fits = labels.ndim == 1 or labels.shape[1] == len(numbers)
        if (labels.ndim == 2) != multilabel or not fits or labels.min() < known[0] or labels.max() > known[-1]:
            kind = f"vectors of {num_classes} entries" if multilabel else f"{num_classes} classes"
            raise ValueError(
                f"the labels of the images, {labels.dtype} {tuple(labels.shape)} from {labels.min()} to "
                f"{labels.max()}, do not fit those of the run, {kind}; correct them"
            )
        if not multilabel:
            return [TensorDataset(images, torch.tensor(numbers)[labels])]
        renumbered = labels.new_zeros(len(labels), num_classes)
        renumbered[:, numbers] = labels
        return [TensorDataset(images, renumbered)]

    train, test = read(data.train[place]), read(data.test[place]) if data.test else []
    if not train:
        raise ValueError(f"client {name!r} has no training images; give some")
    return FederatedData(train, test, num_classes=num_classes, classes=classes, client_names=[name])
