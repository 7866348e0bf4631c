# SPDX-License-Identifier: Apache-2.0
"""``site.yaml``: what a site is called, where its images are, which recipes it approves and what may leave it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perada.core.checks import check_choice, check_number, check_options, check_whole
from perada.deploy.messages import SENDABLE

KEYS = ("name", "recipes", "data", "state", "socket", "may_send", "limits", "accelerator")
LIMITS = ("max_epsilon", "max_rounds")
PLACES = ("root", "table")
"""Options of a data set that are paths, which are relative to the file."""


@dataclass(frozen=True)
class SiteFile:
    """A site, as its file says; paths are absolute.

    Attributes:
        name: What the site is called in its own log.
        recipes: Files that the site approves, with the digest of each; empty where there is none yet.
        data: Options of :class:`perada.data.Images` or :class:`perada.data.ImageTable`; or the section ``data`` of a
            recipe with ``dataset`` and ``partition``, and the number ``client`` of the site among its clients.
        state: Folder of its personal state and its ledgers.
        socket: Where the worker listens; None if it does not say.
        may_send: What may leave beside updates.
        max_epsilon: Largest ε of all that is ever trained here; None for the recipe's own limit.
        max_rounds: Rounds that are ever trained here, at most; None for no limit.
        accelerator: ``cpu``, ``gpu`` and so on.
    """

    name: str
    recipes: dict[Path, str]
    data: dict[str, Any]
    state: Path
    socket: Path | None = None
    may_send: tuple[str, ...] = ()
    max_epsilon: float | None = None
    max_rounds: int | None = None
    accelerator: str = "auto"


def read_site(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not what it should be; the message names the entry.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not there; give the site's file, such as site.yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}; correct it") from None
    check_options(str(path), content, "{name: st-marys, recipes: [...], data: {...}}")
    for key in content:
        check_choice(f"{path}: entry", key, KEYS)
    home, name = path.absolute().parent, content.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ValueError(f"{path}: name={name!r} cannot be used; give up to 64 letters, digits, dots and dashes")
    data, limits, may_send = content.get("data"), content.get("limits") or {}, content.get("may_send") or []
    check_options(f"{path}: data", data, "{root: images, layout: '{class}/*'}")
    check_options(f"{path}: limits", limits, "{max_epsilon: 8}")
    for key in limits:
        check_choice(f"{path}: limits", key, LIMITS)
    check_number(f"{path}: max_epsilon", limits.get("max_epsilon"), above=0, optional=True)
    check_whole(f"{path}: max_rounds", limits.get("max_rounds"), optional=True)
    if not isinstance(may_send, list):
        raise ValueError(f"{path}: may_send={may_send!r} cannot be used; give a list of {', '.join(SENDABLE)}")
    for one in may_send:
        check_choice(f"{path}: may_send", one, SENDABLE)
    socket = content.get("socket")
    return SiteFile(
        name,
        _recipes(path, content.get("recipes")),
        {key: str(home / value) if key in PLACES else value for key, value in data.items()},
        home / str(content.get("state") or "state"),
        None if socket is None else home / str(socket),
        tuple(may_send),
        limits.get("max_epsilon"),
        limits.get("max_rounds"),
        str(content.get("accelerator") or "auto"),
    )


def _recipes(path: Path, given: object) -> dict[Path, str]:
    """The recipes that are approved, and their digests."""
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"{path}: recipes={given!r} cannot be used; list what is approved, as {{recipe: FILE, digest: …}}"
        )
    found = {}
    for entry in given:
        if not isinstance(entry, Mapping) or not {"recipe"} <= set(entry) <= {"recipe", "digest"}:
            raise ValueError(f"{path}: recipes: {entry!r} cannot be used; give {{recipe: FILE, digest: …}}")
        digest, file = entry.get("digest") or "", path.absolute().parent / str(entry["recipe"])
        if not isinstance(digest, str) or not re.fullmatch("([0-9a-f]{64})?", digest):
            raise ValueError(f"{path}: digest={digest!r} cannot be used; `perada deploy check` prints that of a recipe")
        if not file.is_file():
            raise FileNotFoundError(f"{path}: the recipe {str(file)!r} is not there; put it there, or correct the path")
        found[file] = digest
    return found
