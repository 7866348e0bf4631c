# SPDX-License-Identifier: Apache-2.0
"""Files of a stranger: values that do not belong there, under a digest that fits, and links out of the folder.

Each is rejected in one line, or read as harmless; nothing is run, and nothing outside the folder is read, written or
moved.
"""

import json
import os
import random
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import perada
from benchmarks.faults.configurations import limited
from benchmarks.faults.damage import FILES, Example, Read, divide, folder_of, make_examples
from benchmarks.faults.job import Job
from benchmarks.faults.outcomes import HARMLESS, REPORTED, Campaign, Verdict
from perada.cli.main import _format_tables
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.results.clients import forget
from perada.results.run_file import READY, RUN_FILE, STAGE
from perada.studies.report.page import write_page
from perada.studies.report.records import read_records
from perada.system.digests import KEY, sealed, write_sums

SAVED = "saved"
EXPORTED = "exported"
"""Folders of an example, by :meth:`perada.Run.save` and :meth:`perada.Run.export`."""
SCRIPT = "<script>alert(1)</script>"
SECRET = "a secret of somebody else"
MAX_SECONDS = 60
MAX_MEBIBYTES = 1500
"""What reading a small file may take."""
WATCHED_EVENTS = ("open", "os.rename", "os.remove", "shutil.move", "os.link", "os.system", "exec")
"""Events of Python's audit hooks."""

Change = Callable[[random.Random, Path], str]
"""Changes a file below a folder at random, and returns what was changed."""


class Executable:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


@dataclass(frozen=True)
class Attack:
    """Files of a stranger, and their use.

    Attributes:
        name: Name of the kind of attack.
        key: Where the draws of the attack begin.
        change: Makes the file hostile.
        use: Uses it; returns what went wrong, or None.
    """

    name: str
    key: str
    change: Change
    use: Read


def hostile(campaign: Campaign, folder: Path, seed: int, draws: int) -> None:
    """Change values in files of each kind, and replace files and folders by links.

    Args:
        campaign: Where the verdicts are recorded.
        folder: Folder for the files.
        seed: Seed of all draws.
        draws: Files of each kind.
    """
    examples = make_examples(folder)
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    watch = Watch(outside)
    attacks = []
    for kind, file, use in (
        ("run.json", FILES["run.json"], _load_run),
        ("run.json of a fit", FILES["run.json of a fit"], _report),
        ("partition.json", FILES["partition.json"], divide),
        ("results of compare", FILES["results of compare"], _report_comparison),
        ("adapter_config.json", Path("exported/global/adapter_config.json"), _load_exported),
        ("checkpoints", FILES["checkpoint"], _resume),
    ):
        change_value = partial(_change_value, file=file, outside=outside)
        attacks.append(Attack(f"hostile values: {kind}", f"values/{kind}", change_value, use))
    for name, part, use in (
        ("Run.load", SAVED, _load_run),
        ("Run.load of an export", EXPORTED, _load_exported),
        ("Run.save", SAVED, _save_over),
        ("Run.export", EXPORTED, _export_over),
        ("perada clients remove", SAVED, _forget),
    ):
        put_link = partial(_put_link, part=part, outside=outside)
        attacks.append(Attack(f"links out of the folder: {name}", name, put_link, use))
    for attack in attacks:

        def judge(number: int, attack: Attack = attack) -> Verdict:
            random_source = random.Random(f"{attack.key}/{seed}/{number}")
            return _try(attack, random_source, examples[number % len(examples)], watch)

        campaign.try_all(attack.name, draws, judge)


