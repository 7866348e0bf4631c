# SPDX-License-Identifier: Apache-2.0
"""Memory of a process and all that it started (Linux)."""

from pathlib import Path


def process_tree(root: int) -> list[int]:
    """Return the number of a process, and those of its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # "PID (NAME) STATE PPID ...", and a name may hold spaces and brackets.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree = [root]
    for number in tree:  # which grows on the way
        tree += children.get(number, [])
    return tree


def proportional_mb(numbers: list[int]) -> float:
    """Return the memory of processes in MB. A page that several of them share counts once."""
    kibibytes = 0
    for number in numbers:
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process ended meanwhile, or has no memory any more
            continue
        for line in lines:
            if line.startswith("Pss:"):
                kibibytes += int(line.split()[1])
    return kibibytes * 1024 / 1e6
