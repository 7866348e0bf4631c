# SPDX-License-Identifier: Apache-2.0
"""Predictions of a run's models for images from elsewhere."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import checked_path
from perada.core.text import FORMULA, abbreviated, cell_text, number_cells, quoted
from perada.data.batches.transforms import size_of_file
from perada.data.medical.nifti import Axis
from perada.data.medical.reading import MedicalReading, split_number, with_number
from perada.data.preprocessing import Preprocessing
from perada.data.sets.base import Manifest
from perada.data.sets.image_paths import list_images
from perada.data.sets.medical_rows import add_frames
from perada.data.sets.table_files import check_encoding, existing_spelling, read_table
from perada.results.overwriting import foreign_file
from perada.scores.accumulation import finite_outputs
from perada.scores.failed_outputs import REMEDY, FailedOutputsError
from perada.system.files import check_output_file, check_output_folder, writing
from perada.tasks.geometry import resize_masks

_TABLES = (".csv", ".tsv", ".parquet")
_MARK = ("Software", "perada")
"""Entry in the metadata of PNG files with predicted masks, which distinguishes them from other files."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for N images.

    Attributes:
        probabilities: Floats (N, K): a softmax over the classes, or a sigmoid of each label if an image may have
            several; (N, H, W, K) of pixels. The numbers (N, D) themselves if numbers are predicted.
        labels: Classes int64 (N,), zeros and ones (N, K) if an image may have several labels, masks (N, H, W), or
            numbers float64 (N, D).
        classes: Names of the K classes or D numbers, or their positions if the run has no names.
        paths: The N paths if all images were given as paths, else None.
        sources: The files, if ``paths`` are names relative to some folder.
        typical: Mask (N,) of the images that look like the client's own, if it predicts with both models; else None.
        axis: Which slices of NIfTI volumes the images are.
    """

    probabilities: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    paths: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    typical: Tensor | None = None
    axis: Axis = "axial"

    @property
    def answered_by(self) -> list[str]:
        """Models that predicted each image: ``both``, or ``global`` for an image that is not typical of the client.

        Raises:
            ValueError: If one model predicted all images.
        """
        if self.typical is None:
            raise ValueError("one model predicted all images; predict with prediction='both' to have typical ones")
        return ["both" if is_typical else "global" for is_typical in self.typical.tolist()]

    @property
    def names(self) -> list[str]:
        """The predicted name of each image; several names are joined by ``|``.

        Raises:
            TypeError: If numbers are predicted, or classes of pixels.
        """
        if self.labels.is_floating_point() or self.labels.ndim == 3:
            raise TypeError("only classes of images have names; read labels, which holds the predictions")
        if self.labels.ndim == 1:
            return [self.classes[label] for label in self.labels.tolist()]
        names = []
        for row in self.labels.bool().tolist():
            predicted = [name for name, is_predicted in zip(self.classes, row, strict=True) if is_predicted]
            names.append("|".join(predicted))
        return names

    def save_masks(self, folder: str | Path) -> Path:
        """Write the predicted masks as PNG files with the number of each pixel's class.

        A mask has the name of its image, or its number if images were not given as paths, and the image's size.

        Raises:
            FileExistsError: If a file would be replaced that perada did not write, such as the image itself.
            ValueError: If no masks were predicted.
        """
        folder = checked_path("folder", folder)
        if self.labels.ndim != 3:
            raise ValueError("the model does not predict masks; write the predictions with to_csv")
        files = self.paths if self.sources is None else self.sources
        check_output_folder("folder", folder)
        targets = []
        for row in range(len(self.labels)):
            name = f"{row:06d}" if self.paths is None else _name_of_mask(self.paths, row)
            targets.append(folder / f"{name}.png")
        # All of them before the first mask is written.
        for target in targets:
            _check_replaceable_mask(target)
        for row, (mask, target) in enumerate(zip(self.labels, targets, strict=True)):
            size = None if files is None else _size_of_image(files[row], self.axis)
            save_mask(mask, target, size)
        return folder

    def to_csv(self, path: str | Path) -> Path:
        """Write one row per image: its ``path`` (or its number, ``image``), ``predicted``, and ``p(NAME)`` per class.

        If numbers are predicted, the columns after the first are these numbers, with their names. The last column,
        ``typical``, is there if the client predicts with both models: 1 for images that look like its own, else 0.

        Probabilities have six decimal places, numbers as many digits as :func:`.number_cells` writes. No cell looks
        like a formula to a spreadsheet: a path gets ``./`` in front, a name a quote.
        """
        path = checked_path("path", path)
        if self.labels.ndim == 3:
            raise ValueError("masks are not written to a table; write them with save_masks")
        check_output_file("path", path, "predictions.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.paths is None:
            first_header = "image"
            first_cells = [str(number) for number in range(len(self.labels))]
        else:
            first_header = "path"
            first_cells = [_path_cell(path_of_image) for path_of_image in self.paths]
        header = [first_header]
        rows = [[first_cell] for first_cell in first_cells]
        if self.labels.is_floating_point():
            header += map(cell_text, self.classes)
            for column in self.labels.T.tolist():
                for row, cell in zip(rows, number_cells(column), strict=True):
                    row.append(cell)
        else:
            header += ["predicted", *(f"p({name})" for name in self.classes)]
            for row, name, probabilities in zip(rows, self.names, self.probabilities.tolist(), strict=True):
                row.append(cell_text(name))
                row += [f"{probability:.6f}" for probability in probabilities]
        if self.typical is not None:
            header.append("typical")
            for row, is_typical in zip(rows, self.typical.tolist(), strict=True):
                row.append(str(int(is_typical)))
        with writing(path), path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(header)
            table.writerows(rows)
        return path


def _path_cell(path: str) -> str:
    """Return a path as the cell of a table. Spreadsheets would read some as formulas, such as ``=1.png``."""
    if path.startswith(FORMULA):
        # The path is still that of the same file.
        return f"./{path}"
    return path


def save_mask(mask: Tensor, path: Path, image_size: tuple[int, int] | None = None) -> None:
    """Write a mask (H, W) as a PNG file.

    Args:
        mask: Classes of the pixels.
        path: The file, whose folder is created.
        image_size: Height and width to resize the mask to, by nearest neighbour; None keeps them.
    """
    if image_size is not None:
        mask = resize_masks(mask, image_size)
    dtype = np.uint8 if int(mask.max()) < 256 else np.uint16
    pixels = mask.cpu().numpy().astype(dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = PngInfo()
    metadata.add_text(*_MARK)
    with writing(path):
        Image.fromarray(pixels).save(path, pnginfo=metadata)


def _check_replaceable_mask(path: Path) -> None:
    """Raise a FileExistsError if a file exists, and is not a mask of :func:`save_mask`."""
    if not path.exists():
        return
    if path.is_symlink():
        raise foreign_file(path)
    keyword, software = _MARK
    try:
        with Image.open(path) as image:
            is_own_mask = image.info.get(keyword) == software
    except OSError:
        is_own_mask = False
    if not is_own_mask:
        raise foreign_file(path)


def save_picture(image: Tensor, path: Path) -> None:
    """Write an image uint8 (Ch, H, W), grey or RGB, as a PNG file, whose folder is created."""
    pixels = image.squeeze(0) if len(image) == 1 else image.movedim(0, -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        Image.fromarray(pixels.cpu().numpy()).save(path)


def _name_of_mask(paths: Sequence[str], row: int) -> str:
    """Return the path of an image's mask without extension, inside the folder of masks."""
    path = Path(paths[row])
    if path.is_absolute() or ".." in path.parts:
        # Masks must stay in their folder.
        return f"{row:06d}_{path.stem}"
    stem = path.with_suffix("")
    for other_row, other_path in enumerate(paths):
        if other_row != row and Path(other_path).with_suffix("") == stem:
            # Two images differ only in their extensions, which then tell their masks apart.
            return str(path)
    return str(stem)


