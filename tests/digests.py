# SPDX-License-Identifier: Apache-2.0
"""Files without their digests, as whoever edits or forges them would leave them."""

import json

from perada.system.digests import KEY, SUMS_FILE


def without(content):
    """JSON without the digests of a run."""
    if isinstance(content, dict):
        return {name: without(value) for name, value in content.items() if name not in (KEY, "files")}
    return [without(value) for value in content] if isinstance(content, list) else content


def undigested(folder):
    """Take all digests from a folder, and return it."""
    for path in folder.rglob(SUMS_FILE):
        path.unlink()
    for name in ("run.json", "results.json", "partition.json"):
        for path in folder.rglob(name):
            path.write_text(json.dumps(without(json.loads(path.read_text())), indent=2))
    return folder
