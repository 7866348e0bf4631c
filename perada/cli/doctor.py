# SPDX-License-Identifier: Apache-2.0
"""``perada doctor``: what a bug report needs, and whether runs can work on this machine.

It prints no names of users, hosts or folders. Versions are those of the installed distributions. Of the large libraries
only torch is imported, for the processor and the devices. ``torch.utils.collect_env`` (2.14) is not used: it names
folders, runs pip and compilers, and has neither perada, peft and timm nor the memory and cores that a run may use.
"""

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from jsonargparse import ArgumentParser
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from perada.cli.recipes import RECIPES
from perada.core.text import printable

LIBRARIES = (
    "torch",
    "torchvision",
    "pytorch-lightning",
    "torchmetrics",
    "peft",
    "timm",
    "transformers",
    "opacus",
    "flwr",
    "numpy",
    "safetensors",
)
"""Libraries whose versions are printed."""
DEVELOPER_EXTRAS = ("dev", "docs")
"""Extras that users do not need."""
NARROW_UNITS = {"avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8", "amx_tile", "bf16"}
"""Instruction sets for narrow numbers, by the names that Linux gives them."""
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
HUB_TIMEOUT = 3
"""Seconds to wait for the Hub."""
GB = 2**30
"""Bytes in a gigabyte."""
MIN_SHARED_MEMORY = 0.5
MIN_DISK = 1.0
MIN_MEMORY = 2.0
"""Gigabytes below which a warning is printed."""


class InstallationCheck(NamedTuple):
    """Result of a check; runs do not work where one fails."""

    status: Literal["pass", "warn", "fail"]
    text: str


def doctor(parser: ArgumentParser, words: list[str]) -> None:
    """Print versions and facts about the machine, and check them; the exit status is 1 if runs cannot work."""
    parser.add_argument(
        "--imports", action="store_true", help="Also import everything that a run needs, which takes several seconds."
    )
    options = parser.parse_args(words)
    checks = [
        *_check_versions(),
        *_check_extras(),
        *_check_imports(options.imports),
        *_check_folder(),
        *_check_machine(),
    ]
    for name, value in [*_version_facts(), *_machine_facts()]:
        print(f"{name:18} {printable(value)}")
    print()
    for state in ("fail", "warn", "pass"):
        for check in checks:
            if check.status == state:
                print(f"{check.status}  {printable(check.text)}")
    if any(check.status == "fail" for check in checks):
        sys.exit(1)


def _installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_facts() -> Iterator[tuple[str, str]]:
    """Yield names and versions."""
    yield "perada", version("perada")
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    for name in LIBRARIES:
        yield name, _installed_version(name) or "not installed"


def versions() -> str:
    """Return versions and the processor's instruction sets on one line, without importing a large library."""
    parts = [", ".join(f"{name} {value}" for name, value in _version_facts() if name != "perada")]
    parts.append(platform.machine())
    units = _processor_units({"avx2", "avx512f"})
    if units:
        parts.append(" ".join(units))
    return "; ".join(parts)


def _processor_units(others: Collection[str] = ()) -> list[str]:
    """Return the processor's instruction sets among `NARROW_UNITS` and ``others``, where Linux lists them."""
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.is_file():
        return []
    return sorted({*NARROW_UNITS, *others} & set(cpu_info.read_text(encoding="utf-8").split()))


