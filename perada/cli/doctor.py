# SPDX-License-Identifier: Apache-2.0
"""``perada doctor``: what a bug report needs, and whether runs can work here.

It names no user, host or folder. Versions are read from what is installed. Of the large libraries only torch is
imported, which knows processor and devices.
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

from jsonargparse import ArgumentParser
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from perada.cli.recipes import RECIPES
from perada.core.text import printable

SHOWN = "torch torchvision pytorch-lightning torchmetrics peft timm transformers opacus flwr numpy safetensors".split()
OF_DEVELOPERS = ("dev", "docs")
"""Extras that no user needs."""
UNITS = {"avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8", "amx_tile", "bf16"}
"""A processor's units for narrow numbers, by the names that Linux gives them."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
GB, SHARED, LEAST_DISK, LEAST_MEMORY = 2**30, 0.5, 1.0, 2.0
"""Bytes in a gigabyte, and the gigabytes of shared memory, disk and memory below which there is a warning."""


class Check(NamedTuple):
    """Result of a check; runs do not work where one fails."""

    state: Literal["pass", "warn", "fail"]
    text: str


def doctor(parser: ArgumentParser, words: list[str]) -> None:
    """Print versions and the machine, and check them; the exit status is 1 if something that a run needs is broken."""
    text = "Import all that a run needs too, which takes several seconds."
    parser.add_argument("--imports", action="store_true", help=text)
    given = parser.parse_args(words)
    checks = [*_versions(), *_extras(), *_imports(given.imports), *_here(), *_machine()]
    for name, value in [*_facts(), *_of_machine()]:
        print(f"{name:18} {printable(value)}")
    print()
    for check in sorted(checks, key=lambda one: ("fail", "warn", "pass").index(one.state)):
        print(f"{check.state}  {printable(check.text)}")
    if any(check.state == "fail" for check in checks):
        sys.exit(1)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _facts() -> Iterator[tuple[str, str]]:
    """Versions."""
    yield "perada", version("perada")
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield from ((name, _installed(name) or "not installed") for name in SHOWN)


def versions() -> str:
    """Versions and the processor's instructions, on one line; no large library is imported for it."""
    found = [f"{name} {value}" for name, value in _facts() if name != "perada"]
    return "; ".join([", ".join(found), platform.machine(), *filter(None, [" ".join(_units({"avx2", "avx512f"}))])])


def _units(others: Collection[str] = ()) -> list[str]:
    """Those of the processor's units that matter, and of ``others``, where Linux lists them."""
    known = Path("/proc/cpuinfo")
    return sorted({*UNITS, *others} & set(known.read_text(encoding="utf-8").split())) if known.is_file() else []


def _of_machine() -> Iterator[tuple[str, str]]:
    """Operating system, processor, memory and accelerators."""
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "cores", f"{_cores()} of {os.cpu_count()}"
    yield "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set")
    total, free = (_memory(name) for name in ("MemTotal", "MemAvailable"))
    yield "memory", "unknown" if total is None or free is None else f"{free:.1f} GB free of {total:.1f}"
    try:
        import torch
    except Exception:  # _imports reports it
        return
    yield "threads", str(torch.get_num_threads())
    yield "instructions", " ".join([torch.backends.cpu.get_cpu_capability(), *_units()])
    built = torch.version.cuda or torch.version.hip
    yield "built for", f"{'ROCm' if torch.version.hip else 'CUDA'} {built}" if built else "the CPU"
    for number in range(torch.cuda.device_count()):
        free_there, there = torch.cuda.mem_get_info(number)
        yield (
            f"GPU {number}",
            f"{torch.cuda.get_device_name(number)}, {free_there / GB:.1f} GB free of {there / GB:.1f}",
        )
    if not torch.cuda.device_count():
        yield "GPU", "Apple's" if torch.backends.mps.is_available() else "none"


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory(name: str) -> float | None:
    """Gigabytes of a kind of memory, where Linux reports it."""
    known = Path("/proc/meminfo")
    found = re.search(rf"^{name}: +(\d+) kB", known.read_text(), re.MULTILINE) if known.is_file() else None
    return int(found[1]) * 1024 / GB if found else None


def _requirements(name: str, extra: str = "") -> list[Requirement]:
    """What a distribution requires here: for an extra what it adds, without one the rest."""
    out = []
    for one in map(Requirement, requires(name) or ()):
        anyway, here = (one.marker is None or one.marker.evaluate({"extra": given}) for given in ("", extra))
        if here and not (extra and anyway):
            out.append(one)
    return out


