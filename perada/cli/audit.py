# SPDX-License-Identifier: Apache-2.0
"""``perada deploy audit``: print and check the audit log of a site."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from perada.deploy.audit import LOG, Entry, begin_log, check_chain, check_state
from perada.deploy.protocol import canonical, display_round
from perada.deploy.site.file import read_site
from perada.results.report import table

TITLES = ["line", "time (UTC)", "run", "round", "asked", "message", "answered", "left", "ε"]


def audit(parser: ArgumentParser, words: list[str]) -> None:
    """Print a site's audit log, and check that no line of it was changed, removed, moved or cut off."""
    parser.add_argument("where", type=Path, help="File of a site, such as site.yaml, or its state folder.")
    parser.add_argument("--json", action="store_true", help="Print the lines as they are.")
    text = "The sha256 of a line, noted elsewhere, that must be in the log; may be repeated."
    parser.add_argument("--noted", type=str, action="append", default=[], help=text)
    text = "Set aside a log that cannot be continued, and begin another whose first line says so."
    parser.add_argument("--begin", action="store_true", help=text)
    given = parser.parse_args(words)
    folder = given.where if given.where.is_dir() else read_site(given.where).state
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is not there: the site has answered nothing yet")
    from perada.deploy.state import check_former, check_not_lost, read_committed, read_mark, read_witnesses

    if given.begin:
        committed = read_committed(folder)
        if not committed.commits:
            check_not_lost(folder, read_mark(folder).commits)
        kept = begin_log(folder, committed)
        print(f"Began a new log in {folder}; the former one is {'gone' if kept is None else kept.name}")
        return
    found, committed, mark = read_witnesses(folder)
    if found.head is None and not committed.commits and not mark.tip.lines and not found.entries and not found.torn:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {LOG}: the site has answered nothing yet, or this is the wrong folder"
        )
    if given.json:
        print("".join(f"{canonical(entry).decode()}\n" for entry in found.entries), end="")
    else:
        print(table(TITLES, [_row(entry) for entry in found.entries]))
    check_chain(found)
    if not committed.commits:
        check_not_lost(folder, mark.commits)
    check_state(found, committed, mark)
    check_former(folder, committed)
    for noted in given.noted:
        if noted not in [entry["sha256"] for entry in found.entries]:
            raise ValueError(f"no line has the sha256 {noted!r}, which was noted: the log was written anew")
    if not given.json:
        torn = f"; {len(found.torn)} bytes of another, which was never answered" if found.torn else ""
        print(f"\n{found.tip.lines} lines, each after the one before it{torn}. Note the last one's sha256 elsewhere:")
        print(found.tip.last)


def _row(entry: Entry) -> list[str]:
    first = [str(entry["number"]), entry["time"].removesuffix("+00:00")]
    if "asked" not in entry:
        return [*first, *["–"] * 5, _event(entry), "–"]
    asked, epsilon = entry["asked"], entry.get("epsilon")
    kind = asked.get("kind", "–") + (f" ({asked['of']})" if "of" in asked else "")
    spent = "–" if epsilon is None else _epsilon(epsilon)
    run = entry["run"] or "–"
    round = "–"
    if entry["round"] is not None:
        round = str(display_round(asked.get("kind", ""), entry["round"], asked.get("of", "update")))
    return [*first, run[:8], round, kind, asked["message"][:8], entry["answered"], _left(entry["left"]), spent]


def _epsilon(found: dict[str, float | None]) -> str:
    """Of images, and of the site as a whole."""
    shown = {name: "∞" if value is None else f"{value:.3f}" for name, value in found.items() if name != "delta"}
    return ", ".join(value if name == "spent" else f"{name} {value}" for name, value in shown.items())


def _event(entry: Entry) -> str:
    if "torn" in entry:
        return f"a line of {entry['torn']['bytes']} bytes before this one is torn, and was never answered"
    lines, last = entry["begun"]["head"]
    return f"a new log: the former one had {lines} lines, the last {last[:8]}"


def _left(left: dict[str, Any]) -> str:
    size, parts = sum(left["tensors"].values()), []
    if left["tensors"]:
        under = " under masks" if left["masks"] else ""
        parts.append(f"{len(left['tensors'])} tensors, {size / 1e6:.3f} MB{under}")
    return "; ".join([*parts, *filter(None, [", ".join(left["facts"]), ", ".join(left["sums"])])]) or "–"
