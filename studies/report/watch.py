# SPDX-License-Identifier: Apache-2.0
"""``perada report --watch``: a page that follows a run.

The page reloads itself in the browser, and is written again whenever the run's files change. There is no server, so
that no port can be in use and nobody else can connect.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from perada.deploy.server import SERVER_STATE
from perada.deploy.server.progress import is_over, read_run_progress
from perada.results.report import SHIFTS_FILE
from perada.results.run_file import RUN_FILE
from perada.studies.report.page import MARK, write_page
from perada.studies.report.records import SCORES_LEFT_OUT, RunRecord, lack_scores, read_records
from perada.system.files import write_atomic

METRICS_FILE = "metrics.csv"
WATCHED_FILES = (RUN_FILE, METRICS_FILE, SHIFTS_FILE)
INTERVAL = 2.0
"""Seconds between two looks at the files, and between two reloads of the page."""
SETTLING_LOOKS = 5
"""Looks without a change after which a run with all its rounds is finished; scores follow the last round's losses."""

FileState = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes."""


def check_watched(folder: Path) -> None:
    """Check that a run can be followed, which may not have logged a round yet.

    Raises:
        FileNotFoundError: If the folder does not exist, or the runs are in its subfolders.
        NotADirectoryError: If the path is a file.
    """
    if folder.is_file():
        raise NotADirectoryError(f"--watch needs the folder of a run, got the file {str(folder)!r}; remove --watch")
    has_metrics = any((folder / name).exists() for name in WATCHED_FILES)
    if not folder.is_dir() or (not has_metrics and any(folder.glob(f"*/{METRICS_FILE}"))):
        read_records(folder)  # raises with the remedy: another folder, such as that of the newest run


def write_waiting_page(output: Path) -> None:
    """Write a page that reloads itself until the run's page replaces it."""
    output.mkdir(parents=True, exist_ok=True)
    text = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{MARK}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="2">'
        "<title>Waiting for the first round</title></head><body><p>Waiting for the first round.</p></body></html>"
    )
    write_atomic(output / "index.html", text.encode())


def watch(
    folders: Sequence[Path], output: Path, with_scores: bool | None = None, *, interval: float = INTERVAL
) -> None:
    """Write the page again at each change of the runs' files, until all runs are finished or Ctrl-C is pressed.

    Args:
        folders: Folders of the runs, checked by :func:`check_watched`.
        output: Folder of the page.
        with_scores: As in :func:`perada.studies.report.page.write_page`.
        interval: Seconds between two looks at the files.

    Raises:
        ValueError: If a file is broken, and still is after another look.
    """
    refresh = max(1, round(interval))
    print("Following the run; press Ctrl-C to stop.", flush=True)
    run_records: list[RunRecord] = []
    drawn_states: list[FileState | None] | None = None
    rejected_states: list[FileState | None] | None = None
    looks_without_change = 0
    has_drawn = False
    try:
        while True:
            states = file_states(folders)
            if states == drawn_states:
                looks_without_change += 1
            elif not all(_has_rounds_file(folder) for folder in folders):
                if drawn_states is None and not run_records:
                    print("Waiting for the first round.", flush=True)
                drawn_states = states
            else:
                looks_without_change = 0
                try:
                    run_records = [record for folder in folders for record in read_records(folder)]
                except ValueError:
                    # The run may be writing the file; one that is still broken without a change is reported.
                    if states == rejected_states:
                        raise
                    rejected_states = states
                else:
                    if not has_drawn and lack_scores(run_records, with_scores):
                        print(SCORES_LEFT_OUT, flush=True)
                    has_drawn = True
                    write_page(output, run_records, with_scores, refresh=refresh)
                    drawn_states = states
            if run_records and looks_without_change >= SETTLING_LOOKS and all(map(is_finished, run_records)):
                print("The run is finished.", flush=True)
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        print("Stopped following; the run itself goes on.", flush=True)
    if run_records:
        write_page(output, run_records, with_scores)  # without reloading from now on


def file_states(folders: Sequence[Path]) -> list[FileState | None]:
    """Return the state of each file that a page is drawn from; None for a missing one."""
    state_of_files: list[FileState | None] = []
    for folder in folders:
        for name in WATCHED_FILES:
            try:
                status = (folder / name).stat()
            except FileNotFoundError:
                state_of_files.append(None)
            else:
                state_of_files.append((status.st_mtime_ns, status.st_size))
    return state_of_files


def _has_rounds_file(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / RUN_FILE).is_file()


def is_finished(record: RunRecord) -> bool:
    """Return whether a run, or a deployed run in the folder of its server, has finished."""
    if not (record.folder / SERVER_STATE).is_file():
        return has_all_rounds(record)
    progress = read_run_progress(record.folder)
    return is_over(progress)


def has_all_rounds(record: RunRecord) -> bool:
    """Return whether a run of this machine has as many rounds as its ``config.yaml`` sets.

    False if that sets no number.
    """
    config: Any = yaml.safe_load(record.config) if record.config else None
    trainer = config.get("trainer") if isinstance(config, dict) else None
    max_epochs = trainer.get("max_epochs") if isinstance(trainer, dict) else None
    if not isinstance(max_epochs, int) or max_epochs < 1 or not record.rounds:
        return False
    return record.rounds[-1]["round"] + 1 >= max_epochs
