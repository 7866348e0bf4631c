# SPDX-License-Identifier: Apache-2.0
"""A client that is removed from what a saved run stores."""

import shutil
from pathlib import Path

from perada.results.inference import client_index
from perada.results.per_client import without_client
from perada.results.run_file import read_run, write_run
from perada.results.staging import finish

NOT_UNDONE = (
    "This does not undo what others learned from the client: the global adapter, and the adapters of the clients that "
    "were pulled towards it, have seen what it sent, and the means over clients in the run's history count its scores. "
    "Copies made before still have its adapter. Where that must go too, train again without the client."
)


def forget(folder: Path, client: int | str) -> int:
    """Remove a client's adapter, name and scores from a folder that ``Run.save`` wrote; numbers of others stay.

    ``run.json`` is replaced first, in one step, and then the client's folder is deleted: whatever happens in between,
    the run can be read, and the call can be repeated, which deletes what was left. The ε of a private run stay, since
    they say what the global adapter reveals; of how many images a client had, nothing stays.

    Returns:
        The client's number.

    Raises:
        FileNotFoundError: If there is no saved run.
        ValueError: If there is no such client, or checkpoints are in the folder, which hold the client's state too.
    """
    finish(folder)
    saved = read_run(folder)
    checkpoints = sorted(folder.rglob("*.ckpt"))
    if checkpoints:
        raise ValueError(
            f"{str(checkpoints[0])!r} is a checkpoint, which holds every client's state: nothing was removed; export "
            "the run to a folder of its own (perada export), forget the client there, and delete the run folder"
        )
    info = saved.info
    left: list[int] = [number for number in info.get("forgotten", []) if (folder / f"client_{number}").is_dir()]
    for number in left:  # of a call that was interrupted
        shutil.rmtree(folder / f"client_{number}")
    try:
        number = client_index(client, info.get("clients"), saved.num_clients)
    except ValueError:
        if left:  # by then it had lost its name
            return left[-1]
        raise
    if info.get("clients"):
        info["clients"][number] = f"(forgotten {number})"
    info["joined"] = [record for record in info.get("joined", []) if record["client"] != number]
    info["forgotten"] = sorted({*info.get("forgotten", []), number})
    sample = (info.get("privacy") or {}).get("sample", {})
    for values in ((info.get("training") or {}).get("images"), sample.get("sample_rates")):
        if values and number < len(values):
            values[number] = 0
    saved.metrics = without_client(saved.metrics, number)
    saved.files = {name: digest for name, digest in saved.files.items() if not name.startswith(f"client_{number}/")}
    write_run(folder, saved)
    shutil.rmtree(folder / f"client_{number}", ignore_errors=not (folder / f"client_{number}").exists())
    return number