class Watch:
    """Watches a folder for files that are opened, moved or changed.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.root = os.path.realpath(folder)
        self.is_active = False
        self.events: list[str] = []
        self.content_before = self._content()
        sys.addaudithook(self._record)  # which cannot be removed again

    def _record(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active or event not in WATCHED_EVENTS:
            return
        # Only opening a file follows a link at the end of a path, unless O_NOFOLLOW is given.
        follows_links = event == "open" and not (arguments[2] or 0) & os.O_NOFOLLOW
        for path in arguments[:2]:
            if isinstance(path, str | os.PathLike) and self._is_inside(os.fspath(path), follows_links):
                self.events.append(f"{event} {os.path.basename(os.fspath(path))}")

    def _is_inside(self, path: str | bytes, follows_links: bool) -> bool:
        """Return whether a path leads into the folder."""
        if follows_links:
            real_path = os.fsdecode(os.path.realpath(path))
        else:
            parent, name = os.path.split(os.fsdecode(path))
            real_path = os.path.join(os.path.realpath(parent), name)
        return real_path.startswith(self.root)

    def _content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path(self.root).rglob("*") if path.is_file()}

    def start(self) -> None:
        """Watch from now on."""
        self.events = []
        self.is_active = True

    def stop(self) -> str | None:
        """Stop watching, and return what happened to the folder; None if nothing did."""
        self.is_active = False
        content = self._content()
        if content != self.content_before:
            shutil.rmtree(self.root)
            for path, file_content in self.content_before.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file_content)
            return f"changed what is outside: {sorted(path.name for path in content)}"
        return f"opened what is outside: {self.events[0]}" if self.events else None


def _try(attack: Attack, random_source: random.Random, example: Example, watch: Watch) -> Verdict:
    """Change a copy of an example, and use it."""
    copy = example.folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(example.folder, copy)
    description = f"{example.job.labels}, {attack.change(random_source, copy)}"
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.start()
    outcome = _use(attack, copy, example.job)
    outcome = watch.stop() or outcome
    mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024
    if mebibytes > MAX_MEBIBYTES:
        outcome = f"took {mebibytes:.0f} MiB"
    made_by_file = copy.parent / "owned"
    if made_by_file.exists():
        made_by_file.unlink()
        outcome = "ran what the file holds"
    return Verdict(outcome, description)


def _use(attack: Attack, folder: Path, job: Job) -> str:
    """Use a hostile file, and return the outcome."""
    with warnings.catch_warnings(), limited(MAX_SECONDS):
        warnings.simplefilter("ignore")
        try:
            result = attack.use(folder, job)
        except TimeoutError:
            return f"took more than {MAX_SECONDS} s"
        except (ValueError, OSError) as error:
            message = str(error)
            return REPORTED if "\n" not in message else f"several lines: {message[:150]!r}"
        except Exception as error:  # any other is a bug
            return f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    # Uses return text for what went wrong; what others return, such as a partition, does not matter.
    return result if isinstance(result, str) else HARMLESS


def _values(outside: Path, depth: int = 500) -> tuple[Any, ...]:
    """Return values that a stranger may write, among them lists within lists."""
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    secret = outside / "secret"
    return (
        10**12, -1, 10**30, 1e308, float("nan"), "", "x" * 10**6, SCRIPT, "=1+1", f"../../{outside.name}/secret",
        str(secret), str(outside), f"hf:{outside}", f"local-dir:{outside}", None, True, [], {}, [0] * 10**5, nested,
        {"../x": 1}, "\ud800", "client_0/../../x", 0,
    )  # fmt: skip


def _change_value(random_source: random.Random, root: Path, file: Path, outside: Path) -> str:
    """Put a value somewhere into a file, with a digest that fits."""
    path = root / file
    if path.suffix == ".ckpt":
        return _change_checkpoint(random_source, path, root, outside)
    content = json.loads(path.read_text())
    records = content if isinstance(content, list) else [content]
    is_sealed = [record.pop(KEY, None) is not None for record in records]
    change = _replace_value(random_source, content, _values(outside))
    for number, record in enumerate(records):
        if isinstance(record, dict) and is_sealed[number]:
            records[number] = sealed(record)
    path.write_text(json.dumps(content if isinstance(content, list) else records[0]))
    if file.name == "adapter_config.json":
        _copy_to_clients(path)
    return change


def _change_checkpoint(random_source: random.Random, path: Path, root: Path, outside: Path) -> str:
    """Put a value somewhere into a checkpoint, mostly into perada's part."""
    content = torch.load(path, weights_only=True)
    values = (
        *_values(outside, depth=50),
        torch.zeros(0),
        torch.full((3, 3), torch.nan),
        Executable(str(root.parent / "owned")),
    )
    part = content["perada"] if random_source.random() < 0.9 else content
    change = _replace_value(random_source, part, values)
    AtomicCheckpointIO().save_checkpoint(content, path)
    return change


