# SPDX-License-Identifier: Apache-2.0
"""Checksums and format versions of saved files."""

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from perada.core.text import printable

KEY = "sha256"
"""Entry of a JSON file that holds the digest of all other entries."""
SUMS_FILE = "SHA256SUMS"
"""File with the digests of the others in its folder, which ``sha256sum --check`` reads."""
_DIGEST = re.compile("[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\]+)")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest to the content of a JSON file, as its first entry.

    The digest does not depend on whitespace or the order of entries.

    >>> check_sealed(sealed({"b": [1.5, None], "a": "x"}))
    {'b': [1.5, None], 'a': 'x'}
    """
    return {KEY: _digest_of_json(content), **content}


def check_sealed(content: Any) -> Any:  # noqa: ANN401  # any JSON
    """Check the digest of a JSON file's content, and return the other entries.

    Content that was written without a digest is returned as it is.

    Raises:
        ValueError: If the content has changed since :func:`sealed`.
    """
    if not isinstance(content, dict):
        return content
    entries = {name: value for name, value in content.items() if name != KEY}
    # If the name of the digest is damaged, it would be missed: a digest under another name is an error too.
    has_misnamed_digest = any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in entries.values())
    if KEY not in content and not has_misnamed_digest:
        return content
    if has_misnamed_digest or content[KEY] != _digest_of_json(entries):
        raise ValueError(
            f"its content does not match its entry {KEY!r}; restore an intact copy, or delete that entry if you "
            "edited the file yourself"
        )
    return entries


class WrongFormat(ValueError):
    """Raised for an undamaged file in the format of another release."""


def check_format(file: Path | str, version: object, supported: int) -> None:
    """Check that a file has the format that this release reads.

    Args:
        file: The file, or what messages call it.
        version: Number of its format, as read from the file.
        supported: Number of the format that this release reads.

    Raises:
        WrongFormat: If the two differ.

    >>> check_format("the checkpoint", 1, 1)
    """
    # isinstance() would not do: True is an int, too, and equals 1.
    if type(version) is not int or version != supported:
        name = repr(str(file)) if isinstance(file, Path) else file
        raise WrongFormat(
            f"{name} has format {printable(str(version)[:40])}, but this release of perada reads format {supported}; "
            "read it with the release that wrote it"
        )


def write_sums(folder: Path, file_names: Collection[str]) -> dict[str, str]:
    """Write the digests of files into the folder that holds them, and return them by name."""
    digests = {name: digest_of(folder / name) for name in file_names}
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / SUMS_FILE).write_text(text, encoding="utf-8")
    return digests


def check_sums(folder: Path, needed: Collection[str], free: Collection[str] = ()) -> None:
    """Compare the files of a folder with their digests, if there are any.

    Args:
        folder: The folder.
        needed: Files that must have a digest.
        free: Files that users may edit. A change of one is only a warning.

    Raises:
        ValueError: If another file was changed, or the list of digests is damaged.
        FileNotFoundError: If a file is missing.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return
    remedy = "restore an intact copy of the folder, or save the run again"
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    matches = [_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match is not None}
    if None in matches or not set(needed) <= digests.keys():
        raise ValueError(f"{str(path)!r} is damaged: it does not list the digests of {', '.join(needed)}; {remedy}")
    for name, digest in digests.items():
        file = folder / name
        if file.is_file() and digest_of(file) == digest:
            continue
        if name in free:
            warnings.warn(f"{str(file)!r} is not what perada wrote: it was edited or is damaged", stacklevel=2)
            continue
        if not file.is_file():
            raise FileNotFoundError(
                f"{str(file)!r} is missing although listed in its folder's {SUMS_FILE}; copy the complete folder"
            )
        raise ValueError(
            f"{str(file)!r} was changed or damaged since it was written: it does not match its folder's {SUMS_FILE}; "
            f"{remedy}"
        )


def _digest_of_json(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a content that can be written as JSON."""
    # Once through JSON, as it will be read: tuples become lists, and numbers that are keys become strings.
    plain = json.loads(json.dumps(content))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
