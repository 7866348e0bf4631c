# SPDX-License-Identifier: Apache-2.0
"""``perada deploy audit``: print and check the audit log of a site."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from perada.deploy.audit import LOG, Entry, begin_log, check_chain, check_state
from perada.deploy.protocol import JOB_KINDS, canonical, display_round
from perada.deploy.site.file import read_site
from perada.results.report import table

HEADER = ["line", "time (UTC)", "run", "round", "request", "message", "answered", "left", "ε"]


def audit(parser: ArgumentParser, words: list[str]) -> None:
    """Print a site's audit log, and check that no line was changed, removed, moved or truncated."""
    parser.add_argument(
        "where", type=Path, metavar="PATH", help="File of a site, such as site.yaml, or its state folder."
    )
    parser.add_argument("--json", action="store_true", help="Print the raw lines.")
    parser.add_argument(
        "--noted",
        type=str,
        action="append",
        default=[],
        metavar="SHA256",
        help="SHA-256 of a line, noted elsewhere, that must be in the log; may be repeated.",
    )
    parser.add_argument(
        "--begin",
        action="store_true",
        help="Set aside a log that cannot be continued, and start a new one whose first line records this.",
    )
    options = parser.parse_args(words)
    folder = options.where if options.where.is_dir() else read_site(options.where).state
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{str(folder)!r} does not exist: the site has not answered any request yet; wait for its first round, or "
            "pass the site's file or its state folder"
        )
    # They import torch, which the help of this command does not need.
    from perada.deploy.state import check_former, check_not_lost, read_mark, read_saved_counters, read_witnesses

    if options.begin:
        counters = read_saved_counters(folder)
        if not counters.commits:
            check_not_lost(folder, read_mark(folder).commits)
        moved_log = begin_log(folder, counters)
        print(
            f"Started a new log in {folder}; the previous one is {'missing' if moved_log is None else moved_log.name}"
        )
        return
    log, counters, mark = read_witnesses(folder)
    has_log = log.head is not None or log.entries or log.torn
    if not has_log and not counters.commits and not mark.tip.lines:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {LOG}: the site has not answered any request yet, or this is the wrong folder"
        )
    # The log is printed before it is checked, so that a damaged one is seen too.
    if options.json:
        for entry in log.entries:
            print(canonical(entry).decode())
    else:
        print(table(HEADER, [_cells_of_entry(entry) for entry in log.entries]))
    check_chain(log)
    if not counters.commits:
        check_not_lost(folder, mark.commits)
    check_state(log, counters, mark)
    check_former(folder, counters)
    digests = {entry["sha256"] for entry in log.entries}
    for noted in options.noted:
        if noted not in digests:
            raise ValueError(
                f"no line has the noted SHA-256 {noted!r}: the log was rewritten, or is that of another site; compare "
                "it with a backup"
            )
    if not options.json:
        torn = f", and an incomplete line of {len(log.torn)} bytes, which was never answered" if log.torn else ""
        print(
            f"\n{log.tip.lines} lines, each chained to the one before{torn}. Note the SHA-256 of the last line "
            "elsewhere:"
        )
        print(log.tip.last)


def _cells_of_entry(entry: Entry) -> list[str]:
    """Return the cells of an entry, in the order of `HEADER`."""
    number = str(entry["number"])
    time = entry["time"].removesuffix("+00:00")
    if "request" not in entry:
        return [number, time, *["–"] * 5, _describe_event(entry), "–"]
    request = entry["request"]
    kind = request.get("kind", "–")
    if "of" in request:
        kind = f"{kind} ({request['of']})"
    round = "–"
    if entry["round"] is not None and request.get("of") not in JOB_KINDS:
        round = str(display_round(request.get("kind", ""), entry["round"], request.get("of", "update")))
    return [
        number,
        time,
        (entry["run"] or "–")[:8],
        round,
        kind,
        request["message"][:8],
        entry["answered"],
        _describe_left(entry["left"]),
        _format_epsilon(entry["epsilon"]) if "epsilon" in entry else "–",
    ]


def _format_epsilon(epsilon: dict[str, float | None]) -> str:
    """Format the ε of single images (``spent``), which needs no name, and of the entire site."""
    parts = []
    for name, value in epsilon.items():
        text = "∞" if value is None else f"{value:.3f}"
        if name == "spent":
            parts.append(text)
        elif name != "delta":
            parts.append(f"{name} {text}")
    return ", ".join(parts)


def _describe_event(entry: Entry) -> str:
    """Describe an entry that is not about a request."""
    if "torn" in entry:
        return f"a line of {entry['torn']['bytes']} bytes before this one is truncated and was never answered"
    lines, last = entry["begun"]["head"]
    return f"a new log: the previous one had {lines} lines, the last {last[:8]}"


def _describe_left(reply: dict[str, Any]) -> str:
    """Describe what has left the site with a reply."""
    parts = []
    if reply["tensors"]:
        size = sum(reply["tensors"].values())
        masked = " under masks" if reply["masks"] else ""
        parts.append(f"{len(reply['tensors'])} tensors, {size / 1e6:.3f} MB{masked}")
    if reply["facts"]:
        parts.append(", ".join(reply["facts"]))
    if reply["sums"]:
        parts.append(", ".join(reply["sums"]))
    return "; ".join(parts) or "–"