def _machine_facts() -> Iterator[tuple[str, str]]:
    """Yield facts about operating system, processor, memory and accelerators."""
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "cores", f"{_available_cores()} of {os.cpu_count()}"
    yield "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set")
    total = _read_memory("MemTotal")
    free = _read_memory("MemAvailable")
    yield "memory", "unknown" if total is None or free is None else f"{free:.1f} GB free of {total:.1f}"
    try:
        import torch
    except Exception:  # _check_imports reports it
        return
    yield "threads", str(torch.get_num_threads())
    yield "instructions", " ".join([torch.backends.cpu.get_cpu_capability(), *_processor_units()])
    if torch.version.hip:
        yield "built for", f"ROCm {torch.version.cuda or torch.version.hip}"
    elif torch.version.cuda:
        yield "built for", f"CUDA {torch.version.cuda}"
    else:
        yield "built for", "the CPU"
    for number in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        memory = f"{free_bytes / GB:.1f} GB free of {total_bytes / GB:.1f}"
        yield f"GPU {number}", f"{torch.cuda.get_device_name(number)}, {memory}"
    if not torch.cuda.device_count():
        yield "GPU", "Apple's" if torch.backends.mps.is_available() else "none"


def _available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_memory(name: str) -> float | None:
    """Return the gigabytes of a kind of memory, where Linux reports it."""
    memory_info = Path("/proc/meminfo")
    if not memory_info.is_file():
        return None
    match = re.search(rf"^{name}: +(\d+) kB", memory_info.read_text(), re.MULTILINE)
    return None if match is None else int(match[1]) * 1024 / GB


def _read_requirements(name: str, extra: str = "") -> list[Requirement]:
    """Return what a distribution requires on this machine.

    Args:
        name: Name of the distribution.
        extra: Extra whose additional requirements are returned; "" for those without an extra.
    """
    requirements = []
    for requirement in map(Requirement, requires(name) or ()):
        marker = requirement.marker
        applies = marker is None or marker.evaluate({"extra": extra})
        applies_without_extra = marker is None or marker.evaluate({"extra": ""})
        if applies and not (extra and applies_without_extra):
            requirements.append(requirement)
    return requirements


def _find_violation(requirement: Requirement) -> str:
    """Return how the installation violates a requirement; "" if it does not."""
    installed = _installed_version(requirement.name)
    if installed is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return ""
    return f"{requirement.name} is {installed}, not {requirement.specifier}"


def _check_versions() -> Iterator[InstallationCheck]:
    """Check Python and the libraries against perada's bounds, and the libraries against each other's."""
    python_bound = metadata("perada")["Requires-Python"]
    if not SpecifierSet(python_bound).contains(platform.python_version(), prereleases=True):
        yield InstallationCheck(
            "fail", f"Python is {platform.python_version()}, but perada requires {python_bound}; use a different Python"
        )
    requirements = _read_requirements("perada")
    is_consistent = True
    for requirement in requirements:
        violation = _find_violation(requirement)
        if violation:
            is_consistent = False
            yield InstallationCheck("fail", f"{violation}; reinstall perada in a separate environment")
    for library in requirements:
        if not _installed_version(library.name):
            continue
        for requirement in _read_requirements(library.name):
            violation = _find_violation(requirement)
            if violation:
                is_consistent = False
                yield InstallationCheck(
                    "warn", f"{library.name} requires {requirement.name}{requirement.specifier}: {violation}"
                )
    if is_consistent:
        yield InstallationCheck("pass", f"the versions of {len(requirements)} libraries are within their bounds")


def _check_extras() -> Iterator[InstallationCheck]:
    """Check which extras are complete, and warn of those with a wrong library version."""
    complete = []
    incomplete = []
    for extra in metadata("perada").get_all("Provides-Extra") or ():
        requirements = [] if extra in DEVELOPER_EXTRAS else _read_requirements("perada", extra)
        if not requirements:
            continue
        violations = [violation for violation in map(_find_violation, requirements) if violation]
        if violations:
            incomplete.append(extra)
        else:
            complete.append(extra)
        if any(" is not installed" not in violation for violation in violations):
            yield InstallationCheck("warn", f"perada[{extra}]: {', '.join(violations)}; pip install 'perada[{extra}]'")
    not_installed = f"; not installed completely: {', '.join(incomplete)}" if incomplete else ""
    yield InstallationCheck("pass", f"installed extras: {', '.join(complete) or 'none'}{not_installed}")


