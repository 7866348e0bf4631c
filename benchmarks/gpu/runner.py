# SPDX-License-Identifier: Apache-2.0
"""Runs parts one after another, each within its limit, and records the outcome of each when it ends."""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.parts import Part, Setting
from benchmarks.sessions import ROOT, end_session, offline_environment

RECORD = "parts.json"
"""Name of the file with the outcomes of the parts."""
MODULES = {"pillow": "PIL", "pyyaml": "yaml"}
"""Names under which packages are imported that differ from the packages' names by more than a hyphen."""
FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FASHION_MNIST_FOLDERS = (
    Path("/usr/share/datasets/fashion-mnist"),
    ROOT / "data" / "FashionMNIST" / "raw",
    ROOT / "data",
)
"""Folders in which ``perada.data.FashionMNIST`` looks for its files by default."""
IMPORT_PROGRAM = """
import importlib, json, sys

errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"
print(json.dumps(errors))
"""
"""Program that imports the modules among its arguments, and prints the errors by module."""
Status = Literal["done", "failed", "timed out", "interrupted", "not run"]


@dataclass
class Outcome:
    """Outcome of a part.

    Attributes:
        name: Name of the part.
        status: ``done`` parts are not run again; one that ``timed out`` is continued if its files allow it.
        reason: Reason of any other status than ``done``.
        seconds: Run time of the part.
        command: Words of its command, without the interpreter.
    """

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    command: tuple[str, ...] = ()


def required_modules() -> list[str]:
    """Return the modules that perada itself imports, by the dependencies of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = []
    for requirement in project["dependencies"]:
        package = requirement.partition(">")[0].partition("[")[0].strip()
        modules.append(MODULES.get(package, package.replace("-", "_")))
    return modules


def import_errors(modules: Sequence[str]) -> dict[str, str]:
    """Import modules in a process of its own; return the errors of those that cannot be imported."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_PROGRAM, *modules]
    completed = subprocess.run(command, cwd=ROOT, env=part_environment(), capture_output=True, text=True)
    if completed.returncode:
        return dict.fromkeys(modules, f"Python ended with status {completed.returncode} over it")
    errors: dict[str, str] = json.loads(completed.stdout.splitlines()[-1])
    return errors


def missing_for(parts: Sequence[Part], setting: Setting) -> dict[str, list[str]]:
    """Return what each part lacks, by its name: modules that cannot be imported, and files."""
    imported_modules = {module: None for part in parts for module in part.imports}
    errors = import_errors(list(imported_modules))
    missing: dict[str, list[str]] = {}
    for part in parts:
        reasons = [f"{module} ({errors[module]})" for module in part.imports if module in errors]
        reasons += [f"the module {module}" for module in part.needs if find_spec(module) is None]
        if part.fashion_mnist:
            reasons += missing_fashion_mnist(setting.fashion_mnist)
        missing[part.name] = reasons
    return missing


def missing_dependencies() -> list[str]:
    """Return the dependencies of perada that are not installed, by the names under which they are imported."""
    return [module for module in required_modules() if find_spec(module) is None]


def missing_fashion_mnist(folder: Path | None) -> list[str]:
    """Return a line if no folder has all files of Fashion-MNIST, else no line."""
    folders = FASHION_MNIST_FOLDERS
    if folder is not None:
        folders = (folder / "FashionMNIST" / "raw", folder)
    if any(_has_fashion_mnist(candidate) for candidate in folders):
        return []
    folders_text = " or ".join(str(candidate) for candidate in folders)
    return [f"Fashion-MNIST's four idx files in {folders_text} (name their folder with FASHION_MNIST=FOLDER)"]


def _has_fashion_mnist(folder: Path) -> bool:
    """Return whether a folder has all files of Fashion-MNIST, plain or compressed."""
    return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in FASHION_MNIST_FILES)


