# SPDX-License-Identifier: Apache-2.0
"""One adapter of a run on the Hugging Face Hub: what leaves, and the files in which it does."""

from collections.abc import Mapping
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
