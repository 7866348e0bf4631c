# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of images before the model sees them, as a record of a run, and its application to other images."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from perada.core.checks import check_choice, check_integer, check_number
from perada.core.rounds import ImageConfig
from perada.core.text import dtype_name
from perada.data.batches.datasets import (
    resolve_subset,
    tensor_format,
)
from perada.data.batches.samples import MapStore, TensorStore, make_store
from perada.data.batches.transforms import (
    Preparation,
    check_full_scale,
    decode_opened,
    is_tokens,
    prepare_images,
    read_image,
    resize_uint8,
    size_of_file,
    to_image,
    upright_size,
)
from perada.data.checked import CheckedData
from perada.data.medical.reading import DEFAULT_READING, MedicalReading
from perada.data.sets.base import ImageSet
from perada.data.sets.manifest import ImageFiles
from perada.tasks.geometry import Size

SampleKind = Literal["uint8", "float", "tokens"]
_INTERPOLATION = "bilinear, antialiased"


class Resize(NamedTuple):
    """One resizing step: height and width in pixels, and whether its result is ``rounded`` to uint8."""

    height: int
    width: int
    rounded: bool


@dataclass(frozen=True)
class Preprocessing:
    """Prepares images for a model in the same way as its training did.

    uint8 images get the number of channels of the training images. Then they are resized, one step after the other,
    scaled to [0, 1] and normalised; one channel is repeated if the model takes three. If the run was trained on
    floating-point images or texts, samples need no preparation.

    Args:
        kind: Kind of the training samples: ``uint8`` or ``float`` images, or ``tokens``.
        shape: Shape of the model's inputs, (channels, height, width) or (L,).
        channels: Channels of the uint8 training images.
        resize: Resizing steps of uint8 images, bilinear with antialiasing.
        mean: Mean of each of the model's channels, for values in [0, 1].
        std: Standard deviation of each of the model's channels.
        full_scale: The value of white in grey images of more than 8 bits; None for the default of :func:`.decode`.
        medical: How DICOM files and NIfTI volumes are decoded.
    """

    kind: SampleKind
    shape: tuple[int, ...]
    channels: int = 0
    resize: tuple[Resize, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    full_scale: float | None = None
    medical: MedicalReading = DEFAULT_READING

    def record(self) -> dict[str, Any]:
        """Return the preprocessing as a dictionary of plain types, for a JSON file."""
        if self.kind != "uint8":
            return {"kind": self.kind, "shape": list(self.shape)}
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "channels": self.channels,
            "resize": [{"size": [step.height, step.width], "rounded": step.rounded} for step in self.resize],
            "interpolation": _INTERPOLATION,
            "mean": list(self.mean),
            "std": list(self.std),
            "full_scale": self.full_scale,
            "medical": self.medical.record(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Preprocessing":
        """Create a preprocessing from the dictionary of :meth:`record`, and check all of its values.

        Raises:
            ValueError: If a value is invalid.
            KeyError: If a value is missing.
            TypeError: If a value has another type.
        """
        kind = record["kind"]
        shape = tuple(record["shape"])
        check_choice("preprocessing: kind", kind, get_args(SampleKind))
        for side in shape:
            check_integer("preprocessing: shape", side)
        if kind != "uint8":
            return cls(kind, shape)

        check_choice("preprocessing: interpolation", record["interpolation"], [_INTERPOLATION])
        check_integer("preprocessing: shape", record["channels"])
        check_full_scale(record.get("full_scale"))
        mean = tuple(record["mean"])
        std = tuple(record["std"])
        for channel_mean, channel_std in zip(mean, std, strict=True):
            check_number("preprocessing: mean", channel_mean)
            check_number("preprocessing: std", channel_std, gt=0)
        steps = []
        has_uneven_last_step = False
        for step in record["resize"]:
            height = step["size"][0]
            width = step["size"][1]
            check_integer("preprocessing: shape", height)
            check_integer("preprocessing: shape", width)
            rounded = bool(step["rounded"])
            steps.append(Resize(height, width, rounded))
            # prepare_images resizes floating-point images to squares only.
            has_uneven_last_step |= not rounded and height != width
        if len(shape) != 3 or len(mean) != shape[0] or has_uneven_last_step:
            raise ValueError(
                f"preprocessing: mean={record['mean']} or resize={record['resize']} does not fit the shape {shape}"
            )
        # Runs of earlier versions have no such record.
        medical = MedicalReading.checked(**record.get("medical", {}))
        return cls(kind, shape, record["channels"], tuple(steps), mean, std, record.get("full_scale"), medical)

    def of_client(self, client: str | None) -> "Preprocessing":
        """Return the preprocessing of a client's images, which may have a window of their own; None for no client."""
        if client is None:
            return self
        return replace(self, medical=self.medical.of_client(client))

    def with_client(self, client: str, reading: MedicalReading) -> "Preprocessing":
        """Return the preprocessing of a run that a client joins, whose images were read with its own window.

        Args:
            client: Name of the client.
            reading: How its medical images were decoded.
        """
        window = reading.of_client(client).window
        assert window is not None
        if self.medical.window_of_client.get(client, self.medical.window) == window:
            return self
        windows = {**self.medical.window_of_client, client: window}
        return replace(self, medical=replace(self.medical, window_of_client=windows))

    def batch(self, images: Sequence[Any]) -> Tensor:
        """Prepare a batch of images.

        Args:
            images: Paths, PIL images, arrays (H, W) or (H, W, Ch), or tensors (Ch, H, W). Files and PIL images are
                decoded as in image sets. Floating-point images are assumed to be normalised.

        Returns:
            The batch (B, *shape): tokens, or floats in double precision if all images are.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If a file is not an image, or an image does not fit.
            TypeError: If something is not an image.
        """
        stored = [self.stored(image) for image in images]
        if self.kind == "uint8":
            self._warn_of_raw_floats([x for x in stored if x.is_floating_point()])
            channels, height, width = self.shape
        else:
            # Unused: samples of other kinds are not changed below.
            channels, height, width = 0, 0, 0
        image = ImageConfig((channels, height, width), self.mean, self.std)
        prepared = [prepare_images(x, image, self.last_size) for x in stored]
        dtypes = {x.dtype for x in prepared}
        if len(dtypes) > 1:
            prepared = [x.float() for x in prepared]
        return torch.stack(prepared)

    def _warn_of_raw_floats(self, float_images: list[Tensor]) -> None:
        """Warn of floating-point images in [0, 1], which are probably not normalised."""
        normalisation_changes_values = set(self.mean) != {0.0} or set(self.std) != {1.0}
        if not float_images or not normalisation_changes_values:
            return
        if all(0 <= x.min() and x.max() <= 1 for x in float_images):
            warnings.warn(
                "the floating-point images are in [0, 1], but are assumed to be normalised already, as in training: "
                f"pass uint8 images, or subtract mean {list(self.mean)} and divide by std {list(self.std)}",
                stacklevel=4,
            )

    def stored(self, image: Any) -> Tensor:  # noqa: ANN401  # see batch()
        """Return an image as it was in memory during training: uint8 (channels, height, width), or a prepared sample.

        The remaining steps are normalisation and, with a :attr:`last_size`, one more resizing.
        """
        x = self._as_tensor(image)
        if x.dtype != torch.uint8 or self.kind != "uint8":
            return self._check_prepared(x)
        num_channels = x.shape[0]
        if num_channels != self.channels:
            if num_channels not in (1, 3, 4) or self.channels not in (1, 3):
                raise ValueError(
                    f"images must have {self.channels} channels, as in training, got uint8 of shape {tuple(x.shape)}"
                )
            pixels = x.cpu().permute(1, 2, 0).contiguous().numpy()
            if num_channels == 1:
                pixels = pixels[:, :, 0]
            x = self._decode_image(Image.fromarray(pixels))
        for step in self.resize:
            if step.rounded:
                x = resize_uint8(x, (step.height, step.width))
        return x

    def own_size(self, image: Any) -> Size:  # noqa: ANN401  # see batch()
        """Return height and width of an image as it is passed, after the rotation in its metadata."""
        if isinstance(image, str | Path):
            width, height = size_of_file(image, self.medical)
        elif isinstance(image, Image.Image):
            width, height = upright_size(image)
        else:
            height, width = self._as_tensor(image).shape[-2:]
        return height, width

    @property
    def last_size(self) -> int | None:
        """Height and width of the last resizing, which is done in floating point; None if there is none."""
        for step in self.resize:
            if not step.rounded:
                return step.height
        return None

    def _as_tensor(self, value: object) -> Tensor:
        """Return an image as a tensor: uint8 (Ch, H, W), or a prepared sample."""
        if isinstance(value, str | Path | Image.Image):
            return self._decode_image(value)
        if isinstance(value, np.ndarray):
            if value.dtype == np.uint16 and value.ndim == 2:
                return self._decode_image(Image.fromarray(value))
            # (H, W, Ch), unless only the first axis fits the model's channels.
            has_channels_first = value.ndim == 3 and value.shape[0] == self.shape[0] != value.shape[2]
            if value.ndim == 3 and not has_channels_first:
                value = value.transpose(2, 0, 1)
            # A copy, since torch warns of arrays that cannot be written to.
            value = torch.from_numpy(np.array(value, order="C"))
        x = to_image(value)
        if x.ndim == 2:
            x = x.unsqueeze(0)
        if x.dtype == torch.uint8 and (x.ndim != 3 or not x.numel()):
            raise ValueError(f"a uint8 image must have the shape (channels, height, width), got {tuple(x.shape)}")
        return x

    def _decode_image(self, image_or_path: str | Path | Image.Image) -> Tensor:
        """Decode a file or an image of Pillow to the channels of the training images."""
        if self.kind != "uint8" or self.channels not in (1, 3):
            description = "an image of Pillow or 16 bits"
            if isinstance(image_or_path, str | Path):
                description = repr(str(image_or_path))
            raise ValueError(
                f"{description} cannot be decoded: the run was trained on {self.kind} samples of shape {self.shape}, "
                "and how they were made from files is unknown; pass such tensors"
            )
        mode = "L" if self.channels == 1 else "RGB"
        if isinstance(image_or_path, Image.Image):
            return decode_opened(image_or_path, mode, self.full_scale)
        return read_image(image_or_path, "fix it, or leave it out", mode, self.full_scale, medical=self.medical)

    def _check_prepared(self, x: Tensor) -> Tensor:
        """Check that a sample is prepared for the model, and return it.

        Raises:
            ValueError: If its dtype or shape is not that of the model's inputs.
        """
        expected = torch.int64 if self.kind == "tokens" else torch.float32
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError("a sample has NaN or infinity; leave it out, or correct it")
        is_float64 = expected == torch.float32 and x.dtype == torch.float64
        if (x.dtype != expected and not is_float64) or tuple(x.shape) != self.shape:
            hint = " (or uint8 images, of any size)" if self.kind == "uint8" else ""
            raise ValueError(
                f"a sample is {dtype_name(x.dtype)} of shape {tuple(x.shape)}; pass {dtype_name(expected)} "
                f"of shape {self.shape}, prepared for the model{hint}"
            )
        return x


def preprocessing_of(
    checked: CheckedData,
    preparation: Preparation,
    full_scale: float | None = None,
    medical: MedicalReading = DEFAULT_READING,
) -> Preprocessing:
    """Return the preprocessing of the clients' images, without augmentation.

    Args:
        checked: The clients' images.
        preparation: The data module's preparation of batches.
        full_scale: The value of white in grey images of more than 8 bits, if files are read.
        medical: How DICOM files and NIfTI volumes are decoded.
    """
    shape, dtype = checked.image_format
    return _make_preprocessing(
        shape,
        dtype,
        by_item=isinstance(checked.train, MapStore),
        stored_size=_stored_size(checked, preparation.image_size),
        preparation=preparation,
        full_scale=full_scale,
        medical=medical,
    )


def first_image_set(checked: CheckedData) -> Any:  # noqa: ANN401  # any dataset
    """Return the dataset that the first client's images are a part of; None if all images are in memory."""
    if isinstance(checked.train, TensorStore):
        return None
    dataset = checked.train.datasets[0]
    # A subclass of Subset may change the items.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def preprocessing_of_set(image_set: ImageSet, preparation: Preparation) -> Preprocessing:
    """Return the preprocessing of the images of a set. Image files are not opened.

    Raises:
        FileNotFoundError: If the files of another set are missing.
    """
    stored_size: tuple[int, int] | None = None
    if isinstance(image_set, ImageFiles):
        channels = 1 if image_set.mode == "L" else 3
        shape: tuple[int, ...] = (channels, image_set.size, image_set.size)
        dtype = torch.uint8
        by_item = not image_set.in_memory
        stored_size = (image_set.size, image_set.size)
    else:
        store = make_store([image_set])
        by_item = isinstance(store, MapStore)
        if isinstance(store, MapStore):
            first_image, _ = store.item(0, 0, resize=False)
            shape, dtype = tensor_format(first_image, 0)
        else:
            shape, dtype = tensor_format(store.images)
        # Items that are read one by one may have other sizes than the first.
        if dtype == torch.uint8 and not (by_item and preparation.image_size):
            stored_size = (shape[-2], shape[-1])
    return _make_preprocessing(
        shape,
        dtype,
        by_item=by_item,
        stored_size=stored_size,
        preparation=preparation,
        full_scale=getattr(image_set, "full_scale", None),
        medical=getattr(image_set, "medical", DEFAULT_READING),
    )


def _make_preprocessing(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    by_item: bool,
    stored_size: tuple[int, int] | None,
    preparation: Preparation,
    full_scale: float | None,
    medical: MedicalReading,
) -> Preprocessing:
    """Make a preprocessing.

    Args:
        shape: Shape of a training image.
        dtype: Dtype of a training image.
        by_item: Whether images are read one by one, and then resized as uint8.
        stored_size: Height and width before the data module resizes images; None if they may differ.
        preparation: The data module's preparation of batches.
        full_scale: The value of white in grey images of more than 8 bits, if files are read.
        medical: How DICOM files and NIfTI volumes are decoded.
    """
    if dtype != torch.uint8:
        holds_tokens = is_tokens(torch.empty(0, dtype=dtype))
        return Preprocessing("tokens" if holds_tokens else "float", shape)
    steps = []
    if stored_size is not None:
        height, width = stored_size
        steps.append(Resize(height, width, rounded=True))
    size = preparation.image_size
    if size is not None and stored_size != (size, size):
        steps.append(Resize(size, size, rounded=by_item))
    channels = shape[0]
    mean: tuple[float, ...] = (0.5,) * channels
    std: tuple[float, ...] = (0.5,) * channels
    if preparation.image_config is not None:
        mean = preparation.image_config.mean
        std = preparation.image_config.std
    last_step = steps[-1]
    model_shape = (len(mean), last_step.height, last_step.width)
    return Preprocessing("uint8", model_shape, channels, tuple(steps), mean, std, full_scale, medical)


def _stored_size(checked: CheckedData, size: int | None) -> tuple[int, int] | None:
    """Return height and width of uint8 training images before the data module resizes them.

    None for other samples, which are not resized, and if the sizes may differ.
    """
    shape, dtype = checked.image_format
    if dtype != torch.uint8:
        return None
    if isinstance(checked.train, TensorStore):
        height, width = checked.train.images.shape[-2:]
        return height, width
    if size is None:  # then all images have the same size
        return shape[-2], shape[-1]
    base = resolve_subset(checked.train.datasets[0]).base
    if isinstance(base, ImageFiles):
        return base.size, base.size
    return None
