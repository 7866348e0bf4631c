# SPDX-License-Identifier: Apache-2.0
"""Kinds of sources of images that commands take, by name. Nothing large is imported."""

from pathlib import Path

SOURCE_HELP = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a Hugging Face dataset or its folder."
TABLES = (".csv", ".tsv", ".parquet")


def check_source(source: str) -> None:
    """Raise a FileNotFoundError unless a word names a dataset of Hugging Face, a table that exists, or a folder."""
    path = Path(source)
    is_table = path.suffix.lower() in TABLES
    if source.startswith("hf:") or path.is_dir() or (is_table and path.exists()):
        return
    problem = "is not a table of a known format" if path.is_file() else "does not exist"
    sources = f"{SOURCE_HELP[0].lower()}{SOURCE_HELP[1:].rstrip('.')}"
    raise FileNotFoundError(f"{source!r} {problem}; pass one of: {sources}")