def _size_of_image(path: str, axis: Axis) -> tuple[int, int]:
    """Return height and width of an image file, after the rotation in its metadata."""
    width, height = size_of_file(path, MedicalReading(axis=axis))
    return height, width


@dataclass(frozen=True)
class PlacedImage:
    """An image and its place among those that are predicted."""

    place: int
    image: Any

    @property
    def key(self) -> Any:  # noqa: ANN401  # whatever users pass as an image
        """The image itself if it is a path, and otherwise its place: arrays cannot be keys of a dictionary."""
        return self.image if isinstance(self.image, str | Path) else self.place

    @property
    def name(self) -> str:
        """The name of the image in messages."""
        return str(self.image) if isinstance(self.image, str | Path) else f"image {self.place}"


def read_batch(
    preprocessing: Preprocessing, placed_images: list[PlacedImage], error_of_image: dict[Any, str] | None
) -> tuple[Tensor | None, list[PlacedImage]]:
    """Prepare a batch of the images that can be read.

    Args:
        preprocessing: The run's preprocessing.
        placed_images: The images.
        error_of_image: Receives the errors of the other images; None to raise the first of them.

    Returns:
        The batch, None if it is empty, and its images.
    """
    try:
        return preprocessing.batch([placed.image for placed in placed_images]), placed_images
    except (OSError, ValueError):
        if error_of_image is None:
            raise
    # Find the images that cannot be read one by one.
    prepared = []
    readable_images = []
    for placed in placed_images:
        try:
            prepared.append(preprocessing.batch([placed.image]))
            readable_images.append(placed)
        except (OSError, ValueError) as error:
            error_of_image[placed.key] = str(error)
    if not prepared:
        return None, []
    return torch.cat(prepared), readable_images


