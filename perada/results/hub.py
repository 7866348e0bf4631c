# SPDX-License-Identifier: Apache-2.0
"""One adapter of a run on the Hugging Face Hub: what leaves, and the files in which it does."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perada.core.files import Scratch
from perada.results.privacy_card import of_nobody, of_one
from perada.results.run_file import RunFile

_OF_CLIENTS = ("_worst", "_p10", "_client")
"""Endings of metrics of a round that are of one client or a few."""


def shared_part(
    info: Mapping[str, Any], metrics: Mapping[str, Any], num_clients: int, client: int | None, scores: bool
) -> RunFile:
    """What ``run.json`` says beside an adapter that is shared: of no client but the one whose adapter it is.

    With the global adapter there are no clients' names and scores; the ε of all clients are there in the order of their
    size, since they say what it reveals. Beside a client's adapter, ``adapter_of`` says whose it is. Without ``scores``
    there are none.
    """
    left_out = ("clients", "joined", "forgotten", "own_adapters", "adapter_of")
    kept: dict[str, Any] = {key: value for key, value in info.items() if key not in left_out} | {"clients": None}
    if "training" in kept:
        kept["training"] = {name: value for name, value in kept["training"].items() if name != "images"}
    if client is None:
        if kept.get("privacy"):
            kept["privacy"] = of_nobody(kept["privacy"])
        rounds = [
            {name: value for name, value in row.items() if not name.endswith(_OF_CLIENTS)}
            for row in (metrics["rounds"] if scores else [])
        ]
        return RunFile(kept, {"rounds": rounds, "clients": {}}, num_clients, 1, True)
    names = info.get("clients")
    kept["clients"] = [names[client]] if names else None
    kept["adapter_of"] = info.get("adapter_of", names[client] if names else str(client))
    if kept.get("privacy"):
        kept["privacy"] = of_one(kept["privacy"], client)
    kept |= {"joined": [record | {"client": 0} for record in info.get("joined", []) if record["client"] == client]}
    own = {name: [values[client]] for name, values in metrics["clients"].items()} if scores else {}
    return RunFile(kept, {"rounds": [], "clients": own}, 1, 1, True)


def push(write: Callable[[Path], None], repo: str, what: str, private: bool, token: str | None) -> str:
    """Upload what ``write`` puts into a folder, and say on standard error ``what`` leaves; return the address.

    Raises:
        ValueError: If the repository is to be private, exists, and is public.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    url = api.create_repo(repo, private=private, exist_ok=True)
    hidden = api.repo_info(repo).private  # one that was there already stays as it is
    if private and not hidden:
        raise ValueError(
            f"repo={repo!r} is there already and public, and nothing was uploaded: make it private on the Hub, give "
            "another name, or private=False to publish the adapter"
        )
    print(f"perada: uploading to the {'private' if hidden else 'public'} repository {repo!r}: {what}", file=sys.stderr)
    with Scratch() as folder:
        write(folder)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload an adapter")
    return str(url)
