# SPDX-License-Identifier: Apache-2.0
"""``site.yaml``: the name of a site, where its images are, which recipes it approves and what may leave it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from perada.core.checks import check_choice, check_integer, check_number, check_options, invalid_option
from perada.deploy.protocol import MAY_SEND
from perada.system.yaml_files import read_yaml

PATH_OPTIONS = ("root", "table")
"""Options of a data set that are paths, relative to the file."""


@dataclass(frozen=True)
class Limits:
    """Limits of a site on all training on its images, over all runs and recipes.

    Args:
        max_epsilon: Largest ε of a single image, in the ledger ``release`` of all runs; None for that of one whole run
            of the recipe. A site that sets it rejects recipes without ``privacy`` before anything leaves.
        delta: δ of that ε, whatever a recipe sets.
        accountant: How ε is computed, whatever a recipe sets: ``rdp`` or ``prv``, which report upper bounds.
        max_rounds: Largest number of rounds; None for no limit.
        max_runs: Largest number of runs, each of which leaves a personal adapter on the site's disk.
        max_site_epsilon: Largest ε of the site as a whole; None for that of one whole run of the recipe. A site that
            sets it rejects recipes without ``client_privacy`` and ``secure_sums`` before anything leaves.
        max_surveys: Largest number of surveys, of all recipes together. Two surveys show what has changed at the sites
            in between, such as a patient who has left.
        max_evaluations: The same of evaluations without training.
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    accountant: str = "rdp"
    max_rounds: int | None = None
    max_runs: int = 100
    max_site_epsilon: float | None = None
    max_surveys: int = 3
    max_evaluations: int = 20

    def __post_init__(self) -> None:
        check_number("max_epsilon", self.max_epsilon, gt=0, optional=True)
        check_number("max_site_epsilon", self.max_site_epsilon, gt=0, optional=True)
        check_number("delta", self.delta, gt=0, lt=1, hint="use less than 1 / number of images, such as 1e-5")
        check_choice("accountant", self.accountant, ("rdp", "prv"))
        check_integer("max_rounds", self.max_rounds, optional=True)
        check_integer("max_runs", self.max_runs)
        check_integer("max_surveys", self.max_surveys, 0)
        check_integer("max_evaluations", self.max_evaluations, 0)


@dataclass(frozen=True)
class SecureSumsSection:
    """The sites among which a site hides in secure sums; paths are absolute.

    Args:
        identity: The site's private key, which no other process must be able to read.
        sites: List of the sites' public keys.
        authority: Public key that must have signed the list; None for a list that the site compiled itself.
    """

    identity: Path
    sites: Path
    authority: str | None = None


class Approved(NamedTuple):
    """Digests of a recipe that a site has approved; empty if it has not.

    Attributes:
        sha256: Digest of the file, which is compared before the file is interpreted.
        digest: Digest of the file and the frozen weights.
    """

    sha256: str
    digest: str


@dataclass(frozen=True)
class SiteFile:
    """Content of a site's file; paths are absolute.

    Args:
        name: Name of the site in its own log.
        recipes: What is approved of each recipe.
        data: Options of :class:`perada.data.Images`, :class:`perada.data.ImageMasks` if the recipe's images have
            masks, or :class:`perada.data.ImageTable`; or the section ``data`` of a recipe with ``dataset`` and
            ``partition``, and the number ``client`` of the site among its clients.
        state: Folder of its personal state and its ledgers.
        socket: Where the worker listens; None if the file does not set it.
        may_send: What may leave in addition to updates.
        limits: Limits of all runs.
        accelerator: Accelerator of the trainer, such as ``cpu`` or ``cuda``; by default a GPU if there is one.
        secure_sums: The sites that it hides among; None if there are none.
        resume_allow: ``images`` if a run without privacy may continue with other images.
    """

    name: str
    recipes: dict[Path, Approved]
    data: dict[str, Any]
    state: Path
    socket: Path | None = None
    may_send: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    accelerator: str = "auto"
    secure_sums: SecureSumsSection | None = None
    resume_allow: tuple[str, ...] = ()


