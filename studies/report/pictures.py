# SPDX-License-Identifier: Apache-2.0
"""Test images that a page shows, read from the files of ``perada predict --config``.

They are images with their true and predicted masks or classes, images that do not look like their client's training
images, and public images of the server.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

# The command prints the path of its page before it imports anything large.
if TYPE_CHECKING:
    import numpy as np

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""Values of the pixels of an image or a mask."""
TABLE_FILE = "predictions.csv"
"""Table in the folder of predictions, with the paths of the files."""
MAX_CLIENTS = 4
"""Largest number of clients of whom images are shown."""
IMAGES_PER_CLIENT = 2
"""Largest number of images that are shown of a client."""
MAX_FOREIGN_CLIENTS = 12
"""Largest number of clients of whom foreign images are shown."""
FOREIGN_IMAGES_PER_CLIENT = 4
"""Largest number of foreign images that are shown of a client."""
EXAMPLE_COLUMNS = ("client", "image", "label", "personal", "example_picture")
"""Columns of a table with images that are predicted correctly or not."""
MAX_EXAMPLE_CLIENTS = 12
"""Largest number of clients of whom such images are shown."""
PUBLIC_FOLDER = "predictions/public"
"""Folder with some of the server's public images."""
MAX_PUBLIC_PICTURES = 8
"""Largest number of public images that are shown."""
MASK_COLUMNS = ("client", "image", "picture", "label")
"""Columns of a table with masks."""
FOREIGN_COLUMNS = ("client", "image", "distance", "foreign_picture")
"""Columns of a table with foreign images."""
MODELS = ("personal", "global", "both")
"""Columns of predicted masks."""


REMEDY = "write the predictions again"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class ExampleFiles:
    """The files of a test image and of its masks, all PNG files of the same size.

    Attributes:
        client: Number of the client whose image it is.
        number: Number of the image in the table.
        picture: The image.
        label: The true mask.
        predictions: Predicted masks by column of the table.
    """

    client: int
    number: int
    picture: Path
    label: Path
    predictions: dict[str, Path]


@dataclass(frozen=True)
class MaskExample:
    """A test image with its masks.

    Attributes:
        client: Number of the client whose image it is.
        number: Number of the image in the table.
        picture: Grey values (H, W) or colours (H, W, 3) of the image, uint8.
        label: Classes (H, W) of the true mask.
        predictions: Predicted masks (H, W) by column of the table.
    """

    client: int
    number: int
    picture: Pixels
    label: Pixels
    predictions: dict[str, Pixels]


def find_examples(folder: Path, num_clients: int) -> list[ExampleFiles]:
    """Find the first test images of the first clients, and check their files without decoding the pixels.

    Args:
        folder: Folder of ``predictions.csv``.
        num_clients: Number of clients of the run.

    Raises:
        FileNotFoundError: If there is no table, or a file of it is missing.
        ValueError: If the table has no masks, or a file does not fit.
    """
    table = folder / TABLE_FILE
    if not table.is_file():
        raise FileNotFoundError(
            f"--pictures={folder}: there is no {TABLE_FILE}; write one with: perada predict --config "
            "RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt"
        )
    examples = []
    images_of_client: dict[int, int] = {}
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {*MASK_COLUMNS} <= {*(rows.fieldnames or ())}:
            raise ValueError(
                f"--pictures={folder}: {TABLE_FILE} has no masks, so the model does not segment; leave --pictures out"
            )
        for row in rows:
            client = _read_client(folder, row, num_clients)
            if client not in images_of_client and len(images_of_client) == MAX_CLIENTS:
                break
            images_of_client[client] = images_of_client.get(client, 0) + 1
            if images_of_client[client] <= IMAGES_PER_CLIENT:
                examples.append(_find_example(folder, client, row))
    return examples


def has_masks(folder: Path) -> bool:
    """Return whether a folder has a table with masks."""
    table = folder / TABLE_FILE
    if not table.is_file():
        return False
    with table.open(encoding="utf-8", newline="") as file:
        return {*MASK_COLUMNS} <= {*(csv.DictReader(file).fieldnames or ())}


@dataclass(frozen=True)
class ForeignImageFile:
    """The file of a test image that does not look like its client's training images.

    Attributes:
        client: Number of the client whose image it is.
        number: Number of the image in the table.
        distance: Its distance, relative to the one up to which images look typical.
        picture: The image, a PNG file.
    """

    client: int
    number: int
    distance: float
    picture: Path


@dataclass(frozen=True)
class ForeignExample:
    """A test image that does not look like its client's training images.

    Attributes:
        client: Number of the client whose image it is.
        number: Number of the image in the table.
        distance: Its distance, relative to the one up to which images look typical.
        picture: Grey values (H, W) or colours (H, W, 3) of the image, uint8.
    """

    client: int
    number: int
    distance: float
    picture: Pixels


