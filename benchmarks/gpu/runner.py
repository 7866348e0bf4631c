# SPDX-License-Identifier: Apache-2.0
"""Runs parts one after another, each within its limit, and writes down after each what became of it."""

import json
import os
import signal
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

ROOT = Path(__file__).parents[2]
RECORD = "parts.json"
"""File of what became of each part."""
GRACE = 10.0
"""Seconds that a part has to end after it was asked to."""
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "pytorch-lightning": "pytorch_lightning",
    "pyyaml": "yaml",
}
"""Under which name a package is imported, where that is not its own."""
FASHION_MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte")
FASHION_MNIST_FILES += ("t10k-labels-idx1-ubyte",)
FASHION_MNIST_FOLDERS = (
    Path("/usr/share/datasets/fashion-mnist"),
    ROOT / "data" / "FashionMNIST" / "raw",
    ROOT / "data",
)
"""Where ``perada.data.FashionMNIST`` looks for its files if it is told no folder."""
Status = Literal["done", "failed", "timed out", "interrupted", "not run"]


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        name: The part's.
        status: ``done`` parts are not run again; what was ``timed out`` goes on where its files allow that.
        reason: Of any other status than ``done``.
        seconds: How long it ran.
        command: Its words, without the interpreter.
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
        modules.append(MODULES.get(package, package))
    return modules


def import_errors(modules: Sequence[str]) -> dict[str, str]:
    """Import modules in a process of its own; return the errors of those that cannot be imported."""
    code = "import importlib, json, sys\nerrors = {}\n"
    code += "for name in sys.argv[1:]:\n try: importlib.import_module(name)\n"
    code += " except Exception as error: errors[name] = f'{type(error).__name__}: {error}'\n"
    code += "print(json.dumps(errors))"
    command = [sys.executable, "-W", "ignore", "-c", code, *modules]
    ended = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if ended.returncode:
        return dict.fromkeys(modules, f"Python ended with status {ended.returncode} over it")
    errors: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return errors


def missing_for(parts: Sequence[Part], setting: Setting) -> dict[str, list[str]]:
    """Return what each part lacks, by its name: modules that cannot be imported, and files."""
    errors = import_errors(list(dict.fromkeys(module for part in parts for module in part.imports)))
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
    """Return a line for the files of Fashion-MNIST that no folder has, or nothing."""
    folders = FASHION_MNIST_FOLDERS if folder is None else (folder / "FashionMNIST" / "raw", folder)
    for place in folders:
        if all((place / name).is_file() or (place / f"{name}.gz").is_file() for name in FASHION_MNIST_FILES):
            return []
    listed = " or ".join(map(str, folders))
    return [f"Fashion-MNIST's four idx files in {listed} (name their folder with FASHION_MNIST=FOLDER)"]


def run_parts(parts: Sequence[Part], setting: Setting, minutes: float) -> list[Outcome]:
    """Run the parts that can be run and are not done, in their order.

    Args:
        parts: All of them.
        setting: How to run them.
        minutes: Limit of all parts together, for a run that is not quick.

    Returns:
        What became of each part, which is also in the folder of results after each of them.

    Raises:
        KeyboardInterrupt: As it comes, after the part under way was ended and noted.
    """
    setting.output.mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(setting.output)
    if dependencies := missing_dependencies():
        print(f"dependencies of perada that are missing here: {', '.join(dependencies)}", flush=True)
    missing = missing_for(parts, setting)
    for name, reasons in missing.items():
        if reasons:
            print(f"{name} cannot be run: it lacks {', '.join(reasons)}", flush=True)

    began = time.monotonic()
    for place, part in enumerate(parts):
        command = tuple(part.command(setting))
        before = outcomes.get(part.name)
        if before is not None and before.status == "done" and before.command == command[1:]:
            print(f"--- {part.name}: done before", flush=True)
            continue
        if missing[part.name]:
            reason = f"it lacks {', '.join(missing[part.name])}"
            outcomes[part.name] = Outcome(part.name, "not run", reason, 0.0, command[1:])
            write_outcomes(setting.output, outcomes)
            continue
        left = 60 * minutes * setting.patience - (time.monotonic() - began)
        limit = _limit_of(part, parts[place + 1 :], left, setting.patience)
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


def _limit_of(part: Part, later: Sequence[Part], left: float, patience: float) -> float:
    """Seconds that a part may take of those that are left."""
    own = 60 * part.minutes * patience
    if part.takes_rest:
        reserved = sum(60 * other.minutes * patience for other in later)
        return max(min(own, left), left - reserved)
    return min(own, left)


def run_part(part: Part, command: Sequence[str], setting: Setting, limit: float) -> Outcome:
    """Run one part in a session of its own, which ends with all its processes at the limit.

    What it prints goes to ``NAME.log`` in the folder of results.
    """
    if limit <= 0:
        return Outcome(part.name, "not run", "no time was left", 0.0, tuple(command[1:]))
    log = setting.output / f"{part.name}.log"
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            returncode = process.wait(limit)
            reason = "" if returncode == 0 else f"status {returncode}: {last_line(log)}"
            status: Status = "failed" if returncode else "done"
        except subprocess.TimeoutExpired:
            status, reason = "timed out", f"its limit of {limit / 60:.1f} minutes"
        finally:
            _end(process)
    return Outcome(part.name, status, reason, round(time.monotonic() - began, 1), tuple(command[1:]))


def _environment() -> dict[str, str]:
    """Return the environment of a part: this tree is imported, and nothing is asked of a hub."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | own


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part's session: by SIGTERM, and by SIGKILL if that was not enough."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, cut to 300 characters."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "it printed nothing")


def missing_device(device: str) -> str:
    """Return why the device cannot be used, or nothing."""
    if device != "cuda" or find_spec("torch") is None:
        return ""
    question = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    status = subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL).returncode
    if status == 0:
        return ""
    if status == 3:
        return "torch finds no CUDA device here; the dry run is: make gpu DEVICE=cpu QUICK=1"
    return f"`import torch` ended with status {status}"


def read_outcomes(output: Path) -> dict[str, Outcome]:
    """Return what became of the parts so far, by name."""
    file = output / RECORD
    if not file.is_file():
        return {}
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["parts"]
    outcomes = [Outcome(**record | {"command": tuple(record["command"])}) for record in records]
    return {outcome.name: outcome for outcome in outcomes}


def write_outcomes(output: Path, outcomes: dict[str, Outcome]) -> None:
    """Write what became of the parts, with what they ran on."""
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
            ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            facts[name] = "unknown"
            continue
        facts[name] = ended.stdout.strip() or "unknown"
    return facts
