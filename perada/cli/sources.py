# SPDX-License-Identifier: Apache-2.0
"""Sources of images as words of a command name them: a folder, a table, or a set of Hugging Face."""

from pathlib import Path
from typing import Any

from perada.data import HuggingFace, Images, ImageTable

Source = Images | ImageTable | HuggingFace
SOURCE = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a set of Hugging Face or its folder."
TABLES = (".csv", ".tsv", ".parquet")
SKIPPED = {"root", "table", "name", "size", "in_memory", "train"}
"""Options of a source that a command gives itself."""


def kind_of(value: str) -> type[Source] | None:
    """What a source is read by; None for what is neither ``hf:NAME`` nor a table nor a folder."""
    if value.startswith("hf:"):
        return HuggingFace
    if Path(value).suffix.lower() in TABLES:
        return ImageTable
    return Images if Path(value).is_dir() else None


def opened(value: str, kind: type[Source], options: dict[str, Any]) -> Source:
    """The images of a source."""
    return kind(value.removeprefix("hf:") if kind is HuggingFace else value, **options)