def _check_imports(everything: bool) -> Iterator[InstallationCheck]:
    """Check that perada can be imported.

    Args:
        everything: Whether to import all that a run needs, and not only what needs torch.
    """
    names = ["perada.algorithms", "perada.server", "perada.privacy"]
    if everything:
        names = ["perada.api", "perada.adapters"]
    try:
        for name in names:
            import_module(name)
    except Exception as error:  # whatever a broken library raises
        # The last part of a path is enough, and identifies nobody.
        message = re.sub(r"[\w.~-]*(?:[/\\][\w.~ +-]+)+[/\\]([\w.+-]+)", r"\1", f"{type(error).__name__}: {error}")
        yield InstallationCheck("fail", f"perada cannot be imported ({' '.join(message.split())[:300]}); reinstall it")
        return
    more = "" if everything else "; `perada doctor --imports` imports everything that a run needs"
    yield InstallationCheck("pass", f"perada can be imported{more}")
    num_recipes = len([*RECIPES.rglob("*.yaml")])
    if num_recipes:
        yield InstallationCheck("pass", f"{num_recipes} recipes are installed")
    else:
        yield InstallationCheck("fail", "no recipes are installed; reinstall perada")


def _check_folder() -> Iterator[InstallationCheck]:
    """Check the current folder, its disk and the access to the Hub."""
    try:
        with tempfile.TemporaryFile(dir="."):
            yield InstallationCheck("pass", "the current folder is writable")
    except OSError as error:
        yield InstallationCheck(
            "fail", f"the current folder is not writable ({error.strerror}); runs write there by default"
        )
    free = shutil.disk_usage(".").free / GB
    if free < MIN_DISK:
        yield InstallationCheck("warn", f"{free:.1f} GB are free on its disk; free more space")
    else:
        yield InstallationCheck("pass", f"{free:.1f} GB are free on its disk")
    offline = [name for name in OFFLINE_VARIABLES if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if offline:
        yield InstallationCheck("pass", f"{' and '.join(offline)} is set: only weights on this machine are used")
    else:
        yield _check_hub()


def _check_hub() -> InstallationCheck:
    """Ask the Hub for an answer, through the proxy of the environment if there is one."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = Request(endpoint, method="HEAD")
        with urlopen(request, timeout=HUB_TIMEOUT):
            pass
    except HTTPError:  # an answer
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return InstallationCheck(
            "warn",
            f"the Hub does not answer within {HUB_TIMEOUT} s ({reason}): weights missing on this machine cannot be "
            "downloaded; connect, or set HF_HUB_OFFLINE=1",
        )
    return InstallationCheck("pass", "the Hub answers: weights missing on this machine are downloaded from it")


def _check_machine() -> Iterator[InstallationCheck]:
    """Check memory, threads, and whether half precision is faster."""
    free = _read_memory("MemAvailable")
    if free is not None and free < MIN_MEMORY:
        yield InstallationCheck("warn", f"{free:.1f} GB of memory are free; small recipes require {MIN_MEMORY:g}")
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).total < MIN_SHARED_MEMORY * GB:
        yield InstallationCheck(
            "warn", "the shared memory is small: leave data.num_workers at 0, or start the container with --shm-size=1g"
        )
    try:
        import torch
    except Exception:  # _check_imports reports it
        return
    cores = _available_cores()
    if torch.get_num_threads() > cores:
        yield InstallationCheck(
            "warn", f"torch has {torch.get_num_threads()} threads on {cores} cores; set OMP_NUM_THREADS={cores}"
        )
    if not torch.cuda.is_available():
        from perada.engine.loss_scaling import product_seconds

        speed_up = product_seconds(torch.float32) / product_seconds(torch.bfloat16)
        advice = "bf16-mixed may pay off" if speed_up > 1 else "stay with precision 32-true"
        yield InstallationCheck(
            "pass", f"a matrix product in bfloat16 is {speed_up:.2g} times as fast as in float32: {advice}"
        )