def read_site(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        FileNotFoundError: If the file, or a recipe, is missing.
        IsADirectoryError: If the path is that of a folder.
        ValueError: If an entry is invalid; the message names it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; pass the site's file in it, such as {path / 'site.yaml'}")
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist; pass the site's file, such as site.yaml")
    content = read_yaml(path, "name: st-marys")
    try:
        return _parse_site(path.absolute().parent, content)
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _parse_site(folder: Path, content: dict[str, Any]) -> SiteFile:
    """Parse the content of a site's file, in which paths are relative to a folder."""
    check_options("entries", content, "{name: st-marys, recipes: [...], data: {...}}")
    for key in content:
        check_choice("entry", key, [each.name for each in fields(SiteFile)])
    name = content.get("name")
    _check_text("name", name, r"[\w.-]{1,64}", "a text of 1 to 64 letters, digits, dots and dashes")
    if name == "CHANGE-ME":
        raise ValueError("name is still CHANGE-ME; set it to the name that the server registered for the site's key")

    data = content.get("data")
    check_options("data", data, "{root: images, layout: '{class}/*'}")
    data_options = dict(content["data"])
    for key in PATH_OPTIONS:
        if key in data_options:
            data_options[key] = str(folder / data_options[key])

    limits = content.get("limits") or {}
    check_options("limits", limits, "{max_epsilon: 8}")
    for key in limits:
        check_choice("limits", key, [each.name for each in fields(Limits)])

    may_send = content.get("may_send") or []
    if not isinstance(may_send, list):
        raise ValueError(f"may_send must be a list of {', '.join(MAY_SEND)}, got {may_send!r}")
    for kind in may_send:
        check_choice("may_send", kind, MAY_SEND)
    resume_allow = content.get("resume_allow") or []
    if not isinstance(resume_allow, list):
        raise ValueError(f"resume_allow must be [images] or left out, got {resume_allow!r}")
    for change in resume_allow:
        check_choice("resume_allow", change, ("images",))

    recipes = content.get("recipes")
    if not isinstance(recipes, list) or not recipes:
        raise ValueError(f"recipes must be a list of entries with recipe, sha256 and digest, got {recipes!r}")
    socket = content.get("socket")
    return SiteFile(
        name=str(name),
        recipes=dict(_parse_recipe(folder, entry) for entry in recipes),
        data=data_options,
        state=folder / str(content.get("state") or "state"),
        socket=None if socket is None else folder / str(socket),
        may_send=tuple(may_send),
        limits=Limits(**{key: _parse_number(value) for key, value in limits.items()}),
        accelerator=str(content.get("accelerator") or "auto"),
        secure_sums=_parse_secure_sums(folder, content.get("secure_sums")),
        resume_allow=tuple(resume_allow),
    )


def _parse_secure_sums(folder: Path, section: object) -> SecureSumsSection | None:
    """Read the section ``secure_sums`` of a site's file, whose paths are relative to ``folder``."""
    if section is None:
        return None
    check_options("secure_sums", section, "{identity: st-marys.id, sites: sites.txt}")
    assert isinstance(section, dict)
    for key in section:
        check_choice("secure_sums", key, [each.name for each in fields(SecureSumsSection)])
    for key in ("identity", "sites"):
        if not isinstance(section.get(key), str):
            raise ValueError(f"secure_sums: {key} is missing; set it to a path, such as {{{key}: …}}")
    authority = section.get("authority")
    return SecureSumsSection(
        identity=folder / section["identity"],
        sites=folder / section["sites"],
        authority=None if authority is None else str(authority),
    )


def _parse_recipe(folder: Path, entry: object) -> tuple[Path, Approved]:
    """Return the file of a recipe, and what is approved of it."""
    if not isinstance(entry, Mapping) or not {"recipe"} <= set(entry) <= {"recipe", *Approved._fields}:
        raise ValueError(f"recipes: an entry must be {{recipe: FILE, sha256: …, digest: …}}, got {entry!r}")
    approved = Approved(sha256=entry.get("sha256") or "", digest=entry.get("digest") or "")
    for name, value in approved._asdict().items():
        requirement = "64 hexadecimal digits, as `perada deploy check SITE.yaml` prints them for a recipe"
        _check_text(name, value, "([0-9a-f]{64})?", requirement)
    if approved.digest and not approved.sha256:
        raise ValueError(
            f"{str(entry['recipe'])!r} has a digest but no sha256, against which the file is checked before it is "
            "read; leave the digest out, and `perada deploy check SITE.yaml` prints both"
        )
    file = folder / str(entry["recipe"])
    if not file.is_file():
        raise FileNotFoundError(f"the recipe {str(file)!r} does not exist; put it there, or correct the path")
    return file, approved


def _check_text(name: str, value: object, pattern: str, requirement: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise invalid_option(name, value, requirement)


def _parse_number(value: object) -> Any:  # noqa: ANN401  # whatever it is; Limits checks it
    """Convert a text that is a number: YAML 1.1 reads 1e-5, which has no dot, as a text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