def run_parts(parts: Sequence[Part], setting: Setting, minutes: float) -> list[Outcome]:
    """Run the parts that can be run and are not done, in their order.

    Args:
        parts: All parts.
        setting: The setting in which they are run.
        minutes: Limit of all parts together, for a run that is not quick.

    Returns:
        The outcome of each part. The folder of results has it when the part has ended.

    Raises:
        KeyboardInterrupt: After the running part was ended and recorded.
    """
    setting.output.mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(setting.output)
    if dependencies := missing_dependencies():
        print(f"dependencies of perada that are missing here: {', '.join(dependencies)}", flush=True)
    missing = missing_for(parts, setting)
    for name, reasons in missing.items():
        if reasons:
            print(f"{name} cannot be run: it lacks {', '.join(reasons)}", flush=True)

    started_at = time.monotonic()
    total = 60 * minutes * setting.patience
    for position, part in enumerate(parts):
        command = tuple(part.command(setting))
        earlier = outcomes.get(part.name)
        if earlier is not None and earlier.status == "done" and earlier.command == command[1:]:
            print(f"--- {part.name}: done before", flush=True)
            continue
        if missing[part.name]:
            reason = f"it lacks {', '.join(missing[part.name])}"
            outcomes[part.name] = Outcome(part.name, "not run", reason, 0.0, command[1:])
            write_outcomes(setting.output, outcomes)
            continue
        remaining = total - (time.monotonic() - started_at)
        limit = _limit_of(part, parts[position + 1 :], remaining, setting.patience)
        print(f"--- {part.name}: {part.purpose} (at most {limit / 60:.1f} minutes)", flush=True)
        try:
            outcome = run_part(part, command, setting, limit)
        except KeyboardInterrupt:
            interrupted = Outcome(part.name, "interrupted", "Ctrl-C or SIGINT", 0.0, command[1:])
            write_outcomes(setting.output, outcomes | {part.name: interrupted})
            raise
        outcomes[part.name] = outcome
        write_outcomes(setting.output, outcomes)
        reason = f" ({outcome.reason})" if outcome.reason else ""
        print(f"    {outcome.status} after {outcome.seconds:.0f} s{reason}", flush=True)
    return [outcomes[part.name] for part in parts]


def _limit_of(part: Part, later_parts: Sequence[Part], remaining: float, patience: float) -> float:
    """Return how many of the remaining seconds a part may take."""
    limit = min(60 * part.minutes * patience, remaining)
    if part.takes_rest:
        reserved = sum(60 * later.minutes * patience for later in later_parts)
        return max(limit, remaining - reserved)
    return limit


def run_part(part: Part, command: Sequence[str], setting: Setting, limit: float) -> Outcome:
    """Run one part in a new session, whose processes are all ended at the limit.

    Its output is written to ``NAME.log`` in the folder of results.
    """
    if limit <= 0:
        return Outcome(part.name, "not run", "no time was left", 0.0, tuple(command[1:]))
    log = setting.output / f"{part.name}.log"
    status: Status = "done"
    reason = ""
    started_at = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=part_environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            returncode = process.wait(limit)
            if returncode != 0:
                status = "failed"
                reason = f"status {returncode}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            status = "timed out"
            reason = f"its limit of {limit / 60:.1f} minutes"
        finally:
            end_session(process)
    seconds = round(time.monotonic() - started_at, 1)
    return Outcome(part.name, status, reason, seconds, tuple(command[1:]))


def part_environment() -> dict[str, str]:
    """Return the environment of a part, whose log is written line by line."""
    return offline_environment(PYTHONUNBUFFERED="1")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, cut to 300 characters."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    for line in reversed(lines):
        if line:
            return line[:300]
    return "it printed nothing"


def missing_device(device: str) -> str:
    """Return why the device cannot be used; an empty text if it can."""
    if device != "cuda" or find_spec("torch") is None:
        return ""
    program = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    status = subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode
    if status == 0:
        return ""
    if status == 3:
        return "torch finds no CUDA device here; the dry run is: make gpu DEVICE=cpu QUICK=1"
    return f"`import torch` ended with status {status}"


def read_outcomes(output: Path) -> dict[str, Outcome]:
    """Return the outcomes of the parts so far, by name."""
    file = output / RECORD
    if not file.is_file():
        return {}
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["parts"]
    outcomes = [Outcome(**record | {"command": tuple(record["command"])}) for record in records]
    return {outcome.name: outcome for outcome in outcomes}


def write_outcomes(output: Path, outcomes: dict[str, Outcome]) -> None:
    """Write the outcomes of the parts, with the machine that they ran on."""
    content = {"machine": machine(), "parts": [asdict(outcome) for outcome in outcomes.values()]}
    file = output / RECORD
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(file)


def machine() -> dict[str, str]:
    """Return the commit, Python, and the GPU as its driver names it."""
    facts = {"python": sys.version.split()[0], "cores": str(os.cpu_count())}
    commands = {
        "commit": ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        "gpu": ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
    }
    for name, command in commands.items():
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            facts[name] = "unknown"
            continue
        facts[name] = completed.stdout.strip() or "unknown"
    return facts
