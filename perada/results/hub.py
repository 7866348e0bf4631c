# SPDX-License-Identifier: Apache-2.0
"""One adapter of a run on the Hugging Face Hub: what leaves, and the files in which it does."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perada.results.run_file import RunFile


def shared_part(info: Mapping[str, Any], metrics: Mapping[str, Any], num_clients: int, client: int | None) -> RunFile:
    """What ``run.json`` says beside an adapter that is shared: of no client but the one whose adapter it is.

    With the global adapter there are no clients' names and scores; the ε of all clients are there by number, since they
    say what it reveals.
    """
    kept = {key: value for key, value in info.items() if key not in ("clients", "joined", "forgotten")}
    if "training" in kept:
        kept["training"] = {name: value for name, value in kept["training"].items() if name != "images"}
    if client is None:
        return RunFile(kept | {"clients": None}, {"rounds": metrics["rounds"], "clients": {}}, num_clients, 1, True)
    names = info.get("clients")
    kept["clients"] = [names[client]] if names else None
    if kept.get("privacy"):
        kept["privacy"] = {level: _of_one(content, client) for level, content in kept["privacy"].items()}
    scores = {name: [values[client]] for name, values in metrics["clients"].items()}
    return RunFile(kept, {"rounds": [], "clients": scores}, 1, 1, True)


def _of_one(content: Mapping[str, Any], client: int) -> dict[str, Any]:
    """A level of the record of privacy, of one client."""
    return {name: [value[client]] if isinstance(value, list) else value for name, value in content.items()}


def what_leaves(whose: str, info: Mapping[str, Any], repo: str, private: bool) -> str:
    """A line that says what is uploaded."""
    secret = "private" if private else "public"
    protected = (
        "under its differential privacy, as the card says"
        if info.get("privacy")
        else ("without differential privacy: it may reveal images that it was trained on")
    )
    return (
        f"perada: uploading {whose} to the {secret} repository {repo!r}: its weights, scores, names of classes and how "
        f"it was trained; no images. It was trained {protected}."
    )


def push(
    write: Callable[[Path], None], repo: str, whose: str, info: Mapping[str, Any], private: bool, token: str | None
) -> str:
    """Upload what ``write`` puts into a folder, and say on standard error what leaves; return the address."""
    from huggingface_hub import HfApi

    print(what_leaves(whose, info, repo, private), file=sys.stderr)
    with TemporaryDirectory() as folder:
        write(Path(folder))
        api = HfApi(token=token)
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Upload {whose}")
    return str(url)