def check_outputs(
    logits: Tensor, placed_images: Sequence[PlacedImage], error_of_image: dict[Any, str] | None, model_name: str
) -> Tensor:
    """Return a mask of the images for which all outputs of a model are finite, since others have no prediction.

    Args:
        logits: Logits (N, K), or (N, H, W, K) of pixels.
        placed_images: The N images.
        error_of_image: Receives an error for each of the other images; None to raise a single one.
        model_name: Name of the model in messages.

    Raises:
        FailedOutputsError: If some outputs are NaN or infinite and ``error_of_image`` is None, or some of each image.
    """
    is_finite = finite_outputs(logits)
    failed = [placed for placed, finite in zip(placed_images, is_finite.tolist(), strict=True) if not finite]
    if len(failed) == len(placed_images):
        raise FailedOutputsError(
            f"the outputs of {model_name} are NaN or infinite for all {len(placed_images)} images; {REMEDY}"
        )
    if failed and error_of_image is None:
        names = abbreviated([placed.name for placed in failed])
        raise FailedOutputsError(
            f"the outputs of {model_name} are NaN or infinite for {len(failed)} of {len(placed_images)} images "
            f"({names}); pass broken={{}} to predict the others, or {REMEDY}"
        )
    for placed in failed:
        assert error_of_image is not None
        error_of_image[placed.key] = f"{placed.name}: the outputs of {model_name} are NaN or infinite"
    return is_finite


def check_device(device: torch.device | str) -> torch.device:
    """Return a device after checking that it can hold tensors.

    Raises:
        ValueError: If it cannot.
    """
    remedy = "use cpu, or a GPU of this machine"
    # torch describes other types by the signatures of its constructor.
    if not isinstance(device, str | torch.device):
        raise ValueError(f"device={str(device)!r} is not the name of a device; {remedy}")
    try:
        checked = torch.device(device)
        torch.zeros(1, device=checked).cpu()
    except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA raises an AssertionError
        reason = " ".join(str(error).split(".")[0].split())[:200]
        raise ValueError(f"device={str(device)!r} is not available ({reason}); {remedy}") from None
    return checked


def as_list(value: object) -> list[Any]:
    """Return one image, a batch with four axes, or several images as a list of images."""
    if isinstance(value, Tensor | np.ndarray):
        return list(value) if value.ndim == 4 else [value]
    if isinstance(value, str | Path | Image.Image | Mapping) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def each_frame(names: list[str], paths: list[Path], reading: MedicalReading) -> tuple[list[str], list[Path]]:
    """Return the names and paths of the frames of medical images that the run was trained on, and of other images."""
    frames = add_frames(Manifest([str(path) for path in paths]), reading, foreground_only=False).paths
    files = [str(path) for path in paths]
    name_of_file = dict(zip(files, names, strict=True))
    names_of_frames = []
    for frame in frames:
        numbered = split_number(frame)
        name = name_of_file[numbered.file]
        names_of_frames.append(name if numbered.number is None else with_number(name, numbered.number))
    return names_of_frames, [Path(frame) for frame in frames]


def find_images(source: Path, column: str = "path", encoding: str | None = None) -> tuple[list[str], list[Path]]:
    """List the images of a source.

    Args:
        source: An image file, a folder of image files, or a table (CSV, TSV, Parquet).
        column: Column of a table with the paths of the images.
        encoding: Encoding of a text table; see :func:`.read_table`.

    Returns:
        The name of each image, relative to its folder or table, and its path. Those of a folder are sorted.

    Raises:
        FileNotFoundError: If the source does not exist, or a folder has no images.
        ValueError: If it is not a table, has no such column, or a row has no path.
        ModuleNotFoundError: If it is a Parquet file and pyarrow is not installed.
    """
    if source.is_dir():
        names = list_images(source)
        if not names:
            kinds = ", ".join(IMG_EXTENSIONS)
            raise FileNotFoundError(f"{str(source)!r} has no images ({kinds}); choose a different folder")
        return names, [source / name for name in names]
    if not source.is_file():
        raise FileNotFoundError(
            f"{str(source)!r} does not exist; pass an image, a folder, or a table ({', '.join(_TABLES)})"
        )
    if source.suffix.lower() not in _TABLES:
        return [str(source)], [source]
    check_encoding(encoding)
    columns, row_numbers = read_table(source, encoding=encoding)
    if column not in columns:
        raise ValueError(
            f"{str(source)!r} has no column {column!r} among {quoted(columns)}; set the column of the paths with --path"
        )
    names = columns[column].tolist()
    for row_number, name in zip(row_numbers, names, strict=True):
        if not name:
            raise ValueError(f"{str(source)!r}, row {row_number}, has no path; fill it in, or leave the row out")
    return names, [Path(existing_spelling(str(source.parent / name))) for name in names]
