# SPDX-License-Identifier: Apache-2.0
"""What shows whether a file is the one that was written: digests of its bytes, and the number of its format."""

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from perada.core.text import printable

KEY = "sha256"
"""Entry of a JSON file with the digest of all other entries."""
SUMS_FILE = "SHA256SUMS"
"""File with the digests of the others in its folder, which ``sha256sum --check`` reads."""
_DIGEST = re.compile("[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\]+)")


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a JSON file is to hold, with its digest first; it does not depend on spaces and the order of entries.

    >>> check_sealed(sealed({"b": [1.5, None], "a": "x"}))
    {'b': [1.5, None], 'a': 'x'}
    """
    return {KEY: _digest(content), **content}


def check_sealed(content: Any) -> Any:  # noqa: ANN401  # any JSON
    """What a JSON file holds besides its digest; anything that was written without one is returned as it is.

    Raises:
        ValueError: If the content is not the one that :func:`sealed` was given.
    """
    if not isinstance(content, dict):
        return content
    rest = {name: value for name, value in content.items() if name != KEY}
    renamed = next((name for name, value in rest.items() if isinstance(value, str) and _DIGEST.fullmatch(value)), None)
    if KEY not in content and renamed is None:
        return content
    if renamed is not None or content[KEY] != _digest(rest):
        raise ValueError(
            f"its content is not what was written, as its entry {KEY!r} shows; take a copy that is whole, or delete "
            "that entry if you changed the file yourself"
        )
    return rest


class WrongFormat(ValueError):
    """A file is whole, and of another release's format."""


def check_format(what: Path | str, version: object, known: int) -> None:
    """Refuse, by a :class:`WrongFormat`, what is not of the format that this release reads.

    >>> check_format("the checkpoint", 1, 1)
    """
    if type(version) is not int or version != known:
        named = repr(str(what)) if isinstance(what, Path) else what
        raise WrongFormat(
            f"{named} is of format {printable(str(version)[:40])}, and this release of perada reads format {known}; "
            "read it with the release that wrote it"
        )


def write_sums(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Write the digests of files into the folder that holds them, and return them by name."""
    digests = {name: digest_of(folder / name) for name in names}
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / SUMS_FILE).write_text(text, encoding="utf-8")
    return digests


def check_sums(folder: Path, needed: Collection[str], free: Collection[str] = ()) -> None:
    """Compare the files of a folder with their digests, if it has any; those ``needed`` must have one.

    Files that are ``free`` may be edited: if they changed, a warning says so. Of others that is a ValueError, or a
    FileNotFoundError if one is missing.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return
    remedy = "take a copy of the folder that is whole, or save the run again"
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    version = [_LINE.fullmatch(line) for line in lines]
    digests = {line[2]: line[1] for line in version if line is not None}
    if None in version or not set(needed) <= digests.keys():
        raise ValueError(f"{str(path)!r} is damaged: it does not list the digests of {', '.join(needed)}; {remedy}")
    for name, digest in digests.items():
        file = folder / name
        if file.is_file() and digest_of(file) == digest:
            continue
        if name in free:
            warnings.warn(f"{str(file)!r} is not what perada wrote: it was edited, or is damaged", stacklevel=2)
            continue
        if not file.is_file():
            raise FileNotFoundError(f"{str(file)!r} is missing, as {SUMS_FILE} beside it shows; copy the whole folder")
        raise ValueError(
            f"{str(file)!r} was changed or damaged since it was written, as {SUMS_FILE} beside it shows; {remedy}"
        )


def _digest(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # as it is read: without tuples, and with words as keys
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