def _wrong(asked: Requirement) -> str | None:
    """What is wrong with what is installed of a requirement."""
    found = _installed(asked.name)
    if found is None:
        return f"{asked.name} is not installed"
    return (
        None if asked.specifier.contains(found, prereleases=True) else f"{asked.name} is {found}, not {asked.specifier}"
    )


def _versions() -> Iterator[Check]:
    """Python and the libraries against perada's bounds, and the libraries against those of one another."""
    bound = metadata("perada")["Requires-Python"]
    if not SpecifierSet(bound).contains(platform.python_version(), prereleases=True):
        yield Check("fail", f"Python is {platform.python_version()}, and perada needs {bound}; use another")
    own = _requirements("perada")
    wrong = [said for asked in own if (said := _wrong(asked))]
    yield from (Check("fail", f"{said}; install perada again, in an environment of its own") for said in wrong)
    for one in own:
        for asked in _requirements(one.name) if _installed(one.name) else ():
            if said := _wrong(asked):
                wrong.append(said)
                yield Check("warn", f"{one.name} asks for {asked.name}{asked.specifier}: {said}")
    if not wrong:
        yield Check("pass", f"the versions of {len(own)} libraries are within their bounds")


def _extras() -> Iterator[Check]:
    """Which extras are complete; one with a library of a wrong version is warned of."""
    complete, missing = [], []
    for extra in metadata("perada").get_all("Provides-Extra") or ():
        asked = [] if extra in OF_DEVELOPERS else _requirements("perada", extra)
        wrong = [said for one in asked if (said := _wrong(one))]
        if asked and not wrong:
            complete.append(extra)
        elif asked:
            missing.append(extra)
        if any(" is not installed" not in said for said in wrong):
            yield Check("warn", f"perada[{extra}]: {', '.join(wrong)}; pip install 'perada[{extra}]'")
    lacking = f"; incomplete: {', '.join(missing)}" if missing else ""
    yield Check("pass", f"complete extras: {', '.join(complete) or 'none'}{lacking}")


def _imports(every: bool) -> Iterator[Check]:
    """Whether perada can be imported: what needs torch alone or, if ``every`` is true, all that a run needs."""
    names = ("perada.api", "perada.adapters") if every else ("perada.algorithms", "perada.server", "perada.privacy")
    try:
        for name in names:
            import_module(name)
    except Exception as error:  # whatever a broken library raises
        # The last part of a path says enough, and names nobody.
        reason = re.sub(r"[\w.~-]*(?:[/\\][\w.~ +-]+)+[/\\]([\w.+-]+)", r"\1", f"{type(error).__name__}: {error}")
        yield Check("fail", f"perada cannot be imported ({' '.join(reason.split())[:300]}); install it again")
        return
    more = "" if every else "; `perada doctor --imports` tries all that a run needs"
    yield Check("pass", f"perada can be imported{more}")
    shipped = len([*RECIPES.rglob("*.yaml")])
    yield Check(
        "pass" if shipped else "fail", f"{shipped} recipes are there" + ("" if shipped else "; install it again")
    )


def _here() -> Iterator[Check]:
    """The current folder, its disk and the Hub."""
    try:
        with tempfile.TemporaryFile(dir="."):
            yield Check("pass", "the current folder can be written to")
    except OSError as error:
        yield Check("fail", f"the current folder cannot be written to ({error.strerror}); runs write there by default")
    free = shutil.disk_usage(".").free / GB
    short = free < LEAST_DISK
    yield Check("warn" if short else "pass", f"{free:.1f} GB are free on its disk" + ("; make room" if short else ""))
    offline = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    about = f"{' and '.join(offline)} is set: only weights that are on this machine are found"
    yield Check("pass", about if offline else "weights that are not on this machine are downloaded from the Hub")


def _machine() -> Iterator[Check]:
    """Memory, threads, and whether half precision pays."""
    free = _memory("MemAvailable")
    if free is not None and free < LEAST_MEMORY:
        yield Check("warn", f"{free:.1f} GB of memory are free; small recipes need {LEAST_MEMORY:g}")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < SHARED * GB:
        yield Check(
            "warn", "the shared memory is small: leave data.num_workers at 0, or give a container --shm-size=1g"
        )
    try:
        import torch
    except Exception:  # _imports reports it
        return
    if torch.get_num_threads() > (cores := _cores()):
        yield Check(
            "warn", f"torch has {torch.get_num_threads()} threads on {cores} cores; set OMP_NUM_THREADS={cores}"
        )
    if not torch.cuda.is_available():
        from perada.core.speed import product_seconds

        times = product_seconds(torch.float32) / product_seconds(torch.bfloat16)
        advice = "bf16-mixed may pay" if times > 1 else "stay with precision 32-true"
        yield Check("pass", f"a product of matrices in bfloat16 is {times:.1f} times as fast as in float32: {advice}")
