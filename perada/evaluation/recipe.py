# SPDX-License-Identifier: Apache-2.0
"""The recipe of an evaluation across real sites: a short YAML file that sites read and approve by its digest."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from perada.core.checks import check_choice, check_options
from perada.federation.options import Prediction
from perada.server.sums import SecureSums
from perada.system.digests import digest_of

SECTIONS = ("evaluate", "model", "data", "secure_sums")
_OPTIONS = ("name", "models")
"""Options of the section ``evaluate``. A name tells two evaluations apart."""
_EXAMPLE = "{models: {vendor: {path: vendor.pt, sha256: …}}}"
_MODEL_OPTIONS = ("path", "sha256", "prediction", "own")


@dataclass(frozen=True)
class ModelFile:
    """A model of an evaluation, which each site has beside its recipe.

    Args:
        path: File of weights or folder of a run, relative to the folder of the recipe.
        sha256: Digest of the file or folder (:func:`model_digest`); empty if each site has its own.
        prediction: Models with which clients of a run predict; None for those of the run's option.
        own: Whether each site has its own model at this path, such as what ``perada deploy export`` wrote.
    """

    path: str
    sha256: str = ""
    prediction: Prediction | None = None
    own: bool = False


@dataclass(frozen=True)
class EvaluationRecipe:
    """What an evaluation scores.

    Attributes:
        models: The models by name.
        secure_sums: Options of the secure sum.
        content: The sections on data and backbone, as in a recipe for training.
    """

    models: Mapping[str, ModelFile]
    secure_sums: SecureSums
    content: dict[str, Any]


def parse_evaluation(content: dict[str, Any]) -> EvaluationRecipe:
    """Parse the content of an evaluation's recipe.

    Raises:
        ValueError: If a section or an option is invalid; the message names it.
    """
    for name in content:
        check_choice("section of an evaluation", name, SECTIONS)
    section = content.get("evaluate") or {}
    check_options("evaluate", section, _EXAMPLE)
    for name in section:
        check_choice("evaluate", name, _OPTIONS)
    entries = section.get("models") or {}
    check_options("evaluate: models", entries, _EXAMPLE)
    if not entries:
        raise ValueError(f"evaluate: models is missing; name the models and their files, such as {_EXAMPLE}")
    sums = content.get("secure_sums") or {}
    check_options("secure_sums", sums, "{min_sites: 3}")
    for name in sums:
        check_choice("secure_sums", name, [each.name for each in fields(SecureSums)])
    models = {str(name): _parse_model(str(name), entry) for name, entry in entries.items()}
    others = {key: value for key, value in content.items() if key in ("model", "data")}
    return EvaluationRecipe(models, SecureSums(**sums), others)


def _parse_model(name: str, entry: object) -> ModelFile:
    """Parse a model of the section ``evaluate``."""
    option = f"evaluate: models: {name}"
    check_options(option, entry, "{path: vendor.pt, sha256: …}")
    assert isinstance(entry, dict)
    for key in entry:
        check_choice(option, key, _MODEL_OPTIONS)
    path = entry.get("path")
    if not isinstance(path, str) or not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(
            f"{option}: path={path!r} must be that of a file or folder beside the recipe, such as vendor.pt; copy it "
            "there"
        )
    own = entry.get("own", False)
    check_choice(f"{option}: own", own, [True, False])
    sha256 = entry.get("sha256") or ""
    if not own and not re.fullmatch("([0-9a-f]{64})?", str(sha256)):
        raise ValueError(f"{option}: sha256={sha256!r} must be 64 hexadecimal digits")
    if own and sha256:
        raise ValueError(f"{option}: sha256 cannot be set with own, since each site has another model; leave one out")
    prediction = entry.get("prediction")
    check_choice(f"{option}: prediction", prediction, [None, *get_args(Prediction)])
    return ModelFile(path, str(sha256), prediction, own)


def model_digest(path: Path) -> str:
    """Return the digest of a file, or of the names and digests of all files in a folder.

    Raises:
        FileNotFoundError: If it does not exist.
    """
    if path.is_file():
        return digest_of(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} does not exist; put the model there")
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()} {digest_of(file)}\n".encode())
    return digest.hexdigest()


def check_model_files(recipe: EvaluationRecipe, folder: Path) -> None:
    """Check that the models are in the folder of the recipe, and are those that it names.

    Raises:
        FileNotFoundError: If one is missing.
        ValueError: If one is another than approved, or its digest is missing.
    """
    for name, model in recipe.models.items():
        path = folder / model.path
        digest = model_digest(path)
        if model.own:
            continue
        if not model.sha256:
            raise ValueError(
                f"evaluate: models: {name} has no sha256, by which sites know that all evaluate the same; add "
                f"sha256: {digest}, or own: true if each site has its own"
            )
        if digest != model.sha256:
            raise ValueError(
                f"evaluate: models: {name}: {str(path)!r} has the SHA-256 {digest}, but the recipe names "
                f"{model.sha256}; restore the model that the recipe means"
            )
