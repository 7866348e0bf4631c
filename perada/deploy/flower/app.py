# SPDX-License-Identifier: Apache-2.0
"""The folder that `perada deploy init` writes: the Flower app, and what each of the two persons needs beside it."""

import hashlib
import re
from pathlib import Path
from string import Template

from perada.deploy.flower.server_app import RunOptions

FILES = Path(__file__).with_name("files")
"""Templates of what is written, at their places in the folder."""
SERVE = "perada.cli.flower:serve"
"""What runs a recipe at the server; the app names it, since this package knows no command."""
_APP = "[a-z][a-z0-9-]{0,40}"


def write_app(folder: Path, name: str, recipe: str, digest: str, host: str) -> None:
    """Write the app of a recipe, unit files for systemd, a ``site.yaml`` and a README.

    Args:
        folder: Where; it must not be there, or be empty.
        name: Name of the app: small letters, digits and dashes.
        recipe: The recipe's text.
        digest: What sites approve: of the recipe and the frozen weights.
        host: Name or address by which sites reach the server.

    Raises:
        ValueError: If the name cannot be used.
        FileExistsError: If there is something in the folder.
    """
    check_target(folder, name)
    module, function = SERVE.split(":")
    sha256 = hashlib.sha256(recipe.encode()).hexdigest()
    values = {"name": name, "sha256": sha256, "digest": digest, "host": host, "module": module, "function": function}
    values["config"] = "\n".join(f"{key} = {_toml(value)}" for key, value in RunOptions().config().items())
    for template in sorted(path for path in FILES.rglob("*") if path.is_file()):
        target = folder / template.relative_to(FILES).with_suffix("")  # NAME.tmpl
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    for place in (folder / "app" / "perada_app", folder / "site"):
        (place / "recipe.yaml").write_text(recipe, encoding="utf-8")


def check_target(folder: Path, name: str) -> None:
    """Refuse a name that no app can have, by a ValueError, and a folder that has something, by a FileExistsError."""
    if not re.fullmatch(_APP, name):
        raise ValueError(f"{name!r} is not a name of an app; give small letters, digits and dashes, a letter first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{str(folder)!r} is there already; give another folder")


def _toml(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
