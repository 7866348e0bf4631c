# SPDX-License-Identifier: Apache-2.0
"""Sources of images as words of a command name them: a folder, a table, a set of Hugging Face, or a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from perada.data import IID, ByDomain, HuggingFace, Images, ImageTable
from perada.data.partitions.division import Division

Source = Images | ImageTable | HuggingFace
SOURCE = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a set of Hugging Face or its folder."
TABLES = (".csv", ".tsv", ".parquet")


def kind_of(value: str) -> type[Source] | None:
    """What a source is read by; None for what is neither ``hf:NAME`` nor a table nor a folder."""
    if value.startswith("hf:"):
        return HuggingFace
    if Path(value).suffix.lower() in TABLES:
        return ImageTable
    return Images if Path(value).is_dir() else None


def add_options(parser: ArgumentParser, kind: type[Source], section: str | None = None) -> None:
    """Add the options of a source, but for those that a command gives itself."""
    own = {"root", "table", "name", "size", "in_memory", "train"}
    parser.add_class_arguments(kind, section, skip=own)


def division_of(value: str, kind: type[Source], options: dict[str, Any]) -> Division:
    """The images of a source, by client where clients are known."""
    images = kind(value.removeprefix("hf:") if kind is HuggingFace else value, **options)
    return Division(images, ByDomain("client") if images.has_clients else IID(1))


def division_of_recipe(words: Sequence[str]) -> Division:
    """The data of a recipe, which options of ``perada fit`` name."""
    from perada.cli.runs import make_cli

    data = make_cli(words, run=False).datamodule
    data.prepare_data()
    divided: Division = data.division
    return divided