def _copy_to_clients(path: Path) -> None:
    """Copy the file of the global adapter into the clients' folders, and renew the digests of all folders."""
    for folder in (path.parent, *path.parent.parent.glob("client_*")):
        if folder != path.parent:
            shutil.copyfile(path, folder / path.name)
        names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
        write_sums(folder, names)


def _replace_value(random_source: random.Random, content: dict[str, Any] | list[Any], values: tuple[Any, ...]) -> str:
    """Replace a value at a random depth, and return its place and the new value."""
    container: Any = content
    place = ""
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = random_source.choice(keys)
        place += f"/{key}"
        inner = container[key]
        if not isinstance(inner, dict | list) or not inner or random_source.random() < 0.3:
            break
        container = inner
    value = random_source.choice(values)
    container[key] = value
    return f"{place} = {repr(value)[:60]}"


def _put_link(random_source: random.Random, root: Path, part: str, outside: Path) -> str:
    """Replace a file or folder, also one that perada only makes while it saves, by a link to the outside."""
    folder = root / part
    ready = folder / READY
    stage = folder / STAGE
    files = sorted(folder.rglob("*"))
    deepest_file = max(files, key=lambda file: len(file.parts))
    temporary_files = [folder / f".{RUN_FILE}.partial", deepest_file.with_name(f".{deepest_file.name}.partial")]
    path = random_source.choice([*files, *[ready, stage, *temporary_files] * 5])
    if path != ready and random_source.random() < 0.3:
        # As if the run before had been killed while its files were moved.
        shutil.copytree(folder, ready)
    target = outside if path.is_dir() or path in (ready, stage) else outside / "secret"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return f"{path.relative_to(root)} -> {target.name}"


def _load_run(root: Path, job: Job) -> None:
    _read(root / SAVED, job)


def _load_exported(root: Path, job: Job) -> None:
    _read(root / EXPORTED, job)


def _read(folder: Path, job: Job) -> None:
    run = perada.Run.load(folder, backbone=job.network())
    run.states("personal")
    run.personal(0)


def _save_over(root: Path, job: Job) -> str | None:
    _intact_run(root, job).save(root / SAVED)
    return _secret_in(root / SAVED)


def _export_over(root: Path, job: Job) -> str | None:
    _intact_run(root, job).export(root / EXPORTED)
    return _secret_in(root / EXPORTED)


def _intact_run(root: Path, job: Job) -> perada.Run:
    """Load the run of the example that ``root`` is a copy of."""
    return perada.Run.load(folder_of(job, root.parent) / SAVED, backbone=job.network())


def _secret_in(folder: Path) -> str | None:
    """Return what went wrong if a file of a folder holds the secret."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
            return "copied a secret"
    return None


def _forget(root: Path, _: Job) -> None:
    forget(root / SAVED, 1)


def _report(root: Path, _: Job) -> str | None:
    run_folder = root / FILES["run.json of a fit"].parent
    _format_tables(run_folder)
    page = write_page(root / "page", read_records(run_folder)).read_text()
    return "put a script into the page" if SCRIPT in page else None


def _resume(root: Path, job: Job) -> None:
    """Resume a checkpoint for one more round."""
    longer_job = replace(job, rounds=job.rounds + 1)
    longer_job.train(root, str(root / FILES["checkpoint"]), logger=False, enable_checkpointing=False)


def _report_comparison(root: Path, _: Job) -> None:
    _format_tables(root / FILES["results of compare"])