@dataclass(frozen=True)
class PredictedImageFile:
    """The file of a test image, with its class and the predicted one.

    Attributes:
        client: Number of the client whose image it is.
        number: Number of the image in the table.
        label: Its class.
        predicted: The predicted class; None if outputs of the model are NaN or infinite.
        picture: The image, a PNG file.
    """

    client: int
    number: int
    label: int
    predicted: int | None
    picture: Path


@dataclass(frozen=True)
class PredictedExample:
    """A test image, with its class and the predicted one.

    Attributes:
        client, number, label, predicted: As in :class:`PredictedImageFile`.
        picture: Grey values (H, W) or colours (H, W, 3) of the image, uint8.
    """

    client: int
    number: int
    label: int
    predicted: int | None
    picture: Pixels

    @property
    def is_right(self) -> bool:
        """Whether the predicted class is that of the image."""
        return self.label == self.predicted


def find_predicted_images(folder: Path, num_clients: int, num_classes: int) -> list[PredictedImageFile]:
    """Find test images with right and wrong predictions, and check their files without decoding the pixels.

    The predictions are those with both models if the table has them, and otherwise those of the personal models.

    Args:
        folder: Folder of ``predictions.csv``.
        num_clients: Number of clients of the run.
        num_classes: Number of its classes.

    Returns:
        The files of the first clients, in the order of the table; empty if it has no such images.

    Raises:
        FileNotFoundError: If a file of the table is missing.
        ValueError: If the table or a file does not fit.
    """
    table = folder / TABLE_FILE
    if not table.is_file():
        return []
    images: list[PredictedImageFile] = []
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        columns = {*(rows.fieldnames or ())}
        if not {*EXAMPLE_COLUMNS} <= columns:
            return []
        model = "both" if "both" in columns else "personal"
        for row in rows:
            if not row["example_picture"]:
                continue
            client = _read_client(folder, row, num_clients)
            if client >= MAX_EXAMPLE_CLIENTS:
                continue
            picture = _find_file(folder, row["example_picture"])
            _size_of_png(folder, picture)
            predicted = _read_class(folder, model, row, num_classes) if row[model] else None
            image = PredictedImageFile(
                client=client,
                number=_read_number(folder, "image", row),
                label=_read_class(folder, "label", row, num_classes),
                predicted=predicted,
                picture=picture,
            )
            images.append(image)
    return images


def read_predicted_image(folder: Path, image_file: PredictedImageFile) -> PredictedExample:
    """Read the pixels of a test image of a folder; raise a ValueError if they are damaged."""
    pixels = _read_pixels(folder, image_file.picture)
    return PredictedExample(image_file.client, image_file.number, image_file.label, image_file.predicted, pixels)


def read_public_pictures(folder: Path) -> list[Pixels]:
    """Read some of the server's public images, if a folder of predictions has any."""
    files = sorted((folder / PUBLIC_FOLDER).glob("*.png"))[:MAX_PUBLIC_PICTURES]
    return [_read_pixels(folder, file) for file in files]


def _read_class(folder: Path, column: str, table_row: dict[str, str], num_classes: int) -> int:
    """Read a class of a row of the table, which must be one of the run's."""
    number = _read_number(folder, column, table_row)
    if number >= num_classes:
        raise ValueError(
            f"--pictures={folder}: {TABLE_FILE} has a class {number}, but the run has {num_classes}; choose the "
            "predictions of this run"
        )
    return number


def find_foreign_images(folder: Path, num_clients: int) -> list[ForeignImageFile]:
    """Find the most foreign test images, and check their files without decoding the pixels.

    Args:
        folder: Folder of ``predictions.csv``.
        num_clients: Number of clients of the run.

    Returns:
        The files by client, the most distant images first; empty if the table has no distances.

    Raises:
        FileNotFoundError: If a file of the table is missing.
        ValueError: If the table or a file does not fit.
    """
    table = folder / TABLE_FILE
    if not table.is_file():
        return []
    files_of_clients: dict[int, list[ForeignImageFile]] = {}
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {*FOREIGN_COLUMNS} <= {*(rows.fieldnames or ())}:
            return []
        for row in rows:
            if not row["foreign_picture"]:
                continue
            client = _read_client(folder, row, num_clients)
            picture = _find_file(folder, row["foreign_picture"])
            _size_of_png(folder, picture)
            number = _read_number(folder, "image", row)
            distance = _read_distance(folder, row)
            files_of_clients.setdefault(client, []).append(ForeignImageFile(client, number, distance, picture))
    for files in files_of_clients.values():
        files.sort(key=lambda image: -image.distance)
    most_foreign = sorted(files_of_clients, key=lambda client: -files_of_clients[client][0].distance)
    shown: list[ForeignImageFile] = []
    for client in sorted(most_foreign[:MAX_FOREIGN_CLIENTS]):
        shown += files_of_clients[client][:FOREIGN_IMAGES_PER_CLIENT]
    return shown


