# SPDX-License-Identifier: Apache-2.0
"""Kinds of sources of images that commands take, by name. Nothing large is imported."""

SOURCE_HELP = "Folder of images, table (.csv, .tsv, .parquet), or hf:NAME, a Hugging Face dataset or its folder."
TABLES = (".csv", ".tsv", ".parquet")
