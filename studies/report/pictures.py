# SPDX-License-Identifier: Apache-2.0
"""Test images with their true and predicted masks, read from the files of ``perada predict --config``."""

import csv
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
MODELS = ("personal", "global")
"""Columns of predicted masks."""


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


def read_examples(folder: Path, num_clients: int) -> list[MaskExample]:
    """Read the first test images of the first clients, with their masks.

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
        for row in csv.DictReader(file):
            if "picture" not in row:
                raise ValueError(f"--pictures={folder}: {TABLE_FILE} has no masks; its model predicts something else")
            client = int(row["client"])
            if not 0 <= client < num_clients:
                raise ValueError(
                    f"--pictures={folder}: {TABLE_FILE} has a client {client}, but the run has {num_clients}; choose "
                    "the predictions of this run"
                )
            if client not in images_of_client and len(images_of_client) == MAX_CLIENTS:
                break
            images_of_client[client] = images_of_client.get(client, 0) + 1
            if images_of_client[client] <= IMAGES_PER_CLIENT:
                examples.append(_read_example(folder, client, row))
    return examples


def _read_example(folder: Path, client: int, row: dict[str, str]) -> MaskExample:
    """Read the files of a row of the table."""
    picture = _read_pixels(folder, row["picture"])
    masks: dict[str, Pixels] = {}
    for column in ("label", *MODELS):
        if row.get(column):
            masks[column] = _read_pixels(folder, row[column])
    for column, mask in masks.items():
        if mask.shape != picture.shape[:2]:
            raise ValueError(
                f"--pictures={folder}: {row[column]} has the shape {mask.shape}, its image {picture.shape[:2]}; write "
                "the predictions again"
            )
    return MaskExample(
        client=client, number=int(row["image"]), picture=picture, label=masks.pop("label"), predictions=masks
    )


def _read_pixels(folder: Path, name: str) -> Pixels:
    """Read an image file below the folder."""
    import numpy as np
    from PIL import Image

    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--pictures={folder}: {TABLE_FILE} names the file {name}, which is outside of the folder")
    with Image.open(path) as image:
        return np.array(image)