def read_foreign_image(folder: Path, image_file: ForeignImageFile) -> ForeignExample:
    """Read the pixels of a foreign image of a folder; raise a ValueError if they are damaged."""
    return ForeignExample(
        image_file.client, image_file.number, image_file.distance, _read_pixels(folder, image_file.picture)
    )


def _read_client(folder: Path, table_row: dict[str, str], num_clients: int) -> int:
    """Read the client of a row of the table, which must be one of the run's."""
    client = _read_number(folder, "client", table_row)
    if client >= num_clients:
        raise ValueError(
            f"--pictures={folder}: {TABLE_FILE} has a client {client}, but the run has {num_clients}; choose "
            "the predictions of this run"
        )
    return client


def _read_distance(folder: Path, table_row: dict[str, str]) -> float:
    """Read the distance of a row of the table, which may be infinite."""
    try:
        distance = float(table_row["distance"])
    except ValueError:
        distance = math.nan
    if math.isnan(distance):
        raise ValueError(
            f"--pictures={folder}: distance must be a number in {TABLE_FILE}, got {table_row['distance']!r}; {REMEDY}"
        )
    return distance


def read_example(folder: Path, files: ExampleFiles) -> MaskExample:
    """Read the pixels of a test image and of its masks.

    Args:
        folder: Folder of ``predictions.csv``.
        files: The files.

    Raises:
        ValueError: If the pixels of a file are damaged.
    """
    return MaskExample(
        client=files.client,
        number=files.number,
        picture=_read_pixels(folder, files.picture),
        label=_read_pixels(folder, files.label),
        predictions={column: _read_pixels(folder, path) for column, path in files.predictions.items()},
    )


def _read_number(folder: Path, column: str, table_row: dict[str, str]) -> int:
    """Read a number >= 0 of a row of the table."""
    cell = table_row[column]
    if not (cell or "").isdecimal():
        raise ValueError(
            f"--pictures={folder}: {column} must be an integer >= 0 in {TABLE_FILE}, got {cell!r}; {REMEDY}"
        )
    return int(cell)


def _find_example(folder: Path, client: int, table_row: dict[str, str]) -> ExampleFiles:
    """Find and check the files of a row of the table."""
    picture = _find_file(folder, table_row["picture"])
    masks: dict[str, Path] = {}
    for column in ("label", *MODELS):
        if table_row.get(column):
            masks[column] = _find_file(folder, table_row[column])
    if "label" not in masks:
        raise ValueError(f"--pictures={folder}: {table_row['picture']} has no true mask in {TABLE_FILE}; {REMEDY}")
    picture_size = _size_of_png(folder, picture)
    for mask in masks.values():
        size = _size_of_png(folder, mask)
        if size != picture_size:
            raise ValueError(
                f"--pictures={folder}: {mask.relative_to(folder)} has {size[0]} × {size[1]} pixels, but its image "
                f"{picture_size[0]} × {picture_size[1]}; {REMEDY}"
            )
    number = _read_number(folder, "image", table_row)
    return ExampleFiles(client, number, picture, masks.pop("label"), predictions=masks)


def _find_file(folder: Path, name: str) -> Path:
    """Return a file below the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--pictures={folder}: {TABLE_FILE} names the file {name}, which is outside of the folder; {REMEDY}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"--pictures={folder}: the file {name} of {TABLE_FILE} is missing; {REMEDY}")
    return path


def _size_of_png(folder: Path, path: Path) -> tuple[int, int]:
    """Return the height and width of a PNG file from its header, without the import of Pillow."""
    with path.open("rb") as file:
        header = file.read(24)
    # The signature is followed by the chunk IHDR: its length, its name, and the width and height in big-endian order.
    if len(header) < 24 or not header.startswith(PNG_SIGNATURE) or header[12:16] != b"IHDR":
        raise ValueError(f"--pictures={folder}: {path.relative_to(folder)} is not a PNG file; {REMEDY}")
    width = int.from_bytes(header[16:20], "big")
    height = int.from_bytes(header[20:24], "big")
    return height, width


def _read_pixels(folder: Path, path: Path) -> Pixels:
    """Read an image file; raise a ValueError if its pixels are damaged."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.array(image)
    except Exception as error:  # Pillow's decoders raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"--pictures={folder}: {path.relative_to(folder)} cannot be read ({reason}); {REMEDY}"
        ) from error
